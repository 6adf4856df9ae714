// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"golang.org/x/sys/unix"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

// requireMknod skips where device nodes cannot be made, as in a user namespace.
func requireMknod(t *testing.T) {
	t.Helper()
	if err := unix.Mknod(filepath.Join(t.TempDir(), "node"), unix.S_IFCHR|0o600, int(unix.Mkdev(majorNVIDIA, 0))); err != nil {
		t.Skipf("device nodes cannot be made here: %v", err)
	}
}

func materialize(t *testing.T, dir, profile string, options MaterializeOptions) Profile {
	t.Helper()
	p, err := Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	if err := Materialize(dir, p, options); err != nil {
		t.Fatal(err)
	}
	return p.WithIdentity(options.Seed)
}

// lines is a logger for nvcdi that keeps what it is told.
type lines struct {
	mu       sync.Mutex
	warnings []string
}

func (l *lines) Warningf(format string, args ...any) { l.Warning(fmt.Sprintf(format, args...)) }
func (l *lines) Errorf(format string, args ...any)   { l.Warning(fmt.Sprintf(format, args...)) }
func (l *lines) Error(args ...any)                   { l.Warning(args...) }
func (l *lines) Debugf(string, ...any)               {}
func (l *lines) Infof(string, ...any)                {}
func (l *lines) Info(...any)                         {}
func (l *lines) Tracef(string, ...any)               {}
func (l *lines) Warning(args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.warnings = append(l.warnings, fmt.Sprint(args...))
}

type uuidNamer struct{}

func (uuidNamer) GetDeviceName(_ int, d nvcdi.UUIDer) (string, error)          { return d.GetUUID() }
func (uuidNamer) GetMigDeviceName(_ int, _ nvcdi.UUIDer, _ int, m nvcdi.UUIDer) (string, error) {
	return m.GetUUID()
}

func TestNVCDIAcceptsTheDriverRoot(t *testing.T) {
	requireMknod(t)
	dir := t.TempDir()
	p := materialize(t, dir, "h100x8", MaterializeOptions{Seed: "n1"})
	log := &lines{}
	root := filepath.Join(dir, DriverDir)
	lib, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml), nvcdi.WithNvmlLib(start(t, "h100x8", WithSeed("n1"))), nvcdi.WithLogger(log),
		nvcdi.WithDriverRoot(root), nvcdi.WithDevRoot(root), nvcdi.WithNVIDIACDIHookPath("/usr/bin/nvidia-cdi-hook"),
		nvcdi.WithDeviceNamers(uuidNamer{}),
	)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := lib.GetSpec()
	if err != nil {
		t.Fatal(err)
	}
	raw := spec.Raw()
	for i, d := range raw.Devices {
		t.Logf("%+v %+v", *d.ContainerEdits.DeviceNodes[0], *d.ContainerEdits.Hooks[0])
		_ = i
	}
	for _, d := range raw.ContainerEdits.DeviceNodes {
		t.Logf("%+v", *d)
	}
	for _, m := range raw.ContainerEdits.Mounts {
		t.Logf("%+v", *m)
	}
	for _, h := range raw.ContainerEdits.Hooks {
		t.Logf("%+v", *h)
	}
	for _, w := range log.warnings {
		t.Log("WARN ", w)
	}
	_ = p
	_ = slices.Contains[[]string]
	_ = strings.Contains
	_ = os.Stat
	_ = deviceattribute.GetPCIBusIDAttribute
}
