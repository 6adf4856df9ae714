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
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/tandem-gpu/tandem/pkg/explain"
	"github.com/tandem-gpu/tandem/pkg/overview"
)

// Bounds of a view. The filter reaches what is beyond them.
const (
	mostNodes = 100
	// mostOpen is the largest number of nodes that are shown with their devices at first.
	mostOpen    = 4
	mostPending = 100
	mostQuery   = 200
)

var templates = template.Must(template.ParseFS(files, "files/*.html"))

// respond writes a view, or that it has not changed since the browser read it.
func respond(w http.ResponseWriter, r *http.Request, name string, view any) {
	var body bytes.Buffer
	if err := templates.ExecuteTemplate(&body, name, view); err != nil {
		http.Error(w, fmt.Sprintf("write %s: %v", name, err), http.StatusInternalServerError)
		return
	}
	sum := sha256.Sum256(body.Bytes())
	tag := `"` + hex.EncodeToString(sum[:16]) + `"`
	w.Header().Set("ETag", tag)
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(body.Bytes()) // the browser has gone
}

// style has the signs of the states.
var style = overview.Style{UTF8: true}

// fleetView is the view of all nodes.
type fleetView struct {
	Query, Summary string
	Listed         bool
	Notes          []string
	Nodes          []nodeView
	MoreNodes      int
	Pending        []pendingView
	MorePending    int
	States         []stateView
}

type stateView struct {
	State overview.State
	Mark  string
}

// states in the order of the legend.
var states = []overview.State{
	overview.Free, overview.Claim, overview.Pod, overview.Allocated, overview.Draining, overview.Unhealthy, overview.Maintenance, overview.Unserved, overview.Excluded,
}

// nodeView is a node in any view.
type nodeView struct {
	overview.Node
	Counts string
	// Open shows the devices at first.
	Open bool
	Rows []deviceView
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
	Partition                   bool
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

type pendingView struct {
	Namespace, Name  string
	Requests, Reason string
	Since            string
}

func (p *Page) showFleet(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query().Get("q")
	if len(query) > mostQuery {
		http.Error(w, fmt.Sprintf("The filter has %d bytes; %d are allowed.", len(query), mostQuery), http.StatusBadRequest)
		return
	}
	words := strings.Fields(strings.ToLower(query))
	s := p.fleet.now(r.Context())
	all := overview.New(s.nodes)
	view := fleetView{Query: query, Summary: all.Summary(), Listed: s.listed}
	for _, about := range slices.Sorted(maps.Keys(s.notes)) {
		view.Notes = append(view.Notes, s.notes[about])
	}
	for _, state := range states {
		view.States = append(view.States, stateView{state, style.Mark(state)})
	}
	var shown []overview.Node
	for _, n := range all.Nodes {
		if matches(words, func() []string { return textsOf(n) }) {
			shown = append(shown, n)
		}
	}
	view.MoreNodes = max(0, len(shown)-mostNodes)
	for _, n := range shown[:len(shown)-view.MoreNodes] {
		of := overview.PictureOf(n, nil, p.fleet.cluster.DriverName)
		if slices.ContainsFunc(n.Devices, func(d overview.Device) bool { return d.Parent != "" }) {
			var note string
			if of, note = p.fleet.picture(r.Context(), n); note != "" && !slices.Contains(view.Notes, note) {
				view.Notes = append(view.Notes, note)
			}
		}
		node := viewOf(of)
		node.Open = len(shown) <= mostOpen
		view.Nodes = append(view.Nodes, node)
	}
	view.Pending, view.MorePending = pending(s, words)
	respond(w, r, "fleet.html", view)
}

// matches reports whether each word is in a text. The texts are those that the viewer may see.
func matches(words []string, texts func() []string) bool {
	if len(words) == 0 {
		return true
	}
	text := strings.ToLower(strings.Join(texts(), "\n"))
	return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
}

func textsOf(n overview.Node) []string {
	texts := []string{n.Name, n.Mode, n.Problem}
	for _, d := range n.Devices {
		holders, _ := d.Describe(n)
		texts = append(texts, d.Name, d.UUID, d.Model, d.Profile, string(d.State), holders, d.WhyOut(), d.Slowdown)
		for _, h := range d.Holders { // Describe has a few of many
			for _, pod := range h.Pods {
				texts = append(texts, pod.Namespace+"/"+pod.Name)
			}
			if h.Claim != nil {
				texts = append(texts, h.Claim.String())
			}
		}
	}
	for _, c := range n.Conflicts {
		texts = append(texts, c.String())
	}
	return texts
}

// pending returns the pods that wait for what may be GPUs, the oldest first.
func pending(s state, words []string) (views []pendingView, more int) {
	queue := explain.NewQueue(s.gpus)
	type waiting struct {
		*corev1.Pod
		requests string
	}
	var found []waiting
	for _, pod := range s.pending {
		requests := strings.Join(queue.Requests(pod), ", ")
		if requests != "" && matches(words, func() []string { return []string{pod.Namespace + "/" + pod.Name, requests, queue.Reason(pod)} }) {
			found = append(found, waiting{pod, requests})
		}
	}
	slices.SortFunc(found, func(a, b waiting) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	more = max(0, len(found)-mostPending)
	for _, pod := range found[:len(found)-more] {
		view := pendingView{Namespace: pod.Namespace, Name: pod.Name, Requests: pod.requests, Reason: queue.Reason(pod.Pod)}
		if !pod.CreationTimestamp.IsZero() {
			view.Since = pod.CreationTimestamp.UTC().Format(time.RFC3339)
		}
		views = append(views, view)
	}
	return views, more
}

func viewOf(p overview.Picture) nodeView {
	o := overview.New([]overview.Node{p.Node})
	view := nodeView{Node: p.Node}
	if o.GPUs.Total > 0 {
		view.Counts = explain.Number(o.GPUs.Total, "GPU") + ": " + o.GPUs.String()
	}
	if o.Partitions.Total > 0 {
		view.Counts += "; " + explain.Number(o.Partitions.Total, "partition") + ": " + o.Partitions.String()
	}
	for _, d := range p.Node.Devices {
		view.Rows = append(view.Rows, describe(d, p.Node))
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
	}
}

// pictureView is the view of one node.
type pictureView struct {
	nodeView
	Notes []string
}

func (p *Page) showNode(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	s := p.fleet.now(r.Context(), name)
	if len(s.nodes) == 0 {
		http.Error(w, "No node of this name has GPUs, or it is not known yet.", http.StatusNotFound)
		return
	}
	picture, note := p.fleet.picture(r.Context(), s.nodes[0])
	view := pictureView{nodeView: viewOf(picture)}
	for _, text := range []string{s.notes[aboutGPUNodes], note} {
		if text != "" {
			view.Notes = append(view.Notes, text)
		}
	}
	respond(w, r, "node.html", view)
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
	respond(w, r, "why.html", answer)
}
