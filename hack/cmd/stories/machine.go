// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/prometheus/procfs"
)

const (
	// memoryEach is what a cluster needs, in bytes.
	memoryEach = 2 << 30
	// instancesOfAll are inotify instances for mostClusters: each has some 40, of kubelets, containerds, API server and agents.
	instancesOfAll, mostClusters = 1024, 8
	// A machine whose CPUs were idle for more than this share of the window carries one cluster more.
	idleWindow, idleEnough = 45 * time.Second, 0.5
)

// machine is the proc file system of the machine.
type machine struct{ procfs.FS }

// carried is how many clusters more the memory carries now; zero if it cannot be read.
func (m machine) carried() int {
	memory, err := m.Meminfo()
	if err != nil || memory.MemAvailableBytes == nil {
		return 0
	}
	return int(min(*memory.MemAvailableBytes/memoryEach, mostClusters))
}

// cpuTimes are the seconds that the CPUs have been idle, and all their seconds, since the machine started; zeros if they cannot be read.
type cpuTimes struct{ idle, all float64 }

func (m machine) cpuTimes() cpuTimes {
	stat, err := m.Stat()
	if err != nil {
		return cpuTimes{}
	}
	t := stat.CPUTotal
	// The time of guests is part of the user's.
	return cpuTimes{t.Idle, t.User + t.Nice + t.System + t.Idle + t.Iowait + t.IRQ + t.SoftIRQ + t.Steal}
}

// idleSince is the share of the time after earlier in which the CPUs were idle; zero if either could not be read.
func (t cpuTimes) idleSince(earlier cpuTimes) float64 {
	if t.all <= earlier.all || earlier.all == 0 {
		return 0
	}
	return (t.idle - earlier.idle) / (t.all - earlier.all)
}
