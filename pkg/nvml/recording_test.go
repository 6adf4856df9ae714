// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml/record"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/recording"
)

// hostOf makes the machine of a profile as a host with a driver from packages, and returns options that use the simulated library.
func hostOf(t *testing.T, host string, profile simulated.Profile) Options {
	t.Helper()
	if err := simulated.Materialize(host, profile, simulated.MaterializeOptions{}); err != nil {
		t.Fatal(err)
	}
	return Options{
		Host: Host{
			HostRoot: host, DriverRoot: "/" + simulated.DriverDir, DevRoot: "/" + simulated.DriverDir,
			SysfsRoot: filepath.Join(host, simulated.SysfsDir), ProcRoot: filepath.Join(host, simulated.ProcDir),
		},
		OpenLibrary: func() (gonvml.Interface, error) {
			return simulated.New(profile, simulated.WithDir(host)), nil
		},
	}
}

// read gives a report to package recording, as a file would.
func read(t *testing.T, r Report) recording.Recording {
	t.Helper()
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := recording.Read(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// answers are the calls of a report without what may differ between two runs.
func answers(r Report) []record.Call {
	calls := slices.Clone(r.Calls)
	for i := range calls {
		calls[i].Slowest, calls[i].Count = 0, 0
		if calls[i].Method == "GetUUID" && strings.Contains(calls[i].On, "/mig") {
			calls[i].Values = nil // another one after each boot
		}
	}
	slices.SortFunc(calls, func(a, b record.Call) int {
		return strings.Compare(a.On+a.Method+string(a.Args)+a.Code, b.On+b.Method+string(b.Args)+b.Code)
	})
	return calls
}

func load(t *testing.T, name string) simulated.Profile {
	t.Helper()
	profile, err := simulated.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return profile.WithIdentity("")
}

// A recording makes a machine that answers as the recorded one did.
func TestProfileOfARecording(t *testing.T) {
	for _, name := range simulated.Names() {
		if name == "bench256" {
			continue // 32,640 pairs, and nothing that the others lack
		}
		t.Run(name, func(t *testing.T) {
			first := Inspect(t.Context(), hostOf(t, t.TempDir(), load(t, name)))
			profile, assumed, err := read(t, first).Profile("replayed")
			if err != nil {
				t.Fatal(err)
			}
			if len(assumed) > 0 {
				t.Errorf("assumed: %s", strings.Join(assumed, "\n"))
			}
			second := Inspect(t.Context(), hostOf(t, t.TempDir(), profile))
			if diff := cmp.Diff(answers(first), answers(second)); diff != "" {
				t.Errorf("the replayed machine answers otherwise (-recorded +replayed):\n%s", diff)
			}
			if diff := cmp.Diff(first.Machine.PCI, second.Machine.PCI); diff != "" {
				t.Errorf("the replayed machine has another PCI bus (-recorded +replayed):\n%s", diff)
			}
		})
	}
}

// measured matches values that differ in each run.
var measured = regexp.MustCompile(`"(LatencyUsec|Timestamp)":\d+`)

// The simulation of a real machine, made of its recording, answers every call as the real machine did, and the agent sees the same GPUs.
func TestRecordingsOfRealMachines(t *testing.T) {
	files, err := filepath.Glob("testdata/recordings/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var recorded struct {
				Inventory any           `json:"inventory"`
				Calls     []record.Call `json:"calls"`
				Machine   Machine       `json:"machine"`
			}
			if err := json.Unmarshal(data, &recorded); err != nil {
				t.Fatal(err)
			}
			for _, uuid := range regexp.MustCompile(`(GPU|MIG)-[0-9a-f-]+`).FindAll(data, -1) {
				if !regexp.MustCompile(`^(GPU|MIG)-00000000-0000-4000-8000-`).Match(uuid) {
					t.Errorf("%s may be the UUID of a real device: replace it by GPU-00000000-0000-4000-8000-000000000001 and the like", uuid)
				}
			}
			rec, err := recording.Read(bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			profile, assumed, err := rec.Profile("recorded")
			if err != nil || len(assumed) > 0 {
				t.Fatalf("%v, assumed: %s", err, strings.Join(assumed, "\n"))
			}
			report := Inspect(t.Context(), hostOf(t, t.TempDir(), profile))
			calls, replayed := answers(Report{Calls: recorded.Calls}), answers(report)
			if !slices.ContainsFunc(calls, addedLater) {
				replayed = slices.DeleteFunc(replayed, addedLater)
			}
			for _, all := range [][]record.Call{calls, replayed} {
				for i := range all {
					all[i].Values = measured.ReplaceAll(all[i].Values, []byte(`"$1":0`))
				}
			}
			if diff := cmp.Diff(calls, replayed); diff != "" {
				t.Errorf("the replayed machine answers otherwise (-recorded +replayed):\n%s", diff)
			}
			if diff := cmp.Diff(recorded.Machine.PCI, report.Machine.PCI); diff != "" {
				t.Errorf("the replayed machine has another PCI bus (-recorded +replayed):\n%s", diff)
			}
			data, err = json.Marshal(report.Inventory)
			if err != nil {
				t.Fatal(err)
			}
			var inventory any
			if err := json.Unmarshal(data, &inventory); err != nil {
				t.Fatal(err)
			}
			dropNewFields(recorded.Inventory, inventory)
			if diff := cmp.Diff(recorded.Inventory, inventory); diff != "" {
				t.Errorf("the agent sees other GPUs (-recorded +replayed):\n%s", diff)
			}
		})
	}
}

