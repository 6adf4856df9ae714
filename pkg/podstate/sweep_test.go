// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// TestSweepKeepsThePodOfAnUnidentifiedLimit: a pod may be deleted before kubelet's checkpoint says that a limit is its own.
func TestSweepKeepsThePodOfAnUnidentifiedLimit(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "kubepods"), 0o755); err != nil {
		t.Fatal(err)
	}
	pods, err := NewPods(fake.NewClientset(), "node-1", NewCgroups(root, ""), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	pods.synced = time.Now().Add(-time.Hour)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u1"}}
	pods.store(pod)
	pods.forget(pod)
	pods.age("u1")
	limit := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-1"}, State: ledger.StateHeld, Began: time.Now().Add(-time.Minute)}

	pods.Sweep([]ledger.Hold{limit})
	identified := limit
	identified.Pods = []ledger.Pod{{UID: "u1"}}
	if got := pods.PodState(identified); got != ledger.Gone {
		t.Errorf("pod state of a deleted pod's hold: %v, want %v", got, ledger.Gone)
	}
	pods.Sweep(nil)
	if len(pods.pods) != 0 {
		t.Errorf("%d deleted pods are kept though nothing names them", len(pods.pods))
	}
}
