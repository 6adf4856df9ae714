// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// environment is what lookupEnv knows.
type environment map[string]string

func (e environment) lookup(name string) (string, bool) {
	value, ok := e[name]
	return value, ok
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPrecedence(t *testing.T) {
	const file = "version: v1\nflags: {nvidiaDriverRoot: /file, plugin: {deviceListStrategy: [envvar, volume-mounts], passDeviceSpecs: true}}\n"
	tests := []struct {
		name string
		file bool
		env  environment
		args []string
		want func(*Config)
	}{
		{name: "defaults", want: func(*Config) {}},
		{name: "file", file: true, want: func(c *Config) {
			c.DriverRoot, c.DeviceListStrategies, c.PassDeviceSpecs = "/file", []string{"envvar", "volume-mounts"}, true
		}},
		{name: "environment over file", file: true, env: environment{"DRIVER_ROOT": "/env", "DEVICE_LIST_STRATEGY": "cdi-cri", "PASS_DEVICE_SPECS": "false"}, want: func(c *Config) {
			c.DriverRoot, c.DeviceListStrategies = "/env", []string{"cdi-cri"}
		}},
		{name: "flags over environment", file: true, env: environment{"DRIVER_ROOT": "/env", "PASS_DEVICE_SPECS": "true"}, args: []string{"--driver-root=/flag", "--pass-device-specs=false", "--device-list-strategy=envvar, cdi-cri"}, want: func(c *Config) {
			c.DriverRoot, c.DeviceListStrategies = "/flag", []string{"envvar", "cdi-cri"}
		}},
		{name: "MIG", env: environment{"MIG_STRATEGY": "single", "SHARED_DEVICES_ALLOCATION_POLICY": "packed"}, args: []string{"--mig-strategy=mixed"}, want: func(c *Config) {
			c.MIGStrategy, c.AllocationPolicy = device.MIGStrategyMixed, "packed"
		}},
		{name: "other devices by NVIDIA's names", env: environment{"GDS_ENABLED": "true", "MOFED_ENABLED": "true", "IMEX_CHANNEL_IDS": "0"}, want: func(c *Config) {
			c.GDS, c.MOFED, c.IMEXChannels = true, true, []int{0}
		}},
		{name: "repeated flags", file: true, env: environment{"DEVICE_LIST_STRATEGY": "cdi-cri"}, args: []string{"--pass-device-specs=false", "--device-list-strategy=envvar", "--device-list-strategy=volume-mounts", "--driver-root=/x"}, want: func(c *Config) {
			c.DriverRoot, c.DeviceListStrategies = "/x", []string{"envvar", "volume-mounts"}
		}},
		{name: "CDI", env: environment{"CDI_DISABLE_HOOKS": "all", "CDI_FEATURE_FLAGS": "enable-coherent-annotations,disable-nvsandboxutils"}, want: func(c *Config) {
			c.CDIDisabledHooks, c.CDIFeatures = []string{"all"}, []string{"enable-coherent-annotations", "disable-nvsandboxutils"}
		}},
		{name: "own names over NVIDIA's", env: environment{"NVIDIA_DRIVER_ROOT": "/theirs", "DRIVER_ROOT": "/ours", "NVIDIA_DEV_ROOT": "/dev-root"}, want: func(c *Config) {
			c.DriverRoot, c.DevRoot = "/ours", "/dev-root"
		}},
		{name: "empty variables are unset", env: environment{"DRIVER_ROOT": "", "LOG_VERBOSITY": "4"}, args: []string{"--pass-device-specs"}, want: func(c *Config) {
			c.Verbosity, c.PassDeviceSpecs = 4, true
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			want := Defaults()
			want.NodeName = "node-1"
			test.want(&want)
			env := environment{"NODE_NAME": "node-1"}
			for name, value := range test.env {
				env[name] = value
			}
			if test.file {
				want.ConfigFile = write(t, file)
				env["CONFIG_FILE"] = want.ConfigFile
			}
			got, err := Load(test.args, env.lookup, io.Discard)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, want)
			}
		})
	}
}

