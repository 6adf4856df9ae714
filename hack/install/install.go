// SPDX-License-Identifier: Apache-2.0

// Package install puts Tandem on a cluster of hack/cluster the way a user does: it builds the image, loads it into every
// node (there is no registry), runs Helm with the chart of this checkout, for simulated GPUs or for those of the nodes, and
// waits until both APIs offer them. It starts no cluster and knows nothing of how the agent works.
package install

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// Names that Tandem has in a cluster unless Options say otherwise.
const (
	Release        = "tandem"
	Namespace      = "tandem-system"
	DefaultProfile = "h100x8"
	DriverName     = "gpu.nvidia.com"
	ResourceName   = "nvidia.com/gpu"
)

// RealGPUs, as Options.Profile, installs the chart for GPUs that the nodes have.
const RealGPUs = "none"

// Options say what to install. The zero value installs the chart of the module around the working directory with eight
// simulated H100s on each node.
type Options struct {
	// Profile is the simulated machine of every node; DefaultProfile when empty. RealGPUs stands for the nodes' own GPUs.
	Profile string
	// Image is the tarball of an image built before, named image.DefaultRef. When empty, the process's first installation builds it.
	Image string
	// Values are given to Helm as --set, ValuesFiles as --values; they win over what this package sets, Values over files.
	Values      []string
	ValuesFiles []string
	// Detached returns as soon as Helm has applied the chart, whether or not anything comes up.
	Detached bool
	// Progress gets one line a step; nil is silence.
	Progress io.Writer
}

// Tandem installs or upgrades the chart and returns when its pods are ready, every node's ResourceSlices are there and
// every node offers ResourceName. It is idempotent; the agents restart where image or values differ. With Options.Values
// that make one of these conditions impossible, set Detached.
func Tandem(ctx context.Context, c *cluster.Cluster, o Options) error {
	return apply(ctx, c, o, "upgrade", "--install", "--create-namespace")
}

// Upgrade is Tandem for a release that must exist already.
func Upgrade(ctx context.Context, c *cluster.Cluster, o Options) error {
	return apply(ctx, c, o, "upgrade")
}

// Uninstall removes the release and returns when its pods are gone. It is idempotent. Slices and the resource's entry in
// the nodes' status go when kubelet notices; pods that have GPUs keep them.
func Uninstall(ctx context.Context, c *cluster.Cluster, o Options) error {
	s := progress.New(o.Progress)
	s.Say("uninstalling the chart")
	if err := helm(ctx, c, "uninstall", Release, "--namespace", Namespace, "--ignore-not-found", "--wait", "--timeout=2m"); err != nil {
		return fmt.Errorf("uninstall Tandem: %w", err)
	}
	if err := awaitNoPods(ctx, c); err != nil {
		return fmt.Errorf("uninstall Tandem: %w", err)
	}
	s.Say("uninstalled")
	return nil
}

// Ready returns when what Tandem waits for holds: controller and agents ready, slices published, resource offered on every node.
func Ready(ctx context.Context, c *cluster.Cluster) error { return await(ctx, c, progress.New(nil)) }

// apply runs one of Helm's verbs that take a chart.
func apply(ctx context.Context, c *cluster.Cluster, o Options, verb ...string) error {
	s := progress.New(o.Progress)
	if o.Profile == "" {
		o.Profile = DefaultProfile
	}
	root, err := gotool.Root(ctx)
	if err != nil {
		return fmt.Errorf("install Tandem: %w", err)
	}
	loaded, err := provideImage(ctx, c, o, s)
	if err != nil {
		return fmt.Errorf("install Tandem: %w", err)
	}
	machine := "simulated machine " + o.Profile
	if o.Profile == RealGPUs {
		machine = "the nodes' own GPUs"
	}
	s.Say("helm %s: %s", verb[0], machine)
	args := append(verb, Release, filepath.Join(root, "deployments", "helm", "tandem"), "--namespace", Namespace)
	if err := helm(ctx, c, append(args, valueArgs(o, loaded)...)...); err != nil {
		return fmt.Errorf("install Tandem: %w", err)
	}
	if o.Detached {
		return nil
	}
	if err := await(ctx, c, s); err != nil {
		return fmt.Errorf("install Tandem: %w", err)
	}
	s.Say("Tandem is ready on %d node(s)", len(c.Nodes()))
	return nil
}

