package process

import (
	"errors"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

func TestStateDir(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", "/state")
	if dir, err := StateDir(); err != nil || dir != "/state/tandem" {
		t.Errorf("%q, %v", dir, err)
	}
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("HOME", "/home/u")
	if dir, err := StateDir(); err != nil || dir != "/home/u/.local/state/tandem" {
		t.Errorf("%q, %v", dir, err)
	}
	t.Setenv("HOME", "")
	if dir, err := StateDir(); err == nil {
		t.Errorf("without a home: %q", dir)
	}
}

// CheckPort names the flag of a port that is in use, and leaves one free that is not.
func TestCheckPort(t *testing.T) {
	l, err := Listen("127.0.0.1", 0, "port")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := CheckPort("127.0.0.1", port, "rpc-port"); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "--rpc-port") {
		t.Errorf("a port in use: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := CheckPort("127.0.0.1", port, "rpc-port"); err != nil {
			t.Errorf("a free port: %v", err)
		}
	}
	if err := CheckPort("not an address", 0, "rpc-port"); err != nil {
		t.Errorf("port 0: %v", err)
	}
}

// A process has the name that is given, or else that in its certificate.
func TestName(t *testing.T) {
	dir := t.TempDir()
	if err := tlsconf.CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	folder, err := tlsconf.IssueNode(dir, "node/d7", nil)
	if err != nil {
		t.Fatal(err)
	}
	for want, o := range map[string]Options{
		"given": {Name: "given", TLSDir: folder, Role: "decode"},
		"d7":    {TLSDir: folder, Role: "decode"},
	} {
		if got := name(o); got != want {
			t.Errorf("%+v: %q, want %q", o, got, want)
		}
	}
	p, err := Start(Options{Role: "decode", LogLevel: "error", Out: new(strings.Builder), TLSDir: folder})
	if err != nil {
		t.Fatal(err)
	}
	defer p.End()
	if p.Name != "d7" || p.Certs == nil || p.Certs.Expiry().IsZero() {
		t.Errorf("%q with certificates %v", p.Name, p.Certs)
	}
	if _, err := Start(Options{Role: "decode", LogLevel: "error", Out: new(strings.Builder), TLSDir: filepath.Join(dir, "none")}); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "tandem ca") {
		t.Errorf("a folder that does not exist: %v", err)
	}
}
