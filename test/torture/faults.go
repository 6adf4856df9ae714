// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/faults"
)

// Names of Tandem's programs as the kernel has them, and of the objects that run them.
const (
	agentProgram      = "kubelet-plugin"
	controllerProgram = "controller"
	componentLabel    = "app.kubernetes.io/component"
)

// cdiDir is where the agent keeps its specs on the node.
const cdiDir = "/var/run/cdi"

// injector carries out faults, several at once, but one at a time for each component, and a reboot alone.
type injector struct {
	cluster *cluster.Cluster
	node    *cluster.Node
	client  kubernetes.Interface
	// before is called for a process that is about to be killed and still answers.
	before func(context.Context)
	// newer is the image of the agent from the future, on the node already; empty where an upgrade brings the same again.
	newer string

	// administrator does what happens to the GPUs; nil where there is no MIG.
	administrator *administrator
	broken        *broken
	auditor       *auditor
	trace         *trace
	// pods are those of the torture that are there, and victims those of them that see GPUs, in the order of their creation.
	pods, victims func() []victim
	// used answers the places that containers see or claims have.
	used func(context.Context) ([]place, error)
	// changed is told of each workload that a fault changes as a user does.
	changed func(workload string)
	// unusable is told when no device can be given to a container any more, and when one can again.
	unusable func(bool)
	// evicting is told when a taint begins to evict the pods of a GPU, and when it has ended.
	evicting func(gpu int, evicts bool)

	whole sync.RWMutex
	mu    sync.Mutex
	busy  map[string]*sync.Mutex
}

// done is what came of a fault.
type done struct {
	// kills is how many processes were ended with SIGKILL; a reboot counts as one.
	kills int
	// skipped is the reason why nothing was done.
	skipped string
}

// nodeFaults are the faults of the node, its GPUs and its pods.
var nodeFaults = map[Kind]func(*injector, context.Context, Op) (done, error){
	HangPod: (*injector).hangPod, ListPods: (*injector).listPods, ForeignPlugin: (*injector).foreignPlugin, FillDisk: (*injector).fillDisk,
	ReadOnly: (*injector).readOnly, LoseGPU: (*injector).loseGPU, TaintGPU: (*injector).taintGPU, MaintainGPU: (*injector).maintainGPU,
	DeleteNode: (*injector).deleteNode,
}

func (s *injector) inject(ctx context.Context, op Op) (done, error) {
	if op.Kind == Reboot {
		s.whole.Lock()
		defer s.whole.Unlock()
		return s.reboot(ctx, op)
	}
	s.whole.RLock()
	defer s.whole.RUnlock()
	defer s.alone(op.Component)()
	if op.onHardware() {
		skipped, err := s.administrator.operate(ctx, op)
		return done{skipped: skipped}, err
	}
	if inject, is := nodeFaults[op.Kind]; is {
		return inject(s, ctx, op)
	}
	switch op.Kind {
	case WipeCDI:
		return done{}, s.wipeCDI(ctx)
	case Upgrade, Downgrade:
		s.before(ctx)
		return done{}, s.rollOut(ctx, op.Kind == Upgrade, strconv.Itoa(op.Index))
	}
	if component := s.component(op.Component); component != nil {
		return s.injectComponent(ctx, component, op)
	}
	return s.injectPod(ctx, op)
}

// alone waits until no other fault is at work on the component.
func (s *injector) alone(component string) (release func()) {
	s.mu.Lock()
	if s.busy == nil {
		s.busy = map[string]*sync.Mutex{}
	}
	if s.busy[component] == nil {
		s.busy[component] = &sync.Mutex{}
	}
	lock := s.busy[component]
	s.mu.Unlock()
	lock.Lock()
	return lock.Unlock
}

func (s *injector) component(name string) *cluster.Component {
	if c := s.cluster.Component(name); c != nil {
		return c
	}
	return s.node.Component(name)
}

func (s *injector) injectComponent(ctx context.Context, c *cluster.Component, op Op) (done, error) {
	switch op.Kind {
	case Kill:
		if err := c.Kill(ctx); err != nil {
			return done{}, err
		}
		broadcast.Sleep(ctx, op.Pause)
		return done{kills: 1}, restart(ctx, c.Start)
	case Away:
		// The agent starts before the API server is back.
		defer s.alone(agentName)()
		s.before(ctx)
		if err := c.Kill(ctx); err != nil {
			return done{}, err
		}
		_, err := s.catch(ctx, "KILL", agentProgram)
		broadcast.Sleep(ctx, op.Pause)
		return done{kills: 2}, errors.Join(err, restart(ctx, c.Start))
	case Restart:
		return done{}, restart(ctx, c.Restart)
	case Freeze:
		err := c.Freeze()
		if errors.Is(err, cluster.ErrNotRunning) {
			return done{skipped: "it does not run"}, nil // reviveKubelet
		}
		if err != nil {
			return done{}, err
		}
		broadcast.Sleep(ctx, op.Pause)
		return done{}, c.Thaw()
	}
	return done{}, fmt.Errorf("no way to %s %s", op.Kind, c.Name())
}

// restart does what a service manager would: a kubelet that starts before containerd serves ends, and is started again.
func restart(ctx context.Context, start func(context.Context) error) (err error) {
	for deadline := time.Now().Add(opPatience); time.Now().Before(deadline); broadcast.Sleep(ctx, retryPause) {
		if err = start(ctx); err == nil {
			return nil
		}
	}
	return err
}