func TestFiles(t *testing.T) {
	tests := []struct {
		name, content string
		want          func(*Config)
	}{
		{"empty", "\n", func(*Config) {}},
		{"comments", "---\n# nothing\n", func(*Config) {}},
		{"an empty second document", "---\nversion: v1\n---\n", func(*Config) {}},
		{"a directive", "%YAML 1.1\n---\nversion: v1\n", func(*Config) {}},
		{"a string for a list", "version: v1\nflags: {plugin: {deviceListStrategy: envvar}}", func(c *Config) { c.DeviceListStrategies = []string{"envvar"} }},
		{"a string of several", `flags: {plugin: {deviceListStrategy: "envvar,cdi-annotations"}}`, func(c *Config) { c.DeviceListStrategies = []string{"envvar", "cdi-annotations"} }},
		{"MIG", "flags: {migStrategy: mixed, plugin: {sharedDevicesAllocationPolicy: packed}}", func(c *Config) {
			c.MIGStrategy, c.AllocationPolicy = device.MIGStrategyMixed, "packed"
		}},
		{"other devices", "flags: {gdsEnabled: true, gdrcopyEnabled: true, mofedEnabled: true}\nimex: {channelIDs: [0], required: true}", func(c *Config) {
			c.GDS, c.GDRCopy, c.MOFED, c.IMEXChannels, c.IMEXRequired = true, true, true, []int{0}, true
		}},
		{"null and empty are unset", "flags: {nvidiaDriverRoot: \"\", plugin: {deviceListStrategy: null, deviceIDStrategy: \"\"}}", func(*Config) {}},
		{"all that NVIDIA's chart writes", `version: v1
flags:
  migStrategy: none
  failOnInitError: true
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: false
  gdsEnabled: false
  mofedEnabled: false
  useNodeFeatureAPI: null
  deviceDiscoveryStrategy: auto
  plugin: {passDeviceSpecs: false, deviceListStrategy: [envvar], deviceIDStrategy: index, cdiAnnotationPrefix: cdi.k8s.io/x, nvidiaCTKPath: /usr/bin/nvidia-ctk, containerDriverRoot: /driver-root}
  gfd: {oneshot: false, noTimestamp: false, sleepInterval: 60s, outputFile: /etc/labels, machineTypeFile: /sys/class/dmi/id/product_name}
resources: {gpus: [], mig: null}
sharing: {timeSlicing: {}, mps: null}
imex: {}
tandem: {mode: Dual, handover: {reset: true, monitorNamespaces: [gpu-operator]}}
`, func(c *Config) {
			c.ResetGPUs, c.MonitorNamespaces = true, []string{"gpu-operator"}
			c.Unused = []string{
				"flags.failOnInitError: the agent waits for the driver and its GPUs",
				"flags.gfd.oneshot: the agent keeps the node's labels up to date", "flags.gfd.outputFile: the agent writes the labels to the API server",
				"flags.mpsRoot: MPS daemons keep their files below --run-dir",
				"flags.plugin.containerDriverRoot: the agent finds the driver below --host-root", "flags.plugin.nvidiaCTKPath: --cdi-hook selects the hook",
			}
			c.NoTimestamp, c.MachineTypeFile = false, "/sys/class/dmi/id/product_name"
			c.DriverRoot, c.DevRoot = "/run/nvidia/driver", "/"
			c.DeviceListStrategies, c.DeviceIDStrategy, c.CDIAnnotationPrefix = []string{"envvar"}, "index", "cdi.k8s.io/x"
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path := write(t, test.content)
			got, err := Load([]string{"--config", path, "--node-name=n"}, environment{}.lookup, io.Discard)
			want := Defaults()
			want.NodeName, want.ConfigFile = "n", path
			test.want(&want)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, want)
			}
		})
	}
}

