// SPDX-License-Identifier: Apache-2.0

// Package config turns defaults, the node configuration file, the environment, flags and the node's label into one validated
// Config, in that order of growing precedence. It reads settings and does nothing with them.
package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Config of the node agent. Paths are as the agent sees them unless they say otherwise.
type Config struct {
	ConfigFile string
	NodeName   string
	Kubeconfig string
	Mode       Mode
	Devices    []DeviceRule
	// Strict has an effect in ModeDual only: the scheduler binds a pod when the node has reserved its devices.
	Strict bool

	DriverName   string
	ResourceName string
	// MIGStrategy is how limits see partitions, as NVIDIA's device plugin has it.
	MIGStrategy device.MIGStrategy

	KubeletDir string
	RunDir     string
	CDIDir     string
	CgroupRoot string
	SysfsRoot  string
	// HostRoot is where the host's root is seen.
	HostRoot string
	// DriverRoot and DevRoot are "auto" or paths on the host.
	DriverRoot string
	DevRoot    string
	// NVML is "auto", the path of a libnvidia-ml.so.1, or "simulated:<profile>".
	NVML string
	// CDIHook is "install", "none" or the absolute path of a nvidia-cdi-hook on the host.
	CDIHook       string
	CDIHookSource string

	DeviceListStrategies []string
	PassDeviceSpecs      bool
	DeviceIDStrategy     string
	CDIAnnotationPrefix  string
	// AllocationPolicy is from which GPU limits get partitions first.
	AllocationPolicy string
	// Sharing is for the GPUs that no rule of Devices speaks of.
	Sharing NodeSharing
	// FailRequestsGreaterThanOne refuses limits that ask for more than one replica.
	FailRequestsGreaterThanOne bool

	HTTPEndpoint string
	Verbosity    int
}

// Defaults are the settings of a node about which nothing was said.
func Defaults() Config {
	return Config{
		Mode:                 ModeDual,
		DriverName:           "gpu.nvidia.com",
		ResourceName:         "nvidia.com/gpu",
		MIGStrategy:          device.MIGStrategyNone,
		KubeletDir:           "/var/lib/kubelet",
		RunDir:               "/run/tandem",
		CDIDir:               "/var/run/cdi",
		CgroupRoot:           "/sys/fs/cgroup",
		SysfsRoot:            "/sys",
		HostRoot:             "/",
		DriverRoot:           "auto",
		DevRoot:              "auto",
		NVML:                 "auto",
		CDIHook:              "install",
		CDIHookSource:        "/usr/bin/nvidia-cdi-hook",
		DeviceListStrategies: []string{"cdi-cri"},
		DeviceIDStrategy:     "uuid",
		CDIAnnotationPrefix:  "cdi.k8s.io/",
		AllocationPolicy:     "distributed",
		HTTPEndpoint:         ":8080",
	}
}

// setting is one thing that flags and the environment can say.
type setting struct {
	flag string
	// env names besides the flag's own in upper snake case.
	env   []string
	usage string
	value flag.Value
}

type text struct{ target *string }

func (t text) String() string {
	if t.target == nil {
		return ""
	}
	return *t.target
}
func (t text) Set(s string) error { *t.target = s; return nil }

type truth struct{ target *bool }

func (b truth) String() string {
	if b.target == nil {
		return ""
	}
	return strconv.FormatBool(*b.target)
}
func (b truth) IsBoolFlag() bool { return true }
func (b truth) Set(s string) error {
	value, err := strconv.ParseBool(s)
	if err != nil {
		return errors.New("want true or false")
	}
	*b.target = value
	return nil
}

type number struct{ target *int }

func (n number) String() string {
	if n.target == nil {
		return ""
	}
	return strconv.Itoa(*n.target)
}
func (n number) Set(s string) error {
	value, err := strconv.Atoi(s)
	if err != nil {
		return errors.New("want a number")
	}
	*n.target = value
	return nil
}

type list struct{ target *[]string }

func (l list) String() string {
	if l.target == nil {
		return ""
	}
	return strings.Join(*l.target, ",")
}
func (l list) Set(s string) error {
	*l.target = nil
	for item := range strings.SplitSeq(s, ",") {
		*l.target = append(*l.target, strings.TrimSpace(item))
	}
	return nil
}

