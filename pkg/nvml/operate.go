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

// attachment is the driver in use. Each operation has its own use of the session and takes no part in scans, so that neither
// waits for the other.
type attachment struct {
	session *session
	layout  layout
	caps    capabilities
}

// operation reads or changes the MIG state of one GPU, alone on that GPU.
type operation struct {
	reader *reader
	// gpu is the known state with the operation's changes; profiled is as in knownGPU.
	gpu      gpu.GPU
	profiled bool
	device   gonvml.Device
	layout   layout
}

// outcome is the result of an operation.
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

// operate waits until it has the GPU to itself and runs an operation on it. ctx ends the wait, not a running operation: that one
// ends by itself, abandon gets its result, and only then the next operation starts.
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

// answered sends the answer if the caller still waits.
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

// reach finds a GPU within a use of the session; end ends the use.
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

// learn reads the GPU's partitions and publishes them. Scans that began before have an older state.
func (n *Node) learn(op *operation) {
	known := knownGPU{gpu: op.gpu, profiled: op.profiled}
	// What cannot be read is unhealthy or missing until a scan reads it, which reports why.
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

// copyMIG copies what operations change.
func copyMIG(to *gpu.GPU, from gpu.GPU) {
	to.MIGCapable, to.MIGEnabled, to.Profiles, to.Partitions = from.MIGCapable, from.MIGEnabled, from.Profiles, from.Partitions
}

// tooLong is the timeout of an operation as a multiple of patience, after which scans read its GPU again: creating a partition
// takes a second or two, a reset some more.
const tooLong = 6

// operating reports whether a GPU has an operation within its timeout.
func (n *Node) operating(uuid string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	since, operated := n.since[uuid]
	return operated && time.Since(since) < tooLong*n.options.patience
}

// recall returns the known GPUs with the changes of operations since they were read.
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

// catchUp copies the newer state of a GPU with an operation, or with one since it was read. Under n.mu.
func (n *Node) catchUp(known *knownGPU) {
	uuid := known.gpu.UUID
	_, operated := n.since[uuid]
	if latest, ok := n.inventory.ByUUID(uuid); ok && (operated || n.changes[uuid] != known.changes) {
		copyMIG(&known.gpu, latest)
		known.profiled, known.changes = n.profiled[uuid], n.changes[uuid]
	}
}
