// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"maps"
	"slices"
)

// WithheldError means that the ledger gives no device to a new holder, because some device of the node may have a holder that no
// hold names. The caller may retry: it ends when every reason does. The error reaches tenants, so it names no other pod.
type WithheldError struct{}

func (*WithheldError) Error() string {
	return "the node gives no GPU to new pods now: events of the node say why"
}

// Withhold makes the ledger refuse every new hold for a reason, until it is called for the same source with nil. Holds stay, and
// their holders may reserve them again. Each component that finds such a reason is a source. Withhold is idempotent, safe for
// concurrent use, and does not wait. The reasons are kept in memory only.
func (l *Ledger) Withhold(source string, reason error) {
	l.mu.Lock()
	before, known := l.withheld[source]
	switch {
	case reason == nil:
		delete(l.withheld, source)
	default:
		l.withheld[source] = reason
	}
	l.mu.Unlock()
	if known != (reason != nil) || known && before.Error() != reason.Error() {
		l.changed.Notify()
	}
}

// Withholds reports whether a source withholds devices. It is safe for concurrent use.
func (l *Ledger) Withholds(source string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.withheld[source] != nil
}

// Withheld returns nil while devices are given to new holders, and otherwise the reasons of all sources, for the operator. Changed
// reports a change. It is safe for concurrent use.
func (l *Ledger) Withheld() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var reasons []error
	for _, source := range slices.Sorted(maps.Keys(l.withheld)) {
		reasons = append(reasons, l.withheld[source])
	}
	return errors.Join(reasons...)
}
