// Package upstream is the gateway's side of OpenAI-compatible servers that are not
// Tandem's: vLLM, SGLang, TGI, llama.cpp and whatever else speaks HTTP/1.1.
//
// Each server is probed, asked for its models and kept behind a circuit breaker;
// a model's servers stand on the routing ring that native nodes stand on. A
// request's own bytes go to the chosen server over a kept connection, and its
// answer comes back piece by piece as it lies in the connection's buffer: the
// JSON of tokens is never parsed. Of a request only the outermost members are
// looked at (scan.go), of an answer only the framing (conn.go).
//
// Invariant: an answer's body ends in io.EOF only where the server ended it, by
// length, last chunk or, where it said neither, its connection; whatever else
// ends it is an error. A connection is kept only behind a whole answer.
//
// The package does not retry, does not know clients, and parses no event.
package upstream

import (
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
	Sources    []Source          // of more of them
	Names      map[string]string // further names of models, by the new one
	Protocol   Protocol          // between prefill and decode servers
	APIKey     string            // sent to servers as a bearer token; empty: none
	TLS        *tls.Config       // towards https servers; nil: the system's authorities
	HealthPath string            // empty: /health
	// StallTimeout: a server whose probes are late for so long loses the requests
	// that nothing was heard of meanwhile; 0: never.
	StallTimeout time.Duration
	Dial         func(ctx context.Context, network, addr string) (net.Conn, error)
	Log          *slog.Logger // nil: discarded
}

// Source tells of servers that come and go.
type Source interface {
	// Watch calls tell with all of them, now and whenever they have changed, until
	// ctx ends.
	Watch(ctx context.Context, tell func([]Target))
	String() string
}

// Any says whether there are servers, or sources of them.
func (o *Options) Any() bool { return len(o.Targets)+len(o.Sources) > 0 }

// Pool is the gateway's servers.
type Pool struct {
	o       Options
	ctx     context.Context
	end     context.CancelFunc
	wg      sync.WaitGroup // keepers
	now     atomic.Pointer[Snapshot]
	mu      sync.Mutex // of the servers
	all     map[string]*Server
	left    []*Server                     // that are gone and may have requests in hand
	told    map[string][]Target           // by each source, by its name
	ends    map[string]context.CancelFunc // of those that are watched
	drained drained
}

// Snapshot is servers and models at one moment. It is not changed afterwards.
type Snapshot struct {
	Servers []*Server // by name
	Models  []*Model  // by name
	// Rest is the servers that do not tell their models, as those of a model
	// without a name; nil: there are none.
	Rest    *Model
	Unknown int // servers that have not been asked for their models yet
	byName  map[string]*Model
}

// Model is the servers of one model.
type Model struct {
	Name    string
	As      string // the servers' own name of it; empty: Name
	Card    []byte // JSON as the first of its servers describes it
	Table   *route.Table
	Servers []*Server // by the table's index; decode servers among them
	Prefill []*Server // likewise
}

// New makes a pool and begins to probe its servers.
func New(o Options) (*Pool, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.HealthPath == "" {
		o.HealthPath = "/health"
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext
	}
	if strings.ContainsFunc(o.APIKey, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("foreign: the key for upstreams has characters that a header cannot carry")
	}
	p := &Pool{o: o, all: map[string]*Server{}, told: map[string][]Target{}, ends: map[string]context.CancelFunc{}, drained: drained{}}
	p.ctx, p.end = context.WithCancel(context.Background())
	p.now.Store(&Snapshot{})
	if err := p.SetTargets(o.Targets); err != nil {
		p.Close()
		return nil, err
	}
	if err := p.SetSources(o.Sources); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// SetSources replaces the sources. Those that stay, by their names, are watched on;
// the servers of those that leave go, as with SetTargets.
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
	for name, end := range p.ends {
		if !next[name] {
			end()
			delete(p.ends, name)
			delete(p.told, name)
		}
	}
	for _, s := range sources {
		if p.ends[s.String()] == nil {
			ctx, end := context.WithCancel(p.ctx)
			p.ends[s.String()] = end
			p.wg.Go(func() { p.watch(ctx, s) })
		}
	}
	return p.update(p.o.Targets)
}

