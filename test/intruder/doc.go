// SPDX-License-Identifier: Apache-2.0

// Package intruder attacks an installed chart as a tenant, or with the stolen token of an agent or the controller. The API server is
// real, with the chart's roles and policies; there are no nodes and no kubelets. The controller is the real program. It needs root.
// What each token can still do is in SECURITY.md.
package intruder
