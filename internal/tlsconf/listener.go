package tlsconf

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// listenerCheck is how often, at most, a handshake looks whether the files of a
// client-facing certificate have changed.
const listenerCheck = time.Second

// listener is a client-facing certificate that follows its files.
type listener struct {
	certFile, keyFile string
	log               *slog.Logger

	mu      sync.Mutex
	cert    *tls.Certificate
	stamp   [2]time.Time // of the files behind cert
	checked time.Time
}

// ClientFacing is the configuration of a listener for clients that are no
// nodes: a certificate and key as any authority issues them, in PEM files. A
// renewal is taken at the next handshake; one that does not load is logged, and
// the old certificate stays.
func ClientFacing(certFile, keyFile string, log *slog.Logger) (*tls.Config, error) {
	l := &listener{certFile: certFile, keyFile: keyFile, log: log}
	if err := l.read(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, // clients are not ours to choose
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return l.current(), nil
		},
	}, nil
}

// read loads the files.
func (l *listener) read() error {
	stamp, err := l.stamps()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMaterial, err)
	}
	cert, err := tls.LoadX509KeyPair(l.certFile, l.keyFile)
	if err != nil {
		return fmt.Errorf("%w: %s with %s: %w", ErrMaterial, l.certFile, l.keyFile, err)
	}
	l.cert, l.stamp = &cert, stamp
	return nil
}

func (l *listener) stamps() (s [2]time.Time, err error) {
	for i, f := range []string{l.certFile, l.keyFile} {
		info, err := os.Stat(f)
		if err != nil {
			return s, err
		}
		s[i] = info.ModTime()
	}
	return s, nil
}

// current returns the certificate, read again if its files have changed.
func (l *listener) current() *tls.Certificate {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := time.Now(); now.Sub(l.checked) >= listenerCheck {
		l.checked = now
		if s, err := l.stamps(); err == nil && s != l.stamp {
			if err := l.read(); err != nil {
				l.log.Warn("certificate not renewed", "err", err)
			} else {
				l.log.Info("certificate renewed", "file", l.certFile)
			}
		}
	}
	return l.cert
}
