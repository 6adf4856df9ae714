// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// auditPolicy records every write, without its body.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
`

// writes counts requests of Tandem by program, verb and resource.
type writes map[string]int

func (w writes) total() (n int) {
	for _, count := range w {
		n += count
	}
	return n
}

// readWrites reads in an audit log what agents and controller wrote between two moments. The Lease of the leader does not count, nor what
// only asks (dry runs).
func readWrites(path string, from, to time.Time) (writes, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read audit log: %w", err)
	}
	defer file.Close()
	found := writes{}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event auditv1.Event
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			continue // the last line may be incomplete
		}
		at := event.RequestReceivedTimestamp.Time
		if at.Before(from) || at.After(to) || event.ImpersonatedUser == nil || event.ObjectRef == nil {
			continue
		}
		program := map[string]string{agentAccount: "agent", controllerAccount: "controller"}[event.ImpersonatedUser.Username]
		if program == "" || event.ObjectRef.Resource == "leases" || strings.Contains(event.RequestURI, "dryRun=All") {
			continue
		}
		resource := event.ObjectRef.Resource
		if event.ObjectRef.Subresource != "" {
			resource += "/" + event.ObjectRef.Subresource
		}
		found[fmt.Sprintf("%s %s %s", program, event.Verb, resource)]++
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read audit log: %w", err)
	}
	return found, nil
}
