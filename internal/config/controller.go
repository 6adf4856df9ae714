// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io"
	"strings"

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

	HTTPEndpoint string
	Verbosity    int
}

// ControllerDefaults are the settings of a controller about which nothing was said. They agree with those of the node agents.
func ControllerDefaults() Controller {
	agent := Defaults()
	return Controller{
		DriverName: agent.DriverName, ResourceName: agent.ResourceName, LeaseName: "tandem-controller", HTTPEndpoint: agent.HTTPEndpoint,
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
	return errors.Join(errs...)
}
