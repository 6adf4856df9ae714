// SPDX-License-Identifier: Apache-2.0

package page

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
)

var templates = template.Must(template.ParseFS(files, "files/*.html"))

// moment is where a view has the time of its data. Texts of the cluster are escaped and cannot contain it.
const moment = `<time id="at"></time>`

// momentHeader tells a browser the time of the data, also if nothing else has changed.
const momentHeader = "Data-Time"

// respond writes a view of what was so at a time, or that it has not changed since the browser read it.
func respond(w http.ResponseWriter, r *http.Request, name string, view any, at time.Time) {
	var body bytes.Buffer
	if err := templates.ExecuteTemplate(&body, name, view); err != nil {
		http.Error(w, fmt.Sprintf("write %s: %v", name, err), http.StatusInternalServerError)
		return
	}
	sum := sha256.Sum256(body.Bytes())
	tag := `"` + hex.EncodeToString(sum[:16]) + `"`
	exact := at.Format(time.RFC3339)
	w.Header().Set("ETag", tag)
	w.Header().Set(momentHeader, exact)
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	now := fmt.Sprintf(`<time id="at" datetime="%[1]s" title="%[1]s">%[2]s</time>`, exact, at.Format(time.TimeOnly))
	_, _ = w.Write(bytes.Replace(body.Bytes(), []byte(moment), []byte(now), 1)) // the browser has gone
}

// style has the signs of the states.
var style = overview.Style{UTF8: true}

// frameView is what each view says: which cluster it shows, and to whom.
type frameView struct {
	Where
	User string
}

// fleetView is the view of all nodes.
type fleetView struct {
	frameView
	Query  string
	Listed bool
	Notes  []string
	// Problems counts the nodes that have one.
	Problems int
	Counts   []countsView
	Waiting  []groupOfPods
	// MoreOwners are not shown. They are all shown with AllWaiting as the filter.
	MoreOwners int
	AllWaiting string
	Nodes      []nodeView
	// From and To are the numbers of the first and the last node, and Found is how many match the filter.
	From, To, Found        int
	Page, Pages            int
	PreviousPage, NextPage int
	// MostOpened is how many rows a viewer may open.
	MostOpened int
}

// countsView counts what is of one kind, such as GPUs.
type countsView struct {
	ID     string
	Counts []countView
}

// countView is a number that leads to what it counts. State is that of a device.
type countView struct {
	Text, Query string
	State       overview.State
	Bad         bool
}

// states in the order of the legend.
var states = []overview.State{
	overview.Free, overview.Claim, overview.Pod, overview.Allocated, overview.Draining, overview.Unhealthy, overview.Maintenance, overview.Tainted, overview.Unserved, overview.Excluded,
}

// nodeView is a node in any view.
type nodeView struct {
	overview.Node
	Counts       string
	Problems     []problemView
	MoreProblems int
	// Open shows the devices. All is set if the viewer need not ask for them.
	Open, All bool
	Rows      []deviceView
	// Groups are the GPUs as in a picture.
	Groups []groupView
}

type groupView struct {
	Title string
	GPUs  []gpuView
}

// gpuView is a GPU with its partitions.
type gpuView struct {
	deviceView
	NVLink, Clique string
	Bar            barView
	Partitions     []deviceView
}

type deviceView struct {
	Name, Model, Slices         string
	State                       overview.State
	Mark, Share, Holders, Notes string
	// Use is what dcgm-exporter measures of it.
	Use       string
	Partition bool
}

// barView is a GPU drawn to scale: its memory slices, or one part without partitions.
type barView struct {
	Title string
	Total int
	Parts []partView
}

type partView struct {
	Title       string
	State       overview.State
	Start, Size int
}

// groupOfPods are the waiting pods of one owner.
type groupOfPods struct {
	ID string
	explain.Group
	Request string
	Age     ageView
	// Open has the pods in List.
	Open bool
	List []podView
	More int
}

