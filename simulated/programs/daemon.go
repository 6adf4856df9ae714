// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// control is the control daemon.
type control struct {
	devices   []string
	multiUser bool
	log       *os.File
	stop      chan struct{}
	once      sync.Once // closes stop

	mu      sync.Mutex
	threads float64
	// limits of memory in MiB, by what the command called the device.
	limits  map[string]int64
	server  *server
	clients []int
	// fewer is signalled when a client goes.
	fewer *sync.Cond
	// quitting refuses new clients.
	quitting bool
}

// server is the process that clients share.
type server struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
	uid   uint32
	// What new clients get was settled when it was started.
	threads float64
	limits  map[string]int64
}

// refusal is an error in the driver's own words.
type refusal string

func (r refusal) Error() string { return string(r) }

func daemon(multiUser bool) int {
	word, text := fault(MPSControl)
	switch word {
	case FaultFail:
		fmt.Println(text)
		return 1
	case FaultHang:
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
		forever()
	}
	defaults, err := environment()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	c := &control{multiUser: multiUser, stop: make(chan struct{}), threads: cmp.Or(defaults.Threads, 100), limits: defaults.Limits}
	c.fewer = sync.NewCond(&c.mu)
	if list := os.Getenv("CUDA_VISIBLE_DEVICES"); list != "" {
		c.devices = strings.Split(list, ",")
	}
	if err := c.run(); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func (c *control) run() error {
	dir, logs := pipeDir(), envOr("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
	for _, d := range []string{dir, logs} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return refusal("An instance of this daemon is already running")
	}
	if c.log, err = os.OpenFile(filepath.Join(logs, "control.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		return err
	}
	defer c.log.Close()
	if err := syscall.Mkfifo(filepath.Join(dir, logPipe), 0o666); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	ends := make(chan os.Signal, 4)
	signal.Notify(ends, syscall.SIGTERM, syscall.SIGINT)
	commands, err := listen(filepath.Join(dir, privilegedSocket), 0o755)
	if err != nil {
		return err
	}
	clients, err := listen(filepath.Join(dir, controlSocket), 0o666)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, pidFile), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
		return err
	}
	c.say("Starting control daemon using socket %s", filepath.Join(dir, controlSocket))
	c.say("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", dir)
	go accept(commands, c.command)
	go accept(clients, c.client)
	fmt.Println(listeningLine)
	c.await(ends)
	c.say("Exit")
	c.shutdown()
	// The sockets stay, as the real ones do.
	return os.Remove(filepath.Join(dir, pidFile))
}

func (c *control) await(ends <-chan os.Signal) {
	for {
		select {
		case <-c.stop:
			return
		case <-ends:
			if word, _ := fault(MPSControl); word != FaultStubborn {
				return
			}
		}
	}
}

func (c *control) say(format string, args ...any) {
	stamp := time.Now().Format("2006-01-02 15:04:05.000")
	fmt.Fprintf(c.log, "[%s Control %5d] %s\n", stamp, os.Getpid(), fmt.Sprintf(format, args...))
}

func listen(path string, mode os.FileMode) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	return listener, os.Chmod(path, mode)
}

func accept(listener *net.UnixListener, serve func(*net.UnixConn)) {
	for {
		connection, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		go serve(connection)
	}
}

func (c *control) command(connection *net.UnixConn) {
	defer connection.Close()
	lines, answers := json.NewDecoder(connection), json.NewEncoder(connection)
	for {
		var line string
		if err := lines.Decode(&line); err != nil {
			return
		}
		word, _ := fault(MPSControl)
		if word == FaultMute {
			continue
		}
		words := strings.Fields(line)
		limit, quits := quitLimit(words)
		if quits && word != FaultStubborn {
			c.say("NEW UI: %s", line)
			c.awaitClients(limit)
			_ = answers.Encode(answer{}) // the sender may be gone
			c.once.Do(func() { close(c.stop) })
			return
		}
		text, err := c.obey(words)
		a := answer{Text: text}
		if err != nil {
			a = answer{Text: err.Error(), Failed: true}
		}
		if answers.Encode(a) != nil {
			return
		}
	}
}

// quitLimit reads "quit" and "quit -t 5". Zero is no limit.
func quitLimit(words []string) (limit time.Duration, ok bool) {
	switch {
	case words[0] == "quit" && len(words) == 1:
		return 0, true
	case words[0] != "quit" || len(words) != 3 || words[1] != "-t":
		return 0, false
	}
	seconds, err := strconv.Atoi(words[2])
	return time.Duration(seconds) * time.Second, err == nil && seconds > 0
}

// awaitClients returns when the last client is gone, or after a limit. An MPS daemon of R580 answers "quit" only then, and ends then even if
// the sender has ended before (docs/dev/hardware.md). That it refuses new clients meanwhile, and the limit, are in the manual page
// nvidia-cuda-mps-control(1) and were not tried.
func (c *control) awaitClients(limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quitting = true
	expired := false
	if limit > 0 {
		timer := time.AfterFunc(limit, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			expired = true
			c.fewer.Broadcast()
		})
		defer timer.Stop()
	}
	for len(c.clients) > 0 && !expired {
		c.fewer.Wait()
	}
}

