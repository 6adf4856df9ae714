// SPDX-License-Identifier: Apache-2.0

// Package manifests has the objects that tests on a cluster create most, as YAML. Each text begins with a separator, so that texts can be
// joined. Containers sleep, and end within a second.
package manifests

import "fmt"

// SingleTemplate is a ResourceClaimTemplate, "single", for one GPU.
const SingleTemplate = `
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: single}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: gpu.nvidia.com}
`

// PartitionTemplate is a ResourceClaimTemplate for one partition of a profile.
func PartitionTemplate(name, profile string) string {
	return fmt.Sprintf(`
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: mig.nvidia.com
          selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "%s"'}}]
`, name, profile)
}

// Pod asks for one GPU: with the API "claim" by SingleTemplate, otherwise by limits.
func Pod(api, name string) string {
	if api == "claim" {
		return ClaimPod(name, "single")
	}
	return fmt.Sprintf(pod, name, limits, "")
}

// ClaimPod has a claim from a template.
func ClaimPod(name, template string) string {
	return fmt.Sprintf(pod, name, claim, "\n  resourceClaims: "+fromTemplate(template))
}

// Deployment has pods that ask for one GPU each, by limits.
func Deployment(name string, replicas int) string {
	return fmt.Sprintf(deployment, name, replicas, limits, "")
}

// ClaimDeployment has pods with a claim each from a template.
func ClaimDeployment(name, template string, replicas int) string {
	return fmt.Sprintf(deployment, name, replicas, claim, "\n      resourceClaims: "+fromTemplate(template))
}

const (
	limits = "limits: {nvidia.com/gpu: 1}"
	claim  = "claims: [{name: gpu}]"
)

func fromTemplate(name string) string {
	return fmt.Sprintf("[{name: gpu, resourceClaimTemplateName: %s}]", name)
}

const pod = `
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {%s}%s
`

const deployment = `
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: work
        image: docker.io/library/busybox:1.37
        imagePullPolicy: Never
        command: [sleep, infinity]
        resources: {%[3]s}%[4]s
`
