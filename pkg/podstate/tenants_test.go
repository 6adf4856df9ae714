// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const gpus = "nvidia.com/gpu"

func in(namespace string) option { return func(p *corev1.Pod) { p.Namespace = namespace } }

func TestRequesters(t *testing.T) {
	p := known(t, newTree(t),
		pod("uid-1", "a", in("team-b"), pending, asks("1")), pod("uid-2", "b", in("team-a"), pending, asks("1")),
		pod("uid-3", "c", in("team-a"), pending, asks("1")),
		// Not of those that kubelet may be about to admit with this resource.
		pod("uid-4", "d", in("other"), pending, asksPart), pod("uid-5", "e", in("running"), pending, asks("1"), admitted),
		pod("uid-6", "f", in("rejected"), asks("1"), phase(corev1.PodFailed)),
		// kubelet may not have received the deletion.
		pod("uid-7", "g", in("ending"), pending, asks("1"), beingDeleted))
	if got := p.Requesters(t.Context(), gpus); !slices.Equal(got, []string{"ending", "team-a", "team-b"}) {
		t.Errorf("got %v", got)
	}
}

// kubelet calls before the watch has reported the pod.
func TestRequestersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := known(t, newTree(t))
		time.AfterFunc(time.Second, func() { p.add(t, pod(podA, "a", in("team-a"), pending, asks("1"))) })
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if got := p.Requesters(ctx, gpus); !slices.Equal(got, []string{"team-a"}) {
			t.Errorf("got %v", got)
		}
		if got := p.Requesters(ctx, "nvidia.com/gpu.shared"); len(got) > 0 || ctx.Err() == nil {
			t.Errorf("got %v, %v", got, ctx.Err())
		}
	})
}

// The hold says whose device it is, or kubelet's checkpoint.
func TestNamespaceOf(t *testing.T) {
	p := known(t, newTree(t), pod(podA, "a", in("team-a")), pod("ended", "e", in("team-a"), phase(corev1.PodSucceeded)))
	path := DeviceCheckpointPath(p.kubeletDir)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	checkpoint := func(uid string) []byte {
		return fmt.Appendf(nil, `{"Data":{"PodDeviceEntries":[{"PodUID":%q,"ContainerName":"main","ResourceName":"nvidia.com/gpu.shared","DeviceIDs":{"0":["GPU-a"]}},
			{"PodUID":%q,"ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-b","GPU-a"]}}]},"Checksum":1}`, "other", uid)
	}
	hold := limit(ledger.StateHeld, 0)
	identified := hold
	identified.Pods = []ledger.Pod{{UID: "gone", Namespace: "team-b", Name: "b"}}
	for name, c := range map[string]struct {
		hold     ledger.Hold
		contents []byte
		age      time.Duration // of the checkpoint
		want     string        // empty for unknown
		fails    bool
	}{
		"no checkpoint":                     {hold, nil, 0, "", false},
		"named by the checkpoint":           {hold, checkpoint(podA), 0, "team-a", false},
		"not reported yet":                  {hold, checkpoint(podB), 0, "", false},
		"the pod before, which has ended":   {hold, checkpoint("ended"), 0, "", false},
		"a checkpoint from before the hold": {hold, checkpoint(podA), time.Minute, "", false},
		"damaged":                           {hold, []byte("{"), 0, "", true},
		"named by the hold":                 {identified, []byte("{"), 0, "team-b", false},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, os.RemoveAll(path))
			if c.contents != nil {
				must(t, os.WriteFile(path, c.contents, 0o600))
				must(t, os.Chtimes(path, time.Time{}, time.Now().Add(-c.age)))
			}
			h := c.hold
			h.Since, h.Began = time.Now().Add(-time.Millisecond), time.Now()
			got, isKnown, err := p.NamespaceOf(h)
			if got != c.want || isKnown != (c.want != "") || (err != nil) != c.fails {
				t.Errorf("got %q, %v, %v", got, isKnown, err)
			}
		})
	}
}
