package scheduler

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// counts is how often each path ran, by name.
type counts map[string]int

// paths are those that a campaign has to have run.
var paths = strings.Fields(`
	add add-resume add-compute-only add-hold add-no-cache-read add-priority add-id-again
	refused-queue-full refused-too-long refused-duplicate
	abort-held abort-held-reserved abort-waiting abort-waiting-arrived abort-running abort-in-step abort-completed
	reserve-waits reserve-in-turn reserve-turn-lost reserve-wait-ended
	reserve reserve-no-room reserve-nothing-missing reserve-again reserve-in-step
	arrived arrived-in-step arrived-after-abort arrived-cached-for-others arrived-prefix-grew arrived-prefix-gone arrived-partial-block
	lost late-write late-write-after-abort release-lost release-live refused-arrived-after-lost
	proceed proceed-reserved
	preempted-running preempted-in-batch preempted-waiting reclaimed-held reclaimed-held-reserved
	score-limited scored scored-chunk scored-after-preemption scored-prefix-hit refused-score
	drafted draft-accepted draft-refused draft-in-part draft-short
	prefix-hit chunk stalled sat-out-chunk same-block-kept collision
	ahead ahead-overrun ahead-aborted
	finished finished-after-preemption finished-after-resume finished-at-max-model-len
	compute-only-done compute-only-cached
	push push-outlives-request push-in-step
	one-group groups no-full-group window-passed window-hit
	events event-gap empty-step`)

// simRequest is what the simulation knows to be true.
type simRequest struct {
	Request
	r         *request // the scheduler's
	cells     []cell   // true KV of Tokens
	prompt    int      // tokens at Add
	maxNew    int
	scored    int // tokens behind which the logits have been seen
	aborted   bool
	preempted bool
	resumed   bool
	sitsOut   bool // of the step
}

func (q *simRequest) output() []int32 { return q.Tokens[q.prompt:] }

// transfer is the network's side of a reservation: it knows blocks, not requests.
type transfer struct {
	Reservation
	q    *simRequest
	lost bool
}

// waiter is a request that waits for room for its first upTo tokens.
type waiter struct {
	q    *simRequest
	upTo int
}

// push is a transfer that reads blocks here.
type push struct {
	q      *simRequest
	tables [][]kvcache.BlockID
	n      int
	want   []cell
}

// name identifies a cached block in events.
type name struct {
	group int
	hash  kvcache.Hash
}

// owner is who may expect content in an unhashed block.
type owner struct {
	r            *request
	group, index int
}

type sim struct {
	device
	rng        *rand.Rand
	sitting    *rand.Rand // who sits a step out
	scoreLimit int        // of the step's LimitScores
	s          *Scheduler
	cfg        Config
	now        time.Duration
	roots      []kvcache.Hash
	live       []*simRequest // in order of Add
	nextID     RequestID
	freeIDs    []RequestID
	texts      [][]int32 // prompts and outputs so far, to share prefixes with and to resume
	transfers  []*transfer
	waits      []waiter // for room, in order
	pushes     []*push
	owners     []owner
	view       map[name]bool // the prefix cache as events tell it
	checks     bool          // reads are compared at once, not only outputs
	unending   bool          // only maxNew ends an output
	jobs       bool          // nothing but compute-only requests, as on a prefill node
	vectors    bool          // some jobs are requests with Once
	stepping   bool
	draining   bool
	batch      []*simRequest // one per Seq
	completed  []*simRequest // one per Completed
	n          counts
	trace      uint64 // hash of all decisions
}

