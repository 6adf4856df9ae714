// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A directory in the place of a link keeps no daemon from starting: it is from an earlier version, or from a client's runtime, and a
// client has written to it.
func TestALinkThatIsADirectory(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, PipeDir)
	if err := os.MkdirAll(filepath.Join(link, "a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(link, "psm_1234"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := (Daemon{Dir: dir, Volumes: "/pods/uid"}).link(PipeVolume); err != nil {
			t.Fatal(err)
		}
		if to, err := os.Readlink(link); err != nil || to != "/pods/uid/pipe" {
			t.Errorf("links to %q: %v", to, err)
		}
	}
}

// A client fills the volumes that it shares with its daemon: the daemon's probe says so, and the next start has room again.
func TestAFullVolumeHeals(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pipe := filepath.Join(r.daemon.Root, ClientPipeDir)
	shm := filepath.Join(r.daemon.Root, shmDir)
	small(t, pipe)
	small(t, shm)
	ended, _ := r.run(t)
	r.await(t)
	if err := r.daemon.Answers(t.Context()); err != nil {
		t.Errorf("before: %v", err)
	}
	fill(t, pipe)
	fill(t, shm)
	if err := r.daemon.Answers(t.Context()); !errors.Is(err, errFull) {
		t.Errorf("the probe of a daemon that has no room for pipes: %v", err)
	}
	// kubelet ends the container.
	if err := syscall.Kill(r.pid(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Fatal("the supervisor goes on without a daemon")
	}
	r.run(t)
	r.await(t)
	if err := r.daemon.Answers(t.Context()); err != nil {
		t.Errorf("after: %v", err)
	}
	for _, dir := range []string{pipe, shm} {
		if free, err := room(dir); err != nil || free < 0.5 {
			t.Errorf("%s has %v free: %v", dir, free, err)
		}
	}
	if info, err := os.Stat(pipe); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("clients can create pipes: %v, %v", info.Mode(), err)
	}
}

// small mounts a volume as kubelet does, of 64 KiB.
func small(t *testing.T, dir string) {
	t.Helper()
	mount(t, dir, "size=65536,mode=0777")
}

// mount mounts a tmpfs with options.
func mount(t *testing.T, dir, options string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("a full volume needs a mount, and this machine allows none: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// fill writes to a volume until it is full.
func fill(t *testing.T, dir string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "full"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill %s: %v", dir, err)
	}
}

// TestRoomForFiles: a volume in which no file can be made is full, although it has bytes left.
func TestRoomForFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	mount(t, dir, "size=1m,nr_inodes=10")
	if free, err := room(dir); err != nil || free < 0.5 {
		t.Errorf("%v of an empty volume is free, %v", free, err)
	}
	var err error
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600)
	}
	if free, full := room(dir); !errors.Is(err, unix.ENOSPC) || full != nil || free > 0 {
		t.Errorf("%v of a volume without files is free, %v, after %v", free, full, err)
	}
}

// A client leaves links under the names of the daemon's files, and what else keeps a daemon from starting.
func TestWhatClientsPlant(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pipe, victim := filepath.Join(r.daemon.Root, ClientPipeDir), filepath.Join(r.daemon.Root, "etc/victim")
	names := []string{"nvidia-cuda-mps-control.pid", "control", "control_lock", "log"}
	for _, err := range []error{
		os.MkdirAll(filepath.Dir(victim), 0o755), os.WriteFile(victim, []byte("driver"), 0o600),
		os.MkdirAll(filepath.Join(pipe, "control_privileged", "deep"), 0o700), os.Chmod(filepath.Join(pipe, "control_privileged"), 0),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		if err := os.Symlink("/etc/victim", filepath.Join(pipe, name)); err != nil {
			t.Fatal(err)
		}
	}
	r.run(t)
	r.await(t)
	if text, err := os.ReadFile(victim); err != nil || string(text) != "driver" {
		t.Errorf("the daemon wrote %q through a link: %v", text, err)
	}
}

// A client goes on planting links while its daemon starts, as a loop of a shell would. It sees when the directory is emptied.
func TestWhatClientsPlantDuringTheStart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pipe, victim := filepath.Join(r.daemon.Root, ClientPipeDir), filepath.Join(r.daemon.Root, "etc/victim")
	for _, err := range []error{os.MkdirAll(filepath.Dir(victim), 0o755), os.WriteFile(victim, []byte("driver"), 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	small(t, pipe)
	r.daemon.Grace = shortGrace // a link may keep the daemon from its start
	stop := make(chan struct{})
	var planter sync.WaitGroup
	planter.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Microsecond):
				for _, name := range []string{"nvidia-cuda-mps-control.pid", "control_lock"} {
					_ = os.Symlink("/etc/victim", filepath.Join(pipe, name))
				}
			}
		}
	})
	for range 5 {
		ended, end := r.run(t)
		// The daemon starts, or a link keeps it from that: then kubelet starts the container again.
		for running := true; running; {
			select {
			case <-ended:
				running = false
			case <-time.After(10 * time.Millisecond):
				if ready, err := r.daemon.isReady(); err == nil && ready {
					_ = end()
				}
			}
		}
		if text, err := os.ReadFile(victim); err != nil || string(text) != "driver" {
			t.Fatalf("the daemon wrote %q through a link: %v", text, err)
		}
	}
	close(stop)
	planter.Wait()
	r.run(t)
	r.await(t)
}

// The daemon's mounts of what clients write to open no devices, and keep what the container runtime has set.
func TestMountsOfTheDaemon(t *testing.T) {
	r := newRig(t)
	d := r.daemon
	d.Mounts = t.TempDir()
	var dirs []string
	for _, root := range []string{d.Mounts, d.Root} {
		dirs = append(dirs, filepath.Join(root, ClientPipeDir), filepath.Join(root, shmDir))
	}
	for _, dir := range dirs {
		small(t, dir)
	}
	if err := unix.Mount("", dirs[0], "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOEXEC|unix.MS_NOATIME, ""); err != nil {
		t.Fatal(err)
	}
	d.distrustClients(t.Context())
	for at, dir := range dirs {
		var s unix.Statfs_t
		if err := unix.Statfs(dir, &s); err != nil {
			t.Fatal(err)
		}
		want := int64(stNoSymFollow | unix.ST_NODEV | unix.ST_NOSUID)
		if at == 0 {
			want |= unix.ST_NOEXEC | unix.ST_NOATIME
		}
		if s.Flags&want != want || s.Flags&unix.ST_RDONLY != 0 {
			t.Errorf("%s has the flags %#x, want %#x", dir, s.Flags, want)
		}
	}
	node := filepath.Join(dirs[0], "nvidia-cuda-mps-control.pid")
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	if file, err := os.OpenFile(node, os.O_WRONLY, 0); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a device node that a client planted can be opened: %v", err)
		file.Close()
	}
}

// A client replaces one of its directories by a link while it is emptied.
func TestEmptyFollowsNoLink(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	file := filepath.Join(outside, "file")
	for _, err := range []error{os.WriteFile(file, nil, 0o600), os.Symlink(outside, filepath.Join(dir, "link"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if _, err := emptyOnce(root, "link"); err == nil {
		t.Error("a link was followed")
	}
	if err := empty(dir, removalTimeout); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}
