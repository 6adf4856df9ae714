// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// TestWatchRefused: Watch survives some refusals, as of an API server that is starting. It ends after several in a row.
func TestWatchRefused(t *testing.T) {
	forbidden := apierrors.NewForbidden(v1alpha1.Resource.GroupResource(), "", errors.New("the roles are not read yet"))
	for name, c := range map[string]struct {
		// answers are those to the first watches. All after them are allowed.
		answers []error
		denied  bool
	}{
		"now and then":    {answers: []error{forbidden, forbidden, errors.New("away"), forbidden, forbidden, forbidden, forbidden}},
		"again and again": {answers: []error{forbidden, forbidden, forbidden, forbidden, forbidden}, denied: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
					map[schema.GroupVersionResource]string{v1alpha1.Resource: "GPUNodeList"})
				asked := 0
				objects.PrependWatchReactor("gpunodes", func(clienttesting.Action) (bool, watch.Interface, error) {
					if asked++; asked > len(c.answers) {
						return true, watch.NewFake(), nil
					}
					return true, nil, c.answers[asked-1]
				})
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err := Cluster{Client: fake.NewClientset(), Dynamic: objects}.Watch(ctx, Viewer{Show: func(Change) {}})
				var denied *DeniedError
				if errors.As(err, &denied) != c.denied {
					t.Errorf("watch: %v", err)
				}
				if want := len(c.answers); c.denied && asked != want || !c.denied && asked != want+1 {
					t.Errorf("asked %d times for %d answers", asked, want)
				}
			})
		})
	}
}
