// SPDX-License-Identifier: Apache-2.0

// Package mps implements how the agent and the supervisor of an MPS daemon communicate through the daemon's directory on the node
// (docs/design/0013-sharing.md). The supervisor runs in its own pod, which the controller creates.
package mps

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// ClientLogDir is the log directory in the daemon's container.
const ClientLogDir = "/tmp/nvidia-mps-log"

// Daemon is one MPS control daemon, as the supervisor in its pod runs it. It is a value.
type Daemon struct {
	Settings Settings
	// Dir is the daemon's directory, Root the driver's root, as this process sees them.
	Dir, Root string
	// PipeDir and LogDir are the paths that the daemon has them at: ClientPipeDir and ClientLogDir in a pod.
	PipeDir, LogDir string
	// Mounts is where this process has PipeDir, LogDir and /dev/shm: the root directory in a pod.
	Mounts string
	// Volumes is the host directory with the pod's volumes of these names: PipeVolume, LogVolume and ShmVolume.
	Volumes string
	// Pod is the UID of the pod.
	Pod string
	// Grace is how long the daemon may take to answer a command; three times that to start; and that for each way to end it.
	Grace time.Duration

	// proc is where proc is mounted; /proc when empty. Tests set it.
	proc string
}

// MostGrace is how long it takes at most to end a daemon in a pod: the pod's termination grace period.
const MostGrace = 3 * grace

const grace = 10 * time.Second

