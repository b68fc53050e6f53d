package kvcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
)

func count(n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(i) * 7919
	}
	return tokens
}

// Gateways and nodes of other versions hash the same blocks: these values never change.
func TestHashesAreStable(t *testing.T) {
	root := Root("model", "adapter", "salt")
	got := fmt.Sprintf("%016x %016x", root, AppendHashes(nil, root, count(40), 16))
	const want = "99e99d521e8cea6e [c9cd615f9f12c78c 8a25ebf1c39b04ac]"
	if got != want {
		t.Errorf("hashes are %s, want %s", got, want)
	}
}

func TestAppendHashes(t *testing.T) {
	root := Root("m", "", "")
	for _, blockTokens := range []int{1, 16, 64, 65, 200} {
		for _, n := range []int{0, 1, 15, 16, 17, 64, 200, 401} {
			tokens := count(n)
			parent := root
			var want []Hash
			for i := 0; i+blockTokens <= n; i += blockTokens {
				d := xxhash.NewWithSeed(uint64(parent))
				if err := binary.Write(d, binary.LittleEndian, tokens[i:i+blockTokens]); err != nil {
					t.Fatal(err)
				}
				parent = Hash(d.Sum64())
				want = append(want, parent)
			}
			if got := AppendHashes(nil, root, tokens, blockTokens); !slices.Equal(got, want) {
				t.Errorf("%d tokens in blocks of %d: %x, want %x", n, blockTokens, got, want)
			}
		}
	}
}

// Requests whose 64-bit roots are equal share no block unless their digests are, too.
func TestRootDigestsKeepChainsApart(t *testing.T) {
	p := newPool(t, Config{Blocks: 8, BlockTokens: 4})
	tokens := count(8)
	start := func(d RootDigest) Chain {
		c := p.NewChain(7, len(tokens))
		c.StartAt(d)
		p.Extend(&c, tokens)
		return c
	}
	c := start(DigestRoot("m", "", "a"))
	for i := range 2 {
		id, ok := p.Alloc()
		if !ok {
			t.Fatal("no block")
		}
		p.Store(id, 0, &c, i)
	}
	for name, d := range map[string]RootDigest{"another salt": DigestRoot("m", "", "b"), "another adapter": DigestRoot("m", "x", "a"), "no digest": {}} {
		if other := start(d); p.Match(&other, 8) != 0 {
			t.Errorf("%s finds the blocks", name)
		}
	}
	if same := start(DigestRoot("m", "", "a")); p.Match(&same, 8) != 8 {
		t.Errorf("the same fields find %d tokens", p.Match(&same, 8))
	}
	for n, want := range map[int]bool{0: true, 1: false, 15: false, 16: true, 17: false} {
		if d, ok := ParseRootDigest(make([]byte, n)); ok != want || d != (RootDigest{}) {
			t.Errorf("%d bytes: %t, %x", n, ok, d)
		}
	}
	if got := fmt.Sprintf("%x", DigestRoot("model", "adapter", "salt")); got != "090b734285c225412795aa05eed610c2" {
		t.Errorf("the digest is %s: other versions send another", got)
	}
}

func TestRootsDiffer(t *testing.T) {
	seen := map[Hash][3]string{}
	for _, f := range [][3]string{{}, {"a"}, {"", "a"}, {"", "", "a"}, {"ab", "c"}, {"a", "bc"}, {"a", "b", "c"}, {"abc"}} {
		h := Root(f[0], f[1], f[2])
		if other, ok := seen[h]; ok {
			t.Errorf("%q and %q have the same root", f, other)
		}
		seen[h] = f
	}
}

