package kvcache

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

// shelf is the naive model's view of one block.
type shelf struct {
	refs, pinIn, pinOut int
	path                []int32 // what its KV depends on: group, a root's number, and every token up to its end; nil is garbage
	hashed, hot         bool
	cachedAt            int // operation since which nobody needs it
}

// table is a sequence's block tables, one per group: of each the leading stored
// ones are in the cache, the rest private; gone ones fell out of the window.
type table struct {
	root   int // index into sim.roots
	tokens []int32
	chain  Chain
	groups []places
}

type places struct {
	blocks       []BlockID
	gone, stored int
}

type sim struct {
	rng     *rand.Rand
	p       *Pool
	roots   []Hash
	shelves []shelf
	tables  []*table
	inPins  []BlockID
	outPins []BlockID
	op      int
	n       map[string]int
}

// simulate lets random block tables share a pool, and compares every answer with the naive
// model. A hit has the requested content and is the longest possible. An allocated block is
// unused and the least recently used one, a hot one only if all are hot.
func simulate(seed uint64, broken fault, n map[string]int) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	rng := rand.New(rand.NewPCG(seed, 0xb10c))
	cfg := Config{Blocks: 2 + rng.IntN(14), BlockTokens: 1 + rng.IntN(3), HotFraction: []float64{0, 0.2, 1, 1e-9}[seed%4]}
	if weak := rng.IntN(3); weak > 0 {
		mask := Hash(rng.IntN(4)) // down to one hash for all
		cfg.Hash = func(parent Hash, tokens []int32) Hash { return chain(parent, tokens) & mask }
	}
	for range rng.IntN(4) {
		g := Group{BlockTokens: cfg.BlockTokens * (1 + rng.IntN(2))}
		if rng.IntN(2) == 0 {
			g.Window = 1 + rng.IntN(4*cfg.BlockTokens)
		}
		cfg.Groups = append(cfg.Groups, g)
		cfg.Blocks += 6
	}
	p, err := NewPool(cfg)
	if err != nil {
		return err
	}
	p.fault = broken
	s := &sim{
		rng: rng, p: p, n: n,
		roots:   []Hash{Root("m", "", ""), Root("m", "", "salt"), Root("m", "a", "")},
		shelves: make([]shelf, cfg.Blocks),
	}
	for range 100 + rng.IntN(300) {
		s.op++
		if err := s.step(); err != nil {
			return err
		}
		if err := s.check(); err != nil {
			return err
		}
	}
	return s.drain()
}

func (s *sim) step() error {
	switch k := s.rng.IntN(20); {
	case k < 4 || len(s.tables) == 0:
		return s.open()
	case k < 6 || len(s.tables) > 3:
		s.close(s.rng.IntN(len(s.tables)))
	case k < 15:
		return s.extend(s.tables[s.rng.IntN(len(s.tables))])
	case k < 17:
		s.pin()
	default:
		s.unpin()
	}
	return nil
}

func (s *sim) path(t *table, g, place int) []int32 {
	return append([]int32{int32(g), int32(t.root)}, t.tokens[:(place+1)*s.p.groups[g].BlockTokens]...)
}

// open starts a table with the longest cached prefix.
func (s *sim) open() error {
	t := &table{root: s.rng.IntN(8) / 6, groups: make([]places, len(s.p.groups))}
	for range s.rng.IntN(8 * s.p.align) {
		t.tokens = append(t.tokens, int32(s.rng.IntN(2)))
	}
	t.chain = s.p.NewChain(s.roots[t.root], len(t.tokens))
	for len(t.chain.links) < len(t.tokens)/s.p.blockTokens { // it grows as tokens come
		s.p.Extend(&t.chain, t.tokens[:s.rng.IntN(len(t.tokens)+1)])
	}
	n := s.p.Match(&t.chain, len(t.tokens))
	if want := s.longest(t); want != n {
		return fmt.Errorf("%d tokens of %v are cached, found %d", want, t.tokens, n)
	}
	for g, spec := range s.p.groups {
		to := &t.groups[g]
		for place := range spec.First(n) {
			to.blocks = append(to.blocks, NoBlock)
			to.gone = place + 1
			s.n["hit behind a window"]++
		}
		for place := spec.First(n); place < spec.End(n); place++ {
			id := s.p.Find(g, &t.chain, place)
			if id == NoBlock || !slices.Equal(s.shelves[id].path, s.path(t, g, place)) {
				return fmt.Errorf("block %d is a hit for %v", id, s.path(t, g, place))
			}
			to.blocks = append(to.blocks, id)
			s.ref(id)
		}
		to.stored = len(to.blocks)
	}
	if n > 0 {
		s.n["hit"]++
	}
	s.tables = append(s.tables, t)
	return nil
}

