// SPDX-License-Identifier: Apache-2.0

// Package scale measures Tandem on a fleet: real etcd, kube-apiserver, kube-controller-manager and kube-scheduler, the shipped
// controller as a process, and in this process the front-ends of an agent for each node (machine.go). Kubelets are simulated (kubelet.go).
// docs/dev/scale.md says what the figures mean and what was scaled down.
package scale

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/progress"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
	"github.com/tandem-gpu/tandem/test/figure"
)

// Options of a run. Zero values are replaced by defaults.
type Options struct {
	// Nodes is the size of the fleet. Default 100.
	Nodes int
	// Rate is how many pods are created in a second, Traffic for how long. Defaults 20 and 20 s.
	Rate    int
	Traffic time.Duration
	// Curves is the directory for the curves (SVG); empty for none.
	Curves string
	// Log gets what the agents log; nil for nowhere.
	Log io.Writer
	// Progress gets a line a step; nil is silence.
	Progress io.Writer
}

// What each node has besides the traffic: GPUs that running pods have by claims, claims without devices, and pods that a scheduling gate
// keeps Pending. At 5,000 nodes that makes 100,000 claims and 20,000 pending pods.
const (
	gpusANode    = 8
	occupied     = 4
	otherClaims  = 16
	pendingANode = 4

	model      = "H100-80GB"
	namespace  = "default"
	idleWindow = 20 * time.Second
	// atOnce is how many requests the harness makes at once for these objects.
	atOnce = 64
)

type run struct {
	Options
	progress *progress.Log
	dir      string
	cluster  *cluster.Cluster
	api      *rest.Config
	client   kubernetes.Interface
	programs image.Programs
	chart    chart
	fleet    *fleet
	curves   *curves
	figures  []figure.Figure
}

// Run measures everything and returns the figures, those before an error as well. It needs root, and leaves nothing behind but the curves.
func Run(ctx context.Context, o Options) (figures []figure.Figure, err error) {
	o.Nodes, o.Rate, o.Traffic = cmp.Or(o.Nodes, 100), cmp.Or(o.Rate, 20), cmp.Or(o.Traffic, 20*time.Second)
	if o.Nodes < 1 || o.Rate < 1 || o.Rate > 1000 || o.Traffic < time.Second {
		return nil, fmt.Errorf("measure %d nodes with %d pods a second for %s: want at least 1, 1 to 1000, and 1s", o.Nodes, o.Rate, o.Traffic)
	}
	r := &run{Options: o, progress: progress.New(o.Progress), curves: newCurves()}
	if r.dir, err = cluster.OwnedDir(ctx, "tandem-scale-", o.Progress); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	if r.programs, err = image.Binaries(ctx, image.Options{Progress: o.Progress}); err != nil {
		return nil, err
	}
	unpacked := filepath.Join(r.dir, "controller")
	if err := image.Unpack(r.programs.Controller, unpacked); err != nil {
		return nil, err
	}
	r.programs.Controller = unpacked
	r.cluster, err = cluster.New(cluster.Config{
		Dir: filepath.Join(r.dir, "cluster"), NoNodes: true, AuditPolicy: auditPolicy, Progress: o.Progress,
		// The scheduler's default of 50 requests a second is less than what is measured.
		SchedulerArgs: []string{"--kube-api-qps=5000", "--kube-api-burst=10000"},
		APIServerArgs: []string{"--audit-log-maxsize=0"}, // one file: readWrites reads no rotated one
		// No kubelet renews a Lease.
		ControllerManagerArgs: []string{"--controllers=*,-node-lifecycle-controller"},
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.cluster.Stop(context.WithoutCancel(ctx))) }()
	if err := r.cluster.Start(ctx); err != nil {
		return nil, err
	}
	if r.api, err = r.cluster.RESTConfig(); err != nil {
		return nil, err
	}
	r.api.ContentType = "application/vnd.kubernetes.protobuf"
	if r.client, err = kubernetes.NewForConfig(r.api); err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	if r.chart, err = r.install(ctx); err != nil {
		return nil, err
	}
	if err := r.measure(ctx); err != nil {
		return r.figures, err
	}
	return r.figures, errors.Join(r.compareLayouts(ctx), r.curves.write(o.Curves))
}

func (r *run) say(format string, args ...any) { r.progress.Say(format, args...) }

func (r *run) add(figures ...figure.Figure) { r.figures = append(r.figures, figures...) }

// inventory is what each node has.
func inventory(node string, dynamic bool) (device.Inventory, error) {
	m, known := models.Named(model)
	if !known {
		return device.Inventory{}, fmt.Errorf("find model %s: it is unknown", model)
	}
	inv := device.Inventory{DriverVersion: "570.86.15"}
	for i := range gpusANode {
		inv.GPUs = append(inv.GPUs, device.GPU{
			UUID: fmt.Sprintf("GPU-%s-%d", node, i), Index: i, Minor: i, PCIBusID: fmt.Sprintf("0000:%02x:00.0", 0x10+i), NUMANode: i / 4,
			PCIClass: device.PCIClass3D, ProductName: m.Product, Brand: "Nvidia", Architecture: "Hopper", ComputeCapability: "9.0",
			DriverVersion: inv.DriverVersion, CUDADriverVersion: "12.8", MemoryBytes: uint64(m.Total.MemoryBytes),
			MIGCapable: true, MIGEnabled: dynamic, Dynamic: dynamic, Profiles: m.Offered(), NVLinkDomain: "0",
		})
	}
	return inv, nil
}

// measure runs the fleet, and the controller on it.
func (r *run) measure(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(klog.NewContext(ctx, textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(cmp.Or(r.Log, io.Discard))))))
	if err := r.startFleet(ctx, group); err != nil {
		stop()
		return errors.Join(err, group.Wait())
	}
	group.Go(func() error {
		defer stop()
		return r.scenarios(ctx)
	})
	return group.Wait()
}

func (r *run) scenarios(ctx context.Context) error {
	if err := r.occupy(ctx); err != nil {
		return err
	}
	leader, err := r.firstStart(ctx)
	if err != nil {
		return err
	}
	defer func() { leader.kill() }()
	if err := r.idle(ctx, leader); err != nil {
		return err
	}
	if err := r.traffic(ctx, leader); err != nil {
		return err
	}
	if leader, err = r.handOver(ctx, leader); err != nil {
		return err
	}
	return r.restartAPIServer(ctx)
}
