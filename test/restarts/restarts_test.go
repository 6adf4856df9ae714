// SPDX-License-Identifier: Apache-2.0

package restarts

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

var (
	cycles = flag.Int("cycles", 300, "partitions to make, and to destroy again")
	seed   = flag.Uint64("seed", 0, "of the order of things; 0 is a fresh one")
)

// hostVariable makes this program the process that works on the machine of that host.
const hostVariable = "TANDEM_LIVES_HOST"

func TestMain(m *testing.M) {
	if host := os.Getenv(hostVariable); host != "" {
		if err := live(context.Background(), host, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func machineDir(host string) string { return filepath.Join(host, "run/nvidia/simulated") }

func open(ctx context.Context, host string) (*nvml.Node, error) {
	node := nvml.New(simnode.Options(nvml.Options{Host: nvml.Host{
		HostRoot: host, Library: simnode.Library + filepath.Join(machineDir(host), simulated.ProfileFile),
		SysfsRoot: filepath.Join(machineDir(host), simulated.SysfsDir),
	}}, ""))
	return node, node.Scan(ctx)
}

// live is one life: it obeys lines of "make <name>" and "destroy <name>", and answers "ok" or "error: …" to each.
func live(ctx context.Context, host string, orders io.Reader, answers io.Writer) error {
	node, err := open(ctx, host)
	if err != nil {
		return err
	}
	records := partition.NewRecords(filepath.Join(host, "records"), "boot")
	problems, err := records.Load()
	// A process that is killed after it created a record and before it wrote the contents leaves an empty file. It counts as a record.
	problems = slices.DeleteFunc(problems, func(err error) bool { return strings.Contains(err.Error(), "it is empty") })
	if err := errors.Join(append(problems, err)...); err != nil {
		return err
	}
	maker := partition.NewMaker(records, node, partition.Policy{
		Dynamic: func(device.GPU) bool { return true },
		Sharing: func(device.GPU) device.Sharing { return device.Sharing{} },
	})
	fmt.Fprintln(answers, "ok")
	for lines := bufio.NewScanner(orders); lines.Scan(); {
		order, name, _ := strings.Cut(lines.Text(), " ")
		found, ok := maker.Inventory().ByName(name)
		switch {
		case !ok:
			return fmt.Errorf("no device %s", name)
		case order == "make":
			err = create(ctx, maker, found.Partition)
		case order == "destroy":
			err = destroy(ctx, maker, found.Ref())
		default:
			return fmt.Errorf("unknown order %q", order)
		}
		if err != nil {
			fmt.Fprintf(answers, "error: %s\n", strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Fprintln(answers, "ok")
		}
	}
	return nil
}

func create(ctx context.Context, maker *partition.Maker, want device.Partition) error {
	_, err := maker.Create(ctx, partition.Request{
		Partition: want, Reserved: func() error { return nil }, Publish: func(context.Context, device.Partition) error { return nil },
	})
	return err
}

func destroy(ctx context.Context, maker *partition.Maker, ref device.Ref) error {
	return maker.Destroy(ctx, ref, func() bool { return true })
}

// process is one life, as seen from outside.
type process struct {
	t       *testing.T
	command *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Scanner
}

func start(t *testing.T, host string) *process {
	t.Helper()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), hostVariable+"="+host)
	command.Stderr = os.Stderr
	orders, err := command.StdinPipe()
	check(t, err)
	answers, err := command.StdoutPipe()
	check(t, err)
	check(t, command.Start())
	p := &process{t: t, command: command, orders: orders, answers: bufio.NewScanner(answers)}
	if answer := p.answer(); answer != "ok" {
		t.Fatalf("the process does not start: %q, %v", answer, command.Wait())
	}
	return p
}

func (p *process) order(order string) {
	_, err := fmt.Fprintln(p.orders, order)
	check(p.t, err)
}

// answer is empty when there is none any more.
func (p *process) answer() string {
	if !p.answers.Scan() {
		return ""
	}
	return p.answers.Text()
}

func (p *process) kill() {
	check(p.t, p.command.Process.Kill())
	_ = p.command.Wait()
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// calls are those of the driver by which partitions are made and destroyed.
var calls = []string{
	"SetMigMode", "GetGpuInstances", "CreateGpuInstanceWithPlacement", "GpuInstance.GetInfo", "GpuInstance.GetComputeInstanceProfileInfo",
	"GpuInstance.CreateComputeInstance", "GpuInstance.GetComputeInstances", "MigDevice.GetUUID", "ComputeInstance.GetInfo",
	"ComputeInstance.Destroy", "GpuInstance.Destroy",
}

// world is the machine, with those who make partitions on it.
type world struct {
	*testing.T
	random *rand.Rand
	host   string
	// admin makes partitions of his own.
	admin   *nvml.Node
	foreign map[device.Ref]string
	process *process
	// held are the names of the partitions with a holder.
	held                           map[string]device.Ref
	made, destroyed, faults, kills int
	refused                        int
}

func TestRestarts(t *testing.T) {
	if *seed == 0 {
		*seed = rand.Uint64N(1 << 31)
	}
	profile, err := simulated.Load("h100x8")
	check(t, err)
	profile.GPUs, profile.NVLink = profile.GPUs[:2], nil
	host := t.TempDir()
	check(t, simulated.Materialize(machineDir(host), profile, simulated.MaterializeOptions{}))
	admin, err := open(t.Context(), host)
	check(t, err)
	w := &world{
		T: t, random: rand.New(rand.NewPCG(*seed, 0)), host: host, admin: admin,
		foreign: map[device.Ref]string{}, held: map[string]device.Ref{}, process: start(t, host),
	}
	said := time.Now()
	for w.destroyed < *cycles {
		w.step()
		w.look()
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			t.Logf("%d of %d cycles, %d faults, %d kills", w.destroyed, *cycles, w.faults, w.kills)
		}
	}
	for name := range w.held {
		w.destroy(name)
	}
	w.look()
	if left := w.others(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if records, err := os.ReadDir(filepath.Join(host, "records")); err != nil || len(records) > 0 {
		t.Errorf("records left behind: %v, %v", records, err)
	}
	w.process.kill()
	t.Logf("lives: seed=%d cycles=%d made=%d refused=%d faults=%d kills=%d foreign=%d left=%d",
		*seed, w.destroyed, w.made, w.refused, w.faults, w.kills, len(w.foreign), len(w.others()))
	if w.faults == 0 || w.kills == 0 || w.made == 0 {
		t.Error("the run proves nothing")
	}
}

// step makes or destroys a partition, or lets the administrator do so.
func (w *world) step() {
	switch n := w.random.IntN(20); {
	case n == 0:
		w.administer()
	case n < 10 && len(w.held) > 0:
		names := make([]string, 0, len(w.held))
		for name := range w.held {
			names = append(names, name)
		}
		slices.Sort(names)
		w.destroy(names[w.random.IntN(len(names))])
	default:
		w.make()
	}
}

// place picks a placement without a holder, as the ledger ensures. It does not know unmanaged partitions.
func (w *world) place() (device.Partition, device.GPU, bool) {
	gpu := w.admin.Inventory().GPUs[w.random.IntN(2)]
	possible := gpu.Possible()
	p := possible[w.random.IntN(len(possible))]
	for _, ref := range w.held {
		if ref.Overlaps(p.Ref) {
			return p, gpu, false
		}
	}
	return p, gpu, true
}

func (w *world) make() {
	p, _, free := w.place()
	if !free {
		return
	}
	w.held[p.Name()] = p.Ref
	for {
		answer := w.do("make " + p.Name())
		switch {
		case answer == "ok":
			w.made++
			return
		case strings.Contains(answer, "overlaps it") || strings.Contains(answer, "nsufficient"):
			// Permanently refused: an unmanaged partition is there or uses the engines.
			w.refused++
			w.destroy(p.Name())
			return
		case w.random.IntN(3) == 0:
			// The claim is deleted before it was prepared.
			w.destroy(p.Name())
			return
		}
	}
}

func (w *world) destroy(name string) {
	for w.do("destroy "+name) != "ok" {
	}
	delete(w.held, name)
	w.destroyed++
}

// do has an order obeyed, perhaps with a fault of the driver, perhaps by a process that is killed meanwhile; the answer is empty
// then.
func (w *world) do(order string) (answer string) {
	switch w.random.IntN(3) {
	case 0:
		w.faults++
		call := calls[w.random.IntN(len(calls))]
		w.fault(map[string]simulated.CallFault{call: {Return: "ERROR_UNKNOWN", Skip: w.random.IntN(2), Times: 1 + w.random.IntN(2)}})
		w.process.order(order)
		answer = w.process.answer()
		w.fault(nil)
	case 1:
		w.kills++
		slow := map[string]simulated.CallFault{}
		for _, call := range calls {
			slow[call] = simulated.CallFault{Delay: simulated.Duration(2 * time.Millisecond)}
		}
		w.fault(slow)
		w.process.order(order)
		// Death comes when it likes: there is nothing to wait for.
		time.Sleep(time.Duration(w.random.Int64N(int64(40 * time.Millisecond))))
		w.process.kill()
		w.fault(nil)
		w.process = start(w.T, w.host)
	default:
		w.process.order(order)
		answer = w.process.answer()
		if answer == "" {
			w.Fatal("the process has ended")
		}
	}
	return answer
}

func (w *world) fault(calls map[string]simulated.CallFault) {
	var faults simulated.Faults
	if calls != nil {
		for _, gpu := range w.admin.Inventory().GPUs {
			faults.GPUs = append(faults.GPUs, simulated.GPUFaults{GPU: gpu.UUID, Calls: calls})
		}
	}
	check(w.T, simulated.WriteFaults(machineDir(w.host), faults))
}

// administer creates an unmanaged partition, or destroys one.
func (w *world) administer() {
	for ref := range w.foreign {
		if w.random.IntN(2) == 0 {
			check(w.T, w.admin.Destroy(w.T.Context(), ref))
			delete(w.foreign, ref)
			return
		}
	}
	p, gpu, free := w.place()
	if !free {
		return
	}
	check(w.T, w.admin.Scan(w.T.Context()))
	if err := w.admin.EnableMIG(w.T.Context(), gpu.UUID); err != nil {
		return
	}
	i := slices.IndexFunc(gpu.Profiles, func(profile device.Profile) bool { return profile.ID == p.ProfileID })
	if made, err := w.admin.Create(w.T.Context(), p.Ref, gpu.Profiles[i]); err == nil {
		w.foreign[p.Ref] = made.UUID
	}
}

// look finds what must never be: an administrator's partition that is gone or another.
func (w *world) look() {
	found := w.all()
	for ref, uuid := range w.foreign {
		if found[ref] != uuid {
			w.Fatalf("seed %d: the administrator's partition %s at %s is %q now", *seed, uuid, ref, found[ref])
		}
	}
}

// all are the partitions that exist, by place.
func (w *world) all() map[device.Ref]string {
	all := map[device.Ref]string{}
	for _, gpu := range w.admin.Inventory().GPUs {
		partitions, err := w.admin.Partitions(w.T.Context(), gpu.UUID)
		check(w.T, err)
		for _, p := range partitions {
			all[p.Ref] = p.UUID
		}
	}
	return all
}

// others are those that no administrator has made.
func (w *world) others() map[device.Ref]string {
	all := w.all()
	for ref := range w.foreign {
		delete(all, ref)
	}
	return all
}
