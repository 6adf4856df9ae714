// SPDX-License-Identifier: Apache-2.0

// Package facts checks on a real API server what the controller assumes of it.
package facts
