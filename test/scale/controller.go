// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/figure"
)

// controller is one process of the shipped binary, with the chart's arguments and the account's rights.
type controller struct {
	name    string
	cmd     *exec.Cmd
	started time.Time
	ended   chan struct{}
	log     *os.File
	address string
	client  *http.Client
}

// controllerAccount is the account of the chart's controller.
const controllerAccount = agentAccount + "-controller"

// startController runs a controller with the name of a pod. Two of them need different ports.
func (r *run) startController(ctx context.Context, name string, port int) (*controller, error) {
	kubeconfig, err := r.controllerKubeconfig()
	if err != nil {
		return nil, err
	}
	c := &controller{
		name: name, ended: make(chan struct{}), address: fmt.Sprintf("127.0.0.1:%d", port),
		client: &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DialContext: r.cluster.DialContext}},
	}
	args := append(append([]string{}, r.chart.args...), "--kubeconfig="+kubeconfig, "--http-endpoint="+c.address, "--webhook-port="+strconv.Itoa(port+1000))
	if c.cmd, err = r.cluster.Command(context.WithoutCancel(ctx), r.programs.Controller, args...); err != nil {
		return nil, err
	}
	c.cmd.Env = append(append(os.Environ(), r.chart.env...), "NAMESPACE="+install.Namespace, "POD_NAME="+name)
	if c.log, err = os.Create(filepath.Join(r.dir, fmt.Sprintf("%s-%d.log", name, port))); err != nil {
		return nil, fmt.Errorf("write log of the controller: %w", err)
	}
	c.cmd.Stdout, c.cmd.Stderr = c.log, c.log
	c.started = time.Now()
	if err := c.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start controller: %w", err), c.log.Close())
	}
	go func() { _, _ = c.cmd.Wait(), c.log.Close(); close(c.ended) }() // how it ends is in its log
	return c, nil
}

// controllerKubeconfig is the administrator's, with the controller's account.
func (r *run) controllerKubeconfig() (string, error) {
	path := filepath.Join(r.dir, "controller.kubeconfig")
	config, err := clientcmd.LoadFromFile(r.cluster.Kubeconfig())
	if err != nil {
		return "", fmt.Errorf("read kubeconfig: %w", err)
	}
	for _, user := range config.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = controllerAccount, accountGroups
	}
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		return "", fmt.Errorf("write kubeconfig of the controller: %w", err)
	}
	return path, nil
}

// stopPatience is how long a controller may take to end.
const stopPatience = 30 * time.Second

// signal ends the process and waits for that.
func (c *controller) signal(s syscall.Signal) {
	_ = c.cmd.Process.Signal(s) // it may have ended
	select {
	case <-c.ended:
	case <-time.After(stopPatience):
		_ = c.cmd.Process.Kill()
		<-c.ended
	}
}

// kill ends it as a lost node does.
func (c *controller) kill() { c.signal(syscall.SIGKILL) }

func (c *controller) memory() (figure.Memory, error) {
	m, err := figure.ReadMemory(c.cmd.Process.Pid)
	if closed(c.ended) {
		err = errors.Join(errors.New("it has ended"), err)
	}
	if err != nil {
		return figure.Memory{}, fmt.Errorf("measure controller %s: %w\n%s", c.name, err, c.logTail())
	}
	return m, nil
}

// state is what the controller's endpoints say.
type state struct {
	// leads means that it has the Lease, ready that its caches are filled, idle that no queue has an item and no worker works.
	leads, ready, idle bool
	// relayed is how many nodes the reconciler of claims has looked at.
	relayed int
}

func (c *controller) state(ctx context.Context) (state, error) {
	ready, _, err := c.get(ctx, "/readyz")
	if err != nil {
		return state{}, err
	}
	status, body, err := c.get(ctx, "/metrics")
	if err != nil || status != http.StatusOK {
		return state{}, errors.Join(err, fmt.Errorf("read metrics of the controller: status %d", status))
	}
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		return state{}, fmt.Errorf("read metrics of the controller: %w", err)
	}
	return state{
		leads: sum(families["leader_election_master_status"]) == 1, ready: ready == http.StatusOK,
		idle:    sum(families["workqueue_depth"])+sum(families["controller_runtime_active_workers"]) == 0,
		relayed: reconciled(families["controller_runtime_reconcile_total"], "relay"),
	}, nil
}

func sum(family *dto.MetricFamily) (total float64) {
	for _, m := range family.GetMetric() {
		total += m.GetGauge().GetValue()
	}
	return total
}

