// SPDX-License-Identifier: Apache-2.0

package controller

import "strings"

// noteLimit is the longest note in bytes that the API server accepts in an event (k8s.io/kubernetes pkg/apis/core/validation).
const noteLimit = 1024

// shorten returns at most so many bytes of a text. A claim may conflict on eight GPUs with holders that have long names. It is a pure
// function.
func shorten(text string, limit int) string {
	const more = " …"
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit-len(more)], "") + more
}