// longest is the hit as a search through all ends and all blocks.
func (s *sim) longest(t *table) (longest int) {
	for n := s.p.align; n <= len(t.tokens); n += s.p.align {
		whole := true
		for g, spec := range s.p.groups {
			for place := spec.First(n); place < spec.End(n); place++ {
				want := s.path(t, g, place)
				whole = whole && slices.ContainsFunc(s.shelves, func(sh shelf) bool { return sh.hashed && slices.Equal(sh.path, want) })
			}
		}
		if whole {
			longest = n
		} else {
			s.n["hit with a hole passed over"]++
		}
	}
	return longest
}

// extend computes one more block of a table, stores one, or lets one go.
func (s *sim) extend(t *table) error {
	g := s.rng.IntN(len(t.groups))
	to, spec := &t.groups[g], s.p.groups[g]
	if to.stored < len(to.blocks) && s.rng.IntN(3) > 0 {
		return s.store(t, g)
	}
	if spec.Window > 0 && to.gone < to.stored && s.rng.IntN(3) == 0 {
		s.n["window passed"]++
		s.unref(to.blocks[to.gone])
		to.blocks[to.gone] = NoBlock
		to.gone++
		return nil
	}
	if (len(to.blocks)+1)*spec.BlockTokens > len(t.tokens) {
		return nil
	}
	oldest := -1
	for i := range s.shelves {
		sh := &s.shelves[i]
		if sh.refs+sh.pinIn+sh.pinOut > 0 {
			continue
		}
		if oldest < 0 || sh.worth() < s.shelves[oldest].worth() ||
			sh.worth() == s.shelves[oldest].worth() && sh.cachedAt < s.shelves[oldest].cachedAt {
			oldest = i
		}
	}
	id, ok := s.p.Alloc()
	if ok != (oldest >= 0) {
		return fmt.Errorf("Alloc says %v, the model's candidate is %d", ok, oldest)
	}
	if !ok {
		s.n["full"]++
		return nil
	}
	sh := &s.shelves[id]
	if sh.refs+sh.pinIn+sh.pinOut > 0 {
		return fmt.Errorf("Alloc hands out block %d: %+v", id, *sh)
	}
	if sh.worth() != s.shelves[oldest].worth() || sh.hashed && sh.cachedAt != s.shelves[oldest].cachedAt {
		return fmt.Errorf("Alloc hands out block %d (%+v), block %d is older (%+v)", id, *sh, oldest, s.shelves[oldest])
	}
	if sh.hashed {
		s.n["evicted"]++
	}
	if sh.hot {
		s.n["evicted hot"]++
	}
	to.blocks = append(to.blocks, id)
	*sh = shelf{refs: 1, path: s.path(t, g, len(to.blocks)-1)}
	return nil
}

func (s *sim) store(t *table, g int) error {
	to := &t.groups[g]
	i := to.stored
	own := to.blocks[i]
	if s.shelves[own].pinIn > 0 {
		return nil
	}
	kept := s.p.Store(own, g, &t.chain, i)
	to.stored++
	if kept != own {
		s.n["same content kept"]++
		if !slices.Equal(s.shelves[kept].path, s.path(t, g, i)) {
			return fmt.Errorf("block %d stands for %v, it holds %v", kept, s.path(t, g, i), s.shelves[kept].path)
		}
		s.ref(kept)
		s.unref(own)
		to.blocks[i] = kept
		return nil
	}
	s.n["stored"]++
	s.shelves[own].hashed = true
	return nil
}

func (s *sim) close(i int) {
	t := s.tables[i]
	s.tables = slices.Delete(s.tables, i, i+1)
	for g := range t.groups {
		for _, id := range slices.Backward(t.groups[g].blocks[t.groups[g].gone:]) {
			s.op++ // the order within a table counts
			s.unref(id)
		}
	}
}

func (s *sim) ref(id BlockID) {
	s.p.Ref(id)
	s.shelves[id].refs++
	s.shelves[id].hot = s.shelves[id].hashed
}

func (s *sim) unref(id BlockID) {
	s.p.Unref(id)
	s.shelves[id].refs--
	s.settled(id)
}