type podView struct {
	Namespace, Name, Reason string
	Age                     ageView
}

// ageView is how long ago something was, and exactly when. It is empty if that is not known.
type ageView struct{ Text, Exact string }

func ageOf(since *metav1.Time, now time.Time) ageView {
	if since.IsZero() {
		return ageView{}
	}
	age := ageView{Exact: since.UTC().Format(time.RFC3339)}
	switch d := now.Sub(since.Time); {
	case d < time.Minute:
		age.Text = "< 1 min"
	case d < time.Hour:
		age.Text = fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		age.Text = fmt.Sprintf("%d h", d/time.Hour)
	default:
		age.Text = fmt.Sprintf("%d d", d/(24*time.Hour))
	}
	return age
}

func (p *Page) showFleet(w http.ResponseWriter, r *http.Request) {
	values := r.URL.Query()
	query := values.Get("q")
	if len(query) > mostQuery {
		http.Error(w, fmt.Sprintf("The filter has %d bytes; %d are allowed.", len(query), mostQuery), http.StatusBadRequest)
		return
	}
	opened := values["open"]
	opened = opened[:min(len(opened), mostOpened)]
	number, _ := strconv.Atoi(values.Get("page")) // another text is page 1
	f, s := filterOf(query), p.fleet.now(r.Context())
	view := fleetView{frameView: frameView{p.where, s.user}, Query: query, Listed: s.listed, AllWaiting: byState + ":" + isWaiting, MostOpened: mostOpened}
	for _, about := range slices.Sorted(maps.Keys(s.notes)) {
		view.Notes = append(view.Notes, s.notes[about])
	}

	queue := explain.NewQueue(s.gpus)
	queue.Know(p.fleet.objects.Of(r.Context(), s.pending))
	groups, waiting := f.waiting(queue, s.pending)
	most := mostOwners
	if len(f) == 0 {
		most = mostOwnersHere
	}
	view.MoreOwners = max(0, len(groups)-most)
	for _, g := range groups[:len(groups)-view.MoreOwners] {
		view.Waiting = append(view.Waiting, ownerView(g, queue, opened, s.at))
	}

	view.Counts, view.Problems = countsOf(s.nodes, waiting)
	found := f.search(s.nodes)
	var from int
	from, view.To, view.Page, view.Pages = pageOf(found, number)
	view.From, view.Found = from+1, len(found)
	if view.Page > 1 {
		view.PreviousPage = view.Page - 1
	}
	if view.Page < view.Pages {
		view.NextPage = view.Page + 1
	}
	for _, n := range found[from:view.To] {
		of := overview.PictureOf(n, nil, p.fleet.cluster.DriverName)
		if slices.ContainsFunc(n.Devices, func(d overview.Device) bool { return d.Parent != "" }) {
			var note string
			if of, note = p.fleet.picture(r.Context(), n); note != "" && !slices.Contains(view.Notes, note) {
				view.Notes = append(view.Notes, note)
			}
		}
		node := viewOf(of)
		node.Problems, node.MoreProblems = problemsOf(n, s.at)
		node.All = len(found) <= mostOpen
		if node.Open = node.All || slices.Contains(opened, "node-"+n.Name); node.Open {
			for _, d := range n.Devices {
				node.Rows = append(node.Rows, describe(d, n))
			}
		}
		view.Nodes = append(view.Nodes, node)
	}
	respond(w, r, "fleet.html", view, s.at)
}

