// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	podA      = "0a1b2c3d-1111-2222-3333-444455556666"
	podB      = "0a1b2c3d-1111-2222-3333-444455556667"
	formerPod = "0a1b2c3d-1111-2222-3333-444455556668"
	static    = "3f2e1d0c9b8a77665544332211ffeedd" // as kubelet makes it of a manifest
)

// tree is a cgroup file system in a directory.
type tree struct {
	t    testing.TB
	root string
}

func newTree(t testing.TB) tree { return tree{t, t.TempDir()} }

// v1 makes a cgroup of version 1 with threads in it.
func (f tree) v1(path string, threads ...int) {
	f.t.Helper()
	f.unseen(path, len(threads))
	f.write(filepath.Join(path, "tasks"), lines(threads))
}

// unseen makes a cgroup of version 1 with so many threads in it, of another PID namespace than ours.
func (f tree) unseen(path string, threads int) {
	f.t.Helper()
	dir := filepath.Join(f.root, path)
	must(f.t, os.MkdirAll(dir, 0o755))
	for dir != f.root {
		if strings.HasPrefix(path, "pids/") {
			must(f.t, os.WriteFile(filepath.Join(dir, "pids.current"), fmt.Appendln(nil, threads), 0o600))
		}
		file := filepath.Join(dir, "tasks")
		if _, err := os.Stat(file); err != nil {
			must(f.t, os.WriteFile(file, nil, 0o600))
		}
		dir = filepath.Dir(dir)
	}
}

// v2 makes a cgroup of version 2, and all above it.
func (f tree) v2(path string, populated bool) {
	f.t.Helper()
	must(f.t, os.MkdirAll(filepath.Join(f.root, path), 0o755))
	for p := path; p != "."; p = filepath.Dir(p) {
		f.write(filepath.Join(p, "cgroup.events"), fmt.Sprintf("populated %d\nfrozen 0\n", btoi(populated)))
	}
}

func (f tree) write(path, content string) {
	f.t.Helper()
	must(f.t, os.WriteFile(filepath.Join(f.root, path), []byte(content), 0o600))
}

func (f tree) remove(path string) {
	f.t.Helper()
	must(f.t, os.RemoveAll(filepath.Join(f.root, path)))
}

