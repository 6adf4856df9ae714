// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const reused = "GPU-a"

// named gives the containers of a pod names, as the API server demands.
func named(p *corev1.Pod) {
	for i := range p.Spec.InitContainers {
		p.Spec.InitContainers[i].Name = fmt.Sprintf("init-%d", i)
	}
	for i := range p.Spec.Containers {
		p.Spec.Containers[i].Name = fmt.Sprintf("main-%d", i)
	}
}

// kubeletHas writes kubelet's device checkpoint: which containers of a pod have the device.
func kubeletHas(t *testing.T, p *Pods, uid string, containers ...string) {
	t.Helper()
	entries := make([]string, len(containers))
	for i, name := range containers {
		entries[i] = fmt.Sprintf(`{"PodUID":%q,"ContainerName":%q,"ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":[%q]}}`, uid, name, reused)
	}
	path := DeviceCheckpointPath(p.kubeletDir)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, fmt.Appendf(nil, `{"Data":{"PodDeviceEntries":[%s]},"Checksum":1}`, strings.Join(entries, ",")), 0o600))
}

func allocate(l *ledger.Ledger) error {
	return l.ReservePod([]ledger.PodRequest{{ID: reused, Resource: "nvidia.com/gpu", Device: device.Ref{GPU: reused}}})
}

// TestRepeatedAllocate: kubelet may forget what an Allocate in flight has taken, and offer it to another pod
// (docs/design/0002-ledger.md). Only a pod in the middle of its admission asks for a device again.
func TestRepeatedAllocate(t *testing.T) {
	for name, test := range map[string]struct {
		pod        []option
		containers []string // that have the device by kubelet's checkpoint
		want       bool
	}{
		"one container":                   {[]option{asks("1")}, []string{"main-0"}, false},
		"one container beside others":     {[]option{asks("1", "0")}, []string{"main-0"}, false},
		"after an init container":         {[]option{asksFirst("1"), asks("1")}, []string{"init-0"}, true},
		"after two of three containers":   {[]option{asksFirst("1"), asksFirst("1"), asks("1")}, []string{"init-0", "init-1"}, true},
		"after all containers":            {[]option{asksFirst("1"), asks("1")}, []string{"init-0", "main-0"}, false},
		"of a pod that is being deleted":  {[]option{asksFirst("1"), asks("1"), beingDeleted}, []string{"init-0"}, false},
		"after an init container sidecar": {[]option{asksFirst("1"), asksBeside("1"), asks("1")}, []string{"init-0"}, true},
		"another resource":                {[]option{asks("1"), asksPart}, []string{"main-0"}, false},
	} {
		for _, identified := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, identified %v", name, identified), func(t *testing.T) {
				t.Parallel()
				f := newTree(t)
				f.v2("kubepods/burstable/podanchor", false)
				p := known(t, f)
				p.Observe(nil, pod(podA, "a", append([]option{pending}, append(test.pod, named)...)...))
				l, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: p})
				must(t, err)
				defer l.Close()
				must(t, allocate(l))
				kubeletHas(t, p, podA, test.containers...)
				if identified {
					must(t, l.Identify(l.Holds()[0], ledger.Pod{UID: podA}))
				}
				err = allocate(l)
				var conflict *ledger.ConflictError
				if err != nil && !errors.As(err, &conflict) {
					t.Fatal(err)
				}
				if (err == nil) != test.want {
					t.Errorf("got %v, want reuse %v", err, test.want)
				}
			})
		}
	}
}

// TestReuseAwaitsTheWatch: kubelet may hear of a pod, or of the end of one, before our watch does.
func TestReuseAwaitsTheWatch(t *testing.T) {
	for name, test := range map[string]struct {
		before, after *corev1.Pod
		want          bool
		took          time.Duration
		unnamed       bool // by the hold; kubelet's checkpoint names it
	}{
		"a pod that comes":       {nil, pod(podA, "a", pending, asksFirst("1"), asks("1"), named), true, 100 * time.Millisecond, false},
		"a pod that ends":        {pod(podA, "a", asks("1"), named), pod(podA, "a", asks("1"), named, phase(corev1.PodSucceeded)), false, 2 * time.Second, false},
		"nothing":                {nil, nil, false, time.Second, false},
		"one that has one call":  {nil, pod(podA, "a", pending, asks("1"), named), false, time.Second, false},
		"one that still goes on": {pod(podA, "a", asks("1"), named), pod(podA, "a", asks("1"), named, beingDeleted), false, time.Second, false},
		"one that ends, unnamed": {pod(podA, "a", asks("1"), named), pod(podA, "a", asks("1"), named, phase(corev1.PodSucceeded)), false, 2 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := known(t, newTree(t))
				kubeletHas(t, p, podA, "init-0")
				p.Observe(nil, test.before)
				began := time.Now()
				go func() {
					time.Sleep(100 * time.Millisecond)
					p.Observe(test.before, test.after)
				}()
				h := limit(ledger.StateHeld, 0, podA)
				if test.unnamed {
					h.Pods = nil
				}
				h.Holder.ID, h.Resource = reused, "nvidia.com/gpu"
				if got := p.Reuses(h); got != test.want || time.Since(began) != test.took {
					t.Errorf("got %v after %s, want %v after %s", got, time.Since(began), test.want, test.took)
				}
			})
		})
	}
}

// TestRepeatedAllocateOfNoPod: an Allocate that the ledger recorded may have failed in kubelet, as when the agent dies before it answers.
func TestRepeatedAllocateOfNoPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := known(t, newTree(t))
		h := limit(ledger.StateHeld, 0)
		h.Holder.ID, h.Resource = reused, "nvidia.com/gpu"
		if p.Reuses(h) {
			t.Error("no pod asks by two containers, so another pod asks")
		}
		p.Observe(nil, pod(podB, "b", pending, asksFirst("1"), asks("1"), named))
		if !p.Reuses(h) {
			t.Error("a pod with two containers may be the one that asks")
		}
		p.forget(pod(podB, "b"))
		time.Sleep(Settling)
		if !p.Reuses(h) {
			t.Error("kubelet has no pod for the device")
		}
	})
}

// TestTrimKeepsWhoAsks: what is trimmed may be trimmed again.
func TestTrimKeepsWhoAsks(t *testing.T) {
	full := pod(podA, "a", asksFirst("2"), asksBeside("1"), asks("1", "0"), named)
	once := trimmed(full)
	if len(once.Spec.InitContainers) != 4 || len(askersOf(once, "nvidia.com/gpu")) != 3 {
		t.Errorf("got %v", once.Spec.InitContainers)
	}
	if twice := trimmed(once); !sameState(once, twice) {
		t.Errorf("got %v, then %v", once.Spec, twice.Spec)
	}
	if one := trimmed(pod(podA, "a", asks("1"), named)); one.Spec.InitContainers != nil {
		t.Errorf("a pod that asks once keeps %v", one.Spec.InitContainers)
	}
}
