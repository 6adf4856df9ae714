// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// ClientLogDir is where the daemon sees its log directory.
const ClientLogDir = "/tmp/nvidia-mps-log"

// Daemon is one MPS control daemon and how it is run: what the supervisor in the daemon's pod knows. It is a value.
type Daemon struct {
	Settings Settings
	// Dir is the daemon's directory, Root the driver's root, as this process sees them.
	Dir, Root string
	// PipeDir and LogDir are the directories of these names in Dir, as the daemon sees them; ClientPipeDir and ClientLogDir in a pod.
	PipeDir, LogDir string
	// Shm is the host path of the volume that the daemon has as /dev/shm.
	Shm string
	// Pod is the UID of the pod.
	Pod string
	// Grace is how long the daemon may take to answer, to start three times that, and to end that for each way of asking; 10 s when zero.
	Grace time.Duration
}

// MostGrace is how long it takes at most to end a daemon, with nothing said of Grace: what a pod has to leave it.
const MostGrace = 3 * defaultGrace

const defaultGrace = 10 * time.Second

func (d Daemon) withDefaults() Daemon {
	if d.Grace == 0 {
		d.Grace = defaultGrace
	}
	return d
}

// Run runs the daemon until ctx is done or its directory is gone, and returns nil then. It waits while the agent does not request
// the daemon. It returns an error if the daemon ends by itself or does not become ready; kubelet then restarts the container. It
// leaves no process behind.
func (d Daemon) Run(ctx context.Context) error {
	if err := d.Settings.Validate(); err != nil {
		return fmt.Errorf("check the settings of MPS daemon: %w", err)
	}
	d = d.withDefaults()
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

// hold runs the daemon once. It returns nil when ctx is done, and otherwise why the daemon ended.
func (d Daemon) hold(ctx context.Context, holder *Holder) error {
	if err := d.linkShm(); err != nil {
		return err
	}
	program, err := d.findProgram()
	if err != nil {
		return err
	}
	// What ends the daemon: its directory, the agent, the pod, or itself.
	running, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		cancel(holder.Await(running))
	}()
	defer func() {
		cancel(nil)
		<-watched
	}()
	process, err := d.start(program, holder)
	if err != nil {
		return err
	}
	go func() {
		<-process.ended
		cancel(process.died())
	}()
	if err := d.prepare(running, program, holder); err != nil && running.Err() == nil {
		return errors.Join(err, d.end(ctx, program, process))
	}
	<-running.Done()
	// Clients are not to be sent to a daemon that ends.
	err = errors.Join(holder.Retract(), d.end(ctx, program, process))
	if ctx.Err() != nil {
		return err
	}
	return errors.Join(context.Cause(running), err)
}

// prepare waits until the daemon answers, gives it its settings, and only then calls it ready.
func (d Daemon) prepare(ctx context.Context, p program, holder *Holder) error {
	if err := d.awaitAnswer(ctx, p); err != nil {
		return err
	}
	if err := d.set(ctx, p); err != nil {
		return err
	}
	ready := Ready{Pod: d.Pod, Hash: d.Settings.Hash(), Started: time.Now().UTC()}
	if err := holder.Publish(ready); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS daemon is ready", "devices", d.Settings.Devices, "hash", ready.Hash)
	return nil
}

const answerCommand = "get_default_active_thread_percentage"

func (d Daemon) awaitAnswer(ctx context.Context, p program) error {
	ctx, cancel := context.WithTimeout(ctx, 3*d.Grace)
	defer cancel()
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	var why error
	for {
		_, err := p.tell(ctx, answerCommand)
		if err == nil {
			return nil
		}
		// That a question was cut short says less than what came of the one before.
		if ctx.Err() == nil || why == nil {
			why = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the MPS daemon to answer, for %s: %w", 3*d.Grace, why)
		case <-tick.C:
		}
	}
}

// set gives the daemon its settings, which hold for every server that it starts from now on. It has had them from its environment: what
// it answers tells whether it has taken them, and who does not look there gets them here.
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
		return fmt.Errorf("set the active thread percentage to %d: the MPS daemon says that it is %s", *wanted, got)
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
	// It is ended by asking, not by the context.
	cmd := p.command(context.Background(), args...)
	cmd.Env = slices.Concat(cmd.Env, d.Settings.environment())
	r := &process{cmd: cmd, output: &last{to: os.Stderr}, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = r.output, r.output
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	// So the directory is held as long as the daemon lives, and its servers, should this process be killed.
	cmd.ExtraFiles = []*os.File{holder.Lock()}
	started := make(chan error)
	go func() {
		// The signal comes when the thread ends that has started it.
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

// died says how the daemon ended, when it has.
func (r *process) died() error {
	if r.err == nil {
		return errors.New("the MPS daemon has ended by itself")
	}
	// In one line: the last one of the log is what the pod's status shows.
	return fmt.Errorf("the MPS daemon has ended by itself: %w: %s", r.err, strings.Join(strings.Fields(string(r.output.text)), " "))
}

// end ends the daemon, by its own command, and by ever stronger signals where that does not help. What it has started goes with it.
func (d Daemon) end(ctx context.Context, p program, r *process) (err error) {
	group := -r.cmd.Process.Pid
	defer func() {
		if killed := kill(group, syscall.SIGKILL); killed != nil {
			err = errors.Join(err, fmt.Errorf("end the servers of the MPS daemon: %w", killed))
		}
	}()
	logger := klog.FromContext(ctx)
	// The context is done, mostly.
	ctx = context.WithoutCancel(ctx)
	for _, way := range []struct {
		name string
		do   func() error
	}{
		{"quit", func() error { _, err := p.tell(ctx, "quit"); return err }},
		{"SIGTERM", func() error { return kill(group, syscall.SIGTERM) }},
		{"SIGKILL", func() error { return kill(group, syscall.SIGKILL) }},
	} {
		select {
		case <-r.ended:
			return nil
		default:
		}
		if err := way.do(); err != nil {
			logger.Info("The MPS daemon cannot be asked to end", "by", way.name, "err", err)
			continue
		}
		timer := time.NewTimer(d.Grace)
		select {
		case <-r.ended:
			timer.Stop()
			return nil
		case <-timer.C:
			logger.Info("The MPS daemon has not ended", "by", way.name, "after", d.Grace)
		}
	}
	return fmt.Errorf("end the MPS daemon: process %d cannot be killed", -group)
}

// kill signals a process group, if there is one.
func kill(group int, signal syscall.Signal) error {
	if err := syscall.Kill(group, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return nil
}

// Ready fails unless this pod has the daemon and has called it ready: another pod may have come to the same directory. The pod's
// readiness probe calls it.
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

// Answers returns an error if a ready daemon does not accept clients. It returns nil for a daemon that is not ready, as during
// start and stop. The pod's liveness probe calls it.
func (d Daemon) Answers(ctx context.Context) error {
	if ready, err := d.isReady(); err != nil || !ready {
		return err
	}
	p, err := d.withDefaults().findProgram()
	if err != nil {
		return err
	}
	_, err = p.tell(ctx, answerCommand)
	return err
}
