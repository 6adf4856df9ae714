// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
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
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
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

const keySize = 32

// readNames returns stable names if there is no file.
func readNames(path string) (*names, error) {
	n := &names{}
	data, err := os.ReadFile(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err == nil {
		err = json.Unmarshal(data, n)
	}
	if err == nil && len(n.Key) != keySize {
		err = fmt.Errorf("key: has %d bytes, and %d are needed", len(n.Key), keySize)
	}
	if err != nil {
		return nil, fmt.Errorf("read the names of CDI devices from %s: %w: restore the file, or end all pods with GPUs on the node and remove it",
			path, err)
	}
	return n, nil
}

// save returns once the names are on the disk, also for a machine that crashes.
func (n *names) save(path string) error {
	if path == "" {
		return errors.New("save the names of CDI devices: there is no file for them")
	}
	data, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("encode the names of CDI devices: %w", err)
	}
	f := ownedFile{path: path}
	if err := f.replace(io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), 0o600, nil); err != nil {
		return fmt.Errorf("save the names of CDI devices in %s: %w", path, err)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("save the names of CDI devices in %s: %w", path, err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("save the names of CDI devices in %s: %w", path, err)
	}
	return nil
}

// switched returns the names with the other kind for new holders. All devices keep their former names until keep drops them.
func (n *names) switched() *names {
	next := &names{Secret: !n.Secret, Key: n.Key, AllFormer: true}
	if len(next.Key) == 0 {
		next.Key = newKey()
	}
	return next
}

func newKey() []byte {
	key := make([]byte, keySize)
	_, _ = rand.Read(key) // it returns no error (crypto/rand)
	return key
}

func (n *names) equal(other *names) bool {
	return n.Secret == other.Secret && bytes.Equal(n.Key, other.Key) && n.AllFormer == other.AllFormer && slices.Equal(n.Former, other.Former)
}

// hasFormer reports whether a device may have two names.
func (n *names) hasFormer() bool { return n.AllFormer || len(n.Former) > 0 }

// keep drops the former names of those devices that are not in use.
func (n *names) keep(uuids []string, used map[string]bool) *names {
	next := &names{Secret: n.Secret, Key: n.Key}
	for _, uuid := range uuids {
		isUsed := used[uuid] || used[parser.QualifiedName(vendor, class, uuid)] || used[parser.QualifiedName(vendor, class, n.secret(class, uuid))]
		if isUsed && (n.AllFormer || slices.Contains(n.Former, uuid)) {
			next.Former = append(next.Former, uuid)
		}
	}
	return next
}

// mode is that of spec files. Secret names are not for every user of the host.
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
	_, _ = sum.Write([]byte(kind + "=" + stable)) // it returns no error (package hash)
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

// devices is the inverse of entries, for GPUs and partitions.
func (n *names) devices(entries []specs.Device) (devices []specs.Device) {
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
	return parser.QualifiedName(vendor, class, s.names.Load().of(class, uuid))
}

// UseSecretNames selects secret or stable names for the answers from some time after the call on: Run writes them to the files, and tries
// again until it can. A device that is in use keeps its former name as well, until it is not. Idempotent. It does not wait. Secret names
// need Options.NamesFile and Options.InUse.
func (s *Specs) UseSecretNames(secret bool) {
	s.wantsSecret.Store(&secret)
	s.wake()
}

// usedNames returns what is in use, and the names to which that applies; nil if no device has a former name, or it is not known. Not under
// s.mu.
func (s *Specs) usedNames() (of *names, used map[string]bool) {
	of = s.names.Load()
	if !of.hasFormer() || s.options.InUse == nil {
		return nil, nil
	}
	return of, s.options.InUse()
}

// settleNames changes the names in the files if UseSecretNames asks for it, or a device with a former name is not in use any more. Answers have
// the new names afterwards. Under s.mu.
func (s *Specs) settleNames(of *names, used map[string]bool) error {
	now := s.names.Load()
	if now == s.written {
		next := now
		switch secret := s.wantsSecret.Load(); {
		case secret != nil && *secret != now.Secret:
			next = now.switched()
		case used != nil && of == now && s.main.want != nil:
			next = now.keep(s.uuids(), used)
		}
		if next.equal(now) {
			return nil
		}
		if err := next.save(s.options.NamesFile); err != nil {
			return err
		}
		s.written = next
	}
	if err := s.rename(); err != nil {
		return err
	}
	s.names.Store(s.written)
	return nil
}

// loadNames reads the names of an earlier process. Under s.mu.
func (s *Specs) loadNames() error {
	n, err := readNames(s.options.NamesFile)
	if err == nil {
		s.written = n
		s.names.Store(n)
	}
	return err
}

// uuids returns the devices that have an entry. Under s.mu.
func (s *Specs) uuids() []string {
	all := slices.Sorted(maps.Keys(s.partitions))
	for _, d := range s.devices {
		all = append(all, d.Name)
	}
	return all
}

// renew takes another key where nothing is in use, so that a name that became known does not stay valid for years. Under s.mu.
func (s *Specs) renew(used map[string]bool) error {
	now := s.names.Load()
	if used == nil || len(used) > 0 || !now.Secret {
		return nil
	}
	next := &names{Secret: true, Key: newKey()}
	if err := next.save(s.options.NamesFile); err != nil {
		return err
	}
	s.written = next
	s.names.Store(next)
	return s.rename()
}

// rename writes the names of s.written to all files. Under s.mu.
func (s *Specs) rename() error {
	var errs []error
	if s.main.want != nil {
		errs = append(errs, s.write(s.common, s.devices))
	}
	for _, uuid := range slices.Sorted(maps.Keys(s.partitions)) {
		errs = append(errs, s.update(s.partitions[uuid]))
	}
	for _, name := range slices.Sorted(maps.Keys(s.clients)) {
		errs = append(errs, s.updateClient(name, s.clients[name]))
	}
	return errors.Join(errs...)
}
