// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// fakeAPI is the part of a kube-apiserver that the driver uses, over HTTP: nodes, claims and slices with get, list, watch (also
// streaming lists), create with dry-run, update, delete and resource versions.
type fakeAPI struct {
	url string

	mu       sync.Mutex
	version  int
	objects  map[string]map[string]fakeObject // resource → [namespace/]name
	watchers map[chan fakeEvent]string        // → resource
	// dropTaints makes it a server before 1.36, which drops counters, too.
	dropTaints bool
	// keepProbeTaints makes dry runs keep what writes drop, like servers of different versions behind one address.
	keepProbeTaints bool
	// failAll refuses every request.
	failAll error
	// failWrites refuses every write of slices with an error, except dry runs.
	failWrites error
	// failProbe refuses dry runs.
	failProbe error
	// failPool refuses writes of one pool.
	failPool string
	// writes counts stored creates, updates and deletes of slices by the driver.
	writes int
	// early is what writes was at the first watch of our slices, if they are watched.
	early   int
	watched bool
	// failUpdate refuses updates.
	failUpdate error
	// updated counts updates of the status of claims.
	updated int
	// beforeUpdate is called before each update.
	beforeUpdate func()
}

type fakeObject = interface {
	metav1.Object
	runtime.Object
}

type fakeEvent struct {
	Type   string     `json:"type"`
	Object fakeObject `json:"object"`
}

func newFakeAPI(t testing.TB) *fakeAPI {
	f := &fakeAPI{objects: map[string]map[string]fakeObject{"nodes": {}, "resourceclaims": {}, "resourceslices": {}}, watchers: map[chan fakeEvent]string{}}
	server := httptest.NewServer(f)
	f.url = server.URL
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return f
}

func (f *fakeAPI) client(t testing.TB) kubernetes.Interface {
	t.Helper()
	// Like the agent's client.
	content := rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf, AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON}
	client, err := kubernetes.NewForConfig(&rest.Config{Host: f.url, QPS: -1, ContentConfig: content})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// put stores an object as another client would.
func (f *fakeAPI) put(resource string, object fakeObject) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.store(resource, object)
}

func (f *fakeAPI) store(resource string, object fakeObject) {
	f.version++
	object.SetResourceVersion(strconv.Itoa(f.version))
	kind := map[string]schema.GroupVersionKind{
		"nodes":          corev1.SchemeGroupVersion.WithKind("Node"),
		"resourceclaims": resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"),
		"resourceslices": resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"),
	}[resource]
	object.GetObjectKind().SetGroupVersionKind(kind)
	key := path.Join(object.GetNamespace(), object.GetName())
	event := "ADDED"
	if _, known := f.objects[resource][key]; known {
		event = "MODIFIED"
	}
	f.objects[resource][key] = object
	f.tell(resource, fakeEvent{event, object})
}

// serve enables a resource, empty, or disables it.
func (f *fakeAPI) serve(resource string, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.objects, resource)
	if on {
		f.objects[resource] = map[string]fakeObject{}
	}
}

// upgrade makes all servers keep taints.
func (f *fakeAPI) upgrade() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropTaints = false
}

// remove deletes an object as another client would.
func (f *fakeAPI) remove(resource, key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(resource, key)
}

func (f *fakeAPI) drop(resource, key string) {
	object, known := f.objects[resource][key]
	if !known {
		return
	}
	delete(f.objects[resource], key)
	f.version++
	gone := object.DeepCopyObject().(fakeObject)
	gone.SetResourceVersion(strconv.Itoa(f.version))
	f.tell(resource, fakeEvent{"DELETED", gone})
}

// wipeSlices removes all slices, as a starting kubelet does.
func (f *fakeAPI) wipeSlices() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.objects["resourceslices"] {
		f.drop("resourceslices", key)
	}
}

func (f *fakeAPI) tell(resource string, event fakeEvent) {
	for watcher, of := range f.watchers {
		if of == resource {
			watcher <- event
		}
	}
}

// slices returns the stored slices by name, the order in which the scheduler tries them.
func (f *fakeAPI) slices() []*resourceapi.ResourceSlice {
	f.mu.Lock()
	defer f.mu.Unlock()
	var found []*resourceapi.ResourceSlice
	for _, object := range f.objects["resourceslices"] {
		found = append(found, object.(*resourceapi.ResourceSlice).DeepCopy())
	}
	slices.SortFunc(found, func(a, b *resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return found
}

func (f *fakeAPI) writeCount() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.writes
}

// earlyWrites returns the number of writes before the slice controller began to watch slices.
func (f *fakeAPI) earlyWrites() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.watched {
		return f.writes
	}
	return f.early
}

