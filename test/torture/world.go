// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// Labels: on pods the workload that they belong to, the API by which they ask and for how many GPUs; on our namespaces.
	workloadLabel  = "torture/workload"
	apiLabel       = "torture/api"
	gpusLabel      = "torture/gpus"
	profileLabel   = "torture/profile"
	togetherLabel  = "torture/together"
	memoryLabel    = "torture/memory"
	sharesLabel    = "torture/shares"
	ofLabel        = "torture/of"
	renamedLabel   = "torture/renamed"
	namespaceLabel = "torture/namespace"

	deviceClass    = "gpu.nvidia.com"
	partitionClass = "mig.nvidia.com"
	claimName      = "gpu"
	// onceDir is where a container that crashes once remembers that it has.
	onceDir = "/once"
	// lastName is the ResourceClaimTemplate for one GPU of those that limits are given first.
	lastName = "last"
	lateName = "late"
	// manyFailures lets a Job continue however many of its pods are refused.
	manyFailures = 1000
)

// templates are all that a namespace has.
func templates() []*resourceapi.ResourceClaimTemplate {
	all := []*resourceapi.ResourceClaimTemplate{lastTemplate()}
	for gpus := range 4 {
		all = append(all, template(Workload{GPUs: gpus + 1}))
	}
	for _, p := range profiles {
		all = append(all, template(Workload{GPUs: 1, Profile: p.name}), template(Workload{GPUs: 2, Profile: p.name, Together: true}))
	}
	return all
}

// template returns the ResourceClaimTemplate of a workload's pods.
func template(w Workload) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: templateName(w)},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: claimSpec(w)},
	}
}

func templateName(w Workload) string {
	if w.sharing() {
		return strings.TrimSuffix(fmt.Sprintf("memory-%d-shares-%d-gpus-%d-%s", w.Memory, w.Shares, w.GPUs, w.Of), "-")
	}
	if w.Profile == "" {
		return "gpus-" + strconv.Itoa(w.GPUs)
	}
	return fmt.Sprintf("mig-%s-%d", w.Profile, w.GPUs)
}

// lastTemplate asks for the last GPU, or for the one before it, and so on, or for any. Preferred allocation begins there too.
func lastTemplate() *resourceapi.ResourceClaimTemplate {
	var wishes []resourceapi.DeviceSubRequest
	for i := range racers {
		wishes = append(wishes, resourceapi.DeviceSubRequest{
			Name: fmt.Sprintf("last-%d", i), DeviceClassName: deviceClass,
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: fmt.Sprintf("device.attributes[%q].index == %d", install.DriverName, gpusANode-1-i),
			}}},
		})
	}
	wishes = append(wishes, resourceapi.DeviceSubRequest{Name: "any", DeviceClassName: deviceClass})
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: lastName},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpus", FirstAvailable: wishes}},
		}}},
	}
}

func claimSpec(w Workload) resourceapi.ResourceClaimSpec {
	wanted := &resourceapi.ExactDeviceRequest{DeviceClassName: deviceClass, Count: int64(w.GPUs)}
	spec := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "gpus", Exactly: wanted}},
	}}
	if w.Profile != "" {
		wanted.DeviceClassName = partitionClass
		wanted.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes[%q].profile == %q", install.DriverName, w.Profile),
		}}}
	}
	if w.Of != "" {
		wanted.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes[%q].index in [%s]", install.DriverName, strings.Join(gpusOf(w.Of), ", ")),
		}}}
	}
	amounts := map[resourceapi.QualifiedName]resource.Quantity{}
	if w.Memory > 0 {
		amounts[memoryCapacity] = *resource.NewQuantity(int64(w.Memory)*mibAGib*mibibytes, resource.BinarySI)
	}
	if w.Shares > 0 {
		amounts[sharesCapacity] = *resource.NewQuantity(int64(w.Shares), resource.DecimalSI)
	}
	if len(amounts) > 0 {
		wanted.Count, wanted.Capacity = 1, &resourceapi.CapacityRequirements{Requests: amounts}
		// A request that gets a part of a GPU by MPS and of another is refused.
		for i := 1; i < w.GPUs; i++ {
			spec.Devices.Requests = append(spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprint("gpus-", i), Exactly: wanted})
		}
	}
	if w.Together {
		parent := resourceapi.FullyQualifiedName(install.DriverName + "/parentUUID")
		spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &parent}}
	}
	return spec
}

// sharedClaim is the claim of all pods of a Shared workload.
func sharedClaim(w Workload) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: w.Name, Labels: labels(w)}, Spec: claimSpec(w)}
}

func labels(w Workload) map[string]string {
	all := map[string]string{workloadLabel: w.Name, apiLabel: string(w.API), gpusLabel: strconv.Itoa(w.GPUs)}
	if w.Profile != "" {
		all[profileLabel], all[togetherLabel] = w.Profile, strconv.FormatBool(w.Together)
	}
	if w.sharing() {
		all[memoryLabel], all[sharesLabel], all[ofLabel] = strconv.Itoa(w.Memory), strconv.Itoa(w.Shares), string(w.Of)
	}
	if w.Renamed {
		all[renamedLabel] = strconv.FormatBool(w.Renamed)
	}
	return all
}

// budget keeps evictions from ending the last pod of a workload that runs.
func budget(w Workload) *policyv1.PodDisruptionBudget {
	one := intstr.FromInt32(1)
	return &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: w.Name, Labels: labels(w)},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, Selector: &metav1.LabelSelector{MatchLabels: labels(w)}},
	}
}

