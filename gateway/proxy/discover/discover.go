// Package discover finds upstream servers by DNS names, which it resolves periodically, and by
// Kubernetes Services, which it watches.
//
// A source reports the whole list of servers after each change.
//
// Invariant: a failure changes nothing. If a name does not resolve or the API does not answer, the
// servers stay as they were, because probes know better whether they work.
//
// The package does not probe servers and keeps no connection to them.
package discover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/kubernetes"
)

// resolveEvery is the interval between lookups of a name. Go's resolver does not return the time to
// live of an answer; cluster DNS uses 5 s for names of Services.
const resolveEvery = 5 * time.Second

// ErrSpec reports a specification that is neither a server nor a source of servers.
var ErrSpec = errors.New("discover: bad upstream")

// Options of sources.
type Options struct {
	Kubernetes kubernetes.Options // of k8s: sources
	Every      time.Duration      // between lookups of a name; 0: 5 s
	Resolver   Resolver           // nil: the machine's
	Log        *slog.Logger
}

// Resolver is the part of net.Resolver that sources use.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error)
}

// Parse parses a specification of servers of a role:
//
//	http://HOST:PORT, https://…        one server
//	dns:HOST:PORT, dns+https://…       each address of a name
//	srv:NAME, srv+https://NAME         each target of an SRV record
//	k8s:NAMESPACE/SERVICE:PORT, …      each ready endpoint of a Service; PORT is a number or a name
//
// The source is nil if the specification is one server, which the target is.
func Parse(spec string, role upstream.Role, bootstrap int, o Options) (upstream.Source, upstream.Target, error) {
	kind, rest, ok := strings.Cut(spec, ":")
	t := upstream.Target{URL: spec, Role: role, Bootstrap: bootstrap}
	kind, scheme, both := strings.Cut(kind, "+")
	if !both {
		scheme = "http"
	}
	rest = strings.TrimPrefix(rest, "//")
	if ok && (kind == "http" || kind == "https") {
		return nil, t, nil
	}
	if scheme != "http" && scheme != "https" {
		return nil, t, fmt.Errorf("%w: %q: want +http or +https", ErrSpec, spec)
	}
	o.Every, o.Log = cmp.Or(o.Every, resolveEvery), cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Resolver == nil {
		o.Resolver = net.DefaultResolver
	}
	b := base{spec: spec, scheme: scheme, target: t, o: o}
	switch kind {
	case "dns":
		host, port, err := net.SplitHostPort(rest)
		if n, bad := strconv.Atoi(port); err != nil || host == "" || bad != nil || n < 1 || n > 65535 {
			return nil, t, fmt.Errorf("%w: %q: want dns:HOST:PORT", ErrSpec, spec)
		}
		return &dnsSource{base: b, host: host, port: port}, t, nil
	case "srv":
		if rest == "" || strings.ContainsAny(rest, ":/ ") {
			return nil, t, fmt.Errorf("%w: %q: want srv:NAME", ErrSpec, spec)
		}
		return &dnsSource{base: b, host: rest, srv: true}, t, nil
	case "k8s":
		s, err := newSlices(b, rest)
		return s, t, err
	}
	return nil, t, fmt.Errorf("%w: %q: want a URL, or one of dns:HOST:PORT, srv:NAME, k8s:NAMESPACE/SERVICE:PORT", ErrSpec, spec)
}

// base has the common parts of sources.
type base struct {
	spec   string
	scheme string
	target upstream.Target // whose URL is replaced for each server
	o      Options
}

// String implements upstream.Source.
func (b *base) String() string {
	if b.target.Role != upstream.Whole { // one name may be used for two roles
		return b.spec + " (" + b.target.Role.String() + ")"
	}
	return b.spec
}

// targetAt returns the target of an address. name is the name in its certificate; empty: the host.
func (b *base) targetAt(host, port, name string) upstream.Target {
	t := b.target
	t.URL = (&url.URL{Scheme: b.scheme, Host: net.JoinHostPort(host, port)}).String()
	t.ServerName = name
	return t
}

// dnsSource has the addresses of a DNS name.
type dnsSource struct {
	base
	host, port string
	srv        bool
}

// Watch implements upstream.Source.
func (n *dnsSource) Watch(ctx context.Context, update func([]upstream.Target)) {
	var last []upstream.Target
	logged := "" // the last error
	tick := time.NewTicker(n.o.Every)
	defer tick.Stop()
	for {
		now, err := n.resolve(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if err.Error() != logged {
				n.o.Log.Warn("cannot discover upstreams", "source", n.spec, "error", err)
				logged = err.Error()
			}
		case !slices.Equal(now, last):
			last, logged = now, ""
			update(now)
		default:
			logged = ""
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// resolve looks the name up and returns its targets, sorted by URL.
func (n *dnsSource) resolve(ctx context.Context) ([]upstream.Target, error) {
	ctx, cancel := context.WithTimeout(ctx, max(n.o.Every, time.Second))
	defer cancel()
	var found []upstream.Target
	if n.srv {
		_, records, err := n.o.Resolver.LookupSRV(ctx, "", "", n.host)
		if err != nil {
			return nil, fmt.Errorf("discover: SRV record of %s: %w", n.host, err)
		}
		for _, r := range records {
			found = append(found, n.targetAt(strings.TrimSuffix(r.Target, "."), strconv.Itoa(int(r.Port)), ""))
		}
	} else {
		addrs, err := n.o.Resolver.LookupNetIP(ctx, "ip", n.host)
		if err != nil {
			return nil, fmt.Errorf("discover: addresses of %s: %w", n.host, err)
		}
		for _, a := range addrs {
			found = append(found, n.targetAt(a.Unmap().String(), n.port, n.host))
		}
	}
	return sorted(found), nil
}

// sorted sorts targets by URL, and removes duplicates.
func sorted(targets []upstream.Target) []upstream.Target {
	slices.SortFunc(targets, func(a, b upstream.Target) int { return strings.Compare(a.URL, b.URL) })
	return slices.Compact(targets)
}