// injectPod ends a container of one of Tandem's pods: kubelet restarts it.
func (s *injector) injectPod(ctx context.Context, op Op) (done, error) {
	program := map[string]string{agentName: agentProgram, controllerName: controllerProgram}[op.Component]
	switch op.Kind {
	case Kill:
		s.before(ctx)
		struck, err := s.catch(ctx, "KILL", program)
		if err != nil || !struck {
			return done{skipped: "it does not run"}, err
		}
		return done{kills: 1}, nil
	case Freeze:
		thaw, err := s.stop(ctx, program)
		if errors.Is(err, errAway) {
			return done{skipped: "it does not run"}, nil
		}
		if err != nil {
			return done{}, err
		}
		broadcast.Sleep(ctx, op.Pause)
		return done{}, thaw()
	}
	return done{}, fmt.Errorf("no way to %s the %s", op.Kind, op.Component)
}

// errAway means that a program does not run.
var errAway = errors.New("it does not run")

// stop freezes a program until thaw.
func (s *injector) stop(ctx context.Context, program string) (thaw func() error, err error) {
	struck, err := s.catch(ctx, "STOP", program)
	if err == nil && !struck {
		err = fmt.Errorf("freeze %s: %w", program, errAway)
	}
	return func() error {
		_, err := s.signal(context.WithoutCancel(ctx), "CONT", program)
		return err
	}, err
}

// returnPatience is how long a program that is being started again is waited for.
const returnPatience = 10 * time.Second

// catch is signal for a program that may be starting again.
func (s *injector) catch(ctx context.Context, signal, program string) (struck bool, err error) {
	for deadline := time.Now().Add(returnPatience); time.Now().Before(deadline); broadcast.Sleep(ctx, retryPause) {
		if struck, err = s.signal(ctx, signal, program); struck || err != nil {
			return struck, err
		}
	}
	return false, nil
}

// signal reports whether there was such a program on the node.
func (s *injector) signal(ctx context.Context, signal, program string) (struck bool, err error) {
	err = s.onNode(ctx, "pkill", "-"+signal, "-x", program)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 1 {
		return false, nil
	}
	return err == nil, err
}

func (s *injector) onNode(ctx context.Context, name string, args ...string) error {
	cmd, err := s.node.Command(ctx, name, args...)
	if err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s on %s: %w: %s", name, s.node.Name(), err, out)
	}
	return nil
}

func (s *injector) reboot(ctx context.Context, op Op) (done, error) {
	s.before(ctx)
	if err := s.node.Halt(ctx); err != nil {
		return done{}, err
	}
	broadcast.Sleep(ctx, op.Pause)
	if err := s.node.Boot(ctx); err != nil {
		// What did not come up is started again.
		return done{kills: 1}, restart(ctx, s.cluster.Start)
	}
	return done{kills: 1}, nil
}

// rollOut replaces the agent's pod by one of today's agent or of the newer one, as another version of the chart would. The mark
// makes it another pod even where the agent is the same.
func (s *injector) rollOut(ctx context.Context, newer bool, mark string) error {
	wanted := image.DefaultRef
	if newer && s.newer != "" {
		wanted = s.newer
	}
	patch := fmt.Appendf(nil, `{"spec": {"template": {
		"metadata": {"annotations": {"torture/operation": %q}},
		"spec": {"containers": [{"name": %q, "image": %q}]}
	}}}`, mark, agentProgram, wanted)
	return persist(ctx, "roll out the agent", func(ctx context.Context) error {
		agents := s.client.AppsV1().DaemonSets(install.Namespace)
		sets, err := agents.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, set := range sets.Items {
			if _, err := agents.Patch(ctx, set.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
				return err
			}
		}
		return nil
	})
}

// provide returns when the agent that a round begins with is there.
func (s *injector) provide(ctx context.Context, newer bool, mark string) error {
	if s.newer == "" {
		return nil
	}
	if err := s.rollOut(ctx, newer, mark); err != nil {
		return err
	}
	return install.Ready(ctx, s.cluster)
}

// mend makes everything run again that a fault may have left down or frozen, for a run that was cut short. Idempotent.
func (s *injector) mend(ctx context.Context) error {
	if err := thaw(s.cluster); err != nil {
		return err
	}
	if err := s.cluster.Start(ctx); err != nil {
		return err
	}
	for _, program := range []string{agentProgram, controllerProgram} {
		if _, err := s.signal(ctx, "CONT", program); err != nil {
			return err
		}
	}
	if err := faults.EndHung(ctx, s.node); err != nil {
		return err
	}
	if err := faults.Empty(ctx, s.node, runDir); err != nil {
		return err
	}
	if err := (&broken{root: s.node.Root}).find(0); err != nil {
		return err
	}
	return s.writable(ctx, cdiDir, recordsOfAgent)
}

// hasController reports whether Tandem's controller is part of the installation.
func hasController(ctx context.Context, client kubernetes.Interface) (bool, error) {
	selector := metav1.ListOptions{LabelSelector: componentLabel + "=" + controllerName}
	list, err := client.AppsV1().Deployments(install.Namespace).List(ctx, selector)
	if err != nil && !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("look for the controller: %w", err)
	}
	return len(list.Items) > 0, nil
}
