// SPDX-License-Identifier: Apache-2.0

// Package config turns defaults, the node configuration file, the environment, flags and the node's label into one validated
// Config. Each source overrides those before it. The package reads settings and does not act on them.
package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Config of the node agent. Paths are those in the agent's container, unless the field's comment says "on the host".
type Config struct {
	ConfigFile string
	// ConfigDir has several configuration files, of which the node's label ConfigLabel selects one, or else DefaultConfig or the first of
	// FallbackStrategies that applies. ConfigName is the selected file's name; empty for none. Unchosen: no file was selected yet.
	ConfigDir          string
	DefaultConfig      string
	FallbackStrategies []string
	ConfigName         string
	Unchosen           bool
	// UnknownKeys says whether unknown keys in the configuration file are an error: UnknownKeysError or UnknownKeysWarn.
	UnknownKeys string
	// Unused are the settings that are accepted and have no effect, each with the reason: "flags.mpsRoot: ...". They are sorted.
	Unused   []string
	NodeName string
	// PodUID and PodName identify the agent's own pod; they are empty outside a pod. Namespace is that of the pod and of the node's NodeFeature.
	PodUID     string
	PodName    string
	Namespace  string
	Kubeconfig string
	Mode       Mode
	Devices    []DeviceRule
	// Strict makes the scheduler bind a pod only after the node has reserved its devices. It works in ModeDual only.
	Strict bool
	// Health is what to do about faults of the GPUs that no rule of Devices matches.
	Health       HealthRule
	HealthChecks HealthChecks
	// ResetGPUs makes the agent reset a GPU between two holders.
	ResetGPUs bool
	// MonitorNamespaces are those of pods whose processes may stay on a GPU between two holders.
	MonitorNamespaces []string
	// ExemptNamespaces are those that the chart's podPolicy exempts. Processes of their pods may stay as well.
	ExemptNamespaces []string

	DriverName   string
	ResourceName string
	// MIGStrategy is how the device plugin offers partitions; the values are those of NVIDIA's device plugin.
	MIGStrategy device.MIGStrategy

	KubeletDir string
	RunDir     string
	CDIDir     string
	CgroupRoot string
	// ProcRoot is where the host's proc is mounted, with the processes of all pods.
	ProcRoot  string
	SysfsRoot string
	// HostRoot is where the host's root directory is mounted.
	HostRoot string
	// DriverRoot and DevRoot are "auto" or paths on the host.
	DriverRoot string
	DevRoot    string
	// CreateDeviceNodes lets the agent create missing device nodes of the driver, and load nvidia-uvm.
	CreateDeviceNodes bool
	// GDS, GDRCopy and MOFED give containers with a GPU the devices of these drivers, where the node has them, and IMEXChannels these
	// channels; with IMEXRequired, no container gets a GPU without.
	GDS, GDRCopy, MOFED bool
	IMEXChannels        []int
	IMEXRequired        bool
	// DeviceMetadata gives containers a file with the attributes of their claims' devices (KEP-5304).
	DeviceMetadata bool
	// PartitionUUIDs publishes the UUIDs of partitions that were created for claims.
	PartitionUUIDs bool
	// NVML is "auto", the path of a libnvidia-ml.so.1, or "simulated:<profile>".
	NVML string
	// CDIDeviceNames is auto, stable or secret: whether everyone can know the names of CDI devices. auto chooses by the container runtime.
	CDIDeviceNames string
	// CDIHook is "install", "none" or the absolute path of a nvidia-cdi-hook on the host.
	CDIHook       string
	CDIHookSource string
	// CDIDisabledHooks are left out of CDI specs, and CDIFeatures are feature flags of the library that makes them (nvcdi).
	CDIDisabledHooks, CDIFeatures []string

	DeviceListStrategies []string
	PassDeviceSpecs      bool
	DeviceIDStrategy     string
	CDIAnnotationPrefix  string
	// AllocationPolicy selects the GPU from which the next pod gets a partition.
	AllocationPolicy string
	// Sharing applies to the GPUs that no rule of Devices matches.
	Sharing NodeSharing
	// ConsumableShares is how claims share the GPUs that no rule of Devices matches, with the values of NVIDIA's DRA driver: empty or
	// disabled, memory, unlimited, or a number of equal shares.
	ConsumableShares string
	// FailRequestsGreaterThanOne refuses containers that request more than one replica.
	FailRequestsGreaterThanOne bool

	// NodeLabels makes the agent write the labels of GPU Feature Discovery to its node.
	NodeLabels bool
	// UseNodeFeatureAPI makes it write them to a NodeFeature object, for Node Feature Discovery, instead of to the Node.
	UseNodeFeatureAPI bool
	// NoTimestamp leaves out the label with the time of the agent's start.
	NoTimestamp bool
	// LabelInterval is how often removed labels are restored, at least a second.
	LabelInterval time.Duration
	// MachineTypeFile is the file with the machine's model; empty for DMI's product_name below SysfsRoot.
	MachineTypeFile string

	HTTPEndpoint string
	Verbosity    int
}

