// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/hack/release"
)

// TestRelease: a release is installed with no values, first without a registry, from the chart's file and an image that was imported, then
// from a registry, from which the nodes pull the image by its digest. Pods keep their GPUs when it is upgraded to the chart of this
// checkout and rolled back.
func TestRelease(t *testing.T) {
	s := begin(t)
	r := s.newRegistry()
	d, dir := s.release("v0.98.7-test.1", r.address)
	// The release that all stories use goes, and comes back.
	s.Undo(func() error {
		ctx := context.WithoutCancel(s.Ctx)
		if err := install.Uninstall(ctx, theCluster, install.Options{}); err != nil {
			return err
		}
		return s.Install(ctx, install.Options{})
	})
	if err := install.Uninstall(s.Ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	helm := func(args ...string) {
		t.Helper()
		if err := s.helm(install.Namespace, args...); err != nil {
			t.Fatal(err)
		}
	}
	s.importImage(filepath.Join(dir, "image"))
	helm("install", install.Release, filepath.Join(dir, d.ChartFile), "--create-namespace", "--wait", "--timeout=3m")
	s.runs(d)
	if err := install.Uninstall(s.Ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	for _, node := range theCluster.Nodes() {
		// CRI has names of its own for the same content, and content that is there is not fetched again.
		names := strings.Fields(s.On(node, "ctr", "--namespace=k8s.io", "images", "list", "--quiet", "target.digest=="+d.ImageDigest))
		s.On(node, "ctr", append([]string{"--namespace=k8s.io", "images", "rm", "--sync"}, names...)...)
	}

	r.serve()
	if _, err := release.Publish(s.Ctx, dir, io.Discard); err != nil {
		t.Fatal(err)
	}
	chart := []string{install.Release, "oci://" + d.Chart, "--version", d.Version, "--plain-http"}
	helm(append([]string{"install", "--wait", "--timeout=3m"}, chart...)...)
	s.runs(d)
	if pulled := r.pulled(d.ImageDigest); pulled < len(theCluster.Nodes()) {
		t.Errorf("the index was read %d times from the registry, by %d nodes", pulled, len(theCluster.Nodes()))
	}

	// With GPUs, which are simulated here.
	helm(append([]string{"upgrade", "--set=simulated.profile=" + install.DefaultProfile}, chart...)...)
	ready := func() {
		t.Helper()
		if err := install.Ready(s.Ctx, theCluster); err != nil {
			t.Fatal(err)
		}
	}
	ready()
	s.runs(d)
	before := s.Occupy()
	same := func(what string) {
		t.Helper()
		if now := s.Seen(); !maps.EqualFunc(before, now, slices.Equal) {
			t.Errorf("the pods saw GPUs %v, after the %s %v", before, what, now)
		}
	}
	if err := install.Upgrade(s.Ctx, theCluster, s.Options(install.Options{})); err != nil {
		t.Fatal(err)
	}
	same("upgrade")
	helm("rollback", install.Release, "--wait", "--timeout=3m")
	ready()
	s.runs(d)
	s.Undisturbed(before)
}

// registryServer is an empty registry for this process and every machine of the cluster, at one address of the loopback interface: there containerd
// and Helm speak plain HTTP.
type registryServer struct {
	*story
	address string
	here    net.Listener
	mu      sync.Mutex
	read    map[string]int
}

// newRegistry chooses the address. Nothing is served at it yet.
func (s *story) newRegistry() *registryServer {
	s.Helper()
	here, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { here.Close() })
	return &registryServer{story: s, address: here.Addr().String(), here: here, read: map[string]int{}}
}

func (r *registryServer) serve() {
	r.Helper()
	there, err := theCluster.Listen(r.Ctx, r.address)
	if err != nil {
		r.Fatal(err)
	}
	content := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if request.Method == http.MethodGet {
			r.mu.Lock()
			r.read[path.Base(request.URL.Path)]++
			r.mu.Unlock()
		}
		content.ServeHTTP(w, request)
	})}
	r.Cleanup(func() { server.Close() })
	for _, listener := range append(there, r.here) {
		go server.Serve(listener)
	}
}

// pulled is how often a manifest or a blob was read.
func (r *registryServer) pulled(digest string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.read[digest]
}

// release makes a release of this checkout and returns it with its directory.
func (s *story) release(version, registry string) (release.Description, string) {
	s.Helper()
	root, err := gotool.Root(s.Ctx)
	if err != nil {
		s.Fatal(err)
	}
	checkout, out := filepath.Join(s.TempDir(), "checkout"), filepath.Join(s.TempDir(), "release")
	if err := release.Rehearse(s.Ctx, root, version, checkout); err != nil {
		s.Fatal(err)
	}
	d, err := release.Build(s.Ctx, release.Options{
		Version: version, Out: out, Root: checkout, Registry: registry + "/gpu", AnyToolchain: true, Progress: io.Discard,
		// Compiling for the other architecture takes minutes.
		NoPlugins: true, Architectures: []string{runtime.GOARCH},
	})
	if err != nil {
		s.Fatal(err)
	}
	return d, out
}

// importImage gives a layout to every node as the script in the bundle does.
func (s *story) importImage(layout string) {
	s.Helper()
	archive := filepath.Join(s.TempDir(), "image.tar")
	if out, err := exec.CommandContext(s.Ctx, "tar", "-C", layout, "-cf", archive, ".").CombinedOutput(); err != nil {
		s.Fatalf("pack image: %v\n%s", err, out)
	}
	if err := theCluster.LoadImage(s.Ctx, archive); err != nil {
		s.Fatal(err)
	}
}

// runs checks that agents and controllers run the image of the release.
func (s *story) runs(d release.Description) {
	s.Helper()
	ours := metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=tandem"}
	controllers, err := theClient.AppsV1().Deployments(install.Namespace).List(s.Ctx, ours)
	if err != nil {
		s.Fatal(err)
	}
	want := len(theCluster.Nodes())
	for _, deployment := range controllers.Items {
		want += int(ptr.Deref(deployment.Spec.Replicas, 1))
	}
	pods, err := theClient.CoreV1().Pods(install.Namespace).List(s.Ctx, ours)
	if err != nil {
		s.Fatal(err)
	}
	running := 0
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp != nil {
			continue
		}
		for _, c := range pod.Status.ContainerStatuses {
			running++
			if !strings.HasSuffix(c.ImageID, "@"+d.ImageDigest) || c.Image != d.Image+"@"+d.ImageDigest && !strings.HasPrefix(c.Image, "sha256:") {
				s.Errorf("%s runs %s (%s), released is %s", pod.Name, c.Image, c.ImageID, d.ImageDigest)
			}
			if !c.Ready {
				s.Errorf("%s is not ready", pod.Name)
			}
		}
	}
	if running != want {
		s.Errorf("%d containers run, want %d", running, want)
	}
}
