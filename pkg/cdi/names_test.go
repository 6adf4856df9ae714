// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// nameWorld is a node with two GPUs whose agents start again.
type nameWorld struct {
	t         *testing.T
	dir, file string
	from      *source
	*cdi.Specs
	end func()

	mu   sync.Mutex
	used map[string]bool
	hook *cdi.Hook
}

func newNameWorld(t *testing.T) *nameWorld {
	w := &nameWorld{
		t: t, dir: filepath.Join(t.TempDir(), "cdi"), file: filepath.Join(t.TempDir(), "plugin", "cdi-names.json"),
		from: newSource(entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1)), end: func() {},
	}
	t.Cleanup(func() { w.end() })
	w.restart()
	return w
}

// make returns the Specs of another agent.
func (w *nameWorld) make() *cdi.Specs {
	return cdi.New(cdi.Options{
		Dir: w.dir, Source: w.from, Hook: w.hook, Interval: 2 * time.Millisecond, NamesFile: w.file,
		InUse: func() map[string]bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.used
		},
	})
}

func (w *nameWorld) restart() {
	w.t.Helper()
	w.start()
	check(w.t, w.Ensure(w.t.Context(), "GPU-a", "GPU-b"))
}

// start ends the agent and starts another. kept are the names in kubelet's claim state.
func (w *nameWorld) start(kept ...string) {
	w.t.Helper()
	w.end()
	w.Specs = w.make()
	w.AddPlaceholders(kept)
	check(w.t, w.Load())
	w.end = sync.OnceFunc(run(w.t, w.Specs))
}

// addPartition makes MIG-1, which gets a file of its own. The driver reports it afterwards.
func (w *nameWorld) addPartition() {
	w.t.Helper()
	w.end()
	check(w.t, w.Add(w.t.Context(), device.Partition{UUID: "MIG-1"}))
	w.from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1), entry("MIG-1", "/dev/nvidia0", 0)), nil)
	w.restart()
}

// use sets which UUIDs and names are in use; none of them means that nothing is.
func (w *nameWorld) use(names ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = map[string]bool{}
	for _, name := range names {
		w.used[name] = true
	}
}

// unknown says that it is not known what is in use.
func (w *nameWorld) unknown() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used = nil
}

// wants awaits that a runtime finds exactly these names.
func (w *nameWorld) wants(names ...string) {
	w.t.Helper()
	slices.Sort(names)
	var found []string
	var err error
	for began := time.Now(); time.Since(began) < 10*time.Second; time.Sleep(time.Millisecond) {
		if found, err = find(w.dir); err == nil && slices.Equal(found, names) {
			return
		}
	}
	w.t.Fatalf("a runtime finds %v, %v, want %v", found, err, names)
}

// isSecret awaits that answers have secret names.
func (w *nameWorld) isSecret(want bool) {
	w.t.Helper()
	w.UseSecretNames(want)
	await(w.t, func() bool { return (w.QualifiedName("GPU-a") != stableA) == want })
}

const (
	stableA = "k8s.gpu.nvidia.com/gpu=GPU-a"
	stableB = "k8s.gpu.nvidia.com/gpu=GPU-b"
)

func TestSecretNames(t *testing.T) {
	w := newNameWorld(t)
	w.use("GPU-a")
	w.wants(stableA, stableB)
	w.isSecret(true)
	a, b := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b")
	// A container of the pod that has GPU-a may start again with the name of before.
	w.wants(a, stableA, b)
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(w.dir), cdilib.WithAutoRefresh(false))
	check(t, err)
	for name, node := range map[string]string{a: "/dev/nvidia0", stableA: "/dev/nvidia0", b: "/dev/nvidia1"} {
		if nodes := cache.GetDevice(name).ContainerEdits.DeviceNodes; len(nodes) != 1 || nodes[0].Path != node {
			t.Errorf("%s gives %v, want %s", name, nodes, node)
		}
	}
	for _, path := range []string{w.file, w.Path()} {
		if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}

	w.restart()
	w.wants(a, stableA, b)
	w.use()
	w.wants(a, b)
	w.use("GPU-b")
	check(t, os.RemoveAll(w.dir)) // a reboot
	w.restart()
	if w.QualifiedName("GPU-a") != a {
		t.Error("other names after a reboot")
	}
	w.wants(a, b)

	// The runtime was upgraded. GPU-b keeps the name that its pod got.
	w.isSecret(false)
	w.wants(stableA, stableB, b)
	w.use("GPU-a", "GPU-b")
	w.isSecret(true)
	w.wants(a, b, stableA, stableB)
	w.isSecret(false)
	w.use()
	w.wants(stableA, stableB)
	if info, err := os.Stat(w.Path()); err != nil || info.Mode() != 0o644 {
		t.Errorf("%v, %v", info.Mode(), err)
	}

	other := newNameWorld(t)
	other.isSecret(true)
	if other.QualifiedName("GPU-a") == a {
		t.Error("two nodes have the same names")
	}
}