// Values of UnknownKeys. NVIDIA's device plugin ignores unknown keys silently.
const (
	UnknownKeysError = "Error"
	UnknownKeysWarn  = "Warn"
)

// Values of CDIDeviceNames.
const (
	CDINamesAuto   = "auto"
	CDINamesStable = "stable"
	CDINamesSecret = "secret"
)

// Defaults returns the settings of a node without any configuration.
func Defaults() Config {
	return Config{
		FallbackStrategies:   []string{fallbackNamed, fallbackSingle},
		UnknownKeys:          UnknownKeysError,
		Namespace:            "default",
		Mode:                 ModeDual,
		DriverName:           "gpu.nvidia.com",
		ResourceName:         "nvidia.com/gpu",
		MIGStrategy:          device.MIGStrategyNone,
		KubeletDir:           "/var/lib/kubelet",
		RunDir:               "/run/tandem",
		CDIDir:               "/var/run/cdi",
		CgroupRoot:           "/sys/fs/cgroup",
		ProcRoot:             "/proc",
		SysfsRoot:            "/sys",
		HostRoot:             "/",
		DriverRoot:           "auto",
		DevRoot:              "auto",
		NVML:                 "auto",
		CDIDeviceNames:       CDINamesAuto,
		CDIHook:              "install",
		CDIHookSource:        "/usr/bin/nvidia-cdi-hook",
		DeviceListStrategies: []string{"cdi-cri"},
		DeviceIDStrategy:     "uuid",
		CDIAnnotationPrefix:  "cdi.k8s.io/",
		AllocationPolicy:     "distributed",
		NodeLabels:           true,
		NoTimestamp:          true,
		LabelInterval:        time.Minute,
		HTTPEndpoint:         ":8080",
	}
}

// setIMEXChannels replaces the channels by a list with commas.
func (c *Config) setIMEXChannels(list string) error {
	c.IMEXChannels = nil
	if list == "" {
		return nil
	}
	for _, item := range split(list) {
		channel, err := strconv.Atoi(item)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", item)
		}
		c.IMEXChannels = append(c.IMEXChannels, channel)
	}
	return nil
}

const (
	// infinite turns the interval off.
	infinite = "infinite"
	// shortestInterval bounds the requests of a node. NVIDIA's GPU Feature Discovery accepts any interval.
	shortestInterval = time.Second
)

// setLabelInterval replaces the interval by a duration such as 60s, or infinite.
func (c *Config) setLabelInterval(text string) error {
	if text == infinite {
		c.LabelInterval = math.MaxInt64
		return nil
	}
	interval, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("%q is not a duration such as 60s, or infinite", text)
	}
	c.LabelInterval = max(interval, shortestInterval)
	return nil
}

// split returns the values of a flag that are separated by commas.
func split(s string) (items []string) {
	for item := range strings.SplitSeq(s, ",") {
		items = append(items, strings.TrimSpace(item))
	}
	return items
}

// listFlag is a flag with a list. Flags that are repeated add to it, as in NVIDIA's device plugin; each source replaces the one before.
type listFlag struct {
	target *[]string
	isSet  bool
}

func (l *listFlag) String() string { return "" }

