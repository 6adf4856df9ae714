// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// drains measures from outside how long the ledger keeps a hold after its last pod: from the moment when no container of the hold's pods
// sees a GPU any more and the API server has each of them as ended or being deleted, until the hold's record is gone.
type drains struct {
	statistics *statistics
	trace      *trace
	now        func() time.Time
	// open are the holds that name a pod, by the names of their records.
	open map[string]*drain
}

type drain struct {
	// pods are those that the record has named.
	pods []string
	// sight is when a container of one was last seen with a GPU; zero before the first time.
	sight time.Time
}

// hold is what the record of a hold says.
type hold struct {
	pods []string
	// unreadable: nothing is known but the record's name.
	unreadable bool
}

func parseHold(contents []byte) hold {
	var file struct {
		Record struct {
			Pods []struct{ UID string }
		}
	}
	// What follows the first value is left from longer contents.
	if err := json.NewDecoder(bytes.NewReader(contents)).Decode(&file); err != nil {
		return hold{unreadable: true}
	}
	var h hold
	for _, pod := range file.Record.Pods {
		h.pods = append(h.pods, pod.UID)
	}
	return h
}

// readHolds reads the ledger's records, by their names. It returns false if they cannot be read, for example while the node is down.
func readHolds(node *cluster.Node) (map[string]hold, bool) {
	root, err := node.Root()
	if err != nil {
		return nil, false
	}
	dir := filepath.Join(root, holdsDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, false
	}
	holds := map[string]hold{}
	for _, entry := range entries {
		contents, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if !errors.Is(err, fs.ErrNotExist) {
			holds[entry.Name()] = parseHold(contents)
		}
	}
	return holds, true
}

// look compares the records with the last look's. began is when this look began. sees reports whether a container of a pod sees a GPU,
// and over when the API server first had the pod as ended or being deleted; zero if it has not.
func (d *drains) look(began time.Time, holds map[string]hold, sees func(uid string) bool, over func(uid string) time.Time) {
	for name, open := range d.open {
		h, there := holds[name]
		if there && (h.unreadable || !strings.HasPrefix(name, "pod~") || slices.Contains(h.pods, open.pods[0])) {
			continue
		}
		// kubelet may have given the device ID of the record to the next pod.
		delete(d.open, name)
		d.ended(name, open, over)
	}
	for name, h := range holds {
		open := d.open[name]
		switch {
		case open == nil && len(h.pods) == 0:
			continue
		case open == nil:
			open = &drain{}
			d.open[name] = open
		}
		for _, uid := range h.pods {
			if !slices.Contains(open.pods, uid) {
				open.pods = append(open.pods, uid)
			}
		}
		if slices.ContainsFunc(open.pods, sees) {
			open.sight = began
		}
	}
}

// ended counts a hold whose record is gone. It is not timed if no container was seen with it, or if a pod of it lives: nothing drained.
func (d *drains) ended(name string, open *drain, over func(uid string) time.Time) {
	from := open.sight
	for _, uid := range open.pods {
		at := over(uid)
		if at.IsZero() || open.sight.IsZero() {
			return
		}
		if at.After(from) {
			from = at
		}
	}
	now := d.now()
	d.trace.note("drained: %s after %s", name, now.Sub(from).Round(time.Millisecond))
	d.statistics.drained(from, now)
}
