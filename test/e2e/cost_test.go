// SPDX-License-Identifier: Apache-2.0

package e2e

import (
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
