package tlsconf

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A node's files do for a client-facing certificate in tests.
func clientFiles(t *testing.T, dir, name string) (cert, key string) {
	t.Helper()
	node, err := IssueNode(dir, name, []string{"localhost"})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(node, NodeCertFile), filepath.Join(node, NodeKeyFile)
}

func authority(t *testing.T) (dir, ca string) {
	t.Helper()
	dir = t.TempDir()
	if err := CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	return dir, filepath.Join(dir, CACertFile)
}

func copyTo(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// shake is a handshake over a pipe; it returns the server's certificate and the
// error of the side that refuses.
func shake(t *testing.T, server *tls.Config, client *tls.Certificate) (string, error) {
	t.Helper()
	near, far := net.Pipe()
	conf := &tls.Config{InsecureSkipVerify: true}
	if client != nil {
		conf.Certificates = []tls.Certificate{*client}
	}
	c, s := tls.Client(near, conf), tls.Server(far, server)
	done := make(chan error, 1)
	go func() {
		err := s.Handshake()
		far.Close()
		done <- err
	}()
	err := c.Handshake()
	near.Close()
	if serverErr := <-done; serverErr != nil {
		return "", serverErr
	}
	if err != nil {
		return "", err
	}
	return string(c.ConnectionState().PeerCertificates[0].Raw), nil
}

// Handshakes see what Reload has taken, and it takes only what fits together.
func TestClientFacingFollowsItsFiles(t *testing.T) {
	dir, _ := authority(t)
	certA, keyA := clientFiles(t, dir, "a")
	certB, keyB := clientFiles(t, dir, "b")
	l, err := ClientFacing(ClientFiles{Cert: certA, Key: keyA})
	if err != nil {
		t.Fatal(err)
	}
	conf := l.Config()
	before, err := shake(t, conf, nil)
	if err != nil {
		t.Fatal(err)
	}
	copyTo(t, certB, certA)
	if err := l.Reload(); !errors.Is(err, ErrMaterial) {
		t.Errorf("a certificate without its key: %v", err)
	}
	if got, err := shake(t, conf, nil); err != nil || got != before {
		t.Errorf("half a renewal changed something: %v", err)
	}
	copyTo(t, keyB, keyA)
	if err := l.Reload(); err != nil {
		t.Fatal(err)
	}
	if got, err := shake(t, conf, nil); err != nil || got == before {
		t.Errorf("a renewal was not taken: %v", err)
	}
}

// Clients show a certificate of the authority, where that is asked; the authority
// changes without a restart.
func TestClientCertificates(t *testing.T) {
	dir, ca := authority(t)
	other, otherCA := authority(t)
	cert, key := clientFiles(t, dir, "gateway")
	load := func(dir, name string) *tls.Certificate {
		c, k := clientFiles(t, dir, name)
		pair, err := tls.LoadX509KeyPair(c, k)
		if err != nil {
			t.Fatal(err)
		}
		return &pair
	}
	ours, theirs := load(dir, "client"), load(other, "client")
	for _, c := range []struct {
		auth               tls.ClientAuthType
		bare, ours, theirs bool
	}{
		{tls.RequireAndVerifyClientCert, false, true, false},
		{tls.VerifyClientCertIfGiven, true, true, false},
	} {
		file := filepath.Join(t.TempDir(), "ca")
		copyTo(t, ca, file)
		l, err := ClientFacing(ClientFiles{Cert: cert, Key: key, CA: file, Auth: c.auth})
		if err != nil {
			t.Fatal(err)
		}
		conf := l.Config()
		try := func(when string, client *tls.Certificate, want bool) {
			t.Helper()
			if _, err := shake(t, conf, client); (err == nil) != want {
				t.Errorf("%v, %s: %v", c.auth, when, err)
			}
		}
		try("none", nil, c.bare)
		try("ours", ours, c.ours)
		try("theirs", theirs, c.theirs)
		if err := os.WriteFile(file, []byte("nothing"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := l.Reload(); !errors.Is(err, ErrMaterial) {
			t.Errorf("a file without a certificate: %v", err)
		}
		try("ours, with a bad file", ours, c.ours)
		copyTo(t, otherCA, file)
		if err := l.Reload(); err != nil {
			t.Fatal(err)
		}
		try("ours, of an authority that is gone", ours, false)
		try("theirs, now", theirs, true)
		if len(l.Files()) != 3 {
			t.Errorf("%v", l.Files())
		}
	}
}

func TestClientFacingRefuses(t *testing.T) {
	dir, _ := authority(t)
	cert, key := clientFiles(t, dir, "a")
	for what, files := range map[string]ClientFiles{
		"no certificate": {Cert: "/nonexistent.crt", Key: key},
		"no key":         {Cert: cert, Key: "/nonexistent.key"},
		"no authority":   {Cert: cert, Key: key, CA: "/nonexistent.ca"},
		"no PEM":         {Cert: cert, Key: key, CA: key},
	} {
		if _, err := ClientFacing(files); !errors.Is(err, ErrMaterial) {
			t.Errorf("%s: got %v, want ErrMaterial", what, err)
		}
	}
}
