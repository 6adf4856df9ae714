// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// incapable GPUs have no time slices, and no compute modes either where it says so.
type incapable struct {
	*world
	modes bool
	tries int
}

func (i *incapable) SetTimeSlice(context.Context, string, int) error {
	i.tries++
	return fmt.Errorf("set time slice: %w", device.ErrUnsupported)
}

func (i *incapable) ComputeMode(ctx context.Context, gpu string) (device.ComputeMode, error) {
	if !i.modes {
		return "", fmt.Errorf("read mode: %w", device.ErrUnsupported)
	}
	return i.world.ComputeMode(ctx, gpu)
}

func (i *incapable) SetComputeMode(ctx context.Context, gpu string, mode device.ComputeMode) (device.ComputeMode, error) {
	if !i.modes {
		return "", fmt.Errorf("set mode: %w", device.ErrUnsupported)
	}
	return i.world.SetComputeMode(ctx, gpu, mode)
}

// What a GPU does not support is an error that says so, and nothing of it is left that could not be undone.
func TestUnsupported(t *testing.T) {
	for _, modes := range []bool{true, false} {
		w := newWorld(t)
		k := w.process()
		h := &incapable{world: w, modes: modes}
		k.Hardware = h
		// The driver's default is what such a GPU has.
		_, err := apply(t.Context(), k, group("uid-a", sliced(parametersv1beta1.IntervalDefault), gpuNamed("GPU-0")), always)
		check(t, err)
		k.revertAll(t)
		_, err = apply(t.Context(), k, group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-0")), always)
		if !errors.Is(err, device.ErrUnsupported) {
			t.Errorf("modes %t: got %v", modes, err)
		}
		tried := h.tries
		// The next process reads it from the record.
		k = w.process()
		k.Hardware = h
		k.revertAll(t)
		if w.state() != "" || h.tries != tried {
			t.Errorf("modes %t: left %s, %d more tries to set what was not set", modes, w.state(), h.tries-tried)
		}
		if !modes {
			_, err = apply(t.Context(), k, group("uid-b", withMPS(), gpuNamed("GPU-0")), always)
			if !errors.Is(err, device.ErrUnsupported) {
				t.Errorf("MPS without its mode: %v", err)
			}
			k.revertAll(t)
		}
		if w.state() != "" {
			t.Errorf("modes %t: left %s", modes, w.state())
		}
	}
}

// Settings with a record that cannot be read are reverted on such a GPU as well.
func TestUnsupportedWithRecordOfBefore(t *testing.T) {
	for name, text := range map[string]string{"torn": "{", "empty": ""} {
		w := newWorld(t)
		dir := filepath.Join(w.dir, "sharing")
		check(t, os.MkdirAll(dir, 0o700))
		check(t, os.WriteFile(filepath.Join(dir, "uid-a~GPU-0"), []byte(text), 0o600))
		r := NewRecords(dir, "boot")
		if _, err := r.Load(); err != nil || len(r.Keys()) != 1 {
			t.Fatal(name, err)
		}
		k := NewManager(Options{Records: r, RunDir: w.dir, DriverRoot: "/", Hardware: &incapable{world: w}, Specs: w})
		k.revertAll(t)
		if w.state() != "" {
			t.Errorf("%s: left %s", name, w.state())
		}
		// Where it may be set, it is put back.
		w.slices["GPU-0"] = 1
		check(t, os.WriteFile(filepath.Join(dir, "uid-a~GPU-0"), []byte(text), 0o600))
		if _, err := r.Load(); err != nil {
			t.Fatal(name, err)
		}
		k.Hardware = w
		k.revertAll(t)
		if w.state() != "" {
			t.Errorf("%s: left %s", name, w.state())
		}
	}
}

// An agent that ends before nvidia-smi has answered leaves a record by which the slice may be set. The next agent restores the slice if it has
// the right to. Otherwise it removes the record, and the GPU is free for other claims.
func TestTimeSliceThatMayBeSet(t *testing.T) {
	for _, allowed := range []bool{true, false} {
		w := newWorld(t)
		k := w.process()
		k.Hardware = dying{w}
		if _, err := apply(t.Context(), k, group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-0")), always); err == nil {
			t.Fatal("applied")
		}
		h := &incapable{world: w, modes: true}
		if k = w.process(); !allowed {
			w.slices["GPU-0"] = 0 // nor could the agent before
			k.Hardware = h
		}
		k.revertAll(t)
		if w.state() != "" || !allowed && h.tries != 1 {
			t.Errorf("allowed %t: left %s, tried %d times to restore", allowed, w.state(), h.tries)
		}
	}
	// A process in between that has no right to set the slice keeps the record.
	w := newWorld(t)
	for i, hardware := range []Hardware{dying{w}, &incapable{world: w, modes: true}} {
		k := w.process()
		k.Hardware = hardware
		if _, err := apply(t.Context(), k, group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-0")), always); err == nil {
			t.Fatalf("process %d applied", i)
		}
	}
	w.process().revertAll(t)
	if w.state() != "" {
		t.Errorf("left %s", w.state())
	}
}

// dying sets the slice, and its agent does not learn that.
type dying struct{ *world }

func (d dying) SetTimeSlice(ctx context.Context, gpu string, slice int) error {
	return cmp.Or(d.world.SetTimeSlice(ctx, gpu, slice), errors.New("killed"))
}

// Policy that a GPU does not support is tried once, and is in no claim's way.
func TestPolicyUnsupported(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	h := &incapable{world: w, modes: true}
	k.Hardware = h
	p := NewPolicy(k, node{"GPU-0": "Short"}, &book{}, &book{})
	for range 3 {
		check(t, settleAll(t, p))
	}
	if h.tries != 1 || w.state() != "" {
		t.Errorf("tried %d times, left %s", h.tries, w.state())
	}
	w.supervise(t.Context(), k)
	_, err := apply(t.Context(), k, group("uid-b", withMPS(), gpuNamed("GPU-0")), always)
	check(t, err)
	k.revertAll(t)
}
