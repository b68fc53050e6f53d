package tlsconf

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func newCA(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cluster")
	if err := CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func issue(t *testing.T, ca, name string) string {
	t.Helper()
	dir, err := IssueNode(ca, name, []string{"127.0.0.1", "node.example"})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func load(t *testing.T, dir string) *Material {
	t.Helper()
	m, err := Load(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// An authority that cannot be written as a whole leaves nothing, so that the next attempt makes one.
// The bound on a file's size stands for a full disk; it is that of a process of its own.
func TestNoHalfAuthority(t *testing.T) {
	dir := os.Getenv("TANDEM_HALF_AUTHORITY")
	if dir == "" {
		dir = t.TempDir()
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestNoHalfAuthority$")
		cmd.Env = append(os.Environ(), "TANDEM_HALF_AUTHORITY="+dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := CreateCA(dir); err != nil {
			t.Error(err)
		}
		return
	}
	signal.Ignore(syscall.SIGXFSZ)
	for _, size := range []uint64{0, 100, 245, 400} { // bytes of a file: the key has 241, the secret 65, the certificate more
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: size, Max: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		if err := CreateCA(dir); !errors.Is(err, syscall.EFBIG) {
			t.Errorf("files of at most %d bytes: %v", size, err)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("files of at most %d bytes: %v is left", size, left)
		}
	}
}

// meet runs a handshake and one byte each way, and returns both sides' errors.
func meet(t *testing.T, server, client *tls.Config) (ss, cs tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	// A real socket: TLS needs a buffer to send an alert into.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	a.SetDeadline(deadline)
	b.SetDeadline(deadline)
	talk := func(c *tls.Conn, raw net.Conn) error {
		defer raw.Close()
		if err := c.Handshake(); err != nil {
			return err
		}
		done := make(chan error, 1)
		go func() {
			_, err := c.Write([]byte{1})
			done <- err
		}()
		_, err := io.ReadFull(c, make([]byte, 1))
		return errors.Join(err, <-done)
	}
	s, c := tls.Server(a, server), tls.Client(b, client)
	done := make(chan error, 1)
	go func() { done <- talk(s, a) }()
	clientErr = talk(c, b)
	serverErr = <-done
	return s.ConnectionState(), c.ConnectionState(), serverErr, clientErr
}

func TestNodesOfOneClusterKnowEachOther(t *testing.T) {
	ca := newCA(t)
	a, b := load(t, issue(t, ca, "decode-0")), load(t, issue(t, ca, "gateway"))
	ss, cs, serverErr, clientErr := meet(t, a.Server(), b.Client())
	if serverErr != nil || clientErr != nil {
		t.Fatalf("server: %v, client: %v", serverErr, clientErr)
	}
	if n := ss.PeerCertificates[0].Subject.CommonName; n != "gateway" {
		t.Errorf("the server met %q", n)
	}
	if n := cs.PeerCertificates[0].Subject.CommonName; n != "decode-0" {
		t.Errorf("the client met %q", n)
	}
	if ss.Version != tls.VersionTLS13 {
		t.Errorf("version %x", ss.Version)
	}
	if !bytes.Equal(a.GossipKey(), b.GossipKey()) || len(a.GossipKey()) != GossipKeyBytes {
		t.Errorf("gossip keys %x and %x", a.GossipKey(), b.GossipKey())
	}
	if other := load(t, issue(t, newCA(t), "x")); bytes.Equal(a.GossipKey(), other.GossipKey()) {
		t.Error("two clusters share a gossip key")
	}
}

// signed makes a certificate under the authority in dir, or one of its own.
func signed(t *testing.T, dir string, change func(*x509.Certificate)) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		DNSNames:     []string{NodeDNSName},
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	change(c)
	parent, signer := c, any(key)
	if dir != "" {
		ca, caKey, err := loadCA(dir)
		if err != nil {
			t.Fatal(err)
		}
		parent, signer = ca, caKey
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestStrangersAreRefused(t *testing.T) {
	ca := newCA(t)
	m := load(t, issue(t, ca, "node"))
	other := load(t, issue(t, newCA(t), "node"))
	with := func(c tls.Certificate) *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{c}, ClientAuth: tls.RequestClientCert, InsecureSkipVerify: true}
	}
	same := func(*x509.Certificate) {}
	for name, cfg := range map[string]*tls.Config{
		"other cluster":  with(other.now.Load().cert),
		"self-signed":    with(signed(t, "", same)),
		"other name":     with(signed(t, ca, func(c *x509.Certificate) { c.DNSNames = []string{"example.org"} })),
		"expired":        with(signed(t, ca, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })),
		"not yet valid":  with(signed(t, ca, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) })),
		"for mail only":  with(signed(t, ca, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageEmailProtection} })),
		"no certificate": {InsecureSkipVerify: true},
	} {
		_, _, serverErr, _ := meet(t, m.Server(), cfg)
		if serverErr == nil {
			t.Errorf("%s: the server took the client", name)
		}
		if name != "no certificate" {
			if !errors.Is(serverErr, ErrStranger) {
				t.Errorf("%s: server says %v", name, serverErr)
			}
			if _, _, _, clientErr := meet(t, cfg, m.Client()); !errors.Is(clientErr, ErrStranger) {
				t.Errorf("%s: client says %v of the server", name, clientErr)
			}
		}
	}
	// The same certificate by the book passes: the cases fail for their reason.
	if _, _, serverErr, clientErr := meet(t, m.Server(), with(signed(t, ca, same))); serverErr != nil || clientErr != nil {
		t.Errorf("control: server %v, client %v", serverErr, clientErr)
	}
	old := with(signed(t, ca, same))
	old.MaxVersion = tls.VersionTLS12
	if _, _, serverErr, _ := meet(t, m.Server(), old); serverErr == nil {
		t.Error("the server took TLS 1.2")
	}
}

