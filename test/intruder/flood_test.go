// SPDX-License-Identifier: Apache-2.0

package intruder

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/webhook"
	"github.com/tandem-gpu/tandem/test/figure"
)

// controller is a running process of the real program, with the chart's arguments and environment and the controller's own token.
type controller struct {
	cmd *exec.Cmd
	log *bytes.Buffer
	// limit of its memory in bytes, as the chart sets it.
	limit int64
}

const controllerPod = "controller-1"

// program compiles the controller; $CONTROLLER names another one.
func program(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("CONTROLLER"); path != "" {
		return path
	}
	root, err := gotool.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "controller")
	cmd := gotool.Command(t.Context(), t.TempDir(), nil, "build", "-o", path, "./cmd/controller")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

func startController(t *testing.T) *controller {
	t.Helper()
	deployment, err := theClient.AppsV1().Deployments(install.Namespace).Get(t.Context(), controllerAccount, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	container := deployment.Spec.Template.Spec.Containers[0]
	args := append([]string{program(t)}, container.Args...)
	args = append(args, "--kubeconfig="+kubeconfigOf(t, controllerAccount), "--namespace="+install.Namespace, "--pod-name="+controllerPod)
	variables := []string{"env"}
	for _, e := range container.Env {
		if e.Value != "" {
			variables = append(variables, e.Name+"="+e.Value)
		}
	}
	cmd, err := theCluster.Command(context.WithoutCancel(t.Context()), variables[0], append(variables[1:], args...)...)
	if err != nil {
		t.Fatal(err)
	}
	c := &controller{cmd: cmd, log: &bytes.Buffer{}, limit: container.Resources.Limits.Memory().Value()}
	cmd.Stdout, cmd.Stderr = c.log, c.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Errorf("controller: %v\n%s", err, c.log)
		}
	})
	return c
}

// kubeconfigOf writes a kubeconfig with a token of an account.
func kubeconfigOf(t *testing.T, account string) string {
	t.Helper()
	config := as(t, account, nil)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthority: config.CAFile, CertificateAuthorityData: config.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": {Token: config.BearerToken}},
		Contexts:  map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}}, CurrentContext: "x",
	}, path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// peak returns the most memory that the process had resident, in bytes.
func (c *controller) peak(t *testing.T) int64 {
	t.Helper()
	m, err := figure.ReadMemory(c.cmd.Process.Pid)
	if err != nil {
		t.Fatalf("the controller has ended: %v\n%s", err, c.log)
	}
	return int64(m.Peak * (1 << 20))
}

// renewed returns when the controller last renewed its Lease, if it leads.
func renewed(t *testing.T) time.Time {
	t.Helper()
	lease, err := theClient.CoordinationV1().Leases(install.Namespace).Get(t.Context(), controllerAccount, metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil || lease.Spec.RenewTime == nil || *lease.Spec.HolderIdentity != controllerPod {
		return time.Time{}
	}
	return lease.Spec.RenewTime.Time
}

const webhookAddress = "127.0.0.1:9443"

// flooder is a client of a pod that trusts anyone, over connections of its own.
func flooder() *http.Client {
	return &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return theCluster.DialContext(ctx, network, webhookAddress)
		},
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true,
	}}
}

// reviewOf returns a review of about so many bytes. Many small values make the most memory of a body.
func reviewOf(size int) []byte {
	return []byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","kind":{"group":"resource.k8s.io","version":"v1","kind":"ResourceClaim"},"operation":"CREATE","object":{"spec":{"devices":{"config":[` +
		strings.Repeat(`{},`, size/3) + `{}]}}}}}`)
}

// statusAddress is what kubelet's probes and every pod may connect to.
const statusAddress = "127.0.0.1:8080"

// TestStatusFlood: pods that open connections to the port of /healthz and /metrics make the process keep few of them, and keep kubelet's
// probes from no answer. The agent serves the port with the same code (internal/status).
func TestStatusFlood(t *testing.T) {
	c := startController(t)
	get := func(path string) error {
		client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: theCluster.DialContext}}
		answer, err := client.Get("http://" + statusAddress + path) //nolint:noctx // it has a timeout
		if err != nil {
			return err
		}
		if err := answer.Body.Close(); err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", path, answer.Status)
		}
		return nil
	}
	probe := func() error { return get("/healthz") }
	// The memory of the start is not the flood's.
	until(t, "controller to be ready", "", func() error { return get("/readyz") })
	before := c.peak(t)
	const flood = 1500
	for at := range flood {
		conn, err := theCluster.DialContext(t.Context(), "tcp", statusAddress)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		// The process may have closed it.
		_, _ = fmt.Fprint(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		if at%300 == 0 {
			if err := probe(); err != nil {
				t.Errorf("kubelet's probe beside %d connections: %v", at, err)
			}
		}
	}
	sockets, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	kept, after := len(sockets), c.peak(t)
	t.Logf("%d connections: %d files are open; memory: %d MiB before, %d MiB at most during the flood, limit %d MiB", flood, kept, before>>20, after>>20, c.limit>>20)
	if kept > 512 {
		t.Errorf("the flood makes the controller keep %d files open", kept)
	}
	if more := after - before; more > 24<<20 {
		t.Errorf("the flood makes the controller use %d MiB more", more>>20)
	}
	if err := probe(); err != nil {
		t.Errorf("kubelet's probe after the flood: %v", err)
	}
}

// TestWebhookFlood: pods that send large bodies cannot end the process that leads, and cannot keep it from leading.
func TestWebhookFlood(t *testing.T) {
	c := startController(t)
	until(t, "webhook", "", func() error {
		conn, err := theCluster.DialContext(t.Context(), "tcp", webhookAddress)
		if err != nil {
			return err
		}
		defer conn.Close()
		return tls.Client(conn, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(t.Context())
	})
	until(t, "lease", "", func() error {
		if renewed(t).IsZero() {
			return fmt.Errorf("does not lead")
		}
		return nil
	})
	before := c.peak(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var group sync.WaitGroup
	for at := range 24 {
		// Half of them stay below the largest body that is read.
		sent := reviewOf(7 << 20)
		if at%2 == 0 {
			sent = reviewOf(1<<20 - 1024)
		}
		group.Go(func() {
			client := flooder()
			defer client.CloseIdleConnections()
			for ctx.Err() == nil {
				// Without a length, so that only reading shows it.
				request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+webhookAddress+webhook.Path, io.MultiReader(bytes.NewReader(sent)))
				if err != nil {
					t.Error(err)
					return
				}
				request.Header.Set("Content-Type", "application/json")
				if answer, err := client.Do(request); err == nil {
					_, _ = io.Copy(io.Discard, answer.Body)
					answer.Body.Close()
				}
			}
		})
	}
	group.Wait()
	after := c.peak(t)
	t.Logf("memory: %d MiB before, %d MiB at most during the flood, limit %d MiB", before>>20, after>>20, c.limit>>20)
	if after >= c.limit {
		t.Errorf("the flood made the controller use %d MiB; its limit is %d MiB", after>>20, c.limit>>20)
	}
	during := renewed(t)
	until(t, "lease after the flood", "", func() error {
		if !renewed(t).After(during) {
			return fmt.Errorf("not renewed since %s", during)
		}
		return nil
	})
	if since := time.Since(during); since > 30*time.Second {
		t.Errorf("last renewed %s before the end of the flood", since)
	}
}
