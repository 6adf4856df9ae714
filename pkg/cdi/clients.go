// SPDX-License-Identifier: Apache-2.0

package cdi

import (
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

// WriteClientDevice writes a CDI device with exactly these edits to a file of its own and returns its qualified name. Run
// restores the file until RemoveClientDevices. Idempotent; two stats if nothing changed. pkg/sharing calls it.
func (s *Specs) WriteClientDevice(name string, edits specs.ContainerEdits) (qualified string, err error) {
	if err := parser.ValidateDeviceName(name); err != nil {
		return "", fmt.Errorf("write client device: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	file := s.clients[name]
	if file == nil {
		file = newDeviceFile(clientClass, s.clientPath(name))
	}
	file.entry = specs.Device{Name: name, ContainerEdits: edits}
	if err := s.update(file); err != nil {
		return "", err
	}
	s.clients[name] = file
	return parser.QualifiedName(vendor, clientClass, s.names.Load().of(clientClass, name)), nil
}

// RemoveClientDevices removes the client device name, and all named name.<suffix>, also those of an earlier process. Idempotent.
func (s *Specs) RemoveClientDevices(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.removeClients(func(other string) bool { return other == name || withoutSuffix(other) == name })
}

// removeClients removes the client devices whose names match, also those of an earlier process. Under s.mu.
func (s *Specs) removeClients(match func(name string) bool) error {
	paths, err := filepath.Glob(s.clientPath("*"))
	errs := []error{err}
	for _, path := range paths {
		if !match(s.clientName(path)) {
			continue
		}
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			errs = append(errs, fmt.Errorf("remove client device: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	maps.DeleteFunc(s.clients, func(name string, _ *deviceFile) bool { return match(name) })
	return nil
}

// ClientDevices lists the client devices on disk that are named name.<suffix>, also those of an earlier process.
func (s *Specs) ClientDevices(name string) ([]string, error) {
	paths, err := filepath.Glob(s.clientPath(name + ".*"))
	if err != nil {
		return nil, fmt.Errorf("list client devices of %s: %w", name, err)
	}
	for i, path := range paths {
		paths[i] = s.clientName(path)
	}
	return paths, nil
}

// RetainClientDevices removes the client devices that an earlier process wrote, except the named ones and their name.<suffix>.
func (s *Specs) RetainClientDevices(names []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keep := map[string]bool{}
	for _, name := range slices.Concat(names, slices.Collect(maps.Keys(s.clients))) {
		keep[withoutSuffix(name)] = true
	}
	all := ownedFile{path: s.clientPath("*")}
	return errors.Join(all.removeTemporaries(), s.removeClients(func(name string) bool { return !keep[withoutSuffix(name)] }))
}

func withoutSuffix(name string) string {
	base, _, _ := strings.Cut(name, ".")
	return base
}

func (s *Specs) clientPath(name string) string { return s.path(clientClass + "-" + name) }

func (s *Specs) clientName(path string) string {
	return strings.TrimSuffix(strings.TrimPrefix(path, strings.TrimSuffix(s.clientPath(""), jsonSuffix)), jsonSuffix)
}