// settled records since when a block is unused.
func (s *sim) settled(id BlockID) {
	if sh := &s.shelves[id]; sh.refs+sh.pinIn+sh.pinOut == 0 {
		sh.cachedAt = s.op
	}
	hot, coldest := 0, (*shelf)(nil)
	for i := range s.shelves {
		if sh := &s.shelves[i]; sh.hot && sh.refs+sh.pinIn+sh.pinOut == 0 {
			if hot++; coldest == nil || sh.cachedAt < coldest.cachedAt {
				coldest = sh
			}
		}
	}
	if hot > s.p.maxHot {
		coldest.hot, coldest.cachedAt = false, s.op
		s.n["cooled down"]++
	}
}

// worth is the order in which unused blocks are allocated.
func (s *shelf) worth() int {
	switch {
	case !s.hashed:
		return 0
	case !s.hot:
		return 1
	}
	return 2
}

func (s *sim) pin() {
	id := BlockID(s.rng.IntN(len(s.shelves)))
	switch sh := &s.shelves[id]; {
	case sh.refs > 0 && !sh.hashed && s.rng.IntN(2) == 0:
		s.n["pin in"]++
		s.p.PinIn(id)
		sh.pinIn++
		s.inPins = append(s.inPins, id)
	case sh.refs > 0 || sh.hashed:
		s.n["pin out"]++
		s.p.PinOut(id)
		sh.pinOut++
		s.outPins = append(s.outPins, id)
	}
}

func (s *sim) unpin() {
	if n := len(s.inPins); n > 0 && s.rng.IntN(2) == 0 {
		i := s.rng.IntN(n)
		id := s.inPins[i]
		s.inPins = slices.Delete(s.inPins, i, i+1)
		s.p.UnpinIn(id)
		s.shelves[id].pinIn--
		s.settled(id)
	}
	if n := len(s.outPins); n > 0 {
		i := s.rng.IntN(n)
		id := s.outPins[i]
		s.outPins = slices.Delete(s.outPins, i, i+1)
		if s.shelves[id].refs == 0 {
			s.n["pin out outlives references"]++
		}
		s.p.UnpinOut(id)
		s.shelves[id].pinOut--
		s.settled(id)
	}
}

func (s *sim) check() error {
	if err := s.p.Check(); err != nil {
		return err
	}
	var want Usage
	for i := range s.shelves {
		sh := &s.shelves[i]
		info := s.p.Info(BlockID(i))
		if info.Refs != sh.refs || info.PinsIn != sh.pinIn || info.PinsOut != sh.pinOut || info.Hashed != sh.hashed {
			return fmt.Errorf("block %d is %+v, want %+v", i, info, *sh)
		}
		want.Blocks++
		switch pinned := sh.pinIn+sh.pinOut > 0; {
		case sh.refs > 0:
			want.Used++
		case pinned:
			want.Pinned++
		case sh.hashed:
			want.Cached++
		default:
			want.Free++
		}
		want.Arriving += min(sh.pinIn, 1)
		want.Leaving += min(sh.pinOut, 1)
	}
	if got := s.p.Usage(); got != want || s.p.Available() != want.Free+want.Cached {
		return fmt.Errorf("usage %+v, want %+v", got, want)
	}
	return nil
}

func (s *sim) drain() error {
	for len(s.tables) > 0 {
		s.close(0)
	}
	for len(s.inPins)+len(s.outPins) > 0 {
		s.unpin()
	}
	if got := s.p.Available(); got != len(s.shelves) {
		return fmt.Errorf("at the end %d of %d blocks are available", got, len(s.shelves))
	}
	return s.check()
}

func TestSimulation(t *testing.T) {
	runs := uint64(2000)
	switch {
	case os.Getenv("TANDEM_SOAK") == "1":
		runs = 300_000
	case testing.Short():
		runs = 500
	}
	n := map[string]int{}
	for seed := range runs {
		if err := simulate(seed, 0, n); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	t.Log(n)
	for _, path := range []string{"hit", "hit behind a window", "hit with a hole passed over", "window passed", "full", "evicted", "evicted hot", "cooled down", "same content kept", "stored",
		"pin in", "pin out", "pin out outlives references"} {
		if n[path] == 0 {
			t.Errorf("path %q never ran", path)
		}
	}
}

// A simulation proves only what it would notice.
func TestSimulationFindsFaults(t *testing.T) {
	const within = 500 // seeds
	for name, broken := range map[string]fault{
		"hit by hash alone":     faultHitByHash,
		"pinned block reusable": faultPinsIgnored,
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(within) {
				if err := simulate(seed, broken, map[string]int{}); err != nil {
					t.Logf("found with seed %d: %v", seed, err)
					return
				}
			}
			t.Errorf("not found in %d seeds", within)
		})
	}
}
