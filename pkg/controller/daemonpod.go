// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// DaemonPods describes the pods of MPS daemons.
type DaemonPods struct {
	// Template has what the administrator configures: image, resources, privileges and labels, with one container. It is nil if the
	// controller runs no daemons.
	Template *corev1.PodTemplateSpec
	// Namespace of the pods.
	Namespace string
	// RunDir and KubeletDir are the agents' and kubelet's directories on the nodes.
	RunDir, KubeletDir string
	// DriverRoots are the host paths whose programs a daemon may run.
	DriverRoots []string
	// SharedMemory limits the memory that a daemon's server and clients share; nil for kubelet's default.
	SharedMemory *resource.Quantity
}

// DaemonTemplate reads the template of the daemons' pods. An unknown field is an error. It is a pure function.
func DaemonTemplate(text string) (*corev1.PodTemplateSpec, error) {
	var template corev1.PodTemplateSpec
	unknown, err := kjson.UnmarshalStrict([]byte(text), &template)
	if err := errors.Join(append(unknown, err)...); err != nil {
		return nil, fmt.Errorf("read the template of the pods of MPS daemons: %w", err)
	}
	if len(template.Spec.Containers) != 1 {
		return nil, fmt.Errorf("read the template of the pods of MPS daemons: it has %d containers, not one", len(template.Spec.Containers))
	}
	return &template, nil
}

const (
	// daemonLabel of a pod is the daemon's name.
	daemonLabel = "tandem-gpu.dev/mps-daemon"
	// settingsAnnotation is the hash of the settings in the pod.
	settingsAnnotation = "tandem-gpu.dev/mps-settings"
	// autoscalerAnnotation makes the cluster autoscaler treat the pod like one of a DaemonSet: it does not keep a node
	// (cluster-autoscaler FAQ).
	autoscalerAnnotation = "cluster-autoscaler.kubernetes.io/daemonset-pod"
)

// podName returns the only name of a daemon's pod, so that two controllers cannot create two pods. A pod with other settings, which include
// the daemon's generation, has another name: kube-scheduler 1.37 exits if its watch misses that a pod was deleted and a new one of its name
// is not bound yet (pkg/scheduler/backend/cache, UpdatePod). It is a pure function.
func podName(node *v1alpha1.GPUNode, d v1alpha1.MPSDaemon) string {
	sum := fnv.New32a()
	for _, part := range []string{node.Name, string(node.UID), mps.Settings(d.MPSSettings).Hash()} {
		sum.Write([]byte(part + "/"))
	}
	return fmt.Sprintf("tandem-mps-%s-%08x", d.Name, sum.Sum32())
}

// check returns why no pod may be created for a daemon. The agent requested it and has fewer rights than the pod: a stolen token of the
// agent must not run a program of its choice. It is a pure function.
func (p DaemonPods) check(d v1alpha1.MPSDaemon) error {
	if p.Template == nil {
		return errors.New("this installation of Tandem runs no MPS daemons (mps.enabled of the chart)")
	}
	if wrong := validation.IsDNS1123Label(d.Name); len(wrong) > 0 || len(d.Name) > maxName {
		return fmt.Errorf("name %q is no name of a daemon", d.Name)
	}
	if err := mps.Settings(d.MPSSettings).Validate(); err != nil {
		return err
	}
	if !slices.Contains(p.DriverRoots, d.DriverRoot) {
		return fmt.Errorf("driver root %s is none of %s: set driverRoot of the chart to where the driver is", d.DriverRoot,
			strings.Join(p.DriverRoots, ", "))
	}
	return nil
}

// maxName is the length of a daemon's name with which the pod's is a host name (api/gpunode/v1alpha1, MPSDaemon).
const maxName = 52

