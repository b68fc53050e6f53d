package nodes

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// The plain form of a view: every node is read for every request. A RouteView must equal it.

func plainLook(s *Snapshot, q Query) (v route.View) {
	v.Decode, v.Prefill = make([]route.State, len(s.Decode)), make([]route.State, len(s.Prefill))
	var held []int32
	if len(q.Hashes) > 0 {
		held = s.blocks.look(nil, q.Hashes, q.BlockTokens, q.Groups)
	}
	plainFill(s, s.Decode, v.Decode, held, &q)
	prompt := q
	prompt.Grammar, prompt.Vectors = 0, 0
	plainFill(s, s.Prefill, v.Prefill, held, &prompt)
	of := func(n *Node) bool { return n.Class() == "" || n.Class() == q.Class }
	for i, n := range s.Decode {
		if q.Class != "" && v.Decode[i].Usable && of(n) && n.connected() {
			for i, n := range s.Decode {
				v.Decode[i].Usable = v.Decode[i].Usable && of(n)
			}
			break
		}
	}
	return v
}

func plainFill(s *Snapshot, nodes []*Node, states []route.State, held []int32, q *Query) {
	any := false
	for i, n := range nodes {
		st := &states[i]
		l := n.link.Load()
		h := l.last()
		st.Usable = l != nil && !n.stalled.Load() && !n.quiet.Load() && l.conn.Open() && n.takesFor(l, h, q) && !slices.Contains(q.Avoid, n)
		st.Local = n.local.Load()
		sent := route.Sent{Requests: int(n.inFlight.Load()), Blocks: l.taken()}
		n.queued.sent(&sent)
		st.Merge(&h.Report, sent, q.Answer)
		if at, ok := s.blocks.slots[n.Member().ID]; ok && at < len(held) {
			st.Held = int32(min(int(held[at])*q.BlockTokens, q.Tokens))
		}
		if s.Whole() && q.Vectors != 0 && n.Member().Role != "prefill" && h.maxRunning > 0 && int(st.Load) >= h.maxRunning {
			st.Usable = false
		}
		any = any || st.Usable
	}
	for level := 0; !any && level < len(levels); level++ {
		for i, n := range nodes {
			states[i].Usable = n.fits(q) && levels[level](n, q.Avoid)
			any = any || states[i].Usable
		}
	}
}

// changing is a fleet whose nodes are changed at random.
type changing struct {
	*testing.T
	*rand.Rand
	f      *Fleet // of the connections
	net    *rpc.Network
	log    changes
	blocks *Blocks
	nodes  [2][]*Node // decode, prefill
	prompt []kvcache.Hash

	outlined int // decisions by an outline
}

const (
	changingDecode, changingPrefill = 12, 7
)

