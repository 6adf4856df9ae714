// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	admissionapi "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/badparameters"
	"github.com/tandem-gpu/tandem/pkg/controller"
)

const (
	webhookName = "tandem-webhook"
	webhookPath = "parameters"
	// told is what a denial by the webhook begins with.
	told = `admission webhook "parameters.tandem-gpu.dev" denied the request`
)

func (s *story) mistakes() []badparameters.Case {
	s.Helper()
	cases, err := badparameters.All()
	if err != nil {
		s.Fatal(err)
	}
	return cases
}

// saying is a configuration with parameters for our driver.
func (s *story) saying(parameters map[string]any) resourceapi.DeviceConfiguration {
	s.Helper()
	raw, err := json.Marshal(parameters)
	if err != nil {
		s.Fatal(err)
	}
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: install.DriverName, Parameters: runtime.RawExtension{Raw: raw}}}
}

func asking(config resourceapi.DeviceConfiguration) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}},
		Config:   []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: config}},
	}}
}

// dry tries to make an object of each kind that says something; paths are where it stands there.
func (s *story) dry(config resourceapi.DeviceConfiguration) (errs map[string]error, paths map[string]string) {
	options := metav1.CreateOptions{DryRun: dryRun}
	meta := metav1.ObjectMeta{Name: "parameters"}
	api := theClient.ResourceV1()
	_, claim := api.ResourceClaims(s.Namespace).Create(s.Ctx, &resourceapi.ResourceClaim{ObjectMeta: meta, Spec: asking(config)}, options)
	_, template := api.ResourceClaimTemplates(s.Namespace).Create(s.Ctx, &resourceapi.ResourceClaimTemplate{
		ObjectMeta: meta, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: asking(config)},
	}, options)
	_, class := api.DeviceClasses().Create(s.Ctx, &resourceapi.DeviceClass{
		ObjectMeta: meta, Spec: resourceapi.DeviceClassSpec{Config: []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: config}}},
	}, options)
	const opaque = "[0].opaque.parameters."
	return map[string]error{"claim": claim, "template": template, "class": class}, map[string]string{
		"claim": "spec.devices.config" + opaque, "template": "spec.spec.devices.config" + opaque, "class": "spec.config" + opaque,
	}
}

// causes are the paths that an error names.
func causes(err error) []string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return nil
	}
	var fields []string
	for _, c := range status.Status().Details.Causes {
		fields = append(fields, c.Field)
	}
	return fields
}

// judged waits until the webhook judges.
func (s *story) judged() {
	s.Helper()
	s.Await(soon, "the webhook to judge", func() error {
		errs, _ := s.dry(s.saying(map[string]any{}))
		for kind, err := range errs {
			if err == nil || !strings.Contains(err.Error(), told) {
				return fmt.Errorf("a wrong %s: %w", kind, errors.Join(errors.New("not denied"), err))
			}
		}
		return nil
	})
}

// TestMistakesAreToldWhenApplied: without the admission policy, which finds some mistakes itself, each of two controllers reports
// each mistake with its path, wherever it is. The same holds after the webhook's certificates were damaged.
func TestMistakesAreToldWhenApplied(t *testing.T) {
	s := begin(t)
	s.Values("claimParameters.validate=false")
	s.judged()
	for _, c := range s.mistakes() {
		errs, paths := s.dry(s.saying(c.Parameters))
		for kind, err := range errs {
			var want []string
			for _, f := range c.Fields {
				want = append(want, paths[kind]+f)
			}
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), told) || !strings.Contains(err.Error(), c.Says) || !slices.Equal(causes(err), want) {
				t.Errorf("%s in a %s: %v of %q, want %q", c.Name, kind, err, causes(err), want)
			}
		}
	}
	for _, right := range []map[string]any{
		{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"},
		{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": map[string]any{"strategy": "MPS", "mpsConfig": map[string]any{"defaultActiveThreadPercentage": 50}}},
	} {
		errs, _ := s.dry(s.saying(right))
		for kind, err := range errs {
			if err != nil {
				t.Errorf("%v in a %s: %v", right, kind, err)
			}
		}
	}
	s.toldByKubectl()
	s.toldOfOlderVersions()
	// From here on each of them is alone for a while.
	for _, pod := range s.controllers() {
		if err := s.askReplica(pod); err != nil {
			t.Errorf("%s: %v", pod.Name, err)
		}
	}
	s.Kubectl("patch", "validatingwebhookconfiguration", webhookName, "--type=json", `-p=[{"op":"remove","path":"/webhooks/0/clientConfig/caBundle"}]`)
	s.judged()
	before := s.webhookSecret()
	s.Kubectl("patch", "secret", "-n", install.Namespace, webhookName, "--type=merge", `-p={"data":{"tls.crt":"cnViYmlzaA=="}}`)
	s.replaced(before)
	s.Event("Secret", webhookName, "CertificateReplaced", "tls.crt")
	before = s.webhookSecret()
	s.Kubectl("delete", "secret", "-n", install.Namespace, webhookName)
	s.replaced(before)
}

// toldByKubectl: what an author reads has all mistakes.
func (s *story) toldByKubectl() {
	s.Helper()
	err := s.Apply(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: three}
spec:
  devices:
    requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]
    config:
    - opaque: {driver: nic.example.com, parameters: {}}
    - opaque:
        driver: gpu.nvidia.com
        parameters:
          apiVersion: resource.nvidia.com/v1beta1
          kind: GpuConfig
          sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 500}}
    - opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GPUConfig}}
    - opaque:
        driver: gpu.nvidia.com
        parameters:
          apiVersion: resource.nvidia.com/v1beta1
          kind: GpuConfig
          sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"1": 1Gi}}}
