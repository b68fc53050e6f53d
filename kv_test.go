package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// Without a device KV blocks travel over TCP, and one line says so; with one, one line says which.
func TestFabricOrTCP(t *testing.T) {
	for _, c := range []struct {
		provider, address string
		want              kvtransfer.Transport
		line              string
	}{
		{"efa", "", kvtransfer.OverTCP, "no RDMA: KV blocks travel over TCP"},
		{"auto", "203.0.113.9", kvtransfer.OverTCP, "no RDMA: KV blocks travel over TCP"},
		{"tcp", "203.0.113.9", kvtransfer.OverTCP, "203.0.113.9"},
		{"tcp", "", kvtransfer.OverRDMA, "KV blocks travel by RDMA"},
		{"shm", "", kvtransfer.OverRDMA, "KV blocks travel by RDMA"},
	} {
		if !fabric.Built {
			c.want, c.line = kvtransfer.OverTCP, "build it on Linux, with cgo"
		}
		var out bytes.Buffer
		d := &process.Process{Log: slog.New(slog.NewTextHandler(&out, nil))}
		device, got := kvFabric(d, &config.Node{Host: "127.0.0.1", FabricProvider: c.provider, FabricAddress: c.address}, kvtransfer.OverRDMA)
		if got != c.want || (device != nil) != (got == kvtransfer.OverRDMA) {
			t.Errorf("%s at %q: over %s", c.provider, c.address, got)
		}
		if strings.Count(out.String(), "\n") != 1 || !strings.Contains(out.String(), c.line) {
			t.Errorf("%s at %q: it says\n%s", c.provider, c.address, &out)
		}
		d.End()
	}
	if device, got := kvFabric(nil, nil, kvtransfer.Auto); device != nil || got != kvtransfer.Auto {
		t.Errorf("not asked for: over %s", got)
	}
	for want, n := range map[string]config.Node{
		"--fabric-provider": {KVTransport: "rdma", FabricProvider: "pigeon"},
		"--kv-tls":          {KVTransport: "rdma", FabricProvider: "tcp", KVTLS: true},
		"--kv-transport":    {KVTransport: "pigeon", FabricProvider: "auto"},
		"--kv-connections":  {KVTransport: "tcp", FabricProvider: "auto", KVConnections: 1000},
	} {
		if n.KVConnections == 0 {
			n.KVConnections = 1
		}
		if _, err := kvTransport(&n); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", n, err)
		}
	}
	for host, want := range map[string]string{"0.0.0.0": "", "::": "", "10.1.2.3": "10.1.2.3", "node-1": "node-1"} {
		if got := fabricAddress(&config.Node{Host: host}, "verbs"); got != want {
			t.Errorf("--host %s: interface %q", host, got)
		}
	}
}
