// SPDX-License-Identifier: Apache-2.0

package controller

import "strings"

// noteLimit is the longest note in bytes that the API server accepts in an event (k8s.io/kubernetes pkg/apis/core/validation).
const noteLimit = 1024

// note shortens the note of an event to noteLimit. A claim may conflict on eight GPUs with holders that have long names. It is a pure
// function.
func note(text string) string {
	const more = " …"
	if len(text) <= noteLimit {
		return text
	}
	return strings.ToValidUTF8(text[:noteLimit-len(more)], "") + more
}
