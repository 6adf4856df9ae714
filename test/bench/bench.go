// SPDX-License-Identifier: Apache-2.0

// Package bench measures the shipped agent binary: it runs it as a process on simulated GPUs against a real API server, and
// plays kubelet to it over the real sockets. What the machine alone costs is measured in turns with what is compared to it.
// It judges no correctness beyond that every call succeeds; the end-to-end tests do.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/progress"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/test/figure"
	"github.com/tandem-gpu/tandem/test/kubelet"
)

// Options of a run. Zero values are replaced by defaults.
type Options struct {
	// Agent is the binary to measure; when empty it is compiled as for the image.
	Agent string
	// Against is another build, a binary or a directory with its source, with which Agent is compared. Nothing else is measured then.
	Against string
	// Calls is the least number of measurements of each kind of call. Default 320.
	Calls int
	// Starts is how many times the agent is started for the figures about starting. Default 12.
	Starts int
	// Idle is how long the agent is left alone before its idle memory is read. Default 3 min: memory grows for two minutes. CPU is that of
	// the last minute.
	Idle time.Duration
	// Progress gets a line a step; nil is silence.
	Progress io.Writer
}

// machine is one that the agent believes to be on.
type machine struct {
	profile string
	// devices is how many are published, gpus how many GPUs there are.
	devices, gpus int
	// flags are those of the agent that only this machine needs.
	flags []string
}

var (
	// small is the usual machine, large the one with room for hundreds of claims.
	small = machine{profile: "h100x8", devices: 8, gpus: 8}
	large = machine{profile: "bench256", devices: 256, gpus: 256}
)

// run is one run of the benchmark.
type run struct {
	Options
	progress *progress.Log
	client   kubernetes.Interface
	node     *node
	kubelet  *kubelet.Kubelet
	figures  []figure.Figure
	// measured is how many agents were measured with claims of their own.
	measured int
}

// Run measures everything and returns the figures. With an error it returns the figures that were measured before it. Run needs root, takes
// several minutes, and leaves nothing behind.
func Run(ctx context.Context, o Options) (figures []figure.Figure, err error) {
	if o.Calls <= 0 {
		o.Calls = 320
	}
	if o.Starts <= 0 {
		o.Starts = 12
	}
	if o.Idle <= 0 {
		o.Idle = 3 * time.Minute
	}
	r := &run{Options: o, progress: progress.New(o.Progress)}
	dir, err := cluster.OwnedDir(ctx, "tandem-bench-", o.Progress)
	if err != nil {
		return nil, err
	}
	r.node = &node{name: nodeName, dir: dir}
	defer func() { err = errors.Join(err, r.node.remove()) }()
	if err := r.build(ctx); err != nil {
		return nil, err
	}
	c, err := cluster.New(cluster.Config{Dir: filepath.Join(dir, "cluster"), APIServerOnly: true, Progress: o.Progress})
	if err != nil {
		return nil, err
	}
	r.node.cluster = c
	defer func() { err = errors.Join(err, c.Stop(context.WithoutCancel(ctx))) }()
	if err := c.Start(ctx); err != nil {
		return nil, err
	}
	err = r.measure(ctx)
	r.say("cleaning up")
	return r.figures, err
}

func (r *run) say(format string, args ...any) { r.progress.Say(format, args...) }

func (r *run) build(ctx context.Context) error {
	programs, err := image.Binaries(ctx, image.Options{Progress: r.Progress})
	if err != nil {
		return err
	}
	r.node.agent, r.node.hook, r.node.programs = programs.Agent, programs.Hook, programs.Simulated
	if r.Agent != "" {
		r.node.agent = r.Agent
	}
	unpacked := r.node.path("kubelet-plugin")
	if err := image.Unpack(r.node.agent, unpacked); err != nil {
		return err
	}
	r.node.agent = unpacked
	return nil
}

