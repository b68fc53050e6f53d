// Package tlsconf creates and loads the identities of a cluster's nodes: a certificate
// authority, a certificate for each node, and a secret for gossip. It also loads the
// certificates of a gateway's listener for clients.
//
// Algorithm: a node's folder has the authority's certificate, the node's certificate and key,
// and the secret. Load reads them and watches the folder. When files change, it reads all
// again and uses them only if they match each other, so that an incomplete renewal changes
// nothing. Each TLS handshake uses the current files; open connections do not change.
//
// Invariant: both sides of a connection made with Server and Client have a certificate that
// chains to the authority and names NodeDNSName, in TLS 1.3. Other peers are refused,
// whatever their address. A certificate's role (Role) is well-formed, or absent.
//
// The package does not revoke certificates (create a new authority), and does not change the
// gossip key of a running cluster.
package tlsconf

import (
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-serving/tandem/internal/regular"
)

// The files of a node's folder; the authority's folder also has its key.
const (
	CACertFile   = "ca.crt"
	NodeCertFile = "node.crt"
	NodeKeyFile  = "node.key"
	SecretFile   = "gossip.secret"
	CAKeyFile    = "ca.key"
)

// NodeDNSName is in every node's certificate. Peers check it instead of addresses, because
// nodes may have any address.
const NodeDNSName = "tandem-node"

// GossipKeyBytes is the length of an AES-256 key.
const GossipKeyBytes = 32

// reloadDelay is the time for a renewal to write all files.
const reloadDelay = 100 * time.Millisecond

// Errors of a node's folder and of a peer.
var (
	ErrMaterial = errors.New("tlsconf: unusable certificates")
	ErrStranger = errors.New("tlsconf: peer is not a node of this cluster")
)

// Material is a node's identity, which follows its folder.
type Material struct {
	dir     string
	log     *slog.Logger
	now     atomic.Pointer[material]
	reloads atomic.Uint64
	watcher *fsnotify.Watcher
	ended   sync.WaitGroup
}

// material is one consistent reading of a folder; it is never changed.
type material struct {
	cert   tls.Certificate
	roots  *x509.CertPool
	gossip []byte // [GossipKeyBytes]
	id     Identity
	until  time.Time // when the first certificate of the chain expires
}

// Load reads a node's folder and follows its changes until Close.
func Load(dir string, log *slog.Logger) (*Material, error) {
	m := &Material{dir: dir, log: log}
	cur, err := read(dir)
	if err != nil {
		return nil, err
	}
	m.now.Store(cur)
	m.warnNoRole(cur)
	regular.WarnExposed(log, filepath.Join(dir, NodeKeyFile), filepath.Join(dir, SecretFile))
	if m.watcher, err = fsnotify.NewWatcher(); err != nil {
		return nil, fmt.Errorf("tlsconf: watching %s: %w", dir, err)
	}
	// The folder, not the files: renewals replace them.
	if err := m.watcher.Add(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("tlsconf: watching %s: %w", dir, err), m.watcher.Close())
	}
	m.ended.Go(m.watch)
	return m, nil
}

// Close stops following the folder. Configurations keep working with the files that were
// read last.
func (m *Material) Close() error {
	err := m.watcher.Close()
	m.ended.Wait()
	return err
}

// Identity returns the role and name in the node's own certificate, as it was read last.
func (m *Material) Identity() Identity { return m.now.Load().id }

// Expiry returns when this node's certificate or its authority's expires, whichever is first, as
// they were read last.
func (m *Material) Expiry() time.Time { return m.now.Load().until }

// warnNoRole logs that this node's certificate has no role, because no peer logs it for a node
// that only accepts connections.
func (m *Material) warnNoRole(cur *material) {
	if cur.id.Role == NoRole {
		m.log.Warn("this certificate has no role", "folder", m.dir, "name", cur.id.Name, "advice", Reissue)
	}
}

// Reloads returns how often changed files were loaded.
func (m *Material) Reloads() uint64 { return m.reloads.Load() }

// GossipKey returns the key derived from the folder's secret, as it was read last.
func (m *Material) GossipKey() []byte {
	return append([]byte(nil), m.now.Load().gossip...)
}

// Client returns the configuration for dialling nodes.
func (m *Material) Client() *tls.Config { return m.Server() }

