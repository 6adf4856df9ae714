// SPDX-License-Identifier: Apache-2.0

package cdi

// Path is the spec file of the devices that the Source reports.
func (s *Specs) Path() string { return s.main.path }
