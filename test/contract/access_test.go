// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestStolenToken: a process with the token of a node's agent can write that node's slices and read what the agent reads, and
// nothing else. Nothing of what it tries here is stored: requests that the API server would allow are dry runs.
func TestStolenToken(t *testing.T) {
	s := begin(t)
	pod := s.AgentPod(gpuNode)
	account := pod.Spec.ServiceAccountName
	stolen := s.As(account, &pod)
	own, other := s.SliceOf(gpuNode), s.SliceOf(numaNode)
	const notYours = "the agent on node '" + gpuNode + "' may write ResourceSlices of that node only"
	otherDriver, otherPool, allNodes := own.DeepCopy(), own.DeepCopy(), own.DeepCopy()
	otherDriver.Spec.Driver = "gpu.example.com"
	otherPool.Spec.Pool.Name = numaNode
	everywhere := true
	allNodes.Spec.NodeName, allNodes.Spec.AllNodes = nil, &everywhere

	slicesOf := func(client kubernetes.Interface) writes { return writes{s, client} }
	for name, c := range map[string]struct {
		err  error
		want string // "" for allowed
	}{
		"update own":          {slicesOf(stolen).update(own), ""},
		"create own":          {slicesOf(stolen).create(own), ""},
		"delete own":          {slicesOf(stolen).remove(own), ""},
		"update another's":    {slicesOf(stolen).update(other), notYours},
		"create another's":    {slicesOf(stolen).create(other), notYours},
		"delete another's":    {slicesOf(stolen).remove(other), notYours},
		"for all nodes":       {slicesOf(stolen).create(allNodes), notYours},
		"of another driver":   {slicesOf(stolen).create(otherDriver), "of the driver " + install.DriverName + " only"},
		"in another's pool":   {slicesOf(stolen).create(otherPool), "may write pools named '" + gpuNode + "'"},
		"token bound to none": {slicesOf(s.As(account, nil)).update(own), "bound to its pod"},
	} {
		switch {
		case c.want == "" && c.err != nil:
			t.Errorf("%s: %v", name, c.err)
		case c.want != "" && (!apierrors.IsForbidden(c.err) || !strings.Contains(c.err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", name, c.err, c.want)
		}
	}
	s.forbidden(stolen)
}

// writes to slices that are never stored.
type writes struct {
	*story
	client kubernetes.Interface
}

func (w writes) create(slice *resourceapi.ResourceSlice) error {
	fresh := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "stolen-"}, Spec: slice.Spec}
	_, err := w.client.ResourceV1().ResourceSlices().Create(w.Ctx, fresh, metav1.CreateOptions{DryRun: dryRun})
	return err
}

