// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// uuidAnnotation of an entry with a secret name says which device it is. CDI has annotations since 0.6.0.
const uuidAnnotation = "tandem-gpu.dev/uuid"

// names are the names of devices in spec files. A stable name is the device's UUID, or the name of a client device: everyone can know it.
// A secret name is computed with a key that only this node has, so that kubelet knows it from an answer of Tandem and from nowhere else.
// It is immutable.
type names struct {
	// Secret is whether devices have secret names now.
	Secret bool `json:"secret"`
	// Key is the same for all secret names of the node, over restarts and reboots: kubelet keeps answers as long. Empty until the node has
	// secret names for the first time.
	Key []byte `json:"key"`
	// Former are the devices that also have a name of the other kind, because a holder may have got that one. While AllFormer is set all
	// devices and client devices have both.
	Former    []string `json:"former,omitempty"`
	AllFormer bool     `json:"allFormer,omitempty"`
}

const (
	keySize         = 32
	migPrefix       = "MIG-"
	qualifiedPrefix = vendor + "/" + class + "="
	// AnyPartition in the answer of Options.InUse means that some partition is in use, and not known which.
	AnyPartition = "MIG-*"
)

// secretName is what names.secret returns for a GPU or partition.
var secretName = regexp.MustCompile("^(GPU|MIG)-[0-9a-f]{32}$")

// readNames returns stable names if there is no file. A file that cannot be read is kept under another name: the agent must serve, even if
// containers of running pods that have secret names cannot start again.
func readNames(path string) (*names, error) {
	n := &names{}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err == nil {
		err = json.Unmarshal(data, n)
	}
	if err == nil && len(n.Key) != keySize {
		err = fmt.Errorf("key: has %d bytes, and %d are needed", len(n.Key), keySize)
	}
	if err == nil {
		return n, nil
	}
	return &names{}, errors.Join(fmt.Errorf("read %s: %w", path, err), os.Rename(path, path+".unreadable"))
}

// save returns once the names are on the disk, also for a machine that crashes.
func (n *names) save(path string) error {
	if path == "" {
		return errors.New("save the names of CDI devices: Options.NamesFile is empty")
	}
	data, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("encode the names of CDI devices: %w", err)
	}
	f := ownedFile{path: path}
	err = f.replace(io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), 0o600, nil)
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("save the names of CDI devices in %s: %w", path, err)
	}
	return nil
}

// syncDir makes the names of files in a directory last through a crash of the machine.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// switched returns the names with the other kind for new holders. All devices keep their former names until withoutUnused drops them.
func (n *names) switched() *names {
	next := &names{Secret: !n.Secret, Key: n.Key, AllFormer: true}
	if len(next.Key) == 0 {
		next.Key = make([]byte, keySize)
		_, _ = rand.Read(next.Key) // it returns no error (crypto/rand)
	}
	return next
}

func (n *names) equal(other *names) bool {
	return n.Secret == other.Secret && bytes.Equal(n.Key, other.Key) && n.AllFormer == other.AllFormer && slices.Equal(n.Former, other.Former)
}

// hasFormer reports whether a device may have two names.
func (n *names) hasFormer() bool { return n.AllFormer || len(n.Former) > 0 }

// withoutUnused drops the former names that are not in use. known are devices with an entry. used has UUIDs and qualified names.
func (n *names) withoutUnused(known []string, used map[string]bool) *names {
	candidates := n.Former
	if n.AllFormer {
		candidates = slices.Clone(known)
		for name := range used {
			uuid, isDevice := strings.CutPrefix(name, qualifiedPrefix)
			if !isDevice && strings.Contains(name, "=") || name == AnyPartition {
				continue
			}
			if secretName.MatchString(uuid) {
				if !slices.ContainsFunc(known, func(of string) bool { return n.secret(class, of) == uuid }) {
					return n // of a device that is not known yet
				}
				continue
			}
			candidates = append(candidates, uuid)
		}
	}
	next := &names{Secret: n.Secret, Key: n.Key}
	for _, uuid := range slices.Compact(slices.Sorted(slices.Values(candidates))) {
		if used[uuid] || used[qualifiedPrefix+uuid] || used[qualifiedPrefix+n.secret(class, uuid)] || used[AnyPartition] && strings.HasPrefix(uuid, migPrefix) {
			next.Former = append(next.Former, uuid)
		}
	}
	return next
}

// with returns the names with former ones for a device that was found under a name of the other kind.
func (n *names) with(uuid string) *names {
	if n.AllFormer || slices.Contains(n.Former, uuid) {
		return n
	}
	next := *n
	next.Former = append(slices.Clone(n.Former), uuid)
	return &next
}

// mode is the mode of spec files. Every user of the host may read a file only if all its names are stable.
func (n *names) mode() fs.FileMode {
	if n.Secret || n.hasFormer() {
		return 0o600
	}
	return 0o644
}

// of returns a device's name for new holders.
func (n *names) of(kind, stable string) string {
	if !n.Secret {
		return stable
	}
	return n.secret(kind, stable)
}

// secret keeps the kind of UUID, by which AddPlaceholders knows a partition.
func (n *names) secret(kind, stable string) string {
	sum := hmac.New(sha256.New, n.Key)
	_, _ = sum.Write([]byte(stable)) // it returns no error (package hash)
	name := hex.EncodeToString(sum.Sum(nil)[:16])
	if prefix, _, found := strings.Cut(stable, "-"); found && kind == class {
		return prefix + "-" + name
	}
	return name
}