// reconciled is how often a reconciler has run.
func reconciled(family *dto.MetricFamily, name string) (total int) {
	for _, m := range family.GetMetric() {
		for _, label := range m.GetLabel() {
			if label.GetName() == "controller" && label.GetValue() == name {
				total += int(m.GetCounter().GetValue())
			}
		}
	}
	return total
}

func (c *controller) get(ctx context.Context, path string) (status int, body []byte, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.address+path, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("ask controller: %w", err)
	}
	response, err := c.client.Do(request)
	if err != nil {
		return 0, nil, fmt.Errorf("ask controller: %w", err)
	}
	defer response.Body.Close()
	if body, err = io.ReadAll(response.Body); err != nil {
		return 0, nil, fmt.Errorf("ask controller: %w", err)
	}
	return response.StatusCode, body, nil
}

// awaitOf is await, and ends with the controller.
func (r *run) awaitOf(ctx context.Context, c *controller, what string, count func() (have, want int)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-c.ended:
			cancel(fmt.Errorf("controller %s has ended\n%s", c.name, c.logTail()))
		case <-done:
		}
	}()
	if err := r.await(ctx, what, count); err != nil {
		return fmt.Errorf("%w\n%s", err, c.logTail())
	}
	return nil
}

// caughtUp waits until a controller leads, has looked at every node, and has nothing to do, twice in a row.
func (r *run) caughtUp(ctx context.Context, c *controller) error {
	good := 0
	return r.awaitOf(ctx, c, "controller "+c.name+" to catch up", func() (int, int) {
		now, err := c.state(ctx)
		if err == nil && now.leads && now.ready && now.idle && now.relayed >= r.Nodes {
			good++
		} else {
			good = 0
		}
		return good, 2
	})
}

// logTail is the end of what the controller has logged.
func (c *controller) logTail() string {
	log, err := os.ReadFile(c.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-4000):])
}

// firstStart starts the controller of a new installation: it copies the claims of all nodes.
func (r *run) firstStart(ctx context.Context) (*controller, error) {
	r.say("starting the controller")
	c, err := r.startController(ctx, "controller-a", 8081)
	if err != nil {
		return nil, err
	}
	err = r.awaitOf(ctx, c, "all claims to be in GPUNodes", func() (int, int) { return r.fleet.watched.relays(), r.Nodes * occupied })
	r.add(figure.Figure{Name: "controller_first_start", Value: time.Since(c.started).Seconds(), Unit: "s", N: r.Nodes * occupied})
	if err == nil {
		err = r.caughtUp(ctx, c)
	}
	if err != nil {
		c.kill()
		return nil, err
	}
	return c, nil
}

// handOver measures how soon the work goes on when a container restarts, when a pod is stopped, and when a node is lost.
func (r *run) handOver(ctx context.Context, leader *controller) (*controller, error) {
	r.say("restarting the controller's container")
	leader.kill()
	restarted, err := r.startController(ctx, leader.name, 8081)
	if err != nil {
		return leader, err
	}
	leader = restarted
	if err := r.caughtUp(ctx, leader); err != nil {
		return leader, err
	}
	r.add(figure.Figure{Name: "controller_catch_up", Value: time.Since(leader.started).Seconds(), Unit: "s", N: 1}.Within(15))
	memory, err := leader.memory()
	if err != nil {
		return leader, err
	}
	r.add(figure.Figure{Name: "controller_rss_catch_up", Value: memory.Peak, Unit: "MiB", N: 1}.Within(300))
	for i, how := range []struct {
		name   string
		signal syscall.Signal
		bound  float64
	}{{"leader_stopped", syscall.SIGTERM, 5}, {"leader_lost", syscall.SIGKILL, 35}} {
		r.say("handing over: %s", how.name)
		standby, err := r.startController(ctx, fmt.Sprintf("controller-%c", 'b'+i), 8082+i)
		if err != nil {
			return leader, err
		}
		if err := r.awaitOf(ctx, standby, "the standby to be ready", func() (int, int) {
			if now, err := standby.state(ctx); err == nil && now.ready {
				return 1, 1
			}
			return 0, 1
		}); err != nil {
			standby.kill()
			return leader, err
		}
		began := time.Now()
		leader.signal(how.signal)
		leader = standby
		if err := r.caughtUp(ctx, leader); err != nil {
			return leader, err
		}
		r.add(figure.Figure{Name: how.name, Value: time.Since(began).Seconds(), Unit: "s", N: 1}.Within(how.bound))
	}
	return leader, nil
}