func (c *Config) settings() []setting {
	return []setting{
		{"config", []string{"CONFIG_FILE"}, "node configuration `file` (version: v1)", text{&c.ConfigFile}},
		{"node-name", nil, "`name` of this node", text{&c.NodeName}},
		{"kubeconfig", nil, "kubeconfig `file`; empty inside a cluster", text{&c.Kubeconfig}},
		{"mode", nil, "`mode` of the node: " + join(Modes) + "; the node's label " + ModeLabel + " overrides it", text{(*string)(&c.Mode)}},
		{"strict", nil, "in mode Dual, let the scheduler wait until the node has reserved what it allocated (Kubernetes 1.36, up to 5 s a pod)", truth{&c.Strict}},
		{"driver-name", nil, "DRA driver `name`", text{&c.DriverName}},
		{"resource-name", nil, "extended resource `name` of whole GPUs", text{&c.ResourceName}},
		{"mig-strategy", nil, "how limits get MIG partitions: `strategy` none, single or mixed", text{(*string)(&c.MIGStrategy)}},
		{"kubelet-dir", nil, "kubelet's root `directory`", text{&c.KubeletDir}},
		{"run-dir", nil, "`directory` of the ledger, on a tmpfs that ends with the boot", text{&c.RunDir}},
		{"cdi-dir", nil, "`directory` for CDI specs", text{&c.CDIDir}},
		{"cgroup-root", nil, "`directory` where the host's cgroup file systems are mounted", text{&c.CgroupRoot}},
		{"sysfs-root", nil, "`directory` of sysfs", text{&c.SysfsRoot}},
		{"host-root", nil, "`directory` where the host's root is seen", text{&c.HostRoot}},
		{"driver-root", []string{"NVIDIA_DRIVER_ROOT"}, "`path` of the NVIDIA driver on the host, or auto", text{&c.DriverRoot}},
		{"dev-root", []string{"NVIDIA_DEV_ROOT"}, "`path` on the host below which dev/nvidia* are, or auto", text{&c.DevRoot}},
		{"nvml", nil, "auto, the `path` of a libnvidia-ml.so.1, or simulated:<profile>", text{&c.NVML}},
		{"cdi-hook", []string{"NVIDIA_CDI_HOOK_PATH"}, "install, none, or the `path` of a nvidia-cdi-hook on the host", text{&c.CDIHook}},
		{"cdi-hook-source", nil, "`path` of the nvidia-cdi-hook to install", text{&c.CDIHookSource}},
		{"device-list-strategy", nil, "how limits get their GPUs: `list` of cdi-cri, cdi-annotations, envvar, volume-mounts", list{&c.DeviceListStrategies}},
		{"pass-device-specs", nil, "also answer limits with device nodes, which survives CPU Manager's updates without CDI", truth{&c.PassDeviceSpecs}},
		{"device-id-strategy", nil, "`kind` of ID in what limits see: uuid or index", text{&c.DeviceIDStrategy}},
		{"cdi-annotation-prefix", nil, "annotation `prefix` for cdi-annotations", text{&c.CDIAnnotationPrefix}},
		{"shared-devices-allocation-policy", nil, "`policy` by which limits get partitions: distributed over the GPUs, or packed", text{&c.AllocationPolicy}},
		{"http-endpoint", nil, "`address` of /healthz, /readyz and /metrics; empty for none", text{&c.HTTPEndpoint}},
		{"v", []string{"LOG_VERBOSITY"}, "log verbosity `level`", number{&c.Verbosity}},
	}
}

func (s setting) environment() []string {
	if s.flag == "v" {
		return s.env
	}
	return append([]string{strings.ToUpper(strings.ReplaceAll(s.flag, "-", "_"))}, s.env...)
}

// Load reads all sources and validates the outcome. Usage goes to stderr when the flags are wrong or -h asks for it
// (flag.ErrHelp).
func Load(args []string, lookupEnv func(string) (string, bool), stderr io.Writer) (Config, error) {
	c := Defaults()
	// The first round finds the file; the second puts environment and flags above it.
	if err := c.apply(args, lookupEnv, stderr); err != nil {
		return Config{}, err
	}
	if c.ConfigFile != "" {
		file := c.ConfigFile
		c = Defaults()
		if err := c.loadFile(file); err != nil {
			return Config{}, err
		}
		if err := c.apply(args, lookupEnv, io.Discard); err != nil {
			return Config{}, err
		}
	}
	if err := c.validate(); err != nil {
		return Config{}, err
	}
	return c, nil
}

func (c *Config) apply(args []string, lookupEnv func(string) (string, bool), stderr io.Writer) error {
	return apply("kubelet-plugin", c.settings(), args, lookupEnv, stderr)
}

