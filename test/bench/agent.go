// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/test/kubelet"
)

// node is the machine the agent believes to be on.
type node struct {
	name, dir, agent, hook string
	// programs is that of the simulated machines' driver.
	programs string
	cluster  *cluster.Cluster
}

func (n *node) path(elements ...string) string {
	return filepath.Join(append([]string{n.dir}, elements...)...)
}

// prepare makes the directories and the simulated machines.
func (n *node) prepare(ctx context.Context, profiles ...string) error {
	for _, dir := range []string{n.runDir(), n.path("cgroup", "kubepods", "burstable"), n.path("cgroup", "kubepods", "besteffort")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make node: %w", err)
		}
	}
	// The ledger's records and CDI specs lie on a tmpfs on a real node.
	if err := syscall.Mount("tmpfs", n.runDir(), "tmpfs", 0, "size=16m"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", n.runDir(), err)
	}
	for _, profile := range profiles {
		cmd := exec.CommandContext(ctx, n.agent, "simulate", "--profile", profile, "--root", n.path(profile), "--node-name", n.name,
			"--programs", n.programs)
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("simulate %s: %w: %s", profile, err, output)
		}
	}
	return nil
}

func (n *node) remove() error {
	err := syscall.Unmount(n.runDir(), 0)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOENT) { // never mounted
		err = nil
	}
	if err != nil {
		return fmt.Errorf("unmount %s: %w", n.runDir(), err)
	}
	return os.RemoveAll(n.dir)
}

func (n *node) runDir() string { return n.path("run") }
func (n *node) cdiDir() string { return n.path("run", "cdi") }

// holds counts the ledger's records of a kind of holder, and answers when the newest was written. An empty kind is all kinds.
func (n *node) holds(kind ledger.Kind) (count int, newest time.Time, err error) {
	entries, err := os.ReadDir(filepath.Join(n.runDir(), "holds"))
	if err != nil {
		return 0, time.Time{}, fmt.Errorf("look into the ledger: %w", err)
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || !strings.HasPrefix(entry.Name(), string(kind)) {
			continue // it has gone, or is another's
		}
		count++
		if info.ModTime().After(newest) {
			newest = info.ModTime()
		}
	}
	return count, newest, nil
}

// agent is one process of the shipped binary.
type agent struct {
	cmd     *exec.Cmd
	started time.Time
	ended   chan error
	log     *bytes.Buffer
}

// start runs the agent in the network of the API server until stop, whatever happens to ctx.
func (n *node) start(ctx context.Context, m machine, mode config.Mode) (*agent, error) {
	root := n.path(m.profile)
	cmd, err := n.cluster.Command(context.WithoutCancel(ctx), n.agent, append([]string{
		"--node-name=" + n.name, "--kubeconfig=" + n.cluster.Kubeconfig(), "--kubelet-dir=" + n.path("kubelet"), "--run-dir=" + n.runDir(),
		"--cdi-dir=" + n.cdiDir(), "--cgroup-root=" + n.path("cgroup"), "--nvml=simulated:" + m.profile,
		"--driver-root=" + filepath.Join(root, "driver"), "--dev-root=" + filepath.Join(root, "driver"), "--sysfs-root=" + filepath.Join(root, "sys"),
		"--cdi-hook=install", "--cdi-hook-source=" + n.hook, "--mode=" + string(mode)}, m.flags...)...)
	if err != nil {
		return nil, err
	}
	a := &agent{cmd: cmd, ended: make(chan error, 1), log: &bytes.Buffer{}}
	cmd.Stdout, cmd.Stderr = a.log, a.log
	a.started = time.Now()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start agent: %w", err)
	}
	go func() { a.ended <- cmd.Wait() }()
	return a, nil
}

// stopPatience is how long the agent may take to leave.
const stopPatience = 20 * time.Second

// stop ends the process as kubelet would, and reports one that has to be killed or complains.
func (a *agent) stop() error {
	_ = a.cmd.Process.Signal(syscall.SIGTERM) // it may have ended; ended tells
	select {
	case err := <-a.ended:
		if err != nil {
			return fmt.Errorf("agent: %w\n%s", err, a.log)
		}
		return nil
	case <-time.After(stopPatience):
		_ = a.cmd.Process.Kill()
		<-a.ended
		return fmt.Errorf("agent did not stop within %s\n%s", stopPatience, a.log)
	}
}

// await waits until both of the agent's APIs are registered that its mode has. The DRA driver registers in every mode.
func (a *agent) await(ctx context.Context, k *kubelet.Kubelet, mode config.Mode) (kubelet.Driver, kubelet.DevicePlugin, error) {
	failures := len(k.Failures())
	for {
		changed := k.Changed()
		driver, hasDriver := k.Driver(driverName)
		plugin, hasPlugin := k.DevicePlugin(resourceName)
		if hasDriver && driver.Identified.After(a.started) && (!mode.Limits() || hasPlugin && plugin.Registered.After(a.started)) {
			return driver, plugin, nil
		}
		if all := k.Failures(); len(all) > failures {
			return driver, plugin, fmt.Errorf("await the agent's registration: %w", all[failures])
		}
		select {
		case <-changed:
		case err := <-a.ended:
			a.ended <- err
			return driver, plugin, fmt.Errorf("await the agent's registration: the agent has ended: %w\n%s", err, a.log)
		case <-ctx.Done():
			return driver, plugin, fmt.Errorf("await the agent's registration: %w", context.Cause(ctx))
		}
	}
}
