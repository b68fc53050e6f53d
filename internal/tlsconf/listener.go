package tlsconf

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/internal/regular"
)

// ClientFiles are the PEM files of a listener for clients that are no nodes, issued by any
// authority.
type ClientFiles struct {
	Cert, Key string
	CA        string             // authorities of client certificates; empty: none are requested
	Auth      tls.ClientAuthType // with CA: whether client certificates are required
}

// Listener is the certificate of a listener for clients.
type Listener struct {
	files ClientFiles
	now   atomic.Pointer[tls.Config]
	until atomic.Pointer[time.Time]
}

// ClientFacing returns a Listener with the content of the files.
func ClientFacing(files ClientFiles) (*Listener, error) {
	l := &Listener{files: files}
	if err := l.Reload(); err != nil {
		return nil, err
	}
	return l, nil
}

// Files returns the names of the listener's files.
func (l *Listener) Files() []string {
	files := []string{l.files.Cert, l.files.Key}
	if l.files.CA != "" {
		files = append(files, l.files.CA)
	}
	return files
}

// WarnExposed logs a warning if every user can read the private key.
func (l *Listener) WarnExposed(log *slog.Logger) { regular.WarnExposed(log, l.files.Key) }

// Expiry returns when the first certificate of the chain that clients get expires.
func (l *Listener) Expiry() time.Time { return *l.until.Load() }

// Reload reads the files again and uses them for further handshakes. It changes nothing if
// they do not match each other. Any goroutine may call it.
func (l *Listener) Reload() error {
	cert, err := KeyPair(l.files.Cert, l.files.Key)
	if err != nil {
		return fmt.Errorf("%w: %s with %s: %w", ErrMaterial, l.files.Cert, l.files.Key, err)
	}
	var chain []*x509.Certificate
	for _, der := range cert.Certificate {
		link, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrMaterial, l.files.Cert, err)
		}
		chain = append(chain, link)
	}
	until := expiry(chain)
	c := &tls.Config{
		MinVersion:   tls.VersionTLS12, // for all clients in use
		Certificates: []tls.Certificate{cert},
	}
	if l.files.CA != "" {
		if c.ClientCAs, err = Pool(l.files.CA); err != nil {
			return fmt.Errorf("%w: %w", ErrMaterial, err)
		}
		c.ClientAuth = l.files.Auth
		c.SessionTicketsDisabled = true // so that a changed authority applies at once
	}
	l.now.Store(c)
	l.until.Store(&until)
	return nil
}

// Pool returns the authorities in a file of PEM.
func Pool(path string) (*x509.CertPool, error) {
	text, err := regular.ReadFile(path, MaxFile)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM", path)
	}
	return pool, nil
}

// KeyPair is tls.LoadX509KeyPair for regular files.
func KeyPair(certFile, keyFile string) (tls.Certificate, error) {
	cert, err := regular.ReadFile(certFile, MaxFile)
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := regular.ReadFile(keyFile, MaxFile)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(cert, key)
}

// Config returns the configuration of the listener, which Reload updates.
func (l *Listener) Config() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return l.now.Load(), nil },
	}
}
