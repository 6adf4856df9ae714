// SPDX-License-Identifier: Apache-2.0

// Package contract tests the shipped programs against what they meet in a cluster: a real API server with the chart's roles and policies,
// controller manager, scheduler, and one kubelet of test/kubelet for each node. The pods of the chart run as programs in the node's machine,
// with the command, environment, volumes and token that the chart gives them. Containers of other pods have no process: what needs one, or
// a real kubelet or runtime, is in test/e2e. It needs root.
package contract
