// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Distances of the ACPI SLIT: a node to itself, and to any other.
const (
	distanceSelf  = 10
	distanceOther = 21
)

// nodeFiles are the machine's NUMA nodes with their CPUs and a share of the memory each, in the form that cadvisor and with
// it kubelet read, and the CPUs that they link to. The nodes' links are relative, so that they lead to the real CPUs when the
// directory of nodes alone is bind-mounted over the real one.
func nodeFiles(cpus [][]cpu, memoryKiB uint64) []file {
	nodes := path.Join(SysfsDir, "devices/system/node")
	var all []file
	add := func(at, text string) {
		all = append(all, file{path: at, content: []byte(text + "\n"), mode: 0o444})
	}
	everyNode := formatList(count(len(cpus)))
	for _, name := range []string{"online", "possible", "has_memory", "has_normal_memory"} {
		add(path.Join(nodes, name), everyNode)
	}
	add(path.Join(nodes, "has_cpu"), formatList(slices.DeleteFunc(count(len(cpus)), func(n int) bool { return len(cpus[n]) == 0 })))
	for node, own := range cpus {
		dir := path.Join(nodes, fmt.Sprintf("node%d", node))
		distances := slices.Repeat([]string{strconv.Itoa(distanceOther)}, len(cpus))
		distances[node] = strconv.Itoa(distanceSelf)
		add(path.Join(dir, "distance"), strings.Join(distances, " "))
		add(path.Join(dir, "cpulist"), list(own))
		add(path.Join(dir, "cpumap"), mask(own))
		add(path.Join(dir, "meminfo"), memoryInfo(node, memoryKiB/uint64(len(cpus))))
		for _, size := range []string{"hugepages-2048kB", "hugepages-1048576kB"} {
			for _, name := range []string{"nr_hugepages", "free_hugepages", "surplus_hugepages"} {
				add(path.Join(dir, "hugepages", size, name), "0")
			}
		}
		for _, c := range own {
			all = append(all, file{path: path.Join(dir, fmt.Sprintf("cpu%d", c.id)), target: fmt.Sprintf("../../cpu/cpu%d", c.id)})
			all = append(all, cpuFiles(c, node)...)
		}
	}
	add(path.Join(SysfsDir, "devices/system/cpu/online"), list(cpus...))
	return all
}

func cpuFiles(c cpu, node int) []file {
	dir := path.Join(SysfsDir, "devices/system/cpu", fmt.Sprintf("cpu%d", c.id))
	return []file{
		{path: path.Join(dir, fmt.Sprintf("node%d", node)), target: fmt.Sprintf("../../node/node%d", node)},
		{path: path.Join(dir, "topology/core_id"), content: fmt.Appendln(nil, c.core), mode: 0o444},
		{path: path.Join(dir, "topology/physical_package_id"), content: fmt.Appendln(nil, c.socket), mode: 0o444},
	}
}

func memoryInfo(node int, kibibytes uint64) string {
	return fmt.Sprintf("Node %d MemTotal:       %d kB\nNode %d MemFree:        %d kB\nNode %d MemUsed:        0 kB\n"+
		"Node %d HugePages_Total:     0\nNode %d HugePages_Free:      0\nNode %d HugePages_Surp:      0",
		node, kibibytes, node, kibibytes, node, node, node, node)
}

func count(n int) []int {
	numbers := make([]int, n)
	for i := range numbers {
		numbers[i] = i
	}
	return numbers
}

func ids(groups ...[]cpu) []int {
	var all []int
	for _, c := range slices.Concat(groups...) {
		all = append(all, c.id)
	}
	slices.Sort(all)
	return all
}

// list is the kernel's list format of the CPUs.
func list(groups ...[]cpu) string { return formatList(ids(groups...)) }

func formatList(sorted []int) string {
	var parts []string
	for i := 0; i < len(sorted); {
		j := i
		for j+1 < len(sorted) && sorted[j+1] == sorted[j]+1 {
			j++
		}
		part := strconv.Itoa(sorted[i])
		if j > i {
			part += "-" + strconv.Itoa(sorted[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	return strings.Join(parts, ",")
}

// mask is the kernel's bitmap format of the CPUs: words of 32 bits in hexadecimal, the highest first.
func mask(groups ...[]cpu) string {
	all := ids(groups...)
	words := []uint32{0}
	for _, id := range all {
		for len(words) <= id/32 {
			words = append(words, 0)
		}
		words[id/32] |= 1 << (id % 32)
	}
	parts := make([]string, len(words))
	for i, word := range words {
		parts[len(words)-1-i] = fmt.Sprintf("%08x", word)
	}
	return strings.Join(parts, ",")
}
