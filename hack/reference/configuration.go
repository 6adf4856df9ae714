// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"fmt"
	"go/ast"
	"reflect"
	"strconv"
	"strings"
)

// configuration has the keys of the node configuration and of claim parameters, with the comments of their types.
func configuration(root string) (string, error) {
	files, err := sources(root)
	if err != nil {
		return "", err
	}
	all := readTypes(files)
	var page strings.Builder
	page.WriteString(header("Node configuration and claim parameters", "the types in internal/config and api/parameters/v1beta1",
		"Unknown keys are refused. [Configuration](../user/configuration.md) says where the node configuration comes from, what overrides it, and "+
			"what differs from NVIDIA's device plugin. [Sharing](../user/sharing.md) and [MIG](../user/mig.md) have examples."))
	for _, part := range []struct{ title, text, pkg, typ string }{
		{"Node configuration", "The section `tandem` is Tandem's own. The other keys are those of NVIDIA's device plugin.", "internal/config", "file"},
		{"Parameters of GPUs and partitions", "The parameters of a claim, a template or a DeviceClass, with `apiVersion: resource.nvidia.com/v1beta1` and " +
			"`kind: GpuConfig` for whole GPUs or `kind: MigDeviceConfig` for partitions.", "api/parameters/v1beta1", "deviceConfig"},
	} {
		t := newTable("key", "type", "meaning")
		declared := all.specs[part.pkg+"."+part.typ]
		if declared == nil {
			return "", fmt.Errorf("there is no type %s in %s", part.typ, part.pkg)
		}
		if err := all.rows(t, "", part.pkg, declared.Type); err != nil {
			return "", err
		}
		fmt.Fprintf(&page, "\n## %s\n\n%s\n\n%s", part.title, wrap(part.text), t)
	}
	return page.String(), nil
}

// types are what the packages declare, by package and name: "pkg/device.Health".
type types struct {
	specs map[string]*ast.TypeSpec
	// values are the constants of named strings, without the empty one.
	values map[string][]string
	// decoded are types that decode themselves. The comments of their keys say what they accept.
	decoded map[string]bool
}

func readTypes(files []source) types {
	t := types{map[string]*ast.TypeSpec{}, map[string][]string{}, map[string]bool{}}
	for _, f := range files {
		for _, declaration := range f.file.Decls {
			switch declaration := declaration.(type) {
			case *ast.FuncDecl:
				if declaration.Recv != nil && declaration.Name.Name == "UnmarshalJSON" {
					if pointer, is := declaration.Recv.List[0].Type.(*ast.StarExpr); is {
						t.decoded[f.pkg+"."+pointer.X.(*ast.Ident).Name] = true
					}
				}
			case *ast.GenDecl:
				for _, spec := range declaration.Specs {
					t.declare(f.pkg, spec)
				}
			}
		}
	}
	return t
}

func (t types) declare(pkg string, spec ast.Spec) {
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		t.specs[pkg+"."+spec.Name.Name] = spec
	case *ast.ValueSpec:
		name, is := spec.Type.(*ast.Ident)
		for _, value := range spec.Values {
			if s, known := text(value); is && known && s != "" {
				t.values[pkg+"."+name.Name] = append(t.values[pkg+"."+name.Name], code(s))
			}
		}
	}
}

// rows adds the fields of a struct that have a key.
func (t types) rows(to *table, prefix, pkg string, of ast.Expr) error {
	for _, field := range of.(*ast.StructType).Fields.List {
		key := jsonKey(field)
		if key == "" {
			continue
		}
		name := prefix + key
		words, within, structure := t.words(pkg, field.Type)
		meaning := prose(field.Doc.Text())
		if meaning == "" && structure == nil {
			return fmt.Errorf("%s: key %s has no comment", pkg, name)
		}
		if strings.HasPrefix(words, "list") {
			name += "[]"
		}
		to.row(code(name), words, describe(fieldName(field), meaning))
		if structure != nil {
			if err := t.rows(to, name+".", within, structure); err != nil {
				return err
			}
		}
	}
	return nil
}

// describe turns a comment of Go, such as "Replicas is the number …" or "Unlimited lets …", into the description of a key: "The number …" or
// "Lets …".
func describe(name, comment string) string {
	comment = strings.TrimPrefix(comment, name+" ")
	for _, verb := range []string{"is ", "are "} {
		comment = strings.TrimPrefix(comment, verb)
	}
	if comment == "" {
		return ""
	}
	return strings.ToUpper(comment[:1]) + comment[1:]
}

func fieldName(field *ast.Field) string {
	if len(field.Names) == 0 {
		return ""
	}
	return field.Names[0].Name
}

func jsonKey(field *ast.Field) string {
	if field.Tag == nil || len(field.Names) == 0 {
		return ""
	}
	tag, err := strconv.Unquote(field.Tag.Value)
	if err != nil {
		return ""
	}
	key, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
	return key
}

// words names the type of a key. Structure is the struct below it, declared in the package within.
func (t types) words(pkg string, of ast.Expr) (words, within string, structure *ast.StructType) {
	switch of := of.(type) {
	case *ast.StarExpr:
		return t.words(pkg, of.X)
	case *ast.ArrayType:
		words, within, structure = t.words(pkg, of.Elt)
		return "list of " + words, within, structure
	case *ast.MapType:
		words, within, structure = t.words(pkg, of.Value)
		return strings.TrimSuffix("map to "+words, " to "), within, structure
	case *ast.StructType:
		return "object", pkg, of
	case *ast.SelectorExpr:
		if at, is := of.X.(*ast.Ident); is && at.Name == "device" {
			return t.named("pkg/device", of.Sel.Name)
		}
		return "", "", nil // json.RawMessage: the comment says what it may be
	case *ast.Ident:
		return t.named(pkg, of.Name)
	}
	return "", "", nil
}

func (t types) named(pkg, name string) (words, within string, structure *ast.StructType) {
	declared, values := t.specs[pkg+"."+name], t.values[pkg+"."+name]
	switch {
	case name == "bool":
		return "boolean", "", nil
	case name == "int":
		return "integer", "", nil
	case len(values) > 0:
		return strings.Join(values, ", "), "", nil
	case t.decoded[pkg+"."+name]:
		return "", "", nil
	case declared == nil:
		return name, "", nil
	}
	return t.words(pkg, declared.Type)
}