// workflow is the owner of a Workflow's pods. No controller knows its kind as an owner of pods, as with those of workflow engines.
func workflow(w Workload) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: w.Name, Labels: labels(w)}}
}

// ownedBy makes a workflow the controller of a pod.
func ownedBy(owner *corev1.ConfigMap, pod *corev1.Pod) *corev1.Pod {
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, corev1.SchemeGroupVersion.WithKind("ConfigMap"))}
	return pod
}

// barePod is pod i of a Bare or Shared workload.
func barePod(w Workload, i int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", w.Name, i), Labels: labels(w)},
		Spec:       podSpec(w),
	}
}

func deployment(w Workload) *appsv1.Deployment {
	replicas := int32(w.Replicas)
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: w.Name, Labels: labels(w)},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels(w)},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels(w)}, Spec: podSpec(w)},
		},
	}
}

func job(w Workload) *batchv1.Job {
	completions, failures := int32(w.Replicas), int32(manyFailures)
	spec := podSpec(w)
	spec.RestartPolicy = corev1.RestartPolicyNever
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: w.Name, Labels: labels(w)},
		Spec: batchv1.JobSpec{
			Completions: &completions, Parallelism: &completions, BackoffLimit: &failures,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels(w)}, Spec: spec},
		},
	}
}

func podSpec(w Workload) corev1.PodSpec {
	grace := int64(w.Linger/time.Second) + 2
	main := container(w, "main", command(w))
	if w.Linger > 0 {
		// The image's stop signal is SIGKILL, so only a hook makes the end take time.
		main.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{
			Command: []string{"sleep", strconv.Itoa(int(w.Linger / time.Second))},
		}}}
	}
	spec := corev1.PodSpec{TerminationGracePeriodSeconds: &grace, Containers: []corev1.Container{main}}
	if w.Init {
		spec.InitContainers = []corev1.Container{container(w, "init", "sleep 0.3")}
	}
	if w.Crash {
		spec.Volumes = []corev1.Volume{{Name: "once", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	}
	if w.Late {
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: lateName, VolumeSource: corev1.VolumeSource{
			ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: lateName}},
		}})
	}
	if w.API == oracle.Claim {
		reference := corev1.PodResourceClaim{Name: claimName}
		if w.Shape == Shared {
			reference.ResourceClaimName = &w.Name
		} else {
			name := templateName(w)
			if w.Last {
				name = lastName
			}
			reference.ResourceClaimTemplateName = &name
		}
		spec.ResourceClaims = []corev1.PodResourceClaim{reference}
	}
	return spec
}

func command(w Workload) string {
	switch {
	case w.Work > 0:
		return fmt.Sprintf("exec sleep %d", int(w.Work/time.Second))
	case w.Crash:
		return "[ -e " + onceDir + "/x ] || { touch " + onceDir + "/x; sleep 1; exit 1; }; exec sleep infinity"
	}
	return "exec sleep infinity"
}

func container(w Workload, name, command string) corev1.Container {
	c := corev1.Container{
		Name: name, Image: cluster.BusyboxImage, ImagePullPolicy: corev1.PullNever, Command: []string{"sh", "-c", command},
	}
	if w.API == oracle.Claim {
		c.Resources.Claims = []corev1.ResourceClaim{{Name: claimName}}
	} else {
		c.Resources.Limits = corev1.ResourceList{w.resource(): *resource.NewQuantity(int64(w.GPUs), resource.DecimalSI)}
	}
	if w.Crash {
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "once", MountPath: onceDir})
	}
	if w.Late {
		// Kubelet does not wait for a volume that no container mounts.
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: lateName, MountPath: "/" + lateName})
	}
	return c
}

// resource is the name by which limits ask for what the workload wants.
func (w Workload) resource() corev1.ResourceName {
	if w.Renamed {
		return renamedResource
	}
	return resourceOf(w.Profile)
}

// resourceOf is the name by which limits ask for partitions of a profile, or for GPUs where it is empty.
func resourceOf(profile string) corev1.ResourceName {
	if profile == "" {
		return install.ResourceName
	}
	return corev1.ResourceName("nvidia.com/mig-" + profile)
}

// ask is what a pod wants: GPUs, or partitions of a profile, perhaps of one GPU all.
type ask struct {
	api      oracle.API
	gpus     int
	profile  string
	together bool
	// mib is how much memory of each GPU a claim wants; zero for all of it.
	mib int
	// shares is how many of the equal shares of each GPU a claim wants; zero if it requests no number.
	shares int
	// of is the way of the GPUs that a claim selects; empty for any GPU.
	of way
	// renamed are replicas that have a resource of their own.
	renamed bool
}

// askOf answers false for a pod that is none of ours.
func askOf(pod *corev1.Pod) (ask, bool) {
	gpus, err := strconv.Atoi(pod.Labels[gpusLabel])
	gib, _ := strconv.Atoi(pod.Labels[memoryLabel])    //nolint:errcheck // zero where there is none
	shares, _ := strconv.Atoi(pod.Labels[sharesLabel]) //nolint:errcheck // as above
	return ask{
		api: oracle.API(pod.Labels[apiLabel]), gpus: gpus, profile: pod.Labels[profileLabel], together: pod.Labels[togetherLabel] == "true",
		mib: gib * mibAGib, shares: shares, of: way(pod.Labels[ofLabel]), renamed: pod.Labels[renamedLabel] == "true",
	}, err == nil
}
