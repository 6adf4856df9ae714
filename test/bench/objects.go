// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

const (
	nodeName     = "bench"
	rivalName    = "bench-against"
	namespace    = "default"
	driverName   = "gpu.nvidia.com"
	resourceName = "nvidia.com/gpu"
)

// newClient has the settings of the agent's own client, so that its GETs are the floor of the agent's.
func newClient(config *rest.Config) (kubernetes.Interface, error) {
	config.QPS = -1
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	return client, nil
}

// createObjects makes what the chart, kubelet and the controller manager would have made.
func createObjects(ctx context.Context, client kubernetes.Interface, nodes ...string) error {
	for _, name := range nodes {
		if _, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create node %s: %w", name, err)
		}
	}
	if err := createGPUNodes(ctx, client); err != nil {
		return err
	}
	// The API server makes the namespace shortly after it says that it is ready.
	for {
		_, err := client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
		if err == nil {
			break
		}
		if !apierrors.IsNotFound(err) || !pause(ctx, 50*time.Millisecond) {
			return fmt.Errorf("create service account: %w", err)
		}
	}
	class := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: driverName},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == '%s'", driverName),
		}}}},
	}
	if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create device class: %w", err)
	}
	return nil
}

// gpuNodes is the custom resource as the chart installs it, from the repository's root, where the programs are compiled too.
const gpuNodes = "deployments/helm/tandem/files/tandem-gpu.dev_gpunodes.yaml"

func createGPUNodes(ctx context.Context, client kubernetes.Interface) error {
	definition, err := os.ReadFile(gpuNodes)
	if err != nil {
		return fmt.Errorf("read custom resource: %w", err)
	}
	err = client.CoreV1().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
		SetHeader("Content-Type", "application/yaml").Body(definition).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("create custom resource: %w", err)
	}
	return nil
}

// createClaims makes n claims with a pod each on a node, the i-th allocated to the GPU with minor number i, as the scheduler would have.
func createClaims(ctx context.Context, client kubernetes.Interface, node, prefix string, n int) ([]*resourceapi.ResourceClaim, error) {
	claims := make([]*resourceapi.ResourceClaim, n)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for i := range claims {
		group.Go(func() (err error) {
			claims[i], err = createClaim(ctx, client, fmt.Sprintf("%s-%d", prefix, i), node, fmt.Sprintf("gpu-%d", i))
			return err
		})
	}
	return claims, group.Wait()
}

// createClaim makes a claim that is allocated, with what its author has said of the device.
func createClaim(ctx context.Context, client kubernetes.Interface, name, pool, device string,
	config ...resourceapi.DeviceAllocationConfiguration,
) (*resourceapi.ResourceClaim, error) {
	pod, err := createPod(ctx, client, nodeOf(pool), name)
	if err != nil {
		return nil, err
	}
	api := client.ResourceV1().ResourceClaims(namespace)
	claim, err := api.Create(ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driverName},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create claim %s: %w", name, err)
	}
	claim.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: driverName, Pool: pool, Device: device}},
			Config:  config,
		}},
		ReservedFor: reservedFor(pod),
	}
	claim, err = api.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	if err != nil {
		return nil, fmt.Errorf("allocate claim %s: %w", name, err)
	}
	return claim, nil
}

func reservedFor(pod *corev1.Pod) []resourceapi.ResourceClaimConsumerReference {
	return []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod.Name, UID: pod.UID}}
}

// replacePod ends the pod of a claim, removes it, and reserves the claim for a new one.
func replacePod(ctx context.Context, client kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
	before := claim.Status.ReservedFor[0]
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: before.Name, Namespace: namespace, UID: before.UID}}
	if err := endPod(ctx, client, pod); err != nil {
		return err
	}
	if err := deletePod(ctx, client, before.Name); err != nil {
		return err
	}
	pod, err := createPod(ctx, client, nodeOf(claim.Status.Allocation.Devices.Results[0].Pool), before.Name)
	if err != nil {
		return err
	}
	// The agent writes to the status of shared claims at the same time. So this is a patch: an update could fail with a conflict.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"reservedFor": reservedFor(pod)}})
	if err != nil {
		return fmt.Errorf("reserve claim %s: %w", claim.Name, err)
	}
	reserved, err := client.ResourceV1().ResourceClaims(namespace).Patch(ctx, claim.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("reserve claim %s: %w", claim.Name, err)
	}
	*claim = *reserved
	return nil
}

// nodeOf returns the node of a pool: a node has one, or one for each GPU.
func nodeOf(pool string) string {
	node, _, _ := strings.Cut(pool, "/")
	return node
}

func createPod(ctx context.Context, client kubernetes.Interface, node, name string) (*corev1.Pod, error) {
	pod, err := client.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, AutomountServiceAccountToken: ptr.To(false),
			Containers: []corev1.Container{{Name: "main", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create pod %s: %w", name, err)
	}
	return pod, nil
}

// endPod writes of a pod, as kubelet does, that it has ended.
func endPod(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) error {
	ended := pod.DeepCopy()
	ended.Status.Phase = corev1.PodSucceeded
	if _, err := client.CoreV1().Pods(namespace).UpdateStatus(ctx, ended, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("end pod %s: %w", pod.Name, err)
	}
	return nil
}

func deletePod(ctx context.Context, client kubernetes.Interface, name string) error {
	err := client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
	if err != nil {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	return nil
}

// wipeSlices does what kubelet does when it starts.
func wipeSlices(ctx context.Context, client kubernetes.Interface, node string) error {
	err := client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: ofNode(node)})
	if err != nil {
		return fmt.Errorf("delete slices: %w", err)
	}
	return nil
}

func ofNode(node string) string { return resourceapi.ResourceSliceSelectorNodeName + "=" + node }

// awaitSlices returns when the node's slices were seen to offer n devices, and the time of that.
func awaitSlices(ctx context.Context, client kubernetes.Interface, node string, n int) (func() (time.Time, error), error) {
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: ofNode(node)})
	if err != nil {
		return nil, fmt.Errorf("list slices: %w", err)
	}
	watch, err := client.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{FieldSelector: ofNode(node), ResourceVersion: list.ResourceVersion})
	if err != nil {
		return nil, fmt.Errorf("watch slices: %w", err)
	}
	return func() (time.Time, error) {
		defer watch.Stop()
		offered := map[string]int{}
		for {
			select {
			case <-ctx.Done():
				return time.Time{}, fmt.Errorf("await slices: %w", context.Cause(ctx))
			case event, ok := <-watch.ResultChan():
				slice, isSlice := event.Object.(*resourceapi.ResourceSlice)
				if !ok || !isSlice {
					return time.Time{}, fmt.Errorf("await slices: the watch ended with %v", event.Object)
				}
				offered[slice.Name] = len(slice.Spec.Devices)
				sum := 0
				for _, devices := range offered {
					sum += devices
				}
				if sum >= n {
					return time.Now(), nil
				}
			}
		}
	}, nil
}

// pause waits and reports whether ctx was still alive at the end.
func pause(ctx context.Context, length time.Duration) bool {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
