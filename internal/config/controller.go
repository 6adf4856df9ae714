// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"flag"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tandem-gpu/tandem/internal/driverroot"
)

// Controller is the configuration of the controller.
type Controller struct {
	Kubeconfig   string
	DriverName   string
	ResourceName string
	// Namespace and LeaseName name the Lease of the leader. PodName is the identity of this process.
	Namespace string
	LeaseName string
	PodName   string
	// DaemonPod is the template of the pods of MPS daemons (corev1.PodTemplateSpec as JSON); empty for no daemons. DaemonMemory limits
	// the memory that a daemon shares with its clients; empty for half of the node's.
	DaemonPod    string
	DaemonMemory string
	// DriverRoots are the host paths whose programs an MPS daemon may run: wherever the nodes have a driver.
	DriverRoots []string
	// RunDir and KubeletDir are those of the node agents.
	RunDir     string
	KubeletDir string
	// WebhookName is that of the Service, the Secret and the ValidatingWebhookConfiguration of the webhook; empty for none.
	WebhookName string
	WebhookPort int

	HTTPEndpoint string
	Verbosity    int
}

// ControllerDefaults returns the settings of a controller without any configuration. They match those of the node agents.
func ControllerDefaults() Controller {
	agent := Defaults()
	return Controller{
		DriverName: agent.DriverName, ResourceName: agent.ResourceName, LeaseName: "tandem-controller", HTTPEndpoint: agent.HTTPEndpoint,
		RunDir: agent.RunDir, KubeletDir: agent.KubeletDir,
		DriverRoots: slices.Clone(driverroot.Known),
		WebhookPort: 9443,
	}
}

func (c *Controller) define(flags *flag.FlagSet) {
	text := func(target *string, name, usage string) { flags.StringVar(target, name, *target, usage) }
	text(&c.Kubeconfig, "kubeconfig", "kubeconfig `file`; empty inside a cluster")
	text(&c.DriverName, "driver-name", "DRA driver `name` of the node agents")
	text(&c.ResourceName, "resource-name", "extended resource `name` of whole GPUs")
	text(&c.Namespace, "namespace", "`namespace` of the Lease of the leader")
	text(&c.LeaseName, "lease-name", "`name` of that Lease")
	text(&c.PodName, "pod-name",
		"`name` of this process in the Lease: use the pod's, so that a restarted container becomes leader at once")
	text(&c.DaemonPod, "mps-pod",
		"template of the pods of MPS daemons, as `JSON`; empty for no daemons")
	text(&c.DaemonMemory, "mps-shared-memory", "limit of the `memory` that an MPS daemon shares with its clients; empty for half of the node's")
	flags.Func("driver-roots", "comma-separated `directories` on the nodes that may have a driver: MPS daemons run programs only from these",
		func(list string) error { c.DriverRoots = split(list); return nil })
	text(&c.RunDir, "run-dir", "run `directory` of the node agents, on the nodes")
	text(&c.KubeletDir, "kubelet-dir", "kubelet's `directory` on the nodes")
	text(&c.WebhookName, "webhook-name",
		"`name` of the Service, the Secret and the ValidatingWebhookConfiguration of the webhook that validates "+
			"claim parameters; empty for none")
	flags.IntVar(&c.WebhookPort, "webhook-port", c.WebhookPort, "`port` of that webhook")
	text(&c.HTTPEndpoint, "http-endpoint", "`address` of /healthz, /readyz and /metrics; empty for none")
	flags.IntVar(&c.Verbosity, "v", c.Verbosity, "log verbosity `level`")
}

// LoadController is Load for the controller.
func LoadController(args []string, lookupEnv func(string) (string, bool), stderr io.Writer) (Controller, error) {
	c := ControllerDefaults()
	if err := apply("controller", c.define, args, lookupEnv, stderr); err != nil {
		return Controller{}, err
	}
	if err := c.validate(); err != nil {
		return Controller{}, err
	}
	return c, nil
}

func (c *Controller) validate() error {
	var p problems
	p.driverName(c.DriverName)
	p.resourceName(c.ResourceName)
	const set = " (the chart sets it)"
	p.name("--namespace", "namespace"+set, c.Namespace, validation.IsDNS1123Label(c.Namespace))
	p.name("--lease-name", "lease name"+set, c.LeaseName, validation.IsDNS1123Subdomain(c.LeaseName))
	p.name("--pod-name", "pod name"+set, c.PodName, validation.IsDNS1123Subdomain(c.PodName))
	p.cleanPath("--run-dir", c.RunDir)
	p.cleanPath("--kubelet-dir", c.KubeletDir)
	for _, root := range c.DriverRoots {
		p.cleanPath("--driver-roots", root)
	}
	if _, err := c.SharedMemory(); err != nil {
		p.add("--mps-shared-memory", "%q is no quantity: %v", c.DaemonMemory, err)
	}
	if c.WebhookName != "" {
		p.name("--webhook-name", "name of a Service", c.WebhookName, validation.IsDNS1035Label(c.WebhookName))
		if wrong := validation.IsValidPortNum(c.WebhookPort); len(wrong) > 0 {
			p.add("--webhook-port", "%d is no port: %s", c.WebhookPort, strings.Join(wrong, "; "))
		}
	}
	return errors.Join(p...)
}

func (p *problems) cleanPath(at, path string) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		p.add(at, "%q is not a clean absolute path", path)
	}
}

// SharedMemory returns DaemonMemory as a quantity; nil if it is empty.
func (c *Controller) SharedMemory() (*resource.Quantity, error) {
	if c.DaemonMemory == "" {
		return nil, nil
	}
	quantity, err := resource.ParseQuantity(c.DaemonMemory)
	return &quantity, err
}