func (w writes) update(slice *resourceapi.ResourceSlice) error {
	_, err := w.client.ResourceV1().ResourceSlices().Patch(w.Ctx, slice.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"stolen":"true"}}}`), metav1.PatchOptions{DryRun: dryRun})
	return err
}

func (w writes) remove(slice *resourceapi.ResourceSlice) error {
	return w.client.ResourceV1().ResourceSlices().Delete(w.Ctx, slice.Name, metav1.DeleteOptions{DryRun: dryRun})
}

var dryRun = []string{metav1.DryRunAll}

// forbidden tries what an agent has no business with.
func (s *story) forbidden(client kubernetes.Interface) {
	s.Helper()
	list, dry := metav1.ListOptions{}, metav1.PatchOptions{DryRun: dryRun}
	patch := []byte(`{"metadata":{"labels":{"stolen":"true"}}}`)
	s.Manifest(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: not-allocated}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}
`)
	for name, err := range map[string]error{
		"list secrets": func() error { _, err := client.CoreV1().Secrets("").List(s.Ctx, list); return err }(),
		"list secrets of its namespace": func() error {
			_, err := client.CoreV1().Secrets(install.Namespace).List(s.Ctx, list)
			return err
		}(),
		"list configmaps":       func() error { _, err := client.CoreV1().ConfigMaps("").List(s.Ctx, list); return err }(),
		"list service accounts": func() error { _, err := client.CoreV1().ServiceAccounts("").List(s.Ctx, list); return err }(),
		"list claims":           func() error { _, err := client.ResourceV1().ResourceClaims("").List(s.Ctx, list); return err }(),
		"list roles":            func() error { _, err := client.RbacV1().ClusterRoles().List(s.Ctx, list); return err }(),
		"list device classes":   func() error { _, err := client.ResourceV1().DeviceClasses().List(s.Ctx, list); return err }(),
		"patch its node": func() error {
			_, err := client.CoreV1().Nodes().Patch(s.Ctx, gpuNode, types.MergePatchType, patch, dry)
			return err
		}(),
		"patch its node's state": func() error {
			_, err := client.CoreV1().Nodes().Patch(s.Ctx, gpuNode, types.MergePatchType, patch, dry, "status")
			return err
		}(),
		"create a pod": func() error {
			_, err := client.CoreV1().Pods(install.Namespace).Create(s.Ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "stolen"},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			}, metav1.CreateOptions{DryRun: dryRun})
			return err
		}(),
		"delete pods": client.CoreV1().Pods(install.Namespace).Delete(s.Ctx, s.AgentPod(numaNode).Name, metav1.DeleteOptions{DryRun: dryRun}),
		"write a claim's status": func() error {
			_, err := client.ResourceV1().ResourceClaims(s.Namespace).UpdateStatus(s.Ctx, s.Claim("not-allocated"), metav1.UpdateOptions{DryRun: dryRun})
			return err
		}(),
		"write a claim": func() error {
			_, err := client.ResourceV1().ResourceClaims(s.Namespace).Update(s.Ctx, s.Claim("not-allocated"), metav1.UpdateOptions{DryRun: dryRun})
			return err
		}(),
		"make a token": func() error {
			_, err := client.CoreV1().ServiceAccounts(install.Namespace).CreateToken(s.Ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
			return err
		}(),
	} {
		if !apierrors.IsForbidden(err) {
			s.Errorf("%s is not forbidden: %v", name, err)
		}
	}
}

const (
	gpuNodesPath    = "/apis/tandem-gpu.dev/v1alpha1/gpunodes"
	controllerLabel = "app.kubernetes.io/component=controller"
)