// addedLater reports whether the agent did not make a call yet when some recordings were made. How those machines answer it is not known.
func addedLater(c record.Call) bool {
	return strings.Contains(c.Method+string(c.Args), "GetGraphicsRunningProcesses")
}

// dropNewFields removes empty fields that a recording of an older version does not have.
func dropNewFields(recorded, replayed any) {
	switch now := replayed.(type) {
	case map[string]any:
		before, _ := recorded.(map[string]any)
		maps.DeleteFunc(now, func(name string, value any) bool {
			_, known := before[name]
			return !known && (value == "" || value == false || value == float64(0))
		})
		for name, value := range now {
			dropNewFields(before[name], value)
		}
	case []any:
		before, _ := recorded.([]any)
		for i := range min(len(before), len(now)) {
			dropNewFields(before[i], now[i])
		}
	}
}

// What a recording does not say is named, not made up.
func TestProfileNamesItsAssumptions(t *testing.T) {
	rec := read(t, Inspect(t.Context(), hostOf(t, t.TempDir(), load(t, "a30x4"))))
	for i, c := range rec.Calls {
		switch {
		case c.Method == "GetName":
			rec.Calls[i].Values = json.RawMessage(`["NVIDIA X1"]`)
		case c.Method == "GetGpuInstanceProfileInfo" && c.Return == 0:
			rec.Calls[i].Values = bytes.Replace(c.Values, []byte(`"MultiprocessorCount":14`), []byte(`"MultiprocessorCount":15`), 1)
		}
	}
	rec.Machine.PCI = rec.Machine.PCI[1:]
	profile, assumed, err := rec.Profile("x1")
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(assumed, "\n")
	for _, want := range []string{
		`no profile has a "NVIDIA X1": the PCIe generation`, "its place on the bus is assumed", "no table of simulated/models has its MIG profiles",
		"15 SMs", "14 SMs",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("the assumptions lack %q:\n%s", want, all)
		}
	}
	if m := profile.Models[profile.GPUs[0].Model]; m.MIG != "" {
		t.Errorf("model %+v, want one without MIG", m)
	}
}

