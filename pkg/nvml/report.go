// SPDX-License-Identifier: Apache-2.0

// Prints what inspect has read.

package nvml

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml/record"
)

// WriteText writes the report for a reader. The JSON encoding has more.
func (r Report) WriteText(w io.Writer) error {
	t := &text{tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.StripEscape), nil}
	t.line("Tandem %s: what the agent finds on this node", r.Version)
	if r.Problem != "" {
		t.line("PROBLEM: %s", r.Problem)
	}
	if r.Unidentified > 0 {
		t.line("PROBLEM: %d GPUs do not report their UUID", r.Unidentified)
	}
	r.writeLayout(t)
	r.writeMachine(t)
	for _, g := range r.inventory.GPUs {
		r.writeGPU(t, g)
	}
	r.writeTopology(t)
	r.writeCDI(t)
	r.writeCalls(t)
	if t.err == nil {
		t.err = t.to.Flush()
	}
	return t.err
}

// text collects the first error of a writer.
type text struct {
	to  *tabwriter.Writer
	err error
}

func (t *text) line(format string, args ...any) {
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.to, format+"\n", args...)
	}
}

// field writes a line of a section.
func (t *text) field(name, value string) { t.line("  %s\t%s", name, cmp.Or(value, "-")) }

// title starts a section. The empty line ends the columns of the one before.
func (t *text) title(format string, args ...any) { t.line("\n"+format, args...) }

func (r Report) writeLayout(t *text) {
	l := r.Layout
	t.title("Layout")
	t.field("driver root", l.DriverRoot)
	t.field("device root", l.DevRoot)
	t.field("library", l.Library)
	t.field("library directories", strings.Join(l.LibraryDirs, " "))
	t.field("nvidia-smi", l.SMI)
	t.field("ldconfig", l.Ldconfig)
	t.field("CDI hook", l.Hook)
	for _, looked := range l.Looked {
		t.field("looked at", looked)
	}
}

func (r Report) writeMachine(t *text) {
	m := r.Machine
	t.title("Kernel")
	t.field("release", m.Kernel)
	t.field("nvidia module", m.Module)
	t.field("this process", fmt.Sprintf("user %d, SYS_ADMIN %t", m.UID, m.SysAdmin))
	var majors []string
	for _, name := range slices.Sorted(maps.Keys(m.Majors)) {
		majors = append(majors, fmt.Sprintf("%s %d", name, m.Majors[name]))
	}
	t.field("majors", strings.Join(majors, ", "))
	capabilities := 0
	for _, node := range m.Nodes {
		if strings.Contains(node.Path, "/nvidia-caps/") {
			capabilities++
			continue
		}
		t.field("node", fmt.Sprintf("%s %d:%d %s", node.Path, node.Major, node.Minor, node.Mode))
	}
	t.field("MIG capabilities", fmt.Sprintf("%d, nodes of %d", m.MIGCapabilities, capabilities))
	for _, f := range m.PCI {
		t.field("PCI", fmt.Sprintf("%s class %s, %s, subsystem %s, NUMA node %d", f.Path, f.Class, f.Device, f.Subsystem, f.NUMANode))
	}
}

func (r Report) writeGPU(t *text, g gpu.GPU) {
	t.title("%s  %s", g.Name(), g.UUID)
	t.field("health", healthText(g.Health))
	t.field("product", fmt.Sprintf("%s, %s, %s, compute capability %s", g.ProductName, g.Brand, g.Architecture, g.ComputeCapability))
	t.field("driver", fmt.Sprintf("%s, CUDA %s", g.DriverVersion, g.CUDADriverVersion))
	ecc := "not reported"
	if g.ECCEnabled != nil {
		ecc = fmt.Sprint(*g.ECCEnabled)
	}
	memory := "not reported"
	if g.MemoryBytes > 0 {
		memory = fmt.Sprintf("%d MiB", g.MemoryBytes/mebibyte)
	}
	t.field("memory", fmt.Sprintf("%s, ECC %s, addressing %s", memory, ecc, cmp.Or(g.AddressingMode, "not reported")))
	t.field("place", fmt.Sprintf("NVML index %d, minor %d, PCI %s, root %s, NUMA node %d",
		g.Index, g.Minor, cmp.Or(g.PCIBusID, "-"), cmp.Or(g.PCIeRoot, "-"), g.NUMANode))
	t.field("NVLink", fmt.Sprintf("domain %s, fabric clique %s", cmp.Or(g.NVLinkDomain, "-"), cmp.Or(g.FabricClique, "-")))
	t.field("settings", r.settings[g.UUID])
	if !g.MIGCapable {
		t.field("MIG", "none")
		return
	}
	t.field("MIG", fmt.Sprintf("enabled %t", g.MIGEnabled))
	for _, p := range g.Profiles {
		var starts []string
		for _, place := range p.Placements {
			starts = append(starts, fmt.Sprint(place.Start))
		}
		size := 0
		if len(p.Placements) > 0 {
			size = p.Placements[0].Size
		}
		t.field("profile", fmt.Sprintf("%s (ID %d): at most %d, %d slices at %s, %d MiB, %d SMs",
			p.Name, p.ID, p.Instances, size, strings.Join(starts, ","), p.Capacity.MemoryBytes/mebibyte, p.Capacity.Multiprocessors))
	}
	for _, p := range g.Partitions {
		t.field("partition", fmt.Sprintf("%s %s, GPU instance %d, compute instance %d, capabilities %d and %d: %s",
			p.Name(), cmp.Or(p.UUID, "(no MIG device)"), p.GPUInstance, p.ComputeInstance, p.Caps[0], p.Caps[1], healthText(p.Health)))
	}
}

