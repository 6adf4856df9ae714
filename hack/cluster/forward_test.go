// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
)

func local(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener
}

func connect(t *testing.T, to net.Listener) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", to.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestForward(t *testing.T) {
	inCluster, onHost := local(t), local(t)
	go func() {
		for {
			conn, err := inCluster.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	refuse := make(chan error, 1)
	go func() {
		ended <- forward(ctx, onHost, func(ctx context.Context) (net.Conn, error) {
			select {
			case err := <-refuse:
				return nil, err
			default:
				return new(net.Dialer).DialContext(ctx, "tcp", inCluster.Addr().String())
			}
		})
	}()

	// A client that has ended its half still gets the other one.
	first := connect(t, onHost)
	if _, err := io.WriteString(first, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := first.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(first); string(got) != "hello" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}

	refuse <- errors.New("refused")
	if got, err := io.ReadAll(connect(t, onHost)); len(got) > 0 || err != nil {
		t.Errorf("a connection that is refused: %q, %v", got, err)
	}

	open := connect(t, onHost)
	if _, err := io.WriteString(open, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(open, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("end: %v", err)
	}
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives Forward")
	}
}