func TestRecordingThatIsNone(t *testing.T) {
	for text, want := range map[string]string{
		`{`:                          "read recording",
		`{"format": 2}`:              "format: 2 is not 1",
		`{"format": 1, "calls": []}`: "the driver was not found",
	} {
		if _, err := recording.Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	rec := recording.Recording{Format: 1, Calls: []recording.Call{{Method: "Init"}}}
	if _, _, err := rec.Profile("none"); err == nil || !strings.Contains(err.Error(), "driver.version") {
		t.Errorf("error %v, want that there is no driver version", err)
	}
}

// The tests below run the agent's code through go-nvml and the dynamic linker against a library in C, each in a process of its own.

const recordingFile = "recording.json"

// installRecording makes a host whose driver is the C library, playing a machine of the simulation.
func installRecording(t *testing.T, host string, profile simulated.Profile, library recording.Library, change func(*recording.Recording)) {
	t.Helper()
	report := Inspect(t.Context(), hostOf(t, host, profile))
	data, err := json.Marshal(report)
	if err != nil {
		t.Fatal(err)
	}
	rec := read(t, report)
	if change != nil {
		change(&rec)
	}
	found, err := filepath.Glob(filepath.Join(host, simulated.DriverDir, "usr/lib/*/libnvidia-ml.so*"))
	if err != nil || len(found) == 0 {
		t.Fatal("the simulated driver has no NVML library", err)
	}
	for _, path := range found {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	library.Version = profile.Driver.Version
	if _, err := library.Build(t.Context(), filepath.Dir(found[0]), rec); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(host, recordingFile), string(data))
}

// throughC are options that use the host's C library.
func throughC(t *testing.T, host string) (options Options, library string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(host, simulated.DriverDir, "usr/lib/*/libnvidia-ml.so.*.*"))
	found = slices.DeleteFunc(found, func(path string) bool { return filepath.Ext(path) == ".table" || filepath.Ext(path) == ".faults" })
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	return Options{
		Host: Host{
			HostRoot: host, DriverRoot: "/" + simulated.DriverDir, DevRoot: "/" + simulated.DriverDir,
			SysfsRoot: filepath.Join(host, simulated.SysfsDir), ProcRoot: filepath.Join(host, simulated.ProcDir),
		},
	}, found[0]
}

func recordedReport(t *testing.T, host string) Report {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(host, recordingFile))
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// Every answer arrives through the C interface as it was recorded: handles, texts, structs, arrays, and each call that fails.
func TestRecordingThroughTheCInterface(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) {
		profile := load(t, "h100x8-mig")
		profile.GPUs = profile.GPUs[2:6]
		profile.NVLink[0].GPUs = []int{0, 1, 2, 3}
		installRecording(t, host, profile, recording.Library{}, nil)
	})
	if !child {
		return
	}
	options, _ := throughC(t, host)
	recorded, got := recordedReport(t, host), Inspect(t.Context(), options)
	if err := got.Err(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(answers(recorded), answers(got)); diff != "" {
		t.Errorf("through C the answers differ (-recorded +got):\n%s", diff)
	}
	data, err := json.Marshal(got.Inventory)
	if err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(recorded.Inventory)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(data)); diff != "" {
		t.Errorf("through C the inventory differs (-recorded +got):\n%s", diff)
	}
	if diff := cmp.Diff(string(recorded.CDI), string(bytes.TrimSpace(got.CDI))); diff != "" && !sameJSON(recorded.CDI, got.CDI) {
		t.Errorf("through C the CDI spec differs (-recorded +got):\n%s", diff)
	}
}

func sameJSON(a, b json.RawMessage) bool {
	var left, right any
	return json.Unmarshal(a, &left) == nil && json.Unmarshal(b, &right) == nil && cmp.Equal(left, right)
}

