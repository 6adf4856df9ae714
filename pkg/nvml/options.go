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

// Options say where the driver is. A path is the agent's unless it is called a host path.
type Options struct {
	// HostRoot is where the host's root directory is seen; "/" when empty.
	HostRoot string
	// DriverRoot is Auto (or empty), or the host path of the directory below which the driver is installed.
	DriverRoot string
	// DevRoot is Auto (or empty), or the host path of the directory whose dev/ holds the device nodes.
	DevRoot string
	// Library is Auto (or empty) for the driver's own libnvidia-ml.so.1, or the path of another one.
	Library string
	// OpenLibrary replaces the library that was found, also after each driver upgrade. Nil opens the file. Tests and simulated
	// machines set it.
	OpenLibrary func() (gonvml.Interface, error)
	// SysfsRoot is where sysfs is seen; "/sys" when empty.
	SysfsRoot string
	// ProcRoot is where proc is seen; "/proc" when empty.
	ProcRoot string

	// HookPath is the host path of nvidia-cdi-hook. Empty means that container edits carry no hooks.
	HookPath string
	// DisabledHooks are names as nvidia-cdi-hook has them ("update-ldcache"), or "all".
	DisabledHooks []string

	// Interval is the time between scans; 4 s when zero, so that what an administrator changes is known within 5 s.
	Interval time.Duration

	// patience is how long a GPU may take to answer; tests shorten it.
	patience time.Duration
}

// defaultPatience is beyond what a GPU takes that has to be initialised first (some seconds without persistence mode).
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

// onHost turns a host path into the path under which the agent sees it.
func (o Options) onHost(path string) string { return filepath.Join(o.HostRoot, path) }
