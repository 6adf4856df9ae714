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

// The checkpoint says whose device it is.
func TestNamespaceOf(t *testing.T) {
	p := known(t, newTree(t), pod(podA, "a", in("team-a")))
	named := func() string {
		namespace, known, err := p.NamespaceOf(gpus, "GPU-a")
		if known != (namespace != "") {
			t.Errorf("%q is known: %v", namespace, known)
		}
		return fmt.Sprint(namespace, err != nil)
	}
	path := DeviceCheckpointPath(p.kubeletDir)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	checkpoint := func(uid string) []byte {
		return fmt.Appendf(nil, `{"Data":{"PodDeviceEntries":[{"PodUID":%q,"ContainerName":"main","ResourceName":"nvidia.com/gpu.shared","DeviceIDs":{"0":["GPU-a"]}},
			{"PodUID":%q,"ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["GPU-b","GPU-a"]}}]},"Checksum":1}`, "other", uid)
	}
	for _, step := range []struct {
		contents []byte
		want     string
	}{{nil, "false"}, {checkpoint(podA), "team-afalse"}, {checkpoint(podB), "false"}, {[]byte("{"), "true"}} {
		if step.contents != nil {
			must(t, os.WriteFile(path, step.contents, 0o600))
		}
		if got := named(); got != step.want {
			t.Errorf("with %s: %s, want %s", step.contents, got, step.want)
		}
	}
}
