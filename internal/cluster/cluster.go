// Package cluster provides membership (memberlist) and publishes KV block events (NATS).
// Neither is on a token's path.
//
// Algorithm: memberlist gossips, encrypted, each node's Member as its metadata. Its events
// are collected for a moment and then passed to OnChange as one sorted list. Block events
// (which KV blocks a node has stored or removed) travel through NATS, which gateways embed.
// Publishers number their messages, so that a subscriber detects every loss and drops the
// state of that node.
//
// Invariant: nothing here blocks or fails a request. Publishing drops messages when its
// queue is full, a lost NATS server costs routing precision only, and suspicion alone never
// migrates running requests. The package provides lists and hints.
//
// It does not decide which nodes pair (a Member of another protocol version stays in the
// list, with the reason in Mismatch), does not carry load figures (package rpc's Stats do),
// and does not rotate the gossip key.
package cluster

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Bounds and their defaults.
const (
	// DefaultCoalesce: changes within this time are one OnChange. A fleet that
	// starts causes dozens of events in a moment.
	DefaultCoalesce = 50 * time.Millisecond
	// DefaultRejoin is how often a node that is alone asks its Join addresses, which
	// may start later than the node, or be unreachable for a while.
	DefaultRejoin = time.Second
	// wholeLists is how often two members exchange their whole state.
	wholeLists = 10 * time.Second
	// firstRejoin: nodes that start together find each other at the second try.
	// The pause doubles from here to Rejoin.
	firstRejoin = 50 * time.Millisecond
	// streamTimeout bounds a dial to, and an exchange of the full state with,
	// another member: a few kilobytes in all but the largest fleets.
	streamTimeout = 5 * time.Second
)

// Errors of this package.
var (
	ErrKey  = errors.New("cluster: gossip needs a key of 16, 24 or 32 bytes")
	ErrBind = errors.New("cluster: not an address to gossip on")
	ErrLeft = errors.New("cluster: this node has left")
)

// Options configure a Cluster.
type Options struct {
	Self      Member
	Bind      string   // host:port for gossip, UDP and TCP; port 0: any
	Advertise string   // host:port that others reach it by; empty: as bound
	Join      []string // host:port or DNS names; empty: the first node
	Key       []byte   // shared by the cluster: see tlsconf

	// OnChange is called with the list when it has changed, on a goroutine of its own,
	// one call at a time. The callee owns the slice.
	OnChange func([]Member)

	Transport memberlist.Transport // nil: UDP and TCP on Bind
	Coalesce  time.Duration
	Rejoin    time.Duration
	Log       *slog.Logger // nil: discarded
}

// Cluster is this node's part in the gossip.
type Cluster struct {
	o      Options
	list   *memberlist.Memberlist // its nodes change while they are read: see update
	addr   string
	ctx    context.Context // ends with Leave or Close
	cancel context.CancelFunc
	loops  sync.WaitGroup

	changed chan struct{} // capacity 1: nodes has changed
	renewed chan struct{} // capacity 1: self has changed

	mu       sync.Mutex
	self     Member
	meta     []byte            // encoded self
	nodes    map[string]Member // by ID, from memberlist's events
	addrs    map[string]string // gossip addresses of nodes, by ID
	joined   bool
	arrivals uint64   // how often a member was added, or has changed and is ready
	lost     []string // lost members that rejoin has not handled yet; bounded by its pace
	left     bool
}

// New starts to gossip. Join addresses that do not answer are retried in the background.
func New(o Options) (*Cluster, error) {
	if n := len(o.Key); n != 16 && n != 24 && n != 32 {
		return nil, fmt.Errorf("%w: it has %d", ErrKey, n)
	}
	meta, err := o.Self.encode()
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Coalesce = cmp.Or(o.Coalesce, DefaultCoalesce)
	o.Rejoin = cmp.Or(o.Rejoin, DefaultRejoin)
	c := &Cluster{
		o: o, self: o.Self, meta: meta,
		nodes:   map[string]Member{},
		addrs:   map[string]string{},
		changed: make(chan struct{}, 1),
		renewed: make(chan struct{}, 1),
		joined:  len(o.Join) == 0,
	}
	cfg, err := c.config()
	if err != nil {
		return nil, err
	}
	if c.list, err = memberlist.Create(cfg); err != nil {
		return nil, fmt.Errorf("cluster: gossiping on %s: %w", o.Bind, err)
	}
	c.mu.Lock()
	c.addr = c.addrs[o.Self.ID]
	c.mu.Unlock()
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.loops.Go(c.watch)
	c.loops.Go(c.renew)
	if len(o.Join) > 0 {
		c.loops.Go(c.rejoin)
	}
	return c, nil
}

