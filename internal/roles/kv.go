package roles

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

// kvTransport parses --kv-transport and checks the other flags of the KV transfer.
func kvTransport(n *nodeFlags) (kvtransfer.Transport, error) {
	if n.writer.Connections < 1 || n.writer.Connections > kvtransfer.MaxConnections {
		return "", fmt.Errorf("%w: --kv-connections %d, want 1 to %d", config.ErrValue, n.writer.Connections, kvtransfer.MaxConnections)
	}
	if err := kvtransfer.CheckCongestionControl(n.writer.CongestionControl); err != nil {
		return "", fmt.Errorf("%w: --kv-congestion-control: %w", config.ErrValue, err)
	}
	t, err := kvtransfer.ParseTransport(n.transport)
	if err != nil {
		return "", fmt.Errorf("%w: --kv-transport: %w", config.ErrValue, err)
	}
	if all := append([]string{"auto"}, fabric.Providers...); !slices.Contains(all, n.fabric.Provider) {
		return "", fmt.Errorf("%w: --fabric-provider %q, want one of %s", config.ErrValue, n.fabric.Provider, strings.Join(all, ", "))
	}
	if t == kvtransfer.OverRDMA && n.tls {
		return "", fmt.Errorf("%w: --kv-tls: RDMA transfers KV blocks unencrypted; use --kv-transport tcp, or leave --kv-tls out", config.ErrValue)
	}
	return t, nil
}

// kvFabric opens the device of --kv-transport rdma and returns the transport to use: TCP if there
// is no device. The device outlives readers and writers. The returned memory is gpu if the provider
// reaches the GPU's memory directly, else nil.
func kvFabric(d *process.Process, n *nodeFlags, t kvtransfer.Transport, gpu kvtransfer.DeviceMemory) (*fabric.Device, kvtransfer.Transport, kvtransfer.DeviceMemory) {
	if t != kvtransfer.OverRDMA {
		return nil, t, nil
	}
	providers := []string{n.fabric.Provider}
	if n.fabric.Provider == "auto" {
		providers = fabric.Hardware
	}
	var errs []error
	for _, p := range providers {
		f, direct, err := openFabric(fabric.Options{Provider: p, Address: fabricAddress(n, p), Library: n.fabric.Library}, gpu)
		if f != nil {
			d.OnEnd(func() { d.Report("libfabric", f.Close()) })
			i := f.Info()
			is := []any{"provider", i.Provider, "interface", i.Domain, "network", i.Fabric, "libfabric", i.Library}
			switch {
			case direct:
				d.Log.Info("KV transfer: RDMA between GPUs", is...)
				return f, t, gpu
			case gpu != nil:
				d.Log.Warn("KV transfer: RDMA through the host's memory, not between GPUs", append(is, "error", err)...)
			default:
				d.Log.Info("KV transfer: RDMA", is...)
			}
			return f, t, nil
		}
		if errs = append(errs, err); errors.Is(err, fabric.ErrLibrary) {
			break
		}
	}
	d.Log.Warn("KV transfer: TCP, because RDMA is not available", "error", errors.Join(errs...))
	return nil, kvtransfer.OverTCP, nil
}

// openFabric opens a provider, for the GPU's memory if possible. If direct is false, err is why the
// provider does not reach that memory; nil without a GPU.
func openFabric(o fabric.Options, gpu kvtransfer.DeviceMemory) (f *fabric.Device, direct bool, err error) {
	if gpu == nil {
		f, err = fabric.Open(o)
		return f, false, err
	}
	o.GPU = true
	if f, err = fabric.Open(o); err == nil {
		if err = kvtransfer.CheckDevice(f, gpu); err == nil {
			return f, true, nil
		}
		if cerr := f.Close(); cerr != nil {
			return nil, false, errors.Join(err, cerr)
		}
	}
	o.GPU = false
	f, oerr := fabric.Open(o)
	if oerr != nil {
		return nil, false, oerr
	}
	return f, false, err
}

// fabricAddress returns the address at which peers reach this node.
func fabricAddress(n *nodeFlags, provider string) string {
	if n.fabric.Address != "" || provider == "shm" {
		return n.fabric.Address
	}
	if a, err := netip.ParseAddr(n.host); err == nil && a.IsUnspecified() {
		return ""
	}
	return n.host
}

// kvFile returns the shared memory for a prefill node's KV blocks, from which decode nodes on its
// host copy them; nil without it. It outlives the engine.
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
	d.Log.Info("KV transfer: TCP, because shared memory is not available", "error", err)
	return nil, nil
}