// A setting that changes nothing is accepted and named.
func TestUnused(t *testing.T) {
	tests := []struct {
		name, file string
		env        environment
		args       []string
		want       []string
	}{
		{name: "null", file: "flags: {failOnInitError: null, mpsRoot: null, gfd: {oneshot: null}}"},
		{name: "false", file: "flags: {failOnInitError: false, mpsRoot: \"\"}", want: []string{"flags.failOnInitError: ", "flags.mpsRoot: "}},
		{name: "IMEX without channels", file: "imex: {required: true}", want: []string{"imex.required: imex.channelIDs names no channel"}},
		{name: "GFD", file: "flags: {gfd: {oneshot: true, sleepInterval: infinite}}", want: []string{"flags.gfd.oneshot: "}},
		{name: "resources", file: "resources: {gpus: [{pattern: \"*\", name: gpu}], mig: [{pattern: \"*\", name: nvidia.com/mig}]}", want: []string{"resources: "}},
		{name: "another name", file: "sharing: {timeSlicing: {resources: [{name: gpu, rename: vgpu, replicas: 2}]}}", want: []string{"sharing.timeSlicing.resources[0].rename: "}},
		{
			name: "the name that it has anyway",
			file: "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, rename: gpu.shared, replicas: 2}]}}",
		},
		{
			name: "another name by default", file: "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, rename: nvidia.com/vgpu, replicas: 2}]}}",
			want: []string{"sharing.timeSlicing.resources[0].rename: "},
		},
		{
			name: "devices of others", file: "sharing: {timeSlicing: {resources: [{name: nvidia.com/hostdev, replicas: 2}]}}",
			want: []string{"sharing.timeSlicing.resources[0]: Tandem serves no resource nvidia.com/hostdev"},
		},
		{
			name: "partitions by MPS", file: "sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: [\"0:1\", 1]}]}}",
			want: []string{"sharing.mps.resources[0].devices: MPS shares GPUs only"},
		},
		{
			name: "both strategies", file: "sharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 2}]}, timeSlicing: {resources: [{name: gpu, replicas: 2}]}}",
			want: []string{"sharing.mps.failRequestsGreaterThanOne: ", "sharing.timeSlicing: sharing.mps is set as well, and takes precedence"},
		},
		{
			name: "unknown keys", file: "flags: {renameByDefault: true}\ndriver: {root: /}\nflags: {migStrategy: none, plugin: {x: 1}}", args: []string{"--unknown-config-keys=Warn"},
			want: []string{`unknown field "driver"`, `unknown field "flags.plugin.x"`},
		},
		{
			name: "hooks and features that nvcdi does not know", env: environment{"CDI_DISABLE_HOOKS": "all, chown", "CDI_FEATURE_FLAGS": "fast"},
			want: []string{`--cdi-disable-hooks: "chown" is not one of all, `, `--cdi-feature-flags: "fast" is not one of `},
		},
		{
			name: "flags and variables", env: environment{"FAIL_ON_INIT_ERROR": "true", "MPS_ROOT": "/run/nvidia/mps", "DEVICE_DISCOVERY_STRATEGY": "auto"},
			args: []string{"--cdi-disable-hooks=chmod", "--cdi-feature-flags=enable-coherent-annotations", "--fail-on-init-error", "--kubelet-socket=/var/lib/kubelet/device-plugins/kubelet.sock"},
			want: []string{"--fail-on-init-error: ", "--kubelet-socket: ", "--mps-root: "},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c, err := Load(append(test.args, "--config", write(t, test.file), "--node-name=n"), test.env.lookup, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.EqualFunc(c.Unused, test.want, strings.HasPrefix) {
				t.Errorf("got %q, want %q", c.Unused, test.want)
			}
			other := c
			other.Unused = nil
			if !c.Equal(other) {
				t.Error("unused settings make a difference")
			}
		})
	}
}

