// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Controller is the configuration of the controller, the cluster's side.
type Controller struct {
	Kubeconfig   string
	DriverName   string
	ResourceName string
	// Namespace and LeaseName name the Lease that one of several controllers holds; PodName is who holds it.
	Namespace string
	LeaseName string
	PodName   string
	// DaemonPod is the template of MPS daemons' pods (corev1.PodTemplateSpec as JSON); empty where none are run. DaemonMemory is the
	// limit of the memory that a daemon shares with its clients; empty for half of the node's.
	DaemonPod    string
	DaemonMemory string
	// RunDir, KubeletDir and CDIDir are those of the node agents.
	RunDir     string
	KubeletDir string
	CDIDir     string
	// WebhookName is that of the Service, the Secret and the ValidatingWebhookConfiguration of the webhook; empty for none.
	WebhookName string
	WebhookPort int

	HTTPEndpoint string
	Verbosity    int
}

// ControllerDefaults are the settings of a controller about which nothing was said. They agree with those of the node agents.
func ControllerDefaults() Controller {
	agent := Defaults()
	return Controller{
		DriverName: agent.DriverName, ResourceName: agent.ResourceName, LeaseName: "tandem-controller", HTTPEndpoint: agent.HTTPEndpoint,
		RunDir: agent.RunDir, KubeletDir: agent.KubeletDir, CDIDir: agent.CDIDir,
		WebhookPort: 9443,
	}
}

func (c *Controller) settings() []setting {
	return []setting{
		{"kubeconfig", nil, "kubeconfig `file`; empty inside a cluster", text{&c.Kubeconfig}},
		{"driver-name", nil, "DRA driver `name` of the node agents", text{&c.DriverName}},
		{"resource-name", nil, "extended resource `name` of whole GPUs", text{&c.ResourceName}},
		{"namespace", nil, "`namespace` of the Lease by which one of several controllers leads", text{&c.Namespace}},
		{"lease-name", nil, "`name` of that Lease", text{&c.LeaseName}},
		{"pod-name", nil, "`name` under which this process holds the Lease: that of its pod, so that a restarted container leads at once",
			text{&c.PodName}},
		{"mps-pod", nil, "template of the pods of MPS daemons, as `JSON`, without what the controller adds; empty for no daemons", text{&c.DaemonPod}},
		{"mps-shared-memory", nil, "most `memory` that an MPS daemon shares with its clients; empty for half of the node's", text{&c.DaemonMemory}},
		{"run-dir", nil, "run `directory` of the node agents, on the nodes", text{&c.RunDir}},
		{"kubelet-dir", nil, "kubelet's `directory` on the nodes", text{&c.KubeletDir}},
		{"cdi-dir", nil, "`directory` of the CDI specs on the nodes", text{&c.CDIDir}},
		{"webhook-name", nil, "`name` of the Service, the Secret and the ValidatingWebhookConfiguration of the webhook that judges claim " +
			"parameters when they are applied; empty for none", text{&c.WebhookName}},
		{"webhook-port", nil, "`port` of that webhook", number{&c.WebhookPort}},
		{"http-endpoint", nil, "`address` of /healthz, /readyz and /metrics; empty for none", text{&c.HTTPEndpoint}},
		{"v", []string{"LOG_VERBOSITY"}, "log verbosity `level`", number{&c.Verbosity}},
	}
}

// LoadController reads all sources and validates the outcome, as Load does for the node agent.
func LoadController(args []string, lookupEnv func(string) (string, bool), stderr io.Writer) (Controller, error) {
	c := ControllerDefaults()
	if err := apply("controller", c.settings(), args, lookupEnv, stderr); err != nil {
		return Controller{}, err
	}
	if err := c.validate(); err != nil {
		return Controller{}, err
	}
	return c, nil
}

func (c *Controller) validate() error {
	var errs []error
	complain := func(flag, problem string) {
		if problem != "" {
			errs = append(errs, fmt.Errorf("--%s: %s", flag, problem))
		}
	}
	complain("driver-name", driverNameProblem(c.DriverName))
	complain("resource-name", resourceNameProblem(c.ResourceName))
	for _, name := range []struct {
		flag, value string
		check       func(string) []string
	}{
		{"namespace", c.Namespace, validation.IsDNS1123Label},
		{"lease-name", c.LeaseName, validation.IsDNS1123Subdomain},
		{"pod-name", c.PodName, validation.IsDNS1123Subdomain},
	} {
		if problems := name.check(name.value); len(problems) > 0 {
			complain(name.flag, fmt.Sprintf("%q is no %s (the chart sets it): %s",
				name.value, strings.ReplaceAll(name.flag, "-", " "), strings.Join(problems, "; ")))
		}
	}
	for _, dir := range []struct{ flag, path string }{{"run-dir", c.RunDir}, {"kubelet-dir", c.KubeletDir}, {"cdi-dir", c.CDIDir}} {
		if !filepath.IsAbs(dir.path) || filepath.Clean(dir.path) != dir.path {
			complain(dir.flag, fmt.Sprintf("%q is not a clean absolute path", dir.path))
		}
	}
	if _, err := c.SharedMemory(); err != nil {
		complain("mps-shared-memory", fmt.Sprintf("%q is no quantity: %v", c.DaemonMemory, err))
	}
	if c.WebhookName == "" {
		return errors.Join(errs...)
	}
	if problems := validation.IsDNS1035Label(c.WebhookName); len(problems) > 0 {
		complain("webhook-name", fmt.Sprintf("%q is no name of a Service: %s", c.WebhookName, strings.Join(problems, "; ")))
	}
	if problems := validation.IsValidPortNum(c.WebhookPort); len(problems) > 0 {
		complain("webhook-port", fmt.Sprintf("%d is no port: %s", c.WebhookPort, strings.Join(problems, "; ")))
	}
	return errors.Join(errs...)
}

// SharedMemory is DaemonMemory as a quantity; nil where it is empty.
func (c *Controller) SharedMemory() (*resource.Quantity, error) {
	if c.DaemonMemory == "" {
		return nil, nil
	}
	quantity, err := resource.ParseQuantity(c.DaemonMemory)
	return &quantity, err
}
