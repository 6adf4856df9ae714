// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/mps"
)

// NotReadyError reports that the requested daemon was not ready in time. A retry waits for the same daemon.
type NotReadyError struct {
	Daemon string
	// State completes "MPS daemon <name> …".
	State string
	err   error
}

// Error says what to look at.
func (e *NotReadyError) Error() string {
	return fmt.Sprintf("MPS daemon %s %s: %v", e.Daemon, e.State, e.err)
}

// Unwrap returns what ended the wait.
func (e *NotReadyError) Unwrap() error { return e.err }

// daemon is a requested daemon.
type daemon struct {
	settings mps.Settings
	// cancelled is done once the request is cancelled.
	cancelled context.Context
	cancel    context.CancelFunc
	// clients are the client devices by name, with their limit: nil if an earlier process wrote the device. The map is nil before
	// clientDevices has read them.
	clients map[string]*limit
}

// Daemons returns the requested daemons, sorted by name.
func (m *Manager) Daemons() []Daemon {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]Daemon, 0, len(m.daemons))
	for _, name := range slices.Sorted(maps.Keys(m.daemons)) {
		all = append(all, Daemon{name, m.daemons[name].settings})
	}
	return all
}

// request requests a daemon. Needs m.mu, except in NewManager.
func (m *Manager) request(name string, settings mps.Settings) {
	if d, ok := m.daemons[name]; ok {
		if d.settings.Hash() == settings.Hash() {
			return
		}
		d.settings = settings
	} else {
		cancelled, cancel := context.WithCancel(context.Background())
		m.daemons[name] = &daemon{settings: settings, cancelled: cancelled, cancel: cancel}
	}
	m.changed.Notify()
}

// cancelRequest also ends all waits for the daemon.
func (m *Manager) cancelRequest(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d, ok := m.daemons[name]; ok {
		delete(m.daemons, name)
		d.cancel()
		m.changed.Notify()
	}
}

// errCancelled means that the claim was unprepared while a caller waited for its daemon.
var errCancelled = errors.New("its claim was unprepared meanwhile")

// connect waits for a daemon, and returns a client device of it. The caller holds no lock.
func (m *Manager) connect(ctx context.Context, claim Claim, name string, l limit) (clientDevice string, err error) {
	m.mu.Lock()
	d, ok := m.daemons[name]
	if !ok {
		m.mu.Unlock()
		return "", errCancelled
	}
	hash := d.settings.Hash()
	m.mu.Unlock()
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.cancelled, cancel)()
	if _, err := mps.Await(waiting, m.dir(name), hash); err != nil {
		if d.cancelled.Err() != nil {
			return "", errCancelled
		}
		started, heldErr := mps.Held(m.dir(name))
		other, alive, aliveErr := mps.Alive(m.dir(name))
		state := "has not been started"
		switch {
		case alive && other.Hash != hash:
			state = "has other settings than were requested: its pod is about to be replaced, or the controller or " +
				"the GPUNode CRD is of another version than the agent"
		case started:
			log := filepath.Join(m.dir(name), mps.LogDir, "control.log")
			state = fmt.Sprintf("has started and is not ready (its log is %s on the node)", log)
		}
		return "", &NotReadyError{name, state, errors.Join(err, heldErr, aliveErr)}
	}
	m.turn(ctx, "connects to daemon", name+" for "+claim.Name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.daemons[name] != d {
		return "", errCancelled
	}
	if d.clients != nil && d.clients[clientDeviceName(name, l)] == nil {
		// If the claim was unprepared meanwhile, no change of the ledger follows that would remove the device.
		defer m.changed.Notify()
	}
	return m.writeClientDevice(name, l)
}

// Client is what a container needs beside a GPU to share it by MPS.
type Client struct {
	// Env by the names of variables.
	Env map[string]string
	// Mounts are directories of the host by their writable paths in the container.
	Mounts map[string]string
}

// limit is what a client's environment limits it to; zero is no limit.
type limit struct {
	mib     uint64
	threads int
}

func (m *Manager) client(daemon string, l limit) Client {
	c := Client{
		Env: map[string]string{"CUDA_MPS_PIPE_DIRECTORY": mps.ClientPipeDir},
		Mounts: map[string]string{
			mps.ClientPipeDir: filepath.Join(m.dir(daemon), mps.PipeDir),
			"/dev/shm":        filepath.Join(m.dir(daemon), mps.ShmLink),
		},
	}
	if l.mib > 0 {
		// Device 0 is the daemon's first GPU.
		c.Env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = fmt.Sprintf("0=%dM", l.mib)
	}
	if l.threads > 0 {
		c.Env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = strconv.Itoa(l.threads)
	}
	return c
}

// clientDeviceName is the name of the client device for that limit.
func clientDeviceName(daemon string, l limit) string {
	if l.mib == 0 {
		return daemon
	}
	return fmt.Sprintf("%s.%dm", daemon, l.mib)
}

