// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

func TestParseRecord(t *testing.T) {
	boot := time.Unix(1000, 0)
	whole := func(e gpu.XIDEvent) *gpu.XIDEvent {
		e.Message = ""
		e.Time = boot.Add(2 * time.Second)
		e.Sequence = 7
		return &e
	}
	for line, want := range map[string]*gpu.XIDEvent{
		"4,7,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.": whole(
			gpu.XIDEvent{PCI: "0000:3b:00", XID: 79, GPUInstance: -1, ComputeInstance: -1}),
		"3,7,2000000,-,caller=T12;NVRM: Xid (PCI:0000:3B:00): 31, pid=12, name=python, Ch 00000008": whole(
			gpu.XIDEvent{PCI: "0000:3b:00", XID: 31, GPUInstance: -1, ComputeInstance: -1}),
		"4,7,2000000,-;NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=12, name=python, Contained": whole(
			gpu.XIDEvent{PCI: "0000:3b:00", XID: 94, GPUInstance: 5, ComputeInstance: -1}),
		"4,7,2000000,-;NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:01): 43, Ch 8": whole(
			gpu.XIDEvent{PCI: "0000:3b:00", XID: 43, GPUInstance: 5, ComputeInstance: 1}),
		"4,7,2000000,-;NVRM: Xid (PCI:00010002:3b:00): 48, x":                   whole(gpu.XIDEvent{PCI: "10002:3b:00", XID: 48, GPUInstance: -1, ComputeInstance: -1}),
		"4,7,2000000,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64": whole(gpu.XIDEvent{GPUInstance: -1, ComputeInstance: -1}),
		"12,7,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, written by a user":      nil,
		"4,7,2000000,-;nvidia: Xid (PCI:0000:3b:00): 79":                        nil,
		"4,7,2000000,-;NVRM: Xid (PCI:0000:3b): 79":                             nil,
		"4,7,2000000,-;NVRM: Xid (PCI:0000:3b:00): 99999999999999999999, x":     nil,
		"4,7;NVRM: Xid (PCI:0000:3b:00): 79":                                    nil,
		"x,7,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79":                          nil,
		"4,7,2000000,-;NVRM: Xid (PCI:0000:3b:00): 0":                           nil,
		" SUBSYSTEM=pci": nil,
		"":               nil,
	} {
		got, found := parseRecord(line, boot)
		got.Message = ""
		switch {
		case want == nil && found:
			t.Errorf("%q is an XID: %+v", line, got)
		case want != nil && !found:
			t.Errorf("%q is no XID", line)
		case want != nil:
			if diff := cmp.Diff(*want, got); diff != "" {
				t.Errorf("%q: %s", line, diff)
			}
		}
	}
}

// NVML writes eight digits of a domain and the kernel at least four: one GPU has one address.
func TestAddresses(t *testing.T) {
	for address, want := range map[string]string{
		"00000000:3B:00.0": "0000:3b:00", "0000:3b:00": "0000:3b:00", "00010002:3B:00.0": "10002:3b:00", "10002:3b:00.0": "10002:3b:00",
		"": "",
	} {
		if got := slot(address); got != want {
			t.Errorf("%q is %q, want %q", address, got, want)
		}
	}
}

// The other end of an NVLink is found by the address that its GPU has, also in a domain of more than four digits.
func TestAddressOfALink(t *testing.T) {
	for address, want := range map[string]string{"00000000:3B:00.0": "0000:3b:00.0", "00010002:3B:00.0": "10002:3b:00.0"} {
		var info gonvml.PciInfo
		for i, c := range []byte(address) {
			info.BusId[i] = int8(c)
		}
		if got := busID(info); got != want {
			t.Errorf("%s is %s, want %s", address, got, want)
		}
	}
}

// An XID causes a scan unless it is a program's own fault, of which a broken program makes many.
func TestXIDsThatCauseAScan(t *testing.T) {
	n := newHangNode(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	n.options.OpenKernelLog = func() (io.ReadCloser, error) { return r, nil }
	handled := make(chan int, 5)
	go func() { _ = n.WatchXIDs(t.Context(), func(e gpu.XIDEvent) { handled <- e.XID }) }()
	for xid, scans := range map[int]bool{13: false, 31: false, 48: true, 94: true, 154: true} {
		reported := n.reported.Changed()
		if _, err := fmt.Fprintf(w, "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): %d, a\n", xid); err != nil {
			t.Fatal(err)
		}
		if got := <-handled; got != xid {
			t.Fatalf("XID %d, want %d", got, xid)
		}
		limit := 50 * time.Millisecond
		if scans {
			limit = time.Minute
		}
		select {
		case <-reported:
			if !scans {
				t.Errorf("XID %d causes a scan", xid)
			}
		case <-time.After(limit):
			if scans {
				t.Errorf("XID %d causes no scan", xid)
			}
		}
	}
}

// The kernel's own log is read to its end, and Close ends the wait for more.
func TestKernelLog(t *testing.T) {
	log, err := openKernelLog()
	if err != nil {
		t.Skipf("needs a readable /dev/kmsg: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := followKernelLog(ctx, log, func(gpu.XIDEvent) {}); err != nil {
		t.Error(err)
	}
	if _, err := log.Read(make([]byte, 1)); err == nil {
		t.Error("the log is still open")
	}
}

// Overwritten records and lines that are too long are skipped. The end of the log is an error.
func TestFollowKernelLog(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		long := make([]byte, 3*maxRecord)
		for i := range long {
			long[i] = 'x'
		}
		for _, text := range []string{
			"4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 48, a\n", " DEVICE=+pci:0000:3b:00.0\n", string(long) + "\n",
			"4,2,1,-;NVRM: Xid (PCI:0000:3b:00): 95, b\n",
		} {
			_, _ = io.WriteString(w, text)
		}
		_ = w.Close()
	}()
	var xids []int
	if err := followKernelLog(t.Context(), r, func(e gpu.XIDEvent) { xids = append(xids, e.XID) }); err == nil {
		t.Error("the end of the log is no error")
	}
	if diff := cmp.Diff([]int{48, 95}, xids); diff != "" {
		t.Error(diff)
	}
}