func valueArgs(o Options, digest string) []string {
	repository, tag, _ := strings.Cut(image.DefaultRef, ":")
	args := []string{
		"--set=image.repository=" + repository,
		"--set=image.tag=" + tag,
		"--set=image.pullPolicy=Never",
	}
	if o.Profile != RealGPUs {
		args = append(args, "--set=simulated.profile="+o.Profile)
	}
	if digest != "" {
		// The name of the image never changes, so this is what restarts the agents when its contents do.
		args = append(args, `--set=podAnnotations.tandem-gpu\.dev/image=`+strings.ReplaceAll(digest, ":", "-"))
	}
	for _, file := range o.ValuesFiles {
		args = append(args, "--values="+file)
	}
	for _, value := range o.Values {
		args = append(args, "--set="+value)
	}
	return args
}

// provideImage builds the image unless there is one, loads it where it is not yet, and answers its digest if it knows it.
func provideImage(ctx context.Context, c *cluster.Cluster, o Options, s *progress.Log) (digest string, err error) {
	tarball := o.Image
	if tarball == "" {
		if tarball, digest, err = buildOnce(ctx, s); err != nil {
			return "", err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range c.Nodes() {
		group.Go(func() error {
			if has, err := hasImage(ctx, node, digest); err != nil || has {
				return err
			}
			s.Say("loading the image into %s", node.Name())
			return node.LoadImage(ctx, tarball)
		})
	}
	return digest, group.Wait()
}

// built is the image of this checkout, which all installations without Options.Image take. To build it again takes seconds even where
// nothing has changed.
var built struct {
	sync.Mutex
	tarball, digest string
}

func buildOnce(ctx context.Context, s *progress.Log) (tarball, digest string, err error) {
	built.Lock()
	defer built.Unlock()
	if built.tarball == "" {
		s.Say("building the image")
		if built.tarball, built.digest, err = image.Build(ctx, image.Options{Progress: s}); err != nil {
			return "", "", err
		}
	}
	return built.tarball, built.digest, nil
}

// Render returns the objects that Helm would make of the chart of the module around the working directory, as YAML documents. Values
// are given to Helm as --set. It needs no cluster.
func Render(ctx context.Context, values ...string) ([]byte, error) {
	root, err := gotool.Root(ctx)
	if err != nil {
		return nil, fmt.Errorf("render the chart: %w", err)
	}
	args := []string{"template", Release, filepath.Join(root, "deployments", "helm", "tandem"), "--namespace", Namespace}
	for _, value := range values {
		args = append(args, "--set="+value)
	}
	out, err := binaries.Helm().Output(ctx, "", args...)
	if err != nil {
		return nil, fmt.Errorf("render the chart: %w", err)
	}
	return []byte(out), nil
}

// hasImage reports whether a node has the image of that digest under its name.
func hasImage(ctx context.Context, node *cluster.Node, digest string) (bool, error) {
	if digest == "" {
		return false, nil
	}
	cmd, err := node.Command(ctx, "ctr", "--namespace=k8s.io", "images", "list", "name=="+image.DefaultRef)
	if err != nil {
		return false, err
	}
	out, err := cmd.Output()
	if err != nil {
		return false, fmt.Errorf("list images of %s: %w", node.Name(), err)
	}
	return strings.Contains(string(out), digest), nil
}

// helm runs Helm in the cluster's network; what it said is in the error.
func helm(ctx context.Context, c *cluster.Cluster, args ...string) error {
	program, err := binaries.Helm().Ensure(ctx, io.Discard)
	if err != nil {
		return err
	}
	cmd, err := c.Command(ctx, program, args...)
	if err != nil {
		return err
	}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("helm %s: %w: %s", args[0], err, strings.TrimSpace(output.String()))
	}
	return nil
}
