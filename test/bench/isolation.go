// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/figure"
)

const (
	// slowly is how long the driver takes for a GPU instance where it is slow.
	slowly = 2 * time.Second
	// isolations is how often the others are prepared while it does, and how often while it does not.
	isolations = 8
	// onesAGPU is how many 1g.10gb an H100 has room for.
	onesAGPU = 7
)

// measureIsolation measures what a GPU on which a partition takes its time costs those who want partitions of others.
func (r *run) measureIsolation(ctx context.Context) error {
	m, err := r.dynamicMachine()
	if err != nil {
		return err
	}
	r.say("partitions beside one that takes %s", slowly)
	var claims []*resourceapi.ResourceClaim
	for i := range small.gpus * onesAGPU {
		gpu, start := i/onesAGPU, i%onesAGPU
		claim, err := createClaim(ctx, r.client, fmt.Sprintf("isolated-%d", i), fmt.Sprintf("%s/gpu-%02d", nodeName, gpu), fmt.Sprintf("gpu-%d-mig-1g10gb-19-%d", gpu, start))
		if err != nil {
			return err
		}
		claims = append(claims, claim)
	}
	return r.on(ctx, m, config.ModeDual, claims, func(ctx context.Context, s *subject) error { return r.add(s.besideASlowGPU(ctx)) })
}

// besideASlowGPU prepares claims for partitions of all GPUs but the first, in turns with the same while a partition of the first
// is being made, slowly.
func (s *subject) besideASlowGPU(ctx context.Context) ([]figure.Figure, error) {
	slow, others := s.claims[0], s.claims[onesAGPU:]
	var alone, beside figure.Samples
	for range isolations {
		if err := s.prepareAll(ctx, others, &alone, nil); err != nil {
			return nil, err
		}
		if err := s.unprepareAll(ctx, others); err != nil {
			return nil, err
		}
		if err := s.slowDown(map[string]simulated.CallFault{"CreateGpuInstanceWithPlacement": {Delay: simulated.Duration(slowly)}}); err != nil {
			return nil, err
		}
		began, made := time.Now(), make(chan error, 1)
		go func() {
			err := s.prepare(ctx, slow)
			if took := time.Since(began); err == nil && took < slowly {
				err = fmt.Errorf("prepare %s: it took %s only", slow.Name, took)
			}
			made <- err
		}()
		err := s.prepareAll(ctx, others, &beside, made)
		if err = errors.Join(err, <-made, s.slowDown(nil)); err != nil {
			return nil, err
		}
		if err := s.unprepareAll(ctx, append(others[:len(others):len(others)], slow)); err != nil {
			return nil, err
		}
	}
	return []figure.Figure{
		beside.Figure("prepare_beside_slow_gpu_p50", 50).Over(alone.Figure("", 50), figure.Goal{}),
		beside.Figure("prepare_beside_slow_gpu_p99", 99).Over(alone.Figure("", 99), figure.Goal{Factor: 1, Margin: 5}),
	}, nil
}

// prepareAll prepares one claim after the other, until there is something in done.
func (s *subject) prepareAll(ctx context.Context, claims []*resourceapi.ResourceClaim, into *figure.Samples, done <-chan error) error {
	for _, claim := range claims {
		if len(done) > 0 {
			return nil
		}
		if err := timed(into, func() error { return s.prepare(ctx, claim) }); err != nil {
			return err
		}
	}
	return nil
}

// unprepareAll returns when their partitions are gone. One that was never prepared is none.
func (s *subject) unprepareAll(ctx context.Context, claims []*resourceapi.ResourceClaim) error {
	for _, claim := range claims {
		if err := s.unprepare(ctx, claim); err != nil {
			return err
		}
	}
	if err := s.replacePods(ctx, claims...); err != nil {
		return err
	}
	return s.awaitNoPartition(ctx)
}

// slowDown puts faults of calls on the first GPU into force, in place of those before.
func (s *subject) slowDown(calls map[string]simulated.CallFault) error {
	return simulated.WriteFaults(s.node.path(small.profile), simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "0", Calls: calls}}})
}
