// SPDX-License-Identifier: Apache-2.0

package smi_test

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/smi"
)

var uuid = regexp.MustCompile(`(GPU|MIG)-[0-9a-f-]{36}`)

func TestAnAdministratorsDay(t *testing.T) {
	profile, err := simulated.Load("a30x4")
	if err != nil {
		t.Fatal(err)
	}
	lib := simulated.New(profile)
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer lib.Shutdown()
	for _, step := range []struct{ args, want, failure string }{
		{"-i 2 -L", "GPU 2: NVIDIA A30 (UUID: GPU)\n" +
			"  MIG 2g.12gb      Device  0: (UUID: MIG)\n" +
			"  MIG 1g.6gb       Device  1: (UUID: MIG)\n" +
			"  MIG 1g.6gb+me    Device  2: (UUID: MIG)\n", ""},
		{"mig -i 0 -lgi", "", "no MIG-enabled devices found"},
		{"-i 0 -c 3", "", ""},
		{"-i 1 -c 3", "", "set compute mode 3"}, // it is partitioned
		{"-i 0 -c x", "", "compute mode"},
		{"-i 0 -mig 1", "", ""},
		{"-i 3 -mig 1", "", "MIG mode is pending"},
		{"mig -i 0 -cgi 2g.12gb:2,14 -C", "Created GPU instance 2 on GPU 0 with profile 2g.12gb (ID 5)\n" +
			"Created compute instance 0 in GPU instance 2\n" +
			"Created GPU instance 3 on GPU 0 with profile 1g.6gb (ID 14)\n" +
			"Created compute instance 0 in GPU instance 3\n", ""},
		{"mig -i 0 -cgi 4g.24gb", "", "create a 4g.24gb"},
		{"mig -i 0 -cgi 8g.24gb", "", `no MIG profile "8g.24gb"`},
		{"mig -i 0 -lgi", "0 MIG 1g.6gb       14  3 0:1\n0 MIG 2g.12gb       5  2 2:2\n", ""},
		{"mig -i 0 -dci -gi 2", "Destroyed compute instance 0 in GPU instance 2 on GPU 0\n", ""},
		{"mig -i 0 -cci 0,0 -gi 2", "Created compute instance 0 in GPU instance 2\nCreated compute instance 1 in GPU instance 2\n", ""},
		{"mig -i 0 -lci", "0  3 0 0 0:1\n0  2 0 0 0:1\n0  2 0 1 1:1\n", ""},
		{"mig -i 0 -dgi -gi 2", "", "GPU instance 2: destroy"},
		{"mig -i 0 -dci -gi 2 -ci 1", "Destroyed compute instance 1 in GPU instance 2 on GPU 0\n", ""},
		{"mig -i 0 -dci", "Destroyed compute instance 0 in GPU instance 3 on GPU 0\n" +
			"Destroyed compute instance 0 in GPU instance 2 on GPU 0\n", ""},
		{"mig -i 0 -dgi", "Destroyed GPU instance 3 on GPU 0\nDestroyed GPU instance 2 on GPU 0\n", ""},
		{"-i 0 -mig 0", "", ""},
		{"mig -i 1 -lgip", "1 MIG 1g.6gb       14 4/4 0:1,1:1,2:1,3:1\n1 MIG 2g.12gb       5 2/2 0:2,2:2\n" +
			"1 MIG 4g.24gb       0 1/1 0:4\n1 MIG 1g.6gb+me    21 1/1 0:1,1:1,2:1,3:1\n1 MIG 2g.12gb+me    6 1/1 0:2,2:2\n", ""},
		{"-i 9 -L", "", `no GPU "9"`},
		{"--everything", "", "not understood"},
		{"", "", "nothing to do"},
	} {
		var out bytes.Buffer
		err := smi.Run(lib, strings.Fields(step.args), &out)
		if got := uuid.ReplaceAllString(out.String(), "$1"); got != step.want {
			t.Errorf("%s:\n%swant:\n%s", step.args, got, step.want)
		}
		if (err == nil) != (step.failure == "") || err != nil && !strings.Contains(err.Error(), step.failure) {
			t.Errorf("%s: error %v, want %q", step.args, err, step.failure)
		}
	}
}

// In another process of the machine, as the tests of a cluster do it.
func TestAtAMachine(t *testing.T) {
	profile, err := simulated.Load("a30x4")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := smi.At(dir, []string{"-L"}, &bytes.Buffer{}); err == nil {
		t.Error("there is no machine")
	}
	if err := simulated.Materialize(dir, profile, simulated.MaterializeOptions{PlainDeviceFiles: true}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := smi.At(dir, strings.Fields("mig -i 1 -cgi 1g.6gb -C"), &bytes.Buffer{}); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := smi.At(dir, strings.Fields("mig -i 1 -lgi"), &out); err != nil || strings.Count(out.String(), "1g.6gb") != 2 {
		t.Errorf("%s%v", out.String(), err)
	}

	// A lost GPU does not keep the administrator from the others.
	if err := simulated.WriteFaults(dir, simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "0", Lost: true}}}); err != nil {
		t.Fatal(err)
	}
	for args, lost := range map[string]bool{"mig -i 1 -lgi": false, "mig -i 0 -lgi": true, "-L": true} {
		if err := smi.At(dir, strings.Fields(args), &out); (err != nil) != lost {
			t.Errorf("%s beside a lost GPU: %v", args, err)
		}
	}
}