func (l *listFlag) Set(text string) error {
	if !l.isSet {
		*l.target, l.isSet = nil, true
	}
	*l.target = append(*l.target, split(text)...)
	return nil
}

// define adds the agent's flags. Their defaults are the values of c.
func (c *Config) define(flags *flag.FlagSet) {
	text := func(target *string, name, usage string) { flags.StringVar(target, name, *target, usage) }
	text(&c.ConfigFile, "config", "node configuration `file` (version: v1)")
	text(&c.ConfigDir, "config-dir", "`directory` of configuration files; the node's label "+ConfigLabel+" selects one")
	text(&c.DefaultConfig, "default-config", "`name` of the file in --config-dir for nodes without the label")
	list := func(target *[]string, name, usage string) { flags.Var(&listFlag{target: target}, name, usage) }
	list(&c.FallbackStrategies, "fallback-strategies", "which file of --config-dir is used without label and --default-config: `list` of "+
		"named (the file default), single (the only file), empty (none) (default "+strings.Join(c.FallbackStrategies, ",")+")")
	text(&c.UnknownKeys, "unknown-config-keys", "whether unknown keys in the configuration file are an error: `choice` Error or Warn")
	text(&c.NodeName, "node-name", "`name` of this node")
	text(&c.PodUID, "pod-uid", "`UID` of the agent's pod; it ends with that pod. Empty outside a pod")
	text(&c.PodName, "pod-name", "`name` of the agent's pod, whose DaemonSet owns the node's NodeFeature; empty outside a pod")
	text(&c.Namespace, "namespace", "`namespace` of the agent's pod and of the node's NodeFeature")
	text(&c.Kubeconfig, "kubeconfig", "kubeconfig `file`; empty inside a cluster")
	text((*string)(&c.Mode), "mode", "`mode` of the node: "+join(Modes)+"; the node's label "+ModeLabel+" overrides it")
	flags.BoolVar(&c.Strict, "strict", c.Strict,
		"in mode Dual, the scheduler binds a pod only after the node has reserved its devices (Kubernetes 1.36, up to 5 s for each pod)")
	list(&c.ExemptNamespaces, "exempt-namespaces",
		"namespaces whose pods may have processes on GPUs that they do not hold, besides those of the configuration: `list`")
	text(&c.DriverName, "driver-name", "DRA driver `name`")
	text(&c.ResourceName, "resource-name", "extended resource `name` of whole GPUs")
	text((*string)(&c.MIGStrategy), "mig-strategy", "how the device plugin offers MIG partitions: `strategy` none, single or mixed")
	text(&c.KubeletDir, "kubelet-dir", "kubelet's root `directory`")
	text(&c.RunDir, "run-dir", "`directory` of the ledger's records, on a tmpfs")
	text(&c.CDIDir, "cdi-dir", "`directory` for CDI specs")
	text(&c.CgroupRoot, "cgroup-root", "`directory` where the host's cgroup file systems are mounted")
	text(&c.ProcRoot, "proc-root", "`directory` where the host's proc is mounted, to name processes that keep a GPU")
	text(&c.SysfsRoot, "sysfs-root", "`directory` of sysfs")
	text(&c.HostRoot, "host-root", "`directory` where the host's root is mounted")
	text(&c.DriverRoot, "driver-root", "`path` of the NVIDIA driver on the host, or auto")
	text(&c.DevRoot, "dev-root", "`path` on the host below which dev/nvidia* are, or auto")
	flags.BoolVar(&c.CreateDeviceNodes, "create-device-nodes", c.CreateDeviceNodes,
		"create missing device nodes of the driver and their links in /dev/char, and load nvidia-uvm; needs a privileged agent")
	flags.BoolVar(&c.GDS, "gds-enabled", c.GDS, "give containers with a GPU the devices of GPUDirect Storage, where the node has them")
	flags.BoolVar(&c.GDRCopy, "gdrcopy-enabled", c.GDRCopy, "give containers with a GPU the device of GDRCopy, where the node has it")
	flags.BoolVar(&c.MOFED, "mofed-enabled", c.MOFED, "give containers with a GPU the devices of InfiniBand, where the node has them")
	flags.Func("imex-channel-ids", "give containers with a GPU these IMEX channels, where the node has them: `list`, empty or 0", c.setIMEXChannels)
	flags.BoolVar(&c.IMEXRequired, "imex-required", c.IMEXRequired, "offer no GPU while the IMEX channel does not exist")
	flags.BoolVar(&c.PartitionUUIDs, "partition-uuids", c.PartitionUUIDs,
		"publish the UUID of a partition while it exists for a claim, for dcgm-exporter (two writes of a slice for each partition)")
	flags.BoolVar(&c.DeviceMetadata, "device-metadata", c.DeviceMetadata,
		"give containers a file with the attributes of their claims' devices (KEP-5304)")
	text(&c.NVML, "nvml", "auto, the `path` of a libnvidia-ml.so.1, or simulated:<profile>")
	text(&c.CDIDeviceNames, "cdi-device-names",
		"names of CDI devices: stable (UUIDs), secret, or auto: secret where images can name CDI devices (a flaw of some container runtimes)")
	text(&c.CDIHook, "cdi-hook", "install, none, or the `path` of a nvidia-cdi-hook on the host")
	text(&c.CDIHookSource, "cdi-hook-source", "`path` of the nvidia-cdi-hook to install")
	list(&c.CDIDisabledHooks, "cdi-disable-hooks", "hooks that CDI specs shall not have: `list` of "+strings.Join(cdiHooks, ", "))
	list(&c.CDIFeatures, "cdi-feature-flags", "features of CDI specs: `list` of "+strings.Join(cdiFeatures, ", "))
	list(&c.DeviceListStrategies, "device-list-strategy",
		"how the device plugin passes devices to containers: `list` of cdi-cri, cdi-annotations, envvar, volume-mounts (default "+
			strings.Join(c.DeviceListStrategies, ",")+")")
	flags.BoolVar(&c.PassDeviceSpecs, "pass-device-specs", c.PassDeviceSpecs,
		"also return device nodes from Allocate: without CDI, containers need them to keep their GPUs after updates by the CPU Manager")
	text(&c.DeviceIDStrategy, "device-id-strategy", "`kind` of device ID that containers get: uuid or index")
	text(&c.CDIAnnotationPrefix, "cdi-annotation-prefix", "annotation `prefix` for cdi-annotations")
	text(&c.AllocationPolicy, "shared-devices-allocation-policy",
		"`policy` by which the device plugin selects partitions: distributed over the GPUs, or packed")
	text(&c.ConsumableShares, "consumable-shares",
		"how claims share the GPUs that no rule matches: disabled, memory, unlimited, or a `number` of equal shares")
	flags.Func("device-discovery-strategy", "how to find GPUs: `strategy` auto or nvml, which are the same", func(s string) error {
		return checkDiscovery("--device-discovery-strategy", s)
	})
	flags.BoolVar(&c.NodeLabels, "node-labels", c.NodeLabels, "write the labels of GPU Feature Discovery to the node")
	flags.BoolVar(&c.UseNodeFeatureAPI, "use-node-feature-api", c.UseNodeFeatureAPI,
		"write the labels to a NodeFeature object; Node Feature Discovery adds them to the node")
	flags.BoolVar(&c.NoTimestamp, "no-timestamp", c.NoTimestamp, "leave out the label nvidia.com/gfd.timestamp")
	flags.Func("sleep-interval", "how often removed labels are restored: `duration` of at least 1s, or infinite (default "+c.LabelInterval.String()+")",
		c.setLabelInterval)
	text(&c.MachineTypeFile, "machine-type-file",
		"`file` with the machine's model for the label nvidia.com/gpu.machine; empty for DMI's product_name below --sysfs-root")
	c.defineUnused(flags)
	text(&c.HTTPEndpoint, "http-endpoint", "`address` of /healthz, /readyz and /metrics; empty for none")
	flags.IntVar(&c.Verbosity, "v", c.Verbosity, "log verbosity `level`")
	for alias, name := range aliases {
		flags.Var(flags.Lookup(name).Value, alias, "another name of --"+name)
	}
}

