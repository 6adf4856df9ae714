// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

func TestConfigComplete(t *testing.T) {
	for name, test := range map[string]struct {
		config Config
		want   []string
	}{
		"defaults":       {config: Config{Dir: "x"}},
		"no directory":   {config: Config{}, want: []string{"dir: missing"}},
		"below run":      {config: Config{Dir: "/run/x"}, want: []string{`dir "/run/x": below /run`}},
		"nodes alone":    {config: Config{Dir: "x", APIServerOnly: true, Nodes: []NodeConfig{{Name: "a"}}}, want: []string{"nodes: apiServerOnly and noNodes have none"}},
		"bad version":    {config: Config{Dir: "x", KubernetesVersion: "1.37"}, want: []string{`kubernetesVersion: kubernetes version "1.37"`}},
		"old version":    {config: Config{Dir: "x", KubernetesVersion: "v1.33.1"}, want: []string{"older than v1.34"}},
		"old node":       {config: Config{Dir: "x", Nodes: []NodeConfig{{Name: "a", KubernetesVersion: "v1.9.0"}}}, want: []string{"nodes[0].kubernetesVersion"}},
		"no runtime":     {config: Config{Dir: "x", ContainerRuntime: "youki"}, want: []string{`nodes[0].containerRuntime "youki"`}},
		"bad name":       {config: Config{Dir: "x", Nodes: []NodeConfig{{Name: "A"}}}, want: []string{`nodes[0].name "A"`}},
		"equal names":    {config: Config{Dir: "x", Nodes: []NodeConfig{{Name: "a"}, {Name: "a"}}}, want: []string{`nodes[1].name "a": taken`}},
		"reserved name":  {config: Config{Dir: "x", Nodes: []NodeConfig{{Name: controlName}}}, want: []string{"taken"}},
		"too many":       {config: Config{Dir: "x", Nodes: make([]NodeConfig, maxNodes+1)}, want: []string{"more than 100"}},
		"relative mount": {config: Config{Dir: "x", Nodes: []NodeConfig{{Name: "a", Mounts: []Mount{{Source: "b", Target: "/c"}}}}}, want: []string{"nodes[0].mounts[0]"}},
		"white space":    {config: Config{Dir: "x", Nodes: []NodeConfig{{Name: "a", Mounts: []Mount{{Source: "/b c", Target: "/c"}}}}}, want: []string{"white space"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.config.complete()
			if (err != nil) != (len(test.want) > 0) {
				t.Fatalf("complete: %v", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
		})
	}
}

func TestConfigCompleteLeavesCallersNodesAlone(t *testing.T) {
	nodes := []NodeConfig{{Name: "a"}}
	config := Config{Dir: t.TempDir(), Nodes: nodes}
	if err := config.complete(); err != nil {
		t.Fatal(err)
	}
	if nodes[0].KubernetesVersion != "" || config.Nodes[0].KubernetesVersion == "" {
		t.Errorf("caller's node has version %q, ours %q", nodes[0].KubernetesVersion, config.Nodes[0].KubernetesVersion)
	}
}

func TestConfigSurvivesDisk(t *testing.T) {
	want := Config{Dir: t.TempDir(), FeatureGates: map[string]bool{"B": false, "A": true}, APIServerArgs: []string{"--v=2"}, AuditPolicy: "p",
		Nodes: []NodeConfig{{Name: "a", Kubelet: map[string]any{"x": map[string]any{"y": "z"}}, Labels: map[string]string{"l": "v"},
			Mounts: []Mount{{Source: "/s", Target: "/t", ReadOnly: true}}}}}
	if err := want.complete(); err != nil {
		t.Fatal(err)
	}
	if err := want.save(); err != nil {
		t.Fatal(err)
	}
	got, err := readConfig(want.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("config differs (-want +got):\n%s", diff)
	}
	if gates := got.featureGates(); gates != "A=true,B=false" {
		t.Errorf("feature gates %q", gates)
	}
}

func TestDirBelongsToOneConfiguration(t *testing.T) {
	dir := t.TempDir()
	first := must(New(Config{Dir: dir, Nodes: []NodeConfig{{Name: "a", Kubelet: map[string]any{"x": 1, "y": 2}}}}))
	for range 2 {
		if err := first.claimDir(); err != nil {
			t.Fatal(err)
		}
	}
	if err := must(Open(dir, nil)).claimDir(); err != nil {
		t.Errorf("the same cluster, opened: %v", err)
	}
	other := must(New(Config{Dir: dir, Nodes: []NodeConfig{{Name: "b"}}}))
	if err := other.claimDir(); !errors.Is(err, ErrAnotherCluster) {
		t.Errorf("another cluster: %v", err)
	}
}

func TestOpenWithoutCluster(t *testing.T) {
	if _, err := Open(t.TempDir(), nil); !errors.Is(err, ErrNoCluster) {
		t.Errorf("open an empty directory: %v, want ErrNoCluster", err)
	}
}

func TestMerge(t *testing.T) {
	config := map[string]any{"keep": 1, "drop": 2, "map": map[string]any{"a": 1, "b": 2}, "scalar": 1}
	merge(config, map[string]any{"drop": nil, "map": map[string]any{"b": 3}, "scalar": map[string]any{"now": "map"}, "new": true})
	want := map[string]any{"keep": 1, "map": map[string]any{"a": 1, "b": 3}, "scalar": map[string]any{"now": "map"}, "new": true}
	if diff := cmp.Diff(want, config); diff != "" {
		t.Errorf("merged config differs (-want +got):\n%s", diff)
	}
}

func TestKubeletConfig(t *testing.T) {
	c, err := New(Config{Dir: t.TempDir(), FeatureGates: map[string]bool{"G": true},
		Nodes: []NodeConfig{{Name: "a", Kubelet: map[string]any{"cpuManagerPolicy": "static", "serializeImagePulls": nil}}}})
	if err != nil {
		t.Fatal(err)
	}
	data, err := c.Node("a").kubeletConfig()
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := yaml.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if _, has := got["serializeImagePulls"]; has || got["cpuManagerPolicy"] != "static" || got["cgroupDriver"] != "cgroupfs" ||
		!cmp.Equal(got["featureGates"], map[string]any{"G": true}) {
		t.Errorf("kubelet configuration:\n%s", data)
	}
}

func TestParseStat(t *testing.T) {
	for state, test := range map[string]struct {
		threads string
		ended   bool
	}{
		"S": {threads: "9"}, "T": {threads: "1"},
		// Its first thread has ended, others have not.
		"Z": {threads: "2"},
		"X": {threads: "1", ended: true},
	} {
		line := "77 (a) b (c d) " + state + " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 " + test.threads + " 18 4711 20 21\n"
		got, err := parseStat(line)
		if err != nil || got.started != 4711 || got.ended() != test.ended {
			t.Errorf("parse %q: %+v, ended %t, %v", line, got, got.ended(), err)
		}
	}
	if !(stat{state: 'Z', threads: 1}).ended() {
		t.Error("a zombie runs")
	}
	if _, err := parseStat("1 (x) S 1"); err == nil {
		t.Error("a short line parses")
	}
}

func TestProcessIsNotItsSuccessor(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	real, err := identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]process{
		"started earlier": {Pid: real.Pid, Started: real.Started - 1, Boot: real.Boot},
		"before a reboot": {Pid: real.Pid, Started: real.Started, Boot: "another"},
		"no process":      {},
	} {
		if err := other.signal(syscall.SIGKILL); !errors.Is(err, errGone) {
			t.Errorf("%s: signalled: %v", name, err)
		}
		if err := other.kill(t.Context()); err != nil {
			t.Errorf("%s: kill: %v", name, err)
		}
	}
	if !real.alive() {
		t.Fatal("the process was killed under a wrong name")
	}
	if err := real.kill(t.Context()); err != nil || real.alive() {
		t.Errorf("kill: %v, alive %t", err, real.alive())
	}
}

func TestProgramsInheritNoFiles(t *testing.T) {
	files := make([]int, 2)
	// As make opens those of its job server: a program that it starts inherits them.
	if err := unix.Pipe2(files, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(files[0])
	defer unix.Close(files[1])
	pipe := must(os.Readlink(fmt.Sprintf("/proc/self/fd/%d", files[0])))
	inherits := func() bool {
		return strings.Contains(string(must(exec.Command("ls", "-l", "/proc/self/fd").Output())), pipe)
	}
	if !inherits() {
		t.Fatal("a program does not inherit files in the first place")
	}
	if err := keepFiles(); err != nil {
		t.Fatal(err)
	}
	if inherits() {
		t.Error("a program has inherited a file")
	}
}

func TestWaitGivesUpWithContext(t *testing.T) {
	me, err := identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := me.wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait for ourselves: %v", err)
	}
}

func TestInThreadLeavesNoThreadChanged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("makes namespaces: needs root")
	}
	before := must(os.Readlink("/proc/self/ns/uts"))
	var changed sync.Map
	for range 50 {
		var group errgroup.Group
		for range 8 {
			group.Go(func() error {
				return inThread(func() error {
					changed.Store(unix.Gettid(), true)
					return unix.Unshare(unix.CLONE_NEWUTS)
				})
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if _, used := changed.Load(os.Getpid()); used {
		t.Error("the first thread was used")
	}
	if after := must(os.Readlink("/proc/self/ns/uts")); after != before {
		t.Errorf("the process moved from %s to %s", before, after)
	}
	want := errors.New("no")
	if err := inThread(func() error { return want }); !errors.Is(err, want) {
		t.Errorf("error of the work: %v", err)
	}
}

// TestHooksOfCrun has a hook that reads nothing, which crun fails at only now and then, and one that reads a state larger than a pipe.
func TestHooksOfCrun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("makes namespaces: needs root")
	}
	if _, err := os.Stat("/usr/bin/crun"); err != nil {
		t.Skip("needs crun:", err)
	}
	dir := t.TempDir()
	script := filepath.Join(dir, "crun")
	bundle := filepath.Join(dir, "bundle")
	for _, sub := range []string{"bin", "dev", "proc"} {
		if err := os.MkdirAll(filepath.Join(bundle, "rootfs", sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, text := range map[string]string{
		filepath.Join(bundle, "rootfs/bin/never-started"): "",
		script:                           strings.ReplaceAll(crunScript, stateHookPath, filepath.Join(dir, "state-hook")),
		filepath.Join(dir, "state-hook"): stateHook,
		filepath.Join(dir, "reads"):      "#!/bin/sh\nprintf '%s ' \"$0\" \"$@\" \"$SAID\" > " + dir + "/said\ncat >> " + dir + "/said\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	runCrun := func(args ...string) {
		t.Helper()
		// Without a view of cgroups: this machine may have both versions, which crun refuses.
		cmd := exec.Command("unshare", append([]string{"--mount", "sh", "-c", `mount -t tmpfs none /sys/fs/cgroup && exec "$@"`, "sh",
			script, "--cgroup-manager=disabled", "--root", filepath.Join(dir, "root")}, args...)...)
		cmd.Dir = bundle
		// Not a pipe: the container keeps it.
		output := must(os.Create(filepath.Join(dir, "output")))
		defer output.Close()
		cmd.Stdout, cmd.Stderr = output, output
		if err := cmd.Run(); err != nil {
			t.Fatalf("crun %q: %v: %s", args, err, must(os.ReadFile(output.Name())))
		}
	}
	large := strings.Repeat("x", 1<<17)
	spec := map[string]any{
		"ociVersion":  "1.3.0",
		"root":        map[string]any{"path": "rootfs"},
		"mounts":      []any{},
		"process":     map[string]any{"args": []any{"/bin/never-started"}, "cwd": "/", "user": map[string]any{"uid": 0, "gid": 0}},
		"linux":       map[string]any{"namespaces": []any{map[string]any{"type": "pid"}, map[string]any{"type": "mount"}}},
		"annotations": map[string]any{"large": large},
		"hooks": specs.Hooks{CreateContainer: []specs.Hook{
			{Path: "/bin/true", Args: []string{"true", "or", "not"}},
			{Path: filepath.Join(dir, "reads"), Args: []string{"reads", "a b", "c"}, Env: []string{"SAID=$1 'x'", "PATH=/usr/bin:/bin"}},
		}},
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), must(json.Marshal(spec)), 0o644); err != nil {
		t.Fatal(err)
	}
	runCrun("create", "--bundle", bundle, "hooks-"+strconv.Itoa(os.Getpid()))
	t.Cleanup(func() { runCrun("delete", "--force", "hooks-"+strconv.Itoa(os.Getpid())) })
	if err := json.Unmarshal(must(os.ReadFile(filepath.Join(bundle, "config.json"))), &spec); err != nil {
		t.Fatal(err)
	}
	for _, hook := range spec["hooks"].(map[string]any)["createContainer"].([]any) {
		if path := hook.(map[string]any)["path"]; path != filepath.Join(dir, "state-hook") {
			t.Errorf("hook %v was not replaced", path)
		}
	}
	said := string(must(os.ReadFile(filepath.Join(dir, "said"))))
	called, state, _ := strings.Cut(said, "{")
	if want := filepath.Join(dir, "reads") + " a b c $1 'x' "; called != want {
		t.Errorf("the hook was called as %q, want %q", called, want)
	}
	if !json.Valid([]byte("{"+state)) || !strings.Contains(state, large) {
		t.Errorf("the hook read a state of %d bytes", len(state))
	}
}

func TestParseHierarchies(t *testing.T) {
	for name, test := range map[string]struct {
		mountinfo string
		want      []hierarchy
	}{
		"v1, hybrid": {
			mountinfo: `25 1 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw
26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
27 25 0:24 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd
28 25 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
29 25 0:24 / /elsewhere/memory rw - cgroup cgroup rw,memory`,
			want: []hierarchy{{dir: "/sys/fs/cgroup/cpu,cpuacct", options: "cpu,cpuacct"},
				{dir: "/sys/fs/cgroup/systemd", options: "none,name=systemd"}},
		},
		"v2": {
			mountinfo: "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
			want:      []hierarchy{{dir: "/sys/fs/cgroup", v2: true}},
		},
		"none": {mountinfo: "nonsense\n1 2 0:1 / / rw - ext4 /dev/vda rw"},
	} {
		t.Run(name, func(t *testing.T) {
			got := parseHierarchies(strings.Split(test.mountinfo, "\n"))
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(hierarchy{})); diff != "" {
				t.Errorf("hierarchies differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestIdentities(t *testing.T) {
	c, err := New(Config{Dir: t.TempDir(), Nodes: []NodeConfig{{Name: "a"}, {Name: "b"}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.writeIdentities(); err != nil {
		t.Fatal(err)
	}
	ca := readCertificate(t, c.control.path(pkiDir+"/ca.crt"))
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	server := readCertificate(t, c.control.path(pkiDir+"/apiserver.crt"))
	kubelet := readCertificate(t, c.Node("b").machine.path(pkiDir+"/kubelet.crt"))
	for _, name := range []string{controlIP, serviceIP, "kubernetes.default.svc"} {
		if _, err := server.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
			t.Errorf("API server as %s: %v", name, err)
		}
	}
	if _, err := kubelet.Verify(x509.VerifyOptions{Roots: roots, DNSName: nodeIP(1)}); err != nil {
		t.Errorf("kubelet of b: %v", err)
	}
	if subject := kubelet.Subject; subject.CommonName != "system:node:b" || len(subject.Organization) != 1 || subject.Organization[0] != "system:nodes" {
		t.Errorf("kubelet of b is %v", subject)
	}
	if config, err := c.RESTConfig(); err != nil || config.Dial == nil {
		t.Errorf("client configuration: %v", err)
	}
}

func readCertificate(t *testing.T, path string) *x509.Certificate {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestRemoveDiskRefusesMounts(t *testing.T) {
	err := removeDisk("/proc")
	if err == nil || !strings.Contains(err.Error(), "mounted") {
		t.Fatalf("remove a mount point: %v", err)
	}
	dir := filepath.Join(t.TempDir(), "a")
	if err := os.MkdirAll(filepath.Join(dir, "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := removeDisk(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("directory is still there: %v", err)
	}
}

func TestMakeDiskTwice(t *testing.T) {
	root := filepath.Join(t.TempDir(), "rootfs")
	for range 2 {
		if err := makeDisk(root, "a"); err != nil {
			t.Fatal(err)
		}
	}
	if target, err := os.Readlink(filepath.Join(root, "var/run")); err != nil || target != "/run" {
		t.Errorf("/var/run leads to %q: %v", target, err)
	}
	if _, err := os.Stat(filepath.Join(root, "etc/shadow")); err == nil {
		t.Error("the host's secrets were copied")
	}
}

func TestAPIServerOnly(t *testing.T) {
	c := must(New(Config{Dir: t.TempDir(), APIServerOnly: true}))
	if len(c.Nodes()) != 0 || c.Component(Scheduler) != nil || c.Component(ControllerManager) != nil {
		t.Errorf("%d nodes, components %v", len(c.Nodes()), c.components)
	}
	if c.Component(Etcd) == nil || c.Component(APIServer) == nil {
		t.Error("etcd or kube-apiserver is missing")
	}
	if err := c.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}