func (r *run) measure(ctx context.Context) (err error) {
	config, err := r.node.cluster.RESTConfig()
	if err != nil {
		return err
	}
	if r.client, err = newClient(config); err != nil {
		return err
	}
	if err := createObjects(ctx, r.client, nodeName, rivalName); err != nil {
		return err
	}
	if r.Against != "" {
		return r.compare(ctx)
	}
	r.say("simulating %s and %s", small.profile, large.profile)
	if err := r.node.prepare(ctx, small.profile, large.profile); err != nil {
		return err
	}
	if r.kubelet, err = kubelet.Start(ctx, kubelet.Options{Dir: r.node.path("kubelet")}); err != nil {
		return err
	}
	defer r.kubelet.Stop()
	if err := r.measureStarts(ctx); err != nil {
		return err
	}
	if err := r.with(ctx, small, r.measureSmall); err != nil {
		return err
	}
	if err := r.measureHealth(ctx); err != nil {
		return err
	}
	if err := r.measureTaintRules(ctx); err != nil {
		return err
	}
	if err := r.measureModes(ctx); err != nil {
		return err
	}
	if err := r.measureSharing(ctx); err != nil {
		return err
	}
	if err := r.measurePartitions(ctx); err != nil {
		return err
	}
	if err := r.measureIsolation(ctx); err != nil {
		return err
	}
	if err := r.with(ctx, large, r.measureLarge); err != nil {
		return err
	}
	return r.pack()
}

func (r *run) add(figures []figure.Figure, err error) error {
	r.figures = append(r.figures, figures...)
	return err
}

// startup is the time from the start of an agent's process to each step. A step of an API that is not served is meaningless.
type startup struct {
	// registered: the device plugin's Register arrives. identified: the DRA plugin answers GetInfo. published: all devices are in
	// ResourceSlices.
	registered, identified, published time.Duration
}

// begin starts an agent and waits until the APIs of its mode are served.
func (r *run) begin(ctx context.Context, m machine, mode config.Mode) (s *subject, took startup, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := wipeSlices(ctx, r.client, r.node.name); err != nil {
		return nil, startup{}, err
	}
	awaitPublished := func() (time.Time, error) { return time.Time{}, nil }
	if mode.Claims() {
		if awaitPublished, err = awaitSlices(ctx, r.client, r.node.name, m.devices); err != nil {
			return nil, startup{}, err
		}
	}
	s = &subject{client: r.client, node: r.node, kubelet: r.kubelet}
	if s.agent, err = r.node.start(ctx, m, mode); err != nil {
		return nil, startup{}, err
	}
	visible, err := awaitPublished()
	if err == nil {
		s.driver, s.plugin, err = s.agent.await(ctx, r.kubelet, mode)
	}
	if err != nil {
		return nil, startup{}, errors.Join(fmt.Errorf("%w\n%s", err, s.agent.log), s.agent.stop())
	}
	for _, d := range s.plugin.Devices {
		s.ids = append(s.ids, d.GetID())
	}
	took.registered, took.identified = s.plugin.Registered.Sub(s.agent.started), s.driver.Identified.Sub(s.agent.started)
	took.published = visible.Sub(s.agent.started)
	return s, took, nil
}

// startGoal is 40 ms where the program alone, with all that it is linked with, takes 15 ms.
var startGoal = figure.Goal{Factor: 40. / 15}

func (r *run) measureStarts(ctx context.Context) error {
	var program, registered, identified, published, stopped figure.Samples
	for i := range r.Starts {
		r.say("start %d of %d", i+1, r.Starts)
		if err := timed(&program, func() error { return exec.CommandContext(ctx, r.node.agent, "version").Run() }); err != nil {
			return fmt.Errorf("start a program that does nothing: %w", err)
		}
		s, took, err := r.begin(ctx, small, config.ModeDual)
		if err != nil {
			return err
		}
		if err := timed(&stopped, s.agent.stop); err != nil {
			return err
		}
		registered, identified, published = append(registered, took.registered), append(identified, took.identified), append(published, took.published)
	}
	floor := program.Figure("start_of_program", 50)
	return r.add([]figure.Figure{
		floor,
		registered.Figure("start_to_registered", 50).Over(floor, startGoal),
		identified.Figure("start_to_getinfo", 50).Over(floor, startGoal),
		published.Figure("start_to_published", 50).Within(300),
		stopped.Figure("stop", 50).Within(20),
	}, nil)
}

// patience bounds the measurements on one agent, which take about seven minutes: a call that hangs must not hang the run.
const patience = 15 * time.Minute

// with runs measurements on one agent.
func (r *run) with(ctx context.Context, m machine, measure func(context.Context, *subject) error) error {
	r.say("starting the agent on %s", m.profile)
	r.measured++
	claims, err := createClaims(ctx, r.client, r.node.name, fmt.Sprintf("%s-%d", m.profile, r.measured), m.gpus)
	if err != nil {
		return err
	}
	return r.on(ctx, m, config.ModeDual, claims, measure)
}