func newSim(seed uint64, broken fault, n counts) (*sim, error) {
	rng := rand.New(rand.NewPCG(seed, 0x7a4de3))
	blocks := 4 + rng.IntN(28)
	blockTokens := 1 + rng.IntN(4)
	cfg := Config{
		Pool:              kvcache.Config{Blocks: blocks, BlockTokens: blockTokens, MaxEvents: 4 + rng.IntN(60)},
		MaxSeqs:           1 + rng.IntN(6),
		MaxQueued:         2 + rng.IntN(8),
		ArrivingFraction:  0.1 + 0.9*rng.Float64(),
		Watermark:         0.001 + 0.2*rng.Float64(),
		PriorityHeadStart: time.Duration(1 + rng.IntN(50)),
	}
	cfg.MaxBatchedTokens = cfg.MaxSeqs + rng.IntN(16)
	if rng.IntN(2) == 0 {
		cfg.MaxOutputs = cfg.MaxSeqs + rng.IntN(8)
	}
	if rng.IntN(2) == 0 {
		cfg.MaxDrafts = rng.IntN(6)
		if cfg.Draft = guess; cfg.MaxDrafts%2 == 1 {
			cfg.Draft, cfg.DraftAll = nil, guessAll
		}
	}
	cfg.Pool.Groups = randomGroups(rng, blockTokens, n)
	probe, err := kvcache.NewPool(cfg.Pool)
	if err != nil {
		return nil, err
	}
	longest := 0
	for ; ; cfg.Pool.Blocks += 3 {
		longest = LongestFit(probe.Groups(), cfg.Pool.Blocks, cfg.MaxBatchedTokens)
		if longest = min(longest, 32*blockTokens); longest > 2 {
			break
		}
	}
	blocks = cfg.Pool.Blocks
	cfg.MaxModelLen = 2 + rng.IntN(longest-1)
	if rng.IntN(2) == 0 {
		cfg.MaxModelLen = longest
	}
	if rng.IntN(3) == 0 {
		mask := kvcache.Hash(rng.IntN(4)) // down to one hash for everything
		cfg.Pool.Hash = func(parent kvcache.Hash, tokens []int32) kvcache.Hash {
			return kvcache.AppendHashes(nil, parent, tokens, len(tokens))[0] & mask
		}
	}
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	s.fault = broken
	m := &sim{
		device: device{groups: s.groups, stride: 3 * blockTokens, mem: make([]cell, blocks*3*blockTokens)},
		rng:    rng, s: s, cfg: cfg, n: n, sitting: rand.New(rand.NewPCG(seed, 0x517)),
		roots:  []kvcache.Hash{kvcache.Root("m", "", ""), kvcache.Root("m", "", "salt")},
		owners: make([]owner, blocks),
		view:   map[name]bool{},
		checks: rng.IntN(2) == 0,
	}
	for i := range m.mem {
		m.mem[i] = poison
	}
	return m, nil
}

// randomGroups makes KV groups with windows that begin anywhere in a block, of
// pages that hold more tokens of some than of others.
func randomGroups(rng *rand.Rand, unit int, n counts) (groups []kvcache.Group) {
	if rng.IntN(2) == 0 {
		n["one-group"]++
		return nil
	}
	full := rng.IntN(4) > 0
	if !full {
		n["no-full-group"]++
	}
	for i := range 1 + rng.IntN(4) {
		g := kvcache.Group{BlockTokens: unit * (1 + rng.IntN(3)), Window: 2 + rng.IntN(5*unit)}
		if full && (i == 0 || rng.IntN(3) == 0) {
			g.Window = 0
		}
		groups = append(groups, g)
	}
	n["groups"]++
	return groups
}

// simulate runs one seed to its end. Panics are failures like others.
func simulate(seed uint64, broken fault, n counts) (trace uint64, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	m, err := newSim(seed, broken, n)
	if err != nil {
		return 0, err
	}
	for range 60 + m.rng.IntN(120) {
		if m.rng.IntN(5) < 2 {
			err = m.step()
		} else {
			err = m.event()
		}
		if err != nil {
			return 0, err
		}
	}
	return m.trace, m.drain()
}