func (c *Cluster) config() (*memberlist.Config, error) {
	cfg := memberlist.DefaultLANConfig()
	cfg.Name = c.o.Self.ID
	// The exchange of whole states repairs lost gossip. A fleet is small enough to do it
	// more often than the default of 30 s.
	cfg.PushPullInterval = wholeLists
	cfg.SecretKey = c.o.Key
	cfg.TCPTimeout = streamTimeout
	cfg.Delegate = (*delegate)(c)
	cfg.Events = (*delegate)(c)
	cfg.Transport = c.o.Transport
	cfg.Logger = slog.NewLogLogger(c.o.Log.Handler(), slog.LevelDebug) // memberlist reports every lost packet as an error
	if c.o.Transport == nil {
		host, port, err := splitIP(c.o.Bind)
		if err != nil {
			return nil, err
		}
		cfg.BindAddr, cfg.BindPort, cfg.AdvertisePort = host, port, port
	}
	if c.o.Advertise != "" {
		host, port, err := splitIP(c.o.Advertise)
		if err != nil {
			return nil, err
		}
		cfg.AdvertiseAddr, cfg.AdvertisePort = host, port
	}
	return cfg, nil
}

// splitIP parses ip:port; gossip does not resolve names of its own addresses.
func splitIP(addr string) (ip string, port int, err error) {
	if strings.HasPrefix(addr, ":") {
		addr = "0.0.0.0" + addr
	}
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return "", 0, fmt.Errorf("%w: %q is not an IP address and a port", ErrBind, addr)
	}
	return a.Addr().String(), int(a.Port()), nil
}

// Addr returns the address on which this node gossips, for the Join of others.
func (c *Cluster) Addr() string { return c.addr }

// Members returns the members, this node included, sorted by ID. Of the members at one address,
// only the last started is among them.
func (c *Cluster) Members() []Member {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := superseded(c.nodes, func(id string) string { return c.addrs[id] })
	maps.Copy(ended, superseded(c.nodes, func(id string) string { return c.nodes[id].RPC }))
	ms := make([]Member, 0, len(c.nodes))
	for id, m := range c.nodes {
		if ended[id] {
			continue
		}
		if m.Mismatch == "" {
			m.Mismatch = m.judge(c.self)
		}
		ms = append(ms, m)
	}
	slices.SortFunc(ms, func(a, b Member) int { return strings.Compare(a.ID, b.ID) })
	return ms
}

// Joined reports whether this node has joined its cluster: a Join address has
// answered, or there is none.
func (c *Cluster) Joined() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.joined
}

// Update replaces this node's Member, whose ID must not change. It returns at once. The
// change is gossiped in the background; several updates may become one.
func (c *Cluster) Update(m Member) error {
	meta, err := m.encode()
	if err != nil {
		return err
	}
	if c.ctx.Err() != nil {
		return ErrLeft
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.ID != c.self.ID {
		return fmt.Errorf("%w: its ID cannot change from %q to %q", ErrBadMeta, c.self.ID, m.ID)
	}
	c.self, c.meta = m, meta
	signal(c.renewed)
	return nil
}

// Leave announces the departure, for at most timeout, and stops gossiping. OnChange
// is not called after it returns.
func (c *Cluster) Leave(timeout time.Duration) error {
	c.mu.Lock()
	again := c.left
	c.left = true
	c.mu.Unlock()
	if again {
		return ErrLeft
	}
	c.cancel()
	err := c.list.Leave(timeout)
	return errors.Join(err, c.end())
}

// Close stops gossiping without an announcement, as a crash would.
func (c *Cluster) Close() error {
	c.mu.Lock()
	c.left = true
	c.mu.Unlock()
	return c.end()
}

func (c *Cluster) end() error {
	c.cancel()
	err := c.list.Shutdown()
	c.loops.Wait()
	return err
}

// watch calls OnChange after events.
func (c *Cluster) watch() {
	var last []Member
	c.coalesce(c.changed, func() {
		ms := c.Members()
		if c.o.OnChange != nil && !slices.Equal(ms, last) {
			last = slices.Clone(ms)
			c.o.OnChange(ms)
		}
	})
}

// renew gossips the Member that Update has set.
func (c *Cluster) renew() {
	c.coalesce(c.renewed, func() {
		// Its only error is that the broadcast was not sent within the timeout.
		// It stays queued, so there is nothing to wait for.
		_ = c.list.UpdateNode(time.Nanosecond)
		signal(c.changed) // the Mismatch of others depends on this node
	})
}

// coalesce calls f Options.Coalesce after a signal, once for all signals until then.
func (c *Cluster) coalesce(signals <-chan struct{}, f func()) {
	for {
		select {
		case <-signals:
		case <-c.ctx.Done():
			return
		}
		if !sleep(c.ctx, c.o.Coalesce, nil) {
			return
		}
		f()
	}
}

// rejoin asks the Join addresses until each has answered, and again whenever a member was
// lost: a member that others join through may have no Join addresses itself, so that it
// knows no other member after a restart.
func (c *Cluster) rejoin() {
	warned, missed, pause, unmet := false, false, firstRejoin, c.o.Join
	before := true // alone in the round before: a cluster that stops leaves its last member alone for a moment
	for {
		c.mu.Lock()
		alone, lost := len(c.nodes) < 2, c.lost
		c.lost = nil
		c.mu.Unlock()
		switch {
		case alone:
			unmet = c.o.Join
		case lost != nil:
			unmet = c.absent(unmet, lost)
		}
		var err error
		if unmet, err = c.meet(unmet, missed); err == nil {
			warned, missed = false, false
		} else if alone && before && !warned && pause >= c.o.Rejoin { // not at once: the others may be starting too
			c.o.Log.Warn("no member to join yet, retrying", "addresses", c.o.Join, "every", c.o.Rejoin, "error", err)
			warned = true
		}
		missed = missed || alone && err != nil
		before = alone
		if !sleep(c.ctx, pause, nil) {
			return
		}
		pause = min(2*pause, c.o.Rejoin)
	}
}

// absent returns unmet with the Join addresses at which no member is known, lost members
// aside. Host names are among them, because only a join shows which members they have.
func (c *Cluster) absent(unmet, lost []string) []string {
	there := map[string]bool{}
	c.mu.Lock()
	for id, addr := range c.addrs {
		there[addr] = there[addr] || !slices.Contains(lost, id)
	}
	c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.o.Join), func(addr string) bool { return there[addr] && !slices.Contains(unmet, addr) })
}