// A claim with admin access holds nothing, but kubelet keeps its names.
func TestSecretNamesWithoutHold(t *testing.T) {
	w := newNameWorld(t)
	w.use(stableB)
	w.isSecret(true)
	a, b := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b")
	w.wants(a, b, stableB)
	w.use(b)
	w.isSecret(false)
	w.wants(stableA, stableB, b)
}

// While it is not known what is in use, no name is dropped.
func TestSecretNamesAndAnUnknownLedger(t *testing.T) {
	w := newNameWorld(t)
	w.isSecret(true)
	a, b := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b")
	w.wants(a, b, stableA, stableB)
	w.restart()
	for range 20 { // several looks
		time.Sleep(time.Millisecond)
		w.wants(a, b, stableA, stableB)
	}
	w.use("GPU-a")
	w.wants(a, b, stableA)
}

func TestSecretNamesOfPartitionsAndClients(t *testing.T) {
	w := newNameWorld(t)
	w.use("GPU-a", "MIG-1")
	w.addPartition()
	client, err := w.WriteClientDevice("uid-1-abc", pipe("/run/1"))
	check(t, err)
	w.isSecret(true)
	a, b, mig := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b"), w.QualifiedName("MIG-1")
	secret, err := w.WriteClientDevice("uid-1-abc", pipe("/run/1"))
	check(t, err)
	if secret == client || mig == "k8s.gpu.nvidia.com/gpu=MIG-1" {
		t.Errorf("names %s, %s", secret, mig)
	}
	w.wants(a, b, stableA, mig, "k8s.gpu.nvidia.com/gpu=MIG-1", client, secret)
	w.restart()
	check(t, w.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	again, err := w.WriteClientDevice("uid-1-abc", pipe("/run/1"))
	check(t, err)
	if again != secret {
		t.Errorf("name %s after a restart, want %s", again, secret)
	}
	w.use()
	w.wants(a, b, mig, secret)
	check(t, filepath.WalkDir(w.dir, func(path string, d os.DirEntry, err error) error {
		if info, _ := d.Info(); !d.IsDir() && info.Mode() != 0o600 {
			t.Errorf("%s: %s", path, info.Mode())
		}
		return err
	}))
	check(t, w.RemoveClientDevices("uid-1-abc"))
	w.end()

	// After a reboot kubelet passes the name of a partition that no longer exists, until a partition has that name again.
	check(t, os.RemoveAll(w.dir))
	w.from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1)), nil)
	next := w.make()
	next.AddPlaceholders([]string{mig})
	check(t, next.Ensure(t.Context()))
	w.wants(a, b, mig)
	if next.Has("MIG-1") {
		t.Error("a placeholder counts as a device")
	}
	check(t, next.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	w.wants(a, b, mig)
	if !next.Has("MIG-1") {
		t.Error("the partition has no entry")
	}
}

