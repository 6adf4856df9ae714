// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// TestScenarios plays testdata/*.txt, which people can read. A line is a step, # begins a comment:
//
//	model H100-80GB          what the GPU is; first
//	place 3g.40gb -> 4       the scheduler puts it there
//	make 1g.10gb at 3        an administrator creates it there, and it fits
//	foreign 3+2              an administrator creates an instance of an unknown profile, in these memory slices
//	refuse 4g.40gb           it fits nowhere
//	refuse 4g.40gb at 0      it does not fit there
//	places 3g.40gb: 0 4      it fits there and nowhere else
//	free 3g.40gb at 4        it goes
//	free 3+2                 the foreign one goes
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("scenarios: %v, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var s scenario
			for i, line := range strings.Split(string(text), "\n") {
				line, _, _ = strings.Cut(line, "#")
				words := strings.Fields(line)
				if len(words) == 0 {
					continue
				}
				if err := s.step(words); err != nil {
					t.Fatalf("%s:%d: %s: %v; held %v", file, i+1, strings.TrimSpace(line), err, s.held)
				}
			}
		})
	}
}

type scenario struct {
	model models.Model
	g     Geometry
	held  []Instance
}

// step does what a line says; an error is what came otherwise.
func (s *scenario) step(words []string) error {
	if words[0] == "model" && len(words) == 2 {
		m, ok := models.Named(words[1])
		s.model, s.g = m, NewGeometry(m.Offered())
		return unless(ok, "no such model")
	}
	if len(words) < 2 {
		return fmt.Errorf("not a step")
	}
	var place device.Placement
	if _, err := fmt.Sscanf(words[1], "%d+%d", &place.Start, &place.Size); err == nil && len(words) == 2 {
		return s.foreign(words[0], Instance{ProfileID: -1, Placement: place})
	}
	i := slices.IndexFunc(s.model.Profiles, func(p models.Profile) bool { return p.Name == strings.TrimSuffix(words[1], ":") })
	if i < 0 {
		return fmt.Errorf("no such profile")
	}
	p := s.model.Profiles[i]
	if words[0] == "places" {
		var fits []string
		for _, at := range p.Placements {
			if s.g.Fits(s.held, Instance{ProfileID: p.ID, Placement: at}) {
				fits = append(fits, fmt.Sprint(at.Start))
			}
		}
		return unless(slices.Equal(fits, words[2:]), "it fits at %v", fits)
	}
	chosen, found := s.g.firstFit(s.held, p.ID)
	if len(words) == 2 && words[0] == "refuse" {
		return unless(!found, "it fits at %v", chosen)
	}
	if len(words) != 4 {
		return fmt.Errorf("not a step")
	}
	want := Instance{ProfileID: p.ID, Placement: device.Placement{Size: p.Placements[0].Size}}
	if _, err := fmt.Sscan(words[3], &want.Placement.Start); err != nil {
		return fmt.Errorf("where: %w", err)
	}
	fits := s.g.Fits(s.held, want)
	switch words[0] + " " + words[2] {
	case "place ->":
		s.held = append(s.held, want)
		return unless(found && fits && chosen == want.Placement, "chosen %v %t", chosen, found)
	case "make at":
		s.held = append(s.held, want)
		return unless(fits, "it does not fit")
	case "refuse at":
		return unless(!fits, "it fits")
	case "free at":
		return s.free(want)
	}
	return fmt.Errorf("not a step")
}

func (s *scenario) foreign(verb string, i Instance) error {
	switch verb {
	case "foreign":
		s.held = append(s.held, i)
		return nil
	case "free":
		return s.free(i)
	}
	return fmt.Errorf("not a step")
}

func (s *scenario) free(i Instance) error {
	n := len(s.held)
	s.held = slices.DeleteFunc(s.held, func(h Instance) bool { return h == i })
	return unless(len(s.held) == n-1, "it is not there")
}

func unless(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}
