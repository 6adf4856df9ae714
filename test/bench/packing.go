// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"

	"github.com/tandem-gpu/tandem/simulated/models"
	"github.com/tandem-gpu/tandem/test/figure"
	"github.com/tandem-gpu/tandem/test/packing"
)

// sequences of requests for partitions that are packed, which takes a processor ten seconds.
const sequences = 1000

// pack measures how many requests for partitions of an H100 the scheduler places in the order in which we publish them. Nothing
// runs: it is arithmetic, and the same on every machine.
func (r *run) pack() error {
	m, known := models.Named("H100-80GB")
	if !known {
		return errors.New("measure packing: no geometry of an H100")
	}
	p := packing.GPU(m, sequences, 1)
	r.say("packing: 1,000 random sequences: placed first-fit %.1f %%, ours %.1f %%, optimum %.1f %%",
		p.Share(p.ByName), p.Share(p.Ordered), p.Share(p.Optimum))
	return r.add([]figure.Figure{
		{Name: "packed_first_fit", Value: p.Share(p.ByName), Unit: "%", N: p.Requests},
		{Name: "packed_ours", Value: p.Share(p.Ordered), Unit: "%", N: p.Requests},
		{Name: "packed_optimum", Value: p.Share(p.Optimum), Unit: "%", N: p.Requests},
	}, nil)
}
