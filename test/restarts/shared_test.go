// SPDX-License-Identifier: Apache-2.0

package restarts

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/sharing"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/simdriver"
)

// sharedNode is a simulated machine with the driver's programs, and an agent's sharing manager on it.
type sharedNode struct {
	*testing.T
	host, run, cdiDir string
	node              *nvml.Node
	manager           *sharing.Manager
	specs             *cdi.Specs
}

func newSharedNode(t *testing.T) *sharedNode {
	if os.Getuid() != 0 {
		t.Skip("the MPS daemon is run chrooted into the driver's root, which needs root")
	}
	profile, err := simulated.Load("h100x8")
	check(t, err)
	profile.GPUs, profile.NVLink = profile.GPUs[:3], nil
	s := &sharedNode{T: t, host: t.TempDir(), run: t.TempDir(), cdiDir: t.TempDir()}
	check(t, simulated.Materialize(machineDir(s.host), profile, simulated.MaterializeOptions{Programs: simdriver.Build(t)}))
	for _, dir := range []string{"tmp", "dev/shm"} {
		check(t, os.MkdirAll(filepath.Join(s.driver(), dir), 0o755))
	}
	s.node, err = open(t.Context(), s.host)
	check(t, err)
	s.restart()
	return s
}

func (s *sharedNode) driver() string { return filepath.Join(machineDir(s.host), simulated.DriverDir) }

// restart is a new process of the agent.
func (s *sharedNode) restart() {
	s.Helper()
	records := sharing.NewRecords(filepath.Join(s.run, "sharing"), "boot")
	problems, err := records.Load()
	if err != nil || len(problems) > 0 {
		s.Fatal(err, problems)
	}
	s.specs = cdi.New(cdi.Options{Dir: s.cdiDir, Source: s.node})
	s.manager = sharing.NewManager(sharing.Options{Records: records, RunDir: s.run, DriverRoot: s.node.DriverRoot(), Hardware: s.node, Specs: s.specs})
}

// serve is the pod of the daemon that is wanted, until stop is called.
func (s *sharedNode) serve() (stop func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.Context())
	var running sync.WaitGroup
	manager := s.manager
	running.Go(func() {
		for ctx.Err() == nil {
			changed := manager.Changed()
			if daemons := manager.Daemons(); len(daemons) > 0 {
				d := mps.Daemon{
					Settings: daemons[0].Settings, Dir: mps.Dir(s.run, daemons[0].Name), Root: s.driver(), PipeDir: mps.ClientPipeDir, LogDir: mps.ClientLogDir,
					Mounts: s.driver(), Volumes: "/pods/uid", Pod: "uid", Grace: time.Second,
				}
				if err := d.Run(ctx); err != nil && ctx.Err() == nil {
					s.Errorf("daemon: %v", err)
				}
				continue
			}
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	})
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	s.Cleanup(stop)
	return stop
}

func (s *sharedNode) want(gpu int, mode device.ComputeMode, slice int) {
	s.Helper()
	uuid := s.node.Inventory().GPUs[gpu].UUID
	gotMode, err := s.node.ComputeMode(s.Context(), uuid)
	check(s.T, err)
	gotSlice, err := simulated.TimeSlice(machineDir(s.host), uuid)
	check(s.T, err)
	if gotMode != mode || gotSlice != slice {
		s.Errorf("GPU %d is in mode %s with slice %d, want %s and %d", gpu, gotMode, gotSlice, mode, slice)
	}
}

func (s *sharedNode) group(uid string, how parametersv1beta1.Sharing, gpus ...int) sharing.Group {
	g := sharing.Group{Claim: sharing.Claim{UID: uid, Namespace: "apps", Name: uid}, Sharing: how}
	for _, i := range gpus {
		g.Devices = append(g.Devices, device.Device{GPU: s.node.Inventory().GPUs[i]})
	}
	return g
}

func (s *sharedNode) revertAll() {
	s.Helper()
	for _, key := range s.manager.All() {
		if err := s.revert(key); !errors.Is(err, sharing.ErrStillShared) {
			check(s.T, err)
		}
	}
}

// apply calls the Manager as the DRA driver does.
func (s *sharedNode) apply(g sharing.Group) ([]string, error) {
	return s.manager.Apply(s.Context(), g, func() error { return nil })
}

// revert calls the Manager as the reconciler does.
func (s *sharedNode) revert(key sharing.Key) error {
	return s.manager.Revert(s.Context(), key, func() bool { return true })
}

// The manager, the driver's own programs, the supervisor of a daemon and a container runtime's reader agree.
func TestShared(t *testing.T) {
	s := newSharedNode(t)
	stop := s.serve()
	check(t, s.specs.Ensure(t.Context()))
	slicing := parametersv1beta1.Sharing{Strategy: parametersv1beta1.TimeSlicing, Interval: parametersv1beta1.IntervalLong}
	_, err := s.apply(s.group("uid-a", slicing, 0))
	check(t, err)
	percentage := 40
	clients := parametersv1beta1.Sharing{Strategy: parametersv1beta1.MPSStrategy, MPS: &parametersv1beta1.MPS{ActiveThreadPercentage: &percentage}}
	g := s.group("uid-b", clients, 2, 1)
	devices, err := s.apply(g)
	check(t, err)
	look := func() {
		t.Helper()
		s.want(0, device.ComputeModeDefault, 3)
		s.want(1, device.ComputeModeExclusiveProcess, 0)
		s.want(2, device.ComputeModeExclusiveProcess, 0)
		cache, err := cdilib.NewCache(cdilib.WithSpecDirs(s.cdiDir), cdilib.WithAutoRefresh(false))
		check(t, err)
		if len(devices) != 1 || !slices.Contains(cache.ListDevices(), devices[0]) || len(cache.GetErrors()) > 0 {
			t.Errorf("%v is not among %v: %v", devices, cache.ListDevices(), cache.GetErrors())
		}
	}
	look()

	// The agent is started anew, and the daemon's pod is another one.
	stop()
	s.restart()
	s.serve()
	again, err := s.apply(g)
	if err != nil || !slices.Equal(again, devices) {
		t.Errorf("after a restart: %v, %v", again, err)
	}
	look()
	s.revertAll()
	for gpu := range 3 {
		s.want(gpu, device.ComputeModeDefault, 0)
	}
	for _, dir := range []string{"mps", "sharing"} {
		if left, err := os.ReadDir(filepath.Join(s.run, dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
	if specs, err := filepath.Glob(filepath.Join(s.cdiDir, "*")); err != nil || len(specs) != 1 {
		t.Errorf("specs %v, %v", specs, err)
	}
}
