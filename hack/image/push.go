// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Architectures are those of the released image, in the order of its index.
func Architectures() []string { return []string{"amd64", "arm64"} }

// BuildIndex builds the image for o.Architectures, each with a tarball as Build leaves it, and writes the OCI layout of the index
// that holds them to Out/oci. It returns that directory and the digest of the index.
func BuildIndex(ctx context.Context, o Options) (dir, digest string, err error) {
	if err := o.complete(ctx); err != nil {
		return "", "", err
	}
	unlock, err := lock(ctx, o)
	if err != nil {
		return "", "", err
	}
	defer unlock()
	index, err := buildIndex(ctx, o)
	if err != nil {
		return "", "", err
	}
	dir = filepath.Join(o.Out, "oci")
	if err := writeLayout(dir, index); err != nil {
		return "", "", fmt.Errorf("write %s: %w", dir, err)
	}
	hash, err := index.Digest()
	if err != nil {
		return "", "", fmt.Errorf("digest index: %w", err)
	}
	fmt.Fprintf(o.Progress, "index written to %s: %s\n", dir, hash)
	return dir, hash.String(), nil
}

// Push builds the image for o.Architectures and pushes the index to ref (registry/repository:tag) with the credentials of
// Docker's configuration, and returns the digest of what it pushed. The version is the tag where Options.Version is empty. A
// registry on the loopback interface is spoken to in plain HTTP.
func Push(ctx context.Context, o Options, ref string) (string, error) {
	tag, err := name.NewTag(ref, name.StrictValidation)
	if err != nil {
		return "", fmt.Errorf("image %q is not registry/repository:tag: %w", ref, err)
	}
	o.Version = cmp.Or(o.Version, tag.TagStr())
	if err := o.complete(ctx); err != nil {
		return "", err
	}
	unlock, err := lock(ctx, o)
	if err != nil {
		return "", err
	}
	defer unlock()
	index, err := buildIndex(ctx, o)
	if err != nil {
		return "", err
	}
	hash, err := index.Digest()
	if err != nil {
		return "", fmt.Errorf("digest index: %w", err)
	}
	fmt.Fprintf(o.Progress, "pushing %s\n", tag)
	if err := remote.WriteIndex(tag, index,
		remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
		return "", fmt.Errorf("push %s: %w", tag, err)
	}
	fmt.Fprintf(o.Progress, "pushed %s@%s\n", tag.Context(), hash)
	return hash.String(), nil
}

func buildIndex(ctx context.Context, o Options) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range o.Architectures {
		each := o
		each.Arch = arch
		c, err := collect(ctx, each)
		if err != nil {
			return nil, err
		}
		img, err := c.assemble()
		if err != nil {
			return nil, err
		}
		fingerprint, err := c.fingerprint()
		if err != nil {
			return nil, err
		}
		if _, _, err := c.write(img, fingerprint); err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	return index, nil
}

// writeLayout replaces dir: a layout only ever grows, and blobs of earlier builds would pile up.
func writeLayout(dir string, index v1.ImageIndex) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	_, err := layout.Write(dir, index)
	return err
}
