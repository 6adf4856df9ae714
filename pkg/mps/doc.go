// SPDX-License-Identifier: Apache-2.0

// Package mps implements how the agent and the supervisor of an MPS daemon communicate through the daemon's directory on the node
// (docs/design/0013-sharing.md). The supervisor runs in its own pod, which the controller creates.
package mps