// countsOf counts nodes, waiting pods and devices. Each count leads to what it counts.
func countsOf(nodes []overview.Node, waiting int) (views []countsView, withProblems int) {
	problems := map[string]int{}
	kinds := [2]struct {
		what  string
		total int
		in    map[overview.State]int
	}{{what: "GPU", in: map[overview.State]int{}}, {what: "partition", in: map[overview.State]int{}}}
	for _, n := range nodes {
		for _, state := range problemStates(n) {
			problems[state]++
		}
		for _, d := range n.Devices {
			kind := &kinds[0]
			if d.Parent != "" {
				kind = &kinds[1]
			}
			kind.in[d.State]++
			if d.State != overview.Excluded {
				kind.total++
			}
		}
	}
	all := countsView{ID: "counts-nodes", Counts: []countView{{Text: explain.Number(len(nodes), "node")}}}
	for _, c := range []struct{ state, text string }{
		{withProblem, "with a problem"}, {notServing, "without a serving agent"}, {inConflict, "with a claim in conflict"},
	} {
		if n := problems[c.state]; n > 0 {
			all.Counts = append(all.Counts, countView{Text: fmt.Sprintf("%d %s", n, c.text), Query: byState + ":" + c.state, Bad: true})
		}
	}
	if waiting > 0 {
		all.Counts = append(all.Counts, countView{Text: explain.Number(waiting, "waiting pod"), Query: byState + ":" + isWaiting})
	}
	views = append(views, all)
	for _, kind := range kinds {
		if len(kind.in) == 0 {
			continue
		}
		of := countsView{ID: "counts-" + kind.what + "s", Counts: []countView{{Text: explain.Number(kind.total, kind.what)}}}
		for _, state := range states {
			if n := kind.in[state]; n > 0 {
				query := byState + ":" + strings.ToLower(string(state))
				of.Counts = append(of.Counts, countView{Text: fmt.Sprintf("%s %d", style.Mark(state), n), Query: query, State: state})
			}
		}
		views = append(views, of)
	}
	return views, problems[withProblem]
}

// problemView is a line about a node, in the colour of a state.
type problemView struct {
	Text  string
	State overview.State
	Age   ageView
}

// problemsOf returns what is wrong with a node, the most urgent first.
func problemsOf(n overview.Node, now time.Time) (views []problemView, more int) {
	if n.Problem != "" {
		views = append(views, problemView{n.Problem, overview.Unhealthy, ageView{}})
	}
	for _, c := range n.Conflicts {
		views = append(views, problemView{"Conflict: " + c.String(), overview.Unhealthy, ageOf(&c.Since, now)})
	}
	for _, state := range []overview.State{overview.Unhealthy, overview.Maintenance, overview.Tainted} {
		for _, d := range n.Devices {
			if d.State != state {
				continue
			}
			view := problemView{Text: strings.TrimSuffix(d.Name+": "+string(state)+": "+d.WhyOut(), ": "), State: state}
			if state != overview.Unhealthy {
				view.Age = ageOf(d.OutSince(), now)
			}
			views = append(views, view)
		}
	}
	more = max(0, len(views)-mostProblems)
	return views[:len(views)-more], more
}

func ownerView(g explain.Group, queue *explain.Queue, opened []string, now time.Time) groupOfPods {
	id := sha256.Sum256([]byte(strings.Join(append([]string{g.Owner()}, g.Requests...), "\n")))
	since := g.Since()
	view := groupOfPods{ID: "owner-" + hex.EncodeToString(id[:8]), Group: g, Request: strings.Join(g.Requests, ", "), Age: ageOf(&since, now)}
	if view.Open = len(g.Pods) > 1 && slices.Contains(opened, view.ID); !view.Open {
		return view
	}
	view.More = max(0, len(g.Pods)-mostPods)
	for _, pod := range g.Pods[:len(g.Pods)-view.More] {
		view.List = append(view.List, podView{pod.Namespace, pod.Name, queue.Reason(pod), ageOf(&pod.CreationTimestamp, now)})
	}
	return view
}

