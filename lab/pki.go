// SPDX-License-Identifier: Apache-2.0

package lab

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
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// authority signs the certificates of one lab.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := template("kilolab-ca", "")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &authority{cert, key, pemBlock("CERTIFICATE", der)}, nil
}

// issue makes a certificate for a user in a group, or for a server at addresses.
func (a *authority) issue(user, group string, servers []netip.Addr) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	t := template(user, group)
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	for _, ip := range servers {
		t.IPAddresses = append(t.IPAddresses, net.IP(ip.AsSlice()))
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, private.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("create certificate of %s: %w", user, err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	return pemBlock("CERTIFICATE", der), pemBlock("EC PRIVATE KEY", keyDER), nil
}

func template(name, group string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // the system has no random numbers
	}
	subject := pkix.Name{CommonName: name}
	if group != "" {
		subject.Organization = []string{group}
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial, Subject: subject,
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(0, 0, 30),
	}
}

func pemBlock(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// writeKubeconfig writes the file with which user reaches server.
func (a *authority) writeKubeconfig(path, server, user, group string) error {
	cert, key, err := a.issue(user, group, nil)
	if err != nil {
		return err
	}
	c := api.NewConfig()
	c.Clusters["lab"] = &api.Cluster{Server: server, CertificateAuthorityData: a.pem}
	c.AuthInfos[user] = &api.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	c.Contexts["lab"] = &api.Context{Cluster: "lab", AuthInfo: user}
	c.CurrentContext = "lab"
	return clientcmd.WriteToFile(*c, path)
}

// writeServer writes what kube-apiserver needs into dir.
func (a *authority) writeServer(dir string, servers []netip.Addr) error {
	cert, key, err := a.issue("kube-apiserver", "", servers)
	if err != nil {
		return err
	}
	serviceAccount, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(serviceAccount)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"ca.crt": a.pem, "apiserver.crt": cert, "apiserver.key": key, "sa.key": pemBlock("EC PRIVATE KEY", der),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}
