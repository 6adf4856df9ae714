// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/driver"
)

// TestMaintenanceIsKnownFirst: an agent that starts offers nothing before it knows which GPUs are under maintenance, and never those.
func TestMaintenanceIsKnownFirst(t *testing.T) {
	c, uuids := awayNode(t)
	kubelet, stopKubelet := startDeviceManager(t, c)
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
	var known atomic.Bool
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create := action.(clienttesting.CreateActionImpl)
		if len(create.CreateOptions.DryRun) > 0 { // the probe
			return true, create.GetObject(), nil
		}
		if !known.Load() {
			t.Error("slices are created before the GPUNode is known")
		}
		for _, d := range create.GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
			if d.Name == "gpu-2" && (len(d.Taints) != 1 || d.Taints[0].Key != driver.TaintMaintenance) {
				t.Errorf("the first slice has gpu-2 with the taints %v", d.Taints)
			}
		}
		return false, nil, nil
	})
	gpuNodes := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch query := r.URL.Query(); {
		case !strings.HasSuffix(r.URL.Path, "/gpunodes") || r.Method != http.MethodGet || query.Get("sendInitialEvents") != "":
			w.WriteHeader(http.StatusBadRequest)
		case query.Get("watch") != "":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			time.Sleep(300 * time.Millisecond) // an answer that takes its time
			known.Store(true)
			list := v1alpha1.GPUNodeList{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUNodeList"}}
			list.ResourceVersion = "1"
			list.Items = []v1alpha1.GPUNode{{
				ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "g", ResourceVersion: "1"},
				Spec:       v1alpha1.GPUNodeSpec{Maintenance: []v1alpha1.GPUMaintenance{{UUID: uuids[2]}}},
			}}
			if err := json.NewEncoder(w).Encode(list); err != nil {
				t.Error(err)
			}
		}
	}))
	t.Cleanup(gpuNodes.Close)
	check(t, os.WriteFile(c.Kubeconfig, []byte(strings.Replace(kubeconfig, "http://127.0.0.1:1", gpuNodes.URL, 1)), 0o600))
	a, err := newAgent(c)
	check(t, err)
	a.client = client
	a.times.maintenanceWait = time.Minute
	running := runAgent(t, a)
	kubelet.await(map[string]string{
		uuids[0]: pluginapi.Healthy, uuids[1]: pluginapi.Unhealthy, uuids[2]: pluginapi.Unhealthy, uuids[3]: pluginapi.Healthy,
	})
	await(t, "a ResourceSlice", func() bool { return len(published(t, client)) > 0 })
	stopKubelet()
	running.stop()
}
