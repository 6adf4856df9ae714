// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// directory keeps records in <root>/holds, one file a hold, and blank files of spareSize bytes in <root>/spare. The record of
// a limit is a spare, filled and renamed; a record that changes changes places with a spare. Neither needs a new block, so
// a full disk fails no Allocate, no Unprepare and no release; it fails new claims, which kubelet tries again. No fsync is
// owed, since the directory belongs to the boot.
type directory struct {
	root   string
	bootID string
	// spares are the paths of the blank files.
	spares []string
	// limits counts the records of limits, wanted is how many of them there must be room for.
	limits int
	wanted int
	// serial is the last number used for the name of a spare or a temporary file.
	serial int
	closed bool
	now    func() time.Time
	// step is told what is about to happen on disk; nil outside of tests.
	step func(string)
}

// spareSize is one page, the unit in which tmpfs accounts; a record is a few hundred bytes.
const spareSize = 4096

const temporaryPrefix = ".tmp-"

func (d *directory) holds() string { return filepath.Join(d.root, "holds") }
func (d *directory) spare() string { return filepath.Join(d.root, "spare") }

func (d *directory) path(h Hold) string {
	return filepath.Join(d.holds(), recordName(h.Holder, h.Device))
}

func (d *directory) next(dir, prefix string) string {
	d.serial++
	return filepath.Join(dir, prefix+strconv.Itoa(d.serial))
}

func (d *directory) at(step string) {
	if d.step != nil {
		d.step(step)
	}
}

// problem is a file that is not what it should be.
type problem struct {
	name string
	err  error
}

// load reads every record. Unreadable ones come back as holds marked so, with what was wrong; those of an earlier boot are
// removed, because what they describe ended with it. newer are those that a newer version wrote.
func (d *directory) load() (holds []Hold, newer map[key]bool, problems []problem, err error) {
	for _, dir := range []string{d.holds(), d.spare()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, nil, nil, fmt.Errorf("create ledger directory: %w", err)
		}
	}
	if err := d.loadSpares(); err != nil {
		return nil, nil, nil, err
	}
	entries, err := os.ReadDir(d.holds())
	if err != nil {
		return nil, nil, nil, fmt.Errorf("list ledger records: %w", err)
	}
	newer = map[key]bool{}
	for _, entry := range entries {
		name := entry.Name()
		path := filepath.Join(d.holds(), name)
		if strings.HasPrefix(name, temporaryPrefix) {
			if err := d.delete(path); err != nil {
				return nil, nil, nil, fmt.Errorf("remove unfinished record: %w", err)
			}
			continue
		}
		holder, ref, err := parseRecordName(name)
		if err != nil {
			problems = append(problems, problem{name, err})
			continue
		}
		h, fromNewer, err := d.read(path, holder, ref)
		switch {
		case errors.Is(err, errEarlierBoot):
			if err := d.delete(path); err != nil {
				return nil, nil, nil, fmt.Errorf("remove record of an earlier boot: %w", err)
			}
			continue
		case err != nil:
			problems = append(problems, problem{name, err})
			h = Hold{Holder: holder, Device: ref, State: StateRestored, Since: d.now(), Unreadable: true}
		}
		if fromNewer {
			newer[keyOf(h)] = true
		}
		if holder.Kind == KindPod {
			d.limits++
		}
		holds = append(holds, h)
	}
	// The room that was there stays reserved until the caller says how much is wanted now.
	if err := d.provision(max(0, len(d.spares)+d.limits-1)); err != nil {
		problems = append(problems, problem{d.spare(), err})
	}
	return holds, newer, problems, nil
}

var errEarlierBoot = errors.New("the record is of an earlier boot")

func (d *directory) read(path string, holder Holder, ref device.Ref) (Hold, bool, error) {
	if info, err := os.Lstat(path); err != nil {
		return Hold{}, false, err
	} else if !info.Mode().IsRegular() {
		return Hold{}, false, fmt.Errorf("it is no file but %s", info.Mode())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return Hold{}, false, err
	}
	r, newer, err := decodeRecord(data)
	if err != nil {
		return Hold{}, newer, err
	}
	if r.BootID != d.bootID {
		return Hold{}, newer, errEarlierBoot
	}
	h, err := r.hold(holder, ref)
	return h, newer, err
}

// loadSpares removes what cannot serve as a spare: a crash may have left one without its block.
func (d *directory) loadSpares() error {
	entries, err := os.ReadDir(d.spare())
	if err != nil {
		return fmt.Errorf("list spare records: %w", err)
	}
	for _, entry := range entries {
		path := filepath.Join(d.spare(), entry.Name())
		number, err := strconv.Atoi(entry.Name())
		if err != nil || !usableAsSpare(path) {
			if err := d.delete(path); err != nil {
				return fmt.Errorf("remove incomplete spare record: %w", err)
			}
			continue
		}
		d.serial = max(d.serial, number)
		d.spares = append(d.spares, path)
	}
	return nil
}

