// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// holdsDir has one record for each hold of the ledger. The torture reads nothing of their contents but the pods, to measure drains.
const holdsDir = "/run/tandem/holds"

// recordsDir has one file for each partition that the agent created. The torture does not read their contents.
const recordsDir = "/run/tandem/partitions"

// auditor looks for what is left over when everything was deleted.
type auditor struct {
	cluster *cluster.Cluster
	node    *cluster.Node
	client  kubernetes.Interface
	dynamic dynamic.Interface
	// hardware is nil without MIG.
	hardware *hardware
	// sharing tells that limits see some GPUs as several.
	sharing bool
	// offered is what there was when nothing had been given out yet.
	offered offer
	// specs are the CDI specs that lay there when nothing had been given out yet.
	specs []string
}

// leaks answers what is not as it was before anything was given out, one line each; how many GPUs are not free is the number.
func (a auditor) leaks(ctx context.Context) (lines []string, missing int, err error) {
	for _, look := range []func(context.Context) ([]string, int, error){
		a.objects, a.offeredToPods, a.offeredToClaims, a.gpuNode, a.onNode, a.containers, a.partitions,
	} {
		found, gone, err := look(ctx)
		if err != nil {
			return nil, 0, err
		}
		lines = append(lines, found...)
		missing = max(missing, gone)
	}
	if len(lines) > 0 {
		missing = max(missing, 1)
	}
	return lines, missing, nil
}

func (a auditor) objects(ctx context.Context) ([]string, int, error) {
	pods, err := a.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: workloadLabel})
	if err != nil {
		return nil, 0, fmt.Errorf("list pods: %w", err)
	}
	claims, err := a.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("list ResourceClaims: %w", err)
	}
	var lines []string
	for _, pod := range pods.Items {
		lines = append(lines, fmt.Sprintf("pod %s/%s is still there", pod.Namespace, pod.Name))
	}
	for _, claim := range claims.Items {
		lines = append(lines, fmt.Sprintf("claim %s/%s is still there", claim.Namespace, claim.Name))
	}
	return lines, 0, nil
}

// gpuNode looks at the object that says who has which GPU, where the installation has one.
func (a auditor) gpuNode(ctx context.Context) ([]string, int, error) {
	node, err := a.dynamic.Resource(gpuNodes).Get(ctx, a.node.Name(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("get GPUNode: %w", err)
	}
	var lines []string
	free, counted, _ := unstructured.NestedInt64(node.Object, "status", "counts", "free")
	if counted && free != a.offered.free {
		holders, _, _ := unstructured.NestedString(node.Object, "status", "holders")
		lines = append(lines, fmt.Sprintf("GPUNode: %d of %d free: %s", free, a.offered.free, holders))
	}
	if conflicts := conflictsOf(node); len(conflicts) > 0 {
		lines = append(lines, fmt.Sprintf("GPUNode: conflicts remain: %v", conflicts))
	}
	if claims, _, _ := unstructured.NestedSlice(node.Object, "spec", "claims"); len(claims) > 0 {
		lines = append(lines, fmt.Sprintf("GPUNode: allocated claims are left: %v", claims))
	}
	return lines, max(0, int(a.offered.free-free)) * min(len(lines), 1), nil
}

// partitions looks at what the GPUs remember, and at the agent's records of what it makes.
func (a auditor) partitions(context.Context) ([]string, int, error) {
	lines := a.hardware.unlike()
	missing := len(lines)
	records, err := a.list(recordsDir)
	for _, record := range records {
		lines = append(lines, "record of a partition: "+record)
	}
	return lines, missing, err
}

// onNode checks the files of ledger and CDI, and the control groups of unknown pods.
func (a auditor) onNode(ctx context.Context) ([]string, int, error) {
	var lines []string
	holds, err := a.list(holdsDir)
	if err != nil {
		return nil, 0, err
	}
	for _, hold := range holds {
		lines = append(lines, "ledger: "+hold)
	}
	specs, err := a.list(cdiDir)
	if err != nil {
		return nil, 0, err
	}
	if !slices.Equal(specs, a.specs) {
		lines = append(lines, fmt.Sprintf("CDI: %v, and %v before", specs, a.specs))
	}
	groups, err := a.unknownGroups(ctx)
	return append(lines, groups...), len(holds), err
}

func (a auditor) unknownGroups(ctx context.Context) ([]string, error) {
	groups, err := oracle.PodGroups(a.node)
	if err != nil {
		return nil, fmt.Errorf("list control groups: %w", err)
	}
	pods, err := a.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	var lines []string
	for _, uid := range groups {
		if !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return string(p.UID) == uid }) {
			lines = append(lines, "control group of pod "+uid+", which is gone")
		}
	}
	return lines, nil
}

// containers looks at every process of the machine once more, instead of the control groups that the watch walks.
func (a auditor) containers(ctx context.Context) ([]string, int, error) {
	picture, err := oracle.Observe(ctx, a.cluster)
	if err != nil {
		return nil, 0, err
	}
	var lines []string
	for _, c := range picture.Containers {
		if len(c.Devices) > 0 {
			lines = append(lines, fmt.Sprintf("container %.12s of %s sees %d GPUs", c.ID, c.Title(), len(c.Devices)))
		}
	}
	return lines, 0, nil
}

// list answers the names in a directory of the node, which is a symbolic link below the node's root at most once: /var/run.
func (a auditor) list(dir string) ([]string, error) {
	root, err := a.node.Root()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Join(root, strings.Replace(dir, "/var/run/", "/run/", 1)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s on %s: %w", dir, a.node.Name(), err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, nil
}
