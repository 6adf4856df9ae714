// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// picture is what the oracle sees of the whole cluster.
func (s *story) picture() oracle.Picture {
	s.Helper()
	picture, err := oracle.Observe(s.Ctx, theCluster)
	if err != nil {
		s.Fatalf("observe: %v", err)
	}
	return picture
}

// devices are what the containers of a pod see, with UUID and NUMA node by the node's files.
func (s *story) devices(pod string) []oracle.Device {
	s.Helper()
	return s.picture().PodDevices(s.Namespace, pod)
}

// TestSharedClaim: two containers, then two pods, share the GPU of one claim, which is one holder.
func TestSharedClaim(t *testing.T) {
	s := begin(t)
	s.Example("shared-claim.yaml")
	s.Example("shared-claim-pods.yaml")
	s.Running(soon, 3, 0)
	first, second := s.GPUs("shared-claim", "first"), s.GPUs("shared-claim", "second")
	if len(first) != 1 || !slices.Equal(first, second) {
		t.Errorf("the containers see GPUs %v and %v, not the same one", first, second)
	}
	a, b := s.GPUs("shared-claim-a", ""), s.GPUs("shared-claim-b", "")
	if len(a) != 1 || !slices.Equal(a, b) || slices.Equal(a, first) {
		t.Errorf("the pods see GPUs %v and %v, not the same one, which is not %v", a, b, first)
	}
	s.WantHolds(2, 0)
	s.NoDoubleOwners()
	// The first to go takes nothing from the other, and the claim stays when both are gone.
	s.remove("shared-claim-a", "shared-claim")
	s.Await(soon, "the claim of the containers to be free", func() error { return s.OfferedToPods(gpusANode - 1) })
	if now := s.GPUs("shared-claim-b", ""); !slices.Equal(now, b) {
		t.Errorf("the remaining pod saw GPUs %v, now %v", b, now)
	}
	s.WantHolds(1, 0)
}

// TestChosenByWhatTheyAre: CEL by attribute, by UUID, a pair on one NVLink domain, the first alternative that there is.
func TestChosenByWhatTheyAre(t *testing.T) {
	s := begin(t)
	for i, name := range []string{"by-uuid", "by-attribute", "nvlink-pair", "first-available"} {
		s.Example(name + ".yaml")
		s.Running(soon, i+1, 0)
	}
	text := s.Kubectl("get", "-n", s.Namespace, "resourceclaim", "by-uuid", "-o", "jsonpath={.spec.devices.requests[0].exactly.selectors[0].cel.expression}")
	if got := s.devices("by-uuid"); len(got) != 1 || !strings.Contains(text, got[0].GPU.UUID) {
		t.Errorf("by-uuid sees %v, asked for %s", got, text)
	}
	if got := s.GPUs("by-attribute", ""); len(got) != 1 {
		t.Errorf("by-attribute sees GPUs %v", got)
	}
	pair := s.devices("nvlink-pair")
	if len(pair) != 2 {
		t.Fatalf("nvlink-pair sees %v", pair)
	}
	domains := s.attribute("gpu.nvidia.com/nvlinkDomain")
	if a, b := domains[pair[0].GPU.UUID], domains[pair[1].GPU.UUID]; a == "" || a != b {
		t.Errorf("the pair's NVLink domains are %q and %q", a, b)
	}
	// No H100 has 120 GiB, so the second alternative is the best.
	if got := s.GPUs("first-available", ""); len(got) != 2 {
		t.Errorf("first-available sees GPUs %v, not a pair", got)
	}
	s.WantHolds(6, 0)
	s.NoDoubleOwners()
}

// attribute answers the value of an attribute of each device of the node, by UUID. Names of ours need no domain.
func (s *story) attribute(name string) map[string]string {
	s.Helper()
	list, err := s.Slices(gpuNode)
	if err != nil {
		s.Fatal(err)
	}
	values := map[string]string{}
	for _, slice := range list {
		for _, d := range slice.Spec.Devices {
			for key, value := range d.Attributes {
				if key := string(key); key != name && slice.Spec.Driver+"/"+key != name || d.Attributes["uuid"].StringValue == nil {
					continue
				}
				switch {
				case value.StringValue != nil:
					values[*d.Attributes["uuid"].StringValue] = *value.StringValue
				case value.IntValue != nil:
					values[*d.Attributes["uuid"].StringValue] = fmt.Sprint(*value.IntValue)
				}
			}
		}
	}
	return values
}