// watch follows a source.
func (p *Pool) watch(ctx context.Context, source Source) {
	source.Watch(ctx, func(targets []Target) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		p.told[source.String()] = targets
		p.o.Log.Info("upstreams found", "source", source.String(), "servers", len(targets))
		if err := p.update(p.o.Targets); err != nil {
			p.o.Log.Warn("upstreams found cannot be used", "source", source.String(), "error", err)
		}
	})
}

// SetTargets replaces the servers that no source tells of. Those that stay keep
// their connections and what is known of them; requests on those that leave run
// to their end.
func (p *Pool) SetTargets(targets []Target) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.update(targets)
}

// update is SetTargets with mu held.
func (p *Pool) update(static []Target) error {
	targets := slices.Clone(static)
	for _, name := range slices.Sorted(maps.Keys(p.told)) {
		targets = append(targets, p.told[name]...)
	}
	if p.ctx.Err() != nil {
		return nil
	}
	next := make(map[string]*Server, len(targets))
	listed := map[string]bool{}
	for i, t := range targets {
		s, err := newServer(p, t)
		if err != nil {
			return err
		}
		if old := p.all[s.Name]; old != nil && old.Role == s.Role {
			s = old
		}
		if next[s.Name] != nil && next[s.Name].Role != s.Role {
			return fmt.Errorf("foreign: upstream %s is given as %s and as %s", s.Name, next[s.Name].Role, s.Role)
		}
		next[s.Name] = s
		listed[s.Name] = listed[s.Name] || i < len(static)
	}
	now := time.Now()
	for name, s := range p.all {
		if next[name] != s {
			p.drained.left(s, now)
			s.stop()
			s.shut()
			p.left = append(p.left, s)
		}
	}
	p.left = slices.DeleteFunc(p.left, func(s *Server) bool { return s.InFlight.Load() == 0 })
	for name, s := range next {
		s.listed = listed[name]
		if p.all[name] != s {
			if p.drained.joined(name, now) {
				s.Drain(true)
				p.o.Log.Warn("upstream is back, and still drained", "upstream", name)
			}
			var ctx context.Context
			ctx, s.stop = context.WithCancel(p.ctx)
			p.wg.Go(func() { s.keep(ctx) })
		}
	}
	p.all, p.o.Targets = next, static
	p.build()
	return nil
}

// rebuild makes a new snapshot.
func (p *Pool) rebuild() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.build()
}

// build is rebuild with mu held.
func (p *Pool) build() {
	n := &Snapshot{byName: map[string]*Model{}}
	for _, s := range p.all {
		n.Servers = append(n.Servers, s)
	}
	slices.SortFunc(n.Servers, func(a, b *Server) int { return strings.Compare(a.Name, b.Name) })
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
		nodes := make([]route.Node, len(m.Servers))
		for i, s := range m.Servers {
			nodes[i].Name = s.Name
		}
		for _, s := range n.Servers {
			if s.Role == Prefill && (s.lists(m.Name) || m.As != "" && s.lists(m.As)) {
				m.Prefill = append(m.Prefill, s)
			}
		}
		ahead := make([]route.Node, len(m.Prefill))
		for i, s := range m.Prefill {
			ahead[i].Name = s.Name
		}
		m.Table = route.New(nodes, ahead)
	}
	p.now.Store(n)
}

// lists says whether the server says that it serves the model, or says nothing.
func (s *Server) lists(model string) bool {
	cards := s.models.Load()
	if cards == nil || len(*cards) == 0 {
		return cards != nil
	}
	return slices.ContainsFunc(*cards, func(c Card) bool { return c.ID == model })
}

// Protocol is what joins prefill and decode servers.
func (p *Pool) Protocol() Protocol { return p.o.Protocol }

// Now is the present servers and models.
func (p *Pool) Now() *Snapshot { return p.now.Load() }

// Close ends probes and every connection.
func (p *Pool) Close() {
	p.mu.Lock() // nothing is started from here on
	p.end()
	p.mu.Unlock()
	p.wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		s.shut()
		s.abortAll()
	}
	for _, s := range p.left {
		s.abortAll()
	}
}

