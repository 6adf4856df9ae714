// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Files of the pipe directory, as the driver's daemon has them.
const (
	controlSocket    = "control"            // clients
	privilegedSocket = "control_privileged" // commands
	lockFile         = "control_lock"
	logPipe          = "log"
	pidFile          = "nvidia-cuda-mps-control.pid"
)

func pipeDir() string { return envOr("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps") }

func envOr(name, fallback string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return fallback
}

// mpsControl is nvidia-cuda-mps-control: the daemon with -f or -d; without them the program that sends the commands on its
// standard input; and a client of the daemon with "client", which the real program lacks.
func mpsControl(args []string) int {
	foreground, background := slices.Contains(args, "-f"), slices.Contains(args, "-d")
	for _, arg := range args {
		if !slices.Contains([]string{"-f", "-d", "-multiuser-server", "client", "hold"}, arg) {
			fmt.Printf("Unknown option: %s\n", arg)
			return 1
		}
	}
	switch {
	case len(args) > 0 && args[0] == "client":
		return client(slices.Contains(args, "hold"))
	case foreground:
		return daemon(slices.Contains(args, "-multiuser-server"))
	case background:
		return detach(args)
	case len(args) > 0:
		fmt.Println("Usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]")
		return 1
	}
	return commands()
}

// detach starts the daemon in a session of its own, and ends when it is there or is not.
func detach(args []string) int {
	args = slices.Clone(args)
	args[slices.Index(args, "-d")] = "-f"
	r, w, err := os.Pipe()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	cmd := exec.Command(self(), args...)
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		fmt.Println(err)
		return 1
	}
	_ = w.Close()
	for line := bufio.NewScanner(r); line.Scan(); {
		if line.Text() == listeningLine {
			return 0
		}
		fmt.Println(line.Text())
	}
	// The other end of the pipe is closed.
	_ = cmd.Wait()
	return 1
}

// listeningLine is what the daemon prints when it takes commands.
const listeningLine = "listening"

// answer is what the daemon says to a command.
type answer struct {
	Text   string `json:"text,omitempty"`
	Failed bool   `json:"failed,omitempty"`
}

// commands passes standard input on, line by line, and prints the answers.
func commands() int {
	socket, err := net.Dial("unix", filepath.Join(pipeDir(), privilegedSocket))
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		return 1
	}
	defer socket.Close()
	answers := json.NewDecoder(socket)
	failed := false
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			continue
		}
		if err := json.NewEncoder(socket).Encode(line); err != nil {
			fmt.Println("Failed to send command:", err)
			return 1
		}
		var a answer
		if err := answers.Decode(&a); err != nil {
			fmt.Println("The control daemon has not answered:", err)
			return 1
		}
		if a.Text != "" {
			fmt.Println(a.Text)
		}
		failed = failed || a.Failed
	}
	if failed {
		return 1
	}
	return 0
}
