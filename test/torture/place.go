// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// place is hardware of the node: a GPU by its minor, or so many memory slices of it. A whole GPU has size zero.
type place struct{ gpu, start, size int }

// String is the GPU's minor, with the slices of a partition behind it.
func (p place) String() string {
	if p.size == 0 {
		return strconv.Itoa(p.gpu)
	}
	return fmt.Sprintf("%d@%d+%d", p.gpu, p.start, p.size)
}

func (p place) overlaps(other place) bool {
	whole := p.size == 0 || other.size == 0
	return p.gpu == other.gpu && (whole || p.start < other.start+other.size && other.start < p.start+p.size)
}

func (p place) compare(other place) int {
	return cmp.Or(cmp.Compare(p.gpu, other.gpu), cmp.Compare(p.start, other.start), cmp.Compare(p.size, other.size))
}

// placeOf is where something is that a container sees.
func placeOf(d oracle.Device) place { return place{d.Minor(), d.Partition.Start, d.Partition.Size} }

func placesOf(devices []oracle.Device) []place {
	var found []place
	for _, d := range devices {
		found = append(found, placeOf(d))
	}
	slices.SortFunc(found, place.compare)
	return found
}

// served reports whether these can be what was asked for.
func (r room) served(asked ask, places []place) bool {
	if r.memory != nil {
		return r.serves(asked, places)
	}
	return asked.isServedBy(places)
}

// String is what a pod wants, in words.
func (a ask) String() string {
	switch {
	case a.profile != "":
		return fmt.Sprintf("%d %s", a.gpus, a.profile)
	case a.mib > 0 || a.shares > 0:
		return fmt.Sprintf("%d times %s", a.gpus, part{mib: a.mib, shares: a.shares})
	case a.of != "":
		return fmt.Sprintf("%d GPUs, %s", a.gpus, a.of)
	case a.renamed:
		return fmt.Sprintf("%d renamed replicas", a.gpus)
	default:
		return fmt.Sprintf("%d GPUs", a.gpus)
	}
}

// isServedBy reports whether these are as many as were asked for, and of the size.
func (a ask) isServedBy(places []place) bool {
	size := 0
	if a.profile != "" {
		size = profileNamed(a.profile).size
	}
	return len(places) == a.gpus && !slices.ContainsFunc(places, func(p place) bool { return p.size != size })
}

// published matches the names of devices: "gpu-3", and of its partitions "gpu-3-mig-1g10gb-19-4" with the profile, its ID and the
// first memory slice.
var published = regexp.MustCompile(`^gpu-(\d+)(?:-mig-([a-z0-9-]*[a-z])-\d+-(\d+))?$`)

// placeNamed is the place of a device by the name under which it is published.
func placeNamed(name string) (place, bool) {
	match := published.FindStringSubmatch(name)
	if match == nil {
		return place{}, false
	}
	var p place
	p.gpu, _ = strconv.Atoi(match[1]) //nolint:errcheck // digits
	if match[2] == "" {
		return p, true
	}
	at := slices.IndexFunc(profiles, func(q profile) bool { return q.label() == match[2] })
	if at < 0 {
		return place{}, false
	}
	p.start, _ = strconv.Atoi(match[3]) //nolint:errcheck // digits
	p.size = profiles[at].size
	return p, true
}
