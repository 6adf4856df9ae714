// SPDX-License-Identifier: Apache-2.0

package results

import "fmt"

// Shard is one of several parts of a list, such as 1/3. Several machines that know the same list have all of it between them. The zero
// value is all of the list. It is a flag.Value.
type Shard struct{ index, of int }

// Set reads a part. An empty one is the whole.
func (s *Shard) Set(text string) error {
	if text == "" {
		*s = Shard{}
		return nil
	}
	var rest string
	if n, _ := fmt.Sscanf(text, "%d/%d%s", &s.index, &s.of, &rest); n != 2 || s.index < 1 || s.index > s.of {
		return fmt.Errorf("want a part such as 1/3, not %q", text)
	}
	return nil
}

// String is what Set reads.
func (s *Shard) String() string {
	if s.of == 0 {
		return ""
	}
	return fmt.Sprintf("%d/%d", s.index, s.of)
}

// Of are the names of a sorted list that belong to the part.
func (s *Shard) Of(names []string) (part []string) {
	for i, name := range names {
		if s.of == 0 || i%s.of == s.index-1 {
			part = append(part, name)
		}
	}
	return part
}

// First says that the part is the whole list or the first of several.
func (s *Shard) First() bool { return s.index <= 1 }
