// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// fakeAPI is as much of a kube-apiserver as this package talks to, over HTTP: GPUNodes with get, list, watch (streaming lists
// too), create, a status subresource, resource versions, generations and ownership. It refuses what the agent's role does not have.
type fakeAPI struct {
	t      *testing.T
	server *httptest.Server

	mu      sync.Mutex
	version int
	objects map[string]*v1alpha1.GPUNode
	// watchers and what each selects.
	watchers map[chan metav1.WatchEvent]fields.Selector
	// absent answers everything as a server without the custom resource does, refused as one that grants nothing, broken with
	// an internal error.
	absent, refused, broken bool
	// deleted is the version of the last deletion; a watch from before it is too old.
	deleted int
	// requests that change something, by operation and name.
	writes []string
	// when the status was written.
	statuses []time.Time
	requests int
	// prune drops what the API server does not know of a status; nil for nothing.
	prune func(*v1alpha1.GPUNodeStatus)
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{t: t, objects: map[string]*v1alpha1.GPUNode{}, watchers: map[chan metav1.WatchEvent]fields.Selector{}, version: 10}
	f.server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.interrupt()
		f.server.Close()
	})
	return f
}

func (f *fakeAPI) config() *rest.Config { return &rest.Config{Host: f.server.URL, QPS: -1} }

// interrupt ends every connection.
func (f *fakeAPI) interrupt() { f.server.CloseClientConnections() }

func (f *fakeAPI) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeAPI) object(name string) *v1alpha1.GPUNode {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o, ok := f.objects[name]; ok {
		return o.DeepCopy()
	}
	return nil
}

func (f *fakeAPI) written() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.writes...)
}

// writeSpec is what the controller does.
func (f *fakeAPI) writeSpec(name string, claims ...v1alpha1.AllocatedClaim) {
	f.change(name, func(s *v1alpha1.GPUNodeSpec) { s.Claims = claims })
}

func (f *fakeAPI) taint(name string, entries ...v1alpha1.RuleTaint) {
	f.change(name, func(s *v1alpha1.GPUNodeSpec) { s.Taints = entries })
}

func (f *fakeAPI) change(name string, change func(*v1alpha1.GPUNodeSpec)) {
	f.set(func() {
		o := f.objects[name].DeepCopy()
		change(&o.Spec)
		o.Generation++
		f.store(o)
	})
}

// maintain is what an administrator does.
func (f *fakeAPI) maintain(name string, entries ...v1alpha1.GPUMaintenance) {
	f.change(name, func(s *v1alpha1.GPUNodeSpec) { s.Maintenance = entries })
}

// drop deletes an object as another client would.
func (f *fakeAPI) drop(name string) { f.set(func() { f.remove(name) }) }

// terminate deletes an object that has a finalizer.
func (f *fakeAPI) terminate(name string) {
	f.set(func() {
		going, now := f.objects[name].DeepCopy(), metav1.Now()
		going.DeletionTimestamp = &now
		f.store(going)
	})
}

// store keeps and tells; under f.mu.
func (f *fakeAPI) store(o *v1alpha1.GPUNode) {
	f.version++
	o.ResourceVersion = strconv.Itoa(f.version)
	o.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("GPUNode"))
	event := "MODIFIED"
	if _, known := f.objects[o.Name]; !known {
		event = "ADDED"
	}
	f.objects[o.Name] = o
	f.tell(event, o)
}

func (f *fakeAPI) remove(name string) {
	f.version++
	gone := f.objects[name].DeepCopy()
	gone.ResourceVersion = strconv.Itoa(f.version)
	delete(f.objects, name)
	f.deleted = f.version
	f.tell("DELETED", gone)
}

func (f *fakeAPI) tell(event string, o *v1alpha1.GPUNode) {
	for watcher, selector := range f.watchers {
		if selector.Matches(fields.Set{"metadata.name": o.Name}) {
			watcher <- f.event(event, o)
		}
	}
}

func (f *fakeAPI) event(event string, o *v1alpha1.GPUNode) metav1.WatchEvent {
	raw, err := json.Marshal(o)
	if err != nil {
		f.t.Error(err)
	}
	e := metav1.WatchEvent{Type: event}
	e.Object.Raw = raw
	return e
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.requests++
	absent, refused, broken := f.absent, f.refused, f.broken
	f.mu.Unlock()
	group := v1alpha1.Resource.GroupResource()
	path, served := strings.CutPrefix(r.URL.Path, "/apis/tandem-gpu.dev/v1alpha1/gpunodes")
	name, subresource, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	switch {
	case broken:
		answer(w, 0, apierrors.NewInternalError(fmt.Errorf("etcd is away")))
	case absent || !served:
		http.NotFound(w, r) // as an API server does for what it does not know
	case refused:
		answer(w, 0, apierrors.NewForbidden(group, name, fmt.Errorf("no")))
	case err != nil:
		answer(w, 0, apierrors.NewBadRequest(err.Error()))
	case r.Method == http.MethodGet && name != "":
		f.get(w, name)
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "":
		f.watch(w, r, selector)
	case r.Method == http.MethodGet:
		f.list(w, selector)
	default:
		f.write(w, r, name, subresource)
	}
}

