// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// ErrNoProcess means that a pod has no process on the node, or none any more.
var ErrNoProcess = errors.New("the pod has no process")

// Hung are the processes of a pod that do not end.
type Hung struct {
	// State is what the kernel reports of the processes: "D", or "not D".
	State string
	end   func(context.Context) error
}

// End lets the processes end. It is idempotent, and works after the context of Hang is done.
func (h Hung) End(ctx context.Context) error { return h.end(context.WithoutCancel(ctx)) }

// Hang keeps a pod's processes from ending, as an Xid does, until Hung.End. With cgroup v1 the pod is frozen: its processes are in
// state D, and SIGKILL stays pending. runc thaws only the container's own cgroup before it kills. Frozen processes of cgroup v2 can be
// killed, so there the shim is stopped, which does the killing. The error is ErrNoProcess if the pod has ended. Safe for concurrent use.
func Hang(ctx context.Context, node *cluster.Node, uid string) (Hung, error) {
	uid = strings.ReplaceAll(uid, "_", "-")
	text, err := run(ctx, node, "sh", "-c", findFreezers, "pod"+uid)
	if err != nil {
		return Hung{}, err
	}
	found := strings.Fields(text)
	if len(found) == 0 {
		shim, err := ShimOf(ctx, node, uid)
		if err == nil {
			_, err = run(ctx, node, "kill", "-STOP", shim)
		}
		return Hung{State: "not D", end: func(ctx context.Context) error {
			_, err := run(ctx, node, "sh", "-c", "kill -CONT $0 2> /dev/null || true", shim)
			return err
		}}, err
	}
	slices.SortFunc(found, func(a, b string) int { return len(a) - len(b) })
	freezer := found[0]
	if !strings.HasPrefix(path.Base(path.Dir(freezer)), "pod") {
		return Hung{}, fmt.Errorf("hang pod %s: its freezer is not %s", uid, freezer)
	}
	set := func(state string) error {
		root, err := node.Root()
		if err != nil {
			return err
		}
		// A file of a cgroup cannot be created, so none is.
		return os.WriteFile(filepath.Join(root, freezer), []byte(state), 0o644)
	}
	if err := set("FROZEN"); errors.Is(err, fs.ErrNotExist) {
		return Hung{}, fmt.Errorf("hang pod %s: %w", uid, ErrNoProcess)
	} else if err != nil {
		return Hung{}, fmt.Errorf("hang pod %s: %w", uid, err)
	}
	return Hung{State: "D", end: func(context.Context) error {
		// The cgroup is gone if the node has rebooted.
		if err := set("THAWED"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("end hung pod %s: %w", uid, err)
		}
		return nil
	}}, nil
}

// findFreezers prints the freezers of cgroup v1 below a directory name. A cgroup may vanish meanwhile.
const findFreezers = `find /sys/fs/cgroup -path "*$0*" -name freezer.state 2> /dev/null || true`

// EndHung lets all processes of the node's pods end that an earlier Hang has stopped. It is idempotent.
func EndHung(ctx context.Context, node *cluster.Node) error {
	_, err := run(ctx, node, "sh", "-c", `for f in $(`+findFreezers+`); do echo THAWED > $f; done 2> /dev/null
		pkill -CONT -x containerd-shim || true`, "kubepods")
	return err
}

// ShimOf returns the process between the runtime and a pod, by its number on the node. While it is stopped, the pod's containers cannot
// be ended. The error is ErrNoProcess if the pod has none.
func ShimOf(ctx context.Context, node *cluster.Node, uid string) (string, error) {
	// cgroup v1 has the pod in several hierarchies, all with the same processes.
	const script = `for f in $(find /sys/fs/cgroup -path "*$0*" -name cgroup.procs 2> /dev/null); do cat $f 2> /dev/null; done |
		sort -nu | while read p; do awk '{print $4}' /proc/$p/stat 2> /dev/null; done | sort -n | uniq -c | sort -rn`
	parents, err := run(ctx, node, "sh", "-c", script, strings.ReplaceAll(uid, "_", "-"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(parents) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		name, err := run(ctx, node, "sh", "-c", "cat /proc/"+fields[1]+"/comm 2> /dev/null || true")
		if err != nil {
			return "", err
		}
		if strings.HasPrefix(name, "containerd-shim") {
			return fields[1], nil
		}
	}
	return "", fmt.Errorf("find the shim of pod %s: %w", uid, ErrNoProcess)
}
