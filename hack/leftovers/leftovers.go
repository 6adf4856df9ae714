// SPDX-License-Identifier: Apache-2.0

// Package leftovers gives a run of tests a directory for temporary files, clusters among them. It removes what killed runs have left: their
// processes, clusters and files, and a limit of the machine that they had raised. It starts nothing.
package leftovers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/filelock"
)

const (
	// prefix begins the names of directories of runs, before the number of the process.
	prefix = "tandem-run-"
	// lockFile is locked in the directory of a run until its process ends.
	lockFile = "lock"
	// turnFile is locked, beside the directories, while a run begins or ends.
	turnFile = "tandem-runs.lock"
	// recordFile says, beside the directories, that the limit is raised.
	recordFile = "tandem-inotify"
)

// instances bounds the inotify instances of all processes of a user, 128 by default (inotify(7)). It belongs to the machine as a whole,
// namespaces or not.
const instances = "/proc/sys/fs/inotify/max_user_instances"

// Run is a run of tests. Commands of hack make one and call its methods one after the other.
type Run struct {
	// Dir is for temporary files: programs of the run have it in their environment (Env). Clusters are in directories "cluster" of
	// directories in it.
	Dir string

	// tmp has the directories of all runs, limit is the limit's file.
	tmp, limit string
	out        io.Writer
	lock       *os.File
}

// Begin removes what killed runs have left, after it has said so to out, and makes the directory of a run, for End to remove.
func Begin(ctx context.Context, out io.Writer) (*Run, error) {
	return begin(ctx, os.TempDir(), instances, out)
}

func begin(ctx context.Context, tmp, limit string, out io.Writer) (*Run, error) {
	r := &Run{Dir: filepath.Join(tmp, prefix+strconv.Itoa(os.Getpid())), tmp: tmp, limit: limit, out: out}
	unlock, err := filelock.Wait(ctx, filepath.Join(tmp, turnFile))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := r.removeDead(ctx); err != nil {
		return nil, err
	}
	if err := os.Mkdir(r.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of the run: %w", err)
	}
	// Clusters make and remove files all the time, which takes a multiple on ext4.
	if os.Geteuid() == 0 {
		if err := unix.Mount("tmpfs", r.Dir, "tmpfs", 0, "mode=755"); err != nil {
			return nil, fmt.Errorf("mount tmpfs on %s: %w", r.Dir, err)
		}
	}
	if r.lock, err = lock(r.Dir, os.O_CREATE); err != nil {
		return nil, err
	}
	return r, nil
}

// Env is the variable that makes programs put their temporary files into the directory. Processes that have it belong to the run.
func (r *Run) Env() string { return variable(r.Dir) }

func variable(dir string) string { return "TMPDIR=" + dir }

// End removes the directory, and what killed programs of the run have left in it. The last run resets the limit.
func (r *Run) End(ctx context.Context) error {
	unlock, err := filelock.Wait(ctx, filepath.Join(r.tmp, turnFile))
	if err != nil {
		return err
	}
	defer unlock()
	if err := r.remove(ctx, r.Dir); err != nil {
		return err
	}
	r.lock.Close()
	if _, alive, err := r.runs(); err != nil || alive > 0 {
		return err
	}
	return r.resetLimit()
}

// removeDead removes what killed runs have left. Only the last of the runs resets the limit.
func (r *Run) removeDead(ctx context.Context) error {
	dead, alive, err := r.runs()
	if err != nil {
		return err
	}
	for _, dir := range dead {
		if err := r.remove(ctx, dir); err != nil {
			return err
		}
	}
	if alive > 0 {
		return nil
	}
	return r.resetLimit()
}

// runs are the directories of dead runs, and how many runs are alive.
func (r *Run) runs() (dead []string, alive int, err error) {
	dirs, err := filepath.Glob(filepath.Join(r.tmp, prefix+"*"))
	if err != nil {
		return nil, 0, fmt.Errorf("list runs: %w", err)
	}
	for _, dir := range dirs {
		file, err := lock(dir, 0)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			alive++
			continue
		case err == nil:
			file.Close()
		case !errors.Is(err, fs.ErrNotExist): // killed before it made the file
			return nil, 0, err
		}
		dead = append(dead, dir)
	}
	return dead, alive, nil
}

