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

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// directory keeps records in <root>/holds, one file a hold, and blank files of spareSize bytes in <root>/spare. A limit is
// recorded by filling a spare and renaming it, which needs no new block: a full disk never fails an Allocate. No fsync is
// owed, since the directory belongs to the boot (docs/design/0002-ledger.md).
type directory struct {
	root   string
	bootID string
	// spares are the names of the blank files; wanted is how many of them plus limit records there should be.
	spares []string
	limits int
	wanted int
	serial int
}

// spareSize is one page, the unit in which tmpfs accounts; the record of a limit is a few hundred bytes.
const spareSize = 4096

const temporaryPrefix = ".tmp-"

func (d *directory) holds() string { return filepath.Join(d.root, "holds") }
func (d *directory) spare() string { return filepath.Join(d.root, "spare") }

func (d *directory) path(h Hold) string {
	return filepath.Join(d.holds(), recordName(h.Holder, h.Device))
}

// problem is a record that could not be read as it is.
type problem struct {
	name string
	err  error
}

// load reads every record. Unreadable ones come back as holds marked so, with what was wrong; those of an earlier boot are
// removed, because what they describe ended with it.
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
			if err := os.Remove(path); err != nil {
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
			if err := os.Remove(path); err != nil {
				return nil, nil, nil, fmt.Errorf("remove record of an earlier boot: %w", err)
			}
			continue
		case err != nil:
			problems = append(problems, problem{name, err})
			h = Hold{Holder: holder, Device: ref, State: StateExpected, Unreadable: true}
		}
		if fromNewer {
			newer[keyOf(h)] = true
		}
		if holder.Kind == KindLimit {
			d.limits++
		}
		holds = append(holds, h)
	}
	return holds, newer, problems, nil
}

var errEarlierBoot = errors.New("the record is of an earlier boot")

func (d *directory) read(path string, holder Holder, ref device.Ref) (Hold, bool, error) {
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

// loadSpares forgets spares of the wrong size: a crash may have left one without its blocks.
func (d *directory) loadSpares() error {
	entries, err := os.ReadDir(d.spare())
	if err != nil {
		return fmt.Errorf("list spare records: %w", err)
	}
	for _, entry := range entries {
		path := filepath.Join(d.spare(), entry.Name())
		number, numberErr := strconv.Atoi(entry.Name())
		info, err := os.Stat(path)
		if err != nil {
			return fmt.Errorf("inspect spare record: %w", err)
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); numberErr != nil || !ok || info.Size() != spareSize || stat.Blocks == 0 {
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("remove incomplete spare record: %w", err)
			}
			continue
		}
		d.serial = max(d.serial, number)
		d.spares = append(d.spares, path)
	}
	return nil
}

// provision makes sure that n limits can be recorded without new blocks.
func (d *directory) provision(n int) error {
	d.wanted = n
	for len(d.spares)+d.limits < d.wanted {
		d.serial++
		path := filepath.Join(d.spare(), strconv.Itoa(d.serial))
		if err := os.WriteFile(path, make([]byte, spareSize), 0o600); err != nil {
			return errors.Join(fmt.Errorf("reserve space for a record: %w", err), removeIfThere(path))
		}
		d.spares = append(d.spares, path)
	}
	return nil
}

// create records a hold that has no record yet.
func (d *directory) create(h Hold) error {
	data, err := d.encode(h)
	if err != nil {
		return err
	}
	if h.Holder.Kind != KindLimit {
		return d.replace(h, data)
	}
	if len(d.spares) == 0 {
		if err := d.replace(h, data); err != nil {
			return err
		}
		d.limits++
		return nil
	}
	path := d.spares[len(d.spares)-1]
	if err := overwrite(path, data); err != nil {
		return fmt.Errorf("write record of %s: %w", h, err)
	}
	if err := os.Rename(path, d.path(h)); err != nil {
		return fmt.Errorf("write record of %s: %w", h, err)
	}
	d.spares = d.spares[:len(d.spares)-1]
	d.limits++
	return nil
}

// update replaces the record of a hold that has one. That of a limit changes places with a spare, so that neither loses
// its block.
func (d *directory) update(h Hold) error {
	data, err := d.encode(h)
	if err != nil {
		return err
	}
	if h.Holder.Kind != KindLimit || len(d.spares) == 0 {
		return d.replace(h, data)
	}
	path := d.spares[len(d.spares)-1]
	if err := overwrite(path, data); err != nil {
		return fmt.Errorf("write record of %s: %w", h, err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, d.path(h), unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("write record of %s: %w", h, err)
	}
	return nil
}

// encode pads the record of a limit to the size of a spare, which it becomes again one day.
func (d *directory) encode(h Hold) ([]byte, error) {
	data, err := encodeRecord(h, d.bootID)
	if err != nil {
		return nil, err
	}
	if h.Holder.Kind != KindLimit {
		return data, nil
	}
	if len(data) > spareSize {
		return nil, fmt.Errorf("write record of %s: %d bytes are more than a record of a limit may have (%d)", h, len(data), spareSize)
	}
	return append(data, make([]byte, spareSize-len(data))...), nil
}

func (d *directory) replace(h Hold, data []byte) error {
	d.serial++
	temporary := filepath.Join(d.holds(), temporaryPrefix+strconv.Itoa(d.serial))
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return errors.Join(fmt.Errorf("write record of %s: %w", h, err), removeIfThere(temporary))
	}
	if err := os.Rename(temporary, d.path(h)); err != nil {
		return errors.Join(fmt.Errorf("write record of %s: %w", h, err), removeIfThere(temporary))
	}
	return nil
}

// remove forgets a hold. The record of a limit becomes a spare again when one is owed.
func (d *directory) remove(h Hold) error {
	path := d.path(h)
	if h.Holder.Kind != KindLimit {
		if err := removeIfThere(path); err != nil {
			return fmt.Errorf("remove record of %s: %w", h, err)
		}
		return nil
	}
	if info, err := os.Stat(path); err == nil && info.Size() == spareSize && len(d.spares)+d.limits <= d.wanted {
		d.serial++
		spare := filepath.Join(d.spare(), strconv.Itoa(d.serial))
		if err := os.Rename(path, spare); err != nil {
			return fmt.Errorf("remove record of %s: %w", h, err)
		}
		d.spares = append(d.spares, spare)
	} else if err := removeIfThere(path); err != nil {
		return fmt.Errorf("remove record of %s: %w", h, err)
	}
	d.limits--
	return nil
}

func overwrite(path string, data []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(data, 0)
	return errors.Join(err, file.Close())
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