`)
	const at = "spec.devices.config"
	for _, want := range []string{
		at + "[1].opaque.parameters.sharing.mpsConfig.defaultActiveThreadPercentage", at + "[2].opaque.parameters.kind",
		at + "[3].opaque.parameters.sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[1]",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			s.Errorf("kubectl says %v, which lacks %s", err, want)
		}
	}
	s.Logf("kubectl says: %v", err)
}

// toldOfOlderVersions: the API server converts what is applied in another version, where it serves one.
func (s *story) toldOfOlderVersions() {
	s.Helper()
	for _, version := range []string{"v1beta1", "v1beta2"} {
		body := fmt.Sprintf(`{"apiVersion":"resource.k8s.io/%s","kind":"DeviceClass","metadata":{"name":"parameters"},"spec":{"config":[{"opaque":{"driver":%q,"parameters":{}}}]}}`,
			version, install.DriverName)
		err := theClient.ResourceV1().RESTClient().Post().AbsPath("/apis/resource.k8s.io", version, "deviceclasses").Param("dryRun", metav1.DryRunAll).
			SetHeader("Content-Type", "application/json").Body([]byte(body)).Do(s.Ctx).Error()
		if apierrors.IsNotFound(err) {
			s.Logf("%s is not served", version)
			continue
		}
		if !slices.Equal(causes(err), []string{"spec.config[0].opaque.parameters.apiVersion"}) {
			s.Errorf("%s: %v", version, err)
		}
	}
}

func (s *story) controllers() []corev1.Pod {
	s.Helper()
	list, err := theClient.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: controllerLabel})
	if err != nil {
		s.Fatal(err)
	}
	pods := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	if len(pods) != 2 {
		s.Errorf("%d controllers", len(pods))
	}
	return pods
}

// askReplica asks one controller as the API server does, by the Service's name and the authorities of the configuration.
func (s *story) askReplica(pod corev1.Pod) error {
	s.Helper()
	configuration, err := theClient.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(s.Ctx, webhookName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(configuration.Webhooks[0].ClientConfig.CABundle)
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: webhookName + "." + install.Namespace + ".svc"},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return theCluster.DialContext(ctx, network, net.JoinHostPort(pod.Status.PodIP, "9443"))
		},
	}
	defer transport.CloseIdleConnections()
	body, err := json.Marshal(&admissionapi.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionapi.AdmissionRequest{
			UID: "u", Operation: admissionapi.Create, Kind: metav1.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: "DeviceClass"},
			Object: runtime.RawExtension{Raw: []byte(`{"spec":{"config":[{"opaque":{"driver":"` + install.DriverName + `","parameters":{}}}]}}`)},
		},
	})
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(s.Ctx, http.MethodPost, "https://webhook/"+webhookPath, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	var answer admissionapi.AdmissionReview
	if err := json.Unmarshal(text, &answer); err != nil || answer.Response == nil || answer.Response.Allowed || answer.Response.UID != "u" {
		return fmt.Errorf("answers %s (%w)", text, err)
	}
	return nil
}

func (s *story) webhookSecret() *corev1.Secret {
	s.Helper()
	secret, err := theClient.CoreV1().Secrets(install.Namespace).Get(s.Ctx, webhookName, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return secret
}

// replaced waits until there is another certificate, and every controller serves it.
func (s *story) replaced(before *corev1.Secret) {
	s.Helper()
	s.Await(soon, "a new certificate in use", func() error {
		secret, err := theClient.CoreV1().Secrets(install.Namespace).Get(s.Ctx, webhookName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if now := secret.Data[corev1.TLSCertKey]; bytes.Equal(now, before.Data[corev1.TLSCertKey]) || len(now) < len("rubbish")+1 {
			return errors.New("it is the one before")
		}
		for _, pod := range s.controllers() {
			if err := s.askReplica(pod); err != nil {
				return err
			}
		}
		return nil
	})
	s.judged()
}

// kubeletTries is how often kubelet prepares the claims again in a few minutes. prepareObserved is longer than the controller waits until it
// has kubelet try claims again, for its first two times.
const (
	kubeletTries    = 2
	prepareObserved = 16 * time.Second
)

// TestMistakesThatSlipThrough: without a check at admission, the node refuses each mistake. This ends in one event that names the
// field, and no component retries without end. Existing mistakes do not delay the webhook when it is back.
func TestMistakesThatSlipThrough(t *testing.T) {
	s := begin(t)
	s.Values("webhook.enabled=false", "claimParameters.validate=false")
	cases := s.mistakes()
	tried := s.RefusedPrepares()
	// The API server learns within a second that a policy is gone.
	s.Await(soon, "the policy to be gone", func() error { return s.Apply(s.allMistakes(cases), "--dry-run=server") })
	s.Manifest(s.allMistakes(cases))
	s.allocateAll(cases)
	began := time.Now()
	for _, c := range cases {
		s.Event("ResourceClaim", c.Name, "InvalidParameters", "spec.devices.config[0].opaque.parameters."+c.Fields[0], "retrying does not help")
	}
	t.Logf("%d claims refused after %s", len(cases), time.Since(began).Round(time.Second))
	// kubelet tries again, now and after a minute or so, and nothing else has it try.
	tries := 1
	for range kubeletTries {
		tries++
		theKubelets[gpuNode].PrepareAgain()
		s.Await(soon, "kubelet to try again", func() error {
			if each := (s.RefusedPrepares() - tried) / float64(len(cases)); each < float64(tries) {
				return fmt.Errorf("%.2f Prepare calls for each claim, not %d", each, tries)
			}
			return nil
		})
	}
	// It is about what does not happen, so there is no condition to wait for.
	select {
	case <-s.Ctx.Done():
	case <-time.After(prepareObserved):
	}
	events := s.eventsOf("ResourceClaim", "InvalidParameters")
	for _, c := range cases {
		if n := events[c.Name]; n != 1 {
			t.Errorf("%s has %d events", c.Name, n)
		}
	}
	if each := (s.RefusedPrepares() - tried) / float64(len(cases)); each != float64(tries) {
		t.Errorf("%.2f Prepare calls for each claim, want kubelet's own %d", each, tries)
	}
	for _, pod := range s.Pods() {
		if at := pod.Annotations[controller.RetryAnnotation]; at != "" {
			t.Errorf("the controller has kubelet prepare %s again", pod.Name)
		}
	}
	s.WantHolds(0, 0)
	s.leftAlone(cases[0])
}

// allMistakes are a claim and a pod of each case, which no scheduler takes.
func (s *story) allMistakes(cases []badparameters.Case) string {
	s.Helper()
	var text strings.Builder
	for _, c := range cases {
		claim, err := json.Marshal(&resourceapi.ResourceClaim{
			TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"}, ObjectMeta: metav1.ObjectMeta{Name: c.Name}, Spec: asking(s.saying(c.Parameters)),
		})
		if err != nil {
			s.Fatal(err)
		}
		fmt.Fprintf(&text, `
