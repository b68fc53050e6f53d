// Package cluster says who is there, and carries the news that are not on a
// token's path.
//
// Algorithm: memberlist gossips, encrypted, each node's Member as its metadata; the
// events it brings are gathered for a moment and then handed to OnChange as
// one sorted list. Block events (which KV blocks a node has stored or removed)
// go through NATS, which gateways embed: publishers number their messages, so that
// a subscriber sees every loss and forgets what it knew of that node.
//
// Invariant: nothing here blocks or fails a request. Publishing drops when its
// queue is full, a lost NATS server costs sharper routing only, and a suspected
// member moves nothing that runs; only lists and advice come from this package.
//
// It does not decide who pairs with whom (a Member of another protocol version
// stays in the list, with Mismatch saying why), does not carry load figures
// (package rpc's Stats do), and does not rotate the gossip key.
package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Bounds and their defaults.
const (
	// DefaultCoalesce: changes within this time are one OnChange. A fleet that
	// starts brings dozens of events in a moment.
	DefaultCoalesce = 50 * time.Millisecond
	// DefaultRejoin: how often a node that is alone asks its Join addresses, which
	// may be up later than itself, or behind a network that was cut.
	DefaultRejoin = time.Second
	// wholeLists is how often two members exchange all that they know.
	wholeLists = 10 * time.Second
	// firstRejoin: nodes that start together find each other at the second try;
	// the pause doubles from here to Rejoin.
	firstRejoin = 50 * time.Millisecond
	// streamTimeout bounds a dial to, and an exchange of the full state with,
	// another member: a few kilobytes in all but the largest fleets.
	streamTimeout = 5 * time.Second
)

// What can go wrong.
var (
	ErrKey  = errors.New("cluster: gossip needs a key of 16, 24 or 32 bytes")
	ErrBind = errors.New("cluster: not an address to gossip on")
	ErrLeft = errors.New("cluster: this node has left")
)

// Options says how to take part.
type Options struct {
	Self      Member
	Bind      string   // host:port for gossip, UDP and TCP; port 0: any
	Advertise string   // host:port that others reach it by; empty: as bound
	Join      []string // host:port or DNS names; empty: the first node
	Key       []byte   // shared by the cluster: see tlsconf

	// OnChange gets the list when it changed, on a goroutine of its own, one
	// call at a time. The slice is the receiver's.
	OnChange func([]Member)

	Transport memberlist.Transport // nil: UDP and TCP on Bind
	Coalesce  time.Duration
	Rejoin    time.Duration
	Log       *slog.Logger // nil: discarded
}

// Cluster is this node's part in the gossip.
type Cluster struct {
	o      Options
	list   *memberlist.Memberlist // its nodes change while they are read: see learn
	addr   string
	ctx    context.Context // ends with Leave or Close
	cancel context.CancelFunc
	loops  sync.WaitGroup

	changed chan struct{} // capacity 1: nodes has changed
	renewed chan struct{} // capacity 1: self has changed

	mu     sync.Mutex
	self   Member
	meta   []byte            // encoded self
	nodes  map[string]Member // by ID, as memberlist's events told
	addrs  map[string]string // of nodes: where each gossips
	joined bool
	lost   []string // members that rejoin has not looked after yet; bounded by its pace
	left   bool
}

// New starts to gossip. Join addresses that do not answer yet are asked again in
// the background.
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
	o.Coalesce = or(o.Coalesce, DefaultCoalesce)
	o.Rejoin = or(o.Rejoin, DefaultRejoin)
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

func or(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

func (c *Cluster) config() (*memberlist.Config, error) {
	cfg := memberlist.DefaultLANConfig()
	cfg.Name = c.o.Self.ID
	// What gossip has lost on the way, the exchange of whole lists brings; a fleet
	// is small enough to do that more often than the default of 30 s.
	cfg.PushPullInterval = wholeLists
	cfg.SecretKey = c.o.Key
	cfg.TCPTimeout = streamTimeout
	cfg.Delegate = (*delegate)(c)
	cfg.Events = (*delegate)(c)
	cfg.Transport = c.o.Transport
	cfg.Logger = log.New(logWriter{c.o.Log}, "", 0)
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

// splitIP takes ip:port; gossip resolves no names for itself.
func splitIP(addr string) (ip string, port int, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, fmt.Errorf("%w: %q: %w", ErrBind, addr, err)
	}
	if host == "" {
		host = "0.0.0.0"
	}
	port, err = strconv.Atoi(p)
	if err != nil || port < 0 || port > 65535 || net.ParseIP(host) == nil {
		return "", 0, fmt.Errorf("%w: %q is not an IP address and a port", ErrBind, addr)
	}
	return host, port, nil
}

// Addr is where this node gossips: what others may Join.
func (c *Cluster) Addr() string { return c.addr }

// Members is who is there, this node included, sorted by ID.
func (c *Cluster) Members() []Member {
	c.mu.Lock()
	defer c.mu.Unlock()
	ms := make([]Member, 0, len(c.nodes))
	for _, m := range c.nodes {
		if m.Mismatch == "" {
			m.Mismatch = m.judge(c.self)
		}
		ms = append(ms, m)
	}
	slices.SortFunc(ms, func(a, b Member) int { return strings.Compare(a.ID, b.ID) })
	return ms
}

// Joined answers whether this node has met its cluster: some Join address has
// answered, or there was none to ask.
func (c *Cluster) Joined() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.joined
}

