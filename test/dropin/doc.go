// SPDX-License-Identifier: Apache-2.0

// Package dropin compares Tandem with NVIDIA's device plugin, GPU Feature Discovery and the values of NVIDIA's charts.
package dropin
