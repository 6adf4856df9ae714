// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestUnserved: whatever keeps a node from giving GPUs to new pods, each view says so and since when, and none says that the node has a free
// GPU or room.
func TestUnserved(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Second)
	ago := func(d time.Duration) *metav1.Time { return &metav1.Time{Time: now.Add(-d)} }
	at := func(d time.Duration) string { return now.Add(-d).Format(time.RFC3339) }
	for name, c := range map[string]struct {
		change func(*machine)
		want   string
	}{
		"the agent is gone": {func(m *machine) { m.seen = ago(20 * time.Minute) },
			"its agent has been silent since " + at(20*time.Minute) + ": its GPUNode is of that time, and new pods may get no GPU"},
		"no driver, and gone": {func(m *machine) { m.waiting, m.seen, m.since = "no NVIDIA driver", ago(time.Hour), ago(2*time.Hour) },
			"since " + at(2*time.Hour) + ": no NVIDIA driver; the agent is silent since " + at(time.Hour)},
		"the agent has stopped": {func(m *machine) {
			m.waiting, m.seen, m.since = "the agent has stopped", ago(time.Second), ago(time.Second)
		},
			"since " + at(time.Second) + ": the agent has stopped"},
		"another plugin": {func(m *machine) {
			m.waiting, m.seen, m.since = "another plugin serves nvidia.com/gpu", ago(0), ago(time.Minute)
		},
			"since " + at(time.Minute) + ": another plugin serves nvidia.com/gpu"},
		"it stopped long ago": {func(m *machine) { m.waiting, m.seen, m.since = "the agent has stopped", ago(time.Hour), ago(time.Hour) },
			"since " + at(time.Hour) + ": the agent has stopped"},
	} {
		t.Run(name, func(t *testing.T) {
			m := h100s("node-1", 2).pod("ml", "infer", 1)
			c.change(m)
			w := world{machines: []*machine{m}, namespaces: []string{""}, objects: append(installed(),
				pending("late", byLimits(testResource, 1)), pending("claims", byTemplate("single", "late-gpu")), claim("late-gpu", spec("gpu.nvidia.com")))}
			screens := map[string]string{}
			for _, command := range []string{"ls", "ls -o json", "ls node-1", "node node-1", "top", "why late", "why claims", "doctor"} {
				screens[command] = w.run(t, strings.Fields(command)...)
			}
			p, _, _ := w.plugin(t)
			address := w.serve(t, p)
			screens["the page"] = awaitPage(t, address, "node-1", "ml/late", c.want)
			_, screens["the page of the node"], _ = get(address + "node?name=node-1")
			_, screens["the page of the pod"], _ = get(address + "why?namespace=ml&pod=late")
			for view, got := range screens {
				got = strings.ReplaceAll(got, `<li data-state="Free">○ Free</li>`, "")
				if got = strings.Join(strings.Fields(got), " "); !strings.Contains(got, c.want) {
					t.Errorf("%s lacks %q:\n%s", view, c.want, got)
				}
				for _, wrong := range []string{"Free", "1 free", "has room", "has free GPUs", "no problem"} {
					if strings.Contains(got, wrong) {
						t.Errorf("%s says %q:\n%s", view, wrong, got)
					}
				}
			}
			if got := screens["ls"]; !strings.Contains(got, "1 by pods, 1 unserved") {
				t.Errorf("the GPU without a holder is not counted:\n%s", got)
			}
		})
	}
	m := h100s("node-1", 2)
	m.seen = ago(time.Minute)
	if got := (world{machines: []*machine{m}}).run(t, "ls"); !strings.Contains(got, "2 free") || strings.Contains(got, "no GPU for new pods") {
		t.Errorf("with an agent that wrote a minute ago:\n%s", got)
	}
}
