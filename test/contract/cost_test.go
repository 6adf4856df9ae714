// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	auditapi "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// ourWrites makes kube-apiserver log the requests of our components that change something.
const ourWrites = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Request
  userGroups: ["system:serviceaccounts:` + install.Namespace + `"]
  verbs: [create, update, patch, delete, deletecollection]
- level: None
`

// spending is how many requests of a kind were made, and how many bytes their bodies had.
type spending struct{ requests, bytes int }

// bill has them by who asked for what: "agent gpunodes/status".
type bill map[string]spending

// writesSince reads what kube-apiserver has written down of our requests from a place in its file, and answers the next place.
// Leases are left out: they cost the same whatever happens.
func (s *story) writesSince(from int64) (b bill, next int64) {
	s.Helper()
	b = bill{}
	next = s.audited(from, func(event auditapi.Event) {
		if event.ObjectRef.Resource == "leases" {
			return
		}
		if event.ObjectRef.Resource == "gpunodes" && event.ObjectRef.Subresource == "status" && event.Verb == "patch" {
			return // that an agent is there: once a minute, whatever pods do
		}
		key := s.who(event.User.Username) + " " + event.Verb + " " + event.ObjectRef.Resource
		if event.ObjectRef.Subresource != "" {
			key += "/" + event.ObjectRef.Subresource
		}
		b[key] = spending{b[key].requests + 1, b[key].bytes + s.bodyOf(event)}
	})
	return b, next
}

// audited calls each with the answered requests that kube-apiserver has written down from a place in its file, and answers the next place.
func (s *story) audited(from int64, each func(auditapi.Event)) (next int64) {
	s.Helper()
	file, err := os.Open(theCluster.AuditLog())
	if err != nil {
		s.Fatal(err)
	}
	defer file.Close()
	if _, err := file.Seek(from, io.SeekStart); err != nil {
		s.Fatal(err)
	}
	for lines := bufio.NewReader(file); ; {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return from
		}
		if err != nil {
			s.Fatal(err)
		}
		from += int64(len(line))
		var event auditapi.Event
		if err := json.Unmarshal(line, &event); err != nil {
			s.Fatalf("audit log: %v: %s", err, line)
		}
		if event.Stage == auditapi.StageResponseComplete && event.ObjectRef != nil {
			each(event)
		}
	}
}

func (s *story) who(user string) string {
	name := strings.TrimPrefix(user, "system:serviceaccount:"+install.Namespace+":")
	if name == "tandem" {
		return "agent"
	}
	return strings.TrimPrefix(name, "tandem-")
}

// bodyOf is how many bytes the body of a request had: JSON, but for slices, which the agent sends as protobuf.
func (s *story) bodyOf(event auditapi.Event) int {
	s.Helper()
	if event.RequestObject == nil {
		return 0
	}
	if event.ObjectRef.Resource == "resourceslices" && event.Verb != "delete" {
		var slice resourceapi.ResourceSlice
		if err := json.Unmarshal(event.RequestObject.Raw, &slice); err != nil {
			s.Fatalf("audit log: %v", err)
		}
		return slice.Size()
	}
	return len(event.RequestObject.Raw)
}

// billed waits until nothing of ours has been written for a while, and answers the place in the log.
func (s *story) billed(from int64) (b bill, next int64) {
	s.Helper()
	began := from
	s.Await(patient, "nothing to be written", func() error {
		_, from = s.writesSince(from)
		time.Sleep(2 * time.Second)
		if more, _ := s.writesSince(from); len(more) > 0 {
			return fmt.Errorf("%v", more)
		}
		return nil
	})
	return s.writesSince(began)
}

func (b bill) sum() (all spending) {
	for _, one := range b {
		all.requests, all.bytes = all.requests+one.requests, all.bytes+one.bytes
	}
	return all
}

// each is the bill shared by so many pods.
func (b bill) each(pods int) string {
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(b)) {
		one := b[what]
		parts = append(parts, fmt.Sprintf("%s=%.2f (%d bytes each)", what, float64(one.requests)/float64(pods), one.bytes/one.requests))
	}
	return strings.Join(parts, ", ")
}

// Bounds of what a pod may cost in writes, one by one and eight at once: about twice what was measured.
const (
	writesAlone    = 12.0
	writesTogether = 6.0
)

// TestWritesAPod counts what we write to the API server for each pod from its creation to its end, for both kinds.
func TestWritesAPod(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	_, place := s.billed(0)
	for _, c := range []struct {
		kind  string
		bound float64
		// play starts and ends so many pods.
		play func() (pods int)
	}{
		{"claim pod alone", writesAlone, func() int { return s.oneByOne("claim") }},
		{"limits pod alone", writesAlone, func() int { return s.oneByOne("limit") }},
		{"claim pod among eight", writesTogether, func() int { return s.eightAtOnce(manifests.ClaimDeployment("many", "single", gpusANode)) }},
		{"limits pod among eight", writesTogether, func() int { return s.eightAtOnce(manifests.Deployment("many", gpusANode)) }},
	} {
		pods := c.play()
		var b bill
		b, place = s.billed(place)
		a := float64(b.sum().requests) / float64(pods)
		t.Logf("cost of a %s: pods=%d writes=%.2f bytes=%d: %s", c.kind, pods, a, b.sum().bytes/pods, b.each(pods))
		if a > c.bound {
			t.Errorf("a %s costs %.2f writes, more than %.0f", c.kind, a, c.bound)
		}
		if a < 1 {
			t.Errorf("a %s costs %.2f writes, which no node could live on", c.kind, a)
		}
	}
}

func (s *story) oneByOne(kind string) (pods int) {
	s.Helper()
	for ; pods < 3; pods++ {
		name := fmt.Sprintf("%s-%d", kind, pods)
		s.Manifest(manifests.Pod(kind, name))
		s.Running(soon, 1, 0)
		s.Kubectl("delete", "pod", "-n", s.Namespace, name)
		s.NoPods()
	}
	return pods
}

func (s *story) eightAtOnce(deployment string) (pods int) {
	s.Helper()
	for ; pods < gpusANode; pods += gpusANode {
		s.Manifest(deployment)
		s.Running(patient, gpusANode, 0)
		s.Kubectl("delete", "deployment", "-n", s.Namespace, "many")
		s.NoPods()
		s.AllFree()
	}
	return pods
}
