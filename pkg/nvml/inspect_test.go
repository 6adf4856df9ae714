// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/pkg/nvml/record"
	"github.com/tandem-gpu/tandem/simulated"
)

// inspectFixed is Inspect without what differs between the machines that run the test.
func inspectFixed(t *testing.T, options Options) Report {
	t.Helper()
	if options.ProcRoot == "" {
		options.ProcRoot = t.TempDir()
	}
	writeFile(t, filepath.Join(options.ProcRoot, "devices"), `Character devices:
  1 mem
195 nvidia
195 nvidiactl
510 nvidia-caps
511 nvidia-uvm

Block devices:
 11 nvidia-block
`)
	r := Inspect(t.Context(), options)
	r.Version, r.Machine.Kernel, r.Machine.UID, r.Machine.SysAdmin = "1.2.3", "6.1.0", 0, true
	for i := range r.Calls {
		r.Calls[i].Slowest = 0
	}
	return r
}

func textOf(t *testing.T, r Report) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := r.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestInspectOfLayouts(t *testing.T) {
	t.Setenv("PATH", "/usr/sbin:/usr/bin")
	t.Setenv("XDG_DATA_DIRS", "")
	for name := range layouts {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, name)
			r := inspectFixed(t, options)
			if err := r.Err(); err != nil {
				t.Fatal(err)
			}
			got := textOf(t, r)
			if strings.Contains(string(got), options.HostRoot) {
				t.Errorf("the agent's view of the host's root is in the report:\n%s", got)
			}
			golden.Compare(t, filepath.Join("testdata/inspect", name+".txt"), got)
		})
	}
}

// The report of a node with partitions, and of one GPU that is lost.
func TestInspectOfPartitions(t *testing.T) {
	options := fixture(t, "host-rhel")
	profile, err := simulated.Load("h100x8-mig")
	if err != nil {
		t.Fatal(err)
	}
	profile.GPUs, profile.NVLink = profile.GPUs[3:6], nil
	dir := t.TempDir()
	// The device numbers in the golden file are not this machine's.
	proc := t.TempDir()
	writeFile(t, filepath.Join(proc, "devices"), "Character devices:\n  1 mem\n")
	writeFile(t, filepath.Join(proc, "meminfo"), "MemTotal: 16777216 kB\n")
	if err := simulated.Materialize(dir, profile, simulated.MaterializeOptions{HostProc: proc}); err != nil {
		t.Fatal(err)
	}
	nodes, err := filepath.Glob(filepath.Join(dir, simulated.DriverDir, "dev/nvidia-caps/*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		copyNode(t, node, filepath.Join(options.HostRoot, "dev/nvidia-caps", filepath.Base(node)))
	}
	faults := simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "2", Lost: true}}}
	if err := simulated.WriteFaults(dir, faults); err != nil {
		t.Fatal(err)
	}
	options.SysfsRoot, options.ProcRoot = filepath.Join(dir, simulated.SysfsDir), filepath.Join(dir, simulated.ProcDir)
	options.OpenLibrary = func() (gonvml.Interface, error) {
		return simulated.New(profile, simulated.WithDir(dir)), nil
	}
	r := inspectFixed(t, options)
	golden.Compare(t, "testdata/inspect/partitions.txt", textOf(t, r))

	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var read Report
	if err := json.Unmarshal(data, &read); err != nil {
		t.Fatal(err)
	}
	if again, err := json.Marshal(read); err != nil || !bytes.Equal(data, again) {
		t.Errorf("a report that was read and written differs (%v):\n%s\n%s", err, data, again)
	}
}

func TestInspectWithoutDriver(t *testing.T) {
	r := inspectFixed(t, Options{Host: Host{HostRoot: t.TempDir(), SysfsRoot: t.TempDir()}})
	if err := r.Err(); err == nil || !strings.Contains(err.Error(), "no NVIDIA driver") {
		t.Errorf("error %v, want no driver", err)
	}
	golden.Compare(t, "testdata/inspect/none.txt", textOf(t, r))
}

// A call that never returns is in the report, and so are the GPUs that answer.
func TestInspectNamesTheCallThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.fault(hangs("GetMemoryInfo"))
		r := Inspect(t.Context(), n.options)
		var hung []record.Call
		for _, c := range r.Calls {
			if c.Code == record.NoAnswer {
				hung = append(hung, c)
			}
		}
		if len(hung) != 1 || hung[0].On != "gpu1" || hung[0].Method != "GetMemoryInfo" || hung[0].Slowest < n.options.patience/2 {
			t.Errorf("calls without an answer: %+v, want GetMemoryInfo on gpu1", hung)
		}
		if g := r.inventory.GPUs; len(g) != 1 || !g[0].Health.Healthy() {
			t.Errorf("GPUs %+v, want one that is healthy", g)
		}
		if text := string(textOf(t, r)); !strings.Contains(text, "NO_ANSWER") {
			t.Errorf("the text does not name the call:\n%s", text)
		}
	})
}

// All calls of this package, go-nvlib and nvcdi are recorded, and the session is closed.
func TestInspectRecordsEveryCall(t *testing.T) {
	options := fixture(t, "host-rhel")
	library, err := options.OpenLibrary()
	if err != nil {
		t.Fatal(err)
	}
	sessions := 0
	options.OpenLibrary = func() (gonvml.Interface, error) {
		return counted{library.(*simulated.Library), &sessions, gonvml.FEATURE_DISABLED}, nil
	}
	r := inspectFixed(t, options)
	if sessions != 0 {
		t.Errorf("%d sessions after Inspect, want none", sessions)
	}
	want := map[string]string{
		"Init": "", "Shutdown": "", "DeviceGetCount": "", "DeviceGetHandleByPciBusId": "", "GetUUID": "gpu1", "GetMemoryInfo": "gpu0",
		"GetTopologyCommonAncestor": "gpu1", "GetComputeMode": "", "GetComputeRunningProcesses": "", "LookupSymbol": "",
	}
	for _, c := range r.Calls {
		// The GPU has another handle by address than by index, because counted wraps that one only.
		if on, wanted := want[c.Method]; wanted && (on == c.On || on == "") {
			delete(want, c.Method)
		}
		if strings.Contains(c.On, "device") || strings.Contains(string(c.Values), "0xc0") {
			t.Errorf("call without the name of a handle: %+v", c)
		}
	}
	if len(want) > 0 {
		t.Errorf("not recorded: %v", want)
	}
}

func TestLowerCamel(t *testing.T) {
	for name, want := range map[string]string{
		"UUID": "uuid", "PCIBusID": "pciBusID", "GPUs": "gpus", "Index": "index", "NUMANode": "numaNode", "MIGEnabled": "migEnabled",
		"ECCEnabled": "eccEnabled", "GPU": "gpu", "CUDADriverVersion": "cudaDriverVersion", "NVLinkDomain": "nvLinkDomain",
	} {
		if got := lowerCamel(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}
