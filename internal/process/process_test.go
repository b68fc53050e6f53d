package process

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestEndStopsInReverse(t *testing.T) {
	var out bytes.Buffer
	p, err := Start(Options{Role: "decode", LogLevel: "warning", Out: &out})
	if err != nil {
		t.Fatal(err)
	}
	if host, err := os.Hostname(); err != nil || p.Name != host {
		t.Errorf("name %q: want the host's, %q (%v)", p.Name, host, err)
	}
	var order []int
	p.OnEnd(func() { order = append(order, 1) })
	p.Work(func(ctx context.Context) { <-ctx.Done(); order = append(order, 2) })
	p.OnEnd(func() { p.Report("part", errors.New("stuck")) })
	p.End()
	if !slices.Equal(order, []int{2, 1}) {
		t.Errorf("stopped in order %v, want last started first", order)
	}
	if !bytes.Contains(out.Bytes(), []byte("part=part err=stuck")) {
		t.Errorf("the fault was not reported: %q", &out)
	}
}

func TestSignals(t *testing.T) {
	ctx, second, stop := Signals()
	defer stop()
	raise := func(s syscall.Signal) {
		t.Helper()
		if err := syscall.Kill(syscall.Getpid(), s); err != nil {
			t.Fatal(err)
		}
	}
	raise(syscall.SIGTERM)
	select {
	case <-ctx.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the first signal did not end the context")
	}
	var stopped Stopped
	if cause := context.Cause(ctx); !errors.As(cause, &stopped) || stopped.Status() != 143 || cause.Error() != "stopped: terminated" {
		t.Errorf("the cause is %v, status %d", cause, stopped.Status())
	}
	select {
	case <-second:
		t.Fatal("one signal was taken for two")
	default:
	}
	raise(syscall.SIGINT)
	select {
	case <-second:
	case <-time.After(10 * time.Second):
		t.Fatal("the second signal was not noticed")
	}
}

// What to do about certificates depends on why they cannot be used.
func TestCertsRemedy(t *testing.T) {
	invalid := func(from, until time.Duration) error {
		c := &x509.Certificate{NotBefore: time.Now().Add(from), NotAfter: time.Now().Add(until)}
		return fmt.Errorf("refused: %w", x509.CertificateInvalidError{Cert: c, Reason: x509.Expired})
	}
	for want, err := range map[string]error{
		"creates such a folder": os.ErrNotExist, "set this machine's clock": invalid(55*time.Minute, 24*time.Hour), "`tandem ca renew DIR`": invalid(-2*time.Hour, -time.Hour),
	} {
		if got := certsRemedy(err); !strings.Contains(got, want) {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}

func TestLoopbackAndAt(t *testing.T) {
	for host, want := range map[string]bool{"127.0.0.1": true, "::1": true, "localhost": true, "0.0.0.0": false, "10.0.0.1": false, "example": false} {
		if Loopback(host) != want {
			t.Errorf("%s: want %t", host, want)
		}
	}
	if got := At("10.1.2.3", &net.TCPAddr{IP: net.IPv4zero, Port: 7}); got != "10.1.2.3:7" {
		t.Errorf("got %s", got)
	}
	if _, _, err := Logger("loud", "text", &bytes.Buffer{}); !errors.Is(err, ErrOption) {
		t.Errorf("got %v, want ErrOption", err)
	}
}
