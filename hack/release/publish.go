// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// Published are the names of what Publish has pushed, with digests: what is signed.
type Published struct{ Image, Chart string }

// Publish pushes the image and the chart of a release that Build made in dir, with the credentials of Docker's configuration. It is
// idempotent, and refuses to replace an image of that version with another digest. A registry on the loopback interface is
// used over plain HTTP.
func Publish(ctx context.Context, dir string, progress io.Writer) (Published, error) {
	d, err := Read(dir)
	if err != nil {
		return Published{}, err
	}
	published, err := publish(ctx, dir, d, progress)
	if err != nil {
		return Published{}, fmt.Errorf("publish %s: %w", d.Version, err)
	}
	return published, nil
}

func publish(ctx context.Context, dir string, d Description, progress io.Writer) (Published, error) {
	index, err := openLayout(dir, d)
	if err != nil {
		return Published{}, err
	}
	tag, err := name.NewTag(d.Image+":"+d.Version, name.StrictValidation)
	if err != nil {
		return Published{}, fmt.Errorf("name image: %w", err)
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	if there, err := head(tag, options); err != nil {
		return Published{}, err
	} else if there != "" && there != d.ImageDigest {
		return Published{}, fmt.Errorf("push %s: the registry has %s under this name, and the release is %s", tag, there, d.ImageDigest)
	}
	fmt.Fprintf(progress, "pushing %s\n", tag)
	if err := remote.WriteIndex(tag, index, options...); err != nil {
		return Published{}, fmt.Errorf("push %s: %w", tag, err)
	}
	chart, err := name.NewTag(d.Chart+":"+d.Version, name.StrictValidation)
	if err != nil {
		return Published{}, fmt.Errorf("name chart: %w", err)
	}
	fmt.Fprintf(progress, "pushing %s\n", chart)
	file := filepath.Join(dir, d.ChartFile)
	// Helm copies this time into an annotation, and so into the digest of the chart.
	if err := os.Chtimes(file, d.Time, d.Time); err != nil {
		return Published{}, fmt.Errorf("set time of the chart: %w", err)
	}
	args := []string{"push", file, "oci://" + strings.TrimSuffix(d.Chart, "/tandem")}
	if loopback(chart.RegistryStr()) {
		args = append(args, "--plain-http")
	}
	if _, err := binaries.Helm().Output(ctx, "", args...); err != nil {
		return Published{}, fmt.Errorf("push %s: %w", chart, err)
	}
	digest, err := pushedChart(chart, file, options)
	if err != nil {
		return Published{}, err
	}
	return Published{Image: d.Image + "@" + d.ImageDigest, Chart: d.Chart + "@" + digest}, nil
}

// head returns the digest that a registry has under a tag, or nothing where there is no such tag.
func head(tag name.Tag, options []remote.Option) (string, error) {
	descriptor, err := remote.Head(tag, options...)
	var failed *transport.Error
	if errors.As(err, &failed) && failed.StatusCode == http.StatusNotFound {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look for %s: %w", tag, err)
	}
	return descriptor.Digest.String(), nil
}

// chartLayer is the media type of a chart's archive (helm.sh/helm, pkg/registry, ChartLayerMediaType).
const chartLayer = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"

// pushedChart returns the digest of the chart that a registry has under a tag. What it has must contain the file: its digest is signed.
func pushedChart(tag name.Tag, file string, options []remote.Option) (string, error) {
	archive, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("read chart: %w", err)
	}
	want := "sha256:" + sha256Of(archive)
	image, err := remote.Image(tag, options...)
	if err != nil {
		return "", fmt.Errorf("read what was pushed as %s: %w", tag, err)
	}
	manifest, err := image.Manifest()
	if err != nil {
		return "", fmt.Errorf("read manifest of %s: %w", tag, err)
	}
	for _, layer := range manifest.Layers {
		if layer.MediaType == chartLayer && layer.Digest.String() == want {
			digest, err := image.Digest()
			return digest.String(), err
		}
	}
	return "", fmt.Errorf("read what was pushed as %s: it does not contain %s (%s)", tag, filepath.Base(file), want)
}

func loopback(registry string) bool {
	host := registry
	if h, _, err := net.SplitHostPort(registry); err == nil {
		host = h
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
