// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asAgent makes the test binary the agent.
const asAgent = "TANDEM_TEST_AS_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// flagsOfANode are those of an agent on a node with directories of its own, a GPU, no driver, and an API server that is away.
func flagsOfANode(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	for file, text := range map[string]string{
		"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
		"kubelet/device-plugins/x": "", "kubelet/plugins_registry/x": "", "cgroup/kubepods/x": "",
		"kubeconfig": `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`,
	} {
		path := filepath.Join(dir, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return []string{
		"--node-name=n", "--kubelet-dir=" + dir + "/kubelet", "--run-dir=" + dir + "/run", "--cdi-dir=" + dir + "/cdi", "--cgroup-root=" + dir + "/cgroup",
		"--host-root=" + dir, "--sysfs-root=" + dir + "/sys", "--driver-root=/absent", "--http-endpoint=", "--kubeconfig=" + dir + "/kubeconfig",
	}
}

func TestRunErrors(t *testing.T) {
	dir := t.TempDir()
	tests := []struct {
		name string
		args []string
		want string
	}{
		{"node name", []string{"--node-name=Node_1"}, "is no node name"},
		{"kubelet directory", []string{"--node-name=n", "--kubelet-dir=" + dir + "/absent", "--cgroup-root=" + dir}, "--kubelet-dir: stat"},
		{"kubeconfig", []string{"--node-name=n", "--kubelet-dir=" + dir, "--cgroup-root=" + dir, "--kubeconfig=" + dir + "/absent"}, "configure API client"},
		{"simulate", []string{"simulate", "--profile=l4x4"}, "--profile and --root are required"},
		{"simulate what", []string{"simulate", "--profile=none", "--root=" + dir}, "simulate: "},
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
	if err := run(t.Context(), []string{"stacks"}, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "not kubelet-plugin") {
		t.Errorf("stacks: %v", err)
	}
	for _, args := range [][]string{{"-h"}, {"simulate", "-h"}} {
		if err := run(t.Context(), args, io.Discard, io.Discard); !errors.Is(err, flag.ErrHelp) {
			t.Errorf("%v: got %v", args, err)
		}
	}
}

// TestStacks: a process that waits for the driver writes its stacks at SIGUSR2, and goes on.
func TestStacks(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], flagsOfANode(t)...)
	cmd.Env = append(os.Environ(), asAgent+"=1")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var lines []string
	wrote := false
	for scanner := bufio.NewScanner(stderr); scanner.Scan(); {
		lines = append(lines, scanner.Text())
		var next os.Signal
		switch {
		case strings.Contains(scanner.Text(), `"Starting"`):
			next = syscall.SIGUSR2
		case strings.Contains(scanner.Text(), "End of the stacks"):
			wrote, next = true, syscall.SIGTERM
		default:
			continue
		}
		if err := cmd.Process.Signal(next); err != nil {
			t.Error(err)
		}
	}
	if err := cmd.Wait(); err != nil || !wrote {
		t.Errorf("wrote its stacks: %t, then ended by SIGTERM: %v\n%s", wrote, err, strings.Join(lines, "\n"))
	}
}

func TestProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	command := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, os.Args[0], args...)
		cmd.Env = append(os.Environ(), asAgent+"=1")
		return cmd
	}
	if out, err := command("--help").CombinedOutput(); err != nil || !bytes.Contains(out, []byte("-kubelet-dir")) || !bytes.Contains(out, []byte("kubelet-plugin inspect")) {
		t.Errorf("help: %v\n%s", err, out)
	}
	out, err := command("--node-name=n", "--unknown").CombinedOutput()
	if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.ExitCode() != 1 || !bytes.Contains(out, []byte("kubelet-plugin: flag provided but not defined: -unknown")) {
		t.Errorf("unknown flag: %v\n%s", err, out)
	}
	cmd := command(flagsOfANode(t)...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waiting := false
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		if strings.Contains(lines.Text(), `"Waiting" for="driver"`) {
			waiting = true
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
	}
	if err := cmd.Wait(); err != nil || !waiting {
		t.Errorf("waited: %v, then ended by SIGTERM: %v", waiting, err)
	}
}