// writeClientDevice writes a client device of a requested daemon. Needs m.mu, so that end removes it afterwards
// (TestPolicyDescribesNothingThatEnds).
func (m *Manager) writeClientDevice(daemon string, l limit) (qualified string, err error) {
	c := m.client(daemon, l)
	var edits specs.ContainerEdits
	for _, variable := range slices.Sorted(maps.Keys(c.Env)) {
		edits.Env = append(edits.Env, variable+"="+c.Env[variable])
	}
	for _, path := range slices.Sorted(maps.Keys(c.Mounts)) {
		edits.Mounts = append(edits.Mounts, &specs.Mount{
			HostPath: c.Mounts[path], ContainerPath: path, Type: "bind", Options: []string{"rw", "nosuid", "nodev", "bind"},
		})
	}
	name := clientDeviceName(daemon, l)
	qualified, err = m.Specs.WriteClientDevice(name, edits)
	if clients := m.daemons[daemon].clients; err == nil && clients != nil {
		clients[name] = &l
	}
	return qualified, err
}

// clientDevices returns a copy of the daemon's client devices, also of those that an earlier process wrote.
func (m *Manager) clientDevices(name string) (map[string]*limit, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.daemons[name]
	if !ok {
		return nil, nil
	}
	if d.clients == nil {
		found, err := m.Specs.ClientDevices(name)
		if err != nil {
			return nil, err
		}
		d.clients = map[string]*limit{}
		for _, client := range found {
			d.clients[client] = nil
		}
	}
	return maps.Clone(d.clients), nil
}

// setClientDevices writes the needed client devices that are missing, and removes those of before that are not needed. The
// caller called clientDevices, then read the ledger: a device that was written since belongs to a later holder and stays
// (TestPolicyPrunesNothingNew).
func (m *Manager) setClientDevices(name string, before, needed map[string]*limit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.daemons[name]
	if !ok {
		return nil
	}
	var errs []error
	for client, l := range needed {
		if d.clients[client] == nil {
			_, err := m.writeClientDevice(name, *l)
			errs = append(errs, err)
		}
	}
	for client, l := range before {
		if _, need := needed[client]; need || d.clients[client] != l {
			continue
		}
		err := m.Specs.RemoveClientDevices(client)
		if err == nil {
			delete(d.clients, client)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (m *Manager) dir(daemon string) string { return mps.Dir(m.RunDir, daemon) }

// endTimeout is how long a daemon may take to end before the caller reports an error and retries. The controller deletes its
// pod meanwhile, with a grace period.
const endTimeout = time.Minute

// removeDir is replaced by a test.
var removeDir = mps.Remove

// end ends a daemon and removes its client devices. The directory stays.
func (m *Manager) end(ctx context.Context, name string) error {
	m.cancelRequest(name)
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	if err := mps.Stop(ctx, m.dir(name)); err != nil {
		return err
	}
	m.turn(ctx, "has stopped daemon", name)
	return m.Specs.RemoveClientDevices(name)
}

// unrecordedDaemons are the daemons with a directory that no record names.
func (m *Manager) unrecordedDaemons() []string {
	entries, err := os.ReadDir(m.dir(""))
	if err != nil {
		return nil // no daemon was ever requested
	}
	var names []string
	for _, entry := range entries {
		name := entry.Name()
		if len(m.Records.where(func(_ Key, s setting) bool { return s.Daemon == name })) == 0 {
			names = append(names, name)
		}
	}
	return names
}

// UnknownDaemons returns the daemons, sorted, whose settings are unknown because their claim's record is unreadable. They may
// have clients, and end with their claim.
func (m *Manager) UnknownDaemons() []string {
	_, unknown := m.staleDaemons()
	return unknown
}

// staleDaemons returns the daemons of no claim, and the unknown ones.
func (m *Manager) staleDaemons() (stale, unknown []string) {
	for _, name := range m.unrecordedDaemons() {
		unreadable := m.Records.where(func(key Key, s setting) bool { return s.Unknown && key.Owner == ownerOfDaemon(name) })
		if len(unreadable) > 0 {
			unknown = append(unknown, name)
		} else {
			stale = append(stale, name)
		}
	}
	return stale, unknown
}

// endStaleDaemons ends stale daemons and removes their directories.
func (m *Manager) endStaleDaemons(ctx context.Context) error {
	var errs []error
	stale, _ := m.staleDaemons()
	for _, name := range stale {
		errs = append(errs, m.endStaleDaemon(ctx, name))
	}
	return errors.Join(errs...)
}

func (m *Manager) endStaleDaemon(ctx context.Context, name string) error {
	unlock, err := m.lock(ctx, ownerOfDaemon(name))
	if err != nil {
		return err
	}
	defer unlock()
	// Its claim may have been prepared before this got the lock.
	if stale, _ := m.staleDaemons(); !slices.Contains(stale, name) {
		return nil
	}
	if err := m.end(ctx, name); err != nil {
		return err
	}
	return removeDir(m.dir(name))
}
