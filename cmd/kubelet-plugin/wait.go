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

// lockInterval is how often the agent tries to lock the ledger. A blocking flock could not be cancelled.
const lockInterval = time.Second

// openLedger waits while another agent process has the ledger locked: a force-deleted predecessor may still run.
func (a *agent) openLedger(ctx context.Context, e ledger.PodStates, q ledger.Queue) (*ledger.Ledger, error) {
	for reported := false; ; reported = true {
		book, err := ledger.Open(ctx, ledger.Options{Dir: a.config.RunDir, BootID: a.bootID, PodStates: e, Queue: q})
		if !errors.Is(err, ledger.ErrLocked) {
			a.status.Waiting("ledger", err)
			return book, err
		}
		if !reported {
			a.wait(ctx, "ledger", "LedgerLocked", err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(lockInterval):
		}
	}
}

// openNode waits for a driver, and calls missing if there is none.
func (a *agent) openNode(ctx context.Context, missing func()) (*nvml.Node, error) {
	node, err := nvml.Await(ctx, a.nodeOptions(), func(reason error) {
		missing()
		if missing, ok := errors.AsType[*nvml.NoDriverError](reason); ok && missing.NoHardware {
			// The agent of a node without GPUs is ready, so that it does not delay an installation.
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

// awaitGPU waits until the driver finds a GPU, and calls missing while it finds none. It returns false when ctx is done.
func (a *agent) awaitGPU(ctx context.Context, node *nvml.Node, missing func()) bool {
	reported := ""
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
			reason = fmt.Errorf("driver %s finds %d GPUs that do not report their UUID", inventory.DriverVersion, unidentified)
		}
		if reason.Error() != reported {
			a.wait(ctx, "gpus", "NoGPU", reason)
			reported = reason.Error()
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// wait reports why the agent is not ready in its status, its log and an event on the node.
func (a *agent) wait(ctx context.Context, check, reason string, err error) {
	klog.FromContext(ctx).Info("Waiting", "for", check, "reason", err.Error())
	a.status.Waiting(check, err)
	a.recorder.Event(nodeReference(a.config.NodeName), corev1.EventTypeWarning, reason, err.Error())
}

// nodeReference uses the node's name as UID, like kubelet's events on nodes, so that kubectl describe finds them.
func nodeReference(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

const returnInterval = time.Second

// returnMemory returns memory that only startup needed to the kernel: about half of the agent's, which the Go runtime would keep for
// minutes. It does so after each change of what the agent waits for, and ends once the agent is ready. The bench figure rss_idle
// exceeds 45 MiB without it.
func (a *agent) returnMemory(ctx context.Context) error {
	ticker := time.NewTicker(returnInterval)
	defer ticker.Stop()
	for previous := ""; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		waiting := a.status.Ready()
		if reason := fmt.Sprint(waiting); reason != previous {
			previous = reason
			debug.FreeOSMemory()
		}
		if waiting == nil {
			return nil
		}
	}
}
