// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// differing is a rig whose events can be read.
type differing struct {
	*rig
	events *record.FakeRecorder
}

func newDiffering(t *testing.T, gpus ...string) *differing {
	d := &differing{newRig(t, gpus...), record.NewFakeRecorder(100)}
	d.r.Recorder, d.r.times.waitReported = d.events, 10*time.Second
	return d
}

// change edits the only GPU.
func (d *differing) change(edit func(*device.GPU)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	edit(&d.gpus[0])
}

// hold takes a hold of a pod or a claim on a device.
func (d *differing) hold(kind ledger.Kind, ref device.Ref) {
	d.t.Helper()
	h := ledger.Hold{Holder: ledger.Holder{Kind: kind, ID: "x"}, Device: ref, Pods: []ledger.Pod{{UID: "p1", Namespace: "apps", Name: "one"}}}
	if kind == ledger.KindClaim {
		h.Namespace, h.Name = "apps", "one"
	} else {
		h.Resource = resource
	}
	must(d.t, d.book.Expect(h))
}

// look answers the event of two looks that are some time apart, or an empty text.
func (d *differing) look(apart time.Duration) (text string) {
	d.t.Helper()
	now := time.Now()
	known, next := d.r.reportDifferences(nil, now)
	if len(d.events.Events) > 0 {
		d.t.Errorf("reported at once: %s", <-d.events.Events)
	}
	if len(known) > 0 && next != 10*time.Second {
		d.t.Errorf("looks again after %s", next)
	}
	known, _ = d.r.reportDifferences(known, now.Add(apart))
	select {
	case text = <-d.events.Events:
	default:
	}
	if d.r.reportDifferences(known, now.Add(time.Hour)); text != "" && len(d.events.Events) > 0 {
		d.t.Errorf("reported again: %s", <-d.events.Events)
	}
	return text
}

func wants(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range append(parts, "Warning HeldDeviceChanged ", "Delete the pods of this holder, or restore the GPU") {
		if !strings.Contains(text, part) {
			t.Errorf("event %q lacks %q", text, part)
		}
	}
}

// TestGPUThatIsCutUnderAPod: a pod without a process on the GPU has it as a whole, and the MIG manager cuts it.
func TestGPUThatIsCutUnderAPod(t *testing.T) {
	for kind, holder := range map[ledger.Kind]string{
		ledger.KindPod: "given to pod apps/one by its nvidia.com/gpu limit", ledger.KindClaim: "given to claim apps/one (x, ",
	} {
		d := newDiffering(t, "GPU-1:MIG-a,MIG-b")
		d.hold(kind, device.Ref{GPU: "GPU-1"})
		wants(t, d.look(10*time.Second), "gpu-1 (GPU-1) is in MIG mode, but", holder)
	}
	d := newDiffering(t, "GPU-1")
	d.change(func(g *device.GPU) { g.MIGEnabled = true })
	d.hold(ledger.KindPod, device.Ref{GPU: "GPU-1"})
	wants(t, d.look(10*time.Second), "gpu-1 (GPU-1) is in MIG mode, but")
}

// TestPartitionThatIsRemovedUnderAPod: it is destroyed while a pod has it.
func TestPartitionThatIsRemovedUnderAPod(t *testing.T) {
	d := newDiffering(t, "GPU-1:MIG-a")
	d.hold(ledger.KindPod, device.Ref{GPU: "GPU-1", Placement: device.Placement{Start: 3, Size: 1}})
	wants(t, d.look(10*time.Second), "partition GPU-1@3+1 of gpu-1 no longer exists", "given to pod apps/one")
	d = newDiffering(t, "GPU-1")
	made := device.Ref{GPU: "GPU-1", Placement: device.Placement{Size: 1}}
	d.change(func(g *device.GPU) { g.MIGEnabled, g.Dynamic = true, true })
	d.r.Partitions = newPartitions(made)
	d.hold(ledger.KindClaim, made)
	wants(t, d.look(10*time.Second), "partition GPU-1@0+1 of gpu-1 no longer exists", "given to claim apps/one")
}

