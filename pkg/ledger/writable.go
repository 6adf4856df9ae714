// SPDX-License-Identifier: Apache-2.0

package ledger

// Probe checks whether new holds can be recorded, so that Unwritable knows it before a pod comes: a failed Allocate fails its pod for good.
// pkg/health calls it at intervals.
func (l *Ledger) Probe() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setUnwritable(l.records.Probe())
}

// Unwritable returns why a new hold cannot be recorded; nil once Probe has succeeded after the last failure. Changed announces changes.
func (l *Ledger) Unwritable() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unwritable
}

// setUnwritable is under l.mu.
func (l *Ledger) setUnwritable(err error) {
	if (err == nil) == (l.unwritable == nil) {
		return // the first reason stays
	}
	l.unwritable = err
	l.announce()
}