func TestNodeLabels(t *testing.T) {
	for name, test := range map[string]struct {
		file string
		env  environment
		args []string
		want func(c *Config)
	}{
		"defaults":                 {want: func(c *Config) { c.NodeLabels, c.NoTimestamp, c.LabelInterval = true, true, time.Minute }},
		"file":                     {file: "flags: {gfd: {noTimestamp: false, sleepInterval: 5m}}", want: func(c *Config) { c.NoTimestamp, c.LabelInterval = false, 5*time.Minute }},
		"a number of nanoseconds":  {file: "flags: {gfd: {sleepInterval: 3e9}}", want: func(c *Config) { c.LabelInterval = 3 * time.Second }},
		"null":                     {file: "flags: {gfd: {noTimestamp: null, sleepInterval: null, machineTypeFile: null}}", want: func(*Config) {}},
		"NodeFeature":              {file: "flags: {useNodeFeatureAPI: true}", want: func(c *Config) { c.UseNodeFeatureAPI = true }},
		"NodeFeature, by GFD's":    {env: environment{"GFD_USE_NODE_FEATURE_API": "true", "NAMESPACE": "gpu", "POD_NAME": "p"}, want: func(c *Config) { c.UseNodeFeatureAPI, c.Namespace, c.PodName = true, "gpu", "p" }},
		"no NodeFeature":           {file: "flags: {useNodeFeatureAPI: true}", env: environment{"USE_NODE_FEATURE_API": "false"}, want: func(*Config) {}},
		"no NodeFeature, by flag":  {env: environment{"USE_NODE_FEATURE_API": "true"}, args: []string{"--use-node-feature-api=false"}, want: func(*Config) {}},
		"infinite":                 {file: "flags: {gfd: {sleepInterval: infinite}}", want: func(c *Config) { c.LabelInterval = math.MaxInt64 }},
		"shorter than a second":    {file: "flags: {gfd: {sleepInterval: 1000}}", want: func(c *Config) { c.LabelInterval = time.Second }},
		"negative":                 {file: "flags: {gfd: {sleepInterval: -1e30}}", want: func(c *Config) { c.LabelInterval = time.Second }},
		"very long":                {file: "flags: {gfd: {sleepInterval: 1e30}}", want: func(c *Config) { c.LabelInterval = math.MaxInt32 * time.Second }},
		"GFD's variables":          {file: "flags: {gfd: {sleepInterval: 5m}}", env: environment{"GFD_NO_TIMESTAMP": "false", "GFD_SLEEP_INTERVAL": "2m", "GFD_MACHINE_TYPE_FILE": "/m"}, want: func(c *Config) { c.NoTimestamp, c.LabelInterval, c.MachineTypeFile = false, 2*time.Minute, "/m" }},
		"a flag over the variable": {env: environment{"GFD_SLEEP_INTERVAL": "2m"}, args: []string{"--sleep-interval=infinite", "--node-labels=false"}, want: func(c *Config) { c.NodeLabels, c.LabelInterval = false, math.MaxInt64 }},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, test.file)
			got, err := Load(append(test.args, "--config", path, "--node-name=n"), test.env.lookup, io.Discard)
			want := Defaults()
			want.NodeName, want.ConfigFile = "n", path
			test.want(&want)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, want)
			}
		})
	}
	if _, err := Load([]string{"--sleep-interval=often", "--node-name=n"}, environment{}.lookup, io.Discard); err == nil || !strings.Contains(err.Error(), "sleep-interval") {
		t.Errorf("got %v", err)
	}
}

