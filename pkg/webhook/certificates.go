// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/cert"
)

const (
	// lifetime of a certificate, and of the authority that has signed it and nothing else: its key is never stored.
	lifetime = 365 * 24 * time.Hour
	// backdate is for clocks that are behind.
	backdate = time.Hour
	// settle is how long every API server may take to trust a new authority, and keep what it has of the old one, before a
	// certificate of it is served.
	settle = 10 * time.Minute
)

// What the Secret has besides the usual keys: the certificate that is served once its authority is trusted.
const (
	nextCert = "next.crt"
	nextKey  = "next.key"
)

// pair is a certificate and its key, in PEM.
type pair struct {
	cert, key []byte
	tls       tls.Certificate
}

func (p *pair) leaf() *x509.Certificate { return p.tls.Leaf }

// aged reports whether two thirds of its life are over.
func (p *pair) aged(now time.Time) bool {
	life := p.leaf().NotAfter.Sub(p.leaf().NotBefore)
	return now.After(p.leaf().NotBefore.Add(life / 3 * 2))
}

// store is what the Secret holds.
type store struct {
	// authorities are those to be trusted: of the certificate that is served, of the next, and of those served before that have
	// not expired, since a replica that lags may still serve one.
	authorities []*x509.Certificate
	// serving is nil where nothing usable is there, next most of the time.
	serving, next *pair
}

// open reads the contents of a Secret. With the error comes what of it can be used all the same.
func open(data map[string][]byte, names []string, now time.Time) (store, error) {
	var s store
	var err error
	if s.authorities, err = cert.ParseCertsPEM(data[corev1.ServiceAccountRootCAKey]); err != nil {
		return store{}, fmt.Errorf("%s: %w", corev1.ServiceAccountRootCAKey, err)
	}
	if i := slices.IndexFunc(s.authorities, func(c *x509.Certificate) bool { return !c.IsCA }); i >= 0 {
		return store{}, fmt.Errorf("%s: certificate %d is no authority's", corev1.ServiceAccountRootCAKey, i)
	}
	if s.serving, err = s.pair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], names, now); err != nil {
		err = fmt.Errorf("%s: %w", corev1.TLSCertKey, err)
	}
	if len(data[nextCert])+len(data[nextKey]) > 0 {
		var wrong error
		if s.next, wrong = s.pair(data[nextCert], data[nextKey], names, now); wrong != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", nextCert, wrong))
		}
	}
	return s, err
}

// pair is nil unless it can be served under all the names to those who trust the authorities.
func (s store) pair(certificate, key []byte, names []string, now time.Time) (*pair, error) {
	parsed, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	for _, authority := range s.authorities {
		roots.AddCert(authority)
	}
	for _, name := range names {
		if _, err := parsed.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now}); err != nil {
			return nil, err
		}
	}
	return &pair{certificate, key, parsed}, nil
}

// bundle of the authorities, as the API server wants it.
func (s store) bundle() ([]byte, error) { return cert.EncodeCertificates(s.authorities...) }

// data are the contents of a Secret that open reads.
func (s store) data() (map[string][]byte, error) {
	bundle, err := s.bundle()
	if err != nil {
		return nil, fmt.Errorf("encode authorities: %w", err)
	}
	data := map[string][]byte{
		corev1.ServiceAccountRootCAKey: bundle, corev1.TLSCertKey: s.serving.cert, corev1.TLSPrivateKeyKey: s.serving.key,
	}
	if s.next != nil {
		data[nextCert], data[nextKey] = s.next.cert, s.next.key
	}
	return data, nil
}

// advance is the next step of the rotation, with its story, or the same store and none. A certificate is followed by another of
// another authority: first everybody is told to trust that, and when they do, the certificate is served. Trusted says that they
// have trusted all authorities of the store for a while. Where nothing usable is served there is nothing to wait for.
func (s store) advance(names []string, trusted bool, now time.Time) (then store, story string, err error) {
	then = store{serving: s.serving, next: s.next}
	for _, authority := range s.authorities {
		if !now.After(authority.NotAfter) {
			then.authorities = append(then.authorities, authority)
		}
	}
	switch {
	case then.next != nil && (trusted || then.serving == nil):
		then.serving, then.next = then.next, nil
		story = "the next certificate is served"
	case then.serving == nil:
		story = "a certificate was made"
		then.serving, err = then.issue(names, now)
	case then.next == nil && then.serving.aged(now):
		story = "the next certificate was made, and is served once its authority is trusted"
		then.next, err = then.issue(names, now)
	case len(then.authorities) < len(s.authorities):
		story = "an authority has expired"
	}
	return then, story, err
}

// issue makes a pair and adds its authority.
func (s *store) issue(names []string, now time.Time) (*pair, error) {
	authority := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "tandem-webhook-ca@" + now.UTC().Format(time.RFC3339)},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(lifetime),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	signed, err := x509.CreateCertificate(rand.Reader, authority, authority, authorityKey.Public(), authorityKey)
	if err != nil {
		return nil, fmt.Errorf("make authority: %w", err)
	}
	if authority, err = x509.ParseCertificate(signed); err != nil {
		return nil, fmt.Errorf("read authority: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	signed, err = x509.CreateCertificate(rand.Reader, &x509.Certificate{
		DNSNames: names, NotBefore: authority.NotBefore, NotAfter: authority.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}, authority, key.Public(), authorityKey)
	if err != nil {
		return nil, fmt.Errorf("make certificate: %w", err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	s.authorities = append(s.authorities, authority)
	return s.pair(pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: signed}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), names, now)
}
