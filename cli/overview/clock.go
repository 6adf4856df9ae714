// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"net/http"
	"sync/atomic"
	"time"
)

// Clock is the API server's clock, by the dates of its answers (RFC 9110, 6.6.1). What agents write is compared with it: the clock of the machine
// on which the plugin runs may be wrong by more than an agent may be silent. The zero Clock is the machine's until the first answer. It is safe
// for concurrent use. A nil Clock is the machine's.
type Clock struct{ ahead atomic.Int64 }

// Now returns the time. It is right to within two seconds: dates have no fractions.
func (c *Clock) Now() time.Time {
	if c == nil {
		return time.Now()
	}
	return time.Now().Add(time.Duration(c.ahead.Load()))
}

// Watch returns a transport that sets the Clock by the answers of another one.
func (c *Clock) Watch(next http.RoundTripper) http.RoundTripper { return dated{next, c} }

type dated struct {
	http.RoundTripper
	clock *Clock
}

// RoundTrip implements http.RoundTripper.
func (d dated) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := d.RoundTripper.RoundTrip(request)
	if err == nil {
		if date, dateErr := http.ParseTime(response.Header.Get("Date")); dateErr == nil {
			d.clock.ahead.Store(int64(time.Until(date)))
		}
	}
	return response, err
}

// WrappedRoundTripper lets client-go find the transport below (k8s.io/apimachinery/pkg/util/net).
func (d dated) WrappedRoundTripper() http.RoundTripper { return d.RoundTripper }
