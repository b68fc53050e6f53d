package roles

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/pflag"

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
// precedence as at the start. resolve reads all flags again, and apply makes the running process
// use those that it can.
func followConfig(d *process.Process, set *metrics.Set, flags *config.Set, resolve func() (*config.Set, error), apply func() error) {
	var files []string
	if f := flags.Lookup("config"); f != nil && f.Value.String() != "" {
		files = []string{f.Value.String()}
	}
	current := valuesOf(flags)
	var applied []string
	d.Follow(process.Reload{Part: "config", Files: files, OnLoad: failing(set, "config"),
		Load: func() error {
			next, err := resolve()
			if err == nil {
				err = apply()
			}
			if err != nil {
				return err
			}
			var left []string
			applied, left = changes(current, next)
			if len(left) > 0 {
				d.Log.Warn("changed settings need a restart", "settings", left)
			}
			return nil
		},
		Details: func() []any { return []any{"changed", applied} },
	})
}

// reloadable are the flags that a running process applies.
var reloadable = []string{
	"upstream", "upstream-prefill", "upstream-decode", "upstream-bootstrap-port", "kubernetes-api", "kubernetes-token-file", "kubernetes-ca", "upstream-max-requests",
	"max-queued-requests", "max-queued-tokens", "queue-timeout", "node-backlog-requests", "node-backlog-time",
	"request-timeout", "resume-timeout", "max-attempts", "max-request-body", "max-body-memory", "header-timeout", "min-body-rate",
	"max-n", "max-prompt-tokens", "max-requests", "max-connections-per-address", "slow-client-timeout",
	"retries-per-second", "resumes-per-second", "max-logprobs",
	"sse-keep-alive", "sse-early-head", "max-grammar-bytes", "grammar-compiles", "max-queued-grammars", "grammar-outcome-memory",
}

// valuesOf returns the value of each flag.
func valuesOf(s *config.Set) map[string]string {
	values := map[string]string{}
	s.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			values[f.Name] = f.Value.String()
		}
	})
	return values
}

// changes compares the values that a process runs with to those of its file. It updates and returns
// the changes that were applied, and returns those that need a restart. Values that Secret marks
// are left out.
func changes(current map[string]string, next *config.Set) (applied, left []string) {
	next.VisitAll(func(f *pflag.Flag) {
		was, now := current[f.Name], f.Value.String()
		if f.Hidden || was == now {
			return
		}
		text := fmt.Sprintf("%s: %s → %s", f.Name, cmp.Or(was, `""`), cmp.Or(now, `""`))
		if next.Hides(f) {
			text = f.Name
		}
		if slices.Contains(reloadable, f.Name) {
			current[f.Name] = now
			applied = append(applied, text)
			return
		}
		left = append(left, text)
	})
	return applied, left
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
	s.First("model", "host", "port", "api-key", "max-model-len", "config")
	f.m.Register(s)
	f.g.register(s, 0)
	f.p.register(s)
	return f
}
