// Package upstream connects the gateway to OpenAI-compatible servers other than Tandem's nodes:
// vLLM, SGLang, TGI, llama.cpp, and others that speak HTTP/1.1.
//
// Each server is probed, asked for its models, and called through a circuit breaker. The servers of
// a model are on a routing ring, as native nodes are. A request's own bytes are sent to the chosen
// server over a kept connection. Its answer is returned piece by piece as slices of the
// connection's buffer, and the JSON of tokens is never parsed. Of a request only the outermost
// members are read (envelope.go), of an answer only the framing (conn.go).
//
// Invariant: the body of an answer ends in io.EOF only if the server ended it, by its length, by
// the last chunk or, without either, by closing the connection. Any other end is an error. A
// connection is kept only after a complete answer.
//
// The package does not retry, does not know clients, and parses no event.
package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/gateway/route"
)

// Options of a Pool.
type Options struct {
	Targets    []Target
	Sources    []Source          // of further targets
	Names      map[string]string // the servers' names of models, by further names
	Protocol   Protocol          // between prefill and decode servers
	APIKey     string            // sent to servers as a bearer token; empty: none
	TLS        *tls.Config       // of https servers; nil: the system's authorities
	HealthPath string            // empty: /health
	// StallTimeout is the time for which probes of a server are late before its requests without
	// any byte meanwhile are aborted; 0: they never are.
	StallTimeout time.Duration
	Dial         func(ctx context.Context, network, addr string) (net.Conn, error)
	Log          *slog.Logger // nil: discarded
}

// Source discovers targets.
type Source interface {
	// Watch calls update with all targets, at first and after each change, until ctx ends.
	Watch(ctx context.Context, update func([]Target))
	String() string
}

// Any reports whether there are targets or sources.
func (o *Options) Any() bool { return len(o.Targets)+len(o.Sources) > 0 }

// Pool holds the gateway's servers. Make it with New.
type Pool struct {
	o          Options
	ctx        context.Context
	cancel     context.CancelFunc
	wg         sync.WaitGroup // probing goroutines and watched sources
	now        atomic.Pointer[Snapshot]
	mu         sync.Mutex // guards what follows
	all        map[string]*Server
	leaving    []*Server                     // were removed, and may have running requests
	discovered map[string][]Target           // by the name of their source
	sources    map[string]context.CancelFunc // of the watched sources, by name
	drained    drained
}

// Snapshot is the servers and models at one moment. It is immutable.
type Snapshot struct {
	Servers []*Server // sorted by name
	Models  []*Model  // sorted by name
	// Rest has the servers without a list of models, as servers of a model without a name; nil: there
	// are none.
	Rest    *Model
	Unknown int // servers whose models are not known yet
	byName  map[string]*Model
}

// Model is one model and its servers.
type Model struct {
	Name    string
	As      string // the servers' name of it; empty: Name
	Card    []byte // JSON object by which the first of its servers describes it
	Table   *route.Table
	Servers []*Server // by the table's index; decode servers are among them
	Prefill []*Server // by the table's index
}

// New makes a pool and starts to probe its servers.
func New(o Options) (*Pool, error) {
	o.Log, o.HealthPath = cmp.Or(o.Log, slog.New(slog.DiscardHandler)), cmp.Or(o.HealthPath, "/health")
	if o.Dial == nil {
		o.Dial = (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext
	}
	if strings.ContainsFunc(o.APIKey, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("upstream: the key for upstreams has characters that a header cannot carry")
	}
	p := &Pool{o: o, all: map[string]*Server{}, discovered: map[string][]Target{}, sources: map[string]context.CancelFunc{}, drained: drained{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.now.Store(&Snapshot{})
	if err := p.SetSources(o.Sources); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// SetSources replaces the sources. Sources whose names stay are not restarted. Servers of removed
// sources are removed as by SetTargets.
func (p *Pool) SetSources(sources []Source) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return nil
	}
	next := map[string]bool{}
	for _, s := range sources {
		next[s.String()] = true
	}
	for name, cancel := range p.sources {
		if !next[name] {
			cancel()
			delete(p.sources, name)
			delete(p.discovered, name)
		}
	}
	for _, s := range sources {
		if p.sources[s.String()] == nil {
			ctx, cancel := context.WithCancel(p.ctx)
			p.sources[s.String()] = cancel
			p.wg.Go(func() { p.watch(ctx, s) })
		}
	}
	return p.update(p.o.Targets)
}

// watch updates the servers by a source until ctx ends.
func (p *Pool) watch(ctx context.Context, source Source) {
	source.Watch(ctx, func(targets []Target) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		p.discovered[source.String()] = targets
		p.o.Log.Info("upstreams discovered", "source", source.String(), "servers", len(targets))
		if err := p.update(p.o.Targets); err != nil {
			p.o.Log.Warn("cannot use discovered upstreams", "source", source.String(), "error", err)
		}
	})
}

// SetTargets replaces the configured servers. Servers that stay keep their connections and state.
// Requests on removed servers run to their end.
func (p *Pool) SetTargets(targets []Target) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.update(targets)
}

