// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// serve runs a server and returns its address.
func serve(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- New(address, prometheus.NewRegistry()).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	for {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
			return address
		}
	}
}

// probe asks as kubelet does: over a connection of its own.
func probe(t *testing.T, address string) {
	t.Helper()
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + address + "/healthz") //nolint:noctx // it has a timeout
	if err != nil {
		t.Errorf("a probe fails: %v", err)
		return
	}
	answer.Body.Close()
}

// stillOpen counts the connections that the server has not closed, once there are no more than most, or after ten seconds.
func stillOpen(t *testing.T, conns []net.Conn, most int) int {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		open := 0
		for _, c := range conns {
			if err := c.SetReadDeadline(time.Now().Add(2 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				open++
			}
		}
		if open <= most || time.Now().After(end) {
			return open
		}
	}
}

// A pod that opens many connections, whatever it sends, keeps a bounded number of them, and kubelet's probes are answered throughout.
func TestConnectionsAreBounded(t *testing.T) {
	const request = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, sent := range map[string]string{
		"nothing": "", "half a request": request[:10], "a request": request, "requests whose answers it does not read": strings.Repeat(request, 10),
	} {
		t.Run(name, func(t *testing.T) {
			address := serve(t)
			var conns []net.Conn
			const most = 256 // as many descriptors, and some 8 MiB
			for at := range 2 * most {
				c, err := net.Dial("tcp", address)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				// The server may have closed it.
				_, _ = io.WriteString(c, sent)
				if conns = append(conns, c); at%100 == 0 {
					probe(t, address)
				}
			}
			probe(t, address)
			if open := stillOpen(t, conns, most); open > most {
				t.Errorf("%d connections are open, more than %d", open, most)
			}
			probe(t, address)
		})
	}
}

// Idle connections are closed before those that wait for an answer, and older ones before newer ones.
func TestWhichConnectionIsClosed(t *testing.T) {
	c := &connections{open: map[net.Conn]connection{}}
	conns := make([]net.Conn, connectionsMax+3)
	for at := range conns {
		conns[at], _ = net.Pipe()
	}
	for _, conn := range conns[:connectionsMax] {
		if victim := c.note(conn, http.StateNew); victim != nil {
			t.Fatal("one is closed although there is room")
		}
		c.note(conn, http.StateActive)
	}
	c.note(conns[7], http.StateIdle)
	c.note(conns[5], http.StateIdle)
	for at, want := range []int{5, 7, 0} {
		if victim := c.note(conns[connectionsMax+at], http.StateNew); victim != conns[want] {
			t.Errorf("connection %d is not the one that is closed", want)
		}
	}
	// What the server says later of one that was closed.
	c.note(conns[0], http.StateIdle)
	c.note(conns[0], http.StateClosed)
	if len(c.open) != connectionsMax {
		t.Errorf("%d connections are counted", len(c.open))
	}
	for _, conn := range conns {
		c.note(conn, http.StateClosed)
	}
	if len(c.open) != 0 {
		t.Errorf("%d are counted after all have ended", len(c.open))
	}
}

// A client that reads none of an answer does not keep a scrape for ever.
func TestAnswersHaveATime(t *testing.T) {
	t.Parallel()
	address := serve(t)
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// The answers fill the server's send buffer, and then the requests the client's. That takes a while, so each write has a limit of its own.
	requests := strings.Repeat("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 100)
	for err == nil {
		if err = c.SetWriteDeadline(time.Now().Add(30 * time.Second)); err == nil {
			_, err = io.WriteString(c, requests)
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection is still open")
	}
}
