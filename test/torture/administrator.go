// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/smi"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// machineDir is where the node's simulated GPUs are.
const machineDir = "run/nvidia/simulated"

// administrator makes and removes partitions by hand, as with nvidia-smi, and breaks the driver for a while.
type administrator struct {
	hardware *hardware
	broken   *broken
	// used answers the places that containers see or claims have.
	used func(context.Context) ([]place, error)
}

// operate answers why nothing was done.
func (a *administrator) operate(ctx context.Context, op Op) (skipped string, err error) {
	switch op.Kind {
	case MakePartition:
		return a.make(op.GPU, op.Profile)
	case RemovePartition:
		return a.remove(ctx, op)
	}
	fault := simulated.GPUFaults{GPU: strconv.Itoa(op.GPU)}
	switch op.Kind {
	case FailCall:
		fault.Calls = map[string]simulated.CallFault{op.Call: {Return: op.Answer}}
	case SlowCall:
		fault.Calls = map[string]simulated.CallFault{op.Call: {Delay: simulated.Duration(op.Delay)}}
	case UsePartition:
		at := profileNamed(op.Profile)
		for _, start := range at.starts {
			fault.Clients = append(fault.Clients, simulated.Client{PID: clientPID, Partition: fmt.Sprintf("%d+%d", start, at.size)})
		}
	}
	err = a.broken.set(op.GPU, &fault)
	if err == nil {
		broadcast.Sleep(ctx, op.Pause)
		err = a.broken.set(op.GPU, nil)
	}
	return "", err
}

// clientPID is a process that belongs to no pod.
const clientPID = 4242

func (a *administrator) dir() (string, error) {
	root, err := a.hardware.root()
	return filepath.Join(root, machineDir), err
}

func (a *administrator) smi(args ...string) (string, error) {
	dir, err := a.dir()
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	err = smi.At(dir, args, &out)
	return out.String(), err
}

// created matches what smi says of a new GPU instance.
var created = regexp.MustCompile(`Created GPU instance (\d+) `)

// make makes a partition; wanted may name its place: "1g.10gb:3". It creates nothing without room for it.
func (a *administrator) make(gpu int, wanted string) (skipped string, err error) {
	a.broken.room.RLock()
	defer a.broken.room.RUnlock()
	h := a.hardware
	h.mu.Lock()
	defer h.mu.Unlock()
	out, refusal := a.smi("mig", "-i", strconv.Itoa(gpu), "-cgi", wanted, "-C")
	match := created.FindStringSubmatch(out)
	if match == nil {
		return fmt.Sprint(refusal), nil
	}
	if refusal != nil {
		return "", fmt.Errorf("make a %s on GPU %d: %w", wanted, gpu, refusal)
	}
	now, err := h.read()
	if err != nil {
		return "", err
	}
	for _, i := range now.Instances {
		if i.GPU == gpu && strconv.Itoa(i.ID) == match[1] {
			h.static[i.UUID] = i
			return "", nil
		}
	}
	return "", fmt.Errorf("make a %s on GPU %d: it is not there: %s", wanted, gpu, out)
}

// remove destroys an unmanaged partition of the GPU that no container uses and that kubelet cannot allocate at this moment.
func (a *administrator) remove(ctx context.Context, op Op) (skipped string, err error) {
	used, err := a.used(ctx)
	if err != nil {
		return err.Error(), nil //nolint:nilerr // the administrator does nothing if it is not sure
	}
	a.broken.room.RLock()
	defer a.broken.room.RUnlock()
	a.hardware.mu.Lock()
	defer a.hardware.mu.Unlock()
	if now, err := a.hardware.read(); err != nil || now.Boot != a.hardware.now.Boot {
		return "the node has just booted", err
	}
	var candidates []oracle.Instance
	for _, i := range a.hardware.static {
		limits := slices.ContainsFunc(limitsProfiles, func(name string) bool { return profileNamed(name).id == i.Profile })
		if i.GPU == op.GPU && !limits && !overlapsAny(place{i.GPU, i.Start, i.Size}, used) {
			candidates = append(candidates, i)
		}
	}
	if len(candidates) == 0 {
		return "none that is unused", nil
	}
	slices.SortFunc(candidates, func(x, y oracle.Instance) int { return x.Start - y.Start })
	return "", a.destroy(candidates[op.Pick%len(candidates)])
}

// destroy is called under the hardware's mu.
func (a *administrator) destroy(i oracle.Instance) error {
	delete(a.hardware.static, i.UUID)
	for _, verb := range []string{"-dci", "-dgi"} {
		if _, err := a.smi("mig", "-i", strconv.Itoa(i.GPU), verb, "-gi", strconv.Itoa(i.ID)); err != nil {
			return fmt.Errorf("remove %s: %w", i, err)
		}
	}
	return nil
}

// tidy restores what the administrator changed to the state after a boot. It waits until no container uses any of it.
func (a *administrator) tidy(ctx context.Context) error {
	for deadline := time.Now().Add(settlePatience); ; broadcast.Sleep(ctx, lookAgain) {
		used, err := a.used(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil && len(used) == 0 {
			break
		}
		if time.Now().After(deadline) {
			// What uses it is found as a leak.
			return nil
		}
	}
	a.broken.room.RLock()
	a.hardware.mu.Lock()
	var extra, missing []oracle.Instance
	for _, i := range a.hardware.static {
		if !slices.ContainsFunc(a.hardware.first, func(f oracle.Instance) bool { return sameShape(f, i) }) {
			extra = append(extra, i)
		}
	}
	for _, f := range a.hardware.first {
		if !slices.ContainsFunc(a.hardware.now.Instances, func(i oracle.Instance) bool { return sameShape(f, i) }) {
			missing = append(missing, f)
		}
	}
	var err error
	for _, i := range extra {
		if err == nil {
			err = a.destroy(i)
		}
	}
	a.hardware.mu.Unlock()
	a.broken.room.RUnlock()
	for _, f := range missing {
		if err == nil {
			err = a.remake(ctx, f)
		}
	}
	return err
}

// remake waits for a place that may still be taken.
func (a *administrator) remake(ctx context.Context, f oracle.Instance) error {
	name := profiles[slices.IndexFunc(profiles, func(p profile) bool { return p.id == f.Profile })].name
	for deadline := time.Now().Add(settlePatience); ; broadcast.Sleep(ctx, lookAgain) {
		skipped, err := a.make(f.GPU, fmt.Sprintf("%s:%d", name, f.Start))
		if err != nil || skipped == "" || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
	}
}
