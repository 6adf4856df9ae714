// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/test/figure"
)

// idle measures what the fleet costs when nothing happens.
func (r *run) idle(ctx context.Context, leader *controller) error {
	r.say("leaving the fleet alone for %s", idleWindow)
	if err := pause(ctx, settled); err != nil {
		return err
	}
	began := time.Now()
	if err := pause(ctx, idleWindow); err != nil {
		return err
	}
	writes, err := readWrites(r.cluster.AuditLog(), began, time.Now())
	if err != nil {
		return err
	}
	r.say("writes while idle: %v", writes)
	memory, err := leader.memory()
	if err != nil {
		return err
	}
	r.add(
		figure.Figure{Name: "writes_idle", Value: float64(writes.total()) / idleWindow.Seconds(), Unit: "1/s", N: r.Nodes}.Within(0),
		figure.Figure{Name: "controller_rss_steady", Value: memory.Resident, Unit: "MiB", N: 1}.Within(200),
	)
	return nil
}

// settled is how long after the last change everything has been written.
const settled = 5 * time.Second

func pause(ctx context.Context, length time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(length):
		return nil
	}
}

// stay is how long a pod of the traffic runs.
const stay = 3 * time.Second

// traffic creates pods at a steady rate, one by a claim and one by a limit in turns, and deletes each after a while.
func (r *run) traffic(ctx context.Context, leader *controller) error {
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: claimSpec(install.DriverName)},
	}
	if _, err := r.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, template, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim template: %w", err)
	}
	n := int(r.Traffic.Seconds()) * r.Rate
	r.say("creating %d pods, %d a second", n, r.Rate)
	sampling, stop := context.WithCancel(ctx)
	defer stop()
	sampled := make(chan struct{})
	go func() { defer close(sampled); r.sample(sampling, leader) }()
	w, before := r.fleet.watched, r.fleet.watched.relays()
	began := time.Now()
	group, running := errgroup.WithContext(ctx)
	ticker := time.NewTicker(time.Second / time.Duration(r.Rate))
	defer ticker.Stop()
	for i := range n {
		select {
		case <-running.Done():
			return group.Wait()
		case <-ticker.C:
		}
		group.Go(func() error { return r.visit(running, i) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	ended := time.Now()
	if err := pause(ctx, settled); err != nil {
		return err
	}
	stop()
	<-sampled
	writes, err := readWrites(r.cluster.AuditLog(), began, time.Now())
	if err != nil {
		return err
	}
	r.say("writes of the traffic: %v", writes)
	memory, err := leader.memory()
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var relayed, started figure.Samples
	missed := 0
	for uid, since := range w.allocated {
		at, copied := w.relayed[uid]
		switch {
		case !since.After(began):
		case !copied:
			missed++ // its pod has ended before
		default:
			took := max(0, at.Sub(since)) // this program may see the copy first
			relayed = append(relayed, took)
			r.curves.latency(since, took)
		}
	}
	for _, v := range w.visitors {
		if !v.ran.IsZero() {
			started = append(started, v.ran.Sub(v.created))
		}
	}
	r.say("%d claims were copied before, %d since; the pods came and went in %.1f s", before, len(relayed), ended.Sub(began).Seconds())
	r.add(
		relayed.Figure("claim_to_node_p50", 50), relayed.Figure("claim_to_node_p99", 99).Within(1000),
		figure.Figure{Name: "claims_not_copied", Value: float64(missed), Unit: "claims", N: len(relayed) + missed}.Within(0),
		started.Figure("pod_start_p50", 50), started.Figure("pod_start_p99", 99),
		figure.Figure{Name: "writes_per_pod", Value: float64(writes.total()) / float64(n), Unit: "writes", N: n}.Within(7),
		figure.Figure{Name: "prepares_repeated", Value: float64(r.fleet.kubelets.retried.Load()), Unit: "calls", N: n},
		figure.Figure{Name: "failed_admissions", Value: float64(r.fleet.kubelets.failed.Load()), Unit: "pods", N: n},
		figure.Figure{Name: "controller_rss_traffic", Value: memory.Resident, Unit: "MiB", N: 1},
		figure.Figure{Name: "controller_rss_peak", Value: memory.Peak, Unit: "MiB", N: 1}.Within(300),
	)
	return nil
}

// visit takes one pod of the traffic from its creation to its end.
func (r *run) visit(ctx context.Context, i int) error {
	name := fmt.Sprintf("traffic-%d", i)
	pod := podWithClaim(name, corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: ptr.To("gpu")})
	if i%2 == 1 {
		pod = podWithClaim(name)
		amount := corev1.ResourceList{install.ResourceName: *resource.NewQuantity(1, resource.DecimalSI)}
		pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: amount, Requests: amount}
	}
	v := r.fleet.watched.expect(name)
	if _, err := r.createPod(ctx, namespace, pod); err != nil {
		return err
	}
	if err := happens(ctx, v.started, "pod "+name+" to run"); err != nil {
		return err
	}
	if err := pause(ctx, stay); err != nil {
		return err
	}
	if err := r.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	return happens(ctx, v.gone, "pod "+name+" to be gone")
}

// happens waits for an event.
func happens(ctx context.Context, event <-chan struct{}, what string) error {
	select {
	case <-event:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(patience):
		return fmt.Errorf("wait for %s: it took too long", what)
	}
}

// sample records the controller's memory and the running pods for the curves.
func (r *run) sample(ctx context.Context, leader *controller) {
	for pause(ctx, 250*time.Millisecond) == nil {
		memory, err := leader.memory()
		if err != nil {
			return // traffic reports it
		}
		r.curves.sample(time.Now(), memory.Resident, r.fleet.watched.count(corev1.PodRunning)-r.Nodes*occupied)
	}
}

// restartAPIServer measures how soon after a restart of the API server the GPUNodes of all nodes say what happened on them meanwhile.
func (r *run) restartAPIServer(ctx context.Context) error {
	r.say("restarting the API server")
	server := r.cluster.Component(cluster.APIServer)
	if err := server.Stop(ctx); err != nil {
		return err
	}
	for _, m := range r.fleet.machines {
		// The last GPU, which no running pod has.
		gpu := device.Ref{GPU: fmt.Sprintf("GPU-%s-%d", m.name, gpusANode-1)}
		if err := m.Ledger.ReservePod([]ledger.PodRequest{{ID: gpu.GPU, Resource: install.ResourceName, Device: gpu}}); err != nil {
			return fmt.Errorf("hold a GPU of %s: %w", m.name, err)
		}
	}
	if err := server.Start(ctx); err != nil {
		return err
	}
	began := time.Now()
	err := r.await(ctx, "all nodes to report", func() (int, int) { return r.fleet.watched.held(occupied + 1), r.Nodes })
	r.add(figure.Figure{Name: "api_restart", Value: time.Since(began).Seconds(), Unit: "s", N: r.Nodes}.Within(60))
	return err
}