// Run runs the daemon until ctx is done or its directory is gone, and returns nil then. It waits while the agent does not request
// the daemon. It returns an error if the daemon ends by itself or does not become ready; kubelet then restarts the container. It
// leaves no process behind.
func (d Daemon) Run(ctx context.Context) error {
	if err := d.Settings.Validate(); err != nil {
		return fmt.Errorf("check the settings of MPS daemon: %w", err)
	}
	for {
		holder, err := Hold(ctx, d.Dir)
		switch {
		case errors.Is(err, ErrGone), ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		err = errors.Join(d.hold(ctx, holder), holder.Release())
		switch {
		case errors.Is(err, ErrGone), err == nil:
			return nil
		case !errors.Is(err, ErrStopped):
			return err
		}
		klog.FromContext(ctx).Info("Stopped MPS daemon")
	}
}

// hold runs the daemon once and ends it (shutdown.go). It returns nil when ctx is done, and otherwise why the daemon ended.
func (d Daemon) hold(ctx context.Context, holder *Holder) error {
	if err := d.prepareVolumes(ctx); err != nil {
		return err
	}
	program, err := d.findProgram()
	if err != nil {
		return err
	}
	process, err := d.start(program, holder)
	if err != nil {
		return err
	}
	// running ends with the first of: the agent's request or the directory, the pod, the daemon itself. Its cause says which.
	running, cancel := context.WithCancelCause(ctx)
	var watchers sync.WaitGroup
	watchers.Go(func() { cancel(holder.Await(running)) })
	watchers.Go(func() {
		select {
		case <-process.ended:
			cancel(process.died())
		case <-running.Done():
		}
	})
	err = d.prepare(running, program, holder)
	if failed := err != nil && running.Err() == nil; failed {
		cancel(err)
	}
	<-running.Done()
	err = errors.Join(holder.Retract(), d.end(ctx, program, process))
	if why := context.Cause(running); ctx.Err() == nil {
		err = errors.Join(why, err)
	}
	watchers.Wait()
	return err
}

// prepare waits until the daemon answers, sets its settings, and then publishes that it is ready.
func (d Daemon) prepare(ctx context.Context, p program, holder *Holder) error {
	if err := d.awaitAnswer(ctx, p); err != nil {
		return err
	}
	if err := d.set(ctx, p); err != nil {
		return err
	}
	ready := Ready{Pod: d.Pod, Hash: d.Settings.Hash()}
	if err := holder.Publish(ready); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS daemon is ready", "devices", d.Settings.Devices, "hash", ready.Hash)
	return nil
}

const answerCommand = "get_default_active_thread_percentage"

func (d Daemon) awaitAnswer(ctx context.Context, p program) error {
	var why error
	err := wait.PollUntilContextTimeout(ctx, lockInterval, 3*d.Grace, true, func(ctx context.Context) (bool, error) {
		_, err := p.tell(ctx, answerCommand)
		// A command that was cut short says less than the error of the one before.
		if ctx.Err() == nil || why == nil {
			why = err
		}
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the MPS daemon to answer, for %s: %w", 3*d.Grace, errors.Join(why, err))
	}
	return nil
}

// set sets the settings of each server that the daemon starts from now on. The daemon got them by its environment as well; its answers
// show whether it uses them.
func (d Daemon) set(ctx context.Context, p program) error {
	for i, limit := range d.Settings.PinnedMemoryMiB {
		if limit == 0 {
			continue
		}
		if _, err := p.tell(ctx, fmt.Sprintf("set_default_device_pinned_mem_limit %d %dM", i, limit)); err != nil {
			return err
		}
		got, err := p.tell(ctx, fmt.Sprintf("get_default_device_pinned_mem_limit %d", i))
		if err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Limited the device memory of each client", "device", d.Settings.Devices[i], "mebibytes", limit, "answer", got)
	}
	wanted := d.Settings.ActiveThreadPercentage
	if wanted == nil {
		return nil
	}
	if _, err := p.tell(ctx, fmt.Sprintf("set_default_active_thread_percentage %d", *wanted)); err != nil {
		return err
	}
	got, err := p.tell(ctx, answerCommand)
	if err != nil {
		return err
	}
	if number, err := strconv.ParseFloat(got, 64); err == nil && number != float64(*wanted) {
		return fmt.Errorf("set the active thread percentage to %d: the MPS daemon reports %s", *wanted, got)
	}
	return nil
}

// process is a daemon that was started.
type process struct {
	cmd    *exec.Cmd
	output *last
	ended  chan struct{}
	err    error
}

func (d Daemon) start(p program, holder *Holder) (*process, error) {
	args := []string{"-f"}
	if d.Settings.MultiUser {
		args = append(args, "-multiuser-server")
	}
	// end ends it, not a context.
	cmd := p.command(context.Background(), args...)
	cmd.Env = slices.Concat(cmd.Env, d.Settings.environment())
	r := &process{cmd: cmd, output: &last{to: os.Stderr}, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = r.output, r.output
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	// The daemon inherits the lock, so the directory stays locked while it lives, also if this process is killed.
	cmd.ExtraFiles = []*os.File{holder.lock}
	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread ends that started the process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			r.err = cmd.Wait()
			close(r.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the MPS daemon: %w", err)
	}
	return r, nil
}

// died returns how the daemon ended, once it has.
func (r *process) died() error {
	if r.err == nil {
		return errors.New("the MPS daemon has ended by itself")
	}
	// One line: kubelet shows the last line of the log in the pod's status.
	return fmt.Errorf("the MPS daemon has ended by itself: %w: %s", r.err, strings.Join(strings.Fields(string(r.output.text)), " "))
}

// Ready returns an error unless this pod runs the daemon and published that it is ready: another pod may use the same directory. The
// pod's readiness probe calls it.
func (d Daemon) Ready() error {
	ready, err := d.isReady()
	if err == nil && !ready {
		err = fmt.Errorf("MPS daemon %s of pod %s is not ready", filepath.Base(d.Dir), d.Pod)
	}
	return err
}

func (d Daemon) isReady() (bool, error) {
	ready, alive, err := Alive(d.Dir)
	return alive && ready.Pod == d.Pod, err
}

// Answers returns an error if a ready daemon does not accept clients, or soon cannot because its pipe directory is full. It returns nil for a daemon that is not ready, as during
// start and stop. The pod's liveness probe calls it.
func (d Daemon) Answers(ctx context.Context) error {
	if ready, err := d.isReady(); err != nil || !ready {
		return err
	}
	if err := d.pipesFit(); err != nil {
		return err
	}
	p, err := d.findProgram()
	if err != nil {
		return err
	}
	_, err = p.tell(ctx, answerCommand)
	return err
}

// Paths and names of the daemon's pod. The controller writes them, the supervisor reads them.
const (
	// PodDir is the mount of the daemon's directory, PodRoot that of the driver's root.
	PodDir  = "/daemon"
	PodRoot = "/driver-root"
)

// Environment of the supervisor, and of the probes beside it.
const (
	SettingsEnv   = "MPS_SETTINGS" // Settings as JSON
	PodUIDEnv     = "POD_UID"
	KubeletDirEnv = "KUBELET_DIR" // on the host
)

// FromEnvironment returns the daemon of this process's pod, from SettingsEnv, PodUIDEnv and KubeletDirEnv. An empty one is an error.
func FromEnvironment() (Daemon, error) {
	for _, name := range []string{SettingsEnv, PodUIDEnv, KubeletDirEnv} {
		if os.Getenv(name) == "" {
			return Daemon{}, fmt.Errorf("%s is not set; the controller sets it in the pods of MPS daemons", name)
		}
	}
	var settings Settings
	if err := json.Unmarshal([]byte(os.Getenv(SettingsEnv)), &settings); err != nil {
		return Daemon{}, fmt.Errorf("read %s: %w", SettingsEnv, err)
	}
	pod := os.Getenv(PodUIDEnv)
	return Daemon{
		Settings: settings, Dir: PodDir, Root: PodRoot, PipeDir: ClientPipeDir, LogDir: ClientLogDir, Pod: pod, Grace: grace,
		Mounts: "/",
		// Where kubelet mounts them (pkg/volume/emptydir).
		Volumes: filepath.Join(os.Getenv(KubeletDirEnv), "pods", pod, "volumes/kubernetes.io~empty-dir"),
	}, nil
}

// Settings of a daemon. A daemon with other settings is another daemon. They are passed as JSON.
type Settings struct {
	// Devices are the UUIDs of GPUs and partitions, in the order of CUDA_VISIBLE_DEVICES, by which the daemon numbers them.
	Devices []string `json:"devices"`
	// ActiveThreadPercentage is each client's percentage of the multiprocessors; nil is the daemon's default
	// (set_default_active_thread_percentage).
	ActiveThreadPercentage *int32 `json:"activeThreadPercentage,omitempty"`
	// PinnedMemoryMiB limits each client's memory, by the device's index in Devices. Zero and a missing entry are no limit
	// (set_default_device_pinned_mem_limit).
	PinnedMemoryMiB []int64 `json:"pinnedMemoryMiB,omitempty"`
	// MultiUser allows clients of several users at a time (-multiuser-server).
	MultiUser bool `json:"multiUser,omitempty"`
	// DriverRoot is the directory on the host in which the driver is installed.
	DriverRoot string `json:"driverRoot"`
	// Generation distinguishes daemons of the same name: the pod of an earlier one may still be terminating. Generations have no order.
	// A daemon of a version without generations has none, and keeps its hash (TestHashOfAVersionWithoutGenerations).
	Generation int64 `json:"generation,omitempty"`
}

// Hash identifies the settings in the pod's annotation and in Ready.
func (s Settings) Hash() string {
	text, err := json.Marshal(s)
	if err != nil {
		return "" // cannot happen: all fields can be encoded
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// environment returns the settings as the daemon's environment (CUDA's MPS documentation, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: "at the MPS
// control daemon level"). Clients of an earlier daemon may connect before the daemon gets a command, and their server's limits apply to
// later clients too.
func (s Settings) environment() (env []string) {
	var limits []string
	for i, limit := range s.PinnedMemoryMiB {
		if limit > 0 {
			limits = append(limits, fmt.Sprintf("%d=%dM", i, limit))
		}
	}
	if len(limits) > 0 {
		env = append(env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+strings.Join(limits, ","))
	}
	if p := s.ActiveThreadPercentage; p != nil && *p > 0 {
		env = append(env, fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", *p))
	}
	return env
}

// maxDevices is more than a claim can have (resource.k8s.io, AllocationResultsMaxSize: 32).
const maxDevices = 64

// deviceID matches UUIDs of GPUs and partitions, in the older form too: MIG-GPU-<uuid>/<GPU instance>/<compute instance>. A list of them
// is the value of a variable.
var deviceID = regexp.MustCompile(`^[A-Za-z0-9][-A-Za-z0-9/]{0,79}$`)

// Validate returns an error for settings with which no daemon can start.
func (s Settings) Validate() error {
	var errs []error
	complain := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch n := len(s.Devices); {
	case n == 0:
		complain("no devices")
	case n > maxDevices:
		complain("%d devices, more than %d", n, maxDevices)
	}
	for i, uuid := range s.Devices {
		if !deviceID.MatchString(uuid) {
			complain("device %d: %.100q is no UUID of a device", i, uuid)
		}
	}
	if len(s.PinnedMemoryMiB) > len(s.Devices) {
		complain("memory limits of %d devices, of which there are %d", len(s.PinnedMemoryMiB), len(s.Devices))
	}
	for i, limit := range s.PinnedMemoryMiB {
		if limit < 0 {
			complain("memory limit of device %d: %d MiB", i, limit)
		}
	}
	if p := s.ActiveThreadPercentage; p != nil && (*p < 0 || *p > 100) {
		complain("active thread percentage %d: not from 0 to 100", *p)
	}
	if !filepath.IsAbs(s.DriverRoot) || filepath.Clean(s.DriverRoot) != s.DriverRoot {
		complain("driver root %q: not a clean absolute path", s.DriverRoot)
	}
	return errors.Join(errs...)
}
