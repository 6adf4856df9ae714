// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// sweep is one pass over all GPUs that NVML enumerates.
type sweep struct {
	node   *Node
	reader *reader

	seen         map[string]bool
	endpoints    []endpoint
	unidentified int
	// failed has what NVML answered for an index of which no UUID could be read.
	failed map[int]gonvml.Return
	hold   bool
}

func (n *Node) newReader() (*reader, error) {
	library := n.session.library
	version, ret := library.SystemGetDriverVersion()
	if ret != gonvml.SUCCESS {
		return nil, fmt.Errorf("read driver version: %w", returnError{ret})
	}
	r := &reader{options: n.options, lib: device.New(library), devRoot: n.layout.devRoot, driver: version}
	if cuda, ret := library.SystemGetCudaDriverVersion(); ret == gonvml.SUCCESS {
		// cuda.h: 1000 * major + 10 * minor.
		r.cuda = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	return r, nil
}

// visit reads one GPU. Whatever goes wrong stays with that GPU.
func (s *sweep) visit(ctx context.Context, index int) {
	d, ret := s.node.session.library.DeviceGetHandleByIndex(index)
	uuid := ""
	if ret == gonvml.SUCCESS {
		uuid, ret = d.GetUUID()
	}
	if ret != gonvml.SUCCESS {
		s.fail(ctx, index, ret)
		return
	}
	known := s.node.known[uuid]
	if known == nil {
		if known = s.meet(ctx, index, uuid, d); known == nil {
			return
		}
	}
	s.seen[uuid] = true
	known.gpu.Index = index
	if !known.complete {
		known.complete = s.reader.readAll(&known.gpu, d)
	}
	s.reader.readState(&known.gpu, d)
	if mode, ret := d.GetPersistenceMode(); ret == gonvml.SUCCESS && mode == gonvml.FEATURE_DISABLED {
		s.hold = true
	}
	if reason := known.gpu.Health.Reason; reason == "" || reason == gpu.ReasonNoNode {
		s.endpoints = append(s.endpoints, endpoint{uuid: uuid, pci: known.gpu.PCIBusID, device: d})
	}
}

// meet takes a GPU in that was never seen before, unless it cannot be named or is not for work.
func (s *sweep) meet(ctx context.Context, index int, uuid string, d gonvml.Device) *knownGPU {
	if name, ret := d.GetName(); ret == gonvml.SUCCESS && skippedNames[name] {
		return nil
	}
	minor, ret := d.GetMinorNumber()
	if ret != gonvml.SUCCESS {
		s.fail(ctx, index, ret)
		return nil
	}
	known := &knownGPU{gpu: gpu.GPU{UUID: uuid, Minor: minor, NUMANode: gpu.UnknownNUMANode}}
	s.node.known[uuid] = known
	return known
}

func (s *sweep) fail(ctx context.Context, index int, ret gonvml.Return) {
	if s.failed == nil {
		s.failed = map[int]gonvml.Return{}
	}
	s.failed[index] = ret
	klog.FromContext(ctx).V(2).Info("GPU does not tell who it is", "index", index, "answer", ret.Error())
}

// missing sorts out known GPUs that did not show up, and enumerated ones that nobody knows. A GPU whose minor number went to
// another is forgotten: it was replaced, and the two would be published under one name.
func (s *sweep) missing() {
	minors := map[int]bool{}
	for uuid := range s.seen {
		minors[s.node.known[uuid].gpu.Minor] = true
	}
	for uuid, known := range s.node.known {
		switch {
		case s.seen[uuid]:
		case minors[known.gpu.Minor]:
			delete(s.node.known, uuid)
		default:
			known.gpu.Health = s.absence(known.gpu)
		}
	}
	s.unidentified = len(s.failed)
}

// absence says why a known GPU did not show up. Asked for by UUID, NVML may still know it and say that it is lost;
// otherwise an index that failed in the GPU's old place is taken for it.
func (s *sweep) absence(g gpu.GPU) gpu.Health {
	ret, failed := s.failed[g.Index]
	_, byUUID := s.node.session.library.DeviceGetHandleByUUID(g.UUID)
	if !failed && byUUID != gonvml.SUCCESS && byUUID != gonvml.ERROR_NOT_FOUND && !unsupported(byUUID) {
		ret, failed = byUUID, true
	}
	if !failed {
		return gpu.Health{Reason: gpu.ReasonMissing, Message: "the driver no longer enumerates the GPU"}
	}
	delete(s.failed, g.Index)
	return healthOf(ret, "looking it up")
}

// connect reads the topology when a GPU answers that did not when it was last read.
func (s *sweep) connect() {
	if s.node.topology.pairs == nil || !s.node.topology.covers(s.endpoints) {
		s.node.topology = readTopology(s.endpoints, s.node.topology)
	}
}
