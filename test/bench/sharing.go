// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/mps"
	"github.com/tandem-gpu/tandem/test/figure"
)

// Claims of measureSharing, each with a GPU of its own.
const (
	exclusive = iota
	sliced
	daemonized
)

// sharingOf has what each of them says of how its containers share the GPU, as kubectl writes it: short, and sorted. The API server
// takes no apply of a claim's status that would come to other bytes.
var sharingOf = []string{
	exclusive:  "",
	sliced:     `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`,
	daemonized: `{"mpsConfig":{"defaultActiveThreadPercentage":50},"strategy":"MPS"}`,
}

// measureSharing compares the Prepare of a claim whose GPU is shared already, by time-slicing or under an MPS daemon that is ready,
// with that of a claim that has its GPU for itself. All are prepared before.
func (r *run) measureSharing(ctx context.Context) error {
	r.say("preparing claims that are shared")
	var claims []*resourceapi.ResourceClaim
	for i, sharing := range sharingOf {
		var config []resourceapi.DeviceAllocationConfiguration
		if sharing != "" {
			parameters := `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":` + sharing + "}"
			config = append(config, resourceapi.DeviceAllocationConfiguration{
				Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{"gpu"},
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
				}},
			})
		}
		claim, err := createClaim(ctx, r.client, fmt.Sprintf("shared-%d", i), nodeName, fmt.Sprintf("gpu-%d", i), config...)
		if err != nil {
			return err
		}
		claims = append(claims, claim)
	}
	return r.on(ctx, small, config.ModeDual, claims, func(ctx context.Context, s *subject) error {
		return r.add(s.sharing(ctx, r.Calls))
	})
}

func (s *subject) sharing(ctx context.Context, n int) ([]figure.Figure, error) {
	daemon, stop := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.playDaemon(daemon) })
	took := make([]figure.Samples, len(s.claims))
	err := s.prepareAgain(ctx, n, took)
	stop()
	if err := errors.Join(err, group.Wait()); err != nil {
		return nil, err
	}
	floor := took[exclusive].Figure("prepare_again_p50", 50)
	return []figure.Figure{
		floor,
		took[sliced].Figure("prepare_timesliced_p50", 50).Over(floor, figure.Goal{Factor: 1, Margin: 0.3}),
		took[daemonized].Figure("prepare_mps_p50", 50).Over(floor, figure.Goal{Factor: 1, Margin: 0.3}),
	}, nil
}

// prepareAgain measures n times for each claim the Prepare of one that is prepared, and leaves nothing prepared.
func (s *subject) prepareAgain(ctx context.Context, n int, took []figure.Samples) error {
	var calls []func(int) error
	for i, claim := range s.claims {
		if err := s.prepare(ctx, claim); err != nil {
			return err
		}
		calls = append(calls, func(int) error { return timed(&took[i], func() error { return s.prepare(ctx, claim) }) })
	}
	if err := inTurns(ctx, n, calls...); err != nil {
		return err
	}
	for _, claim := range s.claims {
		if err := s.unprepare(ctx, claim); err != nil {
			return err
		}
	}
	// Sharing settings last until the pods of their claims have ended.
	if err := s.replacePods(ctx, s.claims...); err != nil {
		return err
	}
	for {
		left, err := filepath.Glob(s.node.path("run", "sharing", "*~*"))
		if err != nil || len(left) == 0 {
			return err
		}
		if !pause(ctx, 5*time.Millisecond) {
			return fmt.Errorf("await the end of what is shared: %v are left: %w", left, context.Cause(ctx))
		}
	}
}

// playDaemon is the supervisor of the one MPS daemon that is asked for, from when it is until the agent has it end.
func (s *subject) playDaemon(ctx context.Context) error {
	var records []string
	for len(records) == 0 {
		var err error
		if records, err = filepath.Glob(s.node.path("run", "sharing", string(s.claims[daemonized].UID)+"~*")); err != nil {
			return err
		}
		if len(records) == 0 && !pause(ctx, 5*time.Millisecond) {
			return nil // the requester has failed
		}
	}
	var contents struct {
		Record struct {
			Daemon   string       `json:"daemon"`
			Settings mps.Settings `json:"settings"`
		} `json:"record"`
	}
	for wanted := &contents.Record; wanted.Daemon == ""; {
		text, err := os.ReadFile(records[0])
		// The file is empty until the agent has written it.
		if err == nil && len(text) > 0 {
			err = json.Unmarshal(text, &contents)
		}
		if err != nil {
			return fmt.Errorf("read which daemon is requested: %w", err)
		}
		if wanted.Daemon == "" && !pause(ctx, 5*time.Millisecond) {
			return nil
		}
	}
	wanted := contents.Record
	dir := mps.Dir(s.node.runDir(), wanted.Daemon)
	for {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		if !pause(ctx, 5*time.Millisecond) {
			return nil
		}
	}
	holder, err := mps.Hold(ctx, dir)
	if err != nil {
		return err
	}
	err = holder.Publish(mps.Ready{Pod: "bench", Hash: wanted.Settings.Hash()})
	if err == nil {
		if err = holder.Await(ctx); errors.Is(err, mps.ErrStopped) || errors.Is(err, mps.ErrGone) || ctx.Err() != nil {
			err = nil
		}
	}
	return errors.Join(err, holder.Release())
}
