// SPDX-License-Identifier: Apache-2.0

package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
)

// stamp is a file beside a tarball that records what the tarball was built from.
type stamp struct {
	Inputs string `json:"inputs"`
	Digest string `json:"digest"`
}

func stampPath(tarball string) string { return tarball + ".stamp" }

// fingerprint identifies everything that decides the tarball's bytes, at a fraction of the time to compress them.
func (c contents) fingerprint() (string, error) {
	sum := sha256.New()
	// The Go release decides how layers are compressed.
	fmt.Fprintln(sum, runtime.Version(), c.options.Arch, c.options.Version, c.options.Commit, c.options.Ref)
	for i, layer := range c.layers {
		for _, f := range layer {
			data, err := f.read()
			if err != nil {
				return "", err
			}
			fmt.Fprintf(sum, "%d %s %o %x\n", i, f.path, f.mode, sha256.Sum256(data))
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// readStamp returns the digest of the image in the tarball if it was made from these inputs.
func readStamp(tarball, fingerprint string) (digest string, ok bool) {
	data, err := os.ReadFile(stampPath(tarball))
	if err != nil || !exists(tarball) {
		return "", false
	}
	var s stamp
	if err := json.Unmarshal(data, &s); err != nil || s.Inputs != fingerprint {
		return "", false
	}
	return s.Digest, true
}

func writeStamp(tarball, fingerprint, digest string) error {
	data, err := json.Marshal(stamp{Inputs: fingerprint, Digest: digest})
	if err != nil {
		return fmt.Errorf("encode stamp of %s: %w", tarball, err)
	}
	if err := os.WriteFile(stampPath(tarball), data, 0o644); err != nil {
		return fmt.Errorf("write stamp of %s: %w", tarball, err)
	}
	return nil
}
