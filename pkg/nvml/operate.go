// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// attachment is the driver that is in use. Operations have a use of the session of their own and take no part in scans, so
// that neither waits for the other.
type attachment struct {
	session *session
	layout  layout
	caps    capabilities
}

// operation is a look at one GPU's MIG, or a change of it, alone on that GPU.
type operation struct {
	reader *reader
	// gpu is what was known of it, with what the operation has changed; profiled is as in knownGPU.
	gpu      gpu.GPU
	profiled bool
	device   gonvml.Device
	layout   layout
}

// outcome is what an operation ends with.
type outcome[T any] struct {
	value T
	err   error
}

// change runs an operation that changes the GPU: the inventory is updated when it returns. If the caller has gone, abandon
// reverts the change; it may be nil.
func change[T any](
	ctx context.Context, n *Node, uuid string, do func(*operation) (T, error), abandon func(*operation, T),
) (T, error) {
	return operate(ctx, n, uuid, func(op *operation) (T, error) {
		defer n.learn(op)
		return do(op)
	}, func(op *operation, value T) {
		if abandon != nil {
			abandon(op, value)
			n.learn(op)
		}
	})
}

// operate waits for its turn with a GPU and does something with it. Ctx ends the waiting, not what was begun: that ends by
// itself, abandon is told what has come of it, and then only it is the next one's turn.
func operate[T any](
	ctx context.Context, n *Node, uuid string, do func(*operation) (T, error), abandon func(*operation, T),
) (T, error) {
	var none T
	leave, err := n.enter(ctx, uuid)
	if err != nil {
		return none, err
	}
	answer, abandoned := make(chan outcome[T]), make(chan struct{})
	go func() {
		defer leave()
		op, end, err := n.reach(uuid)
		if err != nil {
			_ = answered(answer, outcome[T]{err: err}, abandoned)
			return
		}
		defer end()
		value, err := do(op)
		if !answered(answer, outcome[T]{value, err}, abandoned) && err == nil {
			abandon(op, value)
		}
	}()
	select {
	case o := <-answer:
		return o.value, o.err
	case <-ctx.Done():
		close(abandoned)
		return none, fmt.Errorf("wait for GPU %s: %w", uuid, context.Cause(ctx))
	}
}

// answered delivers the answer if the caller still waits for it.
func answered[T any](answer chan<- outcome[T], o outcome[T], abandoned <-chan struct{}) bool {
	select {
	case answer <- o:
		return true
	case <-abandoned:
		return false
	}
}

// enter waits for exclusive use of the GPU. Scans skip the GPU until leave is called or the operation times out.
func (n *Node) enter(ctx context.Context, uuid string) (leave func(), err error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("wait for GPU %s: %w", uuid, context.Cause(ctx))
	}
	unlock, err := n.turns.Lock(ctx, uuid)
	if err != nil {
		return nil, fmt.Errorf("wait for an earlier change of GPU %s: %w", uuid, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.since[uuid] = time.Now()
	return func() {
		n.mu.Lock()
		delete(n.since, uuid)
		n.mu.Unlock()
		unlock()
	}, nil
}

// reach looks a GPU up in a use of the session; end ends it.
func (n *Node) reach(uuid string) (op *operation, end func(), err error) {
	n.mu.Lock()
	attached := n.attached
	g, known := n.inventory.ByUUID(uuid)
	profiled := n.profiled[uuid]
	n.mu.Unlock()
	if !known {
		return nil, nil, fmt.Errorf("GPU %s is not there", uuid)
	}
	s := attached.session
	if err := s.open(); err != nil {
		return nil, nil, err
	}
	d, ret := s.library.DeviceGetHandleByUUID(uuid)
	if ret != gonvml.SUCCESS {
		s.close()
		return nil, nil, fmt.Errorf("look up GPU %s: %w", uuid, returnError{ret})
	}
	r := &reader{options: n.options, lib: device.New(s.library), devRoot: attached.layout.devRoot, caps: attached.caps}
	return &operation{reader: r, gpu: g, profiled: profiled, device: d, layout: attached.layout}, s.close, nil
}

// learn reads what the GPU is cut into now, and makes it known. Scans that have begun before know less.
func (n *Node) learn(op *operation) {
	known := knownGPU{gpu: op.gpu, profiled: op.profiled}
	// What cannot be read is unhealthy, or missing until a scan reads it, which says why.
	_ = op.reader.readMIG(&known, op.device)
	op.gpu, op.profiled = known.gpu, known.profiled

	n.mu.Lock()
	defer n.mu.Unlock()
	n.changes[op.gpu.UUID]++
	at := slices.IndexFunc(n.inventory.GPUs, func(g gpu.GPU) bool { return g.UUID == op.gpu.UUID })
	if at < 0 {
		return
	}
	next := n.inventory
	next.GPUs = slices.Clone(next.GPUs)
	copyMIG(&next.GPUs[at], op.gpu)
	n.profiled[op.gpu.UUID] = op.profiled
	if !reflect.DeepEqual(n.inventory, next) {
		n.tell(next)
	}
}

// copyMIG takes over what operations change.
func copyMIG(to *gpu.GPU, from gpu.GPU) {
	to.MIGCapable, to.MIGEnabled, to.Profiles, to.Partitions = from.MIGCapable, from.MIGEnabled, from.Profiles, from.Partitions
}

// tooLong is how often patience an operation may take before scans look at its GPU all the same: to create a partition takes a
// second or two, to reset a GPU some more.
const tooLong = 6

// operating reports whether a GPU is being operated on, and may take the time.
func (n *Node) operating(uuid string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	since, operated := n.since[uuid]
	return operated && time.Since(since) < tooLong*n.options.patience
}

// recall is what is known of the GPUs, with what operations have changed since they were visited.
func (n *Node) recall(before map[string]knownGPU) map[string]knownGPU {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := make(map[string]knownGPU, len(before))
	for uuid, known := range before {
		n.catchUp(&known)
		now[uuid] = known
	}
	return now
}

// catchUp takes over what operations know better: of a GPU that is being operated on, or has been since it was visited. Under
// n.mu.
func (n *Node) catchUp(known *knownGPU) {
	uuid := known.gpu.UUID
	_, operated := n.since[uuid]
	if latest, ok := n.inventory.ByUUID(uuid); ok && (operated || n.changes[uuid] != known.changes) {
		copyMIG(&known.gpu, latest)
		known.profiled, known.changes = n.profiled[uuid], n.changes[uuid]
	}
}