func lines(numbers []int) string {
	var b strings.Builder
	for _, n := range numbers {
		fmt.Fprintln(&b, n)
	}
	return b.String()
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func underscored(uid string) string { return strings.ReplaceAll(uid, "-", "_") }

// fresh has every answer searched for anew.
func (f tree) fresh() *Cgroups {
	c := NewCgroups(f.root, "")
	c.trust = 0
	return c
}

func TestPodCgroup(t *testing.T) {
	sliceA := "kubepods-burstable-pod" + underscored(podA) + ".slice"
	nestedA := "kubelet-kubepods-besteffort-pod" + underscored(podA) + ".slice"
	deepA := "a-b-kubepods-pod" + underscored(podA) + ".slice"
	tests := []struct {
		name string
		make func(tree)
		uid  string
		want PodCgroup
	}{
		{"v2 cgroupfs, guaranteed, busy", func(f tree) { f.v2("kubepods/pod"+podA+"/container", true) }, podA, CgroupBusy},
		{"v2 cgroupfs, burstable, empty", func(f tree) { f.v2("kubepods/burstable/pod"+podA, false) }, podA, CgroupEmpty},
		{"v2 cgroupfs, another pod", func(f tree) { f.v2("kubepods/burstable/pod"+podB, true) }, podA, CgroupAbsent},
		{"v2 systemd, burstable, busy", func(f tree) {
			f.v2("kubepods.slice/kubepods-burstable.slice/"+sliceA+"/cri-containerd-1.scope", true)
		}, podA, CgroupBusy},
		{"v2 systemd, guaranteed, empty", func(f tree) { f.v2("kubepods.slice/kubepods-pod"+underscored(podA)+".slice", false) }, podA, CgroupEmpty},
		{"v2 systemd below kubelet.slice", func(f tree) {
			f.v2("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"+nestedA, true)
		}, podA, CgroupBusy},
		{"v2 systemd, cgroupRoot of two levels", func(f tree) { f.v2("a.slice/a-b.slice/a-b-kubepods.slice/"+deepA, true) }, podA, CgroupBusy},
		{"v2 cgroupfs, cgroupRoot of two levels", func(f tree) { f.v2("a/b/kubepods/besteffort/pod"+podA, true) }, podA, CgroupBusy},
		{"v2, a static pod", func(f tree) { f.v2("kubepods.slice/kubepods-pod"+static+".slice", true) }, static, CgroupBusy},
		{"v1, a process in one of the hierarchies", func(f tree) {
			f.v1("cpu/kubepods/burstable/pod" + podA)
			f.v1("memory/kubepods/burstable/pod"+podA+"/container", 17)
		}, podA, CgroupBusy},
		{"v1 hybrid, all empty", func(f tree) {
			f.v1("cpu/kubepods/pod" + podA + "/container")
			f.v1("pids/kubepods/pod" + podA + "/container")
			f.v1("systemd/kubepods/pod" + podA)
			f.v2("unified/kubepods/pod"+podA, false)
		}, podA, CgroupEmpty},
		{"v1 hybrid, nothing that counts", func(f tree) {
			f.v1("cpu/kubepods/pod" + podA)
			f.v2("unified/kubepods/pod"+podA, false)
		}, podA, CgroupBusy},
		{"v1, a process that our PID namespace does not have", func(f tree) {
			f.v1("cpu/kubepods/pod" + podA + "/container")
			f.unseen("pids/kubepods/pod"+podA+"/container", 1)
		}, podA, CgroupBusy},
		{"v1, removed from all but one", func(f tree) {
			f.v1("cpu/kubepods/burstable")
			f.v1("pids/kubepods/burstable/pod" + podA)
		}, podA, CgroupEmpty},
		{"v1, cgroupRoot of two levels", func(f tree) { f.v1("cpu,cpuacct/a/b/kubepods/burstable/pod"+podA, 3) }, podA, CgroupBusy},
		{"v1 systemd", func(f tree) { f.v1("cpu/kubepods.slice/kubepods-burstable.slice/"+sliceA+"/cri-1.scope", 3) }, podA, CgroupBusy},
		{"another kubelet's root beside ours", func(f tree) {
			f.v2("kubepods/burstable/pod"+podB, true)
			f.v2("node2/kubepods/burstable/pod"+podA, true)
		}, podA, CgroupBusy},
		{"a UID that begins like another", func(f tree) { f.v2("kubepods/pod"+podA+"0", true) }, podA, CgroupAbsent},
		{"a container that is called like a pod", func(f tree) { f.v2("kubepods/pod"+podB+"/pod"+podA, true) }, podA, CgroupAbsent},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := newTree(t)
			f.v1("devices/system.slice/some.service", 1)
			test.make(f)
			c := NewCgroups(f.root+"/", "")
			for range 2 { // found, and found again
				got, err := c.Pod(test.uid)
				if err != nil || got != test.want {
					t.Fatalf("got %v, %v; want %v", got, err, test.want)
				}
			}
		})
	}
}

func TestCgroupErrorsAreNoAnswer(t *testing.T) {
	tests := []struct {
		name string
		make func(tree)
		uid  string
		want string
	}{
		{"nothing of kubelet", func(f tree) { f.v2("system.slice", true) }, podA, "no kubepods cgroup"},
		{"not there", func(f tree) { f.remove("") }, podA, "no such file"},
		{"no UID", func(f tree) { f.v2("kubepods/pod", false) }, "", "no UID"},
		{"a directory that is no cgroup", func(f tree) { must(f.t, os.MkdirAll(filepath.Join(f.root, "kubepods/pod"+podA), 0o755)) }, podA, "is no cgroup"},
		{"an unreadable file", func(f tree) {
			must(f.t, os.MkdirAll(filepath.Join(f.root, "kubepods/pod"+podA+"/cgroup.events"), 0o755))
		}, podA, "is a directory"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := newTree(t)
			test.make(f)
			got, err := f.fresh().Pod(test.uid)
			if err == nil || !strings.Contains(err.Error(), test.want) || got != CgroupBusy {
				t.Fatalf("got %v, %v; want busy and %q", got, err, test.want)
			}
		})
	}
}