func TestOtherNamesOfFlags(t *testing.T) {
	path := write(t, "flags: {migStrategy: mixed}")
	c, err := Load([]string{"--config-file", path, "--node-name=n", "--nvidia-driver-root=/driver", "--nvidia-dev-root", "/dev-root", "--nvidia-cdi-hook-path=/hook"},
		environment{}.lookup, io.Discard)
	if err != nil || c.ConfigFile != path || c.MIGStrategy != device.MIGStrategyMixed || c.DriverRoot != "/driver" || c.DevRoot != "/dev-root" || c.CDIHook != "/hook" {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestFileErrors(t *testing.T) {
	tests := []struct{ name, content, want string }{
		{"unknown key", "flags: {plugin: {passDevicesSpecs: true}}", `"flags.plugin.passDevicesSpecs"`},
		{"unknown section", "tandem: {device: []}", `"tandem.device"`},
		{"wrong case", "flags: {Plugin: {}}", `"flags.Plugin"`},
		{"twice the same key", "flags: {}\nflags: {}", `"flags" already set`},
		{"wrong kind", "flags: {plugin: {passDeviceSpecs: 7}}", "flags.plugin.passDeviceSpecs"},
		{"neither string nor list", "flags: {plugin: {deviceListStrategy: {a: b}}}", "flags.plugin.deviceListStrategy: want"},
		{"no YAML", "{", "yaml"},
		{"two documents", "version: v1\n---\nflags: {}\n", "more than one YAML document"},
		{"two documents of Windows", "version: v1\r\n---\r\nflags: {}\r\n", "more than one YAML document"},
		{"a comment behind the separator", "version: v1\n--- # two\nflags: {}\n", "more than one YAML document"},
		{"version", "version: v2", "version: unknown version: v2"},
		{"MIG", "flags: {migStrategy: both}", "--mig-strategy: unknown MIG strategy: both (choose from none, single, mixed)"},
		{"policy", "flags: {plugin: {sharedDevicesAllocationPolicy: tight}}", `--shared-devices-allocation-policy: "tight" is not one of distributed, packed`},
		{"IMEX channel", "imex: {channelIDs: [1]}", "imex.channelIDs: must be [] or [0]; found [1]"},
		{"two IMEX channels", "imex: {channelIDs: [0, 0]}", "imex.channelIDs: must be [] or [0]; found [0 0]"},
		{"kind of GDS", "flags: {gdsEnabled: 1}", "flags.gdsEnabled"},
		{"discovery", "flags: {deviceDiscoveryStrategy: tegra}", "flags.deviceDiscoveryStrategy"},
		{"resources without a pattern", "resources: {gpus: [{name: nvidia.com/gpu}]}", "resources.gpus[0].pattern: resources must have a 'pattern' field set"},
		{"resources of MIG without a name", "resources: {mig: [{pattern: 1g.10gb, name: small}, {pattern: x}]}", "resources.mig[1].name: resources must have a 'name' field set"},
		{"long name of a resource", "resources: {gpus: [{pattern: x, name: " + strings.Repeat("a", 60) + "}]}", "resources.gpus[0].name: fully-qualified resource name must be 63"},
		{"unknown key of resources", "resources: {migs: []}", `"resources.migs"`},
		{"unknown key of gfd", "flags: {gfd: {sleep: 1s}}", `"flags.gfd.sleep"`},
		{"interval", "flags: {gfd: {sleepInterval: often}}", `sleepInterval: "often" is not a duration such as 60s, a number of nanoseconds, or infinite`},
		{"kind of interval", "flags: {gfd: {sleepInterval: [1]}}", "sleepInterval: [1] is not a duration"},
		{"strategy", "flags: {plugin: {deviceListStrategy: [cdi]}}", "invalid strategy: cdi"},
		{"ID strategy", "flags: {plugin: {deviceIDStrategy: serial}}", `--device-id-strategy: "serial"`},
		{"unknown key of handover", "tandem: {handover: {scrub: true}}", `"tandem.handover.scrub"`},
		{"mode", "tandem: {mode: Both}", `tandem.mode: "Both" is not one of Dual, ClaimsOnly, DevicePluginOnly, Split`},
		{"Split without devices", "tandem: {mode: Split}", "tandem.devices: is required"},
		{"unknown key of a rule", "tandem: {devices: [{match: {index: 0, uid: x}, use: claims}]}", `"tandem.devices[0].match.uid"`},
		{"no key", "tandem: {devices: [{match: {index: 0}, use: claims}, {match: {}, use: limits}]}", "tandem.devices[1].match: want exactly one"},
		{"two keys", "tandem: {devices: [{match: {index: 0, model: x}, use: claims}]}", "tandem.devices[0].match: want exactly one"},
		{"negative index", "tandem: {devices: [{match: {index: -1}, use: claims}]}", "tandem.devices[0].match.index: -1 is less"},
		{"index in words", "tandem: {devices: [{match: {index: first}, use: claims}]}", "tandem.devices.match.index"},
		{"no UUID", "tandem: {devices: [{match: {uuid: MIG-1}, use: claims}]}", `tandem.devices[0].match.uuid: "MIG-1" is no UUID`},
		{"empty model", "tandem: {devices: [{match: {model: \"\"}, use: claims}]}", "tandem.devices[0].match.model: is empty"},
		{"neither use nor mig", "tandem: {devices: [{match: {index: 0}}]}", "tandem.devices[0]: has no effect: set use"},
		{"use", "tandem: {devices: [{match: {index: 0}, use: both, mig: static}]}", `tandem.devices[0].use: "both" is not one of claims, limits, none`},
		{"mig", "tandem: {devices: [{match: {index: 0}, mig: live}]}", `tandem.devices[0].mig: "live" is neither static nor dynamic`},
		{"Split without a use", "tandem: {mode: Split, devices: [{match: {index: 0}, mig: dynamic}]}", "tandem.devices: is required"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Load([]string{"--config", write(t, test.content), "--node-name=n"}, environment{}.lookup, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
	for _, path := range []string{filepath.Join(t.TempDir(), "absent"), t.TempDir()} {
		if _, err := Load([]string{"--config", path, "--node-name=n"}, environment{}.lookup, io.Discard); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v", path, err)
		}
	}
}

func TestErrors(t *testing.T) {
	tests := []struct {
		name string
		env  environment
		args []string
		want string
	}{
		{"no node name", nil, nil, "--node-name: is required"},
		{"bad node name", nil, []string{"--node-name=Node_1"}, `--node-name: "Node_1" is no node name`},
		{"unknown flag", nil, []string{"--node-names=n"}, "node-names"},
		{"argument", nil, []string{"--node-name=n", "serve"}, `unexpected argument "serve"`},
		{"bad number", nil, []string{"-v=much"}, `invalid value "much" for flag -v`},
		{"bad variable", environment{"PASS_DEVICE_SPECS": "perhaps"}, []string{"--node-name=n"}, `environment variable PASS_DEVICE_SPECS: "perhaps": `},
		{"no boolean", nil, []string{"--node-name=n", "--strict=perhaps"}, `invalid boolean value "perhaps" for -strict`},
		{"bad theirs", environment{"LOG_VERBOSITY": "x"}, []string{"--node-name=n"}, "environment variable LOG_VERBOSITY"},
		{"driver name", nil, []string{"--node-name=n", "--driver-name=GPU"}, `--driver-name: "GPU" is no driver name`},
		{"long driver name", nil, []string{"--node-name=n", "--driver-name=" + strings.Repeat("a", 64)}, "no more than 63"},
		{"resource name", nil, []string{"--node-name=n", "--resource-name=gpu"}, "--resource-name"},
		{"relative path", nil, []string{"--node-name=n", "--run-dir=run"}, `--run-dir: "run" is not an absolute path`},
		{"driver root", nil, []string{"--node-name=n", "--driver-root=here"}, "--driver-root"},
		{"NVML", nil, []string{"--node-name=n", "--nvml=libnvidia-ml.so.1"}, "--nvml"},
		{"hook", nil, []string{"--node-name=n", "--cdi-hook=hook"}, "--cdi-hook"},
		{"unknown keys", nil, []string{"--node-name=n", "--unknown-config-keys=ignore"}, `--unknown-config-keys: "ignore" is not one of Error, Warn`},
		{"discovery", nil, []string{"--node-name=n", "--device-discovery-strategy=tegra"}, `"tegra" is not one of auto, nvml`},
		{"unused flag", environment{"FAIL_ON_INIT_ERROR": "perhaps"}, []string{"--node-name=n"}, `environment variable FAIL_ON_INIT_ERROR: "perhaps"`},
		{"no strategy", nil, []string{"--node-name=n", "--device-list-strategy="}, "--device-list-strategy: invalid strategy"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Load(test.args, test.env.lookup, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
	_, err := Load([]string{"--driver-name=GPU", "--run-dir=run"}, environment{}.lookup, io.Discard)
	for _, flag := range []string{"--node-name", "--driver-name", "--run-dir"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s is missing in %v", flag, err)
		}
	}
}

func TestHelp(t *testing.T) {
	var usage bytes.Buffer
	if _, err := Load([]string{"--help"}, environment{}.lookup, &usage); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("got %v", err)
	}
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	new(Config).define(flags)
	flags.VisitAll(func(f *flag.Flag) {
		for _, name := range append(variables(f.Name), "-"+f.Name) {
			if !strings.Contains(usage.String(), name) {
				t.Errorf("%s is not explained", name)
			}
		}
	})
}

func TestCheckDirectories(t *testing.T) {
	dir := t.TempDir()
	file := write(t, "")
	good := Config{KubeletDir: dir, HostRoot: dir, CgroupRoot: dir}
	if err := good.CheckDirectories(); err != nil {
		t.Error(err)
	}
	bad := Config{KubeletDir: filepath.Join(dir, "absent"), HostRoot: file, CgroupRoot: filepath.Join(dir, "absent")}
	err := bad.CheckDirectories()
	for _, want := range []string{"--kubelet-dir", "--cgroup-root", "--host-root: " + file + " is not a directory"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is missing in %v", want, err)
		}
	}
}

// TestCheckFile: the text of a file alone is validated as by an agent.
func TestCheckFile(t *testing.T) {
	for _, test := range []struct{ text, unknownKeys, unused, wrong string }{
		{"", UnknownKeysError, "", ""},
		{"flags: {mpsRoot: /a, failOnInitError: true}", UnknownKeysError, "flags.failOnInitError: the agent waits for the driver and its GPUs; flags.mpsRoot: MPS daemons keep their files below --run-dir", ""},
		{"imex: {required: true}", UnknownKeysError, "imex.required: imex.channelIDs names no channel", ""},
		{"flags: {old: 1}", UnknownKeysError, "", `unknown field "flags.old"`},
		{"flags: {old: 1}", UnknownKeysWarn, `unknown field "flags.old"`, ""},
		{"flags: {migStrategy: both}", UnknownKeysWarn, "", "unknown MIG strategy: both"},
		{"tandem: {mode: Split}", UnknownKeysError, "", "tandem.devices: is required by mode Split"},
	} {
		unused, err := CheckFile([]byte(test.text), test.unknownKeys)
		if test.wrong == "" && err != nil || test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
			t.Errorf("%s: error %v, want %q", test.text, err, test.wrong)
		}
		if got := strings.Join(unused, "; "); err == nil && got != test.unused {
			t.Errorf("%s: unused %q, want %q", test.text, got, test.unused)
		}
	}
}

// What a parser says reaches users, in events and in the log. It has words of YAML, and no types of Go.
func TestMistakesInWordsOfYAML(t *testing.T) {
	said := map[string]string{
		"7": "the whole file: want a map, not a number", "[]": "the whole file: want a map, not a list", "flags: true": "flags: want a map, not true or false",
		"flags: {plugin: 3}": "flags.plugin: want a map, not a number", "flags: {migStrategy: {a: b}}": "flags.migStrategy: want a string, not a map",
		"sharing: {timeSlicing: {resources: 4}}":                          "sharing.timeSlicing.resources: want a list, not a number",
		"sharing: {timeSlicing: {resources: [{name: a, replicas: 1.5}]}}": "sharing.timeSlicing.resources.replicas: want a whole number, not 1.5",
		"imex: {channelIDs: [a]}":                                         "imex.channelIDs: want a whole number, not a string",
		"tandem: {devices: [{match: {index: a}}]}":                        "tandem.devices.match.index: want a whole number, not a string",
		"tandem: {mode: 3}":                                               "tandem.mode: want a string, not a number",
		"flags: {migStrategy: a, migStrategy: b}":                         `yaml: line 1: key "migStrategy" already set in map`,
	}
	for text, want := range said {
		if _, err := CheckFile([]byte(text), UnknownKeysError); err == nil || err.Error() != want {
			t.Errorf("%s: %v; want %s", text, err, want)
		}
	}
	for name, want := range map[string]string{"IMEX_CHANNEL_IDS": `"x" is not a whole number`, "GFD_SLEEP_INTERVAL": `"x" is not a duration such as 60s, or infinite`, "GDS_ENABLED": "parse error"} {
		flag := "--" + strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, "GFD_"), "_", "-")) + "=x"
		_, byFlag := Load([]string{"--node-name=n", flag}, func(string) (string, bool) { return "", false }, io.Discard)
		_, byVariable := Load([]string{"--node-name=n"}, func(other string) (string, bool) { return "x", other == name }, io.Discard)
		for _, err := range []error{byFlag, byVariable} {
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "strconv") || strings.Contains(err.Error(), "time:") {
				t.Errorf("%s: %v; want %s", name, err, want)
			}
		}
	}
}
