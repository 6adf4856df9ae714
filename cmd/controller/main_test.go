// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asController makes the test binary the controller.
const asController = "TANDEM_TEST_AS_CONTROLLER"

func TestMain(m *testing.M) {
	if os.Getenv(asController) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

var lease = []string{"--namespace=ns", "--pod-name=tandem-controller-5d8b-x2x4z"}

func TestRunErrors(t *testing.T) {
	tests := []struct {
		name string
		args []string
		want string
	}{
		{"no namespace", []string{"--pod-name=p"}, `--namespace: "" is no namespace`},
		{"no pod", []string{"--namespace=ns"}, `--pod-name: "" is no pod name`},
		{"lease", append([]string{"--lease-name=A"}, lease...), `--lease-name: "A" is no lease name`},
		{"driver", append([]string{"--driver-name=GPU"}, lease...), `--driver-name: "GPU" is no driver name`},
		{"resource", append([]string{"--resource-name=gpu"}, lease...), `--resource-name: "gpu" is no extended resource name`},
		{"webhook", append([]string{"--webhook-name=a.b"}, lease...), `--webhook-name: "a.b" is no name of a Service`},
		{"webhook's port", append([]string{"--webhook-name=w", "--webhook-port=0"}, lease...), `--webhook-port: 0 is no port`},
		{"argument", append([]string{"x"}, lease...), `unexpected argument "x"`},
		{"run directory", append([]string{"--run-dir=run/"}, lease...), `--run-dir: "run/" is not a clean absolute path`},
		{"shared memory", append([]string{"--mps-shared-memory=much"}, lease...), `--mps-shared-memory: "much" is no quantity`},
		{"kubeconfig", append([]string{"--kubeconfig=/absent"}, lease...), "configure API client"},
		{"outside a cluster", lease, "outside a cluster --kubeconfig is needed"},
		{"migrate", []string{"migrate", "--plan"}, "kubectl gpu migrate"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if err := run(t.Context(), test.args, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
	var out bytes.Buffer
	if err := run(t.Context(), []string{"version"}, &out, io.Discard); err != nil || out.Len() == 0 {
		t.Errorf("version: %q, %v", out.String(), err)
	}
	if err := run(t.Context(), []string{"stacks"}, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "not controller") {
		t.Errorf("stacks: %v", err)
	}
	out.Reset()
	if err := run(t.Context(), []string{"-h"}, io.Discard, &out); !errors.Is(err, flag.ErrHelp) || !strings.Contains(out.String(), "controller remove-labels ") {
		t.Errorf("help: %v\n%s", err, out.String())
	}
}

// TestProcess: it says that it waits for the API server, is not ready meanwhile, writes its stacks at SIGUSR2, and ends well.
func TestProcess(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "not now", http.StatusServiceUnavailable)
	}))
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], append([]string{"--kubeconfig=" + kubeconfig(t, server.URL), "--http-endpoint="}, lease...)...)
	cmd.Env = append(os.Environ(), asController+"=1")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waits, wrote := false, false
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		if !waits && strings.Contains(lines.Text(), "Failed to watch") {
			waits = true
			if err := cmd.Process.Signal(syscall.SIGUSR2); err != nil {
				t.Error(err)
			}
		}
		if strings.Contains(lines.Text(), "End of the stacks") {
			wrote = true
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
	}
	if err := cmd.Wait(); err != nil || !waits || !wrote {
		t.Errorf("waited: %t, wrote its stacks: %t, then ended by SIGTERM: %v", waits, wrote, err)
	}
}

// kubeconfig returns a file for an API server without authentication.
func kubeconfig(t testing.TB, url string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"" + url + "\"}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
