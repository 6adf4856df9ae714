// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// PCI class of an NVSwitch: a bridge of another kind (PCI Code and ID Assignment, 06h 80h).
const classNVSwitch = "0x068000"

// player turns a recording into a profile.
type player struct {
	Recording
	profile  simulated.Profile
	problems []string
}

func (p *player) problem(format string, args ...any) {
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

// Profile returns the machine as a profile for the simulation, and what of it the recording does not say or the simulation cannot do, in
// which the profile has an assumption. It fails if the result is no valid profile.
func (r Recording) Profile(name string) (profile simulated.Profile, assumed []string, err error) {
	p := &player{Recording: r, profile: simulated.Profile{Name: name, NUMANodes: 1, Models: map[string]simulated.Model{}}}
	p.profile.Driver.Version = r.text("", "SystemGetDriverVersion", "")
	if cuda, ok := r.number("", "SystemGetCudaDriverVersion", ""); ok {
		p.profile.Driver.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	count, _ := r.number("", "DeviceGetCount", "")
	for index := range count {
		p.addGPU(index)
	}
	p.addLinks(count)
	if err := p.profile.Validate(); err != nil {
		return simulated.Profile{}, p.problems, fmt.Errorf("make a profile of the recording: %w", err)
	}
	return p.profile, p.problems, nil
}

func (p *player) addGPU(index int) {
	on := fmt.Sprint("gpu", index)
	g := simulated.GPU{UUID: p.text(on, "GetUUID", ""), NUMANode: -1}
	if g.UUID == "" {
		p.problem("%s does not report its UUID: it is left out, and later GPUs have other indices", on)
		return
	}
	if minor, ok := p.number(on, "GetMinorNumber", ""); ok {
		g.Minor = &minor
	}
	m := p.model(on)
	if values, ok := p.find(on, "GetPciInfo", ""); ok && len(values) > 0 {
		if info, isObject := values[0].(map[string]any); isObject {
			g.PCI = address(fmt.Sprint(info["BusId"]))
		}
	}
	found := false
	for _, f := range p.Machine.PCI {
		if f.Address != g.PCI {
			continue
		}
		found = true
		places := strings.Split(f.Path, "/")
		g.Root, g.Bridges = places[0], slices.Clone(places[1:max(1, len(places)-1)])
		g.NUMANode = f.NUMANode
		m.PCIDevice, m.PCISubsystem = f.Device, f.Subsystem
		p.profile.NUMANodes = max(p.profile.NUMANodes, f.NUMANode+1)
	}
	if !found {
		p.problem("%s: sysfs has no %s: its place on the bus is assumed", on, g.PCI)
		g.Root, m.PCIDevice, m.PCISubsystem = "pci0000:00", "10de:0000", "10de:0000"
	}
	if mode, ok := p.number(on, "GetMigMode", ""); ok {
		m.MIG = p.table(on)
		g.MIGEnabled = mode == 1 && m.MIG != ""
		if g.MIGEnabled {
			g.Partitions = p.partitions(on, m.MIG)
		}
	}
	g.Model = p.nameModel(m)
	p.profile.GPUs = append(p.profile.GPUs, g)
}

// address returns an address as Linux writes it: NVML has domains of eight digits.
func address(busID string) string {
	busID = strings.ToLower(busID)
	if rest, ok := strings.CutPrefix(busID, "0000"); ok && strings.Index(rest, ":") == 4 {
		return rest
	}
	return busID
}

const mebibyte = 1 << 20

func (p *player) model(on string) simulated.Model {
	m := p.similar(p.text(on, "GetName", ""))
	named := func(what, method string, name func(int) (string, bool), into *string, fields ...string) {
		value, ok := p.number(on, method, "", fields...)
		if !ok {
			return
		}
		known, ok := name(value)
		if !ok {
			p.problem("%s: the simulation has no %s %d", on, what, value)
			return
		}
		*into = known
	}
	named("brand", "GetBrand", simulated.BrandName, &m.Brand)
	named("architecture", "GetArchitecture", simulated.ArchitectureName, &m.Architecture)
	m.AddressingMode = ""
	named("addressing mode", "GetAddressingMode", simulated.AddressingModeName, &m.AddressingMode, "Value")
	if values, ok := p.find(on, "GetCudaComputeCapability", ""); ok && len(values) == 2 {
		m.ComputeCapability = fmt.Sprintf("%v.%v", values[0], values[1])
	}
	if total, ok := p.number(on, "GetMemoryInfo", "", "Total"); ok {
		m.MemoryMiB = uint64(total) / mebibyte
	}
	if used, ok := p.number(on, "GetMemoryInfo", "", "Used"); ok {
		m.ReservedMiB = uint64(used) / mebibyte
	}
	_, m.ECC = p.number(on, "GetEccMode", "")
	_, m.FabricInfo = p.find(on, "GetGpuFabricInfo", "")
	m.NVLinks = 0
	for link := 0; ; link++ {
		if _, ok := p.number(on, "GetNvLinkState", strconv.Itoa(link)); !ok {
			break
		}
		m.NVLinks++
	}
	return m
}

// similar returns the model of an embedded profile with the same name, for what the agent does not ask a driver.
func (p *player) similar(product string) simulated.Model {
	for _, name := range simulated.Names() {
		profile, err := simulated.Load(name)
		if err != nil {
			continue
		}
		for _, key := range slices.Sorted(maps.Keys(profile.Models)) {
			if profile.Models[key].ProductName == product {
				m := profile.Models[key]
				m.MIG = ""
				return m
			}
		}
	}
	p.problem("no profile has a %q: the PCIe generation is assumed", product)
	return simulated.Model{ProductName: product, PCIeGeneration: 4}
}

// nameModel returns the key of a model, which GPUs of the same model share.
func (p *player) nameModel(m simulated.Model) string {
	for key, known := range p.profile.Models {
		if known == m {
			return key
		}
	}
	key := strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		default:
			return '-'
		}
	}, strings.ToLower(m.ProductName)), "-")
	if _, taken := p.profile.Models[key]; taken {
		key += fmt.Sprint("-", len(p.profile.Models))
	}
	p.profile.Models[key] = m
	return key
}