---
%[1]s
---
apiVersion: v1
kind: Pod
metadata: {name: %[2]s}
spec:
  schedulerName: none
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: %[2]s}]
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
`, claim, c.Name)
	}
	return text.String()
}

// allocateAll does for all claims what the scheduler does, all at once: it would make them wait for each other's GPUs.
func (s *story) allocateAll(cases []badparameters.Case) {
	s.Helper()
	for i, c := range cases {
		claim, err := theClient.ResourceV1().ResourceClaims(s.Namespace).Get(s.Ctx, c.Name, metav1.GetOptions{})
		if err != nil {
			s.Fatal(err)
		}
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: install.DriverName, Pool: gpuNode, Device: fmt.Sprint("gpu-", i%gpusANode)}},
			Config:  []resourceapi.DeviceAllocationConfiguration{{Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: claim.Spec.Devices.Config[0].DeviceConfiguration}},
		}}
		claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: c.Name, UID: s.Pod(c.Name).UID}}
		if _, err := theClient.ResourceV1().ResourceClaims(s.Namespace).UpdateStatus(s.Ctx, claim, metav1.UpdateOptions{}); err != nil {
			s.Fatal(err)
		}
	}
	for _, c := range cases {
		binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: c.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: gpuNode}}
		if err := theClient.CoreV1().Pods(s.Namespace).Bind(s.Ctx, binding, metav1.CreateOptions{}); err != nil {
			s.Fatal(err)
		}
	}
}

// eventsOf counts the events of a reason by the name of the object.
func (s *story) eventsOf(kind, reason string) map[string]int {
	s.Helper()
	list, err := theClient.CoreV1().Events(s.Namespace).List(s.Ctx, metav1.ListOptions{FieldSelector: "reason=" + reason})
	if err != nil {
		s.Fatal(err)
	}
	counts := map[string]int{}
	for _, event := range list.Items {
		if event.InvolvedObject.Kind == kind {
			counts[event.InvolvedObject.Name]++
		}
	}
	return counts
}

// leftAlone: a class and a claim from before the webhook can be labelled and lose their finalizers, and say nothing else that is wrong.
func (s *story) leftAlone(c badparameters.Case) {
	s.Helper()
	class := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: s.Namespace, Finalizers: []string{"example.com/test"}},
		Spec:       resourceapi.DeviceClassSpec{Config: []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: s.saying(c.Parameters)}}},
	}
	if _, err := theClient.ResourceV1().DeviceClasses().Create(s.Ctx, class, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	finalizers := func(list string) error {
		patch := []byte(`{"metadata":{"finalizers":` + list + `}}`)
		_, ofClass := theClient.ResourceV1().DeviceClasses().Patch(s.Ctx, class.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		_, ofClaim := theClient.ResourceV1().ResourceClaims(s.Namespace).Patch(s.Ctx, c.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		return errors.Join(ofClass, ofClaim)
	}
	s.Cleanup(func() {
		if err := errors.Join(finalizers("[]"), theClient.ResourceV1().DeviceClasses().Delete(s.Ctx, class.Name, metav1.DeleteOptions{})); err != nil && !apierrors.IsNotFound(err) {
			s.Error(err)
		}
	})
	if err := finalizers(`["example.com/test"]`); err != nil {
		s.Fatal(err)
	}
	if err := s.Install(s.Ctx, install.Options{}); err != nil {
		s.Fatal(err)
	}
	s.Await(soon, "the webhook to judge", func() error {
		// The policy does not know this one.
		errs, _ := s.dry(s.saying(map[string]any{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": map[string]any{
			"strategy": "MPS", "mpsConfig": map[string]any{"defaultPinnedDeviceMemoryLimit": "10 Gi"},
		}}))
		if err := errs["class"]; err == nil || !strings.Contains(err.Error(), told) {
			return fmt.Errorf("not denied: %w", err)
		}
		return nil
	})
	if err := finalizers("[]"); err != nil {
		s.Errorf("what was there is in the way: %v", err)
	}
	patch := []byte(`{"spec":{"config":[{"opaque":{"driver":"` + install.DriverName + `","parameters":{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",` +
		`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"10 Gi"}}}}}]}}`)
	_, err := theClient.ResourceV1().DeviceClasses().Patch(s.Ctx, class.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err == nil || !strings.Contains(err.Error(), "spec.config[0].opaque.parameters.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit") {
		s.Errorf("a class that says something else that is wrong: %v", err)
	}
}

// TestClaimForADeviceThatIsNotThere: an allocation names a device that does not exist, as after a GPU was removed. Claim and pod
// report it.
func TestClaimForADeviceThatIsNotThere(t *testing.T) {
	s := begin(t)
	s.Manifest(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: stale}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.nvidia.com}
`)
	s.Manifest(`
apiVersion: v1
kind: Pod
metadata: {name: stale}
spec:
  # No scheduler takes it, so the claim stays as it is.
  schedulerName: none
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: stale}]
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
`)
	claim, err := theClient.ResourceV1().ResourceClaims(s.Namespace).Get(s.Ctx, "stale", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: install.DriverName, Pool: gpuNode, Device: "gpu-99"},
		},
	}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "stale", UID: s.Pod("stale").UID}}
	if _, err := theClient.ResourceV1().ResourceClaims(s.Namespace).UpdateStatus(s.Ctx, claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "stale"}, Target: corev1.ObjectReference{Kind: "Node", Name: gpuNode}}
	if err := theClient.CoreV1().Pods(s.Namespace).Bind(s.Ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Event("ResourceClaim", "stale", "UnknownDevice", "gpu-99", "does not exist")
	s.Event("Pod", "stale", "FailedPrepareDynamicResources", "gpu-99", "does not exist")
	s.WantHolds(0, 0)
}

// TestParametersThatAreWrong are told when they are applied, wherever they stand; what is right, or not for us, is not in the
// way.
func TestParametersThatAreWrong(t *testing.T) {
	s := begin(t)
	const (
		typo   = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, shearing: {strategy: TimeSlicing}}`
		right  = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}`
		enough = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50}}}`
		much   = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}}`
		exact  = `requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]`
		config = `config: [{opaque: {driver: %s, parameters: %s}}]`
	)
	for kind, object := range map[string]string{
		"ResourceClaim":         "spec: {devices: {" + exact + ", " + config + "}}",
		"ResourceClaimTemplate": "spec: {spec: {devices: {" + exact + ", " + config + "}}}",
		"DeviceClass":           "spec: {" + config + "}",
	} {
		object = "apiVersion: resource.k8s.io/v1\nkind: " + kind + "\nmetadata: {name: parameters}\n" + object
		const told = "config[*].opaque.parameters.shearing: unknown field"
		if err := s.Apply(fmt.Sprintf(object, "gpu.nvidia.com", typo), "--dry-run=server"); err == nil || !strings.Contains(err.Error(), told) {
			t.Errorf("%s: %v, want %q", kind, err, told)
		}
		if err := s.Apply(fmt.Sprintf(object, "gpu.nvidia.com", much), "--dry-run=server"); err == nil || !strings.Contains(err.Error(), "defaultActiveThreadPercentage: must be") {
			t.Errorf("%s: %v of too large a number", kind, err)
		}
		for parameters, driver := range map[string]string{right: "gpu.nvidia.com", enough: "gpu.nvidia.com", typo: "gpu.example.com"} {
			if err := s.Apply(fmt.Sprintf(object, driver, parameters), "--dry-run=server"); err != nil {
				t.Errorf("%s for %s: %v", kind, driver, err)
			}
		}
	}
}

// TestParametersThatCannotBeHonoured are refused with the path of the field, and nothing is held.
func TestParametersThatCannotBeHonoured(t *testing.T) {
	s := begin(t)
	for name, parameters := range map[string]string{
		"other": `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {GPU-00000000-0000-0000-0000-000000000000: 5Gi}}}}`,
	} {
		s.Manifest(fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.nvidia.com}
    config:
    - opaque:
        driver: gpu.nvidia.com
        parameters: %[2]s
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: %[1]s}]
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
`, name, parameters))
	}
	const field = "config[0].opaque.parameters.sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[GPU-00000000-0000-0000-0000-000000000000]"
	s.Event("ResourceClaim", "other", "InvalidParameters", field, "retrying does not help")
	s.Event("Pod", "other", "FailedPrepareDynamicResources", field)
	s.WantHolds(0, 0)
}

// TestParametersOfOtherClients: Python's puts spaces into what it sends, and others send fields in an order of their own. How the
// device is shared is told all the same.
func TestParametersOfOtherClients(t *testing.T) {
	s := begin(t)
	body := fmt.Sprintf(`{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "odd"}, "spec": {"devices": {`+
		`"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}], "config": [{"opaque": {"driver": %q, "parameters": `+
		`{"kind": "GpuConfig", "apiVersion": "resource.nvidia.com/v1beta1", "sharing": {"strategy": "TimeSlicing"}}}}]}}}`, install.DriverName)
	err := theClient.ResourceV1().RESTClient().Post().AbsPath("/apis/resource.k8s.io/v1/namespaces", s.Namespace, "resourceclaims").
		SetHeader("Content-Type", "application/json").Body([]byte(body)).Do(s.Ctx).Error()
	if err != nil {
		t.Fatal(err)
	}
	s.Manifest(`
apiVersion: v1
kind: Pod
metadata: {name: odd}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: odd}]
  containers:
  - name: main
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
`)
	s.Running(patient, 1, 0)
	s.Says("odd", map[string]string{"gpu": "TimeSlicing, limit Advisory"})
}
