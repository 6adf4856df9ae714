// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"io/fs"
	"testing"
)

// TestFirstSight: what a container sees is told by its own processes, and never that it sees nothing while the runtime still makes
// it, whose hooks enter its file system before it does.
func TestFirstSight(t *testing.T) {
	const hook, process, other = 12, 11, 13
	var (
		sees     = &sighting{container: id("c"), devices: []Device{{Number: Number{nvidiaMajor, 6}}}}
		nothing  = &sighting{container: id("c")}
		stranger = &sighting{container: id("d"), devices: sees.devices}
		failure  = errors.New("refused")
	)
	type answer struct {
		seen *sighting
		err  error
	}
	outside, ended := answer{}, answer{err: fs.ErrNotExist}
	for name, test := range map[string]struct {
		pids  []int
		looks map[int]answer
		want  *sighting
		made  bool
		err   error
	}{
		"its own process": {
			pids: []int{process}, looks: map[int]answer{process: {seen: sees}}, want: sees, made: true,
		},
		"a container without GPUs": {
			pids: []int{process, other}, looks: map[int]answer{process: {seen: nothing}, other: {seen: nothing}}, want: nothing, made: true,
		},
		"on its way": {
			pids: []int{process}, looks: map[int]answer{process: outside},
		},
		"a hook's mounts are taken apart": {
			pids: []int{process, hook}, looks: map[int]answer{process: outside, hook: {seen: nothing}}, want: nothing,
		},
		"a hook's mounts are taken apart, and the container's own process enters meanwhile": {
			pids: []int{hook, process}, looks: map[int]answer{hook: {seen: nothing}, process: {seen: sees}}, want: sees, made: true,
		},
		"a hook sees the GPU": {
			pids: []int{process, hook}, looks: map[int]answer{process: outside, hook: {seen: sees}}, want: sees,
		},
		"a process without GPUs comes later": {
			pids: []int{process, other}, looks: map[int]answer{process: {seen: sees}, other: {seen: nothing}}, want: sees, made: true,
		},
		"a process has ended": {
			pids: []int{other, process}, looks: map[int]answer{other: ended, process: {seen: sees}}, want: sees, made: true,
		},
		"a process of another container": {
			pids: []int{other, process}, looks: map[int]answer{other: {seen: stranger}, process: {seen: nothing}}, want: nothing, made: true,
		},
		"a look that fails": {
			pids: []int{process}, looks: map[int]answer{process: {err: failure}}, err: failure,
		},
	} {
		t.Run(name, func(t *testing.T) {
			seen, made, err := firstSight(id("c"), test.pids, func(pid int) (*sighting, error) {
				return test.looks[pid].seen, test.looks[pid].err
			})
			if seen != test.want || made != test.made || !errors.Is(err, test.err) {
				t.Errorf("saw %+v, made: %t, %v; want %+v, %t, %v", seen, made, err, test.want, test.made, test.err)
			}
		})
	}
}
