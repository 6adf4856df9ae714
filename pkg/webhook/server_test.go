// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A body that is too large is an HTTP error, which the API server ignores. A review with an error would deny the object.
func TestTooLarge(t *testing.T) {
	w := newWorld(t)
	r, dial := w.listen()
	w.reconcile(r)
	bundle := w.bundle()
	large := placed(t, kindClaim, testDriver, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","x":"`+strings.Repeat("x", 1<<20)+`"}`)
	if body, err := w.ask(bundle, dial, reviewOf(t, kindClaim, large)); err == nil {
		t.Errorf("answered %d bytes: %.200s", len(large), body)
	}
	if _, err := w.ask(bundle, dial, reviewOf(t, kindClaim, placed(t, kindClaim, testDriver, good))); err != nil {
		t.Errorf("then a claim: %v", err)
	}
}

// body is one of unknown length, which has no Content-Length to be refused by.
func body(n int) io.Reader { return io.MultiReader(strings.NewReader(strings.Repeat("x", n))) }

// At most two bodies are read at a time, and none that is larger than 1 MiB: they are what the memory limit of the controller has room for.
func TestBoundsOfBodies(t *testing.T) {
	const bodyMax, reviewsMax = 1 << 20, 2
	synctest.Test(t, func(t *testing.T) {
		counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "x"})
		release := make(chan struct{})
		var now, most, reviewed atomic.Int32
		handler := bounded(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			if read, err := io.ReadAll(r.Body); err != nil || len(read) > bodyMax {
				t.Errorf("%d bytes: %v", len(read), err)
			}
			reviewed.Add(1)
			<-release
		}), counter)
		codes := sync.Map{}
		var group sync.WaitGroup
		send := func(at int, content io.Reader) {
			group.Go(func() {
				answer := httptest.NewRecorder()
				handler.ServeHTTP(answer, httptest.NewRequest(http.MethodPost, Path, content))
				codes.Store(at, answer.Code)
			})
		}
		const flood = 24
		for i := range flood {
			send(i, body(bodyMax))
		}
		time.Sleep(time.Second + time.Millisecond) // a third of what the API server waits
		synctest.Wait()
		if most.Load() != reviewsMax {
			t.Errorf("%d at a time", most.Load())
		}
		close(release)
		group.Wait()
		send(flood, body(bodyMax+1))
		group.Wait()
		count := map[any]int{}
		codes.Range(func(_, code any) bool { count[code]++; return true })
		if count[http.StatusOK] != reviewsMax || count[http.StatusServiceUnavailable] != flood-reviewsMax || count[http.StatusRequestEntityTooLarge] != 1 {
			t.Errorf("answers: %v", count)
		}
		if reviewed.Load() != reviewsMax {
			t.Errorf("%d were reviewed", reviewed.Load())
		}
	})
}

// A slow sender occupies a review for bodyTime at most, and all senders have connectionsMax connections. Others are served again.
func TestSlowSendersEnd(t *testing.T) {
	w := newWorld(t)
	r, dial := w.listen()
	w.reconcile(r)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var slow []net.Conn
	for range connectionsMax {
		plain, err := dial(ctx, "tcp", "")
		if err != nil {
			t.Fatal(err)
		}
		defer plain.Close()
		c := tls.Client(plain, &tls.Config{InsecureSkipVerify: true})
		if err := c.HandshakeContext(ctx); err != nil {
			continue // it took longer than headerTime
		}
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nx", Path, bodyMax)
		slow = append(slow, c)
	}
	for {
		_, err := w.ask(w.bundle(), dial, reviewOf(t, kindClaim, placed(t, kindClaim, testDriver, good)))
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("after the slow ones: %v", err)
		}
	}
	for _, c := range slow {
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(c); bytes.Contains(answer, []byte(" 200 ")) {
			t.Errorf("answered %.100q, %v", answer, err)
		}
	}
}