// TestWhoMayWriteWhat: the status of a GPUNode is its own node's agent's, the spec the controller's, and of what others own the
// controller may write what it is there for. Nothing here is stored: where the API server would allow it, it is a dry run.
func TestWhoMayWriteWhat(t *testing.T) {
	s := begin(t)
	agent := s.AgentPod(gpuNode)
	own := s.As(agent.Spec.ServiceAccountName, &agent)
	unbound := s.As(agent.Spec.ServiceAccountName, nil)
	leader := s.controllerPod()
	control := s.As(leader.Spec.ServiceAccountName, &leader)
	s.Manifest(manifests.Pod("limit", "victim"))
	s.Running(soon, 1, 0)
	victim := *s.Pod("victim")
	s.Await(soon, "both nodes' GPUNodes", func() error {
		for _, name := range []string{gpuNode, numaNode} {
			if err := theClient.CoreV1().RESTClient().Get().AbsPath(gpuNodesPath, name).Do(s.Ctx).Error(); err != nil {
				return err
			}
		}
		return nil
	})
	s.Await(soon, "the webhook's Secret, which a controller makes", func() error {
		_, err := theClient.CoreV1().Secrets(install.Namespace).Get(s.Ctx, webhookName, metav1.GetOptions{})
		return err
	})
	const (
		status      = `{"status":{"mode":"Split"}}`
		spec        = `{"spec":{"claims":[{"uid":"u","namespace":"n","name":"c","devices":["gpu-0"]}]}}`
		maintenance = `{"spec":{"maintenance":[{"uuid":"GPU-0"}]}}`
		taint       = `{"spec":{"taints":[{"rule":"forged","key":"example.com/x","effect":"NoExecute"}]}}`
		labels      = `{"metadata":{"labels":{"stolen":"true"}}}`
		owner       = `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"gone","uid":"u"}]}}`
		ofNode      = "the agent on node '" + gpuNode + "' may write the GPUNode of that node only"
		notByRBAC   = "cannot "
		mayNotTaint = "only who may create DeviceTaintRules may write spec.taints"
	)
	drains := s.drainer()
	for name, c := range map[string]struct {
		err  error
		want string // "" for allowed
	}{
		"agent: its status":            {s.patchGPUNode(own, gpuNode+"/status", status), ""},
		"agent: its metadata":          {s.patchGPUNode(own, gpuNode, labels), notByRBAC},
		"agent: its spec":              {s.patchGPUNode(own, gpuNode, spec), notByRBAC},
		"agent: a maintenance":         {s.patchGPUNode(own, gpuNode, maintenance), notByRBAC},
		"agent: spec by its status":    {s.patchGPUNode(own, gpuNode+"/status", maintenance), ""}, // the API server ignores it
		"agent: a taint":               {s.patchGPUNode(own, gpuNode, taint), notByRBAC},
		"agent: a taint by its status": {s.patchGPUNode(own, gpuNode+"/status", taint), ""},
		"controller: a taint":          {s.patchGPUNode(control, gpuNode, taint), ""},
		"drainer: a maintenance":       {s.patchGPUNode(drains, gpuNode, maintenance), ""},
		"drainer: a taint":             {s.patchGPUNode(drains, gpuNode, taint), mayNotTaint},
		"drainer: create with a taint": {s.createGPUNode(drains, "node-3", "", `{"taints":[{"rule":"r","key":"k","effect":"NoSchedule"}]}`, dryRun...), mayNotTaint},
		"drainer: create without":      {s.createGPUNode(drains, "node-3", "", "{}", dryRun...), ""},
		"administrator: a taint":       {s.patchGPUNode(theClient, gpuNode, taint), ""},
		"controller: a maintenance":    {s.patchGPUNode(control, gpuNode, maintenance), "may not write spec.maintenance"},
		"agent: another's status":      {s.patchGPUNode(own, numaNode+"/status", status), ofNode},
		"agent: delete its own":        {s.deleteGPUNode(own, gpuNode), notByRBAC},
		"agent: delete another's":      {s.deleteGPUNode(own, numaNode), notByRBAC},
		"agent: create another's":      {s.createGPUNode(own, "node-3", "", "{}", dryRun...), ofNode},
		"agent: token bound to none":   {s.patchGPUNode(unbound, gpuNode+"/status", status), "bound to its pod"},
		"controller: a spec":           {s.patchGPUNode(control, numaNode, spec), ""},
		"controller: a status":         {s.patchGPUNode(control, gpuNode+"/status", status), notByRBAC},
		"controller: metadata":         {s.patchGPUNode(control, gpuNode, labels), "may not write the metadata of a GPUNode"},
		"controller: an owner":         {s.patchGPUNode(control, gpuNode, owner), "may not write the metadata of a GPUNode"},
		"controller: create":           {s.createGPUNode(control, "node-3", "", "{}", dryRun...), notByRBAC},
		"controller: delete":           {s.deleteGPUNode(control, gpuNode), ""},
		"controller: a pod's image":    {s.patchPod(control, agent, `{"spec":{"containers":[{"name":"kubelet-plugin","image":"stolen"}]}}`), "may not write the spec of a pod"},
		"controller: a pod's label":    {s.patchPod(control, agent, labels), "no metadata of a pod but"},
		"controller: an annotation":    {s.patchPod(control, agent, `{"metadata":{"annotations":{"stolen":"true"}}}`), "no metadata of a pod but"},
		"controller: the annotation":   {s.patchPod(control, agent, `{"metadata":{"annotations":{"`+controller.RetryAnnotation+`":"now"}}}`), ""},
		"controller: GPUs of a node":   {s.patchNode(control, `{"status":{"allocatable":{"`+install.ResourceName+`":"3"}}}`, "status"), ""},
		"controller: too many GPUs":    {s.patchNode(control, `{"status":{"allocatable":{"`+install.ResourceName+`":"99"}}}`, "status"), "than the node has"},
		"controller: CPUs of a node":   {s.patchNode(control, `{"status":{"allocatable":{"cpu":"99"}}}`, "status"), "nothing of a node's status but"},
		"controller: capacity":         {s.patchNode(control, `{"status":{"capacity":{"`+install.ResourceName+`":"99"}}}`, "status"), "nothing of a node's status but"},
		"controller: a node's label":   {s.patchNode(control, labels, "status"), "may not write the metadata of a node"},
		"controller: a node":           {s.patchNode(control, labels), notByRBAC},
		"controller: evict whatever":   {s.evict(control, victim, nil), "with its UID as a precondition"},
		"controller: evict by its UID": {s.evict(control, victim, &metav1.Preconditions{UID: &victim.UID}), ""},
		"controller: evict an agent":   {s.evict(control, agent, &metav1.Preconditions{UID: &agent.UID, ResourceVersion: &agent.ResourceVersion}), "may evict no pod in the namespace"},
		"controller: delete a pod":     {control.CoreV1().Pods(agent.Namespace).Delete(s.Ctx, agent.Name, metav1.DeleteOptions{DryRun: dryRun}), "may make and delete no pods but those of MPS daemons"},
		"controller: read secrets":     {func() error { _, err := control.CoreV1().Secrets("").List(s.Ctx, metav1.ListOptions{}); return err }(), notByRBAC},
		"controller: its secret": {func() error {
			_, err := control.CoreV1().Secrets(install.Namespace).Get(s.Ctx, webhookName, metav1.GetOptions{})
			return err
		}(), ""},
		"controller: another secret": {func() error {
			_, err := control.CoreV1().Secrets(install.Namespace).Get(s.Ctx, "other", metav1.GetOptions{})
			return err
		}(), notByRBAC},
		"controller: make a secret": {s.makeSecret(control, "other", corev1.SecretTypeOpaque), "may create no Secret but " + webhookName},
		"controller: make a token":  {s.makeSecret(control, webhookName, corev1.SecretTypeServiceAccountToken), "of type kubernetes.io/tls"},
		"controller: every webhook": {func() error {
			_, err := control.AdmissionregistrationV1().ValidatingWebhookConfigurations().List(s.Ctx, metav1.ListOptions{})
			return err
		}(), notByRBAC},
		"controller: whom to trust":    {s.patchWebhook(control, `"caBundle":"eA=="`, ""), ""},
		"controller: another server":   {s.patchWebhook(control, `"url":"https://example.com","service":null`, ""), "nothing of a webhook configuration but caBundle"},
		"controller: asked everything": {s.patchWebhook(control, "", `"rules":[{"apiGroups":["*"],"apiVersions":["*"],"operations":["*"],"resources":["*/*"]}]`), "nothing of a webhook configuration but caBundle"},
		"controller: without it none":  {s.patchWebhook(control, "", `"failurePolicy":"Fail"`), "nothing of a webhook configuration but caBundle"},
		"controller: another's lease": {func() error {
			_, err := control.CoordinationV1().Leases("kube-system").List(s.Ctx, metav1.ListOptions{})
			return err
		}(), notByRBAC},
	} {
		switch {
		case c.want == "" && c.err != nil:
			t.Errorf("%s: %v", name, c.err)
		case c.want != "" && (!apierrors.IsForbidden(c.err) || !strings.Contains(c.err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", name, c.err, c.want)
		}
	}
	s.createsItsGPUNode(own)
	// As it was seen, the pod may go; another version of it may not.
	fresh := *s.Pod("victim")
	if err := s.evict(control, fresh, &metav1.Preconditions{UID: &fresh.UID, ResourceVersion: &fresh.ResourceVersion}); err != nil {
		t.Errorf("evict a pod as it is: %v", err)
	}
	if err := s.evict(control, fresh, &metav1.Preconditions{UID: &fresh.UID, ResourceVersion: ptr.To("1")}); !apierrors.IsConflict(err) {
		t.Errorf("evict a pod that has changed: %v", err)
	}
}

// createsItsGPUNode: an agent creates a GPUNode without a spec and without an owner. The API server asks the policies before it finds that
// the GPUNode exists already.
func (s *story) createsItsGPUNode(agent kubernetes.Interface) {
	s.Helper()
	const owner = "may not write the owner"
	for name, c := range map[string]struct{ owners, spec, want string }{
		"as it does":         {``, `{}`, "already exists"},
		"under maintenance":  {``, `{"maintenance":[{"uuid":"GPU-0"}]}`, "may not write the spec"},
		"owned by its node":  {`{"apiVersion":"v1","kind":"Node","name":"` + gpuNode + `","uid":"u"}`, `{}`, owner},
		"owned by its slice": {`{"apiVersion":"resource.k8s.io/v1","kind":"ResourceSlice","name":"s","uid":"u"}`, `{}`, owner},
	} {
		if err := s.createGPUNode(agent, gpuNode, c.owners, c.spec, dryRun...); err == nil || !strings.Contains(err.Error(), c.want) {
			s.Errorf("create its GPUNode, %s: %v, which should say %q", name, err, c.want)
		}
	}
}

func (s *story) createGPUNode(client kubernetes.Interface, name, owners, spec string, dryRun ...string) error {
	body := fmt.Sprintf(`{"apiVersion":"tandem-gpu.dev/v1alpha1","kind":"GPUNode","metadata":{"name":%q,"ownerReferences":[%s]},"spec":%s}`, name, owners, spec)
	request := client.CoreV1().RESTClient().Post().AbsPath(gpuNodesPath).SetHeader("Content-Type", "application/json").Body([]byte(body))
	for _, dry := range dryRun {
		request.Param("dryRun", dry)
	}
	return request.Do(s.Ctx).Error()
}

// patchWebhook merges fields into the one webhook, and into its clientConfig.
func (s *story) patchWebhook(client kubernetes.Interface, clientConfig, webhook string) error {
	s.Helper()
	if webhook != "" {
		webhook = "," + webhook
	}
	patch := fmt.Sprintf(`{"webhooks":[{"name":"parameters.tandem-gpu.dev","clientConfig":{%s}%s}]}`, clientConfig, webhook)
	// Strategic: the webhook is found by its name, and what is not said stays.
	_, err := client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Patch(s.Ctx, webhookName, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dryRun})
	return err
}

func (s *story) makeSecret(client kubernetes.Interface, name string, kind corev1.SecretType) error {
	_, err := client.CoreV1().Secrets(install.Namespace).Create(s.Ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{corev1.ServiceAccountNameKey: "tandem"}}, Type: kind,
	}, metav1.CreateOptions{DryRun: dryRun})
	return err
}

