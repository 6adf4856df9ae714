// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Auto is the value of a path that Open searches for.
const Auto = "auto"

// Options of a Node. Paths are the agent's unless they are called host paths.
type Options struct {
	// HostRoot is the mount of the host's root directory; "/" when empty.
	HostRoot string
	// DriverRoot is Auto (or empty), or the host path of the driver's root directory.
	DriverRoot string
	// DevRoot is Auto (or empty), or the host path of the directory whose dev/ has the device nodes.
	DevRoot string
	// Library is Auto (or empty) for the driver's own libnvidia-ml.so.1, or the path of another one.
	Library string
	// OpenLibrary replaces the library that was found, also after each driver upgrade. Nil opens the file. Tests and simulated
	// machines set it.
	OpenLibrary func() (gonvml.Interface, error)
	// SysfsRoot is the mount of sysfs; "/sys" when empty.
	SysfsRoot string
	// ProcRoot is the mount of proc; "/proc" when empty.
	ProcRoot string

	// HookPath is the host path of nvidia-cdi-hook. If it is empty, container edits have no hooks.
	HookPath string
	// DisabledHooks are hooks of nvidia-cdi-hook ("update-ldcache"), or "all".
	DisabledHooks []string

	// Interval is the time between scans; 4 s when zero, so that an administrator's change is noticed within 5 s.
	Interval time.Duration

	// patience is how long a GPU may take to answer; tests shorten it.
	patience time.Duration
}

// defaultPatience is longer than the initialisation of a GPU takes (some seconds without persistence mode).
const defaultPatience = 10 * time.Second

func (o Options) withDefaults() (Options, error) {
	o.HostRoot = cmp.Or(o.HostRoot, "/")
	o.DriverRoot = cmp.Or(o.DriverRoot, Auto)
	o.DevRoot = cmp.Or(o.DevRoot, Auto)
	o.Library = cmp.Or(o.Library, Auto)
	o.SysfsRoot = cmp.Or(o.SysfsRoot, "/sys")
	o.ProcRoot = cmp.Or(o.ProcRoot, "/proc")
	o.Interval = cmp.Or(o.Interval, 4*time.Second)
	o.patience = cmp.Or(o.patience, defaultPatience)
	return o, o.check()
}

func (o Options) check() error {
	var errs []error
	absolute := func(name, path string) {
		if !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s %q: not an absolute path", name, path))
		}
	}
	absolute("host root", o.HostRoot)
	absolute("sysfs root", o.SysfsRoot)
	absolute("proc root", o.ProcRoot)
	if o.DriverRoot != Auto {
		absolute("driver root", o.DriverRoot)
	}
	if o.DevRoot != Auto {
		absolute("device root", o.DevRoot)
	}
	if o.Library != Auto {
		absolute("NVML library", o.Library)
	}
	if o.HookPath != "" {
		absolute("CDI hook", o.HookPath)
	}
	if o.Interval < 0 {
		errs = append(errs, fmt.Errorf("scan interval %s: negative", o.Interval))
	}
	return errors.Join(errs...)
}

// onHost returns the agent's path of a host path.
func (o Options) onHost(path string) string { return filepath.Join(o.HostRoot, path) }