// table returns the name of the table in simulated/models with exactly the GPU's MIG profiles; empty for none.
func (p *player) table(on string) string {
	offered := p.offered(on)
	var nearest []string
	for _, m := range models.All() {
		var differences []string
		expected := map[int]string{}
		for _, profile := range m.Profiles {
			expected[profile.Enum] = row(profile.ID, profile.Compute, profile.Instances, int(profile.Capacity.MemoryBytes/mebibyte),
				profile.Capacity.Multiprocessors, starts(profile))
		}
		for enum := range max(maximum(offered), maximum(expected)) + 1 {
			if offered[enum] != expected[enum] {
				differences = append(differences, fmt.Sprintf("profile %d is {%s}, table %s has {%s}", enum, offered[enum], m.Name, expected[enum]))
			}
		}
		if len(differences) == 0 {
			return m.Name
		}
		if nearest == nil || len(differences) < len(nearest) {
			nearest = differences
		}
	}
	p.problem("%s: no table of simulated/models has its MIG profiles, so it has no MIG here. The nearest differs: %s", on,
		strings.Join(nearest, "; "))
	return ""
}

func maximum(rows map[int]string) (most int) {
	for enum := range rows {
		most = max(most, enum)
	}
	return most
}

func starts(p models.Profile) (all []string) {
	for _, place := range p.Placements {
		all = append(all, fmt.Sprintf("%d+%d", place.Start, place.Size))
	}
	return all
}

func row(id, compute, instances, memory, multiprocessors int, places []string) string {
	return fmt.Sprintf("ID %d, %d slices, at most %d, %d MiB, %d SMs, at %s", id, compute, instances, memory, multiprocessors,
		strings.Join(places, " "))
}

// offered returns the GPU's MIG profiles by the number with which NVML is asked for them.
func (p *player) offered(on string) map[int]string {
	rows := map[int]string{}
	for _, c := range p.Calls {
		if c.On != on || c.Method != "GetGpuInstanceProfileInfo" || c.Return != 0 {
			continue
		}
		enum, err := strconv.Atoi(c.key())
		if err != nil {
			continue
		}
		field := func(name string) int {
			n, _ := p.number(on, c.Method, c.key(), name)
			return n
		}
		id := field("Id")
		var places []string
		if values, ok := p.find(on, "GetGpuInstancePossiblePlacements", strconv.Itoa(id)); ok && len(values) > 0 {
			list, _ := values[0].([]any)
			for _, item := range list {
				if place, ok := item.(map[string]any); ok {
					places = append(places, fmt.Sprintf("%v+%v", place["Start"], place["Size"]))
				}
			}
		}
		rows[enum] = row(id, field("SliceCount"), field("InstanceCount"), field("MemorySizeMB"), field("MultiprocessorCount"), places)
	}
	return rows
}

// partitions returns the GPU instances that existed, in order of place.
func (p *player) partitions(on, table string) []simulated.Partition {
	m, _ := models.Named(table)
	var all []simulated.Partition
	seen := map[string]bool{}
	for _, c := range p.Calls {
		if c.Method != "GetInfo" || c.Return != 0 || seen[c.On] || !strings.HasPrefix(c.On, on+"/gi") || strings.Contains(c.On, "/ci") {
			continue
		}
		seen[c.On] = true
		id, _ := p.number(c.On, "GetInfo", "", "ProfileId")
		start, _ := p.number(c.On, "GetInfo", "", "Placement", "Start")
		at := slices.IndexFunc(m.Profiles, func(profile models.Profile) bool { return profile.ID == id })
		if at < 0 {
			p.problem("%s: the simulation has no MIG profile %d: left out", c.On, id)
			continue
		}
		partition := simulated.Partition{Profile: m.Profiles[at].Name, Start: start, Compute: p.computes(c.On)}
		if len(partition.Compute) == 1 && partition.Compute[0] == m.Profiles[at].Compute {
			partition.Compute = nil
		}
		all = append(all, partition)
	}
	slices.SortFunc(all, func(a, b simulated.Partition) int { return a.Start - b.Start })
	return all
}