// drainer is a user who may write GPUNodes, as kubectl gpu drain needs it, and no DeviceTaintRules.
func (s *story) drainer() kubernetes.Interface {
	s.Helper()
	account := fmt.Sprintf("{kind: ServiceAccount, name: drainer, namespace: %s}", install.Namespace)
	err := s.ApplyAnywhere(`
apiVersion: v1
kind: ServiceAccount
metadata: {name: drainer, namespace: ` + install.Namespace + `}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: drainer}
rules: [{apiGroups: [tandem-gpu.dev], resources: [gpunodes], verbs: [get, list, create, update, patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: drainer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: drainer}
subjects: [` + account + `]
`)
	if err != nil {
		s.Fatal(err)
	}
	return s.As("drainer", nil)
}

// controllerPod is the one that leads, or waits to.
func (s *story) controllerPod() corev1.Pod {
	s.Helper()
	list, err := theClient.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: controllerLabel})
	if err != nil {
		s.Fatal(err)
	}
	if len(list.Items) == 0 {
		s.Fatal("no pod of the controller")
	}
	return list.Items[0]
}

func (s *story) patchGPUNode(client kubernetes.Interface, path, patch string) error {
	return client.CoreV1().RESTClient().Patch(types.MergePatchType).AbsPath(gpuNodesPath+"/"+path).Param("dryRun", metav1.DryRunAll).
		Body([]byte(patch)).Do(s.Ctx).Error()
}

