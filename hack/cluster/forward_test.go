// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

const forwardPatience = 20 * time.Second

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
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(forwardPatience))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// echo answers what it gets.
func echo(t *testing.T) net.Listener {
	t.Helper()
	listener := local(t)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return listener
}

func echoes(t *testing.T, conn net.Conn) {
	t.Helper()
	_, err := io.WriteString(conn, "x")
	if err == nil {
		_, err = io.ReadFull(conn, make([]byte, 1))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func awaitForward(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(forwardPatience):
		t.Fatal("forward does not return")
		return nil
	}
}

func TestForward(t *testing.T) {
	inCluster, onHost := echo(t), local(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended, refuse := make(chan error, 1), make(chan error, 1)
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
	echoes(t, open)
	cancel()
	if err := awaitForward(t, ended); err != nil {
		t.Errorf("end: %v", err)
	}
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives Forward")
	}
}

// failing is a listener that fails after its first connection.
type failing struct {
	net.Listener
	fail chan error
	used bool
}

func (f *failing) Accept() (net.Conn, error) {
	if f.used {
		return nil, <-f.fail
	}
	f.used = true
	return f.Listener.Accept()
}

func TestForwardEndsWithItsListener(t *testing.T) {
	inCluster, onHost := echo(t), &failing{Listener: local(t), fail: make(chan error, 1)}
	ended := make(chan error, 1)
	go func() {
		ended <- forward(t.Context(), onHost, func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", inCluster.Addr().String())
		})
	}()
	open := connect(t, onHost)
	echoes(t, open)
	broken := errors.New("too many open files")
	onHost.fail <- broken
	if err := awaitForward(t, ended); !errors.Is(err, broken) {
		t.Errorf("end: %v", err)
	}
}
