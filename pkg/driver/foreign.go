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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// ForeignError says that another process serves our driver name on this node. kubelet would use whichever of the two
// registered last, and neither would know what the other gave out.
type ForeignError struct {
	DriverName string
	// Socket on which the other process answers.
	Socket string
}

// Error says what to do about it.
func (e *ForeignError) Error() string {
	return fmt.Sprintf("another process serves DRA driver %s on this node at %s: uninstall it (NVIDIA's DRA driver?), or give one of the two another driver name", e.DriverName, e.Socket)
}

// answerTimeout bounds one look at one socket. kubelet itself allows a second for GetInfo.
const answerTimeout = time.Second

// awaitAlone returns true as soon as no other process serves our driver name, and false when ctx is done first.
func (d *Driver) awaitAlone(ctx context.Context) bool {
	watch := d.watchSockets(ctx)
	defer watch.close()
	look := lookout{Driver: d}
	for {
		foreign := look.findForeign(ctx)
		d.setForeign(ctx, foreign)
		if ctx.Err() != nil {
			return false
		}
		if foreign == nil {
			return true
		}
		if !watch.await(ctx, d.ForeignInterval) {
			return false
		}
	}
}

func (d *Driver) setForeign(ctx context.Context, foreign *ForeignError) {
	d.mu.Lock()
	before := d.foreign
	d.foreign = foreign
	d.mu.Unlock()
	switch {
	case foreign != nil && (before == nil || *before != *foreign):
		klog.FromContext(ctx).Error(foreign, "Not serving claims")
		d.Recorder.Event(d.nodeRef, corev1.EventTypeWarning, "ForeignDriver", foreign.Error())
	case foreign == nil && before != nil:
		klog.FromContext(ctx).Info("The other process is gone", "socket", before.Socket)
	}
}

// lookout looks for another process that serves our driver name.
type lookout struct {
	*Driver
	// ours is nil while we have no sockets.
	ours *sockets
	// harmless are registration sockets that turned out to be somebody else's. They are asked once: other plugins log every
	// call they get.
	harmless map[string]fileID
}

// findForeign returns the first live socket of our driver name that is not in ours, and nil if there is none. The caller's
// process owns the ledger, so a live socket that it did not open cannot belong to an earlier self; a dead one (connection
// refused) is a leftover and no obstacle.
func (l *lookout) findForeign(ctx context.Context) *ForeignError {
	// At our own paths any listener is in the way, answering or not.
	for _, path := range append(l.serviceSockets(), l.registrationSocket()) {
		if !l.ours.owns(path) && listening(ctx, path) {
			return &ForeignError{DriverName: l.DriverName, Socket: path}
		}
	}
	// A driver may register under any file name, also below a directory.
	harmless := map[string]fileID{}
	var foreign *ForeignError
	_ = filepath.WalkDir(l.registryDir(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSocket == 0 || l.ours.owns(path) {
			return nil // what vanished or cannot be read serves nothing
		}
		file, err := identify(path)
		if err != nil {
			return nil
		}
		if l.harmless[path] == file {
			harmless[path] = file
			return nil
		}
		info, err := pluginInfo(ctx, path)
		switch {
		case err != nil:
			return nil
		case info.Type == registerapi.DRAPlugin && info.Name == l.DriverName:
			foreign = &ForeignError{DriverName: l.DriverName, Socket: path}
			return fs.SkipAll
		}
		harmless[path] = file
		return nil
	})
	l.harmless = harmless
	return foreign
}

// serviceSockets lists the sockets that the helper library may have made below our plugin directory; drivers that update
// by rolling have their pod's UID in the name.
func (d *Driver) serviceSockets() []string {
	found, err := filepath.Glob(filepath.Join(d.pluginDir(), "dra*.sock"))
	if err != nil {
		return nil // only a malformed pattern
	}
	return found
}

// listening reports whether a process accepts connections there.
func listening(ctx context.Context, path string) bool {
	info, err := os.Stat(path)
	if err != nil || info.Mode()&fs.ModeSocket == 0 {
		return false
	}
	dialer := net.Dialer{Timeout: answerTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		var timeout net.Error
		// A full backlog is a process that does not accept, but lives.
		return errors.As(err, &timeout) && timeout.Timeout() && ctx.Err() == nil
	}
	_ = conn.Close() // nothing was written
	return true
}

// pluginInfo asks a registration socket what it is, as kubelet does.
func pluginInfo(ctx context.Context, path string) (*registerapi.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
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

func nodeEventUID(nodeName string) types.UID { return types.UID(nodeName) }
