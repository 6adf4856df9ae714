// SPDX-License-Identifier: Apache-2.0

// Package recording plays what "kubelet-plugin inspect -o json" has recorded of a real driver: as a profile of a simulated machine, and as
// an NVML library in C that answers the same. It reads the file's JSON and needs none of the packages that write it.
package recording

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Format is the format of recordings that this package reads.
const Format = 1

// Recording is the part of a report that can be played.
type Recording struct {
	Format  int     `json:"format"`
	Version string  `json:"version"`
	Machine Machine `json:"machine"`
	Calls   []Call  `json:"calls"`
}

// Machine has the NVIDIA devices on the PCI bus.
type Machine struct {
	PCI []struct {
		Address   string `json:"address"`
		Path      string `json:"path"`
		Class     string `json:"class"`
		Device    string `json:"device"`
		Subsystem string `json:"subsystem"`
		NUMANode  int    `json:"numaNode"`
	} `json:"pci"`
}

// Call is a call of NVML, as package nvml describes it.
type Call struct {
	On     string          `json:"on"`
	Method string          `json:"method"`
	Args   json.RawMessage `json:"args"`
	Values json.RawMessage `json:"values"`
	Return int             `json:"return"`
	Code   string          `json:"code"`
}

// noAnswer is the Code of a call that had not returned.
const noAnswer = "NO_ANSWER"

// Read reads a recording. Fields that it does not know belong to the report.
func Read(from io.Reader) (Recording, error) {
	var r Recording
	if err := json.NewDecoder(from).Decode(&r); err != nil {
		return Recording{}, fmt.Errorf("read recording: %w", err)
	}
	if r.Format != Format {
		return Recording{}, fmt.Errorf("read recording: format: %d is not %d, the format of this version", r.Format, Format)
	}
	if len(r.Calls) == 0 {
		return Recording{}, fmt.Errorf("read recording: calls: there are none: the driver was not found")
	}
	return r, nil
}

// key identifies a call in the table of the library: the arguments as C passes them. For a struct with an ID, that is the ID.
func (c Call) key() string {
	var args []any
	if len(c.Args) > 0 && decode(c.Args, &args) != nil {
		return ""
	}
	var words []string
	for _, arg := range args {
		if object, ok := arg.(map[string]any); ok {
			arg = object["Id"]
			if start, ok := object["Start"]; ok {
				arg = start
			}
		}
		words = append(words, fmt.Sprint(arg))
	}
	return strings.Join(words, ",")
}

// decode keeps numbers as they are written: NVML has some that a float cannot hold.
func decode(data []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	return decoder.Decode(into)
}

// find returns the values of a call that has succeeded.
func (r Recording) find(on, method, key string) ([]any, bool) {
	for _, c := range r.Calls {
		if c.On == on && c.Method == method && c.Return == 0 && c.Code != noAnswer && c.key() == key {
			var values []any
			if len(c.Values) > 0 && decode(c.Values, &values) != nil {
				return nil, false
			}
			return values, true
		}
	}
	return nil, false
}

// text returns the first value of a call; empty if it has failed.
func (r Recording) text(on, method, key string) string {
	values, ok := r.find(on, method, key)
	if !ok || len(values) == 0 {
		return ""
	}
	return fmt.Sprint(values[0])
}

// number returns a number in the values of a call: the first value, or a field of it.
func (r Recording) number(on, method, key string, fields ...string) (n int, ok bool) {
	values, ok := r.find(on, method, key)
	if !ok || len(values) == 0 {
		return 0, false
	}
	value := values[0]
	for _, field := range fields {
		object, isObject := value.(map[string]any)
		if !isObject {
			return 0, false
		}
		value = object[field]
	}
	number, isNumber := value.(json.Number)
	if !isNumber {
		return 0, false
	}
	wide, err := number.Int64()
	return int(wide), err == nil
}