func newChanging(t *testing.T, seed uint64) *changing {
	c := &changing{T: t, Rand: rand.New(rand.NewPCG(seed, 10)), net: rpc.NewNetwork(), blocks: NewBlocks()}
	c.f = New(Options{Meters: metrics.New(metrics.Gateway, ""), RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: c.net.Dial, BackoffMin: time.Millisecond, CloseLinger: time.Millisecond}})
	t.Cleanup(c.f.Close)
	for range 12 {
		c.prompt = append(c.prompt, kvcache.Hash(c.Uint64()))
	}
	for role, n := range []int{changingDecode, changingPrefill} {
		for i := range n {
			name := fmt.Sprintf("%d-%d", role, i)
			if name == "1-0" { // shares the connection of a decode node
				name = "0-0"
			}
			node := &Node{Name: name, breaker: breaker.New(breaker.Options{Failures: 1, Pause: time.Hour}), changes: &c.log, place: nowhere}
			node.setMember(c.member(name))
			c.nodes[role] = append(c.nodes[role], node)
			if role == 1 && i == 0 {
				continue
			}
			hello := &nodepb.Hello{NodeId: name, Fingerprint: c.Uint64N(3), Grammar: c.Uint32N(3), Vectors: c.Uint32N(3)}
			peer, err := nodestest.Start(c.net, name, nodestest.Options{Hello: hello, Bundle: &nodepb.Bundle{}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(peer.Stop)
		}
	}
	return c
}

func (c *changing) member(name string) *Member {
	return &Member{ID: name, RPC: name, Role: []string{"decode", "prefill"}[c.IntN(2)], Fingerprint: c.Uint64N(3), Class: []string{"", "a", "b"}[c.IntN(3)], Ready: c.IntN(9) > 0, Draining: c.IntN(9) == 0}
}

// snapshot returns a snapshot of most of the nodes, whose log begins.
func (c *changing) snapshot() *Snapshot {
	s := &Snapshot{blocks: c.blocks, changes: &c.log}
	some := func(nodes []*Node) (kept []*Node) {
		for _, n := range nodes {
			if c.IntN(8) > 0 {
				kept = append(kept, n)
			}
		}
		return kept
	}
	s.Decode, s.Prefill = some(c.nodes[0]), some(c.nodes[1])
	s.Table = route.New(ringOf(s.Decode), ringOf(s.Prefill))
	s.whole = sync.OnceValue(s.makeWhole)
	c.log.begin(s)
	return s
}

func (c *changing) heartbeat(r *rand.Rand) *heartbeat {
	n := func(most int) int { return r.IntN(most) }
	h := &heartbeat{number: 1, maxRunning: n(3) * 10, draining: n(9) == 0, Report: route.Report{Running: n(9), Waiting: n(9), Held: n(9), Queued: n(9000), ShortFirst: n(2) == 0, Rate: float64(n(9000)), StepTokens: n(2048)}}
	for i := range h.Lengths {
		h.Lengths[i] = n(5000)
	}
	if total := r.Int32N(100); n(2) == 0 {
		h.Memory = route.Memory{Total: total, Free: total / 2, Cached: total / 3, Reserved: r.Int32N(9)}
	}
	for range n(3) {
		h.adapters = append(h.adapters, Adapter{Digest: r.Uint64N(3)})
	}
	return h
}

// change changes one value of a node. r is the caller's.
func (c *changing) change(r *rand.Rand, n *Node) {
	l := n.link.Load()
	withLink := func(f func()) {
		if l != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			f()
		}
	}
	switch r.IntN(12) {
	case 0:
		n.AddInFlight(int64(r.IntN(9)))
	case 1:
		n.AddInFlight(-n.InFlight())
	case 2:
		n.SetLocal(r.IntN(2) == 0)
	case 3:
		n.Computes(r.IntN(2000))
	case 4:
		n.setStalled(r.IntN(4) == 0)
	case 5:
		n.setQuiet(r.IntN(4) == 0)
	case 6:
		withLink(func() { l.setHeart(c.heartbeat(r)) })
	case 7:
		withLink(func() { l.addBlocks(r.IntN(9) - 4) })
	case 8:
		withLink(func() { l.setBlocks(r.IntN(9)) })
	case 9:
		if l == nil {
			return
		}
		l.conn.Close(errors.New("test")) // Fleet.Closed follows
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Microsecond) {
			l.mu.Lock()
			closed := l.closed
			l.mu.Unlock()
			if closed {
				return
			}
			if time.Now().After(end) {
				c.Error("the connection does not end")
				return
			}
		}
	case 10:
		if l != nil && !l.conn.Open() {
			n.dropLink(l)
		}
	case 11:
		if l != nil && l.conn.Open() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if conn, err := c.f.pool.Get(ctx, n.Name); err == nil {
			if l := c.f.linkOf(conn); l != nil {
				l.attach(n)
			}
		}
	}
}

func (c *changing) any(r *rand.Rand) *Node {
	if r.IntN(3) == 0 {
		return c.nodes[1][r.IntN(changingPrefill)]
	}
	return c.nodes[0][r.IntN(changingDecode)]
}

func (c *changing) publish() {
	n := c.any(c.Rand)
	e := cluster.BlockEvent{Node: n.Member().ID}
	for _, h := range c.prompt[:c.IntN(len(c.prompt)+1)] {
		e.Stored = append(e.Stored, cluster.Stored{Hash: uint64(h)})
	}
	if c.IntN(3) == 0 {
		c.blocks.Forget(e.Node, "test")
	}
	c.blocks.Blocks(e)
}

func (c *changing) query() Query {
	q := Query{Fingerprint: c.Uint64N(3), Answer: c.IntN(3) * 4, BlockTokens: 16, Tokens: 100}
	if c.IntN(3) > 0 {
		q.Hashes = c.prompt
	}
	switch c.IntN(7) {
	case 0:
		q.Grammar = c.Uint32N(3)
	case 1:
		q.Adapter = c.Uint64N(3)
	case 2:
		for range 1 + c.IntN(4) {
			q.Avoid = append(q.Avoid, c.nodes[0][c.IntN(changingDecode)])
		}
	case 3:
		q.Class = "a"
	case 4:
		q.Vectors = c.Uint32N(3)
	}
	return q
}

