// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/cel-go/common/types"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tandem-gpu/tandem/pkg/webhook"
)

func webhookOf(t *testing.T, name string) (*admissionv1.ValidatingWebhookConfiguration, admissionv1.ValidatingWebhook) {
	t.Helper()
	configuration := find[*admissionv1.ValidatingWebhookConfiguration](t, name)
	if len(configuration.Webhooks) != 1 {
		t.Fatalf("%d webhooks", len(configuration.Webhooks))
	}
	return configuration, configuration.Webhooks[0]
}

// The API server reaches the controller's pods through the configuration, and the webhook fails open.
func TestWebhookLeadsToTheController(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			configuration, hook := webhookOf(t, name)
			at, service := hook.ClientConfig.Service, findNamed[*corev1.Service](t, name, "-webhook")
			if at.Name != service.Name || at.Namespace != service.Namespace || *at.Path != webhook.Path || *at.Port != service.Spec.Ports[0].Port || service.Name != configuration.Name {
				t.Errorf("%s %+v is not service %s/%s", configuration.Name, at, service.Namespace, service.Name)
			}
			pod := find[*appsv1.Deployment](t, name).Spec.Template
			if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pod.Labels)) || labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(daemonSet(t, name).Spec.Template.Labels)) {
				t.Errorf("the service selects %v", service.Spec.Selector)
			}
			container := pod.Spec.Containers[0]
			port := slices.IndexFunc(container.Ports, func(p corev1.ContainerPort) bool { return p.Name == service.Spec.Ports[0].TargetPort.StrVal })
			if port < 0 || !slices.Contains(container.Args, fmt.Sprint("--webhook-port=", container.Ports[port].ContainerPort)) ||
				!slices.Contains(container.Args, "--webhook-name="+configuration.Name) {
				t.Errorf("ports %+v, arguments %v", container.Ports, container.Args)
			}
			if *hook.FailurePolicy != admissionv1.Ignore || *hook.TimeoutSeconds > 3 || *hook.SideEffects != admissionv1.SideEffectClassNone ||
				*hook.MatchPolicy != admissionv1.Equivalent || hook.NamespaceSelector != nil || hook.ObjectSelector != nil || hook.ClientConfig.CABundle != nil {
				t.Errorf("%+v", hook)
			}
			for _, rule := range findNamed[*rbacv1.ClusterRole](t, name, "-controller").Rules {
				if slices.Contains(rule.Resources, "validatingwebhookconfigurations") && !slices.Equal(rule.ResourceNames, []string{configuration.Name}) {
					t.Errorf("the controller may write %v", rule)
				}
			}
		})
	}
}

func TestNoWebhook(t *testing.T) {
	t.Parallel()
	out := string(renderWith(t, "-f", valuesFile("default"), "--set", "webhook.enabled=false"))
	for _, word := range []string{"webhook", "[secrets]"} {
		if strings.Contains(strings.ToLower(out), word) {
			t.Errorf("%s is left", word)
		}
	}
}

// Only objects with parameters for this driver are sent. The API server evaluates this for every claim.
func TestWebhookIsAskedWhatIsOurs(t *testing.T) {
	t.Parallel()
	_, hook := webhookOf(t, "default")
	const ours, others = `{"opaque":{"driver":"gpu.nvidia.com","parameters":{}}}`, `{"opaque":{"driver":"nic.example.com","parameters":{}}}`
	for _, c := range []struct {
		operation, spec, before string
		want                    bool
	}{
		{"CREATE", `{"devices":{"requests":[],"config":[` + others + `,` + ours + `]}}`, "null", true},
		{"CREATE", `{"spec":{"devices":{"config":[` + ours + `]}}}`, "null", true},
		{"CREATE", `{"config":[` + ours + `]}`, "null", true},
		{"CREATE", `{"config":[` + others + `,{}]}`, "null", false},
		{"CREATE", `{"devices":{"requests":[]}}`, "null", false},
		{"CREATE", `{"spec":{"devices":{}}}`, "null", false},
		{"CREATE", `{}`, "null", false},
		{"UPDATE", `{"config":[` + ours + `]}`, `{"config":[` + ours + `]}`, false},
		{"UPDATE", `{"config":[` + ours + `]}`, `{"config":[` + others + `]}`, true},
	} {
		object := func(spec string) any {
			var o any
			if err := json.Unmarshal([]byte(`{"spec":`+spec+`}`), &o); err != nil {
				t.Fatal(err)
			}
			return o
		}
		input := map[string]any{"request": map[string]any{"operation": c.operation}, "object": object(c.spec), "oldObject": object(c.before)}
		got := true
		for _, condition := range hook.MatchConditions {
			got = got && evaluate(t, condition.Expression, input) == types.True
		}
		if got != c.want {
			t.Errorf("%s %s after %s: sent is %t", c.operation, c.spec, c.before, got)
		}
	}
}
