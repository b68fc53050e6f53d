package config

import (
	"strings"
	"testing"
)

func TestServiceLinkNames(t *testing.T) {
	for _, e := range []string{
		"TANDEM_PORT=tcp://10.0.0.1:8000", "TANDEM_SERVICE_HOST=10.0.0.1", "TANDEM_SERVICE_PORT=8000", "TANDEM_SERVICE_PORT_HTTP=8000",
		"TANDEM_PORT_8000_TCP=tcp://10.0.0.1:8000", "TANDEM_PORT_8000_TCP_PROTO=tcp", "TANDEM_PORT_8000_TCP_PORT=8000",
		"TANDEM_PORT_8000_TCP_ADDR=10.0.0.1", "TANDEM_NATS_PORT=tcp://10.0.0.1:4222", "TANDEM_RPC_PORT=tcp://1.2.3.4:5",
		"TANDEM_GOSSIP_PORT=udp://10.0.0.1:7946", "TANDEM_HTTP_PORT_80_TCP_ADDR=1.2.3.4", "TANDEM_HTTP_PORT_7946_UDP=udp://10.0.0.1:7946",
	} {
		name, v, _ := strings.Cut(e, "=")
		if !serviceLink(name, v) {
			t.Errorf("%s is not taken for a service link", e)
		}
	}
	for _, e := range []string{"TANDEM_PORT=8000", "TANDEM_HTTP_PORT=1", "TANDEM_HOST=0.0.0.0", "TANDEM_NATS_URL=nats://a:1"} {
		name, v, _ := strings.Cut(e, "=")
		if serviceLink(name, v) {
			t.Errorf("%s is taken for a service link", e)
		}
	}
}

func TestPort(t *testing.T) {
	for in, want := range map[string]int{"0": 0, "1": 1, "65535": 65535, "-1": -1, "65536": -1, "x": -1, "": -1, "1.5": -1} {
		var p Port
		if err := p.Set(in); (err == nil) != (want >= 0) || err == nil && int(p) != want {
			t.Errorf("%q: %d, %v", in, p, err)
		}
	}
}

func TestBytes(t *testing.T) {
	for in, want := range map[string]Bytes{"1024": 1024, "1KiB": 1024, "1.5GB": 15e8, "2 GiB": 2 << 30, "0": 0, "12B": 12} {
		var b Bytes
		if err := b.Set(in); err != nil || b != want {
			t.Errorf("%q: got %d, %v; want %d", in, b, err, want)
		}
		var again Bytes
		if err := again.Set(b.String()); err != nil || again != b {
			t.Errorf("%q does not read back: %q gives %d, %v", in, b.String(), again, err)
		}
	}
	for _, in := range []string{"", "3XB", "1GiBs", "GiB", "-1GiB", "1 2", "NaN", "Inf", "9EiB", "1e300GiB"} {
		var b Bytes
		if err := b.Set(in); err == nil || b != 0 {
			t.Errorf("%q is taken as %d", in, b)
		}
	}
}