// equal compares a view with the plain form.
func (c *changing) equal(when string, v *RouteView, q Query) {
	c.Helper()
	v.Look(q)
	if v.Outline != nil {
		c.outlined++
		c.sameDecision(when, v, q)
	}
	v.Fill()
	want := plainLook(v.s, q)
	for role, got := range [][]route.State{v.Decode, v.Prefill} {
		plain := [][]route.State{want.Decode, want.Prefill}[role]
		for i := range got {
			if !reflect.DeepEqual(got[i], plain[i]) {
				c.Fatalf("%s: role %d, node %d: %+v, want %+v, for %+v", when, role, i, got[i], plain[i], q)
			}
		}
	}
}

// sameDecision compares a decision by the outline of a view with one without it.
func (c *changing) sameDecision(when string, v *RouteView, q Query) {
	c.Helper()
	plain := v.View
	plain.Outline, plain.Decode, plain.Prefill = nil, slices.Clone(v.Decode), slices.Clone(v.Prefill)
	plain.Fill()
	r := route.Request{Key: kvcache.Hash(c.Uint64()), Uncached: q.Tokens, MinRemote: 1 + c.IntN(2)*100, Draw: c.Uint64(), Shared: c.IntN(2) == 0}
	got, want := v.s.Table.Pick(r, v.View, nil), v.s.Table.Pick(r, plain, nil)
	if !reflect.DeepEqual(got, want) {
		c.Fatalf("%s: %+v, without an outline %+v, for %+v", when, got, want, q)
	}
}

// Views equal the plain form after any changes, however old they are, over changes of the
// membership.
func TestViewsAreThePlainOnes(t *testing.T) {
	for seed := range uint64(8) {
		c := newChanging(t, seed)
		var held []*RouteView // of several snapshots, used now and then
		s, whole := c.snapshot(), 0
		for step := range 1500 {
			c.change(c.Rand, c.any(c.Rand))
			if c.IntN(20) == 0 {
				c.publish()
			}
			if c.IntN(200) == 0 {
				for _, nodes := range c.nodes {
					for _, n := range nodes {
						n.setMember(c.member(n.Name))
					}
				}
				s = c.snapshot()
			}
			if n := c.any(c.Rand); c.IntN(100) == 0 { // opens it
				_ = n.breaker.Do(func() error { return errors.New("test") })
			}
			if c.IntN(3) > 0 {
				continue
			}
			when := fmt.Sprintf("seed %d, step %d", seed, step)
			v, q := s.View(), c.query()
			if c.IntN(4) == 0 { // both kinds read one log
				v.Release()
				v, whole = s.whole().View(), whole+1
			}
			c.equal(when, v, q)
			if step%2 == 0 { // the same query again, with an outline
				c.change(c.Rand, c.any(c.Rand))
				c.equal(when, v, q)
			}
			if len(held) < 6 {
				held = append(held, v)
			} else {
				v.Release()
				i := c.IntN(len(held))
				c.equal(when+", a view that was kept", held[i], c.query())
				if c.IntN(4) == 0 {
					held[i].Release()
					held = slices.Delete(held, i, i+1)
				}
			}
		}
		if c.outlined < 20 || whole < 50 {
			t.Errorf("seed %d: %d decisions by an outline, %d views of all nodes", seed, c.outlined, whole)
		}
		for _, n := range slices.Concat(c.nodes[0], c.nodes[1]) {
			if l := n.link.Load(); l != nil && !slices.Contains(l.nodes, n) {
				t.Errorf("seed %d: a connection does not know its node %s", seed, n.Name)
			}
		}
	}
}

// A change is in every view that is taken after it, while others change nodes and take views; when
// all are done, views equal the plain form.
func TestViewsWhileNodesChange(t *testing.T) {
	for seed := range uint64(3) {
		c := newChanging(t, seed)
		s := &Snapshot{blocks: c.blocks, changes: &c.log, Decode: c.nodes[0], Prefill: c.nodes[1]}
		s.Table = route.New(ringOf(s.Decode), ringOf(s.Prefill))
		c.log.begin(s)
		var wg sync.WaitGroup
		for g := range 4 { // change nodes of their own
			r := rand.New(rand.NewPCG(seed, uint64(g)))
			wg.Go(func() {
				for range 400 {
					c.change(r, c.nodes[0][g*2+r.IntN(2)])
					c.change(r, c.nodes[1][g])
				}
			})
		}
		for g := range 3 { // look at a count that they alone change
			n := c.nodes[0][8+g]
			n.AddInFlight(1 << 20)
			wg.Go(func() {
				for i := range 2000 {
					n.AddInFlight(1)
					v := s.View()
					v.Look(Query{Fingerprint: uint64(i % 3), Answer: i % 2, Tokens: 10})
					if got, want := v.Decode[8+g].Load, int32(1<<20+i+1); got != want {
						t.Errorf("load %d, want %d", got, want)
						return
					}
					s.Table.Pick(route.Request{Key: kvcache.Hash(i)}, v.View, nil)
					v.Release()
				}
			})
		}
		wg.Wait()
		for range 30 {
			v := s.View()
			c.equal(fmt.Sprintf("seed %d", seed), v, c.query())
			v.Release()
		}
	}
}

