// SPDX-License-Identifier: Apache-2.0

package dropin

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"
	"k8s.io/utils/ptr"

	nvidia "github.com/NVIDIA/k8s-device-plugin/api/config/v1"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
)

var (
	seed           = flag.Uint64("seed", 0, "of the random configurations; 0 draws one")
	configurations = flag.Int("configurations", 5000, "how many random configurations")
)

// theirs loads a configuration file by the package that NVIDIA's device plugin loads it with.
func theirs(file string) (loaded *nvidia.Config, err error) {
	app := &cli.App{
		Flags: []cli.Flag{&cli.StringFlag{Name: "config-file"}}, Writer: io.Discard, ErrWriter: io.Discard,
		Action: func(c *cli.Context) error { loaded, err = nvidia.NewConfig(c, c.App.Flags); return err },
	}
	if err := app.Run([]string{"plugin", "--config-file", file}); err != nil {
		return nil, err
	}
	return loaded, theirCheck(loaded)
}

// theirCheck is what the plugin checks in addition: cmd/nvidia-device-plugin, validateFlags, and internal/rm.
func theirCheck(c *nvidia.Config) error {
	flags := c.Flags.CommandLineFlags
	oneOf := func(value *string, known ...string) error {
		if value != nil && *value != "" && !slices.Contains(known, *value) {
			return fmt.Errorf("%q is not one of %v", *value, known)
		}
		return nil
	}
	errs := []error{
		oneOf(flags.MigStrategy, "none", "single", "mixed"), oneOf(flags.DeviceDiscoveryStrategy, "auto", "nvml"),
		nvidia.AssertChannelIDsValid(c.Imex.ChannelIDs),
	}
	if flags.Plugin != nil {
		errs = append(errs, oneOf(flags.Plugin.DeviceIDStrategy, "uuid", "index"))
		if flags.Plugin.DeviceListStrategy != nil {
			_, err := nvidia.NewDeviceListStrategies(*flags.Plugin.DeviceListStrategy)
			errs = append(errs, err)
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// ours loads a file as the agent does with --unknown-config-keys=Warn.
func ours(file string) (config.Config, error) {
	return config.Load([]string{"--node-name=n", "--unknown-config-keys=Warn", "--config=" + file}, func(string) (string, bool) { return "", false }, io.Discard)
}

// effect is what a configuration does to a node.
type effect struct {
	MIGStrategy, DriverRoot, IDStrategy, AnnotationPrefix string
	ListStrategies                                        []string
	PassDeviceSpecs, GDS, GDRCopy, MOFED, IMEXRequired    bool
	IMEXChannels                                          []int
	Strategy                                              string
	// Replicas are the devices of each resource for one device.
	Replicas map[string]int
	FailMore bool
}

// node has one GPU without MIG, and one with two partitions.
var node = []device.GPU{
	{UUID: "GPU-a", Index: 0, MemoryBytes: 80 << 30},
	{UUID: "GPU-b", Index: 1, MemoryBytes: 80 << 30, MIGCapable: true, MIGEnabled: true, Partitions: []device.Partition{
		{UUID: "MIG-b0", Index: 0, Profile: "1g.10gb", Ref: device.Ref{GPU: "GPU-b", Placement: device.Placement{Start: 0, Size: 1}}},
		{UUID: "MIG-b1", Index: 1, Profile: "2g.20gb", Ref: device.Ref{GPU: "GPU-b", Placement: device.Placement{Start: 2, Size: 2}}},
	}},
}

func ourEffect(c config.Config) effect {
	e := effect{
		MIGStrategy: string(c.MIGStrategy), DriverRoot: c.DriverRoot, IDStrategy: c.DeviceIDStrategy, AnnotationPrefix: c.CDIAnnotationPrefix,
		ListStrategies: c.DeviceListStrategies, PassDeviceSpecs: c.PassDeviceSpecs, GDS: c.GDS, GDRCopy: c.GDRCopy, MOFED: c.MOFED,
		IMEXChannels: c.IMEXChannels, IMEXRequired: c.IMEXRequired, Replicas: map[string]int{},
	}
	var gpus []device.GPU
	for _, gpu := range node {
		gpu.Sharing = c.SharingOf(gpu)
		e.Strategy = string(gpu.Sharing.Strategy)
		gpus = append(gpus, gpu)
	}
	resources := c.Resources()
	resources.Strategy = device.MIGStrategyMixed // so that each device has its own resource
	offers, _ := resources.Offers(gpus)
	shared := map[string]int{}
	for _, o := range offers {
		e.Replicas[o.Resource]++
		if !o.Share.Whole() {
			shared[o.Resource]++
		}
	}
	// Under MPS a container never gets more than one (pkg/legacy/allocate.go).
	e.FailMore = len(shared) > 0 && (c.FailRequestsGreaterThanOne || e.Strategy == string(device.MPS))
	if len(shared) == 0 {
		e.Strategy = ""
	}
	return e
}

// theirEffect follows internal/rm/device_map.go (updateDeviceMapWithReplicas).
func theirEffect(c *nvidia.Config) effect {
	nvidia.DisableResourceNamingInConfig(c)
	flags := c.Flags.CommandLineFlags
	plugin := ptr.Deref(flags.Plugin, nvidia.PluginCommandLineFlags{})
	or := func(value *string, otherwise string) string {
		if value == nil || *value == "" {
			return otherwise
		}
		return *value
	}
	yes := func(value *bool) bool { return ptr.Deref(value, false) }
	defaults := config.Defaults()
	e := effect{
		MIGStrategy: or(flags.MigStrategy, "none"), DriverRoot: or(flags.NvidiaDriverRoot, defaults.DriverRoot),
		IDStrategy: or(plugin.DeviceIDStrategy, "uuid"), AnnotationPrefix: or(plugin.CDIAnnotationPrefix, "cdi.k8s.io/"),
		ListStrategies: defaults.DeviceListStrategies, PassDeviceSpecs: yes(plugin.PassDeviceSpecs),
		GDS: yes(flags.GDSEnabled), GDRCopy: yes(flags.GDRCopyEnabled), MOFED: yes(flags.MOFEDEnabled),
		IMEXRequired: c.Imex.Required && len(c.Imex.ChannelIDs) > 0, Replicas: map[string]int{"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-2g.20gb": 1},
	}
	if len(c.Imex.ChannelIDs) > 0 {
		e.IMEXChannels = c.Imex.ChannelIDs
	}
	if plugin.DeviceListStrategy != nil && len(*plugin.DeviceListStrategy) > 0 {
		e.ListStrategies = *plugin.DeviceListStrategy
	}
	resources := maps.Clone(e.Replicas)
	for _, r := range c.Sharing.ReplicatedResources().Resources {
		name := string(r.Name)
		if resources[name] == 0 {
			continue
		}
		if e.Replicas[name] == 1 {
			delete(e.Replicas, name)
		}
		if r.Rename != "" {
			name = string(r.Rename)
		}
		e.Replicas[name] = max(e.Replicas[name], r.Replicas)
		e.FailMore = c.Sharing.ReplicatedResources().FailRequestsGreaterThanOne
		e.Strategy = map[nvidia.SharingStrategy]string{
			nvidia.SharingStrategyMPS: string(device.MPS), nvidia.SharingStrategyTimeSlicing: string(device.TimeSlicing),
		}[c.Sharing.SharingStrategy()]
	}
	return e
}

// loadedBy counts the configurations that NVIDIA's device plugin loads and that could work, and those of them that Tandem loads.
type loadedBy struct{ nvidia, tandem int }

// compare loads a configuration by both, and reports whether NVIDIA's device plugin loads it. Ours must load what theirs loads, with the
// same effect, apart from differences that are known.
func (l *loadedBy) compare(t *testing.T, text string) (loaded bool) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	their, err := theirs(file)
	if err != nil {
		return false
	}
	our, err := ours(file)
	if err != nil {
		isIn := func(text string) bool { return strings.Contains(err.Error(), text) }
		if !slices.ContainsFunc(knownRefusals(their), isIn) {
			l.nvidia++
			t.Errorf("%s\nNVIDIA's device plugin loads it; Tandem: %v", text, err)
		}
		return true
	}
	l.nvidia++
	l.tandem++
	if namesDevices(their) {
		return true // NVIDIA's plugin ignores devices, Tandem does not
	}
	if diff := cmp.Diff(theirEffect(their), ourEffect(our)); diff != "" {
		t.Errorf("%s\nhas another effect (-NVIDIA's +Tandem's):\n%s", text, diff)
	}
	return true
}

// knownRefusals are parts of Tandem's errors for a configuration that NVIDIA's plugin loads and that could not work.
func knownRefusals(c *nvidia.Config) (texts []string) {
	for _, root := range []*string{c.Flags.NvidiaDriverRoot, c.Flags.NvidiaDevRoot} {
		if root != nil && *root != "" && !filepath.IsAbs(*root) {
			texts = append(texts, fmt.Sprintf("%q is not an absolute path", *root))
		}
	}
	if slices.ContainsFunc(slices.Concat(c.Resources.GPUs, c.Resources.MIGs), func(r nvidia.Resource) bool { return r.Pattern == "" }) {
		texts = append(texts, "resources must have a 'pattern' field set")
	}
	for _, r := range c.Sharing.ReplicatedResources().Resources {
		isMPS := c.Sharing.MPS != nil
		if isMPS && strings.HasPrefix(string(r.Name), "nvidia.com/mig-") {
			texts = append(texts, "sharing using MPS is not supported for MIG devices") // internal/rm says so later
		}
		if isMPS && r.Replicas > device.MPSClients {
			texts = append(texts, "maximum allowed replicas is 48 with MPS") // cmd/mps-control-daemon/mps says so later
		}
	}
	return texts
}

func namesDevices(c *nvidia.Config) bool {
	return slices.ContainsFunc(c.Sharing.ReplicatedResources().Resources, func(r nvidia.ReplicatedResource) bool { return !r.Devices.All })
}

// nvidiaDir is the directory of the module of NVIDIA's device plugin.
func nvidiaDir(t *testing.T) string {
	t.Helper()
	dir, err := gotool.ModuleDir(t.Context(), "github.com/NVIDIA/k8s-device-plugin/api/config/v1")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Every configuration in the README of NVIDIA's device plugin loads and does the same.
func TestConfigurationsOfTheREADME(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(nvidiaDir(t), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	var loaded loadedBy
	for _, block := range regexp.MustCompile("(?s)```[a-z]*\n(.*?)```").FindAllStringSubmatch(string(readme), -1) {
		_, text, found := strings.Cut(block[1], "version: v1")
		if !found || strings.Contains(text, "<") {
			continue // placeholders
		}
		text, _, _ = strings.Cut("version: v1"+text, "\nEOF")
		text = regexp.MustCompile(`(?m)^\s*\.\.\.$`).ReplaceAllString(text, "")
		if !loaded.compare(t, text) {
			t.Errorf("%s\nNVIDIA's device plugin does not load it", text)
		}
	}
	if loaded.nvidia < 6 {
		t.Errorf("only %d configurations in the README: does the search still find them?", loaded.nvidia)
	}
	Report(t, "configurations=%d loaded=%d", loaded.nvidia, loaded.tandem)
}

// drawn returns a source of random numbers, and says how to have the same again.
func drawn(t *testing.T) *rand.Rand {
	t.Helper()
	n := *seed
	if n == 0 {
		n = rand.Uint64()
	}
	t.Logf("seed %d (go test ./test/dropin -run %s -seed %d)", n, t.Name(), n)
	return rand.New(rand.NewPCG(n, 0))
}

// Random configurations, right and wrong ones.
func TestRandomConfigurations(t *testing.T) {
	g := generator{Rand: drawn(t)}
	var loaded loadedBy
	for range *configurations {
		text, err := json.Marshal(g.file())
		if err != nil {
			t.Fatal(err)
		}
		loaded.compare(t, string(text))
		if t.Failed() {
			return
		}
	}
	if loaded.nvidia < *configurations/10 {
		t.Errorf("NVIDIA's device plugin loads only %d of %d: too few to compare", loaded.nvidia, *configurations)
	}
	Report(t, "configurations=%d loaded=%d", loaded.nvidia, loaded.tandem)
}

// generator draws configurations. Most of its values are right.
type generator struct {
	*rand.Rand
	// tandem adds Tandem's own section.
	tandem bool
}

// some adds a key with one of the values, or leaves it out.
func (g generator) some(to map[string]any, key string, values ...any) {
	switch n := g.IntN(40); {
	case n < 14:
		to[key] = values[g.IntN(len(values))]
	case n == 14:
		to[key] = nil
	case n == 15:
		to[key] = []any{1, "x", true, []any{}, map[string]any{"a": 1}}[g.IntN(5)]
	}
}

func (g generator) file() map[string]any {
	file, flags, plugin, gfd := map[string]any{}, map[string]any{}, map[string]any{}, map[string]any{}
	g.some(file, "version", "v1", "v1", "v1", "v1", "v2")
	g.some(file, "unknown", 1)
	g.some(flags, "migStrategy", "none", "single", "mixed", "mixed", "both")
	g.some(flags, "failOnInitError", true, false)
	g.some(flags, "mpsRoot", "/run/nvidia/mps", "")
	g.some(flags, "nvidiaDriverRoot", "/", "/run/nvidia/driver")
	g.some(flags, "nvidiaDevRoot", "/", "/run/nvidia/driver")
	g.some(flags, "gdrcopyEnabled", true, false)
	g.some(flags, "gdsEnabled", true, false)
	g.some(flags, "mofedEnabled", true, false)
	g.some(flags, "useNodeFeatureAPI", true, false)
	g.some(flags, "deviceDiscoveryStrategy", "auto", "nvml", "tegra")
	g.some(flags, "renameByDefault", true)
	g.some(plugin, "passDeviceSpecs", true, false)
	g.some(plugin, "deviceListStrategy", "envvar", "cdi-cri", []string{"envvar", "cdi-annotations"}, []string{"volume-mounts"}, []string{}, "cdi")
	g.some(plugin, "deviceIDStrategy", "uuid", "index", "serial")
	g.some(plugin, "cdiAnnotationPrefix", "cdi.k8s.io/", "cdi.k8s.io/nvidia")
	g.some(plugin, "nvidiaCTKPath", "/usr/bin/nvidia-ctk")
	g.some(plugin, "containerDriverRoot", "/driver-root")
	g.some(gfd, "oneshot", true)
	g.some(gfd, "noTimestamp", true, false)
	g.some(gfd, "sleepInterval", "60s", "infinite", 1000, "often")
	g.some(gfd, "outputFile", "/etc/labels")
	g.some(gfd, "machineTypeFile", "/sys/class/dmi/id/product_name")
	g.some(flags, "plugin", plugin, plugin, plugin)
	g.some(flags, "gfd", gfd)
	g.some(file, "flags", flags, flags, flags)
	resource := map[string]any{}
	g.some(resource, "pattern", "*", "1g.10gb")
	g.some(resource, "name", "gpu", "nvidia.com/small", "a_b", strings.Repeat("n", 60))
	g.some(file, "resources", map[string]any{"gpus": []any{resource}}, map[string]any{"mig": []any{resource}}, map[string]any{"gpus": []any{}})
	imex := map[string]any{}
	g.some(imex, "channelIDs", []int{}, []int{0}, []int{0}, []int{1})
	g.some(imex, "required", true, false)
	g.some(file, "imex", imex)
	sharing := map[string]any{}
	if g.IntN(3) > 0 {
		sharing[[]string{"timeSlicing", "timeSlicing", "mps"}[g.IntN(3)]] = g.replicated()
	}
	if g.IntN(10) == 0 {
		sharing["mps"], sharing["timeSlicing"] = g.replicated(), g.replicated()
	}
	g.some(file, "sharing", sharing, sharing, sharing)
	if g.tandem && g.IntN(2) == 0 {
		file["tandem"] = g.tandemSection()
	}
	return file
}

func (g generator) tandemSection() map[string]any {
	section := map[string]any{}
	g.some(section, "mode", "Dual", "ClaimsOnly", "Split", "Split", "Both")
	g.some(section, "strict", true, false)
	g.some(section, "handover", map[string]any{"reset": true}, map[string]any{"scrub": true})
	g.some(section, "health", g.health())
	g.some(section, "moed", "Dual")
	rules := []any{}
	for range g.IntN(3) {
		match, rule := map[string]any{}, map[string]any{}
		switch g.IntN(4) {
		case 0:
			match["index"] = g.IntN(3) - 1 + min(1, g.IntN(5))
		case 1:
			match["uuid"] = []string{"GPU-a", "GPU-b", "MIG-a"}[g.IntN(3)]
		case 2:
			match["model"] = []string{"NVIDIA L4", "NVIDIA A30", ""}[g.IntN(3)]
		default:
			g.some(match, "index", 0)
			g.some(match, "model", "NVIDIA L4")
			g.some(match, "serial", 1)
		}
		rule["match"] = match
		g.some(rule, "use", "claims", "limits", "none", "both")
		g.some(rule, "mig", "static", "dynamic", "dynamic", "live")
		g.some(rule, "health", g.health())
		shared := map[string]any{"strategy": []string{"TimeSlicing", "MPS", "None", "Fair"}[g.IntN(4)]}
		g.some(shared, "interval", "Default", "Long", "Slow")
		g.some(shared, "replicas", 2, 48, 60, 1, 0, -1)
		g.some(shared, "memoryShares", true, true, false)
		g.some(shared, "shares", 4, 1, 0, -1, 1025)
		g.some(shared, "unlimited", true, false)
		g.some(shared, "namespaces", []string{"a", "team-b"}, []string{}, []string{"A"})
		g.some(rule, "sharing", shared, shared)
		rules = append(rules, rule)
	}
	g.some(section, "devices", rules, rules, rules, rules)
	return section
}

func (g generator) health() map[string]any {
	health := map[string]any{}
	g.some(health, "contained", "Ignore", "NoSchedule", "ResetWhenIdle", "Reset")
	g.some(health, "fabric", "Ignore", "ResetWhenIdle")
	g.some(health, "lost", "NoExecute", "Ignore")
	g.some(health, "cold", "Ignore")
	return health
}

func (g generator) replicated() map[string]any {
	section := map[string]any{}
	g.some(section, "renameByDefault", true, false)
	g.some(section, "failRequestsGreaterThanOne", true, false)
	var list []any
	for range g.IntN(3) + min(1, g.IntN(8)) {
		r := map[string]any{"name": []string{"gpu", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "mig-2g.20gb", "nvidia.com/hostdev"}[g.IntN(5)]}
		r["replicas"] = []int{2, 3, 4, 10, 48, 60, 1}[g.IntN(7)]
		if g.IntN(3) == 0 {
			g.some(r, "rename", "nvidia.com/gpu.shared", "gpu.shared", "vgpu", "a_b")
		}
		if g.IntN(3) == 0 {
			g.some(r, "devices", "all", 2, []any{0, "1"}, []any{"0:1", "MIG-b1028956-cfa2-0990-bf4a-5da9abb51763"}, []any{"MIG-GPU-b1028956-cfa2-0990-bf4a-5da9abb51763/3/0"}, []any{}, 0, "some", []any{"x"})
		}
		list = append(list, r)
	}
	if list != nil {
		section["resources"] = list
	}
	return section
}
