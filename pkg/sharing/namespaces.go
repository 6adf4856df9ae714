// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// admit returns an error for a claim whose namespace may not be a client of the device's daemon. A claim whose pods run stays a client.
// The error reaches the claim's namespace, which must not learn the names of others.
func (p *Policy) admit(claim Claim, ref device.Ref) error {
	now, exists := p.inventory.Inventory().ByRef(ref)
	if !exists || now.Sharing().Admits(claim.Namespace) || p.runs(Key{OwnerOf(claim.UID), ref}) {
		return nil
	}
	return fmt.Errorf("the node's sharing policy does not admit clients of namespace %s: ask for another GPU, "+
		"or add the namespace to sharing.namespaces of the node configuration", claim.Namespace)
}
