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

// NotReadyError says that everything is set and asked for, and that the daemon has not answered in time. Whoever tries again
// finds it ready, or waits on.
type NotReadyError struct {
	Daemon string
	// Begun is set where the daemon's pod runs.
	Begun bool
	// Other is set where a daemon is ready that is not the one which is wanted.
	Other bool
	// Log is where the daemon says on the host what it does.
	Log string
	err error
}

// Error says what to look at.
func (e *NotReadyError) Error() string {
	if e.Other {
		return fmt.Sprintf("MPS daemon %s has other settings than were asked for: its pod is about to be replaced, or the controller or the "+
			"GPUNode's definition (CRD) is not of the agent's version: %v", e.Daemon, e.err)
	}
	if e.Begun {
		return fmt.Sprintf("MPS daemon %s has started and is not ready (its log is %s on the node): %v", e.Daemon, e.Log, e.err)
	}
	return fmt.Sprintf("MPS daemon %s has not been started: %v", e.Daemon, e.err)
}

// Unwrap is what ended the waiting.
func (e *NotReadyError) Unwrap() error { return e.err }

// daemon is one that is to run.
type daemon struct {
	settings mps.Settings
	// undone ends when the daemon is not wanted any more.
	undone context.Context
	undo   context.CancelFunc
	// described are the CDI devices of its clients by name, with the limit that they give: nil of those that this process has only
	// found. The map is nil before describeClients has looked for them.
	described map[string]*limit
}

// Daemons that are to run, by name.
func (k *Keeper) Daemons() []Daemon {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]Daemon, 0, len(k.daemons))
	for _, name := range slices.Sorted(maps.Keys(k.daemons)) {
		all = append(all, Daemon{name, k.daemons[name].settings})
	}
	return all
}

// want has the daemon run. Under k.mu, or before anybody else has the Keeper.
func (k *Keeper) want(name string, settings mps.Settings) (news bool) {
	if d, ok := k.daemons[name]; ok {
		news = d.settings.Hash() != settings.Hash()
		d.settings = settings
		return news
	}
	undone, undo := context.WithCancel(context.Background())
	k.daemons[name] = &daemon{settings: settings, undone: undone, undo: undo}
	return true
}

// unwant ends the waiting for a daemon, and tells its pod's owner.
func (k *Keeper) unwant(name string) {
	k.mu.Lock()
	d, ok := k.daemons[name]
	delete(k.daemons, name)
	k.mu.Unlock()
	if ok {
		d.undo()
		k.announce()
	}
}