// The disk has the names before an answer does.
func TestSecretNamesThatCannotBeWritten(t *testing.T) {
	w := newNameWorld(t)
	w.use()
	for _, block := range []string{
		filepath.Join(filepath.Dir(w.file), ".cdi-names.json.tmp"), filepath.Join(w.dir, ".tandem-k8s.gpu.nvidia.com-gpu.json.tmp"),
	} {
		check(t, os.MkdirAll(block, 0o755))
		w.UseSecretNames(true)
		for range 20 { // several attempts
			time.Sleep(time.Millisecond)
			if w.QualifiedName("GPU-a") != stableA {
				t.Fatal("an answer has a name that the disk lacks")
			}
		}
		check(t, os.Remove(block))
		w.isSecret(true)
		w.wants(w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b"))
		w.isSecret(false)
		w.wants(stableA, stableB)
	}
}

// A process ends after it has saved the names and before it has renamed the files.
func TestSecretNamesAfterACrash(t *testing.T) {
	w := newNameWorld(t)
	w.use("GPU-a")
	w.end()
	spec, err := os.ReadFile(w.Path())
	check(t, err)
	w.restart()
	w.isSecret(true)
	a := w.QualifiedName("GPU-a")
	w.end()
	check(t, os.WriteFile(w.Path(), spec, 0o644))
	w.from.set(cdi.Edits{}, errors.New("a GPU hangs"))
	next := w.make()
	check(t, next.Load())
	if name := next.QualifiedName("GPU-a"); name != stableA {
		t.Errorf("answers with %s, but the files have %v", name, resolves(t, w.dir))
	}
	w.start()
	await(t, func() bool { return w.QualifiedName("GPU-a") == a })
	w.wants(a, w.QualifiedName("GPU-b"), stableA)
}

// Without the names of before the agent serves with new ones, and says that containers will not find theirs.
func TestLostNames(t *testing.T) {
	for what, lose := range map[string]func(path string) error{
		"removed": os.Remove,
		"empty":   func(path string) error { return os.Truncate(path, 0) },
		"no JSON": func(path string) error { return os.WriteFile(path, []byte("{"), 0o600) },
		"no key":  func(path string) error { return os.WriteFile(path, []byte(`{"secret":true,"key":"YQ=="}`), 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			w := newNameWorld(t)
			w.use()
			w.isSecret(true)
			a := w.QualifiedName("GPU-a")
			w.end()
			check(t, lose(w.file))
			lost, err := os.ReadFile(w.file)
			w.restart()
			if kept, keptErr := os.ReadFile(w.file + ".unreadable"); err == nil && (keptErr != nil || !slices.Equal(kept, lost)) {
				t.Errorf("kept %q, %v", kept, keptErr)
			}
			w.wants(stableA, stableB)
			w.isSecret(true)
			if w.QualifiedName("GPU-a") == a {
				t.Error("the old key is in use")
			}
			w.wants(w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b"))
		})
	}
}

// A device in use keeps its former name while the driver does not report it: after a reboot, kubelet still passes that name.
func TestFormerNameOfALostGPU(t *testing.T) {
	onlyA := editsOf(entry("GPU-a", "/dev/nvidia0", 0))
	failed := editsOf(entry("GPU-a", "/dev/nvidia0", 0))
	failed.Failed = map[string]error{"GPU-b": errors.New("it hangs")}
	for what, edits := range map[string]cdi.Edits{"missing": onlyA, "failed": failed} {
		for _, inUse := range []string{"GPU-b", stableB} {
			t.Run(what+" "+inUse, func(t *testing.T) {
				w := newNameWorld(t)
				w.isSecret(true)
				a, b := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b")
				w.end()
				check(t, os.RemoveAll(w.dir))
				w.use(inUse)
				all := w.from.edits
				w.from.set(edits, nil)
				w.start()
				w.wants(a)
				w.from.set(all, nil)
				w.wants(a, b, stableB)
				w.use()
				w.wants(a, b)
			})
		}
	}
}

// The key of the name is known, and the device is not: its other name may be in use.
func TestFormerNameOfAnUnknownGPU(t *testing.T) {
	w := newNameWorld(t)
	w.isSecret(true)
	a, b := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b")
	w.use()
	w.wants(a, b)
	w.unknown()
	w.isSecret(false)
	w.end()
	check(t, os.RemoveAll(w.dir))
	w.use(b)
	all := w.from.edits
	w.from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0)), nil)
	w.start()
	w.wants(stableA, a)
	w.from.set(all, nil)
	w.wants(stableA, stableB, b)
}