func (s *story) deleteGPUNode(client kubernetes.Interface, name string) error {
	return client.CoreV1().RESTClient().Delete().AbsPath(gpuNodesPath, name).Param("dryRun", metav1.DryRunAll).Do(s.Ctx).Error()
}

func (s *story) patchPod(client kubernetes.Interface, pod corev1.Pod, patch string) error {
	_, err := client.CoreV1().Pods(pod.Namespace).Patch(s.Ctx, pod.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dryRun})
	return err
}

func (s *story) patchNode(client kubernetes.Interface, patch string, subresources ...string) error {
	_, err := client.CoreV1().Nodes().Patch(s.Ctx, gpuNode, types.MergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dryRun}, subresources...)
	return err
}

func (s *story) evict(client kubernetes.Interface, pod corev1.Pod, preconditions *metav1.Preconditions) error {
	return client.CoreV1().Pods(pod.Namespace).EvictV1(s.Ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace},
		DeleteOptions: &metav1.DeleteOptions{DryRun: dryRun, Preconditions: preconditions},
	})
}

// TestStolenControllerToken: what is not the pod of a daemon, as this controller creates it, is forbidden. Nothing is stored.
func TestStolenControllerToken(t *testing.T) {
	s := begin(t)
	pod := s.controllerPod()
	thief, made := s.As(pod.Spec.ServiceAccountName, &pod), s.wouldMake(pod)
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   string // empty for allowed
	}{
		"a daemon's":          {func(*corev1.Pod) {}, ""},
		"configuration":       {func(p *corev1.Pod) { s.volume(p, "driver-root").HostPath.Path = "/etc" }, "driver root of an MPS daemon"},
		"files of containers": {func(p *corev1.Pod) { s.volume(p, "driver-root").HostPath.Path = "/run/containerd" }, "driver root of an MPS daemon"},
		"all daemons' files": {func(p *corev1.Pod) {
			p.Labels[stories.DaemonLabel], s.volume(p, "daemon").HostPath.Path = "", "/run/tandem/mps/"
		}, "no pods but those"},
		"another's name":        {func(p *corev1.Pod) { p.Name = "tandem-mps-other-00000000" }, "no pods but those"},
		"pipes on the host":     {func(p *corev1.Pod) { *s.volume(p, "pipe") = *s.volume(p, "daemon"); p.Spec.Volumes[1].Name = "pipe" }, "nothing else of the host"},
		"pipes without a limit": {func(p *corev1.Pod) { s.volume(p, "pipe").EmptyDir.SizeLimit = nil }, "nothing else of the host"},
		"privileged": {func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
		}, "privileges"},
	} {
		asked := made.DeepCopy()
		c.change(asked)
		_, err := thief.CoreV1().Pods(install.Namespace).Create(s.Ctx, asked, metav1.CreateOptions{DryRun: dryRun})
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", name, err, c.want)
		}
	}
}

