// SPDX-License-Identifier: Apache-2.0

// Package stacks writes the stacks of all goroutines of a program when it gets SIGUSR2, and sends that signal to the program of a container,
// whose image has no kill.
package stacks

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/pprof"
	"sync"
	"syscall"
)

// OnSignal writes the stacks to out at each SIGUSR2, until stop is called. Without it a Go program ignores the signal.
func OnSignal(out io.Writer) (stop func()) {
	signals, ended := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, syscall.SIGUSR2)
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			select {
			case <-signals:
				write(out)
			case <-ended:
				return
			}
		}
	})
	return func() {
		signal.Stop(signals)
		close(ended)
		writer.Wait()
	}
}

// write writes everything at once, so that no line of the log is in between.
func write(out io.Writer) {
	text := bytes.NewBufferString("Stacks of all goroutines, because of SIGUSR2:\n")
	if profile := pprof.Lookup("goroutine"); profile != nil {
		_ = profile.WriteTo(text, 2) // a buffer returns no error
	}
	text.WriteString("End of the stacks\n")
	_, _ = out.Write(text.Bytes()) // it is the log: nothing else could report the error
}

// first is the first process of a container.
const first = 1

// Request sends SIGUSR2 to the program of this container: the first process. It is an error if that is another program.
func Request(program string) error { return request("/proc", first, program) }

func request(proc string, pid int, program string) error {
	line, err := os.ReadFile(filepath.Join(proc, fmt.Sprint(pid), "cmdline"))
	if err != nil {
		return fmt.Errorf("find process %d: %w", pid, err)
	}
	name, _, _ := bytes.Cut(line, []byte{0})
	if found := filepath.Base(string(name)); found != program {
		return fmt.Errorf("send SIGUSR2 to process %d: it is %s, not %s: run this in the container of %s", pid, found, program, program)
	}
	if err := syscall.Kill(pid, syscall.SIGUSR2); err != nil {
		return fmt.Errorf("send SIGUSR2 to process %d: %w", pid, err)
	}
	return nil
}