// A partition is held, and not known which one has its UUID.
func TestFormerNamesOfPartitions(t *testing.T) {
	w := newNameWorld(t)
	w.from.set(editsOf(entry("GPU-a", "/dev/nvidia0", 0), entry("GPU-b", "/dev/nvidia1", 1), entry("MIG-1", "/dev/nvidia2", 2)), nil)
	await(t, func() bool { return w.Has("MIG-1") })
	w.use(cdi.AnyPartition)
	w.isSecret(true)
	w.wants(w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b"), w.QualifiedName("MIG-1"), "k8s.gpu.nvidia.com/gpu=MIG-1")
}

// A version of Tandem without secret names served the node meanwhile. Its pods have stable names.
func TestNamesOfAnotherVersion(t *testing.T) {
	for _, reboot := range []bool{false, true} {
		w := newNameWorld(t)
		w.addPartition()
		const stableMIG = "k8s.gpu.nvidia.com/gpu=MIG-1"
		w.use()
		old := filepath.Join(t.TempDir(), "old")
		check(t, os.CopyFS(old, os.DirFS(w.dir)))
		w.isSecret(true)
		a, b, mig := w.QualifiedName("GPU-a"), w.QualifiedName("GPU-b"), w.QualifiedName("MIG-1")
		w.wants(a, b, mig)
		w.end()
		check(t, os.RemoveAll(w.dir))
		kept := []string{"k8s.gpu.nvidia.com/sharing=x", "nonsense"}
		if reboot {
			kept = append(kept, stableA, stableMIG)
		} else {
			check(t, os.CopyFS(w.dir, os.DirFS(old)))
		}
		w.use(stableA, "MIG-1")
		w.start(kept...)
		w.wants(a, b, mig, stableA, stableMIG)
		w.end()
		check(t, os.RemoveAll(w.dir)) // what is saved lasts over a reboot
		w.restart()
		w.wants(a, b, mig, stableA, stableMIG)
		w.use()
		w.wants(a, b, mig)

		// The names are stable again, and a claim of before has a secret one.
		w.isSecret(false)
		w.wants(stableA, stableB, stableMIG)
		w.end()
		check(t, os.RemoveAll(w.dir))
		w.use(a)
		w.start(a)
		w.wants(a, stableA, stableB, stableMIG)
	}
}

// The disk is full when the agent starts, or the hook cannot be installed. It serves with the files that are there.
func TestSecretNamesOnAFullDisk(t *testing.T) {
	w := newNameWorld(t)
	w.use("GPU-a")
	w.isSecret(true)
	a := w.QualifiedName("GPU-a")
	w.end()
	w.hook = cdi.NewHook(filepath.Join(t.TempDir(), "missing"), filepath.Join(t.TempDir(), "hook"))
	s := w.make()
	check(t, s.Load())
	if name := s.QualifiedName("GPU-a"); name != a || !slices.Contains(resolves(t, w.dir), name) {
		t.Errorf("%s, but the files have %v", name, resolves(t, w.dir))
	}
}

// The main file is damaged while no agent runs, and then the driver hangs: files of partitions keep the edits that they have.
func TestCommonEditsOfPartitionsWithoutTheMainFile(t *testing.T) {
	for _, before := range []bool{false, true} {
		w := newNameWorld(t)
		w.use("MIG-1")
		w.addPartition()
		if before {
			w.isSecret(true)
		}
		w.end()
		check(t, os.WriteFile(w.Path(), []byte("{"), 0o600))
		w.from.set(cdi.Edits{}, errors.New("a GPU hangs"))
		w.start()
		w.Await(t.Context())
		w.isSecret(!before)
		path := filepath.Join(w.dir, "tandem-k8s.gpu.nvidia.com-gpu-MIG-1.json")
		spec, err := cdilib.ReadSpec(path, 0)
		check(t, err)
		if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void"}, spec.ContainerEdits.Env); diff != "" || len(spec.Devices) != 2 {
			t.Errorf("%d devices, common edits (-want +got):\n%s", len(spec.Devices), diff)
		}
	}
}

// The source does not answer an agent that has just started: what it writes has the common edits of the earlier agent.
func TestCommonEditsOfAnEarlierAgent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	from := newSource(entry("GPU-a", "/dev/nvidia0", 0))
	check(t, newSpecs(t, dir, from, nil).Ensure(t.Context()))
	from.set(cdi.Edits{}, errors.New("a GPU hangs"))
	s := newSpecs(t, dir, from, nil)
	check(t, s.Load())
	stop := run(t, s)
	s.Await(t.Context())
	check(t, s.Add(t.Context(), device.Partition{UUID: "MIG-1"}))
	stop()
	spec, err := cdilib.ReadSpec(filepath.Join(dir, "tandem-k8s.gpu.nvidia.com-gpu-MIG-1.json"), 0)
	check(t, err)
	if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void"}, spec.ContainerEdits.Env); diff != "" {
		t.Errorf("common edits (-want +got):\n%s", diff)
	}
}
