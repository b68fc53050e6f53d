// Package discover tells a gateway which servers there are: those of a DNS name,
// asked again and again, and those behind a Kubernetes Service, watched.
//
// A source tells the whole list whenever it has changed. Invariant: what cannot
// be learnt changes nothing; a name that does not resolve and an API that does
// not answer leave the servers as they were, since probes know better whether
// they are well.
//
// The package does not look at servers and keeps no connection to them.
package discover

import (
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
)

// resolveEvery is how often names are resolved: Go's resolver does not tell how
// long an answer holds, and cluster DNS has 5 s for names of services.
const resolveEvery = 5 * time.Second

// ErrSpec says that what was given names neither a server nor a source of them.
var ErrSpec = errors.New("discover: bad upstream")

// Options of sources.
type Options struct {
	API       string        // of Kubernetes, such as http://127.0.0.1:8001 for kubectl proxy; empty: the one of the pod
	Every     time.Duration // between two looks at a name; 0: 5 s
	Resolver  Resolver      // nil: the machine's
	Log       *slog.Logger
	tokenFile string // of a pod's service account; tests have their own
}

// Resolver is the part of net.Resolver that sources use.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error)
}

// Parse reads how servers of a role were given:
//
//	http://HOST:PORT, https://…        one server
//	dns:HOST:PORT, dns+https://…       each address of a name
//	srv:NAME, srv+https://NAME         each target of an SRV record
//	k8s:NAMESPACE/SERVICE:PORT, …      each ready endpoint of a Service; PORT is a number or a name
//
// A source is nil where a target is given.
func Parse(spec string, role upstream.Role, bootstrap int, o Options) (upstream.Source, upstream.Target, error) {
	kind, rest, ok := strings.Cut(spec, ":")
	t := upstream.Target{URL: spec, Role: role, Bootstrap: bootstrap}
	if !ok {
		return nil, t, fmt.Errorf("%w: %q: want a URL, or one of dns:HOST:PORT, srv:NAME, k8s:NAMESPACE/SERVICE:PORT", ErrSpec, spec)
	}
	kind, scheme, both := strings.Cut(kind, "+")
	if !both {
		scheme = "http"
	}
	rest = strings.TrimPrefix(rest, "//")
	if kind == "http" || kind == "https" {
		return nil, t, nil
	}
	if scheme != "http" && scheme != "https" {
		return nil, t, fmt.Errorf("%w: %q: want +http or +https", ErrSpec, spec)
	}
	if o.Every == 0 {
		o.Every = resolveEvery
	}
	if o.Resolver == nil {
		o.Resolver = net.DefaultResolver
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	b := base{spec: spec, scheme: scheme, target: t, o: o}
	switch kind {
	case "dns":
		host, port, err := net.SplitHostPort(rest)
		if n, bad := strconv.Atoi(port); err != nil || host == "" || bad != nil || n < 1 || n > 65535 {
			return nil, t, fmt.Errorf("%w: %q: want dns:HOST:PORT", ErrSpec, spec)
		}
		return &names{base: b, host: host, port: port}, t, nil
	case "srv":
		if rest == "" || strings.ContainsAny(rest, ":/ ") {
			return nil, t, fmt.Errorf("%w: %q: want srv:NAME", ErrSpec, spec)
		}
		return &names{base: b, host: rest, srv: true}, t, nil
	case "k8s":
		s, err := newSlices(b, rest)
		return s, t, err
	}
	return nil, t, fmt.Errorf("%w: %q: want a URL, or one of dns:HOST:PORT, srv:NAME, k8s:NAMESPACE/SERVICE:PORT", ErrSpec, spec)
}

// base is what sources have in common.
type base struct {
	spec   string
	scheme string
	target upstream.Target // of which each server has another URL
	o      Options
}

// String implements upstream.Source.
func (b *base) String() string {
	if b.target.Role != upstream.Whole { // the same names may be asked for two roles
		return b.spec + " (" + b.target.Role.String() + ")"
	}
	return b.spec
}

// at is the target of an address; name is what its certificate says, if not that.
func (b *base) at(host, port, name string) upstream.Target {
	t := b.target
	t.URL = (&url.URL{Scheme: b.scheme, Host: net.JoinHostPort(host, port)}).String()
	t.ServerName = name
	return t
}

// names is the addresses of a DNS name.
type names struct {
	base
	host, port string
	srv        bool
}

// Watch implements upstream.Source.
func (n *names) Watch(ctx context.Context, tell func([]upstream.Target)) {
	var last []upstream.Target
	said := ""
	tick := time.NewTicker(n.o.Every)
	defer tick.Stop()
	for {
		now, err := n.look(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if err.Error() != said {
				n.o.Log.Warn("upstreams cannot be found", "source", n.spec, "error", err)
				said = err.Error()
			}
		case !slices.Equal(now, last):
			last, said = now, ""
			tell(now)
		default:
			said = ""
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look resolves the name.
func (n *names) look(ctx context.Context) ([]upstream.Target, error) {
	ctx, cancel := context.WithTimeout(ctx, max(n.o.Every, time.Second))
	defer cancel()
	var found []upstream.Target
	if n.srv {
		_, records, err := n.o.Resolver.LookupSRV(ctx, "", "", n.host)
		if err != nil {
			return nil, fmt.Errorf("discover: SRV record of %s: %w", n.host, err)
		}
		for _, r := range records {
			found = append(found, n.at(strings.TrimSuffix(r.Target, "."), strconv.Itoa(int(r.Port)), ""))
		}
	} else {
		addrs, err := n.o.Resolver.LookupNetIP(ctx, "ip", n.host)
		if err != nil {
			return nil, fmt.Errorf("discover: addresses of %s: %w", n.host, err)
		}
		for _, a := range addrs {
			found = append(found, n.at(a.Unmap().String(), n.port, n.host))
		}
	}
	slices.SortFunc(found, func(a, b upstream.Target) int { return strings.Compare(a.URL, b.URL) })
	return slices.Compact(found), nil
}