// Names of nvcdi (nvidia-container-toolkit, pkg/nvcdi and internal/discover). The agent always sets the features disable-nvsandboxutils and
// disable-ipc-discoverer.
var (
	cdiHooks = []string{
		"all", "update-application-profile", "chmod", "create-symlinks", "disable-device-node-modification", "enable-cuda-compat",
		"update-ldcache", "apply-cuda-memory-limits",
	}
	cdiFeatures = []string{
		"enable-explicit-driver-libraries", "enable-coherent-annotations", "disable-multiple-csv-devices", "no-additional-gids-for-device-nodes",
		"disable-nvsandboxutils", "disable-ipc-discoverer",
	}
)

// known returns the names that are in a list. The others have no effect, as in NVIDIA's device plugin.
func (c *Config) known(at string, names, list []string) (found []string) {
	for _, name := range names {
		switch {
		case slices.Contains(list, name):
			found = append(found, name)
		case name != "":
			c.Unused = append(c.Unused, fmt.Sprintf("%s: %q is not one of %s", at, name, strings.Join(list, ", ")))
		}
	}
	return found
}

// defineUnused adds flags of NVIDIA's device plugin that are accepted and have no effect.
func (c *Config) defineUnused(flags *flag.FlagSet) {
	for name, why := range whyUnused {
		usage := "accepted without effect: " + why
		note := func(string) error {
			c.Unused = append(c.Unused, "--"+name+": "+why)
			return nil
		}
		if name == "fail-on-init-error" {
			flags.BoolFunc(name, usage, func(s string) error {
				if _, err := strconv.ParseBool(s); err != nil {
					return err
				}
				return note(s)
			})
			continue
		}
		flags.Func(name, usage, note)
	}
}

