package roles

import (
	"crypto/tls"

	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// What a gateway reads anew while it runs: its keys (which it follows by itself),
// its certificates, and of its --config FILE the limits and the upstreams. Each is
// one line here; what does not load changes nothing, and shows in a metric.

// followClients has changed certificates towards clients taken.
func followClients(d *process.Process, set *metrics.Set, cert *tlsconf.Listener) {
	if cert != nil {
		cert.WarnExposed(d.Log)
		d.Follow(process.Reload{Part: "certificates", Files: cert.Files(), Load: cert.Reload, Told: failing(set, "certificates")})
	}
}

// followConfig has the file of --config read anew, flags and environment winning
// over it as at the start.
func followConfig(d *process.Process, set *metrics.Set, flags *config.Set, load func() error) {
	var files []string
	if f := flags.Lookup("config"); f != nil && f.Value.String() != "" {
		files = []string{f.Value.String()}
	}
	d.Follow(process.Reload{Part: "config", Files: files, Load: load, Told: failing(set, "config")})
}

// failing shows in a metric whether a part's last reading failed.
func failing(set *metrics.Set, part string) func(error) {
	bad := set.Gauge(metrics.GatewayReloadFailed, part)
	return func(err error) {
		if bad.Set(0); err != nil {
			bad.Set(1)
		}
	}
}

// tlsOf is the listener's configuration; nil without one.
func tlsOf(l *tlsconf.Listener) *tls.Config {
	if l == nil {
		return nil
	}
	return l.Config()
}

// serveCommand is the flags of tandem serve.
type serveCommand struct {
	*config.Set
	m config.Model
	g config.Gateway
	p config.Process
}

func serveFlags(s *config.Set) *serveCommand {
	f := &serveCommand{Set: s}
	f.m.Register(s)
	f.g.Register(s, 0)
	f.p.Register(s)
	return f
}