// TestNothingDiffers: what Tandem does itself, what is reported elsewhere, and what ends soon.
func TestNothingDiffers(t *testing.T) {
	whole, first := device.Ref{GPU: "GPU-1"}, device.Ref{GPU: "GPU-1", Placement: device.Placement{Size: 1}}
	for what, c := range map[string]struct {
		gpus  string
		held  device.Ref
		edit  func(*device.GPU)
		made  []device.Ref
		state ledger.State
		apart time.Duration
		// creating is set if what is made is not complete.
		creating bool
	}{
		"a whole GPU":                                       {gpus: "GPU-1", held: whole},
		"a partition":                                       {gpus: "GPU-1:MIG-a", held: first},
		"a partition before Tandem records it":              {gpus: "GPU-1", held: first, edit: func(g *device.GPU) { g.Dynamic = true }},
		"a partition that Tandem creates":                   {gpus: "GPU-1", held: first, made: []device.Ref{first}, creating: true},
		"a partition of Tandem's beside a conflict":         {gpus: "GPU-1:MIG-a", held: whole, made: []device.Ref{first}},
		"MIG mode that Tandem has switched on":              {gpus: "GPU-1", held: whole, edit: func(g *device.GPU) { g.MIGEnabled, g.Dynamic = true, true }},
		"a GPU that does not answer":                        {gpus: "GPU-1", held: first, edit: func(g *device.GPU) { g.Health.Reason = device.ReasonLost }},
		"a GPU that is gone":                                {gpus: "GPU-2", held: first},
		"a holder that has ended":                           {gpus: "GPU-1:MIG-a", held: whole, state: ledger.StateDraining},
		"a GPU that is cut while the agent ends the holder": {gpus: "GPU-1:MIG-a", held: whole, apart: 9 * time.Second},
	} {
		d := newDiffering(t, c.gpus)
		d.hold(ledger.KindClaim, c.held)
		if c.edit != nil {
			d.change(c.edit)
		}
		partitions := newPartitions(c.made...)
		for _, ref := range c.made {
			if c.creating {
				partitions.set(ref, errCreating)
			}
		}
		d.r.Partitions = partitions
		if c.state != "" {
			must(t, d.book.SetState(d.book.Holds()[0], c.state))
		}
		apart := c.apart
		if apart == 0 {
			apart = time.Minute
		}
		if text := d.look(apart); text != "" {
			t.Errorf("%s: %s", what, text)
		}
	}
}

// observed is a ledger that reports no change, and each call of Holds to the channel.
type observed struct {
	Ledger
	asked chan struct{}
}

func (o observed) Changed() <-chan struct{} { return nil }

func (o observed) Holds() []ledger.Hold {
	o.asked <- struct{}{}
	return o.Ledger.Holds()
}

// TestACutGPUIsReported: a change of the inventory alone is noticed.
func TestACutGPUIsReported(t *testing.T) {
	t.Parallel()
	d := newDiffering(t, "GPU-1")
	d.hold(ledger.KindPod, device.Ref{GPU: "GPU-1"})
	d.r.times.waitReported = time.Millisecond
	asked := make(chan struct{})
	d.r.Ledger = observed{d.book, asked}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	d.watchPods()
	go func() { defer close(ended); d.r.describeWaits(ctx) }()
	// What waits and what differs: the inventory was read before the second.
	<-asked
	<-asked
	d.setGPUs("GPU-1:MIG-a")
	late := time.After(10 * time.Second)
	for reported := false; !reported; {
		select {
		case <-asked:
		case text := <-d.events.Events:
			wants(t, text, "gpu-1 (GPU-1) is in MIG mode, but", "given to pod apps/one")
			reported = true
		case <-late:
			t.Error("no event")
			reported = true
		}
	}
	cancel()
	for {
		select {
		case <-asked:
		case <-ended:
			return
		}
	}
}
