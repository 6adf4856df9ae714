// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// problems collects errors. Each names the flag, or the key in the file.
type problems []error

func (p *problems) add(at, format string, args ...any) {
	*p = append(*p, fmt.Errorf(at+": "+format, args...))
}

// name adds the errors that a validation function of k8s.io/apimachinery returned for a name.
func (p *problems) name(at, what, name string, wrong []string) {
	if len(wrong) > 0 {
		p.add(at, "%q is no %s: %s", name, what, strings.Join(wrong, "; "))
	}
}

// path requires an absolute path or one of the words.
func (p *problems) path(at, path string, words ...string) {
	if !filepath.IsAbs(path) && !slices.Contains(words, path) {
		p.add(at, "%q is not %s", path, strings.Join(append([]string{"an absolute path"}, words...), " or "))
	}
}

func oneOf[T ~string](p *problems, at string, value T, known ...T) {
	if !slices.Contains(known, value) {
		p.add(at, "%q is not one of %s", string(value), join(known))
	}
}

// driverName requires a name that the API accepts.
func (p *problems) driverName(name string) {
	wrong := validation.IsDNS1123Subdomain(name)
	if len(name) > validation.DNS1123LabelMaxLength {
		wrong = append(wrong, fmt.Sprintf("must be no more than %d characters", validation.DNS1123LabelMaxLength))
	}
	p.name("--driver-name", "driver name", name, wrong)
}

// resourceName requires a name that the API accepts.
func (p *problems) resourceName(name string) {
	if len(validation.IsQualifiedName(name)) > 0 || !strings.Contains(name, "/") {
		p.add("--resource-name", "%q is no extended resource name <domain>/<name>", name)
	}
}

func (c *Config) validate() error {
	var p problems
	if c.NodeName == "" {
		p.add("--node-name", "is required (the chart sets NODE_NAME)")
	} else {
		p.name("--node-name", "node name", c.NodeName, validation.IsDNS1123Subdomain(c.NodeName))
	}
	c.checkChoice(&p)
	oneOf(&p, "--unknown-config-keys", c.UnknownKeys, UnknownKeysError, UnknownKeysWarn)
	p.driverName(c.DriverName)
	p.resourceName(c.ResourceName)
	c.checkMode(&p)
	if c.Health != (HealthRule{}) {
		c.Health.check(&p, "tandem.health")
	}
	p.path("--kubelet-dir", c.KubeletDir)
	p.path("--run-dir", c.RunDir)
	p.path("--cdi-dir", c.CDIDir)
	p.path("--cgroup-root", c.CgroupRoot)
	p.path("--proc-root", c.ProcRoot)
	c.checkDriver(&p)
	for _, s := range c.DeviceListStrategies {
		if !slices.Contains(deviceListStrategies, s) {
			p.add("--device-list-strategy", "invalid strategy: %s (choose from %s)", s, strings.Join(deviceListStrategies, ", "))
		}
	}
	if !slices.Contains(device.MIGStrategies, c.MIGStrategy) {
		p.add("--mig-strategy", "unknown MIG strategy: %s (choose from %s)", c.MIGStrategy, join(device.MIGStrategies))
	}
	// NVIDIA's plugin knows one channel: others are for ComputeDomains.
	if len(c.IMEXChannels) > 0 && !slices.Equal(c.IMEXChannels, []int{0}) {
		p.add("imex.channelIDs", "must be [] or [0]; found %v", c.IMEXChannels)
	}
	oneOf(&p, "--device-id-strategy", c.DeviceIDStrategy, "uuid", "index")
	oneOf(&p, "--shared-devices-allocation-policy", c.AllocationPolicy, "distributed", "packed")
	c.checkConsumableShares(&p)
	return errors.Join(p...)
}

// checkDriver checks the settings that say where the driver is.
func (c *Config) checkDriver(p *problems) {
	p.path("--sysfs-root", c.SysfsRoot)
	p.path("--host-root", c.HostRoot)
	p.path("--driver-root", c.DriverRoot, "auto")
	p.path("--dev-root", c.DevRoot, "auto")
	oneOf(p, "--cdi-device-names", c.CDIDeviceNames, CDINamesAuto, CDINamesStable, CDINamesSecret)
	p.path("--cdi-hook", c.CDIHook, "install", "none")
	if !strings.HasPrefix(c.NVML, "simulated:") {
		p.path("--nvml", c.NVML, "auto", "simulated:<profile>")
	}
}

// CheckDirectories verifies that the node's directories exist.
func (c *Config) CheckDirectories() error {
	var p problems
	check := func(flag, dir string) {
		info, err := os.Stat(dir)
		switch {
		case err != nil:
			p.add(flag, "%w (is it mounted into the agent's pod?)", err)
		case !info.IsDir():
			p.add(flag, "%s is not a directory", dir)
		}
	}
	check("--kubelet-dir", c.KubeletDir)
	check("--host-root", c.HostRoot)
	check("--cgroup-root", c.CgroupRoot)
	return errors.Join(p...)
}