// A kubelet that makes no cgroups for pods leaves those of the kubelet before: no pod counts as gone then.
func TestOwnPodWithoutCgroup(t *testing.T) {
	for name, make := range map[string]func(tree){
		"none at all":                   func(f tree) { f.v2("system.slice/kubelet.service", true) },
		"those of the kubelet before":   func(f tree) { f.v2("kubepods/burstable", false) },
		"and of a pod that it has left": func(f tree) { f.v2("kubepods/burstable/pod"+podB, false) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newTree(t)
			make(f)
			c := NewCgroups(f.root, podA)
			if got, err := c.Pod(formerPod); !errors.Is(err, ErrNoPodCgroups) || got != CgroupBusy {
				t.Errorf("a pod that is gone: %v, %v", got, err)
			}
			if got, err := c.UIDs(); !errors.Is(err, ErrNoPodCgroups) {
				t.Errorf("all: %v, %v", got, err)
			}
			f.v2("kubepods/burstable/pod"+podA, true)
			if got, err := c.Pod(formerPod); err != nil || got != CgroupAbsent {
				t.Errorf("once kubelet makes them: %v, %v", got, err)
			}
		})
	}
}

// A kubelet that comes back with another cgroup driver must not make its pods look gone.
func TestRootsThatComeAndGo(t *testing.T) {
	f := newTree(t)
	c := f.fresh()
	ask := func(want PodCgroup) {
		t.Helper()
		if got, err := c.Pod(podA); err != nil || got != want {
			t.Fatalf("got %v, %v; want %v", got, err, want)
		}
	}
	f.v2("kubepods/burstable/pod"+podB, true)
	ask(CgroupAbsent)
	// Beside the old root, which stays.
	f.v2("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"+underscored(podA)+".slice", true)
	ask(CgroupBusy)
	f.remove("kubepods.slice")
	ask(CgroupAbsent)
	f.remove("kubepods")
	if got, err := c.Pod(podA); err == nil {
		t.Fatalf("got %v without any root", got)
	}
	f.v2("kubepods/pod"+podA, false)
	ask(CgroupEmpty)
}

// While a search is trusted, a root that has vanished still ends it.
func TestVanishedRootIsNoticedAtOnce(t *testing.T) {
	f := newTree(t)
	f.v2("kubepods/pod"+podB, true)
	c := NewCgroups(f.root, "")
	c.trust = 1 << 62
	if _, err := c.Pod(podA); err != nil {
		t.Fatal(err)
	}
	f.remove("kubepods")
	f.v2("kubepods.slice/kubepods-pod"+underscored(podA)+".slice", true)
	if got, err := c.Pod(podA); err != nil || got != CgroupBusy {
		t.Fatalf("got %v, %v", got, err)
	}
}

func TestUIDs(t *testing.T) {
	f := newTree(t)
	f.v1("cpu/kubepods/burstable/pod"+podA, 1)
	f.v1("memory/kubepods/burstable/pod"+podA, 1)
	f.v1("memory/kubepods/pod" + podB)
	f.v1("pids/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + underscored(static) + ".slice")
	got, err := f.fresh().UIDs()
	want := []string{podA, podB, static}
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("got %v, %v; want %v", got, err, want)
	}
}

// Pods come and go while others are looked for; what stays must be found every time.
func TestPodWhileOthersVanish(t *testing.T) {
	f := newTree(t)
	f.v1("cpu/kubepods/burstable/pod"+podA, 1)
	c := f.fresh()
	stop := make(chan struct{})
	var churn sync.WaitGroup
	churn.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			dir := filepath.Join(f.root, "cpu/kubepods/burstable", fmt.Sprintf("pod%036d", i))
			_ = os.MkdirAll(filepath.Join(dir, "container"), 0o755)
			_ = os.RemoveAll(dir)
		}
	})
	for range 500 {
		if got, err := c.Pod(podA); err != nil || got != CgroupBusy {
			t.Errorf("got %v, %v", got, err)
			break
		}
	}
	close(stop)
	churn.Wait()
}