// wouldMake is the pod of a daemon, as the controller of that pod creates it.
func (s *story) wouldMake(pod corev1.Pod) *corev1.Pod {
	s.Helper()
	args := append([]string{"--namespace=" + install.Namespace, "--pod-name=p"}, pod.Spec.Containers[0].Args...)
	c, err := config.LoadController(args, func(string) (string, bool) { return "", false }, io.Discard)
	if err != nil {
		s.Fatal(err)
	}
	template, err := controller.DaemonTemplate(c.DaemonPod)
	if err != nil {
		s.Fatal(err)
	}
	memory, err := c.SharedMemory()
	if err != nil {
		s.Fatal(err)
	}
	// The agent writes its first GPUNode some time after it is ready.
	object := s.Shows("a node", func(gpunode.GPUNode) bool { return true })
	pods := controller.DaemonPods{
		Template: template, Namespace: install.Namespace, RunDir: c.RunDir, KubeletDir: c.KubeletDir, DriverRoots: c.DriverRoots, SharedMemory: memory,
	}
	made, err := pods.Pod(&object, forged(func(*gpunode.MPSDaemon) {}))
	if err != nil {
		s.Fatal(err)
	}
	return made
}

func (s *story) volume(pod *corev1.Pod, name string) *corev1.Volume {
	s.Helper()
	i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		s.Fatalf("no volume %s", name)
	}
	return &pod.Spec.Volumes[i]
}

