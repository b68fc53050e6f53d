package tlsconf

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/tandem-serving/tandem/internal/regular"
)

// Lifetimes of certificates. IssueNode renews a node's, which running nodes load. A new
// authority needs a new cluster.
const (
	CALifetime   = 10 * 365 * 24 * time.Hour
	NodeLifetime = 365 * 24 * time.Hour
	// clockSkew is how long before their creation certificates are valid, for nodes whose
	// clocks are behind.
	clockSkew = 5 * time.Minute
)

const secretBytes = 32

// ErrExists reports that the folder already has an authority.
var ErrExists = errors.New("tlsconf: there is a certificate authority already")

// ErrName reports an invalid name of a node.
var ErrName = errors.New("tlsconf: a node's name has 1 to 63 letters, digits, '-', '_' or '.', and begins with a letter or digit")

var nodeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// CreateCA creates a cluster's certificate authority and gossip secret in dir. It does not
// replace an authority (ErrExists), because no node could connect then.
func CreateCA(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("tlsconf: making an authority: %w", err)
	}
	for _, f := range []string{CACertFile, CAKeyFile, SecretFile} {
		if _, err := os.Stat(filepath.Join(dir, f)); err == nil {
			return fmt.Errorf("%w: %s", ErrExists, filepath.Join(dir, f))
		} else if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("tlsconf: making an authority: %w", err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("tlsconf: making an authority: %w", err)
	}
	t := certificate("tandem cluster", CALifetime)
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return fmt.Errorf("tlsconf: making an authority: %w", err)
	}
	secret := make([]byte, secretBytes)
	_, _ = rand.Read(secret) // it never fails
	if err = writeKey(filepath.Join(dir, CAKeyFile), key); err == nil {
		if err = writeFile(filepath.Join(dir, SecretFile), []byte(hex.EncodeToString(secret)+"\n"), 0o600); err == nil {
			err = writeCert(filepath.Join(dir, CACertFile), der)
		}
	}
	if err != nil { // a part of an authority would be taken for one
		_, _ = os.Remove(filepath.Join(dir, CAKeyFile)), os.Remove(filepath.Join(dir, SecretFile)) // they may not be there
	}
	return err
}

// IssueNode creates or renews the files of one node under the authority in
// dir: the folder dir/NAME, which is copied to the node's machine for Load.
// The name is gateway/NAME, node/NAME or NAME. NAME alone keeps the role of the
// certificate in dir/NAME; without one the certificate has no role (see Role).
// Hosts are names and IP addresses for clients other than Tandem's nodes; nodes check
// NodeDNSName.
func IssueNode(dir, name string, hosts []string) (nodeDir string, err error) {
	id, err := parseIdentity(dir, name)
	if err != nil {
		return "", err
	}
	name = id.Name
	ca, caKey, err := loadCA(dir)
	if err != nil {
		return "", err
	}
	secret, err := regular.ReadFile(filepath.Join(dir, SecretFile), MaxFile)
	if err != nil {
		return "", fmt.Errorf("tlsconf: issuing for %s: %w", name, err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", fmt.Errorf("tlsconf: issuing for %s: %w", name, err)
	}
	t := certificate(name, NodeLifetime)
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	t.DNSNames = []string{NodeDNSName}
	if id.Role != NoRole {
		t.URIs = []*url.URL{id.uri()}
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, t, ca, key.Public(), caKey)
	if err != nil {
		return "", fmt.Errorf("tlsconf: issuing for %s: %w", name, err)
	}
	nodeDir = filepath.Join(dir, name)
	if err := os.MkdirAll(nodeDir, 0o700); err != nil {
		return "", fmt.Errorf("tlsconf: issuing for %s: %w", name, err)
	}
	return nodeDir, errors.Join(
		writeCert(filepath.Join(nodeDir, CACertFile), ca.Raw),
		writeFile(filepath.Join(nodeDir, SecretFile), secret, 0o600),
		writeKey(filepath.Join(nodeDir, NodeKeyFile), key),
		writeCert(filepath.Join(nodeDir, NodeCertFile), der),
	)
}

func certificate(name string, lifetime time.Duration) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{ // CreateCertificate draws the serial number
		Subject:   pkix.Name{CommonName: name, Organization: []string{"tandem"}},
		NotBefore: now.Add(-clockSkew),
		NotAfter:  now.Add(lifetime),
	}
}

func loadCA(dir string) (*x509.Certificate, crypto.Signer, error) {
	pair, err := KeyPair(filepath.Join(dir, CACertFile), filepath.Join(dir, CAKeyFile))
	if err != nil {
		return nil, nil, fmt.Errorf("tlsconf: reading the authority in %s: %w", dir, err)
	}
	return pair.Leaf, pair.PrivateKey.(crypto.Signer), nil // keys of all kinds that a pair may have sign
}

func writeCert(path string, der []byte) error {
	return writeFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("tlsconf: encoding %s: %w", path, err)
	}
	return writeFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}

// writeFile replaces a file atomically: a reader sees the old content or the new.
func writeFile(path string, b []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // created with 0600
	if err != nil {
		return fmt.Errorf("tlsconf: writing %s: %w", path, err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("tlsconf: writing %s: %w", path, err), os.Remove(f.Name()))
	}
	return nil
}