// connect waits for a daemon, and returns the CDI device of its clients with that limit.
func (k *Keeper) connect(ctx context.Context, name string, l limit) (string, error) {
	k.mu.Lock()
	d, ok := k.daemons[name]
	if !ok {
		k.mu.Unlock()
		return "", errUnheld
	}
	hash := d.settings.Hash()
	k.mu.Unlock()
	waiting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(d.undone, func() { cancel(errUnheld) })
	defer stop()
	if _, err := mps.Await(waiting, k.dir(name), hash); err != nil {
		if d.undone.Err() != nil {
			return "", errUnheld
		}
		begun, heldErr := mps.Held(k.dir(name))
		other, alive, aliveErr := mps.Alive(k.dir(name))
		return "", &NotReadyError{
			Daemon: name, Begun: begun, Other: alive && other.Hash != hash, Log: filepath.Join(k.dir(name), mps.LogDir, "control.log"),
			err: errors.Join(err, heldErr, aliveErr),
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.daemons[name] != d {
		return "", errUnheld
	}
	return k.describe(name, l)
}

// Client is what a container needs beside a GPU to share it by MPS.
type Client struct {
	// Env by the names of variables.
	Env map[string]string
	// Mounts are directories of the host by their places in the container, to be written.
	Mounts map[string]string
}

// limit is what a client is kept to by its own variables; what is zero has none.
type limit struct {
	mib     uint64
	threads int
}

// client of a daemon. The memory volume is that of the daemon's pod of the moment.
func (k *Keeper) client(daemon string, l limit) Client {
	c := Client{
		Env: map[string]string{"CUDA_MPS_PIPE_DIRECTORY": mps.ClientPipeDir},
		Mounts: map[string]string{
			mps.ClientPipeDir: filepath.Join(k.dir(daemon), mps.PipeDir),
			"/dev/shm":        filepath.Join(k.dir(daemon), mps.ShmLink),
		},
	}
	if l.mib > 0 {
		// Its first GPU, of those that the daemon has.
		c.Env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = fmt.Sprintf("0=%dM", l.mib)
	}
	if l.threads > 0 {
		c.Env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = strconv.Itoa(l.threads)
	}
	return c
}

// deviceOf is the CDI device of a daemon's clients with that limit, which ends with the daemon.
func deviceOf(daemon string, l limit) string {
	if l.mib == 0 {
		return daemon
	}
	return fmt.Sprintf("%s.%dm", daemon, l.mib)
}

// describe makes that device. Under k.mu, and of a daemon that is to run: what ends it removes the devices afterwards.
func (k *Keeper) describe(daemon string, l limit) (qualified string, err error) {
	c := k.client(daemon, l)
	var edits specs.ContainerEdits
	for _, variable := range slices.Sorted(maps.Keys(c.Env)) {
		edits.Env = append(edits.Env, variable+"="+c.Env[variable])
	}
	for _, path := range slices.Sorted(maps.Keys(c.Mounts)) {
		edits.Mounts = append(edits.Mounts, &specs.Mount{
			HostPath: c.Mounts[path], ContainerPath: path, Type: "bind", Options: []string{"rw", "nosuid", "nodev", "bind"},
		})
	}
	qualified, err = k.Specs.WriteClientDevice(deviceOf(daemon, l), edits)
	if described := k.daemons[daemon].described; err == nil && described != nil {
		described[deviceOf(daemon, l)] = &l
	}
	return qualified, err
}

// describeClients makes the CDI devices that clients of a daemon need, and removes the others, unless these are not all that may be
// needed. needed is asked while nobody can become a client: who comes later finds what is left, and makes what is not.
func (k *Keeper) describeClients(name string, needed func() (clients map[string]limit, all bool)) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.daemons[name]
	if !ok {
		return nil
	}
	if d.described == nil {
		there, err := k.Specs.ClientDevices(name)
		if err != nil {
			return err
		}
		d.described = map[string]*limit{}
		for _, variant := range there {
			d.described[variant] = nil
		}
	}
	clients, all := needed()
	var errs []error
	for client, l := range clients {
		if d.described[client] == nil {
			_, err := k.describe(name, l)
			errs = append(errs, err)
		}
	}
	for client := range d.described {
		if _, need := clients[client]; need || !all {
			continue
		}
		err := k.Specs.RemoveClientDevices(client)
		if err == nil {
			delete(d.described, client)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// UnknownDaemons are daemons that may run, sorted, and whose settings nobody can read: of claims whose record is torn, or was written by a
// later version. Their clients run, and they end with their claim.
func (k *Keeper) UnknownDaemons() []string {
	if len(k.Records.where(func(_ Key, s setting) bool { return s.Unknown })) == 0 {
		return nil
	}
	_, unknownDaemons := k.strays()
	return unknownDaemons
}

func (k *Keeper) dir(daemon string) string { return mps.Dir(k.RunDir, daemon) }

// endPatience is how long a daemon may take to end before somebody is told that it does not. Its pod is deleted meanwhile, which
// kubelet does with a grace period.
const endPatience = time.Minute

// removeDir is replaced by a test.
var removeDir = mps.Remove

// end ends a daemon, and its clients' CDI device. Its directory is left.
func (k *Keeper) end(ctx context.Context, name string) error {
	k.unwant(name)
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	if err := mps.Stop(ctx, k.dir(name)); err != nil {
		return err
	}
	return k.Specs.RemoveClientDevices(name)
}

// unnamed are the directories of daemons that no record names.
func (k *Keeper) unnamed() []string {
	entries, err := os.ReadDir(k.dir(""))
	if err != nil {
		return nil // none was ever made
	}
	named := map[string]bool{}
	for _, key := range k.Records.All() {
		if s, ok := k.Records.store.Get(key); ok {
			named[s.Daemon] = true
		}
	}
	var names []string
	for _, entry := range entries {
		if name := entry.Name(); !named[name] {
			names = append(names, name)
		}
	}
	return names
}

// strays are the directories of daemons that are nobody's, and doubtful are those that Doubtful tells of.
func (k *Keeper) strays() (strays, unknownDaemons []string) {
	for _, name := range k.unnamed() {
		if len(k.Records.where(func(key Key, s setting) bool { return s.Unknown && key.Claim == claimOf(name) })) > 0 {
			unknownDaemons = append(unknownDaemons, name)
		} else {
			strays = append(strays, name)
		}
	}
	return strays, unknownDaemons
}