// update is SetTargets. p.mu must be held.
func (p *Pool) update(static []Target) error {
	targets := slices.Clone(static)
	for _, name := range slices.Sorted(maps.Keys(p.discovered)) {
		targets = append(targets, p.discovered[name]...)
	}
	if p.ctx.Err() != nil {
		return nil
	}
	next := make(map[string]*Server, len(targets))
	configured := map[string]bool{}
	for i, t := range targets {
		s, err := newServer(p, t)
		if err != nil {
			return err
		}
		if old := p.all[s.Name]; old != nil && old.Role == s.Role {
			s = old
		}
		if next[s.Name] != nil && next[s.Name].Role != s.Role {
			return fmt.Errorf("upstream: upstream %s is given as %s and as %s", s.Name, next[s.Name].Role, s.Role)
		}
		next[s.Name] = s
		configured[s.Name] = configured[s.Name] || i < len(static)
	}
	now := time.Now()
	for name, s := range p.all {
		if next[name] != s {
			p.drained.removed(s, now)
			s.stop()
			s.close()
			p.leaving = append(p.leaving, s)
		}
	}
	p.leaving = slices.DeleteFunc(p.leaving, func(s *Server) bool { return s.InFlight.Load() == 0 })
	for name, s := range next {
		s.static = configured[name]
		if p.all[name] != s {
			if p.drained.added(name, now) {
				s.Drain(true)
				p.o.Log.Warn("rediscovered upstream stays drained", "upstream", name)
			}
			var ctx context.Context
			ctx, s.stop = context.WithCancel(p.ctx)
			p.wg.Go(func() { s.keepProbing(ctx) })
		}
	}
	p.all, p.o.Targets = next, static
	p.build()
	return nil
}

// rebuild publishes a new snapshot.
func (p *Pool) rebuild() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.build()
}

// build is rebuild. p.mu must be held.
func (p *Pool) build() {
	n := &Snapshot{byName: map[string]*Model{}}
	n.Servers = slices.SortedFunc(maps.Values(p.all), func(a, b *Server) int { return strings.Compare(a.Name, b.Name) })
	for _, s := range n.Servers {
		cards := s.models.Load()
		switch {
		case s.Role == Prefill:
		case cards == nil:
			n.Unknown++
		case len(*cards) == 0:
			if n.Rest == nil {
				n.Rest = new(Model)
			}
			n.Rest.Servers = append(n.Rest.Servers, s)
		default:
			for _, c := range *cards {
				m := n.byName[c.ID]
				if m == nil {
					m = &Model{Name: c.ID, Card: c.Raw}
					n.byName[c.ID] = m
					n.Models = append(n.Models, m)
				}
				m.Servers = append(m.Servers, s)
			}
		}
	}
	for name, of := range p.o.Names {
		if m := n.byName[of]; m != nil && m.As == "" && n.byName[name] == nil {
			card := patch(nil, m.Card, change{name: "id", to: quote(name)})
			alias := &Model{Name: name, As: of, Card: card, Servers: m.Servers}
			n.byName[name] = alias
			n.Models = append(n.Models, alias)
		}
	}
	slices.SortFunc(n.Models, func(a, b *Model) int { return strings.Compare(a.Name, b.Name) })
	tables := n.Models
	if n.Rest != nil {
		tables = append(slices.Clone(tables), n.Rest)
	}
	for _, m := range tables {
		for _, s := range n.Servers {
			if s.Role == Prefill && (s.lists(m.Name) || m.As != "" && s.lists(m.As)) {
				m.Prefill = append(m.Prefill, s)
			}
		}
		m.Table = route.New(nodesOf(m.Servers), nodesOf(m.Prefill))
	}
	p.now.Store(n)
}

// nodesOf returns servers as nodes of a routing table.
func nodesOf(servers []*Server) []route.Node {
	nodes := make([]route.Node, len(servers))
	for i, s := range servers {
		nodes[i].Name = s.Name
	}
	return nodes
}

// lists reports whether the model is in the server's list, or the server has none.
func (s *Server) lists(model string) bool {
	cards := s.models.Load()
	if cards == nil || len(*cards) == 0 {
		return cards != nil
	}
	return slices.ContainsFunc(*cards, func(c Card) bool { return c.ID == model })
}

// Protocol returns how prefill and decode servers are joined.
func (p *Pool) Protocol() Protocol { return p.o.Protocol }

// Now returns the current servers and models.
func (p *Pool) Now() *Snapshot { return p.now.Load() }

// Close ends probes and closes every connection.
func (p *Pool) Close() {
	p.mu.Lock() // no goroutine is started from here on
	p.cancel()
	p.mu.Unlock()
	p.wg.Wait()
	p.mu.Lock()
	for _, s := range p.all {
		s.close()
	}
	p.mu.Unlock()
	p.AbortAll()
}

// AbortAll ends every request.
func (p *Pool) AbortAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		s.abortAll()
	}
	for _, s := range p.leaving {
		s.abortAll()
	}
}