// moreVariables are further environment variables of some flags. Most are NVIDIA's.
var moreVariables = map[string]string{
	"config": "CONFIG_FILE", "config-dir": "CONFIG_FILE_SRCDIR", "driver-root": "NVIDIA_DRIVER_ROOT", "dev-root": "NVIDIA_DEV_ROOT", "cdi-hook": "NVIDIA_CDI_HOOK_PATH",
	"use-node-feature-api": "GFD_USE_NODE_FEATURE_API", "no-timestamp": "GFD_NO_TIMESTAMP", "sleep-interval": "GFD_SLEEP_INTERVAL", "machine-type-file": "GFD_MACHINE_TYPE_FILE",
}

// aliases are other names of flags in NVIDIA's device plugin.
var aliases = map[string]string{
	"config-file": "config", "nvidia-driver-root": "driver-root", "nvidia-dev-root": "dev-root", "nvidia-cdi-hook-path": "cdi-hook",
}

// variables returns the environment variables of a flag, the one with the highest precedence first.
func variables(flag string) []string {
	switch _, isAlias := aliases[flag]; {
	case flag == "v":
		return []string{"LOG_VERBOSITY"}
	case flag == outputFlag, flag == specFlag, isAlias:
		return nil
	}
	names := []string{strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))}
	if more := moreVariables[flag]; more != "" {
		names = append(names, more)
	}
	return names
}

