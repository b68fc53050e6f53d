package tlsconf

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/tandem-serving/tandem/internal/regular"
)

// ClientFiles are what a listener for clients that are no nodes shows, and by what
// it knows them: PEM files as any authority issues them.
type ClientFiles struct {
	Cert, Key string
	CA        string             // whose certificates clients may show; empty: they are not asked
	Auth      tls.ClientAuthType // what is asked of clients, with CA
}

// Listener is a client-facing certificate.
type Listener struct {
	files ClientFiles
	now   atomic.Pointer[tls.Config]
}

// ClientFacing reads the files.
func ClientFacing(files ClientFiles) (*Listener, error) {
	l := &Listener{files: files}
	if err := l.Reload(); err != nil {
		return nil, err
	}
	return l, nil
}

// Files are the files that the listener is made from.
func (l *Listener) Files() []string {
	files := []string{l.files.Cert, l.files.Key}
	if l.files.CA != "" {
		files = append(files, l.files.CA)
	}
	return files
}

// WarnExposed logs a warning where every user can read the private key.
func (l *Listener) WarnExposed(log *slog.Logger) { regular.WarnExposed(log, l.files.Key) }

// Reload reads the files again and takes them for handshakes from now on, if they
// fit together; if not, nothing changes. Any goroutine may call it.
func (l *Listener) Reload() error {
	cert, err := loadKeyPair(l.files.Cert, l.files.Key)
	if err != nil {
		return fmt.Errorf("%w: %s with %s: %w", ErrMaterial, l.files.Cert, l.files.Key, err)
	}
	c := &tls.Config{
		MinVersion:   tls.VersionTLS12, // clients are not ours to choose
		Certificates: []tls.Certificate{cert},
	}
	if l.files.CA != "" {
		pem, err := regular.ReadFile(l.files.CA, MaxFile)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrMaterial, err)
		}
		c.ClientCAs, c.ClientAuth = x509.NewCertPool(), l.files.Auth
		if !c.ClientCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("%w: no certificate in %s", ErrMaterial, l.files.CA)
		}
		c.SessionTicketsDisabled = true // a changed authority must be asked again
	}
	l.now.Store(c)
	return nil
}

// loadKeyPair is tls.LoadX509KeyPair of regular files.
func loadKeyPair(certFile, keyFile string) (tls.Certificate, error) {
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

// Config is the configuration of the listener; it follows Reload.
func (l *Listener) Config() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return l.now.Load(), nil },
	}
}