// authorize appends the header with the servers' key, if there is one.
func (p *Pool) authorize(head []byte) []byte {
	if p.o.APIKey == "" {
		return head
	}
	head = append(head, "Authorization: Bearer "...)
	return append(append(head, p.o.APIKey...), "\r\n"...)
}

// Find returns the model of that name, or nil if no server has it. Without a name it returns the
// only model, if there is only one.
func (n *Snapshot) Find(name string) *Model {
	if name == "" {
		if len(n.Models) == 1 && n.Rest == nil {
			return n.Models[0]
		}
		if len(n.Models) == 0 {
			return n.Rest
		}
		return nil
	}
	if m := n.byName[name]; m != nil {
		return m
	}
	return n.Rest
}

// Probing reports whether there are servers whose first probe has not ended.
func (n *Snapshot) Probing() bool {
	return n.Unknown > 0 && slices.ContainsFunc(n.Servers, func(s *Server) bool { return s.models.Load() == nil && s.why.Load() == nil })
}

// Up returns the number of the model's servers that passed their last probe and are not drained.
func (m *Model) Up() int { return count(m.Servers, (*Server).usable) }

// Up returns the number of all such servers.
func (n *Snapshot) Up() int { return count(n.Servers, (*Server).usable) }

func (s *Server) usable() bool { return s.Up() && !s.Draining() }

// count returns the number of servers for which f is true.
func count(servers []*Server, f func(*Server) bool) (n int) {
	for _, s := range servers {
		if f(s) {
			n++
		}
	}
	return n
}

// States are the states of a server: by its last probes, not probed yet, or removed while requests
// still run on it.
var States = []string{"up", "down", "new", "leaving"}

// state returns the server's state, which is not leaving.
func (s *Server) state() string {
	switch {
	case s.up.Load():
		return "up"
	case s.why.Load() == nil:
		return "new"
	}
	return "down"
}

// Count returns the number of servers of a role in one of States.
func (p *Pool) Count(role Role, state string) int {
	if state != "leaving" {
		return count(p.Now().Servers, func(s *Server) bool { return s.Role == role && s.state() == state })
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return count(p.leaving, func(s *Server) bool { return s.Role == role && s.InFlight.Load() > 0 })
}

// Breakers returns the number of servers whose breaker is in a state: closed, half-open or open.
func (n *Snapshot) Breakers(state string) int {
	return count(n.Servers, func(s *Server) bool { return s.Breaker() == state })
}

// Requests returns the number of requests that run on servers of a role.
func (n *Snapshot) Requests(role Role) (sum int64) {
	for _, s := range n.Servers {
		if s.Role == role {
			sum += s.InFlight.Load()
		}
	}
	return sum
}

// levels are what a server has to fulfil, from best to worst. Breakers and probes alone never leave
// a request without a candidate: only servers that it has tried, and drained ones, are out.
var levels = [...]func(s *Server, now time.Time) bool{
	func(s *Server, now time.Time) bool {
		return s.up.Load() && int64(now.Sub(s.made)) >= s.openUntil.Load()
	},
	func(s *Server, _ time.Time) bool { return s.up.Load() },
	func(*Server, time.Time) bool { return true },
}

// FillView fills the view of the model's servers for a request that is not to go to those of avoid.
func (m *Model) FillView(v *route.View, avoid []*Server) (forced Forced) {
	forced.Server = fill(&v.Decode, m.Servers, avoid)
	forced.Prefill = fill(&v.Prefill, m.Prefill, avoid)
	return forced
}

// Forced reports for which kind of servers the breakers are ignored, because no closed one is left.
type Forced struct{ Server, Prefill bool }

// fill writes the servers' states. The servers of the first level that any server reaches are
// usable.
func fill(states *[]route.State, servers, avoid []*Server) (forced bool) {
	if cap(*states) < len(servers) {
		*states = make([]route.State, len(servers))
	}
	*states = (*states)[:len(servers)]
	now := time.Now()
	for level := range levels {
		any := false
		for i, s := range servers {
			usable := levels[level](s, now) && !s.draining.Load() && !slices.Contains(avoid, s)
			(*states)[i] = route.State{Usable: usable, Load: route.Count(int(s.InFlight.Load()))}
			any = any || usable
		}
		if any {
			return level > 0
		}
	}
	return false
}

// Check verifies the accounts of connections. It is called while no request runs.
func (p *Pool) Check() error {
	for _, s := range p.Now().Servers {
		s.mu.Lock()
		idle, active := len(s.idle), len(s.active)
		for i, c := range s.active {
			if c.index != i {
				s.mu.Unlock()
				return fmt.Errorf("upstream: %s: a connection with index %d is at index %d", s.Name, c.index, i)
			}
		}
		s.mu.Unlock()
		if n := s.InFlight.Load(); n < 0 || int(n) > active {
			return fmt.Errorf("upstream: %s: %d requests in flight on %d connections", s.Name, n, active)
		}
		if idle > maxIdle {
			return fmt.Errorf("upstream: %s: %d idle connections, at most %d are kept", s.Name, idle, maxIdle)
		}
	}
	return nil
}
