// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
)

// Installed upgrades Tandem to a file of examples/, which the other values override. The usual values return when the story ends.
func (s *Story) Installed(file string, values ...string) {
	s.Helper()
	s.InstalledFrom(filepath.Join("..", "..", "examples", file), values...)
}

// InstalledFrom is Installed with a file from anywhere.
func (s *Story) InstalledFrom(file string, values ...string) {
	s.Helper()
	s.Undo(func() error {
		return s.Install(context.WithoutCancel(s.Ctx), install.Options{})
	})
	// Not every mode offers what the installation waits for.
	if err := s.Install(s.Ctx, install.Options{Detached: true, ValuesFiles: []string{file}, Values: values}); err != nil {
		s.Fatal(err)
	}
	s.RolledOut()
}

// Values upgrades Tandem to these values until the story ends.
func (s *Story) Values(values ...string) {
	s.Helper()
	if err := s.Install(s.Ctx, install.Options{Values: values}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := s.Install(s.Ctx, install.Options{}); err != nil {
			s.Error(err)
		}
	})
}

// WithoutControllers ends the controllers, and returns a function that starts as many again.
func (s *Story) WithoutControllers() (start func()) {
	s.Helper()
	deployment := "deployment/" + install.Release + "-controller"
	scale := func(replicas string) error {
		_, err := s.Cluster.Kubectl(s.Ctx, "scale", "-n", install.Namespace, deployment, "--replicas="+replicas)
		return err
	}
	replicas := s.Kubectl("get", "-n", install.Namespace, deployment, "-o", "jsonpath={.spec.replicas}")
	start = s.Undo(func() error { return errors.Join(scale(replicas), install.Ready(s.Ctx, s.Cluster)) })
	if err := scale("0"); err != nil {
		s.Fatal(err)
	}
	return start
}

// Label sets a label of the node until the story ends.
func (s *Story) Label(key, value string) {
	s.Helper()
	s.Undo(func() error {
		_, err := s.Cluster.Kubectl(context.WithoutCancel(s.Ctx), "label", "node", GPUNode, key+"-")
		return err
	})
	s.Kubectl("label", "node", GPUNode, "--overwrite", key+"="+value)
}

// Labelled gives the node a mode by its label. UnlabelAtEnd takes the label away.
func (s *Story) Labelled(mode string) {
	s.Helper()
	s.Kubectl("label", "node", GPUNode, "--overwrite", ModeLabel+"="+mode)
}

// UnlabelAtEnd removes the label when the story ends. Call it after Installed: the label is removed first, and the usual installation waits
// for both APIs.
func (s *Story) UnlabelAtEnd() {
	s.Undo(func() error {
		_, err := s.Cluster.Kubectl(context.WithoutCancel(s.Ctx), "label", "node", GPUNode, ModeLabel+"-")
		return err
	})
}

// HasLabels waits until the node has these labels, and does not have those whose value is empty.
func (s *Story) HasLabels(want map[string]string) {
	s.Helper()
	s.Await(Patient, "labels of the node", func() error {
		node, err := s.Client.CoreV1().Nodes().Get(s.Ctx, GPUNode, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var errs []error
		for key, value := range want {
			if got := node.Labels[nodelabels.Prefix+key]; got != value {
				errs = append(errs, fmt.Errorf("%s is %q, want %q", key, got, value))
			}
		}
		return errors.Join(errs...)
	})
}

// OwnedLabels are the labels of all nodes that Tandem owns.
func (s *Story) OwnedLabels() (owned []string) {
	s.Helper()
	nodes, err := s.Client.CoreV1().Nodes().List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	for _, node := range nodes.Items {
		for _, entry := range node.ManagedFields {
			if entry.Manager == nodelabels.Manager {
				owned = append(owned, node.Name+": "+entry.FieldsV1.GetRawString())
			}
		}
	}
	return owned
}
