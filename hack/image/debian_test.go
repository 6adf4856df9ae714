// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestFetchTakesThePinnedBytesOnly(t *testing.T) {
	const right, other = "the pinned package", "another package of that name"
	sum := sha256.Sum256([]byte(right))
	p := debianPackage{"libc6", "1", "amd64", hex.EncodeToString(sum[:])}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/other/main/g/glibc/libc6_1_amd64.deb":
			io.WriteString(w, other)
		case "/right/main/g/glibc/libc6_1_amd64.deb":
			io.WriteString(w, right)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	to := filepath.Join(t.TempDir(), "package.deb")
	from := []string{server.URL + "/gone/", server.URL + "/other/"}
	err := fetch(t.Context(), p, from, to)
	if err == nil || !strings.Contains(err.Error(), "404") || !strings.Contains(err.Error(), "SHA-256 is") || exists(to) {
		t.Errorf("without the package: %v", err)
	}
	from = append(from, server.URL+"/right/")
	if err := fetch(t.Context(), p, from, to); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(to); err != nil || string(got) != right {
		t.Errorf("fetched %q (%v)", got, err)
	}
}

// TestAServerThatFailsIsAskedAgain: another answer than a failure is final.
func TestAServerThatFailsIsAskedAgain(t *testing.T) {
	asked := map[string]int{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked[r.URL.Path]++
		switch {
		case r.URL.Path == "/gone":
			http.NotFound(w, r)
		case asked[r.URL.Path] == 1:
			w.WriteHeader(http.StatusBadGateway)
		default:
			io.WriteString(w, "here")
		}
	}))
	defer server.Close()
	if data, err := get(t.Context(), server.URL+"/busy"); err != nil || string(data) != "here" || asked["/busy"] != 2 {
		t.Errorf("asked %d times: %q, %v", asked["/busy"], data, err)
	}
	if _, err := get(t.Context(), server.URL+"/gone"); !errors.Is(err, errRefused) || asked["/gone"] != 1 {
		t.Errorf("asked %d times: %v", asked["/gone"], err)
	}
}

func TestWithoutThePinnedPackages(t *testing.T) {
	before := pools
	t.Cleanup(func() { pools = before })
	pools = func(context.Context) ([]string, error) { return nil, nil }
	t.Setenv("TANDEM_CACHE", t.TempDir())
	var said strings.Builder
	o := Options{Arch: "amd64", Progress: &said}
	b, err := chooseBase(t.Context(), o)
	if err != nil || b.pinned || !strings.Contains(said.String(), "this machine's C library") {
		t.Errorf("base %+v (%v), said %q", b, err, said.String())
	}
	o.Pinned = true
	if _, err := chooseBase(t.Context(), o); err == nil || !strings.Contains(err.Error(), "fetch libc6_") {
		t.Errorf("with Pinned: %v", err)
	}
}

// A program that was linked with a newer C library than the pinned one would not start.
func TestProgramOfANewerMachine(t *testing.T) {
	dir := t.TempDir()
	compile := func(out, source string, args ...string) string {
		t.Helper()
		path, to := filepath.Join(dir, out+".c"), filepath.Join(dir, out)
		if err := os.WriteFile(path, []byte(source), 0o644); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("gcc", append([]string{"-o", to, path}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return to
	}
	library := func(name string, versions string) {
		t.Helper()
		script := filepath.Join(dir, "versions")
		if err := os.WriteFile(script, []byte(versions), 0o644); err != nil {
			t.Fatal(err)
		}
		compile(name, "int old(void) { return 1; } int new(void) { return 2; }", "-shared", "-nostdlib", "-Wl,-soname,"+name, "-Wl,--version-script="+script)
	}
	const name = "libofthetest.so.1"
	library(name, "T_1 { global: old; local: *; }; T_2 { global: new; } T_1;")
	program := compile("program", "int new(void); void _start(void) { new(); }", filepath.Join(dir, name), "-nostdlib")
	b := base{libraries: []string{dir}}
	if err := b.serves([]string{program}); err != nil {
		t.Errorf("with the library it was linked with: %v", err)
	}
	library(name, "T_1 { global: old; new; local: *; };")
	if err := b.serves([]string{program}); err == nil || !strings.Contains(err.Error(), "it needs T_2 of "+name) {
		t.Errorf("with an older library: %v", err)
	}
}

func TestToolchain(t *testing.T) {
	if err := compareToolchain(toolchain); err != nil {
		t.Error(err)
	}
	other := maps.Clone(toolchain)
	other["libc6-dev"] = "2.36-9+deb12u7"
	delete(other, "gcc-12")
	err := compareToolchain(other)
	if err == nil || !strings.Contains(err.Error(), "gcc-12 is missing, not 12.2.0-14+deb12u1, libc6-dev is 2.36-9+deb12u7, not 2.36-9+deb12u14") {
		t.Errorf("got %v", err)
	}
}

// Both architectures get the same releases: a security fix must not miss one of them.
func TestArchitecturesHaveTheSameReleases(t *testing.T) {
	versions := func(arch string) map[string]string {
		found := map[string]string{}
		for _, p := range pinned[arch] {
			found[p.name] = p.version
			if sources[p.name] == "" {
				t.Errorf("%s: no directory of a pool", p.name)
			}
		}
		return found
	}
	if amd64, arm64 := versions("amd64"), versions("arm64"); len(amd64) == 0 || !maps.Equal(amd64, arm64) {
		t.Errorf("amd64 has %v, arm64 %v", amd64, arm64)
	}
}
