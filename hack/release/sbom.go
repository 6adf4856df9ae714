// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bufio"
	"bytes"
	"cmp"
	"debug/buildinfo"
	"fmt"
	"maps"
	"net/textproto"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"golang.org/x/mod/module"

	"github.com/tandem-gpu/tandem/hack/image"
)

const (
	ownModule = "github.com/tandem-gpu/tandem"
	unknown   = "NOASSERTION"
)

// writeSBOMs writes an SPDX document for the image of each architecture.
func (b build) writeSBOMs(d Description, images []archImage) error {
	for _, img := range images {
		document, err := sbom(d, img, b.source.time())
		if err != nil {
			return fmt.Errorf("describe image for %s: %w", img.arch, err)
		}
		var text bytes.Buffer
		if err := json.Write(document, &text, json.Indent("  "), json.EscapeHTML(false)); err != nil {
			return fmt.Errorf("encode SBOM of image for %s: %w", img.arch, err)
		}
		if err := b.write(sbomName(d, img.arch), text.String()); err != nil {
			return err
		}
	}
	return nil
}

func sbomName(d Description, arch string) string {
	return fmt.Sprintf("tandem-%s-linux-%s.spdx.json", d.Version, arch)
}

// sbom says what is in an image, as read from the image itself: the Go modules from the programs' build information, the Debian packages from
// the list that scanners read as well.
func sbom(d Description, img archImage, when time.Time) (*spdx.Document, error) {
	s := &inventory{licences: licencesOf(img.files), packages: map[string]*spdx.Package{}, edges: map[spdx.Relationship]bool{}}
	const root = "Package-image"
	s.add(root, &spdx.Package{
		PackageName: "tandem", PackageVersion: d.Version, PrimaryPackagePurpose: "CONTAINER",
		PackageDownloadLocation: d.Image + "@" + img.digest.String(), PackageLicenseDeclared: "Apache-2.0",
		PackageChecksums:          []common.Checksum{{Algorithm: common.SHA256, Value: img.digest.Hex}},
		PackageExternalReferences: purl(fmt.Sprintf("pkg:oci/tandem@%s?arch=%s&repository_url=%s", strings.ReplaceAll(img.digest.String(), ":", "%3A"), img.arch, d.Image)),
	})
	s.edge("DOCUMENT", "DESCRIBES", root)
	for _, name := range sortedKeys(img.files) {
		if p, ok := strings.CutPrefix(name, image.StatusDir+"/"); ok {
			if err := s.debian(root, p, img.files[name]); err != nil {
				return nil, err
			}
		}
		if p, ok := strings.CutPrefix(name, "usr/bin/"); ok {
			if err := s.program(root, p, img.files[name]); err != nil {
				return nil, err
			}
		}
	}
	return &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName: fmt.Sprintf("tandem-%s-linux-%s", d.Version, img.arch),
		// A namespace has to be unique to the document, and the digest is.
		DocumentNamespace: "https://" + ownModule + "/spdx/" + img.digest.Hex,
		CreationInfo: &spdx.CreationInfo{
			Created: when.Format(time.RFC3339), Creators: []common.Creator{{CreatorType: "Tool", Creator: "tandem-hack-release"}},
		},
		Packages: s.sorted(), Relationships: s.relationships(),
	}, nil
}

// inventory collects packages and how they belong together, each once.
type inventory struct {
	licences map[string]string
	packages map[string]*spdx.Package
	edges    map[spdx.Relationship]bool
}

func (s *inventory) add(id string, p *spdx.Package) {
	p.PackageSPDXIdentifier = common.ElementID(id)
	p.PackageDownloadLocation = cmp.Or(p.PackageDownloadLocation, unknown)
	p.PackageLicenseDeclared = cmp.Or(p.PackageLicenseDeclared, unknown)
	p.PackageLicenseConcluded, p.PackageCopyrightText = unknown, unknown
	p.IsFilesAnalyzedTagPresent = true
	s.packages[id] = p
}

func (s *inventory) edge(from, kind, to string) {
	s.edges[spdx.Relationship{
		RefA: common.MakeDocElementID("", from), RefB: common.MakeDocElementID("", to), Relationship: kind,
	}] = true
}

func (s *inventory) debian(root, name string, control []byte) error {
	fields, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(append(bytes.TrimSpace(control), "\n\n"...)))).ReadMIMEHeader()
	if err != nil {
		return fmt.Errorf("read description of Debian package %s: %w", name, err)
	}
	version, arch := fields.Get("Version"), fields.Get("Architecture")
	if version == "" || arch == "" {
		return fmt.Errorf("read description of Debian package %s: no version or architecture", name)
	}
	id := spdxID("deb", name, version)
	s.add(id, &spdx.Package{
		PackageName: name, PackageVersion: version,
		PackageSupplier:           &common.Supplier{SupplierType: "Organization", Supplier: "Debian"},
		PackageExternalReferences: purl(fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=debian-12", name, escape(version), arch)),
	})
	s.edge(root, "CONTAINS", id)
	return nil
}