// TestDeployments of both APIs ask for sixteen GPUs. Eight pods run. API objects suffice to say why each of the others waits: all run as soon
// as the other API gives its GPUs up.
func TestDeployments(t *testing.T) {
	s := begin(t)
	s.Example("deployment-claims.yaml")
	s.Running(soon, 3, 0)
	s.Await(soon, "the GPUs to leave the limits", func() error { return s.OfferedToPods(gpusANode - 3) })
	s.Example("deployment-limits.yaml")
	s.Running(soon, 6, 0)
	s.WantHolds(3, 3)
	s.NoDoubleOwners()

	s.Example("more-than-gpus.yaml")
	s.Running(patient, gpusANode, gpusANode)
	s.NoDoubleOwners()
	// A waiting pod may still be replaced: the controller evicts pods of claims that conflict with pods.
	s.Await(soon, "a reason why each pod waits", func() error {
		for _, pod := range s.Pods() {
			if pod.Status.Phase != corev1.PodPending {
				continue
			}
			if err := s.checkReason(&pod, `^all 8 GPUs of `+gpuNode+` are held: [0-9] by pods, [0-9] by claims$`); err != nil {
				return err
			}
		}
		return nil
	})
	s.Kubectl("delete", "deployment", "-n", s.Namespace, "by-limits", "more-limits")
	s.Await(soon, "the GPUs of limits to be free", func() error {
		if _, limits := s.HoldsByKind(); limits > 0 {
			return fmt.Errorf("holds: %v", s.Holds(node()))
		}
		return nil
	})
	s.retry("--all")
	s.Running(patient, gpusANode, 0)
	s.WantHolds(gpusANode, 0)
	s.NoDoubleOwners()
}

// TestAdminAccess: a monitor sees all GPUs while other pods hold some. It takes none, and its end affects no other pod.
func TestAdminAccess(t *testing.T) {
	const namespace = "gpu-monitoring"
	s := begin(t)
	before := s.Occupy()
	s.Kubectl("apply", "-f", filepath.Join("..", "..", "examples", "admin-access.yaml"))
	t.Cleanup(func() {
		// A story that failed before it deleted the monitor leaves it to this.
		if out, err := theCluster.Kubectl(s.Ctx, "delete", "namespace", namespace, "--ignore-not-found"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	s.Await(soon, "the monitor to run", func() error {
		pod, err := theClient.CoreV1().Pods(namespace).Get(s.Ctx, "admin-access", metav1.GetOptions{})
		if err == nil && pod.Status.Phase != corev1.PodRunning {
			err = fmt.Errorf("it is %s: %v", pod.Status.Phase, pod.Status.Conditions)
		}
		return err
	})
	// API servers before 1.36 drop taints: devices of pods are not published there, so no claim can be allocated them.
	published := len(s.attribute("gpu.nvidia.com/uuid"))
	if seen := s.picture().PodDevices(namespace, "admin-access"); len(seen) != published || published < gpusANode-2 {
		t.Errorf("the monitor sees %d GPUs of %d: %v", len(seen), published, seen)
	}
	s.WantHolds(2, 2)
	s.NoDoubleOwners()
	s.Kubectl("delete", "namespace", namespace)
	s.Await(soon, "the monitor's claim to be gone", func() error {
		claims, err := theClient.ResourceV1().ResourceClaims(namespace).List(s.Ctx, metav1.ListOptions{})
		if err == nil && len(claims.Items) > 0 {
			err = fmt.Errorf("%d claims", len(claims.Items))
		}
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
	s.WantHolds(2, 2)
	if now := s.Seen(); !maps.EqualFunc(before, now, slices.Equal) {
		t.Errorf("the pods saw GPUs %v, after the monitor %v", before, now)
	}
	s.Undisturbed(before)
}

// TestQuickStart: the manifest of the quick start gives each of its pods a GPU, as the simplest ones of examples/ do. Its image and command are
// those of examples/.
func TestQuickStart(t *testing.T) {
	page, err := os.ReadFile("../../docs/user/quick-start.md")
	if err != nil {
		t.Fatal(err)
	}
	_, manifest, _ := strings.Cut(string(page), "kubectl apply -f - <<END\n")
	manifest, _, found := strings.Cut(manifest, "\nEND\n")
	if !found {
		t.Fatal("docs/user/quick-start.md has no manifest")
	}
	manifest = strings.NewReplacer("docker.io/library/debian:12", "docker.io/library/busybox:1.37",
		"[nvidia-smi, -L]", `[sh, -c, "trap exit TERM; sleep 300 & wait"]`).Replace(manifest)
	s := begin(t)
	s.Example("claim-template.yaml")
	s.Running(soon, 1, 0)
	if gpus := s.GPUs("claim-template", ""); !slices.Equal(gpus, []int{0}) {
		t.Errorf("the container sees GPUs %v; the first claim gets the first GPU", gpus)
	}
	s.Await(soon, "the GPU to leave the limits", func() error { return s.OfferedToPods(gpusANode - 1) })
	s.Example("limits.yaml")
	s.Example("hostport-bandwidth.yaml")
	if err := s.Apply(manifest); err != nil {
		t.Fatal(err)
	}
	s.Running(soon, 5, 0)
	seen := s.Seen()
	claim, limit := seen["by-claim"], seen["by-limit"]
	if len(claim) != 1 || len(limit) != 1 || claim[0] == limit[0] {
		t.Errorf("the pods see GPUs %v and %v", claim, limit)
	}
	if two, one := seen["limits"], seen["hostport-bandwidth"]; len(two) != 2 || len(one) != 1 {
		t.Errorf("the pods with limits see GPUs %v and %v, not two and one", two, one)
	}
	s.Await(soon, "the GPUs of limits to leave the slices", func() error { return s.OfferedToClaims(gpusANode - 4) })
	s.NoDoubleOwners()
}