// entries returns the entries of a spec file for devices with stable names, sorted by device.
func (n *names) entries(kind string, devices []specs.Device) (entries []specs.Device) {
	for _, d := range devices {
		former := n.AllFormer || slices.Contains(n.Former, d.Name) || kind == clientClass && n.hasFormer()
		if !n.Secret || former {
			entries = append(entries, d)
		}
		if n.Secret || former {
			entry := d
			entry.Name, entry.Annotations = n.secret(kind, d.Name), map[string]string{uuidAnnotation: d.Name}
			entries = append(entries, entry)
		}
	}
	return entries
}

// devicesOf is the inverse of entries, for GPUs and partitions.
func devicesOf(entries []specs.Device) (devices []specs.Device) {
	for _, d := range entries {
		if uuid := d.Annotations[uuidAnnotation]; uuid != "" {
			d.Name, d.Annotations = uuid, nil
		}
		if !hasName(devices, d.Name) {
			devices = append(devices, d)
		}
	}
	return devices
}

// QualifiedName is the name of a GPU or partition that a container runtime gets. Call it once the device is held: a device that is not held
// loses its former name after the kind of names has changed.
func (s *Specs) QualifiedName(uuid string) string {
	return qualifiedPrefix + s.names.Load().of(class, uuid)
}

// UseSecretNames selects secret or stable names. Run first writes them to the files, and tries again until it can. Answers have them afterwards.
// A device that is in use keeps its former name as well, until it is not. Idempotent. It does not wait. Secret names
// need Options.NamesFile and Options.InUse.
func (s *Specs) UseSecretNames(secret bool) {
	s.wantsSecret.Store(&secret)
	s.wake()
}

// usedNames returns what is in use; nil if no device has a former name, if it is not known, or if it is not time to look again. Only Run calls
// it, not under s.mu.
func (s *Specs) usedNames() map[string]bool {
	of := s.names.Load()
	if !of.hasFormer() || s.options.InUse == nil || of == s.lookedFor && time.Since(s.lookedAt) < unusedIntervals*s.options.Interval {
		return nil
	}
	s.lookedFor, s.lookedAt = of, time.Now()
	return s.options.InUse()
}

// unusedIntervals is how many intervals pass between two looks for former names that nothing uses: a pod can run for months.
const unusedIntervals = 5

// settleNames changes the names in the files if UseSecretNames asks for it, or a former name is not in use any more. Answers have the new names
// afterwards. Under s.mu.
func (s *Specs) settleNames(used map[string]bool) error {
	next := s.written
	if s.names.Load() == s.written { // nothing is left to rename
		switch secret := s.wantsSecret.Load(); {
		case secret != nil && *secret != s.written.Secret:
			next = s.written.switched()
		case used != nil:
			next = s.written.withoutUnused(s.uuids(), used)
		}
	}
	if s.unsaved || !next.equal(s.written) {
		if err := next.save(s.options.NamesFile); err != nil {
			return err
		}
		s.written, s.unsaved = next, false
		s.wake() // it is time to look what is in use
	}
	if s.names.Load() == s.written {
		return nil
	}
	if err := s.rename(); err != nil {
		return err
	}
	s.names.Store(s.written)
	return nil
}

// uuids returns the devices that have an entry. Under s.mu.
func (s *Specs) uuids() []string {
	all := slices.Sorted(maps.Keys(s.partitions))
	for _, d := range s.devices {
		all = append(all, d.Name)
	}
	return all
}

// loadNames reads the names of an earlier process. entries are those of the files. Where they, or kubelet, have a name of the other kind that is
// not expected, another version of Tandem has served the node meanwhile. Under s.mu.
func (s *Specs) loadNames(entries []specs.Device) {
	saved, err := readNames(s.options.NamesFile)
	lost := err != nil || len(saved.Key) == 0 && slices.ContainsFunc(entries, func(d specs.Device) bool { return d.Annotations[uuidAnnotation] != "" })
	if lost {
		klog.Background().Error(err, "The secret names of CDI devices are lost: containers of running pods that have one cannot start again. Replace these pods",
			"path", s.options.NamesFile)
	}
	if len(saved.Key) == 0 {
		return
	}
	n, hasName := saved, map[string]bool{}
	for _, d := range entries {
		uuid := d.Annotations[uuidAnnotation]
		hasName[d.Name] = true
		if isSecret := uuid != ""; isSecret != n.Secret {
			n = n.with(cmp.Or(uuid, d.Name))
		}
	}
	for _, name := range s.kept {
		switch isSecret := secretName.MatchString(name); {
		case isSecret && !n.Secret:
			n = &names{Secret: n.Secret, Key: n.Key, AllFormer: true}
		case !isSecret && n.Secret:
			n = n.with(name)
		}
	}
	s.written, s.unsaved = n, !n.equal(saved)
	s.names.Store(n)
	if slices.ContainsFunc(devicesOf(entries), func(d specs.Device) bool { return !hasName[n.of(class, d.Name)] }) {
		// The earlier process ended before it had renamed the files: answer with the names that they have, until Run has renamed them.
		s.names.Store(&names{Secret: !n.Secret, Key: n.Key, AllFormer: true})
	}
}

// rename writes the names of s.written to all files, apart from client devices that an earlier process wrote and this one has not asked for yet.
// Under s.mu.
func (s *Specs) rename() error {
	var errs []error
	if s.main.want != nil {
		errs = append(errs, s.write(s.common, s.devices))
	}
	return errors.Join(append(errs, each(s.partitions, s.update), each(s.clients, s.update))...)
}
