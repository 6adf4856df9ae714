// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/simnode"
	"github.com/tandem-gpu/tandem/test/figure"
)

const (
	// onDemand is a node configuration by which every GPU is partitioned as claims ask for it.
	onDemand = "version: v1\ntandem:\n  devices:\n  - {match: {model: NVIDIA H100 80GB HBM3}, mig: dynamic}\n"
	// placesAndWhole are the devices of an H100: all places of all profiles, and the whole GPU.
	placesAndWhole = 26
)

// measurePartitions has partitions made and destroyed for claims, in turns with the same by the driver alone on another machine.
func (r *run) measurePartitions(ctx context.Context) error {
	m, err := r.dynamicMachine()
	if err != nil {
		return err
	}
	r.say("partitions on demand")
	var claims []*resourceapi.ResourceClaim
	for i := range small.gpus {
		// One a GPU: a claim that is prepared while the partition before it goes waits for the driver.
		claim, err := createClaim(ctx, r.client, fmt.Sprintf("partition-%d", i), fmt.Sprintf("%s/gpu-%02d", nodeName, i), fmt.Sprintf("gpu-%d-mig-1g10gb-19-0", i))
		if err != nil {
			return err
		}
		claims = append(claims, claim)
	}
	return r.on(ctx, m, config.ModeDual, claims, func(ctx context.Context, s *subject) error {
		driver, err := openTwin(ctx, r.node.path("twin"))
		if err != nil {
			return err
		}
		return r.add(s.partitions(ctx, driver, r.Calls))
	})
}

// dynamicMachine is the small one with GPUs that are partitioned on demand.
func (r *run) dynamicMachine() (machine, error) {
	file := r.node.path("mig.yaml")
	if err := os.WriteFile(file, []byte(onDemand), 0o600); err != nil {
		return machine{}, fmt.Errorf("write node configuration: %w", err)
	}
	library := simnode.Library + filepath.Join(r.node.path(small.profile), simulated.ProfileFile)
	return machine{profile: small.profile, devices: small.gpus * placesAndWhole, flags: []string{"--config=" + file, "--nvml=" + library}}, nil
}

// openTwin makes another machine of the small one's kind, and opens its driver: what is done to it is the floor.
func openTwin(ctx context.Context, host string) (*nvml.Node, error) {
	profile, err := simulated.Load(small.profile)
	if err != nil {
		return nil, err
	}
	root := filepath.Join(host, "run/nvidia/simulated")
	if err := simulated.Materialize(root, profile, simulated.MaterializeOptions{}); err != nil {
		return nil, err
	}
	node := nvml.New(simnode.Options(nvml.Options{Host: nvml.Host{
		HostRoot: host, Library: simnode.Library + filepath.Join(root, simulated.ProfileFile), SysfsRoot: filepath.Join(root, simulated.SysfsDir),
	}}, ""))
	return node, node.Scan(ctx)
}

func (s *subject) partitions(ctx context.Context, driver *nvml.Node, n int) ([]figure.Figure, error) {
	gpu := driver.Inventory().GPUs[0]
	i := slices.IndexFunc(gpu.Profiles, func(p device.Profile) bool { return p.Name == "1g.10gb" })
	if i < 0 {
		return nil, fmt.Errorf("%s has no 1g.10gb", gpu.Name())
	}
	if err := driver.EnableMIG(ctx, gpu.UUID); err != nil {
		return nil, err
	}
	before, err := s.sliceVersions(ctx)
	if err != nil {
		return nil, err
	}
	var gets, creates, prepares figure.Samples
	err = inTurns(ctx, n,
		func(i int) error {
			return timed(&gets, func() error { return s.getClaim(ctx, s.claims[i%len(s.claims)]) })
		},
		func(int) error {
			ref := device.Ref{GPU: gpu.UUID, Placement: gpu.Profiles[i].Placements[0]}
			err := timed(&creates, func() error {
				// What is done before every partition is made: whose is what is there already?
				if _, err := driver.Partitions(ctx, gpu.UUID); err != nil {
					return err
				}
				_, err := driver.Create(ctx, ref, gpu.Profiles[i])
				return err
			})
			if err != nil {
				return err
			}
			return driver.Destroy(ctx, ref)
		},
		func(i int) error {
			claim := s.claims[i%len(s.claims)]
			if err := timed(&prepares, func() error { return s.prepare(ctx, claim) }); err != nil {
				return err
			}
			if err := s.unprepare(ctx, claim); err != nil {
				return err
			}
			if err := s.replacePods(ctx, claim); err != nil {
				return err
			}
			return s.awaitNoPartition(ctx)
		})
	if err != nil {
		return nil, err
	}
	after, err := s.sliceVersions(ctx)
	if err != nil {
		return nil, err
	}
	writes := 0
	for name, version := range after {
		if before[name] != version {
			writes++
		}
	}
	floor := figure.Figure{Name: "claim_get_and_nvml_p50", Value: gets.Percentile(50) + creates.Percentile(50), Unit: "ms", N: len(creates)}
	return []figure.Figure{
		creates.Figure("nvml_partition_p50", 50), floor,
		prepares.Figure("prepare_partition_p50", 50).Over(floor, figure.Goal{Factor: 1, Margin: 2}),
		figure.Figure{Name: "partition_slice_writes", Value: float64(writes), Unit: "slices", N: n}.Within(0),
	}, nil
}

// awaitNoPartition waits until the agent has done all that follows the end of a claim: the last thing is that the partition's CDI
// spec goes.
func (s *subject) awaitNoPartition(ctx context.Context) error {
	for {
		left, err := filepath.Glob(filepath.Join(s.node.cdiDir(), "*-MIG-*.json"))
		if err != nil || len(left) == 0 {
			return err
		}
		if !pause(ctx, 5*time.Millisecond) {
			return fmt.Errorf("%d partitions are left: %w", len(left), context.Cause(ctx))
		}
	}
}

// sliceVersions has the resource version of each slice of the node.
func (s *subject) sliceVersions(ctx context.Context) (map[string]string, error) {
	list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: ofNode(s.node.name)})
	if err != nil {
		return nil, fmt.Errorf("list slices: %w", err)
	}
	versions := map[string]string{}
	for _, slice := range list.Items {
		versions[slice.Name] = slice.ResourceVersion
	}
	return versions, nil
}
