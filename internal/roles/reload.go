package roles

import (
	"context"

	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// A running gateway reloads its keys (by itself), its certificates, and the limits and
// upstreams of its --config FILE. Each is one line here. A part that does not load changes
// nothing and sets a metric.

// followClients reloads the certificate for clients when its files change.
func followClients(d *process.Process, set *metrics.Set, cert *tlsconf.Listener) {
	if cert != nil {
		cert.WarnExposed(d.Log)
		d.Follow(process.Reload{Part: "certificates", Files: cert.Files(), Load: cert.Reload, OnLoad: failing(set, "certificates")})
		d.Work(func(ctx context.Context) {
			tlsconf.WarnExpiry(ctx, d.Log, cert.Files()[0], "replace the files of --ssl-certfile and --ssl-keyfile; they are reloaded", cert.Expiry)
		})
		set.Gauge(metrics.CertificateExpiry, "clients").Func(func() float64 { return float64(cert.Expiry().Unix()) })
	}
}

// clusterExpiry connects the end of the cluster's certificates to its metric.
func clusterExpiry(d *process.Process, set *metrics.Set) {
	if d.Certs != nil {
		set.Gauge(metrics.CertificateExpiry, "cluster").Func(func() float64 { return float64(d.Certs.Expiry().Unix()) })
	}
}

// followConfig reloads the file of --config when it changes. Flags and environment take
// precedence as at the start.
func followConfig(d *process.Process, set *metrics.Set, flags *config.Set, load func() error) {
	var files []string
	if f := flags.Lookup("config"); f != nil && f.Value.String() != "" {
		files = []string{f.Value.String()}
	}
	d.Follow(process.Reload{Part: "config", Files: files, Load: load, OnLoad: failing(set, "config")})
}

// failing sets a metric to whether the last reload of a part failed.
func failing(set *metrics.Set, part string) func(error) {
	bad := set.Gauge(metrics.GatewayReloadFailed, part)
	return func(err error) {
		if bad.Set(0); err != nil {
			bad.Set(1)
		}
	}
}

// serveCommand has the flags of tandem serve.
type serveCommand struct {
	*config.Set
	m cli.Model
	g gatewayFlags
	p processFlags
}

func serveFlags(s *config.Set) *serveCommand {
	f := &serveCommand{Set: s}
	f.m.Register(s)
	f.g.register(s, 0)
	f.p.register(s)
	return f
}
