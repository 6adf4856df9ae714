// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// hello is what a client says of itself.
type hello struct {
	Threads float64          `json:"threads,omitempty"`
	Limits  map[string]int64 `json:"limits,omitempty"`
}

// welcome is what a client gets.
type welcome struct {
	Error   string        `json:"error,omitempty"`
	Server  int           `json:"server,omitempty"`
	Threads float64       `json:"threads,omitempty"`
	Devices []deviceLimit `json:"devices,omitempty"`
	Shm     string        `json:"shm,omitempty"`
}

// deviceLimit is how much of a device's memory a client gets, and who says so.
type deviceLimit struct {
	UUID string `json:"uuid"`
	MiB  int64  `json:"mib,omitempty"`
	By   string `json:"by"`
}

// shmFile is the memory that a server shares with its clients.
func shmFile(server int) string { return fmt.Sprintf("/dev/shm/cuda.shm.%x.1", server) }

// client is a process that uses CUDA: it says what it got, and with hold stays until it is told to end, or loses the daemon.
func client(hold bool) int {
	connection, w, err := join()
	if err != nil {
		fmt.Println("Not a client of MPS:", err)
		return 1
	}
	defer connection.Close()
	fmt.Printf("Client of MPS server %d\n", w.Server)
	fmt.Printf("Active threads: %s %%\n", percentage(w.Threads))
	for _, d := range w.Devices {
		if d.MiB == 0 {
			fmt.Printf("%s: no limit\n", d.UUID)
			continue
		}
		fmt.Printf("%s: limited to %d MiB by the %s\n", d.UUID, d.MiB, d.By)
	}
	if !hold {
		return 0
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGTERM, syscall.SIGINT)
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		_, _ = connection.Read(make([]byte, 1))
	}()
	select {
	case <-ends:
		return 0
	case <-lost:
		fmt.Println("The MPS server is gone")
		return 1
	}
}

// environment is what a process, client or daemon, is told to limit to.
func environment() (h hello, err error) {
	h.Limits = map[string]int64{}
	if text := os.Getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"); text != "" {
		if h.Threads, err = strconv.ParseFloat(text, 64); err != nil {
			return hello{}, err
		}
	}
	if text := os.Getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"); text != "" {
		for part := range strings.SplitSeq(text, ",") {
			device, value, _ := strings.Cut(part, "=")
			if h.Limits[device], err = mebibytes(value); err != nil {
				return hello{}, err
			}
		}
	}
	return h, nil
}

func join() (net.Conn, welcome, error) {
	h, err := environment()
	if err != nil {
		return nil, welcome{}, err
	}
	connection, err := net.Dial("unix", filepath.Join(pipeDir(), controlSocket))
	if err != nil {
		return nil, welcome{}, err
	}
	var w welcome
	err = json.NewEncoder(connection).Encode(h)
	if err == nil {
		err = json.NewDecoder(connection).Decode(&w)
	}
	if err == nil && w.Error != "" {
		err = errors.New(w.Error)
	}
	if err == nil {
		if _, missing := os.Stat(w.Shm); missing != nil {
			err = fmt.Errorf("the server's shared memory is not here, so /dev/shm is not the server's: %w", missing)
		}
	}
	if err != nil {
		return nil, welcome{}, errors.Join(err, connection.Close())
	}
	return connection, w, nil
}

// mpsServer is nvidia-cuda-mps-server: there for its clients until its control daemon ends it, or is gone.
func mpsServer() int {
	path := shmFile(os.Getpid())
	if err := os.WriteFile(path, nil, 0o666); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.Remove(path)
	log, err := os.OpenFile(filepath.Join(envOr("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"), "server.log"),
		os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer log.Close()
	fmt.Fprintf(log, "Server %d: Start\n", os.Getpid())
	fmt.Println()
	_, _ = io.Copy(io.Discard, os.Stdin)
	fmt.Fprintf(log, "Server %d: Exit\n", os.Getpid())
	return 0
}
