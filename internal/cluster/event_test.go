package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

func randomEvent(r *rand.Rand) BlockEvent {
	e := BlockEvent{Node: string(bytes.Repeat([]byte{'n'}, 1+r.IntN(maxNodeID))), Epoch: r.Uint64(), Seq: r.Uint64()}
	for range r.IntN(20) {
		e.Stored = append(e.Stored, Stored{r.Uint64(), r.Uint64()})
	}
	for range r.IntN(20) {
		e.Removed = append(e.Removed, r.Uint64())
	}
	return e
}

func TestEventsSurviveEncoding(t *testing.T) {
	for seed := range uint64(500) {
		e := randomEvent(rand.New(rand.NewPCG(seed, 0)))
		b := e.encode()
		if got, err := decodeEvent(b); err != nil || !reflect.DeepEqual(got, e) {
			t.Fatalf("seed %d: %+v became %+v, %v", seed, e, got, err)
		}
		for n := range b {
			if _, err := decodeEvent(b[:n]); !errors.Is(err, ErrBadEvent) {
				t.Fatalf("seed %d: cut at %d of %d: %v", seed, n, len(b), err)
			}
		}
	}
}

func FuzzDecodeEvent(f *testing.F) {
	for seed := range uint64(5) {
		f.Add(randomEvent(rand.New(rand.NewPCG(seed, 0))).encode())
	}
	f.Add([]byte{eventVersion})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decodeEvent(b)
		if err != nil {
			if !errors.Is(err, ErrBadEvent) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(e.encode(), b) {
			t.Fatalf("%x became %x", b, e.encode())
		}
	})
}

// index is what a router would keep: which blocks each node has.
type index map[string]map[uint64]bool

func (x index) Blocks(e BlockEvent) {
	if x[e.Node] == nil {
		x[e.Node] = map[uint64]bool{}
	}
	for _, h := range e.Removed {
		delete(x[e.Node], h)
	}
	for _, s := range e.Stored {
		x[e.Node][s.Hash] = true
	}
}

func (x index) Forget(node, _ string) { delete(x, node) }

// Nodes store, remove and restart; the network loses, repeats and reorders their
// messages. An index fed through a Subscription never holds, right after a node's
// newest message, a block that the node does not have; without loss it holds all.
func TestLossesAreNeverBelieved(t *testing.T) {
	var nForgot, nFull, nLate int
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		loss := []float64{0, 0.05, 0.3}[seed%3]
		x := index{}
		s := &Subscription{bus: NewBus(BusOptions{}), to: x, seen: tracker{}}
		s.bus.Close()
		type source struct {
			epoch, seq uint64
			has        map[uint64]bool
		}
		nodes := map[string]*source{"a": {epoch: 1, has: map[uint64]bool{}}, "b": {epoch: 1, has: map[uint64]bool{}}}
		late := [][]byte{}
		for op := range 400 {
			name := []string{"a", "b"}[r.IntN(2)]
			n := nodes[name]
			if r.IntN(60) == 0 {
				*n = source{epoch: n.epoch + 1 + uint64(r.IntN(5)), has: map[uint64]bool{}}
			}
			n.seq++
			e := BlockEvent{Node: name, Epoch: n.epoch, Seq: n.seq}
			for h := range uint64(30) {
				if n.has[h] && r.IntN(10) == 0 {
					e.Removed = append(e.Removed, h)
					delete(n.has, h)
				}
			}
			for range r.IntN(4) {
				h := r.Uint64N(30)
				if !n.has[h] {
					e.Stored = append(e.Stored, Stored{Hash: h})
					n.has[h] = true
				}
			}
			b := e.encode()
			if r.Float64() < loss {
				if r.IntN(3) == 0 {
					late = append(late, b)
				}
				continue
			}
			had := len(x[name])
			s.onMessage(b)
			if len(x[name]) < had-len(e.Removed) {
				nForgot++
			}
			for h := range x[name] {
				if !n.has[h] {
					t.Fatalf("seed %d, op %d: node %s is believed to have block %d", seed, op, name, h)
				}
			}
			if loss == 0 {
				if len(x[name]) != len(n.has) {
					t.Fatalf("seed %d, op %d: node %s has %d blocks, %d are known", seed, op, name, len(n.has), len(x[name]))
				}
				nFull++
			}
			if len(late) > 0 && r.IntN(3) == 0 {
				m, err := decodeEvent(late[0])
				if err != nil {
					t.Fatal(err)
				}
				newest := s.seen[m.Node]
				old := m.Epoch < newest.epoch || m.Epoch == newest.epoch && m.Seq < newest.seq
				before := fmt.Sprint(x)
				s.onMessage(late[0])
				late = late[1:]
				if after := fmt.Sprint(x); old && after != before {
					t.Fatalf("seed %d, op %d: a late message made %s of %s", seed, op, after, before)
				}
				if old {
					nLate++
				}
			}
			if r.IntN(5) == 0 {
				s.onMessage(b) // once more
			}
		}
		s.Drop("a")
		if x["a"] != nil || s.seen["a"] != (position{}) {
			t.Fatalf("seed %d: a dropped node is still known", seed)
		}
	}
	if nForgot < 100 || nFull < 100 || nLate < 100 {
		t.Errorf("forgot %d times, compared fully %d times, %d late messages", nForgot, nFull, nLate)
	}
}

func TestTrackerIsBounded(t *testing.T) {
	s := tracker{}
	for i := range maxTracked {
		s[string(binaryID(i))] = position{1, 1, true}
	}
	if v, _ := s.see(BlockEvent{Node: "one more", Seq: 1}); v != ignore || len(s) != maxTracked {
		t.Errorf("node %d: verdict %d, %d tracked", maxTracked+1, v, len(s))
	}
	if v, _ := s.see(BlockEvent{Node: string(binaryID(5)), Epoch: 1, Seq: 2}); v != apply {
		t.Errorf("a known node: verdict %d", v)
	}
}

func binaryID(i int) []byte { return []byte{byte(i), byte(i >> 8), byte(i >> 16)} }

// A subject has no character that NATS reads, and names do not collide.
func TestSubjects(t *testing.T) {
	seen := map[string]string{}
	for _, m := range []string{"", "builtin", "a.b", "a b", "*", ">", "meta/Llama-3.1", "模型", "BUILTIN"} {
		s := subject(m)
		if slices.ContainsFunc([]byte(s[len("tandem.blocks."):]), func(c byte) bool { return bytes.IndexByte([]byte(".*> \t"), c) >= 0 }) || len(s) == len("tandem.blocks.") {
			t.Errorf("%q: subject %q", m, s)
		}
		if other, ok := seen[s]; ok {
			t.Errorf("%q and %q share %q", m, other, s)
		}
		seen[s] = m
	}
}