func newPool(t testing.TB, cfg Config) *Pool {
	t.Helper()
	p, err := NewPool(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// chainOf names tokens.
func chainOf(p *Pool, root Hash, tokens []int32) *Chain {
	c := p.NewChain(root, len(tokens))
	p.Extend(&c, tokens)
	return &c
}

// match is the longest cached prefix's blocks of the first group.
func match(p *Pool, root Hash, tokens []int32) (blocks []BlockID) {
	c := chainOf(p, root, tokens)
	for place := range p.Match(c, len(tokens)) / p.groups[0].BlockTokens {
		blocks = append(blocks, p.Find(0, c, place))
	}
	return blocks
}

// fill computes and stores all full blocks of tokens in the first group.
func fill(t testing.TB, p *Pool, root Hash, tokens []int32) []BlockID {
	t.Helper()
	table, c := match(p, root, tokens), chainOf(p, root, tokens)
	for _, id := range table {
		p.Ref(id)
	}
	for i := len(table); (i+1)*p.blockTokens <= len(tokens); i++ {
		id, ok := p.Alloc()
		if !ok {
			t.Fatalf("no block for tokens %d and up", i*p.blockTokens)
		}
		table = append(table, p.Store(id, 0, c, i))
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	return table
}

func drop(p *Pool, table []BlockID) {
	for _, id := range slices.Backward(table) {
		p.Unref(id)
	}
}

// Everything has the same hash, and nothing is mistaken for anything else.
func TestCollision(t *testing.T) {
	p := newPool(t, Config{Blocks: 16, BlockTokens: 2, Hash: func(Hash, []int32) Hash { return 42 }})
	a := fill(t, p, 1, []int32{1, 1, 5, 5})
	b := fill(t, p, 1, []int32{2, 2, 5, 5})
	if a[1] == b[1] {
		t.Fatalf("equal tokens after different parents share block %d", a[1])
	}
	for _, c := range []struct {
		root   Hash
		tokens []int32
		want   []BlockID
	}{
		{1, []int32{1, 1, 5, 5, 9, 9}, a},
		{1, []int32{2, 2, 5, 5, 9, 9}, b},
		{1, []int32{3, 3, 5, 5}, nil},
		{1, []int32{5, 5}, nil},
		{2, []int32{1, 1, 5, 5}, nil},
		{1, []int32{1, 1, 6, 6}, a[:1]},
	} {
		if got := match(p, c.root, c.tokens); !slices.Equal(got, c.want) {
			t.Errorf("root %d, tokens %v: blocks %v, want %v", c.root, c.tokens, got, c.want)
		}
	}
}

// A prefix loses its end first, and the oldest prefix goes first.
func TestEvictionOrder(t *testing.T) {
	p := newPool(t, Config{Blocks: 6, BlockTokens: 1})
	old, recent := []int32{1, 2, 3}, []int32{4, 5, 6}
	drop(p, fill(t, p, 0, old))
	drop(p, fill(t, p, 0, recent))
	for i, want := range [][2]int{{2, 3}, {1, 3}, {0, 3}, {0, 2}, {0, 1}, {0, 0}} {
		if _, ok := p.Alloc(); !ok {
			t.Fatalf("no block %d", i)
		}
		if got := [2]int{len(match(p, 0, old)), len(match(p, 0, recent))}; got != want {
			t.Errorf("after %d blocks %v are cached, want %v", i+1, got, want)
		}
	}
	if id, ok := p.Alloc(); ok {
		t.Errorf("block %d comes from a full pool", id)
	}
}

func TestEvents(t *testing.T) {
	p := newPool(t, Config{Blocks: 4, BlockTokens: 1, MaxEvents: 4})
	hashes := AppendHashes(nil, 7, []int32{1, 2, 3}, 1)
	drop(p, fill(t, p, 7, []int32{1, 2, 3}))
	want := []Event{{Stored, 0, hashes[0], 7}, {Stored, 0, hashes[1], hashes[0]}, {Stored, 0, hashes[2], hashes[1]}}
	if got := p.AppendHashed(nil); !slices.Equal(got, want) {
		t.Errorf("snapshot %v, want %v", got, want)
	}
	if got, gap := p.Events(nil); !slices.Equal(got, want) || gap {
		t.Errorf("events %v, gap %v, want %v", got, gap, want)
	}
	for range 2 {
		p.Alloc()
	}
	if got, gap := p.Events(nil); !slices.Equal(got, []Event{{Removed, 0, hashes[2], hashes[1]}}) || gap {
		t.Errorf("events %v, gap %v, want the end of the chain removed", got, gap)
	}
	if got, gap := p.Events(nil); len(got) > 0 || gap {
		t.Errorf("events %v, gap %v a second time", got, gap)
	}
	for i := range int32(3) { // three blocks of eight events: 2 are held by the test
		drop(p, fill(t, p, 7, []int32{10 + i, 20 + i}))
	}
	got, gap := p.Events(nil)
	if len(got) != 4 || !gap {
		t.Errorf("%d events, gap %v, want the last 4 and a gap", len(got), gap)
	}
	if _, gap := p.Events(nil); gap {
		t.Error("the gap is told twice")
	}
}

// A full ring keeps the newest events, in order, wherever its oldest event is.
func TestEventsOverflow(t *testing.T) {
	for n := range 12 {
		r := eventRing{buf: make([]Event, 4)}
		var want []Hash
		for i := range n {
			r.push(Event{Hash: Hash(i)})
			want = append(want, Hash(i))
		}
		want = want[max(0, n-4):]
		events, gap := (&Pool{events: r}).Events(nil)
		var got []Hash
		for _, e := range events {
			got = append(got, e.Hash)
		}
		if !slices.Equal(got, want) || gap != (n > 4) {
			t.Errorf("%d events in a ring of 4: %v, gap %t, want %v", n, got, gap, want)
		}
	}
}

// Each byte of a block's digest goes into that of the next.
func TestDigestsChain(t *testing.T) {
	tokens := count(4)
	none := digest{}.next(tokens)
	for i := range none {
		var d digest
		d[i] = 1
		if d.next(tokens) == none {
			t.Errorf("byte %d of the digest before changes nothing", i)
		}
	}
}

// A chain takes room for the blocks of its tokens and no more.
func TestChainsAreSmall(t *testing.T) {
	p := newPool(t, Config{Blocks: 8, BlockTokens: 16})
	if c := p.NewChain(7, 1600); cap(c.links) != 100 {
		t.Errorf("a chain of 100 blocks has room for %d", cap(c.links))
	}
}

// A block that one window lacks moves the end to where another window may lack
// one, too.
func TestMatchTwoWindows(t *testing.T) {
	p := newPool(t, Config{Blocks: 16, BlockTokens: 1, Groups: []Group{{BlockTokens: 1, Window: 2}, {BlockTokens: 1, Window: 2}}})
	c := chainOf(p, 0, count(6))
	for group, places := range [][]int{{0, 1, 2, 5}, {0, 1, 3}} {
		for _, place := range places {
			id, ok := p.Alloc()
			if !ok {
				t.Fatal("no block")
			}
			p.Store(id, group, c, place)
		}
	}
	if got := p.Match(c, 6); got != 2 {
		t.Errorf("a match of %d tokens, want 2: behind 3 to 6 one of the groups lacks the last", got)
	}
}

func TestMisuseIsCaught(t *testing.T) {
	for name, misuse := range map[string]func(p *Pool, id BlockID){
		"Ref of a free block":      func(p *Pool, id BlockID) { p.Unref(id); p.Ref(id) },
		"Unref twice":              func(p *Pool, id BlockID) { p.Unref(id); p.Unref(id) },
		"UnpinIn without a pin":    func(p *Pool, id BlockID) { p.UnpinIn(id) },
		"UnpinOut without a pin":   func(p *Pool, id BlockID) { p.UnpinOut(id) },
		"PinOut of a free block":   func(p *Pool, id BlockID) { p.Unref(id); p.PinOut(id) },
		"PinIn of a free block":    func(p *Pool, id BlockID) { p.Unref(id); p.PinIn(id) },
		"PinIn of a cached block":  func(p *Pool, id BlockID) { p.Store(id, 0, chainOf(p, 0, []int32{1}), 0); p.PinIn(id) },
		"Store of an arriving one": func(p *Pool, id BlockID) { p.PinIn(id); p.Store(id, 0, chainOf(p, 0, []int32{1}), 0) },
		"Store beyond the chain":   func(p *Pool, id BlockID) { p.Store(id, 0, chainOf(p, 0, nil), 0) },
		"Store of a stored one": func(p *Pool, id BlockID) {
			c := chainOf(p, 0, []int32{1, 2})
			p.Store(id, 0, c, 0)
			p.Store(id, 0, c, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t, Config{Blocks: 2, BlockTokens: 1})
			id, _ := p.Alloc()
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			misuse(p, id)
		})
	}
}

// Check detects every violation that it promises to detect.
func TestCheckFinds(t *testing.T) {
	for name, damage := range map[string]func(p *Pool, table []BlockID){
		"a lost reference":     func(p *Pool, table []BlockID) { p.blocks[table[2]].refs = 0 },
		"a pin from nowhere":   func(p *Pool, table []BlockID) { p.blocks[table[0]].pinOut++ },
		"an arriving hit":      func(p *Pool, table []BlockID) { p.blocks[table[0]].pinIn++; p.arriving++ },
		"an arrival uncounted": func(p *Pool, table []BlockID) { p.arriving++ },
		"a read uncounted":     func(p *Pool, table []BlockID) { p.leaving++ },
		"a state uncounted":    func(p *Pool, table []BlockID) { p.counts[stateUsed]-- },
		"a list's end": func(p *Pool, table []BlockID) {
			p.Unref(table[2])
			p.Unref(table[1])
			p.lists[stateCached].tail = p.lists[stateCached].head
		},
		"a cut list": func(p *Pool, table []BlockID) {
			p.Unref(table[2])
			p.lists[stateCached].head = NoBlock
		},
		"a block out of index": func(p *Pool, table []BlockID) { p.index.remove(tagOf(0, p.contents[table[0]].hash), table[0]) },
		"another tag": func(p *Pool, table []BlockID) {
			p.index.slots[p.index.find(tagOf(0, p.contents[table[0]].hash), table[0])].tag++
		},
		"a block far from its home": func(p *Pool, table []BlockID) {
			tag := tagOf(0, p.contents[table[0]].hash)
			p.index.remove(tag, table[0])
			at := p.index.home(tag)
			for p.index.slots[at].block != 0 {
				at = p.index.after(at)
			}
			for at = p.index.after(at); p.index.slots[at].block != 0; {
				at = p.index.after(at)
			}
			p.index.slots[at] = slot{tag, table[0] + 1}
		},
		"a content twice":             func(p *Pool, table []BlockID) { p.contents[table[1]].digest = p.contents[table[0]].digest },
		"a block that is fresh again": func(p *Pool, _ []BlockID) { p.fresh-- },
		"a lost fresh block":          func(p *Pool, _ []BlockID) { p.fresh++ },
		"heat of nothing":             func(p *Pool, _ []BlockID) { p.blocks[7].hot = true },
		"another group":               func(p *Pool, table []BlockID) { p.blocks[table[1]].group = 9 },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t, Config{Blocks: 8, BlockTokens: 1})
			damage(p, fill(t, p, 0, []int32{1, 2, 3}))
			if err := p.Check(); !errors.Is(err, ErrBroken) {
				t.Errorf("Check says %v", err)
			}
		})
	}
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{{}, {Blocks: -1}, {Blocks: 1 << 31}, {Blocks: 1, BlockTokens: -1}, {Blocks: 1, MaxEvents: -1},
		{Blocks: 1, Groups: []Group{{BlockTokens: 17}}}, {Blocks: 1, Groups: []Group{{Window: -1}}}, {Blocks: 1, Groups: make([]Group, MaxGroups+1)},
		{Blocks: 1, BlockTokens: 1, Groups: []Group{{BlockTokens: 8191}, {BlockTokens: 8192}}}} {
		if _, err := NewPool(cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	if p := newPool(t, Config{Blocks: 1}); p.BlockTokens() != 16 {
		t.Errorf("%d tokens per block by default, want 16: nodes and gateways of all versions have to agree", p.BlockTokens())
	}
}

func TestNoAllocations(t *testing.T) {
	tokens := count(100)
	p := newPool(t, Config{Blocks: 32, MaxEvents: 8})
	drop(p, fill(t, p, 1, tokens))
	hashes := make([]Hash, 0, 8)
	chain := p.NewChain(1, 100)
	single := p.NewChain(1, 16)
	events := make([]Event, 0, 8)
	churn := count(16)
	for name, f := range map[string]func(){
		"AppendHashes": func() { hashes = AppendHashes(hashes[:0], 1, tokens, 16) },
		"Extend, Match": func() {
			chain.links = chain.links[:0]
			p.Extend(&chain, tokens)
			p.Match(&chain, 100)
		},
		"Alloc, Store, Unref, Events": func() {
			id, _ := p.Alloc()
			churn[0]++
			single.links = single.links[:0]
			p.Extend(&single, churn)
			p.Unref(p.Store(id, 0, &single, 0))
			events, _ = p.Events(events[:0])
		},
	} {
		if n := testing.AllocsPerRun(200, f); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

func BenchmarkExtend(b *testing.B) {
	tokens := count(8192)
	p := newPool(b, Config{Blocks: 1024})
	c := p.NewChain(1, len(tokens))
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		c.links = c.links[:0]
		p.Extend(&c, tokens)
	}
}

func BenchmarkMatch(b *testing.B) {
	tokens := count(8192)
	p := newPool(b, Config{Blocks: 1024})
	fill(b, p, 1, tokens)
	c := chainOf(p, 1, tokens)
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		p.Match(c, len(tokens))
	}
}

// The window's hit by hand: the last w-1 tokens, and everything else full.
func TestMatchWindow(t *testing.T) {
	p := newPool(t, Config{Blocks: 32, BlockTokens: 2, Groups: []Group{{}, {BlockTokens: 4, Window: 5}}})
	tokens := count(16)
	c := chainOf(p, 1, tokens)
	put := func(group, place int) {
		id, _ := p.Alloc()
		p.Store(id, group, c, place)
	}
	hit := func(want int) {
		t.Helper()
		if got := p.Match(c, len(tokens)); got != want {
			t.Errorf("a hit of %d tokens, want %d", got, want)
		}
	}
	for place := range 7 {
		put(0, place) // [0, 14): ends of both groups' blocks at 4, 8, 12
	}
	hit(0)
	put(1, 2) // [8, 12): the token at 12 sees 8 to 12
	hit(12)
	put(0, 7)
	hit(12)
	put(1, 0)
	put(1, 3)
	hit(16)
	if got := p.Match(c, 15); got != 12 {
		t.Errorf("below 15: %d", got)
	}
	if got := p.Match(c, 11); got != 4 { // 8 lacks [4, 8)
		t.Errorf("below 11: %d", got)
	}
	if got := Peak(p.Groups(), 16, 3); got != 8+3 {
		t.Errorf("at most %d blocks, want 11", got)
	}
}

func BenchmarkAppendHashes(b *testing.B) {
	tokens := count(8192)
	var hashes []Hash
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		hashes = AppendHashes(hashes[:0], 1, tokens, DefaultBlockTokens)
	}
}

// No block has the number NoBlock.
func TestNoBlockIsNoBlock(t *testing.T) {
	p, err := NewPool(Config{Blocks: 3})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if id, ok := p.Alloc(); !ok || id == NoBlock {
			t.Errorf("block %d, %v", id, ok)
		}
	}
	if id, ok := p.Alloc(); ok || id != NoBlock {
		t.Errorf("beyond the pool: block %d, %v", id, ok)
	}
}
