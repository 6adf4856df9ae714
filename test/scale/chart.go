// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/install"
)

// chart is what the chart says of the controller.
type chart struct {
	args, env []string
}

// workloads are the kinds that the harness plays or leaves out.
var workloads = []string{"DaemonSet", "Deployment", "Job"}

// install applies the chart, without its workloads, and returns how to run the controller.
func (r *run) install(ctx context.Context) (chart, error) {
	r.say("applying the chart")
	manifest, err := install.Render(ctx, "image.repository=example.com/none", "simulated.profile="+install.DefaultProfile)
	if err != nil {
		return chart{}, err
	}
	var applied bytes.Buffer
	var controller *appsv1.Deployment
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifest)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return chart{}, fmt.Errorf("read manifest of the chart: %w", err)
		}
		var object struct{ Kind string }
		if err := sigsyaml.Unmarshal(document, &object); err != nil {
			return chart{}, fmt.Errorf("decode manifest of the chart: %w", err)
		}
		if object.Kind == "Deployment" {
			controller = &appsv1.Deployment{}
			if err := sigsyaml.Unmarshal(document, controller); err != nil {
				return chart{}, fmt.Errorf("decode Deployment of the chart: %w", err)
			}
		}
		if object.Kind != "" && !slices.Contains(workloads, object.Kind) {
			applied.Write(document)
			applied.WriteString("\n---\n")
		}
	}
	if controller == nil {
		return chart{}, errors.New("read manifest of the chart: it has no Deployment")
	}
	if _, err := r.cluster.Kubectl(ctx, "create", "namespace", install.Namespace); err != nil {
		return chart{}, err
	}
	cmd, err := r.cluster.Command(ctx, "kubectl", "apply", "--server-side", "-f", "-")
	if err != nil {
		return chart{}, err
	}
	cmd.Stdin = &applied
	if out, err := cmd.CombinedOutput(); err != nil {
		return chart{}, fmt.Errorf("apply the chart: %w: %s", err, out)
	}
	if _, err := r.cluster.Kubectl(ctx, "wait", "--for=condition=Established", "--timeout=60s", "crd/gpunodes.tandem-gpu.dev"); err != nil {
		return chart{}, err
	}
	return ofContainer(controller.Spec.Template.Spec.Containers[0]), nil
}

func ofContainer(c corev1.Container) chart {
	described := chart{args: c.Args}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			described.env = append(described.env, e.Name+"="+e.Value)
		}
	}
	return described
}
