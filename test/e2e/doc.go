// SPDX-License-Identifier: Apache-2.0

// Package e2e holds users' stories, played on a real cluster with simulated GPUs and exactly the manifests in examples/.
// It has tests only. What can be tested without a cluster is tested beside the code.
package e2e
