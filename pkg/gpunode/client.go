// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// newClient speaks JSON, as custom resources do. Beside the agent's typed client it costs one codec: connections are shared.
func newClient(config *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c := rest.CopyConfig(config)
	c.APIPath = "/apis"
	c.GroupVersion = &v1alpha1.GroupVersion
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(c)
}

// resource is what the API calls the objects.
var resource = v1alpha1.Resource.Resource

// requestTimeout bounds each request: a connection to an API server that died without a word must not hold up the next one.
const requestTimeout = 10 * time.Second

func (o *Object) get(ctx context.Context) (*v1alpha1.GPUNode, error) {
	object := &v1alpha1.GPUNode{}
	err := o.client.Get().Resource(resource).Name(o.config.NodeName).Timeout(requestTimeout).Do(ctx).Into(object)
	return stripped(object), err
}

// create makes the object, owned by the node, so that it goes when the node goes.
func (o *Object) create(ctx context.Context, node types.UID) (*v1alpha1.GPUNode, error) {
	object := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{
		Name:            o.config.NodeName,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: o.config.NodeName, UID: node}},
	}}
	created := &v1alpha1.GPUNode{}
	err := o.client.Post().Resource(resource).Timeout(requestTimeout).Body(object).Do(ctx).Into(created)
	o.metrics.wrote("create", err)
	return stripped(created), err
}

// updateStatus replaces the status of the object as it is known; a conflict means that it has changed since.
func (o *Object) updateStatus(ctx context.Context, object *v1alpha1.GPUNode, status v1alpha1.GPUNodeStatus) (*v1alpha1.GPUNode, error) {
	next := *object
	next.Status = status
	updated := &v1alpha1.GPUNode{}
	err := o.client.Put().Resource(resource).Name(object.Name).SubResource("status").Timeout(requestTimeout).Body(&next).Do(ctx).Into(updated)
	o.metrics.wrote("status", err)
	return stripped(updated), err
}

// remove deletes exactly this object.
func (o *Object) remove(ctx context.Context, object *v1alpha1.GPUNode) error {
	options := &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(object.UID)}}
	err := o.client.Delete().Resource(resource).Name(object.Name).Timeout(requestTimeout).Body(options).Do(ctx).Error()
	o.metrics.wrote("delete", err)
	return err
}

// stripped removes managed fields. An update without them keeps those of the API server.
func stripped(object *v1alpha1.GPUNode) *v1alpha1.GPUNode {
	object.ManagedFields = nil
	return object
}