func (f *fakeAPI) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch parts[0] {
	case "api":
		parts = parts[2:]
	case "apis":
		parts = parts[3:]
	}
	namespace := ""
	if len(parts) > 1 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	resource, name := parts[0], ""
	if len(parts) > 1 {
		name = parts[1]
	}
	f.mu.Lock()
	_, served := f.objects[resource]
	failAll := f.failAll
	f.mu.Unlock()
	if failAll != nil {
		f.refuse(w, failAll)
		return
	}
	if !served {
		f.refuse(w, apierrors.NewNotFound(schema.GroupResource{Resource: resource}, ""))
		return
	}
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil {
		f.refuse(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	switch {
	case r.Method == http.MethodGet && name != "":
		f.get(w, r, resource, path.Join(namespace, name))
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "":
		f.watch(w, r, resource, selector)
	case r.Method == http.MethodGet:
		f.list(w, resource, selector)
	default:
		f.write(w, r, resource, name)
	}
}

func (f *fakeAPI) get(w http.ResponseWriter, r *http.Request, resource, key string) {
	f.mu.Lock()
	object, known := f.objects[resource][key]
	f.mu.Unlock()
	if !known {
		f.refuse(w, apierrors.NewNotFound(schema.GroupResource{Resource: resource}, key))
		return
	}
	if strings.HasPrefix(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_ = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(object, w)
		return
	}
	f.answer(w, object)
}

func (f *fakeAPI) list(w http.ResponseWriter, resource string, selector fields.Selector) {
	f.mu.Lock()
	defer f.mu.Unlock()
	items := []fakeObject{}
	for _, object := range f.objects[resource] {
		if selected(object, selector) {
			items = append(items, object)
		}
	}
	f.answer(w, map[string]any{"items": items, "metadata": map[string]string{"resourceVersion": strconv.Itoa(f.version)}})
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, resource string, selector fields.Selector) {
	events := make(chan fakeEvent, 10000)
	f.mu.Lock()
	f.watchers[events] = resource
	ours := selector.Matches(fields.Set{resourceapi.ResourceSliceSelectorNodeName: testNode, resourceapi.ResourceSliceSelectorDriver: "gpu.nvidia.com"})
	if resource == "resourceslices" && ours && !f.watched {
		f.early, f.watched = f.writes, true
	}
	var initial []fakeEvent
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		for _, object := range f.objects[resource] {
			initial = append(initial, fakeEvent{"ADDED", object})
		}
		mark := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(f.version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}}
		mark.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "Node"})
		if resource == "resourceslices" {
			mark.SetGroupVersionKind(resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"))
		}
		initial = append(initial, fakeEvent{"BOOKMARK", mark})
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.watchers, events)
		f.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	send := func(e fakeEvent) bool {
		if e.Type != "BOOKMARK" && !selected(e.Object, selector) {
			return true
		}
		return encoder.Encode(e) == nil
	}
	for _, e := range initial {
		if !send(e) {
			return
		}
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-events:
			if !send(e) {
				return
			}
			w.(http.Flusher).Flush()
		}
	}
}