func ringOf(nodes []*Node) (ring []route.Node) {
	for _, n := range nodes {
		ring = append(ring, route.Node{Name: n.Name})
	}
	return ring
}

// A decision whose node has lost its connection, which nobody has logged, is found, and the next
// view does not have the node.
func TestClosedNodeIsFound(t *testing.T) {
	c := newChanging(t, 1)
	s := &Snapshot{blocks: c.blocks, changes: &c.log, Decode: c.nodes[0], Prefill: c.nodes[1], Table: route.New(ringOf(c.nodes[0]), ringOf(c.nodes[1]))}
	for _, n := range slices.Concat(s.Decode, s.Prefill) {
		n.setMember(&Member{ID: n.Name, RPC: n.Name, Ready: true})
		conn, err := c.f.pool.Get(t.Context(), n.Name)
		if err != nil {
			t.Fatal(err)
		}
		l := c.f.linkOf(conn)
		l.attach(n)
		l.mu.Lock()
		l.nodes = nil // so that the end is not logged
		l.mu.Unlock()
	}
	c.log.begin(s)
	v := s.View()
	v.Look(Query{})
	decode, prefill := route.Decision{Decode: 3}, route.Decision{Decode: -1, Prefill: []int{1, 4}}
	for _, d := range []route.Decision{decode, prefill} {
		if v.Closed(d) {
			t.Fatalf("%+v: closed", d)
		}
	}
	s.Decode[3].link.Load().conn.Close(nil)
	s.Prefill[4].link.Load().conn.Close(nil)
	if !v.Decode[3].Usable || !v.Closed(decode) || !v.Closed(prefill) {
		t.Fatalf("not found: %t %t", v.Closed(decode), v.Closed(prefill))
	}
	if v.Look(Query{}); v.Decode[3].Usable || v.Prefill[4].Usable || !v.Decode[2].Usable || v.Closed(decode) || v.Closed(prefill) {
		t.Errorf("after it was found: %+v", v.View)
	}
}

// A log that a view has not read for a long time holds at most one entry for each node, and none is
// lost when it wraps.
func TestLogIsBounded(t *testing.T) {
	c := newChanging(t, 2)
	s := &Snapshot{blocks: c.blocks, changes: &c.log, Decode: c.nodes[0], Prefill: c.nodes[1]}
	c.log.begin(s)
	v := s.View()
	v.Look(Query{})
	for range 10 {
		for range 1000 {
			c.any(c.Rand).AddInFlight(1)
		}
		if n := c.log.n - v.seen; n > changingDecode+changingPrefill {
			t.Fatalf("%d entries for %d nodes", n, changingDecode+changingPrefill)
		}
		c.equal("after 1,000 changes", v, Query{})
	}
}

// The comments of State and RouteView have these sizes.
func TestBytesForEachNode(t *testing.T) {
	state, rest := unsafe.Sizeof(route.State{}), unsafe.Sizeof(facts{})+4+4 // slots and found
	if state != 56 || state+rest != 112 {
		t.Errorf("a state has %d bytes, and a view %d for each node", state, state+rest)
	}
}

// Only changes.go changes what views include.
func TestInputsChangeInOnePlace(t *testing.T) {
	fields := map[string]bool{}
	for _, of := range []any{inputs{}, reports{}, queued{}} {
		for f := range reflect.TypeOf(of).NumField() {
			fields[reflect.TypeOf(of).Field(f).Name] = true
		}
	}
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x := method.X
			if index, ok := x.(*ast.IndexExpr); ok {
				x = index.X
			}
			field, ok := x.(*ast.SelectorExpr)
			if !ok || !fields[field.Sel.Name] || !slices.Contains([]string{"Store", "Add", "Swap", "CompareAndSwap"}, method.Sel.Name) {
				return true
			}
			if found++; name != "changes.go" {
				t.Errorf("%s changes %s: use the methods of changes.go, which log the node", name, field.Sel.Name)
			}
			return true
		})
	}
	if found < 10 {
		t.Errorf("%d changes found in changes.go", found)
	}
}