// Pod returns the pod of a node's daemon. It is a pure function.
func (p DaemonPods) Pod(node *v1alpha1.GPUNode, d v1alpha1.MPSDaemon) (*corev1.Pod, error) {
	settings := mps.Settings(d.MPSSettings)
	text, err := json.Marshal(settings)
	if err != nil {
		return nil, fmt.Errorf("encode settings of MPS daemon %s: %w", d.Name, err)
	}
	template := p.Template.DeepCopy()
	pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	pod.Name, pod.Namespace = podName(node, d), p.Namespace
	metav1.SetMetaDataLabel(&pod.ObjectMeta, daemonLabel, d.Name)
	metav1.SetMetaDataAnnotation(&pod.ObjectMeta, settingsAnnotation, settings.Hash())
	metav1.SetMetaDataAnnotation(&pod.ObjectMeta, autoscalerAnnotation, "true")
	// The garbage collector deletes the pod when this GPUNode is deleted.
	pod.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUNode", Name: node.Name, UID: node.UID, Controller: ptr.To(true),
	}}
	spec := &pod.Spec
	spec.RestartPolicy = corev1.RestartPolicyAlways
	// The daemon identifies clients by their processes, which are in other pods.
	spec.HostPID = true
	spec.AutomountServiceAccountToken, spec.EnableServiceLinks = ptr.To(false), ptr.To(false)
	spec.TerminationGracePeriodSeconds = ptr.To(int64(mps.MostGrace.Seconds()) + 5)
	// Like a DaemonSet's pod it runs on its node whatever taints the node has.
	spec.Affinity = pinnedTo(node.Name)
	spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}

	dir, scratch := mps.Dir(p.RunDir, d.Name), resource.MustParse(scratchSize)
	spec.Volumes = append(spec.Volumes,
		hostDirectory("daemon", dir), memory(mps.PipeVolume, &scratch), memory(mps.LogVolume, &scratch),
		hostDirectory("driver-root", d.DriverRoot), memory("tmp", &scratch), memory(mps.ShmVolume, p.SharedMemory),
	)
	c := &spec.Containers[0]
	c.Command = []string{"/usr/bin/mps-daemon", "run"}
	c.Env = append(c.Env,
		corev1.EnvVar{Name: mps.SettingsEnv, Value: string(text)},
		corev1.EnvVar{Name: mps.KubeletDirEnv, Value: p.KubeletDir},
		corev1.EnvVar{Name: mps.PodUIDEnv, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}}},
	)
	// The host's root is read-only, with what is mounted below it if the node's runtime can do that. In another root, as on GKE, the
	// container runtime may have to create the mount points below.
	root := corev1.VolumeMount{Name: "driver-root", MountPath: mps.PodRoot}
	if d.DriverRoot == "/" {
		root.ReadOnly, root.RecursiveReadOnly = true, ptr.To(corev1.RecursiveReadOnlyIfPossible)
	}
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "daemon", MountPath: mps.PodDir}, root)
	// The driver's program finds them at the same paths, whether or not the driver root is its root. The mounts hide the host's
	// directories and change nothing in them.
	for _, root := range []string{"", mps.PodRoot} {
		c.VolumeMounts = append(c.VolumeMounts,
			corev1.VolumeMount{Name: "tmp", MountPath: root + "/tmp"},
			corev1.VolumeMount{Name: mps.PipeVolume, MountPath: root + mps.ClientPipeDir},
			corev1.VolumeMount{Name: mps.LogVolume, MountPath: root + mps.ClientLogDir},
			corev1.VolumeMount{Name: mps.ShmVolume, MountPath: root + "/dev/shm"})
	}
	c.ReadinessProbe = probe("ready", 5, 5, 1)
	// A slow daemon still serves its clients, so it is restarted only after two minutes without an answer.
	c.LivenessProbe = probe("live", 30, 15, 4)
	c.TerminationMessagePolicy = corev1.TerminationMessageFallbackToLogsOnError
	return pod, nil
}

func pinnedTo(name string) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{name},
		}}}},
	}}}
}

// scratchSize limits each volume for pipes, logs and temporary files. A client that fills one must not fill the host's /run.
const scratchSize = "64Mi"

// memory returns a volume on a tmpfs of that size; nil is kubelet's default.
func memory(name string, size *resource.Quantity) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: size},
	}}
}

// hostDirectory returns a volume of an existing directory: the agent creates the daemon's, and without a driver root there is no driver.
func hostDirectory(name, path string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: path, Type: ptr.To(corev1.HostPathDirectory)},
	}}
}

func probe(what string, period, timeout, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/usr/bin/mps-daemon", what}}},
		PeriodSeconds: period, TimeoutSeconds: timeout, FailureThreshold: failures,
	}
}
