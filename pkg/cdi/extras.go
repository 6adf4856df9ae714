// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// extraClass is the class of devices that are no hardware but what containers need beside it. It is not "claim", which NVIDIA's
// DRA driver has, whose files may still be there, and not Options.Class, the names of which are UUIDs (Void).
const extraClass = "sharing"

// extra is the file of one such device.
type extra struct {
	file ownedFile
	want []byte
}

// Describe makes sure that a device which gives a container these edits and nothing else is on disk, in a file of its own, and
// returns its qualified name. It stays there, whoever removes it, until Forget. Idempotent; two stats when all is well. Called by
// the keeper of what containers share.
func (s *Specs) WriteClientDevice(name string, edits specs.ContainerEdits) (qualified string, err error) {
	if err := parser.ValidateDeviceName(name); err != nil {
		return "", fmt.Errorf("describe CDI device: %w", err)
	}
	want, err := encode(s.options.Vendor+"/"+extraClass, specs.ContainerEdits{}, []specs.Device{{Name: name, ContainerEdits: edits}})
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.extras[name]
	if e == nil || !bytes.Equal(e.want, want) {
		e = &extra{want: want}
		e.file.path = s.extraPath(name)
	}
	if err := e.repair(); err != nil {
		return "", err
	}
	s.extras[name] = e
	return parser.QualifiedName(s.options.Vendor, extraClass, name), nil
}

// Forget removes a device that Describe has made, and its variants: those whose names go on behind a dot. Idempotent, also after a
// restart.
func (s *Specs) RemoveClientDevices(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	variants, err := filepath.Glob(s.extraPath(name + ".*"))
	errs := []error{err}
	for _, path := range append(variants, s.extraPath(name)) {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			errs = append(errs, fmt.Errorf("remove CDI device: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	maps.DeleteFunc(s.extras, func(other string, _ *extra) bool { return other == name || variantOf(other) == name })
	return nil
}

// Variants are the devices that Forget would remove beside one, as they are on disk, whoever made them.
func (s *Specs) ClientDevices(name string) ([]string, error) {
	all := s.extraPath(name + ".*")
	paths, err := filepath.Glob(all)
	if err != nil {
		return nil, fmt.Errorf("list variants of CDI device %s: %w", name, err)
	}
	prefix, suffix, _ := strings.Cut(all, "*")
	for i, path := range paths {
		paths[i] = name + "." + strings.TrimSuffix(strings.TrimPrefix(path, prefix), suffix)
	}
	return paths, nil
}

// variantOf is the device that is forgotten with its variants.
func variantOf(name string) string {
	base, _, _ := strings.Cut(name, ".")
	return base
}

// Retain removes what Describe has made in an earlier process, apart from the named devices and their variants.
func (s *Specs) RetainClientDevices(names []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keep := map[string]bool{}
	for _, name := range slices.Concat(names, slices.Collect(maps.Keys(s.extras))) {
		keep[variantOf(name)] = true
	}
	all := ownedFile{path: s.extraPath("*")}
	prefix, _, _ := strings.Cut(all.path, "*")
	errs := []error{all.removeTemporaries()}
	paths, err := filepath.Glob(all.path)
	for _, path := range paths {
		if keep[variantOf(strings.TrimSuffix(strings.TrimPrefix(path, prefix), additionSuffix))] {
			continue
		}
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			errs = append(errs, fmt.Errorf("remove CDI device of an earlier process: %w", err))
		}
	}
	return errors.Join(append(errs, err)...)
}

func (s *Specs) extraPath(name string) string {
	return strings.TrimSuffix(s.file.path, s.options.Class+additionSuffix) + extraClass + "-" + name + additionSuffix
}

func (s *Specs) repairExtras() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, e := range s.extras {
		errs = append(errs, e.repair())
	}
	return errors.Join(errs...)
}

// repair puts the file back if somebody has removed or changed it.
func (e *extra) repair() error {
	if e.file.intact() {
		return nil
	}
	return e.file.replace(e.want, 0o644, validate)
}
