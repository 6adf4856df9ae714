// SPDX-License-Identifier: Apache-2.0

package kubeletmodel

import (
	"bufio"
	"encoding/json"
	"io"
	"os/exec"
	"sync"
	"testing"
)

// request is a command to kubelet's device manager (hack/binaries/testdata/devicemanager).
type request struct {
	Op, Resource, Socket string      `json:",omitempty"`
	Preferred            bool        `json:",omitempty"`
	Healthy, Unhealthy   []string    `json:",omitempty"`
	Active               []string    `json:",omitempty"`
	Ready                bool        `json:",omitempty"`
	Running              [][2]string `json:",omitempty"`
	Pod                  string      `json:",omitempty"`
	Containers           []Container `json:",omitempty"`
	Container            string      `json:",omitempty"`
	IDs                  []string    `json:",omitempty"`
	Fail, Damage         bool        `json:",omitempty"`
	// Left is how many streams are left after a stop.
	Left int `json:",omitempty"`
}

// response is its answer.
type response struct {
	Error string
	Ask   *struct {
		Socket                      string
		Preferred                   bool
		Available, MustInclude, IDs []string
		Size                        int
	}
	Done     bool
	Capacity map[string][2]int
	State    struct {
		Healthy, Unhealthy, Allocated ByResource
		Pods                          PodDevices
		Endpoints                     map[string]struct{ Stopped bool }
		Checkpoint                    Checkpoint
	}
}

// kubelet is kubelet's own device manager, in a process of its own.
type kubelet struct {
	t    *testing.T
	to   *json.Encoder
	from *json.Decoder
	// stop ends the process.
	stop func()
}

func startKubelet(t *testing.T, program string) *kubelet {
	t.Helper()
	cmd := exec.Command(program)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceFunc(func() {
		_ = in.Close()
		_, _ = io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return &kubelet{t: t, to: json.NewEncoder(in), from: json.NewDecoder(bufio.NewReader(out)), stop: stop}
}

func (k *kubelet) ask(r request) (answer response) {
	k.t.Helper()
	if err := k.to.Encode(r); err != nil {
		k.t.Fatalf("send to kubelet's device manager: %v", err)
	}
	if err := k.from.Decode(&answer); err != nil {
		k.t.Fatalf("read from kubelet's device manager: %v", err)
	}
	return answer
}