func (c *control) obey(words []string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.say("NEW UI: %s", strings.Join(words, " "))
	unknown := refusal(fmt.Sprintf("Unknown command: %s", strings.Join(words, " ")))
	arguments := map[string]int{
		"get_server_list": 0, "get_client_list": 1, "get_default_active_thread_percentage": 0, "set_default_active_thread_percentage": 1,
		"get_default_device_pinned_mem_limit": 1, "set_default_device_pinned_mem_limit": 2,
	}
	if _, quits := quitLimit(words); quits {
		return "", nil // it goes on, by FaultStubborn
	}
	if wanted, known := arguments[words[0]]; !known || len(words) != wanted+1 {
		return "", unknown
	}
	switch words[0] {
	case "get_server_list":
		if c.server != nil {
			return strconv.Itoa(c.server.cmd.Process.Pid), nil
		}
		return "", nil
	case "get_client_list":
		var pids []string
		for _, pid := range c.clients {
			pids = append(pids, strconv.Itoa(pid))
		}
		return strings.Join(pids, "\n"), nil
	case "get_default_active_thread_percentage":
		return percentage(c.threads), nil
	case "set_default_active_thread_percentage":
		p, err := strconv.ParseFloat(words[1], 64)
		if err != nil || p < 0 || p > 100 {
			return "", refusal(fmt.Sprintf("Invalid percentage: %s", words[1]))
		}
		c.threads = p
		return percentage(p), nil
	case "get_default_device_pinned_mem_limit":
		if limit, ok := c.limits[words[1]]; ok {
			return strconv.FormatInt(limit, 10) + "M", nil
		}
		return "", nil
	default:
		limit, err := mebibytes(words[2])
		if err != nil {
			return "", err
		}
		c.limits[words[1]] = limit
		return "", nil
	}
}

func percentage(p float64) string { return strconv.FormatFloat(p, 'f', 1, 64) }

// mebibytes reads an integer and a qualifier, M or G.
func mebibytes(text string) (int64, error) {
	number, unit := strings.TrimSuffix(text, "B"), int64(0)
	switch {
	case strings.HasSuffix(number, "M"):
		unit = 1
	case strings.HasSuffix(number, "G"):
		unit = 1024
	}
	limit, err := strconv.ParseInt(strings.TrimRight(number, "MG"), 10, 64)
	if unit == 0 || err != nil || limit <= 0 {
		return 0, refusal(fmt.Sprintf("Invalid memory limit: %s", text))
	}
	return limit * unit, nil
}

// client serves one until it goes.
func (c *control) client(connection *net.UnixConn) {
	defer connection.Close()
	var hello hello
	if err := json.NewDecoder(connection).Decode(&hello); err != nil {
		return
	}
	pid, uid := peer(connection)
	c.say("Accepting connection...")
	welcome := c.welcome(hello, pid, uid)
	if welcome.Error == "" {
		defer c.leave(pid)
	}
	if err := json.NewEncoder(connection).Encode(welcome); err != nil || welcome.Error != "" {
		return
	}
	_, _ = connection.Read(make([]byte, 1))
}

func (c *control) leave(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.clients, pid); i >= 0 {
		c.clients = slices.Delete(c.clients, i, i+1)
	}
	c.fewer.Broadcast()
}

func peer(connection *net.UnixConn) (pid int, uid uint32) {
	raw, err := connection.SyscallConn()
	if err != nil {
		return 0, 0
	}
	_ = raw.Control(func(fd uintptr) {
		if credentials, err := syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED); err == nil {
			pid, uid = int(credentials.Pid), credentials.Uid
		}
	})
	return pid, uid
}

// welcome admits a client, or says why not.
func (c *control) welcome(h hello, pid int, uid uint32) welcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.quitting {
		return welcome{Error: "the daemon quits"}
	}
	if c.server != nil && c.server.uid != uid && !c.multiUser {
		// The real one lets the client wait until the other user's are gone.
		return welcome{Error: fmt.Sprintf("the server is user %d's", c.server.uid)}
	}
	if c.server == nil {
		if err := c.start(uid); err != nil {
			return welcome{Error: err.Error()}
		}
	}
	w := welcome{Server: c.server.cmd.Process.Pid, Threads: c.server.threads, Shm: shmFile(c.server.cmd.Process.Pid)}
	if h.Threads > 0 {
		w.Threads = min(w.Threads, h.Threads)
	}
	for i, uuid := range c.devices {
		limit := c.server.limits[strconv.Itoa(i)]
		if byUUID, ok := c.server.limits[uuid]; ok {
			limit = byUUID
		}
		by := "daemon"
		if own := h.Limits[strconv.Itoa(i)]; own > 0 && (limit == 0 || own < limit) {
			limit, by = own, "client"
		}
		w.Devices = append(w.Devices, deviceLimit{UUID: uuid, MiB: limit, By: by})
	}
	c.clients = append(c.clients, pid)
	c.say("NEW CLIENT %d from user %d: Server already exists", pid, uid)
	return w
}

func (c *control) start(uid uint32) error {
	cmd := exec.Command(filepath.Join(filepath.Dir(self()), MPSServer))
	// In a driver root there may be no /dev/null.
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	ready, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	c.say("Starting new server %d for user %d", 0, uid)
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		return errors.Join(fmt.Errorf("the server has ended: %w", err), cmd.Wait())
	}
	started := &server{cmd: cmd, stdin: stdin, ended: make(chan struct{}), uid: uid, threads: c.threads, limits: map[string]int64{}}
	for device, limit := range c.limits {
		started.limits[device] = limit
	}
	c.server = started
	go func() {
		_ = cmd.Wait()
		close(started.ended)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.say("Server %d exited", cmd.Process.Pid)
		c.server = nil
	}()
	return nil
}

func (c *control) shutdown() {
	c.mu.Lock()
	running := c.server
	c.mu.Unlock()
	if running != nil {
		_ = running.stdin.Close()
		<-running.ended
	}
}
