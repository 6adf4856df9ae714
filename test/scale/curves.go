// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// curves are what changes over the time of the traffic.
type curves struct {
	began time.Time

	mu                           sync.Mutex
	resident, running, latencies plotter.XYs
}

func newCurves() *curves { return &curves{began: time.Now()} }

// sample records the controller's resident memory in MiB and the pods of the traffic that run.
func (c *curves) sample(at time.Time, resident float64, running int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := at.Sub(c.began).Seconds()
	c.resident = append(c.resident, plotter.XY{X: x, Y: resident})
	c.running = append(c.running, plotter.XY{X: x, Y: float64(running)})
}

// latency records how long a claim took from its allocation to the GPUNode of its node.
func (c *curves) latency(at time.Time, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.latencies = append(c.latencies, plotter.XY{X: at.Sub(c.began).Seconds(), Y: float64(took) / float64(time.Millisecond)})
}

// write draws the curves into a directory; none for an empty one.
func (c *curves) write(dir string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make directory of the curves: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, curve := range []struct {
		file, title, unit string
		points            plotter.XYs
	}{
		{"controller-memory.svg", "Resident memory of the controller", "MiB", c.resident},
		{"running-pods.svg", "Running pods of the traffic", "pods", c.running},
		{"claim-to-node.svg", "From a claim's allocation to its GPUNode", "ms", c.latencies},
	} {
		slices.SortFunc(curve.points, func(a, b plotter.XY) int { return int((a.X - b.X) * 1e6) })
		p := plot.New()
		p.Title.Text, p.X.Label.Text, p.Y.Label.Text, p.Y.Min = curve.title, "s", curve.unit, 0
		line, err := plotter.NewLine(curve.points)
		if err != nil {
			return fmt.Errorf("draw %s: %w", curve.file, err)
		}
		p.Add(line, plotter.NewGrid())
		if err := p.Save(20*vg.Centimeter, 8*vg.Centimeter, filepath.Join(dir, curve.file)); err != nil {
			return fmt.Errorf("write %s: %w", curve.file, err)
		}
	}
	return nil
}
