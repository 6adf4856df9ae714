// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// NodeFeatures is a resource of Node Feature Discovery (node-feature-discovery, api/nfd/v1alpha1). Its master adds the labels in a NodeFeature
// to the node that the label featureNode of the object names.
var NodeFeatures = schema.GroupVersionResource{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Resource: "nodefeatures"}

const (
	// FeaturePrefix and the node's name are the name of the NodeFeature, as with GPU Feature Discovery (k8s-device-plugin, internal/lm).
	FeaturePrefix = "nvidia-features-for-"
	// featureNode is the label of a NodeFeature with the node's name.
	featureNode = "nfd.node.kubernetes.io/node-name"
)

// errNoNodeFeatures means that the API server does not serve NodeFeatures.
var errNoNodeFeatures = errors.New("the API server has no NodeFeatures (" + NodeFeatures.GroupVersion().String() + ")")

// feature has the fields of a NodeFeature that Tandem uses.
type feature struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              featureSpec `json:"spec"`
}

type featureSpec struct {
	Labels map[string]string `json:"labels,omitempty"`
}

// inFeature is the output to the node's NodeFeature.
type inFeature struct {
	features dynamic.ResourceInterface
	owner    func(ctx context.Context) ([]metav1.OwnerReference, error)
	// node is the output to the Node, where Node Feature Discovery writes the labels of all NodeFeatures.
	node *onNode
	// object is the NodeFeature that read got; nil if there is none.
	object *feature
}

func (o *inFeature) name() string { return FeaturePrefix + o.node.name }

func (o *inFeature) read(ctx context.Context) error {
	o.object = nil
	found, err := o.features.Get(ctx, o.name(), metav1.GetOptions{})
	switch {
	case isUnserved(err):
		return errNoNodeFeatures
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("get NodeFeature %s: %w", o.name(), err)
	}
	return o.keep(found)
}

// isUnserved reports whether the error means that the API server does not serve the resource. Then its answer is not a Status (client-go,
// rest/request.go).
func isUnserved(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

func (o *inFeature) keep(found *unstructured.Unstructured) error {
	object := &feature{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, object); err != nil {
		return fmt.Errorf("read NodeFeature %s: %w", o.name(), err)
	}
	o.object = object
	return nil
}

// otherOwner says who else has written the object. If there is no object, it checks the Node: GPU Feature Discovery's object may be in any
// namespace, and Node Feature Discovery would merge both objects.
func (o *inFeature) otherOwner(want map[string]string) string {
	switch {
	case len(want) == 0:
		return ""
	case o.object == nil:
		return o.node.otherOwner(want)
	}
	return o.otherManager()
}

// otherManager says which other field manager owns a part of the spec, or that Tandem has not written the object. It is empty if only Tandem
// has written the spec.
func (o *inFeature) otherManager() string {
	ours := false
	entries := slices.SortedFunc(slices.Values(o.object.ManagedFields), func(a, b metav1.ManagedFieldsEntry) int { return cmp.Compare(a.Manager, b.Manager) })
	for _, entry := range entries {
		if isOurs(entry) {
			ours = true
		} else if ownsSpec(entry) {
			return fmt.Sprintf("the field manager %s has written the NodeFeature %s/%s", entry.Manager, o.object.Namespace, o.object.Name)
		}
	}
	if !ours {
		return fmt.Sprintf("an unknown field manager has written the NodeFeature %s/%s", o.object.Namespace, o.object.Name)
	}
	return ""
}

// ownsSpec reports whether an entry owns a field of the spec, or may do so.
func ownsSpec(entry metav1.ManagedFieldsEntry) bool {
	var fields map[string]json.RawMessage
	if entry.FieldsV1 == nil || json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
		return true
	}
	_, found := fields["f:spec"]
	return found
}

func (o *inFeature) write(ctx context.Context, labels map[string]string) (changed bool, err error) {
	switch {
	case o.object != nil && o.otherManager() != "":
		return false, nil
	case len(labels) > 0:
		return o.apply(ctx, labels)
	case o.object == nil:
		return false, nil
	}
	// The preconditions keep an object that another field manager has changed since the GET.
	preconditions := &metav1.Preconditions{UID: ptr.To(o.object.UID), ResourceVersion: ptr.To(o.object.ResourceVersion)}
	if err := o.features.Delete(ctx, o.name(), metav1.DeleteOptions{Preconditions: preconditions}); err != nil && !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("delete NodeFeature %s: %w", o.name(), err)
	}
	klog.FromContext(ctx).Info("Deleted the node's NodeFeature", "name", o.name())
	o.object = nil
	return true, nil
}

func (o *inFeature) apply(ctx context.Context, labels map[string]string) (changed bool, err error) {
	owners, err := o.owner(ctx)
	if err != nil {
		return false, fmt.Errorf("find the owner of NodeFeature %s: %w", o.name(), err)
	}
	next := feature{
		TypeMeta:   metav1.TypeMeta{APIVersion: NodeFeatures.GroupVersion().String(), Kind: "NodeFeature"},
		ObjectMeta: metav1.ObjectMeta{Name: o.name(), Labels: map[string]string{featureNode: o.node.name}, OwnerReferences: owners},
		Spec:       featureSpec{Labels: labels},
	}
	if now := o.object; now != nil && maps.Equal(now.Spec.Labels, labels) && now.Labels[featureNode] == o.node.name &&
		slices.EqualFunc(now.OwnerReferences, owners, func(a, b metav1.OwnerReference) bool { return a.UID == b.UID }) {
		return false, nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&next)
	if err != nil {
		return false, fmt.Errorf("write NodeFeature %s: %w", o.name(), err)
	}
	applied, err := o.features.Apply(ctx, o.name(), &unstructured.Unstructured{Object: content}, metav1.ApplyOptions{FieldManager: Manager})
	if err != nil {
		return false, fmt.Errorf("apply NodeFeature %s: %w", o.name(), err)
	}
	klog.FromContext(ctx).Info("Wrote the node's NodeFeature", "name", o.name(), "labels", len(labels))
	return true, o.keep(applied)
}