func (f *fakeAPI) write(w http.ResponseWriter, r *http.Request, resource, name string) {
	if resource == "resourceclaims" && r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/status") {
		f.updateClaim(w, r)
		return
	}
	if resource != "resourceslices" {
		f.refuse(w, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, name, fmt.Errorf("the driver writes slices only")))
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	dryRun := r.URL.Query().Get("dryRun") != ""
	if f.failProbe != nil && dryRun {
		f.refuse(w, f.failProbe)
		return
	}
	if f.failWrites != nil && !dryRun {
		f.refuse(w, f.failWrites)
		return
	}
	if r.Method == http.MethodDelete {
		if _, known := f.objects[resource][name]; !known {
			f.refuse(w, apierrors.NewNotFound(schema.GroupResource{Resource: resource}, name))
			return
		}
		f.writes++
		f.drop(resource, name)
		f.answer(w, &metav1.Status{Status: metav1.StatusSuccess})
		return
	}
	slice, err := sliceOf(r)
	if err != nil {
		f.refuse(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	if slice.Spec.Pool.Name == f.failPool {
		f.refuse(w, apierrors.NewInternalError(fmt.Errorf("no pool %s today", f.failPool)))
		return
	}
	f.serverDefaults(slice, dryRun)
	switch r.Method {
	case http.MethodPost:
		slice.Name = fmt.Sprintf("%s%05d", slice.GenerateName, f.version)
		slice.UID = types.UID(fmt.Sprintf("slice-%d", f.version))
	case http.MethodPut:
		known, found := f.objects[resource][name]
		if !found {
			f.refuse(w, apierrors.NewNotFound(schema.GroupResource{Resource: resource}, name))
			return
		}
		if known.GetResourceVersion() != slice.ResourceVersion {
			f.refuse(w, apierrors.NewConflict(schema.GroupResource{Resource: resource}, name, fmt.Errorf("changed")))
			return
		}
	}
	if !dryRun {
		f.writes++
		f.store(resource, slice)
	}
	f.answer(w, slice)
}

// bodyOf decodes the object of a request, in any encoding.
func bodyOf(r *http.Request) (runtime.Object, error) {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	return runtime.Decode(scheme.Codecs.UniversalDeserializer(), data)
}

// sliceOf decodes a slice of any API version.
func sliceOf(r *http.Request) (*resourceapi.ResourceSlice, error) {
	object, err := bodyOf(r)
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	slice := &resourceapi.ResourceSlice{}
	return slice, json.Unmarshal(data, slice)
}

// updateClaim replaces a claim's status.
func (f *fakeAPI) updateClaim(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	before := f.beforeUpdate
	f.mu.Unlock()
	if before != nil {
		before()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.updated++
	object, err := bodyOf(r)
	said, ok := object.(*resourceapi.ResourceClaim)
	if !ok {
		f.refuse(w, apierrors.NewBadRequest(fmt.Sprint(r.URL, err)))
		return
	}
	known, found := f.objects["resourceclaims"][path.Join(said.Namespace, said.Name)].(*resourceapi.ResourceClaim)
	switch resource := (schema.GroupResource{Resource: "resourceclaims"}); {
	case f.failUpdate != nil:
		f.refuse(w, f.failUpdate)
	case !found:
		f.refuse(w, apierrors.NewNotFound(resource, said.Name))
	case known.ResourceVersion != said.ResourceVersion:
		f.refuse(w, apierrors.NewConflict(resource, said.Name, fmt.Errorf("changed")))
	default:
		next := known.DeepCopy()
		next.Status = said.Status
		f.storeStatus(w, known, next)
	}
}

func (f *fakeAPI) storeStatus(w http.ResponseWriter, known, next *resourceapi.ResourceClaim) {
	if !apiequality.Semantic.DeepEqual(known.Status.Allocation, next.Status.Allocation) {
		wrong := field.Invalid(field.NewPath("status", "allocation"), nil, "field is immutable")
		f.refuse(w, apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), next.Name, field.ErrorList{wrong}))
		return
	}
	f.store("resourceclaims", next)
	f.answer(w, next)
}

// claimStatus returns the conditions of a claim's devices: "gpu-0 SharingApplied=True(MPS): message".
func (f *fakeAPI) claimStatus(name string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := []string{}
	claim, ok := f.objects["resourceclaims"]["team-a/"+name].(*resourceapi.ResourceClaim)
	if !ok {
		return all
	}
	for _, d := range claim.Status.Devices {
		name := d.Device
		if d.ShareID != nil {
			name += "/" + *d.ShareID
		}
		for _, c := range d.Conditions {
			all = append(all, fmt.Sprintf("%s %s=%s(%s): %s", name, c.Type, c.Status, c.Reason, c.Message))
		}
	}
	return all
}

func (f *fakeAPI) serverDefaults(slice *resourceapi.ResourceSlice, dryRun bool) {
	if f.dropTaints && !(dryRun && f.keepProbeTaints) {
		slice.Spec.SharedCounters = nil
	}
	for i := range slice.Spec.Devices {
		taints := slice.Spec.Devices[i].Taints
		if f.dropTaints && !(dryRun && f.keepProbeTaints) {
			slice.Spec.Devices[i].Taints, slice.Spec.Devices[i].ConsumesCounters = nil, nil
			continue
		}
		for j := range taints {
			if taints[j].TimeAdded == nil {
				now := metav1.Now().Rfc3339Copy()
				taints[j].TimeAdded = &now
			}
		}
	}
}

func (f *fakeAPI) answer(w http.ResponseWriter, object any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(object); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

func (f *fakeAPI) refuse(w http.ResponseWriter, err error) {
	status := apierrors.APIStatus(&apierrors.StatusError{ErrStatus: metav1.Status{Code: 500, Message: err.Error()}})
	if known, ok := err.(apierrors.APIStatus); ok {
		status = known
	}
	body := status.Status()
	body.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "Status"})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(body.Code))
	_ = json.NewEncoder(w).Encode(body)
}

func selected(object fakeObject, selector fields.Selector) bool {
	set := fields.Set{"metadata.name": object.GetName()}
	if slice, ok := object.(*resourceapi.ResourceSlice); ok {
		set["spec.driver"] = slice.Spec.Driver
		if slice.Spec.NodeName != nil {
			set["spec.nodeName"] = *slice.Spec.NodeName
		}
	}
	return selector.Matches(set)
}
