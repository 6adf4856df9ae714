// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
)

// TestOnePool: the compared layout has the same devices and counters as ours, in one pool, and no slice exceeds what the API allows.
func TestOnePool(t *testing.T) {
	gpus, err := inventory("n0001", true)
	if err != nil {
		t.Fatal(err)
	}
	published := driver.Template(layoutDriver, "n0001", gpus, func(device.GPU) bool { return true }, false)
	merged := onePool(published)
	if have, want := count(merged), count(published); have != want || want.devices == 0 || want.counters != gpusANode {
		t.Errorf("merged are %+v of %+v", have, want)
	}
	if want := 1 + gpusANode; len(merged) != want {
		t.Errorf("%d slices, not %d", len(merged), want)
	}
	for i, s := range merged {
		if s.Spec.Pool.Name != "n0001" || s.Spec.Pool.ResourceSliceCount != int64(len(merged)) {
			t.Errorf("slice %d is in pool %+v", i, s.Spec.Pool)
		}
		if len(s.Spec.Devices) > resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures || len(s.Spec.SharedCounters) > resourceapi.ResourceSliceMaxCounterSets || len(s.Spec.Devices)*len(s.Spec.SharedCounters) > 0 {
			t.Errorf("slice %d has %d devices and %d counter sets", i, len(s.Spec.Devices), len(s.Spec.SharedCounters))
		}
	}
}

type contents struct{ devices, counters int }

func count(published []resourceapi.ResourceSlice) (c contents) {
	names, sets := map[string]bool{}, map[string]bool{}
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			names[d.Name] = true
		}
		for _, set := range s.Spec.SharedCounters {
			sets[set.Name] = true
		}
	}
	return contents{len(names), len(sets)}
}

// TestWritesInAuditLog: only what Tandem's accounts wrote in the window counts, without Leases and dry runs.
func TestWritesInAuditLog(t *testing.T) {
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	line := func(account, verb, resource, rest string, offset time.Duration) string {
		return `{"kind":"Event","verb":"` + verb + `","requestURI":"/x` + rest + `","impersonatedUser":{"username":"` + account + `"},"objectRef":{"resource":"` + resource +
			`"},"requestReceivedTimestamp":"` + at.Add(offset).Format("2006-01-02T15:04:05.000000Z") + `"}`
	}
	log := strings.Join([]string{
		line(agentAccount, "update", "resourceslices", "", time.Second),
		line(controllerAccount, "patch", "gpunodes", "", time.Second),
		line(controllerAccount, "update", "leases", "", time.Second),
		line(agentAccount, "create", "resourceslices", "?dryRun=All", time.Second),
		line("system:serviceaccount:kube-system:other", "patch", "pods", "", time.Second),
		line(agentAccount, "update", "resourceslices", "", time.Minute),
		line(agentAccount, "update", "resourceslices", "", -time.Second),
		`{"kind":"Ev`,
	}, "\n")
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	found, err := readWrites(path, at, at.Add(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != 2 || found["agent update resourceslices"] != 1 || found["controller patch gpunodes"] != 1 || found.total() != 2 {
		t.Errorf("found %v", found)
	}
}

// TestCurves: each drawing shows its points.
func TestCurves(t *testing.T) {
	c, dir, without := newCurves(), t.TempDir(), t.TempDir()
	if err := c.write(without); err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		at := c.began.Add(time.Duration(i) * time.Second)
		c.sample(at, float64(40+i), i)
		c.latency(at, time.Duration(i)*time.Millisecond)
	}
	if err := c.write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"controller-memory.svg", "running-pods.svg", "claim-to-node.svg"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(string(data), "<path") {
			t.Errorf("%s: %v, %d bytes without a line", name, err, len(data))
		}
		if empty, err := os.ReadFile(filepath.Join(without, name)); err != nil || bytes.Equal(data, empty) {
			t.Errorf("%s is the same without points (%v)", name, err)
		}
	}
}