// computes returns the sizes of the compute instances in a GPU instance, in order of place.
func (p *player) computes(instance string) (sizes []int) {
	type place struct{ start, size int }
	places := map[string]place{}
	for _, c := range p.Calls {
		if c.Method != "GetInfo" || c.Return != 0 || !strings.HasPrefix(c.On, instance+"/ci") {
			continue
		}
		start, _ := p.number(c.On, "GetInfo", "", "Placement", "Start")
		size, _ := p.number(c.On, "GetInfo", "", "Placement", "Size")
		places[c.On] = place{start, size}
	}
	for _, place := range slices.SortedFunc(maps.Values(places), func(a, b place) int { return a.start - b.start }) {
		sizes = append(sizes, place.size)
	}
	return sizes
}

// NVML_NVLINK_DEVICE_TYPE_SWITCH in nvml.h.
const remoteSwitch = 2

// addLinks groups the GPUs with links to switches, and those with links to each other.
func (p *player) addLinks(count int) {
	var switched []int
	direct := map[int]map[string]int{}
	for index := range min(count, len(p.profile.GPUs)) {
		on := fmt.Sprint("gpu", index)
		toSwitch := false
		direct[index] = map[string]int{}
		for _, c := range p.Calls {
			if c.On != on || c.Return != 0 {
				continue
			}
			switch c.Method {
			case "GetNvLinkRemoteDeviceType":
				kind, _ := p.number(on, c.Method, c.key())
				toSwitch = toSwitch || kind == remoteSwitch
			case "GetNvLinkRemotePciInfo":
				if values, ok := p.find(on, c.Method, c.key()); ok && len(values) > 0 {
					if info, isObject := values[0].(map[string]any); isObject {
						direct[index][address(fmt.Sprint(info["BusId"]))]++
					}
				}
			}
		}
		if toSwitch {
			switched = append(switched, index)
		}
	}
	if len(switched) > 1 {
		group := simulated.NVLinkGroup{GPUs: switched}
		for _, f := range p.Machine.PCI {
			if f.Class == classNVSwitch {
				group.Switches = append(group.Switches, f.Address)
			}
		}
		if len(group.Switches) == 0 {
			// Outside of the machine, as in a rack. The agent asks no link for the address of its switch.
			group.Switches, group.Outside = []string{"ffff:ff:1f.0"}, true
		}
		p.addFabric(&group)
		p.profile.NVLink = append(p.profile.NVLink, group)
	}
	p.addDirectLinks(direct)
}

// addFabric sets the fabric that the first GPU of a group is in, if it is larger than the machine.
func (p *player) addFabric(group *simulated.NVLinkGroup) {
	on := fmt.Sprint("gpu", group.GPUs[0])
	values, ok := p.find(on, "GetGpuFabricInfo", "")
	if !ok || len(values) == 0 {
		return
	}
	info, isObject := values[0].(map[string]any)
	cluster := fmt.Sprint(info["ClusterUuid"])
	if !isObject || len(cluster) != 32 || strings.Trim(cluster, "0") == "" {
		return
	}
	clique, _ := p.number(on, "GetGpuFabricInfo", "", "CliqueId")
	group.ClusterUUID = strings.Join([]string{cluster[:8], cluster[8:12], cluster[12:16], cluster[16:20], cluster[20:]}, "-")
	group.CliqueID = uint32(clique)
}

func (p *player) addDirectLinks(direct map[int]map[string]int) {
	grouped := map[int]bool{}
	for index := range len(p.profile.GPUs) {
		group := simulated.NVLinkGroup{GPUs: []int{index}}
		for peer := range len(p.profile.GPUs) {
			if links := direct[index][p.profile.GPUs[peer].PCI]; links > 0 && peer != index {
				group.GPUs = append(group.GPUs, peer)
				if group.PairLinks != 0 && group.PairLinks != links {
					p.problem("gpu%d has %d links to gpu%d and %d to another GPU: %d are assumed", index, links, peer, group.PairLinks, group.PairLinks)
					continue
				}
				group.PairLinks = links
			}
		}
		if grouped[index] || len(group.GPUs) < 2 {
			continue
		}
		for _, member := range group.GPUs {
			grouped[member] = true
		}
		slices.Sort(group.GPUs)
		p.profile.NVLink = append(p.profile.NVLink, group)
	}
}
