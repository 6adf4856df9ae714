// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// While devices are withheld, a holder keeps what it has and may reserve it again, and no other holder gets anything by either API.
func TestWithhold(t *testing.T) {
	l := openWithQueue(t, nil)
	pod := func(id string) error {
		return l.ReservePod([]PodRequest{{ID: id, Resource: "nvidia.com/gpu", Device: whole(id)}})
	}
	claim := func(uid, gpu string) error {
		_, err := l.ReserveClaim(t.Context(), ClaimRequest{UID: uid, Namespace: "apps", Name: uid, Devices: []device.Ref{whole(gpu)}})
		return err
	}
	must(t, pod("a"))
	must(t, claim("c1", "b"))
	changed := l.Changed()
	l.Withhold("plugin", errors.New("another plugin"))
	<-changed
	l.Withhold("pods", errors.New("an unknown ID"))
	must(t, pod("a"))
	must(t, claim("c1", "b"))
	var withheld *WithheldError
	for what, err := range map[string]error{"pod": pod("c"), "claim": claim("c2", "d")} {
		// A tenant reads the error.
		if !errors.As(err, &withheld) || strings.Contains(err.Error(), "plugin") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := l.Withheld(); err == nil || !strings.Contains(err.Error(), "another plugin") || !strings.Contains(err.Error(), "an unknown ID") {
		t.Errorf("Withheld is %v", err)
	}
	l.Withhold("plugin", nil)
	if l.Withholds("plugin") || !l.Withholds("pods") {
		t.Error("Withholds does not tell the sources apart")
	}
	if err := pod("c"); !errors.As(err, &withheld) {
		t.Errorf("one of two reasons is left: %v", err)
	}
	l.Withhold("pods", nil)
	must(t, l.Withheld())
	must(t, pod("c"))
	must(t, claim("c2", "d"))
}