func usableAsSpare(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() != spareSize {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stat.Blocks > 0
}

// owed is how many spares are missing, or negative how many are too many: one for each limit to come, and one to change
// places with.
func (d *directory) owed() int { return max(0, d.wanted-d.limits) + 1 - len(d.spares) }

// provision makes sure that n limits can be recorded, and records changed, without new blocks.
func (d *directory) provision(n int) error {
	if d.closed {
		return errClosed
	}
	d.wanted = n
	for d.owed() < 0 {
		last := len(d.spares) - 1
		if err := d.delete(d.spares[last]); err != nil {
			return fmt.Errorf("free space of a record: %w", err)
		}
		d.spares = d.spares[:last]
	}
	for d.owed() > 0 {
		path := d.next(d.spare(), "")
		if err := d.write(path, unix.O_CREAT|unix.O_EXCL, make([]byte, spareSize)); err != nil {
			return errors.Join(fmt.Errorf("reserve space for a record: %w", err), d.delete(path))
		}
		d.spares = append(d.spares, path)
	}
	return nil
}

// create writes the record of a hold without one. Only the hold of a pod may use up a spare file.
func (d *directory) create(h Hold) error {
	if err := d.record(h, h.Holder.Kind == KindPod, false); err != nil {
		return err
	}
	if h.Holder.Kind == KindPod && d.owed() > 0 {
		// More limits than were provisioned for. Where the disk is full, the next removal makes up for it.
		_ = d.provision(d.wanted)
	}
	return nil
}

// update replaces the record of a hold.
func (d *directory) update(h Hold) error { return d.record(h, true, true) }

// record writes the record of h: into a spare or a new file, which then takes the place of the record that is there. Errors
// name the record and no pod: they are part of what kubelet tells others.
func (d *directory) record(h Hold, fromSpare, isThere bool) error {
	if d.closed {
		return fmt.Errorf("write record of %s: %w", recordName(h.Holder, h.Device), errClosed)
	}
	data, err := encodeRecord(h, d.bootID)
	if err != nil {
		return err
	}
	data = pad(data)
	var source string
	if fromSpare && len(data) == spareSize {
		source = d.fillSpare(data)
	}
	if source == "" {
		source = d.next(d.holds(), temporaryPrefix)
		err = d.write(source, unix.O_CREAT|unix.O_EXCL, data)
	}
	if err == nil {
		err = d.install(source, h, isThere)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write record of %s: %w", recordName(h.Holder, h.Device), err), d.recycle(source))
	}
	return nil
}

// pad makes all records of a usual size interchangeable with spares.
func pad(data []byte) []byte {
	if len(data) >= spareSize {
		return data
	}
	return append(data, make([]byte, spareSize-len(data))...)
}

// fillSpare writes to a spare file, and drops spare files that another process damaged. It returns "" when none is left.
func (d *directory) fillSpare(data []byte) string {
	for len(d.spares) > 0 {
		last := len(d.spares) - 1
		path := d.spares[last]
		d.spares = d.spares[:last]
		if err := d.write(path, 0, data); err == nil {
			return path
		}
	}
	return ""
}

// install puts a complete file in the place of the record of h in one step. It makes no difference what was there before;
// what is likely is tried first, since this is what an Allocate waits for.
func (d *directory) install(source string, h Hold, likely bool) error {
	target := d.path(h)
	for _, replace := range []bool{likely, !likely} {
		if replace {
			d.at("exchange")
			err := unix.Renameat2(unix.AT_FDCWD, source, unix.AT_FDCWD, target, unix.RENAME_EXCHANGE)
			if err == nil {
				// The record stands. What cannot be tidied up here is swept by the next start.
				_ = d.recycle(source)
				return nil
			}
			if !errors.Is(err, unix.ENOENT) {
				return err
			}
			continue
		}
		d.at("rename")
		err := unix.Renameat2(unix.AT_FDCWD, source, unix.AT_FDCWD, target, unix.RENAME_NOREPLACE)
		if err == nil {
			if h.Holder.Kind == KindPod {
				d.limits++
			}
			return nil
		}
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return fmt.Errorf("%s comes and goes", target)
}

// remove forgets a hold.
func (d *directory) remove(h Hold) error {
	if d.closed {
		return fmt.Errorf("remove record of %s: %w", recordName(h.Holder, h.Device), errClosed)
	}
	path := d.path(h)
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	limits := d.limits
	if h.Holder.Kind == KindPod {
		d.limits--
	}
	if err := d.recycle(path); err != nil {
		d.limits = limits
		return fmt.Errorf("remove record of %s: %w", recordName(h.Holder, h.Device), err)
	}
	return nil
}

// recycle makes a file a spare when one is owed and it can be one, and deletes it otherwise.
func (d *directory) recycle(path string) error {
	if d.owed() <= 0 || !usableAsSpare(path) {
		return d.delete(path)
	}
	spare := d.next(d.spare(), "")
	d.at("recycle")
	if err := os.Rename(path, spare); err != nil {
		return err
	}
	d.spares = append(d.spares, spare)
	return nil
}

func (d *directory) delete(path string) error {
	d.at("delete")
	return os.RemoveAll(path)
}

// write fills a file from its start. It makes the system calls itself: os.File would try to poll the file, and each call
// here is part of every Allocate.
func (d *directory) write(path string, flags int, data []byte) error {
	d.at("open")
	file, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC|flags, 0o600)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	d.at("write")
	n, err := unix.Pwrite(file, data, 0)
	if err == nil && n < len(data) {
		err = unix.ENOSPC
	}
	if err != nil {
		err = &os.PathError{Op: "write", Path: path, Err: err}
	}
	return errors.Join(err, unix.Close(file))
}