// on is with for claims that are there already, in a mode.
func (r *run) on(ctx context.Context, m machine, mode config.Mode, claims []*resourceapi.ResourceClaim,
	measure func(context.Context, *subject) error,
) error {
	s, _, err := r.begin(ctx, m, mode)
	if err != nil {
		return err
	}
	s.claims = claims
	limited, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("the measurements took longer than %s", patience))
	defer cancel()
	err = measure(limited, s)
	stopErr := s.agent.stop()
	if err != nil {
		err = fmt.Errorf("measure on %s in mode %s: %w\n%s", m.profile, mode, err, s.agent.log)
	}
	return errors.Join(err, stopErr)
}

func (r *run) measureSmall(ctx context.Context, s *subject) error {
	if err := r.addIdle(ctx, s, "", 45); err != nil {
		return err
	}
	r.say("preparing claims one at a time")
	if err := r.add(s.serialClaims(ctx, r.Calls)); err != nil {
		return err
	}
	r.say("preparing 8 claims at once")
	gets, prepares, err := s.concurrentClaims(ctx, 8, 2*r.Calls)
	if err != nil {
		return err
	}
	floor := gets.Figure("claim_get_conc8_p99", 99)
	if err := r.add([]figure.Figure{floor, prepares.Figure("prepare_conc8_p99", 99).Over(floor, figure.Goal{Factor: 1, Margin: 3})}, nil); err != nil {
		return err
	}
	r.say("allocating limits")
	if err := r.add(s.allocations(ctx, r.Calls)); err != nil {
		return err
	}
	r.say("asking for preferred allocations")
	if err := r.add(s.preferences(ctx, r.Calls, 1, 2, 4, 8)); err != nil {
		return err
	}
	if err := r.add(s.withdrawal(ctx)); err != nil {
		return err
	}
	return r.addMemory(s, "rss_loaded", 0)
}

func (r *run) measureLarge(ctx context.Context, s *subject) error {
	r.say("holding %d claims", held)
	if err := r.add(s.heldClaims(ctx)); err != nil {
		return err
	}
	r.say("preparing 56 claims at once")
	gets, prepares, err := s.concurrentClaims(ctx, 56, 2*r.Calls)
	if err != nil {
		return err
	}
	if err := r.add(s.withdrawal(ctx)); err != nil {
		return err
	}
	return r.add([]figure.Figure{prepares.Figure("prepare_conc56_p99", 99).Over(gets.Figure("", 99), figure.Goal{})}, nil)
}

// addIdle leaves the agent alone, and reads its CPU time of the last minute and then its memory. suffix distinguishes the figures; bound is the
// goal for memory.
func (r *run) addIdle(ctx context.Context, s *subject, suffix string, bound float64) error {
	r.say("leaving the agent alone for %s", r.Idle)
	watched := min(r.Idle, time.Minute)
	if !pause(ctx, r.Idle-watched) {
		return context.Cause(ctx)
	}
	pid := s.agent.cmd.Process.Pid
	before, err := figure.ReadCPU(pid)
	if err != nil {
		return err
	}
	began := time.Now()
	if !pause(ctx, watched) {
		return context.Cause(ctx)
	}
	after, err := figure.ReadCPU(pid)
	if err != nil {
		return err
	}
	aMinute := float64((after - before).Milliseconds()) * time.Minute.Seconds() / time.Since(began).Seconds()
	cpu := figure.Figure{Name: "idle_cpu" + suffix, Value: aMinute, Unit: "ms/min", N: 1}.Within(150)
	if err := r.add([]figure.Figure{cpu}, nil); err != nil {
		return err
	}
	return r.addMemory(s, "rss_idle"+suffix, bound)
}

// addMemory reads the resident memory of the agent; bound is its goal, zero for none.
func (r *run) addMemory(s *subject, name string, bound float64) error {
	m, err := figure.ReadMemory(s.agent.cmd.Process.Pid)
	if err != nil {
		return err
	}
	r.say("%s: %.1f MiB resident, of which %.1f anonymous, %.1f files", name, m.Resident, m.Anonymous, m.Files)
	f := figure.Figure{Name: name, Value: m.Resident, Unit: "MiB", N: 1}
	if bound > 0 {
		f = f.Within(bound)
	}
	return r.add([]figure.Figure{f}, nil)
}
