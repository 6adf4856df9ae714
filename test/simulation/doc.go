// SPDX-License-Identifier: Apache-2.0

// Package simulation plays a node and its cluster in one process: the real ledger, front-ends, reconciler and controller
// decisions between a modelled scheduler, kubelet and API server, at times after foreign drivers. Everything that happens is
// one step of a schedule drawn from a seed, on a clock that only the schedule moves, so that what went wrong once goes wrong
// again. Run it by `make simulation`.
package simulation
