// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nvml"
)

// lockInterval is how often a lock in other hands is tried again: flock tells nobody when it is free without blocking for
// good.
const lockInterval = time.Second

// openLedger waits while another agent process owns the node: a force-deleted predecessor may still run.
func (a *agent) openLedger(ctx context.Context, e ledger.PodStates, q ledger.Queue) (*ledger.Ledger, error) {
	for said := false; ; said = true {
		book, err := ledger.Open(ctx, ledger.Options{Dir: a.config.RunDir, BootID: a.bootID, PodStates: e, Queue: q})
		if !errors.Is(err, ledger.ErrLocked) {
			a.status.Waiting("ledger", err)
			return book, err
		}
		if !said {
			a.wait(ctx, "ledger", "LedgerLocked", err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(lockInterval):
		}
	}
}

// openNode waits for a driver, and calls missing while there is none.
func (a *agent) openNode(ctx context.Context, missing func()) (*nvml.Node, error) {
	node, err := nvml.Await(ctx, a.nodeOptions(), func(reason error) {
		missing()
		if missing, ok := errors.AsType[*nvml.NoDriverError](reason); ok && missing.NoHardware {
			// Nothing is missing on a node without GPUs, and its agent must not hold up the installation.
			klog.FromContext(ctx).Info("Serving nothing on a node without an NVIDIA GPU", "reason", reason.Error())
			for _, check := range []string{"driver", "claims", "limits"} {
				a.status.Waiting(check, nil)
			}
			return
		}
		a.wait(ctx, "driver", "NoDriver", reason)
	})
	if err != nil {
		return nil, err
	}
	a.status.Waiting("driver", nil)
	return node, nil
}

// awaitGPU waits for a first GPU, and calls missing while there is none: a node may have a driver and nothing (yet) to drive. It
// returns false when ctx is done.
func (a *agent) awaitGPU(ctx context.Context, node *nvml.Node, missing func()) bool {
	said := ""
	for {
		changed := node.Changed()
		inventory := node.Inventory()
		if len(inventory.GPUs) > 0 {
			a.status.Waiting("gpus", nil)
			return true
		}
		missing()
		reason := fmt.Errorf("driver %s finds no GPU", inventory.DriverVersion)
		if unidentified := node.Unidentified(); unidentified > 0 {
			reason = fmt.Errorf("driver %s finds %d GPUs that do not tell who they are", inventory.DriverVersion, unidentified)
		}
		if reason.Error() != said {
			a.wait(ctx, "gpus", "NoGPU", reason)
			said = reason.Error()
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// wait says why the agent is not ready: in its status, its log, and an event on the node.
func (a *agent) wait(ctx context.Context, check, reason string, err error) {
	klog.FromContext(ctx).Info("Waiting", "for", check, "reason", err.Error())
	a.status.Waiting(check, err)
	a.recorder.Event(nodeReference(a.config.NodeName), corev1.EventTypeWarning, reason, err.Error())
}

// nodeReference has the node's name for a UID, as kubelet's own events on nodes have, so that kubectl describe finds them.
func nodeReference(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

// returnInterval is how often to look whether the start is over.
const returnInterval = time.Second

// returnMemory gives back, once, what only the start needed: about half of the agent's memory, which the Go runtime would
// keep for minutes.
func (a *agent) returnMemory(ctx context.Context) error {
	ticker := time.NewTicker(returnInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if a.status.Ready() == nil {
				debug.FreeOSMemory()
				return nil
			}
		}
	}
}
