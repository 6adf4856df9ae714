// SPDX-License-Identifier: Apache-2.0

// Package mps is what an agent and the supervisor of an MPS daemon say to each other through the daemon's directory on the node
// (docs/design/0013-sharing.md). The supervisor runs in a pod of its own and knows nobody else; the agent asks for the pod elsewhere.
package mps