func viewOf(p overview.Picture) nodeView {
	o := overview.New([]overview.Node{p.Node})
	view := nodeView{Node: p.Node, Counts: o.GPUs.Of("GPU")}
	if partitions := o.Partitions.Of("partition"); partitions != "" {
		view.Counts += "; " + partitions
	}
	for _, g := range p.Groups {
		group := groupView{Title: g.Title()}
		for _, gpu := range g.GPUs {
			of := gpuView{deviceView: describe(gpu.Device, p.Node), NVLink: gpu.NVLink, Clique: gpu.Clique}
			of.Bar = barView{Title: gpu.Name + ": " + string(gpu.State), Total: max(1, gpu.Slices)}
			for _, part := range gpu.Parts {
				drawn := partView{Title: part.Slices() + ": free", State: overview.Free, Start: part.Start, Size: part.Size}
				row := deviceView{Slices: part.Slices(), Name: "-", Model: "-", State: overview.Free, Mark: style.Mark(overview.Free)}
				if d := part.Partition; d != nil {
					row = describe(*d, p.Node)
					row.Slices = part.Slices()
					drawn.State, drawn.Title = d.State, titleOf(row)
				}
				of.Bar.Parts = append(of.Bar.Parts, drawn)
				of.Bar.Title += ", " + part.Slices() + " " + row.Model + " " + string(row.State)
				of.Partitions = append(of.Partitions, row)
			}
			if len(gpu.Parts) == 0 {
				of.Bar.Parts = []partView{{Title: titleOf(of.deviceView), State: gpu.State, Size: 1}}
			}
			group.GPUs = append(group.GPUs, of)
		}
		view.Groups = append(view.Groups, group)
	}
	return view
}

// titleOf is what the pointer shows at a part.
func titleOf(d deviceView) string {
	text := d.Name + ": " + string(d.State)
	for _, more := range []string{d.Holders, d.Notes} {
		if more != "" {
			text += ": " + more
		}
	}
	return text
}

func describe(d overview.Device, n overview.Node) deviceView {
	holders, share := d.Describe(n)
	notes := slices.DeleteFunc([]string{d.WhyOut(), d.Slowdown}, func(text string) bool { return text == "" })
	return deviceView{
		Name: d.Name, Model: cmp.Or(d.Profile, d.Model, "-"), State: d.State, Mark: style.Mark(d.State), Share: share, Holders: holders,
		Notes: strings.Join(notes, "; "), Partition: d.Parent != "",
		Use: d.Metrics.String(),
	}
}

// pictureView is the view of one node.
type pictureView struct {
	frameView
	nodeView
	Notes []string
	// Unmeasured is why there are no metrics.
	Unmeasured string
}

func (p *Page) showNode(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	s := p.fleet.now(r.Context(), name)
	if len(s.nodes) == 0 {
		http.Error(w, "No node of this name has GPUs, or it is not known yet.", http.StatusNotFound)
		return
	}
	node, unmeasured := p.fleet.measure(r.Context(), s.nodes[0])
	picture, note := p.fleet.picture(r.Context(), node)
	view := pictureView{frameView: frameView{p.where, s.user}, nodeView: viewOf(picture), Unmeasured: unmeasured}
	for _, text := range []string{s.notes[aboutGPUNodes], note} {
		if text != "" {
			view.Notes = append(view.Notes, text)
		}
	}
	respond(w, r, "node.html", view, s.at)
}

// whyView is the answer of why.
type whyView struct {
	frameView
	explain.Answer
}

func (p *Page) showWhy(w http.ResponseWriter, r *http.Request) {
	select {
	case p.why <- struct{}{}:
		defer func() { <-p.why }()
	case <-r.Context().Done():
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), answersWithin)
	defer cancel()
	answer, err := p.fleet.cluster.Why(ctx, r.URL.Query().Get("namespace"), r.URL.Query().Get("pod"))
	if err != nil {
		status := http.StatusBadGateway
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			status = http.StatusNotFound
		}
		http.Error(w, err.Error(), status)
		return
	}
	respond(w, r, "why.html", whyView{frameView{p.where, p.fleet.viewer()}, answer}, p.fleet.cluster.Clock.Now())
}
