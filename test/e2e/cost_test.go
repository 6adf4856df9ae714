// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/hack/install"
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