// lock takes the lock of a run. It fails with EWOULDBLOCK where the run is alive.
func lock(dir string, flags int) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|unix.O_CLOEXEC|flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of run: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("lock run %s: %w", dir, err)
	}
	return file, nil
}

// remove ends what belongs to a run and removes its directory. It says so where the run is another one.
func (r *Run) remove(ctx context.Context, dir string) error {
	clusters, err := filepath.Glob(filepath.Join(dir, "*", "cluster"))
	if err != nil {
		return fmt.Errorf("list clusters of run: %w", err)
	}
	processes := processesOf(dir)
	if dir != r.Dir || len(clusters)+len(processes) > 0 {
		fmt.Fprintf(r.out, "removing what was left in %s: processes %v, clusters %v\n", dir, processes, clusters)
	}
	for _, pid := range processes {
		if err := kill(ctx, pid, dir); err != nil {
			return err
		}
	}
	for _, dir := range clusters {
		c, err := cluster.Open(dir, r.out)
		if errors.Is(err, cluster.ErrNoCluster) {
			continue
		}
		if err != nil {
			return err
		}
		if err := c.Stop(ctx); err != nil {
			return fmt.Errorf("remove cluster in %s: %w", dir, err)
		}
	}
	// EINVAL: nothing is mounted there.
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("unmount directory of run %s: %w", dir, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove directory of run: %w", err)
	}
	return nil
}

// processesOf are the processes that have the run's variable. Those of clusters do not: their environment is that of a node.
func processesOf(dir string) (pids []int) {
	entries, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	for _, entry := range entries {
		if pid, err := strconv.Atoi(filepath.Base(entry)); err == nil && pid != os.Getpid() && belongs(pid, dir) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}

// belongs is false for a process that has ended: it has no environment any more.
func belongs(pid int, dir string) bool {
	environ, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	return err == nil && bytes.Contains(append([]byte{0}, environ...), []byte("\x00"+variable(dir)+"\x00"))
}

func kill(ctx context.Context, pid int, dir string) error {
	// The handle pins the process: its number cannot come to mean another one between the check and the signal.
	process, err := os.FindProcess(pid)
	if err != nil {
		return nil //nolint:nilerr // it has ended
	}
	defer process.Release()
	for belongs(pid, dir) {
		if err := process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("end process %d of a killed run: %w", pid, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for process %d of a killed run to end: %w", pid, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// Raise makes the limit of inotify instances as large as this, if it is smaller, until the last run ends.
func (r *Run) Raise(least int) error {
	before, err := r.readLimit()
	if err != nil || before >= least {
		return err
	}
	record := fmt.Sprintf("%d %d\n", before, least)
	if err := os.WriteFile(filepath.Join(r.tmp, recordFile), []byte(record), 0o600); err != nil {
		return fmt.Errorf("record limit: %w", err)
	}
	fmt.Fprintf(r.out, "%s is %d meanwhile (%d before)\n", r.limit, least, before)
	return r.setLimit(least)
}

// resetLimit undoes Raise, unless another program has changed the limit since.
func (r *Run) resetLimit() error {
	path := filepath.Join(r.tmp, recordFile)
	record, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read recorded limit: %w", err)
	}
	var before, raised int
	if _, err := fmt.Sscan(string(record), &before, &raised); err == nil {
		now, err := r.readLimit()
		if err == nil && now == raised {
			err = r.setLimit(before)
		}
		if err != nil {
			return err
		}
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove recorded limit: %w", err)
	}
	return nil
}

func (r *Run) readLimit() (int, error) {
	text, err := os.ReadFile(r.limit)
	if err != nil {
		return 0, fmt.Errorf("read limit: %w", err)
	}
	number, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("read limit %s: %w", r.limit, err)
	}
	return number, nil
}

func (r *Run) setLimit(value int) error {
	if err := os.WriteFile(r.limit, []byte(strconv.Itoa(value)+"\n"), 0o644); err != nil {
		return fmt.Errorf("set limit %s to %d: %w", r.limit, value, err)
	}
	return nil
}
