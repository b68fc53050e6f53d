package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/internal/console"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

const (
	dialTimeout = 3 * time.Second
	maxDials    = 32  // at once
	maxNodes    = 512 // that are tried
	// Clocks that differ by more are a warning, and by more than the allowance of new certificates
	// a problem.
	maxSkew, maxAllowance = 2 * time.Second, 5 * time.Minute
)

func certificates(_ context.Context, o *Options) (lines []Line) {
	for _, dir := range o.TLSDirs {
		held, err := tlsconf.Inspect(dir)
		if err != nil {
			lines = append(lines, ok(dir, "%v", err).but(Problem, "give a folder made by `tandem ca`"))
			continue
		}
		for _, h := range held {
			lines = append(lines, certificate(h, o.Now))
		}
	}
	return lines
}

func certificate(h tlsconf.Held, now time.Time) Line {
	left := h.NotAfter.Sub(now)
	role := string(h.Role)
	switch {
	case h.Authority:
		role = "authority"
	case role == "":
		role = "no role"
	}
	l := ok(h.Folder, "%s, until %s (%d days)", strings.TrimSpace(role+" "+h.Name), h.NotAfter.UTC().Format(time.DateOnly), int(left.Hours()/24))
	renew := "`tandem ca renew DIR` issues a new one; running processes take the copied folder"
	if h.Authority {
		renew = "a new authority needs new certificates for all nodes: `tandem ca`"
	}
	switch {
	case h.Err != nil:
		return ok(h.Folder, "%v", h.Err).but(Problem, "copy the folder again, or issue it again by `tandem ca`")
	case left < 0:
		return l.but(Problem, "it has expired: "+renew)
	case now.Before(h.NotBefore):
		return l.but(Problem, fmt.Sprintf("it is valid from %s on: check this machine's clock", h.NotBefore.UTC().Format(time.RFC3339)))
	case left < tlsconf.ExpiryWarning:
		return l.but(Warning, renew)
	case h.Exposed:
		return l.but(Warning, "other users can read its key: chmod 600 the files")
	case !h.Authority && h.Role == tlsconf.NoRole:
		return l.but(Warning, tlsconf.Reissue)
	}
	return l
}

// fleet asks the gateway for its nodes and dials each.
func fleet(ctx context.Context, o *Options) []Line {
	if o.URL == "" {
		return nil
	}
	client := o.HTTP
	if client == nil {
		client = &http.Client{Timeout: 10 * time.Second}
	}
	c := &console.Client{URL: o.URL, Key: o.Key, HTTP: client}
	var lines []Line
	if l, found := skew(ctx, client, o); found {
		lines = append(lines, l)
	}
	f, err := c.Nodes(ctx)
	switch {
	case errors.Is(err, console.ErrDenied):
		return append(lines, ok("gateway", "%v", err).but(Warning, "give --api-key with operator rights, or ask on the gateway's machine: only operators see nodes"))
	case err != nil:
		return append(lines, ok("gateway", "%v", err).but(Problem, "is the gateway running, and is --url right? `tandem up` starts one"))
	}
	l := ok("gateway", "ready, version %s, nodes: %d", cmp.Or(f.Version, "unknown"), len(f.Nodes))
	if !f.Ready {
		l = ok("gateway", "not ready: %s", f.Reason).but(Problem, "see the nodes below")
	}
	lines = append(lines, l)
	nodes := f.Nodes[:min(len(f.Nodes), maxNodes)]
	found := make([]Line, len(nodes))
	var all sync.WaitGroup
	slots := make(chan struct{}, maxDials)
	for i := range nodes {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			found[i] = node(ctx, &nodes[i], f.Version)
		})
	}
	all.Wait()
	return append(lines, found...)
}

// node dials a node and compares its version with the gateway's.
func node(ctx context.Context, n *console.Node, version string) Line {
	l := ok(n.Role+" "+n.ID, "%s, %s", n.State(), n.RPC)
	if n.Role == "serve" {
		l.Figure = n.State() + ", in the process of the gateway"
		return l
	}
	d := net.Dialer{Timeout: dialTimeout}
	began := time.Now()
	conn, err := d.DialContext(ctx, "tcp", n.RPC)
	if err != nil {
		do := "is its process running, and does a firewall let --rpc-port through? --advertise sets the address"
		if n.State() == "ready" {
			return ok(l.Name, "%s to the gateway, but not reachable from here: %v", n.State(), err).but(Warning, do)
		}
		return ok(l.Name, "%s: %v", n.State(), err).but(Problem, do)
	}
	l.Figure += fmt.Sprintf(", answers in %.1f ms", time.Since(began).Seconds()*1000)
	if err := conn.Close(); err != nil {
		return l.but(Warning, "closing the connection failed: "+err.Error())
	}
	switch {
	case n.State() == "unreachable":
		return l.but(Problem, "it is reachable from here and not from the gateway: certificates of one authority? port 7946 and --rpc-port open between them?")
	case n.State() != "ready":
		return l.but(Warning, "it takes no requests now")
	case n.Version != "" && version != "" && n.Version != version:
		return l.but(Warning, fmt.Sprintf("it has version %s, the gateway %s: finish the upgrade", n.Version, version))
	}
	return l
}

// skew compares this machine's clock with the gateway's.
func skew(ctx context.Context, client *http.Client, o *Options) (Line, bool) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(o.URL, "/")+"/livez", nil)
	if err != nil {
		return Line{}, false
	}
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return Line{}, false
	}
	defer resp.Body.Close()
	took := time.Since(began)
	there, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		return Line{}, false
	}
	off := began.Add(took / 2).Sub(there.Add(time.Second / 2)).Abs() // the header has whole seconds
	l := ok("clock", "within %.1f s of the gateway's", max(off.Seconds(), 0.5))
	switch {
	case off > maxAllowance:
		return ok("clock", "%s from the gateway's", off.Round(time.Second)).but(Problem, "synchronize both machines: new certificates are refused"), true
	case off > maxSkew:
		return l.but(Warning, "synchronize both machines"), true
	}
	return l, true
}
