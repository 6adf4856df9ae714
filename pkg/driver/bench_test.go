// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BenchmarkPrepare reports medians: the whole call as kubelet sees it, the claim look-up within it, and the driver's own
// part with the real ledger on disk.
func BenchmarkPrepare(b *testing.B) {
	r := newRig(b, machine(8)).run()
	k := r.ready()
	c := r.claim("a", "gpu-3")
	client := r.driver.KubeClient.ResourceV1().ResourceClaims(c.Namespace)
	var calls, lookups, own, unprepares []time.Duration
	timed := func(into *[]time.Duration, f func()) {
		start := time.Now()
		f()
		*into = append(*into, time.Since(start))
	}
	for b.Loop() {
		timed(&lookups, func() {
			if _, err := client.Get(b.Context(), c.Name, metav1.GetOptions{}); err != nil {
				b.Fatal(err)
			}
		})
		timed(&calls, func() {
			if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
				b.Fatal(err, errs)
			}
		})
		timed(&unprepares, func() {
			if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
				b.Fatal(err, errs)
			}
		})
		timed(&own, func() {
			if results, err := r.driver.PrepareResourceClaims(b.Context(), []*resourceapi.ResourceClaim{c}); err != nil || results[c.UID].Err != nil {
				b.Fatal(results[c.UID].Err)
			}
		})
		if _, err := k.unprepare("v1", c); err != nil {
			b.Fatal(err)
		}
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2].Microseconds())
	}
	b.ReportMetric(median(calls), "call-p50-µs")
	b.ReportMetric(median(lookups), "lookup-p50-µs")
	b.ReportMetric(median(own), "own-p50-µs")
	b.ReportMetric(median(unprepares), "unprepare-p50-µs")
}

// BenchmarkStart reports how long until kubelet could register the driver and until its slices are published.
func BenchmarkStart(b *testing.B) {
	var published time.Duration
	for b.Loop() {
		r := newRig(b, machine(8))
		start := time.Now()
		r.run()
		r.awaitPublished(names(8, nil))
		published += time.Since(start)
		if err := r.stop(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(published.Milliseconds())/float64(b.N), "published-ms")
}
