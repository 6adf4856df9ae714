// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Clients of a daemon share memory and sockets: only the namespaces of the policy become clients, and who is one stays one.
func TestNamespacesOfClaims(t *testing.T) {
	only := func(namespaces ...string) device.Sharing {
		s := byMPS(4, false)
		s.Namespaces = namespaces
		return s
	}
	w := newTown(t, only("team-a"))
	w.agent()
	w.awaitClient(shareOf(4))
	w.book.set(holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateHeld), holdOf(ledger.KindClaim, "uid-b", shareOf(4), ledger.StateHeld))
	join := func(claim, namespace string) error {
		_, err := w.policy.Join(t.Context(), Claim{claim, namespace, claim}, w.device(), shareOf(4))
		return err
	}
	if err := join("uid-a", "team-a"); err != nil {
		t.Error(err)
	}
	err := join("uid-b", "team-b")
	if err == nil || !strings.Contains(err.Error(), "does not admit clients of namespace team-b") {
		t.Errorf("a client of another namespace: %v", err)
	}
	if err != nil && strings.Contains(err.Error(), "team-a") {
		t.Errorf("it learns who else there is: %v", err)
	}
	w.book.mu.Lock()
	w.book.busy = map[string]bool{"uid-a": true}
	w.book.mu.Unlock()
	w.shared(only("team-c"))
	if err := join("uid-a", "team-a"); err != nil {
		t.Errorf("a client whose pods run: %v", err)
	}
}