// event is something from outside: a call that is legal at any time.
func (m *sim) event() error {
	m.now += time.Duration(m.rng.IntN(20))
	var name string
	var op func() error
	switch k := m.rng.IntN(100); {
	case k < 30:
		name, op = "add", m.add
	case k < 37:
		name, op = "abort", m.abort
	case k < 55:
		name, op = "reserve", m.reserve
	case k < 82:
		name, op = "network", m.network
	case k < 87:
		name, op = "proceed", m.proceed
	case k < 97:
		name, op = "push", m.push
	default:
		name, op = "events", m.events
	}
	if err := op(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := m.takeTurns(); err != nil {
		return fmt.Errorf("turns after %s: %w", name, err)
	}
	return m.after(name)
}

// after checks the laws, and overwrites the content of every block that no request may read.
func (m *sim) after(op string) error {
	if err := m.s.Check(); err != nil {
		return fmt.Errorf("after %s: %w", op, err)
	}
	owners := make([]owner, len(m.owners))
	tell := func(r *request, group, from int, blocks []kvcache.BlockID) {
		for i, id := range blocks {
			if id != kvcache.NoBlock {
				owners[id] = owner{r, group, from + i}
			}
		}
	}
	all := func(r *request) {
		for g, blocks := range r.appendTables(nil) {
			tell(r, g, 0, blocks)
		}
	}
	for _, queue := range [...][]*request{m.s.held, m.s.waiting, m.s.running} {
		for _, r := range queue {
			all(r)
		}
	}
	if m.s.stepping {
		for _, r := range m.s.inStep {
			all(r)
		}
	}
	for _, id := range m.s.duplicates {
		owners[id] = m.owners[id] // the step ahead may read it
	}
	for _, res := range m.s.reservations {
		if res.live {
			for g, got := range res.Groups {
				tell(res.r, g, got.First, got.Blocks)
			}
		}
	}
	for i := range owners {
		id := kvcache.BlockID(i)
		info := m.s.pool.Info(id)
		m.trace = mix(m.trace, uint64(info.Refs)<<8+uint64(info.Hash))
		nobody := owners[i].r == nil && info.PinsIn+info.PinsOut == 0
		if !info.Hashed && (nobody || owners[i].r != nil && owners[i] != m.owners[i]) {
			for j := range m.block(id) {
				m.block(id)[j] = poison
			}
		}
	}
	m.owners = owners
	return nil
}

// guessAll guesses for all, but for every third not as much as it may.
func guessAll(asks []DraftRequest) {
	for i := range asks {
		a := &asks[i]
		a.Tokens = guess(a.Tokens, max(0, a.MaxDrafts-int(a.ID)%3))
	}
}

// guess is wrong more often than not: a function of the tokens alone.
func guess(tokens []int32, n int) []int32 {
	h := mix(uint64(len(tokens)), uint64(tokens[len(tokens)-1]))
	for i := range min(n, int(h%5)) {
		tokens = append(tokens, int32(mix(h, uint64(i))>>33%vocabulary))
	}
	return tokens
}

func (m *sim) add() error {
	q := m.newRequest()
	before := m.s.Stats()
	forecast := m.s.Cached(q.Root, q.Tokens)
	cached, err := m.s.Add(q.Request, m.now)
	n := len(q.Tokens)
	switch {
	case q.Score >= n || q.Score > 0 && (q.Hold || q.ComputeOnly):
		if !errors.Is(err, ErrScore) && !errors.Is(err, ErrTooLong) {
			return fmt.Errorf("request %d with %d of %d tokens scored: %v", q.ID, q.Score, n, err)
		}
		m.n["refused-score"]++
		return nil
	case m.find(q.ID) != nil:
		if !errors.Is(err, ErrDuplicate) && !errors.Is(err, ErrTooLong) {
			return fmt.Errorf("request %d twice: %v", q.ID, err)
		}
		m.n["refused-duplicate"]++
		return nil
	case n > m.cfg.MaxModelLen || n == m.cfg.MaxModelLen && !q.ComputeOnly && !q.Once:
		if !errors.Is(err, ErrTooLong) {
			return fmt.Errorf("%d tokens of at most %d: %v", n, m.cfg.MaxModelLen, err)
		}
		m.n["refused-too-long"]++
		return nil
	case before.Waiting+before.Held >= m.cfg.MaxQueued:
		if !errors.Is(err, ErrQueueFull) {
			return fmt.Errorf("%d queued of at most %d: %v", before.Waiting+before.Held, m.cfg.MaxQueued, err)
		}
		m.n["refused-queue-full"]++
		return nil
	case err != nil:
		return err
	}
	q.r = m.s.byID[q.ID]
	q.cells = trueCells(q.Root, q.Tokens)
	q.prompt = n
	m.live = append(m.live, q)
	m.texts = append(m.texts, slices.Clone(q.Tokens))
	m.count(q)
	want := forecast
	if !q.ComputeOnly {
		chain := m.s.pool.NewChain(q.Root, n)
		m.s.pool.Extend(&chain, q.Tokens)
		want = m.s.pool.Match(&chain, n-1)
	}
	if q.NoCacheRead || q.Score > 0 {
		want = 0
	}
	if err := m.checkHit(q, want); err != nil {
		return err
	}
	if cached != want {
		return fmt.Errorf("request %d has %d tokens cached, want %d", q.ID, cached, want)
	}
	if q.Hold {
		return m.verify("held prefix", m.s.Tables(q.ID), cached, cached, q.cells)
	}
	return nil
}

// checkHit searches for the longest hit the slow way: every end, every group.
func (m *sim) checkHit(q *simRequest, got int) error {
	if q.NoCacheRead || q.Score > 0 {
		return nil
	}
	chain := m.s.pool.NewChain(q.Root, len(q.Tokens))
	m.s.pool.Extend(&chain, q.Tokens)
	limit := len(q.Tokens)
	if !q.ComputeOnly {
		limit--
	}
	longest := 0
	for n := m.s.pool.Align(); n <= limit; n += m.s.pool.Align() {
		whole := true
		for g, spec := range m.groups {
			for pos := seen(spec, n); pos < n; pos++ {
				whole = whole && m.s.pool.Find(g, &chain, pos/spec.BlockTokens) != kvcache.NoBlock
			}
		}
		if whole {
			longest = n
		}
	}
	if got != longest {
		return fmt.Errorf("a hit of %d tokens, the longest is %d", got, longest)
	}
	for _, spec := range m.groups {
		if spec.Window > 0 && spec.First(got) > 0 {
			m.n["window-hit"]++
		}
	}
	return nil
}

func (m *sim) newRequest() *simRequest {
	q := &simRequest{Request: Request{
		ID:          m.nextID + 1,
		Root:        m.roots[m.rng.IntN(8)/7],
		ComputeOnly: m.rng.IntN(4) == 0,
		Hold:        m.rng.IntN(3) == 0,
		NoCacheRead: m.rng.IntN(12) == 0,
	}}
	switch {
	case len(m.freeIDs) > 0 && m.rng.IntN(3) == 0:
		i := m.rng.IntN(len(m.freeIDs))
		q.ID = m.freeIDs[i]
		m.freeIDs = slices.Delete(m.freeIDs, i, i+1)
		m.n["add-id-again"]++
	case len(m.live) > 0 && m.rng.IntN(20) == 0:
		q.ID = m.pick().ID
	default:
		m.nextID++
	}
	if m.rng.IntN(5) == 0 {
		q.Priority = m.rng.IntN(5) - 2
	}
	if len(m.texts) > 0 && m.rng.IntN(3) > 0 {
		text := m.texts[m.rng.IntN(len(m.texts))]
		q.resumed = m.rng.IntN(2) == 0
		if !q.resumed {
			text = text[:m.rng.IntN(len(text)+1)]
		}
		q.Tokens = slices.Clone(text)
	}
	if !q.resumed {
		for range 1 + m.rng.IntN(1+min(m.cfg.MaxModelLen, 30)) {
			q.Tokens = append(q.Tokens, int32(m.rng.IntN(vocabulary)))
		}
		if m.rng.IntN(50) > 0 {
			q.Tokens = q.Tokens[:min(len(q.Tokens), max(1, m.cfg.MaxModelLen-1))]
		}
	}
	if m.rng.IntN(4) == 0 {
		q.Score = len(q.Tokens) - m.rng.IntN(1+len(q.Tokens)/2)
		q.Hold = q.Hold && m.rng.IntN(8) == 0
		q.ComputeOnly = q.ComputeOnly && m.rng.IntN(8) == 0
	}
	if m.jobs {
		q.ComputeOnly, q.Hold, q.Score = true, false, 0
	}
	q.maxNew = 1 + m.rng.IntN(24)
	if m.rng.IntN(6) == 0 {
		q.Once, q.maxNew = true, 1
		q.ComputeOnly = q.ComputeOnly && !m.vectors
	}
	q.MaxNew = m.rng.IntN(2) * q.maxNew
	return q
}

func (m *sim) count(q *simRequest) {
	m.n["add"]++
	for name, is := range map[string]bool{
		"add-resume": q.resumed, "add-compute-only": q.ComputeOnly, "add-hold": q.Hold,
		"add-no-cache-read": q.NoCacheRead, "add-priority": q.Priority != 0, "add-once": q.Once && !q.ComputeOnly,
	} {
		if is {
			m.n[name]++
		}
	}
}

func (m *sim) pick() *simRequest { return m.live[m.rng.IntN(len(m.live))] }

func (m *sim) find(id RequestID) *simRequest {
	for _, q := range m.live {
		if q.ID == id {
			return q
		}
	}
	return nil
}

func (m *sim) forget(q *simRequest) {
	i := slices.Index(m.live, q)
	m.live = slices.Delete(m.live, i, i+1)
	m.texts = append(m.texts, slices.Clone(q.Tokens))
	m.freeIDs = append(m.freeIDs, q.ID)
}

func (m *sim) abort() error {
	if len(m.live) == 0 || m.rng.IntN(10) == 0 {
		if err := m.s.Abort(m.nextID + 100); !errors.Is(err, ErrUnknownRequest) {
			return fmt.Errorf("of nobody: %v", err)
		}
		return nil
	}
	q := m.pick()
	switch {
	case slices.Contains(m.completed, q):
		m.n["abort-completed"]++
	case q.r.inStep:
		m.n["abort-in-step"]++
	case q.r.state == stateRunning:
		m.n["abort-running"]++
	case q.r.state == stateWaiting && slices.ContainsFunc(q.r.tables, func(t table) bool { return len(t.blocks) > t.hashed }):
		m.n["abort-waiting-arrived"]++
	case q.r.state == stateWaiting:
		m.n["abort-waiting"]++
	case q.r.reservation != nil:
		m.n["abort-held-reserved"]++
	default:
		m.n["abort-held"]++
	}
	q.aborted = true
	m.forget(q)
	if err := m.s.Abort(q.ID); err != nil {
		return err
	}
	if m.s.Tables(q.ID) != nil {
		return fmt.Errorf("request %d is still here", q.ID)
	}
	return nil
}

func (m *sim) proceed() error {
	if len(m.live) == 0 {
		return nil
	}
	q := m.pick()
	held := q.r.state == stateHeld
	reserved := q.r.reservation
	err := m.s.Proceed(q.ID)
	if !held {
		if !errors.Is(err, ErrNotHeld) {
			return fmt.Errorf("request %d, which is not held: %v", q.ID, err)
		}
		return nil
	}
	m.n["proceed"]++
	for _, tr := range m.transfers {
		if reserved != nil && tr.ID == reserved.ID {
			tr.lost = true
			m.n["proceed-reserved"]++
		}
	}
	return err
}

// push starts to read what some request has computed, or ends such a read.
func (m *sim) push() error {
	if len(m.pushes) > 0 && m.rng.IntN(2) == 0 {
		i := m.rng.IntN(len(m.pushes))
		p := m.pushes[i]
		m.pushes = slices.Delete(m.pushes, i, i+1)
		if !slices.Contains(m.live, p.q) {
			m.n["push-outlives-request"]++
		}
		if err := m.verify("push", p.tables, p.n, p.n, p.want); err != nil {
			return err
		}
		m.unpin(p)
		return nil
	}
	if len(m.live) == 0 {
		return nil
	}
	q := m.pick()
	p := &push{q: q, n: q.r.computed, want: slices.Clone(q.cells[:q.r.computed])}
	for g, blocks := range m.s.Tables(q.ID) {
		spec := m.groups[g]
		p.tables = append(p.tables, slices.Clone(blocks[:spec.End(p.n)]))
		m.s.PinOut(p.tables[g][spec.First(p.n):])
	}
	if m.stepping {
		m.n["push-in-step"]++
	}
	m.n["push"]++
	m.pushes = append(m.pushes, p)
	return nil
}

func (m *sim) unpin(p *push) {
	for g, blocks := range p.tables {
		m.s.UnpinOut(blocks[m.groups[g].First(p.n):])
	}
}

// events drains the events and compares them with the cache.
func (m *sim) events() error {
	events, gap := m.s.Events(nil)
	m.n["events"] += len(events)
	there := map[name]bool{}
	for _, e := range m.s.AppendHashed(nil) {
		if there[name{e.Group, e.Hash}] && m.cfg.Pool.Hash != nil {
			m.n["collision"]++
		}
		there[name{e.Group, e.Hash}] = true
	}
	if gap {
		m.n["event-gap"]++
		m.view = there
		return nil
	}
	for _, e := range events {
		at := name{e.Group, e.Hash}
		if (e.Kind == kvcache.Stored) == m.view[at] {
			return fmt.Errorf("event %+v, but known %v", e, m.view[at])
		}
		if m.view[at] = true; e.Kind == kvcache.Removed {
			delete(m.view, at)
		}
	}
	if !maps.Equal(m.view, there) {
		return fmt.Errorf("events tell %v, cached are %v", m.view, there)
	}
	return nil
}

// drain ends everything that waits for the outside, and then runs until nothing
// is left: every step has to get on.
func (m *sim) drain() error {
	m.draining = true
	for len(m.transfers) > 0 {
		if err := m.network(); err != nil {
			return fmt.Errorf("drain network: %w", err)
		}
		if err := m.after("drain network"); err != nil {
			return err
		}
	}
	for _, p := range m.pushes {
		if err := m.verify("last push", p.tables, p.n, p.n, p.want); err != nil {
			return err
		}
		m.unpin(p)
	}
	m.pushes = nil
	for _, q := range m.live {
		if q.r.state == stateHeld {
			if err := m.s.Proceed(q.ID); err != nil {
				return err
			}
		}
	}
	for steps := 0; len(m.live) > 0; steps++ {
		if steps > 5000 {
			return fmt.Errorf("%d requests after %d steps: %+v", len(m.live), steps, m.s.Stats())
		}
		if err := m.step(); err != nil {
			return fmt.Errorf("drain: %w", err)
		}
	}
	if err := m.events(); err != nil {
		return err
	}
	st := m.s.Stats()
	u := st.Blocks
	if u.Free+u.Cached != u.Blocks || u.Arriving+u.Leaving+st.Running+st.Waiting+st.Held+st.Reservations != 0 {
		return fmt.Errorf("at the end: %+v", st)
	}
	return m.s.Check()
}

func TestSimulation(t *testing.T) {
	runs := uint64(3000)
	switch {
	case os.Getenv("TANDEM_SOAK") == "1":
		runs = 400_000
	case testing.Short():
		runs = 1000
	}
	n := counts{}
	for seed := range runs {
		if _, err := simulate(seed, 0, n); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	names := slices.Collect(maps.Keys(n))
	sort.Strings(names)
	for _, name := range names {
		t.Logf("%-28s %d", name, n[name])
	}
	for _, name := range paths {
		if n[name] == 0 {
			t.Errorf("path %s never ran in %d runs", name, runs)
		}
	}
}

// The same events make the same decisions.
func TestSimulationRepeats(t *testing.T) {
	for seed := range uint64(50) {
		first, err := simulate(seed, 0, counts{})
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if second, _ := simulate(seed, 0, counts{}); second != first {
			t.Fatalf("seed %d decides differently the second time", seed)
		}
	}
}

// A simulation proves only what it would notice.
func TestSimulationFindsFaults(t *testing.T) {
	const within = 500 // seeds
	for name, broken := range map[string]fault{
		"preemption frees arriving blocks":   faultPreemptFreesArriving,
		"lost frees before the lease ends":   faultLostFrees,
		"shared block written":               faultSharedWritten,
		"abort frees under the running step": faultAbortFrees,
		"a hit covers what is to be scored":  faultScoreHits,
		"a refused guess's KV is kept":       faultDraftsKept,
		"window one token short":             faultWindowShort,
		"window keeps what fell out":         faultWindowKept,
		"blocks of the step ahead are freed": faultAheadFrees,
		"doubles are freed under a step":     faultDoublesFree,
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(within) {
				if _, err := simulate(seed, broken, counts{}); err != nil {
					first, _, _ := strings.Cut(err.Error(), "\n")
					t.Logf("found with seed %d: %s", seed, first)
					return
				}
			}
			t.Errorf("not found in %d seeds", within)
		})
	}
}
