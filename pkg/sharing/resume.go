// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Repair writes again what another process removed: records, and the directory and the client device without a limit of each daemon.
// Specs.Run restores the client devices with limits. Repair is cheap and is called often.
func (m *Manager) Repair() error {
	errs := []error{m.Records.Repair()}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.daemons {
		_, err := m.writeClientDevice(name, limit{})
		errs = append(errs, mps.Make(m.dir(name)), err)
	}
	return errors.Join(errs...)
}

// resumeInterval is the pause between attempts to apply recorded settings, and then between checks for stale daemons. A check reads
// one directory.
const resumeInterval = 5 * time.Second

// Run applies what an earlier process recorded, because a driver that was reloaded has lost it. Then it ends stale daemons,
// until ctx is done: containerd creates a daemon's directory again where kubelet restarts the supervisor before its pod is
// deleted.
func (m *Manager) Run(ctx context.Context) error {
	keys, reported := m.Records.where(func(Key, setting) bool { return true }), ""
	work := func(ctx context.Context) error { return m.resume(ctx, keys) }
	for {
		m.turn(ctx, "restores", "sharing settings")
		err := work(ctx)
		switch {
		case err == nil:
			work, reported = m.endStaleDaemons, ""
		case reported != err.Error() && ctx.Err() == nil:
			reported = err.Error()
			klog.FromContext(ctx).Error(err, "Cannot restore sharing settings or remove stale MPS daemons, retrying")
		}
		if !broadcast.Sleep(ctx, resumeInterval) {
			return nil
		}
	}
}

// resume applies recorded settings again, and removes what no record names.
func (m *Manager) resume(ctx context.Context, keys []Key) error {
	var errs []error
	for _, key := range keys {
		errs = append(errs, m.resumeOne(ctx, key))
	}
	errs = append(errs, m.endStaleDaemons(ctx))
	_, retain := m.staleDaemons()
	for _, d := range m.Daemons() {
		retain = append(retain, d.Name)
	}
	return errors.Join(append(errs, m.Specs.RetainClientDevices(retain))...)
}

func (m *Manager) resumeOne(ctx context.Context, key Key) error {
	unlock, err := m.lock(ctx, key.Owner)
	if err != nil {
		return err
	}
	defer unlock()
	if s, ok := m.Records.Get(key); ok && !s.Unknown && !s.Reverting && !m.policyInForce(key) {
		return m.set(ctx, key, s)
	}
	return nil
}
