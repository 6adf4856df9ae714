// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// lifetime of certificates: a cluster is for tests and does not live that long.
const lifetime = 10 * 365 * 24 * time.Hour

// authority issues certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// pair is a certificate with its key, both PEM.
type pair struct{ cert, key []byte }

func newAuthority(name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key of %s: %w", name, err)
	}
	template := certificate(name)
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = nil
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make certificate of %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read back certificate of %s: %w", name, err)
	}
	return &authority{cert: cert, key: key, pem: encode("CERTIFICATE", der)}, nil
}

// issue makes a certificate for a user (name, groups), who is also a server where it has addresses or DNS names.
func (a *authority) issue(name string, groups []string, hosts ...string) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, fmt.Errorf("make key of %s: %w", name, err)
	}
	template := certificate(name)
	template.Subject.Organization = groups
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return pair{}, fmt.Errorf("make certificate of %s: %w", name, err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return pair{}, fmt.Errorf("encode key of %s: %w", name, err)
	}
	return pair{cert: encode("CERTIFICATE", der), key: keyPEM}, nil
}

func certificate(name string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(lifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return encode("EC PRIVATE KEY", der), nil
}

// kubeconfig makes a client's configuration with everything in it.
func (a *authority) kubeconfig(user pair) ([]byte, error) {
	config := api.NewConfig()
	config.Clusters["tandem"] = &api.Cluster{Server: "https://" + apiAddress, CertificateAuthorityData: a.pem}
	config.AuthInfos["user"] = &api.AuthInfo{ClientCertificateData: user.cert, ClientKeyData: user.key}
	config.Contexts["tandem"] = &api.Context{Cluster: "tandem", AuthInfo: "user"}
	config.CurrentContext = "tandem"
	data, err := clientcmd.Write(*config)
	if err != nil {
		return nil, fmt.Errorf("encode kubeconfig: %w", err)
	}
	return data, nil
}

// writeIdentities makes all keys, certificates and kubeconfigs of the cluster and puts each on the machine that uses it.
func (c *Cluster) writeIdentities() error {
	ca, err := newAuthority("tandem")
	if err != nil {
		return err
	}
	frontProxy, err := newAuthority("front-proxy")
	if err != nil {
		return err
	}
	files := identities{content: map[string][]byte{}}
	caKey, err := encodeKey(ca.key)
	if err != nil {
		return fmt.Errorf("encode key of the authority: %w", err)
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make key of service accounts: %w", err)
	}
	accountsKey, err := encodeKey(accounts)
	if err != nil {
		return fmt.Errorf("encode key of service accounts: %w", err)
	}
	control := func(name string) string { return c.control.path(filepath.Join(pkiDir, name)) }
	files.content[control("ca.crt")], files.content[control("ca.key")] = ca.pem, caKey
	files.content[control("front-proxy-ca.crt")], files.content[control("service-accounts.key")] = frontProxy.pem, accountsKey

	masters := []string{"system:masters"}
	files.issue(ca, control("apiserver"), "kube-apiserver", nil, controlIP, serviceIP, "127.0.0.1", "localhost", "kubernetes",
		"kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
	files.issue(ca, control("kubelet-client"), "kube-apiserver-kubelet-client", masters)
	files.issue(frontProxy, control("front-proxy-client"), "front-proxy-client", nil)
	files.kubeconfig(ca, c.Kubeconfig(), "admin", masters)
	files.kubeconfig(ca, c.control.path("/etc/kubernetes/controller-manager.conf"), "system:kube-controller-manager", nil)
	files.kubeconfig(ca, c.control.path("/etc/kubernetes/scheduler.conf"), "system:kube-scheduler", nil)
	for i, node := range c.nodes {
		files.content[node.machine.path(pkiDir+"/ca.crt")] = ca.pem
		files.issue(ca, node.machine.path(pkiDir+"/kubelet"), "system:node:"+node.name, []string{"system:nodes"}, nodeIP(i), node.name)
		files.kubeconfig(ca, node.machine.path("/etc/kubernetes/kubelet.conf"), "system:node:"+node.name, []string{"system:nodes"})
		files.kubeconfig(ca, node.machine.path("/etc/kubernetes/kube-proxy.conf"), "system:kube-proxy", nil)
	}
	return files.write()
}

// identities collects files by their path; the first error while making one is kept.
type identities struct {
	content map[string][]byte
	err     error
}

func (f *identities) add(path string, content []byte, err error) {
	if err != nil && f.err == nil {
		f.err = fmt.Errorf("make %s: %w", path, err)
	}
	f.content[path] = content
}

func (f *identities) issue(by *authority, path, name string, groups []string, hosts ...string) {
	made, err := by.issue(name, groups, hosts...)
	f.add(path+".crt", made.cert, err)
	f.add(path+".key", made.key, err)
}

func (f *identities) kubeconfig(by *authority, path, name string, groups []string) {
	made, err := by.issue(name, groups)
	f.add(path, nil, err)
	data, err := by.kubeconfig(made)
	f.add(path, data, err)
}

func (f *identities) write() error {
	if f.err != nil {
		return f.err
	}
	for path, content := range f.content {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make directory of certificates: %w", err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	return nil
}
