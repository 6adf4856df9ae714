// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"
)

const (
	// startTimeout is how long a component may take until it answers. One that ends is noticed at once.
	startTimeout = 5 * time.Minute
	// stopGrace is how long it may take to end after SIGTERM. The API server and etcd would wait for their watchers, ten
	// seconds and a minute, and there is nothing to be learnt from that.
	stopGrace = 2 * time.Second
)

// Component is one long-running program of the cluster, for example "kubelet". It is safe for concurrent use.
type Component struct {
	machine *machine
	name    string
	argv    []string
	// probe answers nil once the program serves.
	probe func(context.Context) error
	mu    sync.Mutex
}

// ErrNotRunning is reported when something is asked of a component that does not run.
var ErrNotRunning = errors.New("component is not running")

// Name of the component.
func (c *Component) Name() string { return c.name }

// LogPath is the host path of what the component wrote, over all its starts.
func (c *Component) LogPath() string { return filepath.Join(c.machine.dir, "logs", c.name+".log") }

func (c *Component) stateFile() string { return filepath.Join(c.machine.dir, c.name+".json") }

// running answers the component's process, or ErrNotRunning.
func (c *Component) running() (process, error) {
	var recorded process
	err := readJSON(c.stateFile(), &recorded)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !recorded.alive() {
		return process{}, fmt.Errorf("%s on %s: %w", c.name, c.machine.name, ErrNotRunning)
	}
	return recorded, err
}

// Pid answers the component's process ID as the host sees it, or ErrNotRunning.
func (c *Component) Pid() (int, error) {
	running, err := c.running()
	return running.Pid, err
}

// Start starts the component, where it does not run, and returns when it serves.
func (c *Component) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.start(ctx)
}

func (c *Component) start(ctx context.Context) error {
	if _, err := c.running(); err == nil {
		return c.ready(ctx)
	} else if !errors.Is(err, ErrNotRunning) {
		return err
	}
	holder, err := c.machine.holder()
	if err == nil {
		err = keepFiles()
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	if err := os.MkdirAll(filepath.Dir(c.LogPath()), 0o755); err != nil {
		return fmt.Errorf("make log directory: %w", err)
	}
	log, err := os.OpenFile(c.LogPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", c.name, err)
	}
	defer log.Close()
	cmd := exec.Command("/bin/sh", append([]string{"-c", joinGroup, "sh"}, c.argv...)...)
	cmd.Env = c.machine.env
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := startIn(holder, cmd); err != nil {
		return fmt.Errorf("start %s on %s: %w", c.name, c.machine.name, err)
	}
	// Reaps the process. Its log has the reason for its end.
	go func() { _ = cmd.Wait() }()
	started, err := identify(cmd.Process.Pid)
	if err != nil {
		return fmt.Errorf("start %s on %s: %w: %s", c.name, c.machine.name, err, c.logTail())
	}
	if err := writeJSON(c.stateFile(), started); err != nil {
		return errors.Join(err, started.kill(ctx))
	}
	return c.ready(ctx)
}

// Ready returns when the component serves. Safe to call at any time; an error means that it ended or took too long.
func (c *Component) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var last error
	ended := false
	err := until(ctx, func() bool {
		if last = c.probe(ctx); last == nil {
			return true
		}
		_, err := c.running()
		ended = err != nil
		return ended
	})
	if ended {
		err = ErrNotRunning
	}
	if err != nil {
		return fmt.Errorf("wait for %s on %s: %w (%w); its log ends:\n%s", c.name, c.machine.name, err, last, c.logTail())
	}
	return nil
}

// Stop asks the component to end (SIGTERM) and kills it where it does not within two seconds. It returns when the
// process is gone. It is idempotent. What the component started, such as containers, stays.
func (c *Component) Stop(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.end(ctx, syscall.SIGTERM, stopGrace)
}

// Kill ends the component with SIGKILL and returns when the process is gone. It is idempotent.
func (c *Component) Kill(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.end(ctx, syscall.SIGKILL, 0)
}

func (c *Component) end(ctx context.Context, signal syscall.Signal, grace time.Duration) error {
	running, err := c.running()
	if errors.Is(err, ErrNotRunning) {
		return nil
	}
	if err != nil {
		return err
	}
	if grace > 0 {
		// A frozen process sees the request only once it runs again.
		for _, signal := range []syscall.Signal{signal, syscall.SIGCONT} {
			if err := running.signal(signal); err != nil && !errors.Is(err, errGone) {
				return fmt.Errorf("stop %s on %s: %w", c.name, c.machine.name, err)
			}
		}
		patient, cancel := context.WithTimeout(ctx, grace)
		err := running.wait(patient)
		cancel()
		if err == nil {
			return nil
		}
	}
	if err := running.kill(ctx); err != nil {
		return fmt.Errorf("kill %s on %s: %w", c.name, c.machine.name, err)
	}
	return nil
}

// Restart stops and starts the component; it returns when it serves again.
func (c *Component) Restart(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.end(ctx, syscall.SIGTERM, stopGrace); err != nil {
		return err
	}
	return c.start(ctx)
}

// Freeze stops the component from running (SIGSTOP) without ending it: its sockets stay open but do not answer.
func (c *Component) Freeze() error { return c.signal(syscall.SIGSTOP) }

// Thaw lets a frozen component run again.
func (c *Component) Thaw() error { return c.signal(syscall.SIGCONT) }

func (c *Component) signal(signal syscall.Signal) error {
	running, err := c.running()
	if err != nil {
		return err
	}
	if err := running.signal(signal); err != nil {
		return fmt.Errorf("%s on %s: %w", c.name, c.machine.name, err)
	}
	return nil
}

// logTail answers the last lines of the log, for errors.
func (c *Component) logTail() string {
	const kept = 3000
	data, err := os.ReadFile(c.LogPath())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(data[max(0, len(data)-kept):]))
}

// answers makes a probe that wants status 200 from a URL as seen from the component's machine.
func (m *machine) answers(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		client := http.Client{Transport: &http.Transport{
			DialContext: m.dial, DisableKeepAlives: true,
			// Whether it serves is the question here, not who it is.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		}}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return fmt.Errorf("ask %s: %w", url, err)
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("ask %s: %s", url, response.Status)
		}
		return nil
	}
}

// runsContainers makes a probe that wants the container runtime behind a unix socket of the machine to answer kubelet's first
// question. It accepts connections before it is ready for that, and a kubelet that is turned away ends.
func (m *machine) runsContainers(socket string) func(context.Context) error {
	return func(ctx context.Context) error {
		runtime, err := grpc.NewClient("passthrough:///cri", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return m.dial(ctx, "unix", socket) }))
		if err != nil {
			return fmt.Errorf("dial container runtime: %w", err)
		}
		// The answer is of no interest.
		err = runtime.Invoke(ctx, "/runtime.v1.RuntimeService/Version", &emptypb.Empty{}, &emptypb.Empty{})
		return errors.Join(err, runtime.Close())
	}
}