// Lost reports that the member with this ID may be gone. The end of a connection to a
// member shows it earlier than gossip, so that a restarted member is joined at once.
func (c *Cluster) Lost(id string) {
	if len(c.o.Join) == 0 {
		return // rejoin does not run
	}
	c.mu.Lock()
	c.lost = append(c.lost, id)
	c.mu.Unlock()
}

// meet joins through each address and returns those that did not answer. It does not stop
// at the first, because two groups that each know one address would never meet. It logs a
// success that found a member, or that follows failures of a node that was alone (missed).
func (c *Cluster) meet(addrs []string, missed bool) (unmet []string, err error) {
	var met []string
	c.mu.Lock()
	before := c.arrivals
	c.mu.Unlock()
	for _, addr := range addrs {
		// memberlist's own timeout bounds its DNS look-ups and dials.
		if _, jerr := c.list.Join([]string{addr}); jerr != nil {
			unmet, err = append(unmet, addr), joinError(jerr)
			continue
		}
		met = append(met, addr)
	}
	if len(met) > 0 {
		c.mu.Lock()
		arrived := c.arrivals > before || missed
		found := !c.joined || arrived
		c.joined = true
		c.mu.Unlock()
		switch {
		case found && !arrived && c.list.NumMembers() < 2: // a service's name may have the address of its first member alone
			c.o.Log.Info("--join leads to this process itself: no other member yet", "through", met)
		case found: // a member that is about to leave still answers
			c.o.Log.Info("joined the cluster", "through", met)
		}
	}
	return unmet, err
}

// joinError returns the errors of memberlist, which writes them as a list of several lines, as one
// line.
func joinError(err error) error {
	_, list, ok := strings.Cut(err.Error(), " occurred:\n\t* ")
	if !ok {
		return err
	}
	return errors.New(strings.ReplaceAll(strings.TrimSpace(list), "\n\t* ", "; "))
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sleep waits for d, or until wake. It returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-wake:
	case <-ctx.Done():
		return false
	}
	return true
}

// delegate has the methods of a Cluster that memberlist calls, with memberlist's locks
// held. None of them blocks.
type delegate Cluster

func (d *delegate) NodeMeta(int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.meta
}

func (d *delegate) NotifyMsg([]byte)                {}
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (d *delegate) LocalState(bool) []byte          { return nil }
func (d *delegate) MergeRemoteState([]byte, bool)   {}
func (d *delegate) NotifyJoin(n *memberlist.Node)   { d.update(n) }
func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.update(n) }

func (d *delegate) NotifyLeave(n *memberlist.Node) {
	d.mu.Lock()
	delete(d.nodes, n.Name)
	delete(d.addrs, n.Name)
	d.mu.Unlock()
	(*Cluster)(d).Lost(n.Name)
	signal(d.changed)
}

// update copies the used fields of a node, which memberlist owns and may change after the
// call.
func (d *delegate) update(n *memberlist.Node) {
	m, err := decode(n.Name, bytes.Clone(n.Meta))
	if err != nil {
		m.Mismatch = err.Error()
	}
	d.mu.Lock()
	if old, there := d.nodes[n.Name]; !there || old != m && m.Ready {
		d.arrivals++
	}
	d.nodes[n.Name], d.addrs[n.Name] = m, n.Address()
	d.mu.Unlock()
	signal(d.changed)
}