func (s *inventory) program(root, name string, data []byte) error {
	info, err := buildinfo.Read(bytes.NewReader(data))
	if err != nil {
		return fmt.Errorf("read build information of %s: %w", name, err)
	}
	program := spdxID("program", name)
	s.add(program, &spdx.Package{
		PackageName: name, PrimaryPackagePurpose: "APPLICATION", PackageFileName: "/usr/bin/" + name,
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: sha256Of(data)}},
	})
	s.edge(root, "CONTAINS", program)
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	if err := s.module(program, "stdlib", goVersion, "", "pkg:golang/stdlib@"+goVersion); err != nil {
		return err
	}
	for _, m := range image.Modules(info) {
		if err := s.module(program, m.Path, m.Version, m.Sum, "pkg:golang/"+m.Path+"@"+escape(m.Version)); err != nil {
			return err
		}
	}
	return nil
}

func (s *inventory) module(program, path, version, sum, reference string) error {
	id := spdxID("go", path, version)
	p := &spdx.Package{
		PackageName: path, PackageVersion: version, PackageExternalReferences: purl(reference),
		PackageLicenseDeclared: s.licences[path+"@"+version],
	}
	if path == "stdlib" {
		p.PackageLicenseDeclared = s.licences["go"]
	} else {
		escaped, err := module.EscapePath(path)
		if err != nil {
			return fmt.Errorf("name download of %s: %w", path, err)
		}
		escapedVersion, err := module.EscapeVersion(version)
		if err != nil {
			return fmt.Errorf("name download of %s@%s: %w", path, version, err)
		}
		p.PackageDownloadLocation = "https://proxy.golang.org/" + escaped + "/@v/" + escapedVersion + ".zip"
	}
	if sum != "" {
		p.PackageComment = "go.sum: " + sum
	}
	s.add(id, p)
	s.edge(program, "DEPENDS_ON", id)
	return nil
}

func (s *inventory) sorted() []*spdx.Package {
	var packages []*spdx.Package
	for _, id := range sortedKeys(s.packages) {
		packages = append(packages, s.packages[id])
	}
	return packages
}

func (s *inventory) relationships() []*spdx.Relationship {
	edges := slices.SortedFunc(maps.Keys(s.edges), func(a, b spdx.Relationship) int {
		return cmp.Or(cmp.Compare(a.RefA.ElementRefID, b.RefA.ElementRefID), cmp.Compare(a.RefB.ElementRefID, b.RefB.ElementRefID))
	})
	var relationships []*spdx.Relationship
	for _, edge := range edges {
		relationships = append(relationships, &edge)
	}
	return relationships
}

func purl(reference string) []*spdx.PackageExternalReference {
	return []*spdx.PackageExternalReference{{Category: common.CategoryPackageManager, RefType: "purl", Locator: reference}}
}

// escape is what a version in a package URL needs: the other characters of versions may stand there as they are.
func escape(version string) string {
	return strings.NewReplacer("+", "%2B", ":", "%3A").Replace(version)
}

// notInID is what may not be in an SPDX identifier.
var notInID = regexp.MustCompile(`[^a-zA-Z0-9.-]+`)

func spdxID(kind string, names ...string) string {
	return "Package-" + kind + "-" + notInID.ReplaceAllString(strings.Join(names, "-"), "-")
}

// phrases are words that only one licence has. A text with two of them is under both.
var phrases = []struct{ id, has, hasNot string }{
	{"Apache-2.0", "Apache License Version 2.0, January 2004", ""},
	{"BSD-2-Clause", "Redistributions in binary form must reproduce the above copyright notice", "Neither the name"},
	{"BSD-3-Clause", "Neither the name", ""},
	{"ISC", "Permission to use, copy, modify, and/or distribute this software for any purpose", ""},
	{"ISC", "Permission to use, copy, modify, and distribute this software for any purpose", ""},
	{"MIT", "Permission is hereby granted, free of charge, to any person obtaining a copy", ""},
	{"MPL-2.0", "Mozilla Public License Version 2.0", ""},
	{"MPL-2.0", "Mozilla Public License, version 2.0", ""},
}

// licenceOf names the licences of a text, or no licence where it knows none of them.
func licenceOf(text string) []string {
	text = strings.Join(strings.Fields(text), " ")
	var found []string
	for _, p := range phrases {
		if strings.Contains(text, p.has) && (p.hasNot == "" || !strings.Contains(text, p.hasNot)) && !slices.Contains(found, p.id) {
			found = append(found, p.id)
		}
	}
	return found
}

// licencesOf maps each module (path@version) to the licences of its texts, as an SPDX expression.
func licencesOf(files map[string][]byte) map[string]string {
	ids := map[string][]string{}
	for _, name := range sortedKeys(files) {
		inside, ok := strings.CutPrefix(name, "licenses/")
		if !ok {
			continue
		}
		module := path.Dir(inside)
		for _, id := range licenceOf(string(files[name])) {
			if !slices.Contains(ids[module], id) {
				ids[module] = append(ids[module], id)
			}
		}
	}
	expressions := map[string]string{}
	for module, ids := range ids {
		slices.Sort(ids)
		expressions[module] = strings.Join(ids, " AND ")
	}
	return expressions
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
