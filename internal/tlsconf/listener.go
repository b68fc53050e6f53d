package tlsconf

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"sync/atomic"
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

// Reload reads the files again and takes them for handshakes from now on, if they
// fit together; if not, nothing changes. Any goroutine may call it.
func (l *Listener) Reload() error {
	cert, err := tls.LoadX509KeyPair(l.files.Cert, l.files.Key)
	if err != nil {
		return fmt.Errorf("%w: %s with %s: %w", ErrMaterial, l.files.Cert, l.files.Key, err)
	}
	c := &tls.Config{
		MinVersion:   tls.VersionTLS12, // clients are not ours to choose
		Certificates: []tls.Certificate{cert},
	}
	if l.files.CA != "" {
		pem, err := os.ReadFile(l.files.CA)
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

// Config is the configuration of the listener; it follows Reload.
func (l *Listener) Config() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return l.now.Load(), nil },
	}
}
