// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// After a reboot without a driver, the node's GPUNode does not show the GPUs and holders of the boot before. It was first written after the
// driver was open.
func TestGPUNodeAfterARebootWithoutADriver(t *testing.T) {
	c := nodeConfig(t)
	stale := v1alpha1.GPUNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUNode"},
		ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "g", ResourceVersion: "1"},
		Status: v1alpha1.GPUNodeStatus{
			Mode: "Dual", Holders: "gpu-0=apps/train(claim)", Counts: v1alpha1.DeviceCounts{Total: 1, Claims: 1},
			Devices: []v1alpha1.DeviceStatus{{Name: "gpu-0", UUID: "GPU-0"}},
		},
	}
	written := make(chan v1alpha1.GPUNode, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		object := stale
		switch {
		case !strings.Contains(r.URL.Path, "/gpunodes/"+c.NodeName):
			http.NotFound(w, r)
			return
		case r.Method == http.MethodPut:
			object = v1alpha1.GPUNode{}
			if err := json.NewDecoder(r.Body).Decode(&object); err != nil {
				t.Error(err)
			}
			written <- object
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(object); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	check(t, os.WriteFile(c.Kubeconfig, []byte(strings.Replace(kubeconfig, "http://127.0.0.1:1", server.URL, 1)), 0o600))
	a := start(t, c)
	a.await("driver: no NVIDIA driver")
	var got v1alpha1.GPUNodeStatus
	select {
	case object := <-written:
		got = object.Status
	case <-time.After(20 * time.Second):
		t.Error("the status of the boot before stays")
	}
	if got.Holders != "" || len(got.Devices) > 0 || got.Counts.Total > 0 || !strings.Contains(got.Waiting, "no NVIDIA driver") || got.BootID != a.bootID {
		t.Errorf("status: %+v", got)
	}
	a.stop()
}