// drivers are libraries that lack functions, by what nvml.h of that time has and today's has not, or the other way round.
var drivers = map[string]struct {
	without []string
	// addressing and links say that no other function reports the addressing mode, and the links to NVSwitches.
	addressing, links bool
}{
	// A driver that has none of the functions for which this package, go-nvml or go-nvlib have a substitute.
	"r470": {
		without: []string{
			"nvmlDeviceGetAddressingMode", "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetNvLinkRemoteDeviceType",
			"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetNvLinkRemotePciInfo_v2",
			"nvmlDeviceGetAttributes_v2", "nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlComputeInstanceGetInfo_v2",
			"nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlInit_v2",
		},
		addressing: true, links: true,
	},
	// nvml.h of CUDA 12.0 and 12.4, between which is that of R535, lack these.
	"r535": {
		without:    []string{"nvmlDeviceGetAddressingMode", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetCurrentClocksEventReasons"},
		addressing: true,
	},
	// nvml.h of CUDA 13 marks these as deprecated: a driver may come without them.
	"r590": {
		without: []string{"nvmlDeviceGetApplicationsClock", "nvmlDeviceSetApplicationsClocks", "nvmlDeviceGetGpuFabricInfo"},
	},
}

// partitioned is a machine with two GPUs that have partitions.
func partitioned(t *testing.T) simulated.Profile {
	t.Helper()
	profile := load(t, "h100x8-mig")
	profile.GPUs, profile.NVLink[0].GPUs = profile.GPUs[3:5], []int{0, 1}
	return profile
}

func TestDriversThatLackFunctions(t *testing.T) {
	for name, driver := range drivers {
		t.Run(name, func(t *testing.T) {
			host, child := inOwnProcess(t, func(host string) {
				installRecording(t, host, partitioned(t), recording.Library{Without: driver.without}, nil)
			})
			if !child {
				return
			}
			options, _ := throughC(t, host)
			got := Inspect(t.Context(), options)
			options = hostOf(t, host, partitioned(t))
			want := Inspect(t.Context(), options)
			for i := range want.inventory.GPUs {
				g := &want.inventory.GPUs[i]
				if driver.addressing {
					g.AddressingMode = ""
				}
				if driver.links {
					g.NVLinkDomain = ""
					for j := range want.inventory.Links[i] {
						want.inventory.Links[i][j].NVLinks = 0
					}
				}
			}
			if diff := cmp.Diff(want.inventory, got.inventory, cmp.FilterPath(ofPartitionUUID, cmp.Ignore())); diff != "" {
				t.Errorf("the inventory differs (-recorded +got):\n%s", diff)
			}
			if got.CDIProblem != "" || len(got.CDIFailed) > 0 {
				t.Errorf("no edits: %s %v", got.CDIProblem, got.CDIFailed)
			}
		})
	}
}

func ofPartitionUUID(path cmp.Path) bool {
	return strings.HasSuffix(path.GoString(), ".UUID") && strings.Contains(path.GoString(), ".Partitions")
}

// A library may lack any function. A call of it would end the process, so the agent must not make it.
func TestEachFunctionMayBeMissing(t *testing.T) {
	if os.Getenv(libraryHost) != "" {
		host := os.Getenv(libraryHost)
		options, _ := throughC(t, host)
		node := New(options)
		err := node.Scan(t.Context())
		if err == nil {
			_, err = node.ContainerEdits(t.Context())
		}
		t.Logf("%d GPUs, %v", len(node.Inventory().GPUs), err)
		if err != nil && !errors.Is(err, ErrNoDriver) {
			t.Error(err)
		}
		if len(node.Inventory().GPUs) == 0 && err == nil {
			t.Error("neither a GPU nor an error")
		}
		for _, g := range node.Inventory().GPUs {
			// What changes a GPU is called as well. The table has no answer to it, which is NOT_SUPPORTED.
			_, _ = node.Partitions(t.Context(), g.UUID)
			_, _ = node.Settings(t.Context(), g.UUID)
			_, _, _ = node.Processes(t.Context(), g.UUID)
			_, _ = node.SetComputeMode(t.Context(), g.UUID, gpu.ComputeModeProhibited)
			_ = node.RestoreSettings(t.Context(), g.UUID, gpu.Settings{MemoryClock: 1, GraphicsClock: 1})
			_, _ = node.Create(t.Context(), gpu.Ref{GPU: g.UUID, Placement: gpu.Placement{Start: 0, Size: 4}}, gpu.Profile{ID: 9})
			for _, p := range g.Partitions {
				_ = node.Destroy(t.Context(), p.Ref)
			}
			_ = node.EnableMIG(t.Context(), g.UUID)
			_ = node.DisableMIG(t.Context(), g.UUID)
		}
		return
	}
	functions, err := recording.Functions(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	host := t.TempDir()
	installRecording(t, host, partitioned(t), recording.Library{}, nil)
	rec := read(t, recordedReport(t, host))
	_, library := throughC(t, host)
	for _, function := range functions {
		t.Run(function, func(t *testing.T) {
			lacking := recording.Library{Version: load(t, "h100x8-mig").Driver.Version, Without: []string{function}}
			if _, err := lacking.Build(t.Context(), filepath.Dir(library), rec); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestEachFunctionMayBeMissing$", "-test.count=1", "-test.v")
			cmd.Env = append(os.Environ(), libraryHost+"="+host)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "--- PASS: TestEachFunctionMayBeMissing") {
				t.Errorf("without %s: %v\n%s", function, err, out)
			}
		})
	}
}

// rest waits until a node has closed its session. An agent has one node: go-nvml does not guard its variables against a second one.
func rest(t *testing.T, n *Node) {
	t.Helper()
	n.release()
	closed := func() bool {
		n.session.mu.Lock()
		defer n.session.mu.Unlock()
		return n.session.users == 0
	}
	if !broadcast.Await(t.Context(), n.session.idle.Changed, closed) {
		t.Fatal("a use of the session does not end")
	}
}

// Each call fails in each way, on one of two GPUs: the other one works, and the first one again when its calls do.
func TestErrorsAtEachCall(t *testing.T) {
	host, child := inOwnProcess(t, func(host string) { installRecording(t, host, partitioned(t), recording.Library{}, nil) })
	if !child {
		return
	}
	options, library := throughC(t, host)
	healthy := mustOpen(t, options)
	rest(t, healthy)
	want := healthy.Inventory()
	other := want.GPUs[0].UUID
	type call struct{ on, method string }
	calls := map[call]bool{}
	for _, c := range recordedReport(t, host).Calls {
		if c.Method != "LookupSymbol" && c.Method != "Shutdown" && !strings.HasPrefix(c.On, "gpu0") {
			calls[call{c.On, c.Method}] = true
		}
	}
	if len(calls) < 40 {
		t.Fatalf("only %d calls: %v", len(calls), calls)
	}
	codes := []gonvml.Return{
		gonvml.ERROR_UNKNOWN, gonvml.ERROR_GPU_IS_LOST, gonvml.ERROR_NO_PERMISSION, gonvml.ERROR_NOT_FOUND,
		gonvml.ERROR_ARGUMENT_VERSION_MISMATCH,
	}
	for c := range calls {
		for _, code := range codes {
			fault := recording.Fault{On: c.on, Method: c.method, Return: int(code)}
			var missing []bool
			for kind, node := range map[string]*Node{"new": New(options), "that knows the GPUs": healthy} {
				if err := recording.WriteFaults(library, fault); err != nil {
					t.Fatal(err)
				}
				err := node.Scan(t.Context())
				missing = append(missing, errors.Is(err, ErrNoDriver))
				if c.on != "" {
					g, known := node.Inventory().ByUUID(other)
					if err != nil || !known || !g.Health.Healthy() {
						t.Errorf("%+v, an agent %s: the other GPU has %+v (%v)", fault, kind, g.Health, err)
					}
					edits, err := node.ContainerEdits(t.Context())
					if err != nil || edits.Failed[other] != nil {
						t.Errorf("%+v, an agent %s: the other GPU has no edits: %v %v", fault, kind, err, edits.Failed[other])
					}
				}
				if err := recording.WriteFaults(library); err != nil {
					t.Fatal(err)
				}
				if err := node.Scan(t.Context()); err != nil {
					t.Fatalf("%+v, an agent %s: afterwards it says %v", fault, kind, err)
				}
				rest(t, node)
				if kind == "new" && unsupported(code) {
					continue // it has learned that the GPU lacks something
				}
				if diff := cmp.Diff(want, node.Inventory()); diff != "" {
					t.Errorf("%+v, an agent %s: afterwards the inventory differs:\n%s", fault, kind, diff)
				}
			}
			if missing[0] != missing[1] {
				t.Errorf("%+v: only one of two agents misses the driver", fault)
			}
		}
	}
	t.Logf("%d calls, %d errors each", len(calls), len(codes))
}
