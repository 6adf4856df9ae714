// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Repair writes anew what somebody has removed: records, directories of daemons, CDI devices. It is called often, and cheap when
// all is there.
func (k *Keeper) Repair() error {
	errs := []error{k.Records.store.Repair()}
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, d := range k.daemons {
		_, err := k.describe(name, limit{})
		errs = append(errs, mps.Make(k.dir(name)), err)
		for client, l := range d.described {
			if l != nil && client != name {
				_, err := k.describe(name, *l)
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// Run makes sure, once, that what an earlier process has recorded is so: a driver that was unloaded meanwhile has forgotten it.
// What nobody has recorded is removed, then and later: containerd makes a daemon's directory anew where kubelet starts the
// daemon's supervisor once more before its pod is deleted. It runs until ctx is done; like all methods it keeps Apply waiting
// only for the same claim.
func (k *Keeper) Run(ctx context.Context) error {
	keys := k.Records.All()
	said := ""
	for ctx.Err() == nil {
		err := k.resume(ctx, keys)
		if err == nil {
			break
		}
		if said != err.Error() && ctx.Err() == nil {
			said = err.Error()
			klog.FromContext(ctx).Error(err, "What was shared before is not as it should be, trying again")
		}
		select {
		case <-ctx.Done():
		case <-time.After(resumeAgain):
		}
	}
	tick := time.NewTicker(strayAgain)
	defer tick.Stop()
	said = ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		err := k.endStrays(ctx)
		switch {
		case err == nil:
			said = ""
		case said != err.Error() && ctx.Err() == nil:
			said = err.Error()
			klog.FromContext(ctx).Error(err, "What is left of an MPS daemon cannot be removed, trying again")
		}
	}
}

const (
	// resumeAgain is how soon what failed at the start is tried again.
	resumeAgain = 10 * time.Second
	// strayAgain is how often directories are looked for that nobody has recorded. It costs one look into a directory.
	strayAgain = 5 * time.Second
)

func (k *Keeper) resume(ctx context.Context, keys []Key) error {
	var errs []error
	for _, key := range keys {
		errs = append(errs, k.turn(ctx, key.Claim, func() error {
			s, ok := k.Records.store.Get(key)
			if !ok || s.Unknown || s.Undoing {
				return nil
			}
			return k.bring(ctx, key, s)
		}))
	}
	errs = append(errs, k.endStrays(ctx))
	_, wanted := k.strays()
	for _, d := range k.Daemons() {
		wanted = append(wanted, d.Name)
	}
	return errors.Join(append(errs, k.Specs.RetainClientDevices(wanted))...)
}

// endStrays removes directories of daemons that are nobody's, once nobody has a daemon of them.
func (k *Keeper) endStrays(ctx context.Context) error {
	var errs []error
	strays, _ := k.strays()
	for _, name := range strays {
		errs = append(errs, k.turn(ctx, claimOf(name), func() error {
			// Its claim may have come meanwhile.
			if strays, _ := k.strays(); !slices.Contains(strays, name) {
				return nil
			}
			if err := k.end(ctx, name); err != nil {
				return err
			}
			return removeDir(k.dir(name))
		}))
	}
	return errors.Join(errs...)
}
