// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"errors"
	"reflect"
	"testing"
	"time"
)

func TestAStateIsReadAsItWasWritten(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadState(dir); !errors.Is(err, ErrNoState) {
		t.Errorf("a state in an empty directory: %v", err)
	}
	state := State{
		Seed: 1 << 60, Ops: 5000, RoundSize: 100, InFlight: 6, Kubernetes: "v1.37.1", Next: 7,
		Counters: Counters{Ops: 700, DoublyOwned: 1, HealTimes: []time.Duration{time.Second}},
	}
	if err := state.Write(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadState(dir); err != nil || !reflect.DeepEqual(got, state) {
		t.Errorf("read %+v: %v", got, err)
	}
}

func TestTwoRunsKeepApart(t *testing.T) {
	dir := t.TempDir()
	unlock, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(dir); !errors.Is(err, ErrBusy) {
		t.Errorf("a second run: %v", err)
	}
	unlock()
	unlock, err = Lock(dir)
	if err != nil {
		t.Fatalf("after the first: %v", err)
	}
	unlock()
}
