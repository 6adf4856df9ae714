// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

var recordForm = regexp.MustCompile(`^4,([0-9]+),([0-9]+),-;(.*)$`)

// kernelLog reads the texts of the log of the machine in dir, and checks the form of the records.
func kernelLog(t *testing.T, dir string) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, KernelLogFile))
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	last := 0
	for i, line := range strings.Split(strings.TrimSuffix(string(data), "\n"), "\n") {
		found := recordForm.FindStringSubmatch(line)
		if found == nil || found[1] != strconv.Itoa(i) {
			t.Fatalf("record %d is %q", i, line)
		}
		if at, _ := strconv.Atoi(found[2]); at < last {
			t.Errorf("record %d is of %d µs, after one of %d µs", i, at, last)
		} else {
			last = at
		}
		texts = append(texts, found[3])
	}
	return texts
}

func TestXIDsAreInTheKernelLog(t *testing.T) {
	dir := t.TempDir()
	materialize(t, dir, "h100x8-mig", MaterializeOptions{PlainDeviceFiles: true})
	four, zero := 4, 0
	for _, e := range []Event{
		{GPU: "0", XID: 79},
		{GPU: "5", XID: 94, GPUInstance: &four, ComputeInstance: &zero, PID: 4242, Process: "python3"},
		{GPU: "5", XID: 1000, GPUInstance: &four, Message: "something new"},
	} {
		if err := RaiseXID(dir, e); err != nil {
			t.Fatal(err)
		}
	}
	// Nothing new is written with these.
	faults, err := ReadFaults(dir)
	if err != nil {
		t.Fatal(err)
	}
	inject(t, dir, Faults{GPUs: []GPUFaults{{GPU: "0", Lost: true}}, Events: faults.Events})
	want := []string{
		"Linux version (simulated)",
		"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
		"NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
		"NVRM: Xid (PCI:0000:c3:00 GPU-I:04 GPU-CI:00): 94, pid=4242, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
		"NVRM: Xid (PCI:0000:c3:00 GPU-I:04): 1000, pid='<unknown>', name=<unknown>, something new",
	}
	if got := kernelLog(t, dir); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("kernel log:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// The log goes on over a restart of the machine's programs, and begins anew with a boot.
	materialize(t, dir, "h100x8-mig", MaterializeOptions{PlainDeviceFiles: true})
	if got := len(kernelLog(t, dir)); got != len(want) {
		t.Errorf("%d records after a restart, want %d", got, len(want))
	}
	if err := os.Remove(filepath.Join(dir, MIGDir, MIGStateFile)); err != nil {
		t.Fatal(err)
	}
	materialize(t, dir, "h100x8-mig", MaterializeOptions{PlainDeviceFiles: true})
	if got := len(kernelLog(t, dir)); got != 2 {
		t.Errorf("%d records after a boot, want 2", got)
	}
}

func TestXIDsWithoutAMachineAreNotLogged(t *testing.T) {
	dir := t.TempDir()
	inject(t, dir, Faults{Events: []Event{{Sequence: 1, GPU: "0", XID: 79}}})
	if _, err := os.Stat(filepath.Join(dir, KernelLogFile)); !os.IsNotExist(err) {
		t.Errorf("kernel log: %v", err)
	}
}

func TestRecordsOfConcurrentWriters(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 50 {
				if err := LogKernel(dir, "one", "two"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if got := len(kernelLog(t, dir)); got != 1600 {
		t.Errorf("%d records, want 1600", got)
	}
}

func TestEventsOfPartitions(t *testing.T) {
	dir := t.TempDir()
	materialize(t, dir, "h100x8-mig", MaterializeOptions{PlainDeviceFiles: true})
	lib := start(t, "h100x8-mig", WithDir(dir))
	set, _ := lib.EventSetCreate()
	for _, place := range []int{0, 5} {
		if ret := handle(t, lib, place).RegisterEvents(nvml.EventTypeXidCriticalError, set); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
	}
	instance, compute := 2, 0
	for _, test := range []struct {
		event  Event
		gi, ci uint32
	}{
		{Event{GPU: "5", XID: 94, GPUInstance: &instance, ComputeInstance: &compute}, 2, 0},
		{Event{GPU: "5", XID: 94, GPUInstance: &instance}, 2, noInstance},
		{Event{GPU: "5", XID: 79}, noInstance, noInstance},
		{Event{GPU: "0", XID: 94, GPUInstance: &instance, ComputeInstance: &compute}, noInstance, noInstance}, // MIG is off
	} {
		if err := RaiseXID(dir, test.event); err != nil {
			t.Fatal(err)
		}
		data, ret := set.Wait(10_000)
		if ret != nvml.SUCCESS || data.EventData != test.event.XID || data.GpuInstanceId != test.gi || data.ComputeInstanceId != test.ci {
			t.Errorf("event %+v: %+v, %v", test.event, data, ret)
		}
	}
	// An event that comes after all were removed is as new as any.
	inject(t, dir, Faults{})
	if err := RaiseXID(dir, Event{GPU: "5", XID: 48}); err != nil {
		t.Fatal(err)
	}
	if data, ret := set.Wait(10_000); ret != nvml.SUCCESS || data.EventData != 48 {
		t.Errorf("event after the file was emptied: %+v, %v", data, ret)
	}
}