// AbortAll ends every request that servers have in hand.
func (p *Pool) AbortAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.all {
		s.abortAll()
	}
	for _, s := range p.left {
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

// Find is the model of that name; nil: nobody serves it. Without a name it is the
// only one there is.
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

// Meeting says whether there are servers that nobody has heard of yet, neither
// well nor ill.
func (n *Snapshot) Meeting() bool {
	return n.Unknown > 0 && slices.ContainsFunc(n.Servers, func(s *Server) bool { return s.models.Load() == nil && s.why.Load() == nil })
}

// Up returns the number of the model's servers that passed their last probe and are not drained.
func (m *Model) Up() int { return countUp(m.Servers) }

// Up returns the number of all such servers.
func (n *Snapshot) Up() int { return countUp(n.Servers) }

func countUp(servers []*Server) (n int) {
	for _, s := range servers {
		if s.Up() && !s.Draining() {
			n++
		}
	}
	return n
}

// States are what a server can be to its gateway: what its probes say, or not looked
// at yet, or no longer named and with requests still in hand.
var States = []string{"up", "down", "new", "leaving"}

// state is one of States.
func (s *Server) state() string {
	switch {
	case s.up.Load():
		return "up"
	case s.why.Load() == nil:
		return "new"
	}
	return "down"
}

// Count is the number of servers of a role in one of States.
func (p *Pool) Count(role Role, state string) (n int) {
	if state != "leaving" {
		for _, s := range p.Now().Servers {
			if s.Role == role && s.state() == state {
				n++
			}
		}
		return n
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.left {
		if s.Role == role && s.InFlight.Load() > 0 {
			n++
		}
	}
	return n
}

// Breakers is the number of servers whose breaker is in a state: closed, half-open
// or open.
func (n *Snapshot) Breakers(state string) (found int) {
	for _, s := range n.Servers {
		if s.Breaker() == state {
			found++
		}
	}
	return found
}

// Requests is how many requests servers of a role have in hand.
func (n *Snapshot) Requests(role Role) (sum int64) {
	for _, s := range n.Servers {
		if s.Role == role {
			sum += s.InFlight.Load()
		}
	}
	return sum
}

// levels are what is asked of a server, from what is best down to nothing: a
// breaker, a probe and a failure leave a request without candidates only where
// all that is left has failed it.
var levels = [...]func(s *Server, now time.Time) bool{
	func(s *Server, now time.Time) bool {
		return s.up.Load() && int64(now.Sub(s.made)) >= s.openUntil.Load()
	},
	func(s *Server, _ time.Time) bool { return s.up.Load() },
	func(*Server, time.Time) bool { return true },
}

// Look fills the view of the model's servers for a request that some of them
// have failed.
func (m *Model) Look(v *route.View, avoid []*Server) (forced Forced) {
	forced.Server = fill(&v.Decode, m.Servers, avoid)
	forced.Prefill = fill(&v.Prefill, m.Prefill, avoid)
	return forced
}

// Forced says of which servers the breakers are to be passed by.
type Forced struct{ Server, Prefill bool }

// fill writes the servers' states; those of the first level that any reaches are
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
			(*states)[i] = route.State{Usable: usable, Load: int(s.InFlight.Load())}
			any = any || usable
		}
		if any {
			return level > 0
		}
	}
	return false
}

// Check says what is wrong with the pool's own books while no request runs.
func (p *Pool) Check() error {
	for _, s := range p.Now().Servers {
		s.mu.Lock()
		idle, active := len(s.idle), len(s.active)
		for i, c := range s.active {
			if c.bed != i {
				s.mu.Unlock()
				return fmt.Errorf("foreign: %s: a connection is booked at %d and lies at %d", s.Name, c.bed, i)
			}
		}
		s.mu.Unlock()
		if n := s.InFlight.Load(); n < 0 || int(n) > active {
			return fmt.Errorf("foreign: %s: %d requests in flight on %d connections", s.Name, n, active)
		}
		if idle > maxIdle {
			return fmt.Errorf("foreign: %s: %d idle connections, at most %d are kept", s.Name, idle, maxIdle)
		}
	}
	return nil
}