// Update changes what this node says of itself; the ID stays. It returns at once;
// the news spreads in the background, several updates perhaps as one.
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

// Leave tells the others, for at most timeout, and ends this node's part. OnChange
// is not called any more once it returns.
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

// Close ends this node's part without a word, as a crash would.
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

// watch turns events into OnChange.
func (c *Cluster) watch() {
	var last []Member
	for {
		select {
		case <-c.changed:
		case <-c.ctx.Done():
			return
		}
		if !sleep(c.ctx, c.o.Coalesce) {
			return
		}
		ms := c.Members()
		if c.o.OnChange != nil && !slices.Equal(ms, last) {
			last = slices.Clone(ms)
			c.o.OnChange(ms)
		}
	}
}

// renew spreads what Update has set.
func (c *Cluster) renew() {
	for {
		select {
		case <-c.renewed:
		case <-c.ctx.Done():
			return
		}
		if !sleep(c.ctx, c.o.Coalesce) {
			return
		}
		// Its only error is that the broadcast has not gone out within the
		// timeout; it stays queued, so there is nothing to wait for.
		_ = c.list.UpdateNode(time.Nanosecond)
		signal(c.changed) // a changed self may judge others differently
	}
}

// rejoin asks the Join addresses until each has answered, and again whenever
// somebody was lost: a member that others join through may join nobody itself, and
// when it is started again it knows nobody.
func (c *Cluster) rejoin() {
	told, pause, unmet := false, firstRejoin, c.o.Join
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
		if unmet, err = c.meet(unmet); err == nil {
			told = false
		} else if alone && !told && pause >= c.o.Rejoin { // not at once: the others may be starting too
			c.o.Log.Warn("nobody to join yet, asking on", "addresses", c.o.Join, "every", c.o.Rejoin, "error", err)
			told = true
		}
		if !sleep(c.ctx, pause) {
			return
		}
		pause = min(2*pause, c.o.Rejoin)
	}
}

// absent adds to unmet the Join addresses at which nobody but lost members is
// known to be: names are among them, of which only asking tells who is there.
func (c *Cluster) absent(unmet, lost []string) []string {
	there := map[string]bool{}
	c.mu.Lock()
	for id, addr := range c.addrs {
		there[addr] = !slices.Contains(lost, id)
	}
	c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.o.Join), func(addr string) bool { return there[addr] && !slices.Contains(unmet, addr) })
}

// Lost says that the member of this ID may be gone, as the end of a connection to
// it tells before gossip does: one that is started again meanwhile hears at once
// who else there is.
func (c *Cluster) Lost(id string) {
	if len(c.o.Join) == 0 {
		return // rejoin does not run
	}
	c.mu.Lock()
	c.lost = append(c.lost, id)
	c.mu.Unlock()
}

// meet asks each address and returns those that did not answer: two groups that
// each know one of them would otherwise never hear of each other.
func (c *Cluster) meet(addrs []string) (unmet []string, err error) {
	var met []string
	for _, addr := range addrs {
		// DNS and dials in it are bounded by memberlist's own timeout.
		if _, jerr := c.list.Join([]string{addr}); jerr != nil {
			unmet, err = append(unmet, addr), jerr
			continue
		}
		met = append(met, addr)
	}
	if len(met) > 0 {
		c.mu.Lock()
		c.joined = true
		c.mu.Unlock()
		c.o.Log.Info("joined the cluster", "through", met)
	}
	return unmet, err
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sleep answers whether d has passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// delegate is the side of a Cluster that memberlist calls, with its own locks
// held: nothing in it waits.
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
func (d *delegate) NotifyJoin(n *memberlist.Node)   { d.learn(n) }
func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.learn(n) }

func (d *delegate) NotifyLeave(n *memberlist.Node) {
	d.mu.Lock()
	delete(d.nodes, n.Name)
	delete(d.addrs, n.Name)
	d.mu.Unlock()
	(*Cluster)(d).Lost(n.Name)
	signal(d.changed)
}

// learn copies what is used of a node: it is memberlist's, which holds it still
// only while it tells.
func (d *delegate) learn(n *memberlist.Node) {
	m, err := decode(n.Name, bytes.Clone(n.Meta))
	if err != nil {
		m.Mismatch = err.Error()
	}
	d.mu.Lock()
	d.nodes[n.Name], d.addrs[n.Name] = m, n.Address()
	d.mu.Unlock()
	signal(d.changed)
}

// logWriter takes memberlist's lines into slog: at debug, because it speaks of
// every lost packet as an error.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug("gossip", "line", strings.TrimSpace(string(p)))
	return len(p), nil
}