// Load reads all sources and validates the result. It prints the usage to stderr if a flag is wrong, and for -h (flag.ErrHelp). With
// ConfigDir it uses the recorded file (Chosen.Record), because the node's label is not known yet. Without a usable record the result is
// Unchosen. If there is a record, stderr says why it cannot be used.
func Load(args []string, lookupEnv func(string) (string, bool), stderr io.Writer) (Config, error) {
	c := Defaults()
	l := loader{"kubelet-plugin", args, lookupEnv, stderr, &c, c.define, c.validate}
	if err := l.load(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// LoadChosen is Load with a file of ConfigDir; an empty name is for none. Without ConfigDir it is Load.
func LoadChosen(args []string, lookupEnv func(string) (string, bool), name string) (Chosen, error) {
	c := Defaults()
	l := loader{"kubelet-plugin", args, lookupEnv, io.Discard, &c, c.define, c.validate}
	if err := l.flags(); err != nil {
		return Chosen{}, err
	}
	var text []byte
	if c.ConfigDir != "" && name != "" {
		var err error
		if text, err = readFile(c.fileOf(name)); err != nil {
			return Chosen{}, err
		}
		if err := l.selected(name, text); err != nil {
			return Chosen{}, err
		}
	}
	if err := l.finish(); err != nil {
		return Chosen{}, err
	}
	return Chosen{c, text}, nil
}

// loader applies the sources of a program's settings to a Config.
type loader struct {
	program   string
	args      []string
	lookupEnv func(string) (string, bool)
	stderr    io.Writer
	into      *Config
	define    func(*flag.FlagSet)
	check     func() error
}

func (l loader) load() error {
	if err := l.flags(); err != nil {
		return err
	}
	if l.into.ConfigDir == "" || l.into.ConfigFile != "" {
		return l.finish()
	}
	r, found, err := recorded(l.into.RunDir)
	if found && r.Name == "" {
		return l.finish()
	}
	if found {
		without := *l.into
		if err = l.selected(r.Name, r.Text); err == nil {
			err = l.finish()
		}
		if err == nil {
			return nil
		}
		*l.into = without
	}
	if err != nil {
		fmt.Fprintf(l.stderr, "kubelet-plugin: cannot use the recorded configuration: %v. No GPU is given to new pods until a valid "+
			"configuration is selected\n", err)
	}
	l.into.Unchosen = true
	return l.finish()
}

// selected applies the text of a file of ConfigDir.
func (l loader) selected(name string, text []byte) error {
	if err := l.file(l.into.fileOf(name), text); err != nil {
		return err
	}
	l.into.ConfigName = name
	return nil
}

// finish adds the settings that only the environment has, and validates all.
func (l loader) finish() error {
	c := l.into
	c.readHealthChecks(l.lookupEnv)
	c.CDIDisabledHooks = c.known("--cdi-disable-hooks", c.CDIDisabledHooks, cdiHooks)
	c.CDIFeatures = c.known("--cdi-feature-flags", c.CDIFeatures, cdiFeatures)
	if c.IMEXRequired && len(c.IMEXChannels) == 0 {
		c.IMEXRequired = false
		c.Unused = append(c.Unused, "imex.required: imex.channelIDs names no channel")
	}
	slices.Sort(c.Unused)
	c.Unused = slices.Compact(c.Unused)
	return l.check()
}

// flags applies environment and flags. If they name a file, it applies the file, then environment and flags again, which override it.
func (l loader) flags() error {
	if err := apply(l.program, l.define, l.args, l.lookupEnv, l.stderr); err != nil || l.into.ConfigFile == "" {
		return err
	}
	text, err := readFile(l.into.ConfigFile)
	if err != nil {
		return err
	}
	return l.file(l.into.ConfigFile, text)
}

// file applies the text of a file, then environment and flags, which override it.
func (l loader) file(path string, text []byte) error {
	c := l.into
	resource, unknown := c.ResourceName, c.UnknownKeys
	*c = Defaults()
	c.ResourceName, c.UnknownKeys = resource, unknown // reading the file needs both, and the file cannot set them
	if err := c.loadFile(path, text); err != nil {
		return err
	}
	return apply(l.program, l.define, l.args, l.lookupEnv, io.Discard)
}

// apply sets the flags of a program from the environment, and then from its arguments.
func apply(program string, define func(*flag.FlagSet), args []string, lookupEnv func(string) (string, bool), stderr io.Writer) error {
	flags := flag.NewFlagSet(program, flag.ContinueOnError)
	flags.SetOutput(stderr)
	define(flags)
	var errs []error
	flags.VisitAll(func(f *flag.Flag) {
		names := variables(f.Name)
		if names == nil {
			return
		}
		f.Usage += " (environment: " + strings.Join(names, ", ") + ")"
		for _, name := range slices.Backward(names) {
			if value, ok := lookupEnv(name); ok && value != "" {
				if err := f.Value.Set(value); err != nil {
					errs = append(errs, fmt.Errorf("environment variable %s: %q: %w", name, value, err))
				}
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		return err
	}
	flags.VisitAll(func(f *flag.Flag) {
		if list, ok := f.Value.(*listFlag); ok {
			list.isSet = false
		}
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return nil
}

var deviceListStrategies = []string{"cdi-cri", "cdi-annotations", "envvar", "volume-mounts"}
