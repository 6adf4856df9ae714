// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// controlName is the name of the machine that runs the control plane; no node may have it.
const controlName = "control-plane"

const pkiDir = "/etc/kubernetes/pki"

// Names of components, as Cluster.Component and Node.Component take them.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	Containerd        = "containerd"
	Kubelet           = "kubelet"
	KubeProxy         = "kube-proxy"
)

// controlPlane describes the components of the control plane in the order they start.
func (c *Cluster) controlPlane(programs *binaries.Set) []*Component {
	kubernetes := programs.Kubernetes(c.config.KubernetesVersion)
	component := func(name, dir, probe string, args ...string) *Component {
		return &Component{machine: c.control, name: name, argv: append([]string{filepath.Join(dir, name)}, args...),
			probe: c.control.answers(probe)}
	}
	gates := func(args, more []string) []string {
		if gates := c.config.featureGates(); gates != "" {
			args = append(args, "--feature-gates="+gates)
		}
		return append(args, more...)
	}
	components := []*Component{
		component(Etcd, programs.Etcd, "http://127.0.0.1:2379/health",
			"--name=etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
			"--initial-cluster=etcd=http://127.0.0.1:2380"),
		component(APIServer, kubernetes, "https://"+apiAddress+"/readyz", gates([]string{
			"--advertise-address=" + controlIP,
			"--allow-privileged=true",
			"--authorization-mode=Node,RBAC",
			"--client-ca-file=" + pkiDir + "/ca.crt",
			"--enable-admission-plugins=NodeRestriction",
			"--enable-aggregator-routing=true",
			"--etcd-servers=http://127.0.0.1:2379",
			"--kubelet-certificate-authority=" + pkiDir + "/ca.crt",
			"--kubelet-client-certificate=" + pkiDir + "/kubelet-client.crt",
			"--kubelet-client-key=" + pkiDir + "/kubelet-client.key",
			"--kubelet-preferred-address-types=InternalIP",
			"--proxy-client-cert-file=" + pkiDir + "/front-proxy-client.crt",
			"--proxy-client-key-file=" + pkiDir + "/front-proxy-client.key",
			"--requestheader-allowed-names=front-proxy-client",
			"--requestheader-client-ca-file=" + pkiDir + "/front-proxy-ca.crt",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-username-headers=X-Remote-User",
			"--secure-port=6443",
			"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
			"--service-account-key-file=" + pkiDir + "/service-accounts.key",
			"--service-account-signing-key-file=" + pkiDir + "/service-accounts.key",
			"--service-cluster-ip-range=" + serviceCIDR,
			"--tls-cert-file=" + pkiDir + "/apiserver.crt",
			"--tls-private-key-file=" + pkiDir + "/apiserver.key",
		}, append(c.auditArgs(), c.config.APIServerArgs...))...),
		component(ControllerManager, kubernetes, "https://127.0.0.1:10257/healthz", gates([]string{
			"--bind-address=127.0.0.1",
			"--cluster-signing-cert-file=" + pkiDir + "/ca.crt",
			"--cluster-signing-key-file=" + pkiDir + "/ca.key",
			// It makes a service account for each of its controllers before it starts the first; with its default of 20 requests
			// a second that takes five seconds.
			"--kube-api-qps=500", "--kube-api-burst=1000",
			"--kubeconfig=/etc/kubernetes/controller-manager.conf",
			// One instance: an election would only make restarts slow.
			"--leader-elect=false",
			"--root-ca-file=" + pkiDir + "/ca.crt",
			"--service-account-private-key-file=" + pkiDir + "/service-accounts.key",
			"--use-service-account-credentials=true",
		}, c.config.ControllerManagerArgs)...),
		component(Scheduler, kubernetes, "https://127.0.0.1:10259/healthz", gates([]string{
			"--bind-address=127.0.0.1",
			"--kubeconfig=/etc/kubernetes/scheduler.conf",
			"--leader-elect=false",
		}, c.config.SchedulerArgs)...),
	}
	if c.config.APIServerOnly {
		return components[:2]
	}
	return components
}

const (
	auditPolicy = "/etc/kubernetes/audit-policy.yaml"
	auditLog    = "/var/log/audit.log"
)

func (c *Cluster) auditArgs() []string {
	if c.config.AuditPolicy == "" {
		return nil
	}
	return []string{"--audit-policy-file=" + auditPolicy, "--audit-log-path=" + auditLog}
}

func (c *Cluster) writeAuditPolicy() error {
	if c.config.AuditPolicy == "" {
		return nil
	}
	if err := os.MkdirAll(c.control.path(filepath.Dir(auditPolicy)), 0o755); err != nil {
		return fmt.Errorf("make directory of the audit policy: %w", err)
	}
	if err := os.WriteFile(c.control.path(auditPolicy), []byte(c.config.AuditPolicy), 0o600); err != nil {
		return fmt.Errorf("write audit policy: %w", err)
	}
	return nil
}

// AuditLog is the path, on this machine, of what kube-apiserver writes by Config.AuditPolicy: one audit.k8s.io/v1 Event a line.
func (c *Cluster) AuditLog() string { return c.control.path(auditLog) }
