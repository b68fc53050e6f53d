package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// kvTransport reads --kv-transport, and looks at the other flags of how KV blocks travel.
func kvTransport(n *config.Node) (kvtransfer.Transport, error) {
	if n.KVConnections < 1 || n.KVConnections > kvtransfer.MaxConnections {
		return "", fmt.Errorf("%w: --kv-connections %d, want 1 to %d", config.ErrValue, n.KVConnections, kvtransfer.MaxConnections)
	}
	if err := kvtransfer.CheckCongestionControl(n.KVCongestion); err != nil {
		return "", fmt.Errorf("%w: --kv-congestion-control: %w", config.ErrValue, err)
	}
	t, err := kvtransfer.ParseTransport(n.KVTransport)
	if err != nil {
		return "", fmt.Errorf("%w: --kv-transport: %w", config.ErrValue, err)
	}
	if all := append([]string{"auto"}, fabric.Providers...); !slices.Contains(all, n.FabricProvider) {
		return "", fmt.Errorf("%w: --fabric-provider %q, want one of %s", config.ErrValue, n.FabricProvider, strings.Join(all, ", "))
	}
	if t == kvtransfer.OverRDMA && n.KVTLS {
		return "", fmt.Errorf("%w: --kv-tls: KV blocks that travel by RDMA are in the clear; choose --kv-transport tcp, or leave --kv-tls out", config.ErrValue)
	}
	return t, nil
}

// kvFabric opens what --kv-transport rdma needs, and says over what KV blocks travel instead where there is none. It outlives readers and writers.
func kvFabric(d *process.Process, n *config.Node, t kvtransfer.Transport) (*fabric.Device, kvtransfer.Transport) {
	if t != kvtransfer.OverRDMA {
		return nil, t
	}
	providers := []string{n.FabricProvider}
	if n.FabricProvider == "auto" {
		providers = fabric.Hardware
	}
	var errs []error
	for _, p := range providers {
		f, err := fabric.Open(fabric.Options{Provider: p, Address: fabricAddress(n, p)})
		if err == nil {
			d.OnEnd(func() { d.Report("libfabric", f.Close()) })
			i := f.Info()
			d.Log.Info("KV blocks travel by RDMA", "provider", i.Provider, "interface", i.Domain, "network", i.Fabric, "libfabric", i.Library)
			return f, t
		}
		if errs = append(errs, err); errors.Is(err, fabric.ErrLibrary) {
			break
		}
	}
	d.Log.Warn("no RDMA: KV blocks travel over TCP", "error", errors.Join(errs...))
	return nil, kvtransfer.OverTCP
}

// fabricAddress is where peers reach this node.
func fabricAddress(n *config.Node, provider string) string {
	if n.FabricAddress != "" || provider == "shm" {
		return n.FabricAddress
	}
	if a, err := netip.ParseAddr(n.Host); err == nil && a.IsUnspecified() {
		return ""
	}
	return n.Host
}

// kvFile is where a prefill node's KV blocks lie so that decode nodes on its host can copy them; nil: they cannot. It outlives the engine.
func kvFile(d *process.Process, t kvtransfer.Transport) (*kvtransfer.Shared, error) {
	if t == kvtransfer.OverTCP || t == kvtransfer.OverRDMA {
		return nil, nil
	}
	s, err := kvtransfer.NewShared()
	if err == nil {
		d.OnEnd(func() { d.Report("shared KV memory", s.Close()) })
		return s, nil
	}
	if t == kvtransfer.OverShared {
		return nil, err
	}
	d.Log.Info("no shared memory: KV blocks travel over TCP", "error", err)
	return nil, nil
}