func healthText(h gpu.Health) string {
	if h.Healthy() {
		return "healthy"
	}
	return fmt.Sprintf("UNHEALTHY, %s: %s", h.Reason, h.Message)
}

// linkNames are the abbreviations of nvidia-smi topo -m.
var linkNames = map[gpu.Link]string{
	gpu.LinkUnknown: "?", gpu.LinkSystem: "SYS", gpu.LinkNode: "NODE", gpu.LinkHostBridge: "PHB", gpu.LinkMultiple: "PXB",
	gpu.LinkSingle: "PIX", gpu.LinkInternal: "PSB",
}

func (r Report) writeTopology(t *text) {
	if len(r.inventory.Links) < 2 {
		return
	}
	t.title("Topology (PCIe as in nvidia-smi topo -m, + number of NVLinks)")
	row := "  "
	for _, g := range r.inventory.GPUs {
		row += "\t" + g.Name()
	}
	t.line("%s", row)
	for i, g := range r.inventory.GPUs {
		row := "  " + g.Name()
		for j, pair := range r.inventory.Links[i] {
			switch {
			case i == j:
				row += "\t-"
			case pair.NVLinks > 0:
				row += fmt.Sprintf("\t%s+NV%d", linkNames[pair.PCIe], pair.NVLinks)
			default:
				row += "\t" + linkNames[pair.PCIe]
			}
		}
		t.line("%s", row)
	}
}

func (r Report) writeCDI(t *text) {
	t.title("CDI spec")
	if r.CDIProblem != "" {
		t.line("PROBLEM: %s", r.CDIProblem)
	}
	for _, uuid := range slices.Sorted(maps.Keys(r.CDIFailed)) {
		t.line("PROBLEM: %s is not in it: %s", uuid, r.CDIFailed[uuid])
	}
	if len(r.CDI) > 0 {
		t.line("%s", strings.TrimSpace(string(r.CDI)))
	}
}

// slow is the duration from which the text has a call's.
const slow = 100 * time.Millisecond

// writeCalls writes one line for each method and return code.
func (r Report) writeCalls(t *text) {
	t.title("Calls of NVML")
	t.line("  method\treturn code\ton")
	type row struct {
		method string
		ret    int
		code   string
	}
	grouped := map[row][]record.Call{}
	for _, c := range r.Calls {
		key := row{c.Method, c.Return, c.Code}
		grouped[key] = append(grouped[key], c)
	}
	rows := slices.SortedFunc(maps.Keys(grouped), func(a, b row) int {
		return cmp.Or(strings.Compare(a.method, b.method), cmp.Compare(a.ret, b.ret), strings.Compare(a.code, b.code))
	})
	for _, key := range rows {
		slowest := time.Duration(0)
		for _, c := range grouped[key] {
			slowest = max(slowest, c.Slowest)
		}
		on := cmp.Or(strings.Join(handlesOf(grouped[key]), " "), "library")
		if key.method == "LookupSymbol" && key.ret != 0 {
			var lacking []string
			for _, c := range grouped[key] {
				lacking = append(lacking, string(c.Args))
			}
			on = strings.Join(lacking, " ")
		}
		if slowest >= slow {
			on += fmt.Sprintf(" (the slowest took %s)", slowest.Round(time.Millisecond))
		}
		code := fmt.Sprintf("%s (%d)", key.code, key.ret)
		if key.code == record.NoAnswer {
			code = key.code
		}
		t.line("  %s\t%s\t%s", key.method, code, on)
	}
}
