// SPDX-License-Identifier: Apache-2.0

// Package torture attacks Tandem on a real one-node cluster: random operations of users and random faults, drawn from a seed,
// several in flight at once, while an oracle watches from outside that no GPU ever has two owners. After each round of
// pressure everything must come to rest by itself, and everything must be free again when all is deleted. It shares no code
// with the ledger. docs/dev/torture.md says what is counted.
package torture
