// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"sigs.k8s.io/yaml"
)

// Where Materialize puts things below the machine's directory.
const (
	// DriverDir is the driver root: libraries, binaries, firmware, and dev with the device nodes.
	DriverDir = "driver"
	// SysfsDir is a sysfs with the machine's PCI devices, CPUs and NUMA nodes. SysfsDir/devices/system/node, bind-mounted
	// over the real one, shows kubelet the machine's NUMA nodes.
	SysfsDir = "sys"
	// ProfileFile holds the profile with every UUID and minor filled in; Load reads it.
	ProfileFile = "profile.yaml"
)

// MaterializeOptions tune Materialize; the zero value is a privileged simulation of this machine's architecture.
type MaterializeOptions struct {
	// Seed is that of WithSeed.
	Seed string
	// PlainDeviceFiles makes regular files instead of device nodes, for users that may not create nodes. A program that checks
	// the file type does not take them for devices; nvcdi leaves them out.
	PlainDeviceFiles bool
	// HostSysfs and HostProc are where the CPUs, the memory and the device numbers in use are read; "/sys" and "/proc"
	// where they are empty.
	HostSysfs, HostProc string
	// Architecture is Go's name of the driver's architecture, "amd64" or "arm64"; this program's where it is empty.
	Architecture string
	// Programs is the path of a program that cmd/simulated-driver was compiled to, for nvidia-smi and MPS to work: static, of the
	// driver's architecture. Where it is empty, they only say what they are.
	Programs string
}

func (o MaterializeOptions) withDefaults() MaterializeOptions {
	o.HostSysfs = orElse(o.HostSysfs, "/sys")
	o.HostProc = orElse(o.HostProc, "/proc")
	o.Architecture = orElse(o.Architecture, runtime.GOARCH)
	return o
}

func orElse(value, fallback string) string {
	if value == "" {
		return fallback
	}
	return value
}

// Materialize makes the files of a simulated machine below dir: DriverDir, SysfsDir, ProcDir, ProfileFile, MIGDir,
// KernelLogFile, and FaultsFile unless it is there. It is idempotent: what is right already is left alone, what is missing or different is put
// right one file at a time, and GPUs and driver versions of an earlier profile are removed, so a run that was cut short is
// completed by the next. Device nodes need the privilege to make them.
func Materialize(dir string, profile Profile, options MaterializeOptions) error {
	options = options.withDefaults()
	profile = profile.WithIdentity(options.Seed)
	wanted, err := files(profile, options)
	if err != nil {
		return fmt.Errorf("materialize %s in %s: %w", profile.Name, dir, err)
	}
	if err := forget(dir, wanted); err != nil {
		return fmt.Errorf("materialize %s in %s: %w", profile.Name, dir, err)
	}
	for _, f := range wanted {
		if err := f.ensure(dir); err != nil {
			return fmt.Errorf("materialize %s in %s: %w", profile.Name, dir, err)
		}
	}
	if err := prune(dir, wanted); err != nil {
		return fmt.Errorf("materialize %s in %s: %w", profile.Name, dir, err)
	}
	if err := boot(dir, profile); err != nil {
		return fmt.Errorf("materialize %s in %s: %w", profile.Name, dir, err)
	}
	return nil
}

// boot begins the state of MIG and the kernel's log, unless they are of this boot.
func boot(dir string, profile Profile) error {
	store := newMIGStore(dir, bootID(), initialMIG(profile), func(error) {})
	_, err := os.Stat(filepath.Join(dir, KernelLogFile))
	if err == nil && store.begun() {
		return nil
	}
	return errors.Join(store.begin(), bootKernelLog(dir, profile))
}

func files(profile Profile, options MaterializeOptions) ([]file, error) {
	host, err := readHost(options)
	if err != nil {
		return nil, err
	}
	resolved, err := yaml.Marshal(profile)
	if err != nil {
		return nil, err
	}
	driver, err := driverFiles(profile, options.Architecture, options.Programs)
	if err != nil {
		return nil, err
	}
	numbers := takeMajors(host.freeMajors)
	cpus := divide(host.cpus, profile.NUMANodes)
	return slices.Concat(
		driver,
		deviceFiles(profile, numbers, options.PlainDeviceFiles),
		pciFiles(profile, cpus),
		nodeFiles(cpus, host.memoryKiB),
		[]file{
			devicesFile(host.devices, profile, numbers),
			{path: ProfileFile, content: resolved, mode: 0o644},
			{path: filepath.Join(MIGDir, "lock"), mode: 0o644, keep: true},
			{path: FaultsFile, content: []byte("# Faults of this machine, obeyed as soon as they are written.\n"), mode: 0o644, keep: true},
		},
	), nil
}

// forget removes the state of MIG where another profile was in force: it is that of other GPUs.
func forget(dir string, wanted []file) error {
	for _, f := range wanted {
		if f.path != ProfileFile || f.right(filepath.Join(dir, f.path)) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, MIGDir, MIGStateFile)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// stale are the places where a machine made of another profile leaves files that this one's must not be found beside;
// what is below a place is looked through as well.
var stale = []string{
	DriverDir + "/dev/nvidia*",
	DriverDir + "/dev/gdrdrv",
	DriverDir + "/dev/infiniband",
	ProcDir + "/driver",
	DriverDir + "/usr/lib/*/*.so*",
	DriverDir + "/usr/lib/*/vdpau/*.so*",
	DriverDir + "/lib/firmware/nvidia/*",
	SysfsDir + "/bus/pci",
	SysfsDir + "/devices/pci*",
	SysfsDir + "/devices/system/cpu",
	SysfsDir + "/devices/system/node",
}

func prune(dir string, wanted []file) error {
	known := map[string]bool{}
	for _, f := range wanted {
		for path := f.path; path != "."; path = filepath.Dir(path) {
			known[path] = true
		}
	}
	for _, pattern := range stale {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return err
		}
		for _, path := range found {
			if err := pruneBelow(dir, path, known); err != nil {
				return err
			}
		}
	}
	return nil
}

func pruneBelow(dir, top string, known map[string]bool) error {
	return filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, path)
		if err != nil || known[relative] {
			return err
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
		if entry.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
}
