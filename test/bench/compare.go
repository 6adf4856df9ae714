// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/test/figure"
	"github.com/tandem-gpu/tandem/test/kubelet"
)

// noWorse is how much more than the other build a call may cost.
const noWorse = 1.05

// rival returns a run with the other build on a node of its own, against the same API server.
func (r *run) rival(ctx context.Context) (*run, error) {
	node := *r.node
	node.name, node.dir = rivalName, r.node.path("b") // a socket's path has 107 bytes at most
	if err := os.MkdirAll(node.dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of the other build: %w", err)
	}
	agent := r.Against
	info, err := os.Stat(agent)
	if err != nil {
		return nil, fmt.Errorf("find the other build: %w", err)
	}
	if info.IsDir() {
		programs, err := image.Binaries(ctx, image.Options{Root: agent, Progress: r.Progress})
		if err != nil {
			return nil, err
		}
		agent, node.hook, node.programs = programs.Agent, programs.Hook, programs.Simulated
	}
	node.agent = node.path("kubelet-plugin")
	other := *r
	other.node = &node
	return &other, image.Unpack(agent, node.agent)
}

// pair has the same of this build and of the other one.
type pair[T any] [2]T

// compare measures both builds at the same time, call by call: what the machine does beside them changes from second to second.
func (r *run) compare(ctx context.Context) (err error) {
	other, err := r.rival(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, other.node.remove()) }()
	runs := pair[*run]{r, other}
	for _, run := range runs {
		if err := run.node.prepare(ctx, small.profile); err != nil {
			return err
		}
		if run.kubelet, err = kubelet.Start(ctx, kubelet.Options{Dir: run.node.path("kubelet")}); err != nil {
			return err
		}
		defer run.kubelet.Stop()
	}
	if err := r.compareStarts(ctx, runs); err != nil {
		return err
	}
	var subjects pair[*subject]
	for i, run := range runs {
		r.say("starting %s", run.node.name)
		m := small
		if i == 1 {
			m.flags = []string{"--http-endpoint=:8081"} // both are on one machine
		}
		s, _, err := run.begin(ctx, m, config.ModeDual)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.agent.stop()) }()
		if s.claims, err = createClaims(ctx, r.client, s.node.name, s.node.name, small.gpus); err != nil {
			return err
		}
		subjects[i] = s
	}
	err = r.compareIdle(ctx, runs, subjects)
	if err == nil {
		err = r.compareClaims(ctx, subjects)
	}
	if err == nil {
		err = r.compareLimits(ctx, subjects)
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s\n%s", err, subjects[0].agent.log, subjects[1].agent.log)
	}
	return err
}

// ofEach returns a call for each build. inTurns changes their order.
func ofEach(call func(i, which int) error) []func(int) error {
	return []func(int) error{
		func(i int) error { return call(i, 0) },
		func(i int) error { return call(i, 1) },
	}
}

// enough is how many measurements are compared with a goal. Fewer of them differ by more than the goal in two runs of one build.
const enough = 100

// against adds a figure of this build, which the other's is the floor of, that of the other, and the ratio.
func (r *run) against(ours figure.Figure, theirs float64) {
	other := figure.Figure{Name: ours.Name + "_against", Value: theirs, Unit: ours.Unit, N: ours.N}
	goal := figure.Goal{}
	if ours.N >= enough {
		goal.Factor = noWorse
	}
	r.figures = append(r.figures, ours.Over(other, goal), other)
	if theirs > 0 {
		r.figures = append(r.figures, figure.Figure{Name: ours.Name + "_ratio", Value: ours.Value / theirs, Unit: "ratio", N: ours.N})
	}
}

func (r *run) againstCalls(name string, took pair[figure.Samples], percentiles ...float64) {
	for _, p := range percentiles {
		r.against(took[0].Figure(fmt.Sprintf("%s_p%.0f", name, p), p), took[1].Percentile(p))
	}
}

