// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// A clock that is wrong on the machine of the plugin does not make agents silent.
func TestClockIsTheServers(t *testing.T) {
	ahead := 10 * time.Minute
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(ahead).UTC().Format(http.TimeFormat))
	}))
	defer server.Close()
	clock := &Clock{}
	client := http.Client{Transport: clock.Watch(http.DefaultTransport)}
	near := func(want time.Duration) {
		t.Helper()
		if off := time.Until(clock.Now()) - want; off.Abs() > 2*time.Second {
			t.Errorf("the clock is %s off", off)
		}
	}
	near(0)
	for _, ahead = range []time.Duration{10 * time.Minute, -time.Hour} {
		response, err := client.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		near(ahead)
	}
	if off := time.Until((*Clock)(nil).Now()); off.Abs() > time.Second {
		t.Errorf("without a server the clock is %s off", off)
	}
}