// apply sets what the environment and, above it, the flags of a program say.
func apply(program string, settings []setting, args []string, lookupEnv func(string) (string, bool), stderr io.Writer) error {
	flags := flag.NewFlagSet(program, flag.ContinueOnError)
	flags.SetOutput(stderr)
	for _, s := range settings {
		flags.Var(s.value, s.flag, s.usage+" (environment: "+strings.Join(s.environment(), ", ")+")")
		for _, name := range slices.Backward(s.environment()) {
			value, ok := lookupEnv(name)
			if !ok || value == "" {
				continue
			}
			if err := s.value.Set(value); err != nil {
				return fmt.Errorf("environment variable %s: %q: %w", name, value, err)
			}
		}
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return nil
}

var (
	deviceListStrategies = []string{"cdi-cri", "cdi-annotations", "envvar", "volume-mounts"}
	deviceIDStrategies   = []string{"uuid", "index"}
	allocationPolicies   = []string{"distributed", "packed"}
)

func (c *Config) validate() error {
	var errs []error
	complain := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	if c.NodeName == "" {
		complain("node-name", "is required (the chart sets NODE_NAME)")
	} else if problems := validation.IsDNS1123Subdomain(c.NodeName); len(problems) > 0 {
		complain("node-name", "%q is no node name: %s", c.NodeName, strings.Join(problems, "; "))
	}
	if problem := driverNameProblem(c.DriverName); problem != "" {
		complain("driver-name", "%s", problem)
	}
	if problem := resourceNameProblem(c.ResourceName); problem != "" {
		complain("resource-name", "%s", problem)
	}
	errs = append(errs, c.modeProblems()...)
	for _, p := range []struct{ flag, path string }{
		{"kubelet-dir", c.KubeletDir}, {"run-dir", c.RunDir}, {"cdi-dir", c.CDIDir}, {"cgroup-root", c.CgroupRoot},
		{"sysfs-root", c.SysfsRoot}, {"host-root", c.HostRoot},
	} {
		if !filepath.IsAbs(p.path) {
			complain(p.flag, "%q is not an absolute path", p.path)
		}
	}
	for _, p := range []struct{ flag, path string }{{"driver-root", c.DriverRoot}, {"dev-root", c.DevRoot}} {
		if p.path != "auto" && !filepath.IsAbs(p.path) {
			complain(p.flag, "%q is neither auto nor an absolute path", p.path)
		}
	}
	if c.NVML != "auto" && !filepath.IsAbs(c.NVML) && !strings.HasPrefix(c.NVML, "simulated:") {
		complain("nvml", "%q is neither auto, an absolute path nor simulated:<profile>", c.NVML)
	}
	if c.CDIHook != "install" && c.CDIHook != "none" && !filepath.IsAbs(c.CDIHook) {
		complain("cdi-hook", "%q is neither install, none nor an absolute path", c.CDIHook)
	}
	if len(c.DeviceListStrategies) == 0 {
		complain("device-list-strategy", "is empty; choose from %s", strings.Join(deviceListStrategies, ", "))
	}
	for _, s := range c.DeviceListStrategies {
		if !slices.Contains(deviceListStrategies, s) {
			complain("device-list-strategy", "invalid strategy: %s (choose from %s)", s, strings.Join(deviceListStrategies, ", "))
		}
	}
	if !slices.Contains(deviceIDStrategies, c.DeviceIDStrategy) {
		complain("device-id-strategy", "%q is not one of %s", c.DeviceIDStrategy, strings.Join(deviceIDStrategies, ", "))
	}
	if !slices.Contains(device.MIGStrategies, c.MIGStrategy) {
		complain("mig-strategy", "unknown MIG strategy: %s (choose from %s)", c.MIGStrategy, join(device.MIGStrategies))
	}
	if !slices.Contains(allocationPolicies, c.AllocationPolicy) {
		complain("shared-devices-allocation-policy", "%q is not one of %s", c.AllocationPolicy, strings.Join(allocationPolicies, ", "))
	}
	return errors.Join(errs...)
}

// driverNameProblem is empty for a name that the API takes.
func driverNameProblem(name string) string {
	problems := validation.IsDNS1123Subdomain(name)
	if len(name) > 63 {
		problems = append(problems, "must be no more than 63 characters")
	}
	if len(problems) == 0 {
		return ""
	}
	return fmt.Sprintf("%q is no driver name: %s", name, strings.Join(problems, "; "))
}

// resourceNameProblem is empty for a name that the API takes.
func resourceNameProblem(name string) string {
	if len(validation.IsQualifiedName(name)) == 0 && strings.Contains(name, "/") {
		return ""
	}
	return fmt.Sprintf("%q is no extended resource name <domain>/<name>", name)
}

// CheckDirectories verifies that what the node must provide is there.
func (c *Config) CheckDirectories() error {
	var errs []error
	for _, dir := range []struct{ flag, path string }{
		{"kubelet-dir", c.KubeletDir}, {"host-root", c.HostRoot}, {"cgroup-root", c.CgroupRoot},
	} {
		info, err := os.Stat(dir.path)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("--%s: %w (is it mounted into the agent's pod?)", dir.flag, err))
		case !info.IsDir():
			errs = append(errs, fmt.Errorf("--%s: %s is not a directory", dir.flag, dir.path))
		}
	}
	return errors.Join(errs...)
}
