// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/oracle"
)

func TestStepsKeepOneClock(t *testing.T) {
	var out bytes.Buffer
	s := newSteps(&out, 2)
	s.next("cluster %s", "v1")
	if _, err := s.Write([]byte("   4.2s  waiting for nodes\n   0.1s     1.5s  nested 2.0s  inside\nplain\n")); err != nil {
		t.Fatal(err)
	}
	s.next("last")
	got := regexp.MustCompile(`(?m)^ *[0-9.]+s`).ReplaceAllString(out.String(), "T")
	want := "T [1/2] cluster v1\nT       waiting for nodes\nT       nested 2.0s  inside\nT       plain\nT [2/2] last\n"
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

func TestRecording(t *testing.T) {
	r := newRecording("/home/me/tandem", "/home/me/.cache/tandem")
	r.start = time.Now().Add(-1500 * time.Millisecond)
	fmt.Fprintf(r, "   1.5s       written to /home/me/tandem/bin/image.tar\n\na <b> %s\nin /home/me/.cache/tandem/clusters   \n", strings.Repeat("x", columns))
	cast, err := r.cast()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(cast)), "\n")
	var header struct{ Version, Width, Height int }
	if err := json.Unmarshal([]byte(lines[0]), &header); err != nil || header.Version != 2 || header.Width != columns || header.Height != 5 {
		t.Errorf("header %s: %+v, %v", lines[0], header, err)
	}
	var got []string
	for _, line := range lines[1:] {
		var event []any
		if err := json.Unmarshal([]byte(line), &event); err != nil || len(event) != 3 || event[1] != "o" {
			t.Fatalf("event %s: %v", line, err)
		}
		if at, is := event[0].(float64); !is || at < 1.5 || at > 60 {
			t.Errorf("event %s is at another time", line)
		}
		got = append(got, event[2].(string))
	}
	want := []string{"   1.5s       written to bin/image.tar\r\n", "\r\n", "a <b> " + strings.Repeat("x", columns-7) + "…\r\n", "in ~/.cache/tandem/clusters\r\n"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	svg, err := r.svg()
	if err != nil {
		t.Fatal(err)
	}
	var picture struct {
		Text []struct {
			Text  string `xml:",chardata"`
			Style string `xml:"style,attr"`
		} `xml:"text"`
	}
	if err := xml.Unmarshal(svg, &picture); err != nil {
		t.Fatal(err)
	}
	if len(picture.Text) != 3 || picture.Text[1].Text+"\r\n" != want[2] || picture.Text[0].Style != "animation-delay:1.0s" {
		t.Errorf("the picture has %+v", picture.Text)
	}
	if static, _, animated := strings.Cut(string(svg), "@keyframes"); !animated || strings.Contains(static, "opacity") {
		t.Errorf("text is invisible without animation: %s", static)
	}
}

func TestLockIsForOne(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "clusters", "demo")
	unlock, err := lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock(dir); !errors.Is(err, errBusy) {
		t.Errorf("second lock: %v", err)
	}
	unlock()
	unlock, err = lock(dir)
	if err != nil {
		t.Fatalf("lock again: %v", err)
	}
	unlock()
	if left, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func pod(name string, phase corev1.PodPhase, change func(*corev1.Pod)) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Status: corev1.PodStatus{Phase: phase}}
	if change != nil {
		change(&p)
	}
	return p
}

func noRoom(p *corev1.Pod) {
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
}

func TestState(t *testing.T) {
	for want, p := range map[string]corev1.Pod{
		"Running":                 pod("a", corev1.PodRunning, nil),
		"Pending: no GPU is free": pod("a", corev1.PodPending, noRoom),
		"Failed: UnexpectedAdmissionError refused": pod("a", corev1.PodFailed, func(p *corev1.Pod) {
			p.Status.Reason, p.Status.Message = "UnexpectedAdmissionError", "refused"
		}),
		"Pending: ContainerCreating": pod("a", corev1.PodPending, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}}}
		}),
		"Running, being deleted": pod("a", corev1.PodRunning, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }),
	} {
		if got := state(p); got != want {
			t.Errorf("state %q, want %q", got, want)
		}
	}
}