func TestPrivateFilesArePrivate(t *testing.T) {
	ca := newCA(t)
	issue(t, ca, "node")
	err := filepath.WalkDir(ca, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		want := fs.FileMode(0o600)
		switch {
		case d.IsDir():
			want = 0o700
		case filepath.Ext(path) == ".crt":
			want = 0o644
		}
		if got := i.Mode().Perm(); got != want {
			t.Errorf("%s has mode %v, want %v", path, got, want)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := CreateCA(ca); !errors.Is(err, ErrExists) {
		t.Errorf("second CreateCA: %v", err)
	}
	for _, name := range []string{"", "..", ".x", "a/b", "a b", string(make([]byte, 64))} {
		if _, err := IssueNode(ca, name, nil); !errors.Is(err, ErrName) {
			t.Errorf("IssueNode(%q): %v", name, err)
		}
	}
	if _, err := IssueNode(t.TempDir(), "node", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("IssueNode without an authority: %v", err)
	}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 10 s: ", what)
		}
	}
}

func TestRenewedFilesAreTakenWithoutRestart(t *testing.T) {
	ca := newCA(t)
	dir := issue(t, ca, "node")
	m, peer := load(t, dir), load(t, issue(t, ca, "peer"))
	server, client := m.Server(), peer.Client()
	_, before, _, _ := meet(t, server, client)

	// Half a renewal changes nothing.
	key, err := os.ReadFile(filepath.Join(dir, NodeKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, NodeKeyFile), key[:len(key)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * reloadDelay)
	if m.Reloads() != 0 {
		t.Fatal("a torn key was taken")
	}
	if _, _, serverErr, clientErr := meet(t, server, client); serverErr != nil || clientErr != nil {
		t.Fatalf("with a torn key: server %v, client %v", serverErr, clientErr)
	}

	issue(t, ca, "node")
	eventually(t, "the renewal is taken", func() bool { return m.Reloads() > 0 })
	_, after, serverErr, clientErr := meet(t, server, client)
	if serverErr != nil || clientErr != nil {
		t.Fatalf("after the renewal: server %v, client %v", serverErr, clientErr)
	}
	if before.PeerCertificates[0].SerialNumber.Cmp(after.PeerCertificates[0].SerialNumber) == 0 {
		t.Error("the old certificate is still shown")
	}

	// A new authority: the old cluster's nodes become strangers at once.
	n := m.Reloads()
	newDir := issue(t, newCA(t), "node")
	for _, f := range []string{CACertFile, SecretFile, NodeKeyFile, NodeCertFile} {
		if err := os.Rename(filepath.Join(newDir, f), filepath.Join(dir, f)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the new authority is taken", func() bool { return m.Reloads() > n })
	if _, _, _, clientErr := meet(t, server, client); !errors.Is(clientErr, ErrStranger) {
		t.Errorf("a node of the old authority says %v of one of the new", clientErr)
	}
	if _, _, _, clientErr := meet(t, client, server); !errors.Is(clientErr, ErrStranger) {
		t.Errorf("a node of the new authority says %v of one of the old", clientErr)
	}
}

func TestLoadSaysWhatIsWrong(t *testing.T) {
	ca := newCA(t)
	otherCA := newCA(t)
	spoil := map[string]func(t *testing.T, dir string){
		"no key":       func(t *testing.T, dir string) { remove(t, filepath.Join(dir, NodeKeyFile)) },
		"no authority": func(t *testing.T, dir string) { write(t, filepath.Join(dir, CACertFile), "hello") },
		"short secret": func(t *testing.T, dir string) { write(t, filepath.Join(dir, SecretFile), "abcd") },
		"secret not hex": func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, SecretFile), string(bytes.Repeat([]byte("z"), 64)))
		},
		"other authority": func(t *testing.T, dir string) {
			copyFile(t, filepath.Join(otherCA, CACertFile), filepath.Join(dir, CACertFile))
		},
		"other node's key": func(t *testing.T, dir string) {
			copyFile(t, filepath.Join(issue(t, ca, "b"), NodeKeyFile), filepath.Join(dir, NodeKeyFile))
		},
	}
	for name, f := range spoil {
		t.Run(name, func(t *testing.T) {
			dir := issue(t, ca, "a")
			f(t, dir)
			if _, err := Load(dir, quiet); !errors.Is(err, ErrMaterial) {
				t.Errorf("Load: %v", err)
			} else {
				t.Log(err)
			}
		})
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	write(t, to, string(b))
}
