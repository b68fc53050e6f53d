package process

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// A limit is shared between links and clients, and one that is too low for either is
// refused with what is needed.
func TestDescriptors(t *testing.T) {
	relays := Descriptors{Own: 48, Client: 16, Each: 2}
	for _, c := range []struct {
		d     Descriptors
		limit int
		want  int // clients; 0: refused
	}{
		{GatewayDescriptors, 64, 0}, {GatewayDescriptors, 95, 0}, {GatewayDescriptors, 96, 16},
		{GatewayDescriptors, 256, 176}, {GatewayDescriptors, 1024, 848}, {GatewayDescriptors, 1 << 20, 1<<20 - 48 - 8192},
		{AloneDescriptors, 63, 0}, {AloneDescriptors, 64, 16}, {AloneDescriptors, 1024, 976},
		{NodeDescriptors, 63, 0}, {NodeDescriptors, 64, 8}, {NodeDescriptors, 1024, 856},
		{relays, 79, 0}, {relays, 80, 16}, {relays, 1024, 488},
	} {
		n, err := c.d.Clients(c.limit)
		if n != c.want || (err != nil) != (c.want == 0) {
			t.Errorf("%+v of %d: %d clients, want %d; %v", c.d, c.limit, n, c.want, err)
		}
		if err != nil && (!errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "limit of "+strconv.Itoa(c.limit)+" file descriptors") || !strings.Contains(err.Error(), "ulimit -n")) {
			t.Error(err)
		}
	}
}

// A lowered --max-connections is a warning only for those who asked for more.
func TestLoweredConnections(t *testing.T) {
	limit, err := DescriptorLimit()
	if err != nil {
		t.Fatal(err)
	}
	most, err := AloneDescriptors.Clients(limit)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		want  int
		asked bool
		log   string // level; empty: no line
	}{
		{most, true, ""}, {most + 1, true, "WARN"}, {most + 1, false, "INFO"},
	} {
		var out bytes.Buffer
		p := &Process{Log: slog.New(slog.NewTextHandler(&out, nil))}
		n, err := p.Connections(AloneDescriptors, c.want, c.asked)
		if err != nil || n != most || (out.Len() == 0) != (c.log == "") || !strings.Contains(out.String(), c.log) {
			t.Errorf("%+v: %d of %d, %v: %q", c, n, most, err, out.String())
		}
	}
}

// The limit is that of the process as Go has raised it.
func TestDescriptorLimit(t *testing.T) {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		t.Fatal(err)
	}
	if n, err := DescriptorLimit(); err != nil || n < 64 || uint64(n) != min(uint64(r.Cur), 1<<30) {
		t.Errorf("%d, want %d; %v; process %d", n, r.Cur, err, os.Getpid())
	}
}