// picture is what check accepts.
func picture() oracle.Picture {
	var seen oracle.Picture
	next := 0
	for _, want := range expected {
		container := oracle.Container{Node: "node-1", Namespace: namespace, Pod: want.pod, Name: "main", PodUID: want.pod}
		for range want.gpus {
			uuid := want.uuid
			if uuid == "" {
				uuid = "GPU-" + want.pod
			}
			container.Devices = append(container.Devices, oracle.Device{Number: oracle.Number{Major: 195, Minor: uint32(next)}, API: want.api,
				Holder: "pod/" + want.pod, GPU: oracle.GPU{UUID: uuid, Index: next, Minor: next, NUMANode: next / 4}})
			next++
		}
		seen.Containers = append(seen.Containers, container)
	}
	return seen
}

func TestCheck(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*oracle.Picture)
		want   string
	}{
		"right":       {func(*oracle.Picture) {}, ""},
		"too few":     {func(p *oracle.Picture) { p.Containers[0].Devices = p.Containers[0].Devices[:1] }, "pod limits sees 1 GPUs, not 2"},
		"other API":   {func(p *oracle.Picture) { p.Containers[1].Devices[0].API = oracle.Limits }, "by limits, not by claim"},
		"unexplained": {func(p *oracle.Picture) { p.Containers[1].Devices[0].API = oracle.Unexplained }, "did not ask for"},
		"other GPU":   {func(p *oracle.Picture) { p.Containers[5].Devices[0].GPU.UUID = "GPU-x" }, "pod by-uuid has GPU-x, not"},
		"not there":   {func(p *oracle.Picture) { p.Containers = p.Containers[1:] }, "pod limits sees 0 GPUs"},
	} {
		t.Run(name, func(t *testing.T) {
			seen := picture()
			test.change(&seen)
			err := check(seen)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("check: %v, want %q", err, test.want)
			}
		})
	}
}

func TestTable(t *testing.T) {
	pods := []corev1.Pod{pod("limits", corev1.PodRunning, nil), pod("waiting", corev1.PodPending, func(p *corev1.Pod) {
		noRoom(p)
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}}
	})}
	seen := picture()
	seen.Containers = seen.Containers[:1]
	seen.Containers[0].Devices[1].GPU.NUMANode = -1
	lines := strings.Split(strings.TrimSpace(table(pods, seen)), "\n")
	var got [][]string
	for _, line := range lines {
		got = append(got, strings.Fields(line))
	}
	want := [][]string{
		strings.Fields("POD CONTAINER API GPU UUID NUMA NODE STATE"),
		strings.Fields("limits main limits 0 GPU-limits 0 Running"),
		strings.Fields("limits main limits 1 GPU-limits - Running"),
		strings.Fields("waiting - claim - - - Pending: no GPU is free"),
	}
	if !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestExamplesFitTheMachine holds the demo, its examples and the simulated machine together.
func TestExamplesFitTheMachine(t *testing.T) {
	profile, err := simulated.Load("h100x8")
	if err != nil {
		t.Fatal(err)
	}
	profile = profile.WithIdentity("node-1")
	total := 0
	for _, want := range expected {
		total += want.gpus
		data, err := os.ReadFile(filepath.Join("..", "..", "..", "examples", want.pod+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(podNames(t, string(data)), want.pod) {
			t.Errorf("%s.yaml has no pod of that name", want.pod)
		}
		if want.uuid != "" && !strings.Contains(string(data), want.uuid) {
			t.Errorf("%s.yaml asks for another GPU than %s", want.pod, want.uuid)
		}
		if want.uuid != "" && want.uuid != profile.GPUs[5].UUID {
			t.Errorf("%s is not the machine's sixth GPU, %s", want.uuid, profile.GPUs[5].UUID)
		}
	}
	if total != len(profile.GPUs) {
		t.Errorf("the examples ask for %d GPUs, the machine has %d", total, len(profile.GPUs))
	}
}

func podNames(t *testing.T, manifests string) (names []string) {
	t.Helper()
	for document := range strings.SplitSeq(manifests, "\n---\n") {
		var object struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			t.Fatal(err)
		}
		if object.Kind == "Pod" {
			names = append(names, object.Metadata.Name)
		}
	}
	return names
}
