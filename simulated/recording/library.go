// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"bytes"
	"context"
	"debug/elf"
	"embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

//go:embed c/nvml.c
var source embed.FS

// Library is an NVML library in C that answers as the driver of a recording did. Build compiles it with gcc, which takes NVIDIA's nvml.h
// from the module go-nvml: it is for tests on a machine with Go.
type Library struct {
	// Version is the driver version in the file's name.
	Version string
	// Without are functions that the library lacks: an older driver's, or a newer one's that has dropped them.
	Without []string
}

// Build writes libnvidia-ml.so.<version>, the link libnvidia-ml.so.1 and the table into a directory, and returns the path of the library.
func (l Library) Build(ctx context.Context, dir string, r Recording) (path string, err error) {
	path = filepath.Join(dir, "libnvidia-ml.so."+l.Version)
	object, err := compiled(ctx)
	if err != nil {
		return "", fmt.Errorf("build %s: %w", path, err)
	}
	for _, name := range l.Without {
		// The dynamic linker finds a symbol by its name.
		without := bytes.ReplaceAll(object, []byte("\x00"+name+"\x00"), []byte("\x00-"+name[1:]+"\x00"))
		if bytes.Equal(without, object) {
			return "", fmt.Errorf("build %s: there is no function %s to leave out", path, name)
		}
		object = without
	}
	link := filepath.Join(dir, "libnvidia-ml.so.1")
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("build %s: %w", path, err)
	}
	err = errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(path, object, 0o755), os.Symlink(filepath.Base(path), link), WriteTable(path, r))
	return path, err
}

// Functions returns the names of all functions that a library has which lacks none.
func Functions(ctx context.Context) ([]string, error) {
	object, err := compiled(ctx)
	if err != nil {
		return nil, err
	}
	file, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		return nil, fmt.Errorf("read the library: %w", err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("read the library: %w", err)
	}
	var names []string
	for _, symbol := range symbols {
		if symbol.Section != elf.SHN_UNDEF && strings.HasPrefix(symbol.Name, "nvml") {
			names = append(names, symbol.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

var compiler struct {
	sync.Mutex
	object []byte
}

// compiled returns the library, which it compiles once in a process.
func compiled(ctx context.Context) ([]byte, error) {
	compiler.Lock()
	defer compiler.Unlock()
	if compiler.object != nil {
		return compiler.object, nil
	}
	work, err := os.MkdirTemp("", "nvml-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	code, err := source.ReadFile("c/nvml.c")
	if err != nil {
		return nil, err
	}
	header, err := headerDir(ctx)
	if err != nil {
		return nil, err
	}
	file, object := filepath.Join(work, "nvml.c"), filepath.Join(work, "nvml.so")
	if err := os.WriteFile(file, code, 0o644); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, "gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations",
		"-s", "-I", header, "-Wl,-soname,libnvidia-ml.so.1", "-o", object, file).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("compile: %w\n%s", err, out)
	}
	compiler.object, err = os.ReadFile(object)
	return compiler.object, err
}

// headerDir is the directory of NVIDIA's nvml.h.
func headerDir(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("find nvml.h: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "pkg/nvml"), nil
}

// WriteTable gives a library another recording, which it reads when a process loads it.
func WriteTable(library string, r Recording) error {
	var table strings.Builder
	for _, c := range r.Calls {
		switch {
		case c.Code == noAnswer || c.Method == "LookupSymbol":
		case c.Method == "GetFieldValues":
			c.writeFields(&table)
		default:
			var values []any
			if len(c.Values) > 0 {
				if err := decode(c.Values, &values); err != nil {
					return fmt.Errorf("write table of %s: values of %s: %w", library, c.Method, err)
				}
			}
			write(&table, c.On, c.Method, c.key(), c.Return, values)
		}
	}
	if err := os.WriteFile(library+".table", []byte(table.String()), 0o644); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return nil
}

// writeFields writes each field as a call of its own, because NVML gives each its own return code.
func (c Call) writeFields(table *strings.Builder) {
	write(table, c.On, c.Method, "", c.Return, nil)
	var values [][]map[string]any
	if len(c.Values) == 0 || decode(c.Values, &values) != nil || len(values) == 0 {
		return
	}
	for _, field := range values[len(values)-1] {
		ret := 0
		fmt.Sscan(fmt.Sprint(field["NvmlReturn"]), &ret) //nolint:errcheck // a number
		fmt.Fprintf(table, "C\t%s\t%s\t%v/%v\t%d\n", c.On, c.Method, field["FieldId"], field["ScopeId"], ret)
		writeValue(table, "", field)
	}
}

func write(table *strings.Builder, on, method, key string, ret int, values []any) {
	if on == "" {
		on = "-"
	}
	fmt.Fprintf(table, "C\t%s\t%s\t%s\t%d\n", on, method, key, ret)
	for i, value := range values {
		writeValue(table, fmt.Sprint(i), value)
	}
}

func writeValue(table *strings.Builder, path string, value any) {
	below := func(name string) string { return strings.TrimPrefix(path+"."+name, ".") }
	switch v := value.(type) {
	case nil:
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			writeValue(table, below(name), v[name])
		}
	case []any:
		for i, item := range v {
			writeValue(table, below(fmt.Sprint(i)), item)
		}
	case bool:
		text := "0"
		if v {
			text = "1"
		}
		fmt.Fprintf(table, "V\t%s\t%s\n", path, text)
	default:
		fmt.Fprintf(table, "V\t%s\t%v\n", path, v)
	}
}

// Fault makes calls of a library fail.
type Fault struct {
	// On is a handle as in Call.On, or "*".
	On string
	// Method is go-nvml's.
	Method string
	// Return is the return code; -1 makes the call hang until the fault is gone.
	Return int
}

// WriteFaults puts the faults of a library into force for the next call of any process, in place of those before.
func WriteFaults(library string, faults ...Fault) error {
	var lines strings.Builder
	for _, f := range faults {
		on := f.On
		if on == "" {
			on = "-"
		}
		fmt.Fprintf(&lines, "%s %s %d\n", on, f.Method, f.Return)
	}
	temporary := library + ".faults.new"
	if err := os.WriteFile(temporary, []byte(lines.String()), 0o644); err != nil {
		return fmt.Errorf("write faults: %w", err)
	}
	return os.Rename(temporary, library+".faults")
}