// The real file system of the machine has the files that the fixtures pretend.
func TestRealCgroupFiles(t *testing.T) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip("no cgroups here")
	}
	looked := 0
	for line := range strings.Lines(string(own)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		hierarchy := strings.TrimPrefix(fields[1], "name=")
		dir := filepath.Join("/sys/fs/cgroup", hierarchy, fields[2])
		tasks, _ := os.ReadFile(filepath.Join(dir, "tasks"))
		if len(tasks) == 0 {
			continue // version 2, whose root has no events, or seen from another namespace
		}
		looked++
		if busy, err := hasProcess(dir); err != nil || !busy {
			t.Errorf("%s: busy is %v, %v: this test runs there", dir, busy, err)
		}
	}
	if looked == 0 {
		t.Skip("no cgroup of version 1 that holds this test")
	}
}

func BenchmarkPodOf200(b *testing.B) {
	for _, version := range []string{"v1", "v2"} {
		b.Run(version, func(b *testing.B) {
			f := newTree(b)
			for i := range 200 {
				pod := fmt.Sprintf("kubepods/burstable/pod%036d/container", i)
				if version == "v2" {
					f.v2(pod, true)
					continue
				}
				for _, controller := range []string{"cpu", "memory", "pids", "devices", "systemd"} {
					f.v1(filepath.Join(controller, pod), i+1)
				}
			}
			c := NewCgroups(f.root, "")
			for _, uid := range []string{fmt.Sprintf("%036d", 100), podA} {
				b.Run(map[bool]string{true: "absent", false: "busy"}[uid == podA], func(b *testing.B) {
					for b.Loop() {
						if _, err := c.Pod(uid); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		})
	}
}

// kubelet comes back with --cgroups-per-qos=false while the agent runs, whose own cgroup stays: a new pod has none, and none counts as gone.
func TestRunningPodWithoutCgroup(t *testing.T) {
	for name, c := range map[string]struct {
		pod    *corev1.Pod
		doubts bool
	}{
		"it runs":                   {pod(podB, "b", admitted, ranOnce), true},
		"static":                    {pod("mirror", "b", admitted, ranOnce, mirrorOf(podB)), true},
		"it started nothing":        {pod(podB, "b", admitted), false},
		"it waits":                  {pod(podB, "b", admitted, ranOnce, phase(corev1.PodPending)), false},
		"it has ended":              {pod(podB, "b", admitted, ranOnce, phase(corev1.PodSucceeded)), false},
		"it is being deleted":       {pod(podB, "b", admitted, ranOnce, beingDeleted), false},
		"from before the agent":     {pod(podB, "b", ranOnce, func(p *corev1.Pod) { p.Status.StartTime = &metav1.Time{} }), false},
		"kubelet has not seen it":   {pod(podB, "b", ranOnce), false},
		"it has a cgroup as always": {pod(podA, "a", admitted, ranOnce), false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if c.pod.Status.StartTime != nil && !c.pod.Status.StartTime.IsZero() {
					now := metav1.Now()
					c.pod.Status.StartTime = &now
				}
				f := newTree(t)
				f.v2("kubepods/burstable/pod"+podA, true)
				p := known(t, f, c.pod)
				p.cgroups.own = podA
				if err := p.CheckCgroups(); err != nil {
					t.Errorf("at first: %v", err)
				}
				time.Sleep(reportDelay)
				err := p.CheckCgroups()
				if c.doubts != errors.Is(err, ErrNoPodCgroups) || !c.doubts && err != nil || c.doubts && !strings.Contains(err.Error(), "pod apps/b runs without a cgroup") {
					t.Errorf("after a minute: %v", err)
				}
				want := CgroupAbsent
				if c.doubts {
					want = CgroupBusy
				}
				if got, err := p.cgroups.Pod(formerPod); got != want || (err != nil) != c.doubts {
					t.Errorf("a pod that is gone: %v, %v", got, err)
				}
				if uids, err := p.cgroups.UIDs(); (err != nil) != c.doubts {
					t.Errorf("all: %v, %v", uids, err)
				}
				f.v2("kubepods/burstable/pod"+podB, true)
				if err := p.CheckCgroups(); err != nil {
					t.Errorf("with its cgroup: %v", err)
				}
				if got, err := p.cgroups.Pod(formerPod); got != CgroupAbsent || err != nil {
					t.Errorf("a pod that is gone, then: %v, %v", got, err)
				}
			})
		})
	}
}
