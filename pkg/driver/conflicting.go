// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// ConflictingDriverError means that another process serves our driver name on this node. kubelet would use the one that registered
// last, and neither would know what the other prepared. Ready returns it.
type ConflictingDriverError struct {
	DriverName string
	// Socket on which the other process answers.
	Socket string
}

// Error names the socket and the remedy.
func (e *ConflictingDriverError) Error() string {
	return fmt.Sprintf("another process serves DRA driver %s on this node at %s: uninstall it (NVIDIA's DRA driver?), or give one of the two another driver name", e.DriverName, e.Socket)
}

// socketTimeout bounds one request to a socket. kubelet allows a second for GetInfo.
const socketTimeout = time.Second

// waitUntilAlone returns true once no other process serves our driver name, and false when ctx is done.
func (d *Driver) waitUntilAlone(ctx context.Context) bool {
	watch := d.watchSockets(ctx)
	defer watch.Close()
	check := conflictCheck{Driver: d}
	for {
		conflicting := check.find(ctx)
		d.setConflicting(ctx, conflicting)
		if ctx.Err() != nil {
			return false
		}
		if conflicting == nil {
			return true
		}
		if !d.waitForSockets(ctx, watch) {
			return false
		}
	}
}

func (d *Driver) setConflicting(ctx context.Context, conflicting *ConflictingDriverError) {
	d.mu.Lock()
	before := d.conflicting
	d.conflicting = conflicting
	d.mu.Unlock()
	switch {
	case conflicting != nil && (before == nil || *before != *conflicting):
		klog.FromContext(ctx).Error(conflicting, "Not serving claims")
		d.Recorder.Event(d.nodeRef, corev1.EventTypeWarning, "ConflictingDriver", conflicting.Error())
	case conflicting == nil && before != nil:
		klog.FromContext(ctx).Info("The conflicting driver ended", "socket", before.Socket)
	}
}

// conflictCheck finds another process that serves our driver name.
type conflictCheck struct {
	*Driver
	// ours is nil while we have no sockets.
	ours *sockets
	// others are registration sockets of other drivers. They are asked once: some plugins log every call.
	others map[string]fileID
}

// find returns the first live socket of our driver name that is not ours, or nil. Only one agent owns the ledger, so no live socket
// belongs to an earlier agent; a dead one (connection refused) is ignored.
func (c *conflictCheck) find(ctx context.Context) *ConflictingDriverError {
	// The helper library names the socket dra.sock, and for rolling updates dra-<pod UID>.sock. Any listener there conflicts.
	services, _ := filepath.Glob(filepath.Join(c.pluginDir(), "dra*.sock")) // the pattern is valid
	for _, path := range append(services, c.registrationSocket()) {
		if !c.ours.owns(path) && listening(ctx, path) {
			return &ConflictingDriverError{DriverName: c.DriverName, Socket: path}
		}
	}
	// A driver may register under any file name, also below a directory.
	others := map[string]fileID{}
	var conflicting *ConflictingDriverError
	_ = filepath.WalkDir(c.registryDir(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSocket == 0 || c.ours.owns(path) {
			return nil // an unreadable or removed file serves nothing
		}
		file, err := identify(path)
		if err != nil {
			return nil
		}
		if c.others[path] == file {
			others[path] = file
			return nil
		}
		info, err := pluginInfo(ctx, path)
		switch {
		case err != nil:
			return nil
		case info.Type == registerapi.DRAPlugin && info.Name == c.DriverName:
			conflicting = &ConflictingDriverError{DriverName: c.DriverName, Socket: path}
			return fs.SkipAll
		}
		others[path] = file
		return nil
	})
	c.others = others
	return conflicting
}

// listening reports whether a process listens on the socket.
func listening(ctx context.Context, path string) bool {
	info, err := os.Stat(path)
	if err != nil || info.Mode()&fs.ModeSocket == 0 {
		return false
	}
	dialer := net.Dialer{Timeout: socketTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		// A full backlog belongs to a live process that does not accept.
		timeout, ok := errors.AsType[net.Error](err)
		return ok && timeout.Timeout() && ctx.Err() == nil
	}
	_ = conn.Close() // nothing was written
	return true
}

// pluginInfo asks a registration socket for its driver, as kubelet does.
func pluginInfo(ctx context.Context, path string) (*registerapi.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial registration socket %s: %w", path, err)
	}
	defer conn.Close()
	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("get info from registration socket %s: %w", path, err)
	}
	return info, nil
}
