// SPDX-License-Identifier: Apache-2.0

package controller

import "strings"

// noteLimit is what the API server takes of an event's note in bytes (k8s.io/kubernetes pkg/apis/core/validation); it refuses an
// event with a longer one.
const noteLimit = 1024

// note shortens the note of an event to what is taken of it: a claim may have lost eight GPUs to holders with long names. It is a
// pure function.
func note(text string) string {
	const more = " …"
	if len(text) <= noteLimit {
		return text
	}
	return strings.ToValidUTF8(text[:noteLimit-len(more)], "") + more
}