func (r *run) compareStarts(ctx context.Context, runs pair[*run]) error {
	r.say("starting each agent %d times", r.Starts)
	var registered, stopped pair[figure.Samples]
	err := inTurns(ctx, r.Starts, ofEach(func(_, which int) error {
		s, took, err := runs[which].begin(ctx, small, config.ModeDual)
		if err != nil {
			return err
		}
		registered[which] = append(registered[which], took.registered)
		return timed(&stopped[which], s.agent.stop)
	})...)
	if err != nil {
		return err
	}
	r.againstCalls("start_to_registered", registered, 50)
	r.againstCalls("stop", stopped, 50)
	return nil
}

func (r *run) compareIdle(ctx context.Context, runs pair[*run], subjects pair[*subject]) error {
	var group errgroup.Group
	idle := pair[run]{*runs[0], *runs[1]}
	for i := range idle {
		idle[i].figures = nil
		group.Go(func() error { return idle[i].addIdle(ctx, subjects[i], "", 0) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for i, ours := range idle[0].figures {
		r.against(ours, idle[1].figures[i].Value)
	}
	return nil
}

// withCPU makes calls and adds the CPU time that each agent uses for one of them, with all that it does meanwhile.
func (r *run) withCPU(name string, calls int, subjects pair[*subject], do func() error) error {
	var before, after pair[float64]
	read := func(into *pair[float64]) error {
		for i, s := range subjects {
			used, err := figure.ReadCPU(s.agent.cmd.Process.Pid)
			if err != nil {
				return err
			}
			into[i] = used.Seconds() * 1000 / float64(calls)
		}
		return nil
	}
	if err := read(&before); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	if err := read(&after); err != nil {
		return err
	}
	r.against(figure.Figure{Name: name, Value: after[0] - before[0], Unit: "ms", N: calls}, after[1]-before[1])
	return nil
}

func (r *run) compareClaims(ctx context.Context, subjects pair[*subject]) error {
	r.say("preparing claims one at a time")
	var prepares, unprepares pair[figure.Samples]
	err := r.withCPU("claim_cpu", r.Calls, subjects, func() error {
		return inTurns(ctx, r.Calls, ofEach(func(i, which int) error {
			s := subjects[which]
			claim := s.claims[i%len(s.claims)]
			if err := timed(&prepares[which], func() error { return s.prepare(ctx, claim) }); err != nil {
				return err
			}
			if err := timed(&unprepares[which], func() error { return s.unprepare(ctx, claim) }); err != nil {
				return err
			}
			return s.replacePods(ctx, claim)
		})...)
	})
	if err != nil {
		return err
	}
	r.againstCalls("prepare", prepares, 50, 99)
	r.againstCalls("unprepare", unprepares, 50, 99)
	return nil
}

// compareLimits compares Allocate of one GPU after the other, with a call that does nothing before each: it shows what the last Allocate
// has left running.
func (r *run) compareLimits(ctx context.Context, subjects pair[*subject]) error {
	r.say("allocating limits")
	var empty, allocates pair[figure.Samples]
	cycles := (r.Calls + small.gpus - 1) / small.gpus
	err := r.withCPU("limit_cpu", cycles*small.gpus, subjects, func() error {
		for cycle := range cycles {
			var pods pair[*corev1.Pod]
			for i, s := range subjects {
				var err error
				if pods[i], err = createPod(ctx, r.client, s.node.name, fmt.Sprintf("%s-limit-%d", s.node.name, cycle)); err != nil {
					return err
				}
			}
			err := inTurns(ctx, small.gpus, ofEach(func(i, which int) error {
				s := subjects[which]
				if err := timed(&empty[which], func() error { return s.empty(ctx) }); err != nil {
					return err
				}
				request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: s.ids[i : i+1]}}}
				return timed(&allocates[which], func() error { _, err := s.plugin.Allocate(ctx, request); return err })
			})...)
			if err != nil {
				return fmt.Errorf("allocate: %w", err)
			}
			for i, s := range subjects {
				if err := s.release(ctx, pods[i]); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.againstCalls("empty_call", empty, 50, 99)
	r.againstCalls("allocate", allocates, 50, 99)
	return nil
}