// forged is a daemon that an attacker with the agent's token requests.
func forged(change func(*gpunode.MPSDaemon)) gpunode.MPSDaemon {
	d := gpunode.MPSDaemon{Name: "forged", MPSSettings: gpunode.MPSSettings{
		Devices: []string{"GPU-1"}, DriverRoot: stories.SimulatedMachine + "/driver",
	}}
	change(&d)
	return d
}

// TestForgedDaemons: an attacker with an agent's token writes its node's status, and gets no pod of a program of its choice. The
// controller that believes it could not create that pod either.
func TestForgedDaemons(t *testing.T) {
	s := begin(t)
	pod := s.AgentPod(gpuNode)
	thief := s.As(pod.Spec.ServiceAccountName, &pod)
	// The agent would correct its status.
	agent := s.AgentProcess(node())
	s.Undo(func() error { s.On(node(), "kill", "-CONT", agent); return s.request(thief) })
	s.On(node(), "kill", "-STOP", agent)
	for name, c := range map[string]struct {
		change func(*gpunode.MPSDaemon)
		want   string
	}{
		"configuration of the host": {func(d *gpunode.MPSDaemon) { d.DriverRoot = "/etc" }, "driver root /etc is none of"},
		"files of containers":       {func(d *gpunode.MPSDaemon) { d.DriverRoot = "/run/containerd" }, "driver root /run/containerd is none of"},
		"images":                    {func(d *gpunode.MPSDaemon) { d.DriverRoot = "/var/lib/containerd" }, "is none of"},
		"a variable":                {func(d *gpunode.MPSDaemon) { d.Devices = []string{"GPU-1 LD_PRELOAD=x"} }, "is no UUID of a device"},
	} {
		if err := s.request(thief, forged(c.change)); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.Await(soon, name+" to be refused", func() error {
			object, err := s.GPUNodeObject()
			if err != nil {
				return err
			}
			if told := object.Spec.Daemons; len(told) != 1 || !strings.Contains(told[0].Message, c.want) {
				return fmt.Errorf("the controller says %+v", told)
			}
			return nil
		})
		if pods := s.Daemons(); len(pods) > 0 {
			t.Errorf("%s: there is pod %s", name, pods[0].Name)
		}
	}
	many := make([]gpunode.MPSDaemon, 1000)
	for i := range many {
		many[i] = forged(func(d *gpunode.MPSDaemon) { d.Name = fmt.Sprint("forged-", i) })
	}
	for name, daemons := range map[string][]gpunode.MPSDaemon{
		"no name":           {forged(func(d *gpunode.MPSDaemon) { d.Name = "" })},
		"another directory": {forged(func(d *gpunode.MPSDaemon) { d.Name = ".." })},
		"a long device":     {forged(func(d *gpunode.MPSDaemon) { d.Devices = []string{strings.Repeat("a", 1<<10)} })},
		"many devices":      {forged(func(d *gpunode.MPSDaemon) { d.Devices = slices.Repeat([]string{"GPU-1"}, 1000) })},
		"many daemons":      many,
	} {
		if err := s.request(thief, daemons...); !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v, which should be invalid", name, err)
		}
	}
}

// request writes the daemons of the node's status.
func (s *story) request(client kubernetes.Interface, daemons ...gpunode.MPSDaemon) error {
	s.Helper()
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"daemons": daemons}})
	if err != nil {
		s.Fatal(err)
	}
	return client.CoreV1().RESTClient().Patch(types.MergePatchType).AbsPath(gpuNodesPath, gpuNode, "status").Body(patch).Do(s.Ctx).Error()
}