// Server returns the configuration of a listener for nodes. Each side requests the other's
// certificate. VerifyConnection, which TLS calls in every handshake, replaces the standard
// verification, which would keep using the first authority.
func (m *Material) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: NodeDNSName,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return &m.now.Load().cert, nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &m.now.Load().cert, nil
		},
		ClientAuth:         tls.RequireAnyClientCert,
		InsecureSkipVerify: true, // VerifyConnection verifies
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := m.now.Load().verify(s)
			return err
		},
		SessionTicketsDisabled: true, // so that a renewed authority applies at once
	}
}

// verify checks the peer's certificate and returns its chain up to the authority.
func (m *material) verify(s tls.ConnectionState) ([]*x509.Certificate, error) {
	if s.Version < tls.VersionTLS13 || len(s.PeerCertificates) == 0 {
		return nil, fmt.Errorf("%w: it showed no certificate", ErrStranger)
	}
	o := x509.VerifyOptions{
		Roots:         m.roots,
		Intermediates: x509.NewCertPool(),
		DNSName:       NodeDNSName,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, c := range s.PeerCertificates[1:] {
		o.Intermediates.AddCert(c)
	}
	leaf := s.PeerCertificates[0]
	chains, err := leaf.Verify(o)
	if err == nil {
		_, err = IdentityOf(leaf)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: certificate of %q: %w", ErrStranger, leaf.Subject.CommonName, err)
	}
	return chains[0], nil
}

// MaxFile bounds a file of certificates or keys, in bytes.
const MaxFile = 4 << 20

// read reads a folder's files and returns an error if they do not match each other.
func read(dir string) (*material, error) {
	var files [4][]byte
	for i, f := range []string{CACertFile, NodeCertFile, NodeKeyFile, SecretFile} {
		b, err := regular.ReadFile(filepath.Join(dir, f), MaxFile)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrMaterial, err)
		}
		files[i] = b
	}
	return parse(dir, files)
}

// parse parses the contents of a folder's four files; dir is for errors.
func parse(dir string, files [4][]byte) (*material, error) {
	m := &material{roots: x509.NewCertPool()}
	if !m.roots.AppendCertsFromPEM(files[0]) {
		return nil, fmt.Errorf("%w: no certificate in %s", ErrMaterial, filepath.Join(dir, CACertFile))
	}
	var err error
	if m.cert, err = tls.X509KeyPair(files[1], files[2]); err != nil {
		return nil, fmt.Errorf("%w: %s and %s in %s: %w", ErrMaterial, NodeCertFile, NodeKeyFile, dir, err)
	}
	self := tls.ConnectionState{Version: tls.VersionTLS13}
	for _, der := range m.cert.Certificate {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrMaterial, filepath.Join(dir, NodeCertFile), err)
		}
		self.PeerCertificates = append(self.PeerCertificates, c)
	}
	chain, err := m.verify(self)
	if err != nil {
		return nil, fmt.Errorf("%w: %s would be refused by its peers: %w", ErrMaterial, filepath.Join(dir, NodeCertFile), err)
	}
	m.until = expiry(chain)
	if m.id, err = IdentityOf(self.PeerCertificates[0]); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrMaterial, filepath.Join(dir, NodeCertFile), err)
	}
	secret, err := hex.DecodeString(strings.TrimSpace(string(files[3])))
	if err != nil || len(secret) < secretBytes {
		return nil, fmt.Errorf("%w: %s is not %d bytes in hexadecimal", ErrMaterial, filepath.Join(dir, SecretFile), secretBytes)
	}
	if m.gossip, err = hkdf.Key(sha256.New, secret, nil, "tandem gossip 1", GossipKeyBytes); err != nil {
		return nil, fmt.Errorf("%w: deriving the gossip key: %w", ErrMaterial, err)
	}
	return m, nil
}

// watch reads the folder again when it has changed and then been unchanged for reloadDelay.
func (m *Material) watch() {
	still := time.NewTimer(reloadDelay)
	still.Stop()
	defer still.Stop()
	for {
		select {
		case _, ok := <-m.watcher.Events:
			if !ok {
				return
			}
			still.Reset(reloadDelay)
		case err, ok := <-m.watcher.Errors:
			if !ok {
				return
			}
			// Events may have been lost: read the folder.
			m.log.Warn("watching certificates failed", "folder", m.dir, "error", err)
			still.Reset(reloadDelay)
		case <-still.C:
			cur, err := read(m.dir)
			if err != nil {
				m.log.Error("changed certificates are not valid, the old ones are kept", "error", err)
				continue
			}
			m.now.Store(cur)
			m.reloads.Add(1)
			m.warnNoRole(cur)
			m.log.Info("certificates reloaded", "folder", m.dir, "valid_until", cur.cert.Leaf.NotAfter)
		}
	}
}