func (f *fakeAPI) get(w http.ResponseWriter, name string) {
	if o := f.object(name); o != nil {
		answer(w, http.StatusOK, o)
		return
	}
	answer(w, 0, apierrors.NewNotFound(v1alpha1.Resource.GroupResource(), name))
}

func (f *fakeAPI) list(w http.ResponseWriter, selector fields.Selector) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := v1alpha1.GPUNodeList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(f.version)}}
	list.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("GPUNodeList"))
	for _, o := range f.objects {
		if selector.Matches(fields.Set{"metadata.name": o.Name}) {
			list.Items = append(list.Items, *o)
		}
	}
	answer(w, http.StatusOK, list)
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, selector fields.Selector) {
	if selector.Empty() {
		f.t.Error("watches all GPUNodes of the cluster")
	}
	events := make(chan metav1.WatchEvent, 10000)
	f.mu.Lock()
	f.watchers[events] = selector
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		for _, o := range f.objects {
			if selector.Matches(fields.Set{"metadata.name": o.Name}) {
				events <- f.event("ADDED", o)
			}
		}
		mark := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(f.version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}}
		mark.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("GPUNode"))
		events <- f.event("BOOKMARK", mark)
	} else if from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion")); err == nil && from < f.deleted {
		delete(f.watchers, events)
		f.mu.Unlock()
		answer(w, 0, apierrors.NewResourceExpired("too old"))
		return
	} else if err == nil {
		for _, o := range f.objects {
			if stored, err := strconv.Atoi(o.ResourceVersion); err == nil && stored > from {
				events <- f.event("MODIFIED", o)
			}
		}
	}
	f.mu.Unlock()
	defer f.set(func() { delete(f.watchers, events) })
	w.Header().Set("Content-Type", "application/json")
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-events:
			if json.NewEncoder(w).Encode(e) != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	}
}

func (f *fakeAPI) write(w http.ResponseWriter, r *http.Request, name, subresource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	group := v1alpha1.Resource.GroupResource()
	sent := &v1alpha1.GPUNode{}
	if known, found := f.objects[name]; found && r.Method == http.MethodPatch {
		sent = known.DeepCopy() // the fields of the agent's patches are not nested
	}
	if err := json.NewDecoder(r.Body).Decode(sent); err != nil {
		answer(w, 0, apierrors.NewBadRequest(err.Error()))
		return
	}
	if name == "" {
		name = sent.Name
	}
	f.writes = append(f.writes, strings.TrimSuffix(strings.ToLower(r.Method)+" "+name+"/"+subresource, "/"))
	known, found := f.objects[name]
	switch {
	case r.Method == http.MethodPost && found:
		answer(w, 0, apierrors.NewAlreadyExists(group, name))
	case r.Method == http.MethodPost:
		sent.UID, sent.Generation, sent.Status = types.UID(fmt.Sprintf("object-%d", f.version)), 1, v1alpha1.GPUNodeStatus{}
		f.store(sent)
		answer(w, http.StatusCreated, sent)
	case !found:
		answer(w, 0, apierrors.NewNotFound(group, name))
	case r.Method == http.MethodDelete || subresource != "status":
		answer(w, 0, apierrors.NewForbidden(group, name, fmt.Errorf("the agent writes the status only")))
	case sent.ResourceVersion != known.ResourceVersion || sent.UID != known.UID:
		answer(w, 0, apierrors.NewConflict(group, name, fmt.Errorf("it has changed")))
	default:
		next := known.DeepCopy()
		next.Status = sent.Status
		if f.prune != nil {
			f.prune(&next.Status)
		}
		f.statuses = append(f.statuses, time.Now())
		f.store(next)
		answer(w, http.StatusOK, next)
	}
}

// answer sends an object, or an error with its own code.
func answer(w http.ResponseWriter, code int, object any) {
	if err, ok := object.(apierrors.APIStatus); ok {
		status := err.Status()
		status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
		code, object = int(status.Code), status
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(object)
}
