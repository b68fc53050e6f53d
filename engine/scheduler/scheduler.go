// Package scheduler decides, step by step, which tokens of which requests the
// model computes, and which blocks hold their KV.
//
// There are no phases. A request is a list of tokens. The KV of its first
// `computed` tokens is in its block table, and the request catches up within the
// step's token budget. Each step first places every request that lacks one token
// (decoding), then chunks of longer gaps, then admits waiting requests, all in
// rank order. Prefix hits, chunks, preemption and KV from another node only move
// `computed`.
//
// When memory runs out, a request of a lower rank is preempted: of the lowest
// priority, the one that loses the least. It later recomputes what the cache has
// not kept. Draft tokens (Config.Draft) use what the step has left. Each request
// gets as many as its own acceptance justifies. The device samples after each of
// them and keeps those that it would have sampled without drafts. Rank is arrival
// time, moved by a fixed head start per priority level. It is a total order in
// which every request eventually comes first, so that none starves.
//
// A request has a block table for each KV group of the model. A group with a
// window frees the blocks that fall out of it. Only groups without a window grow
// with the length of the request.
//
// Invariant: positions at and after `computed` are in blocks that belong to this
// request alone and are not in the prefix cache. So a step writes nothing that
// another request can read. A block that the network may write is in no block
// table.
//
// The package does not sample, does not know when a request is finished, has no
// clock and no goroutine, and touches no KV memory. It is not safe for
// concurrent use. Every other call is legal between Schedule and Update, because
// requests arrive and end while a step runs. Ahead may return a second step while
// one runs, if that second step only decodes.
package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Defaults and bounds of a Config.
const (
	// DefaultMaxBatchedTokens keeps a step with a full chunk short, so that
	// requests that decode in the same step do not visibly stutter.
	DefaultMaxBatchedTokens = 2048
	// DefaultMaxSeqs is where batching has gained most of what it can gain.
	DefaultMaxSeqs = 256
	// DefaultMaxQueued is four full batches. A request that would wait longer is
	// better served by another node.
	DefaultMaxQueued = 4 * DefaultMaxSeqs
	// DefaultArrivingFraction leaves half the pool to running requests, however
	// many prompts arrive at once.
	DefaultArrivingFraction = 0.5
	// DefaultWatermark is the part of the pool that admission and reservations leave free.
	// Running requests can then grow for some steps before one of them is preempted.
	DefaultWatermark = 0.01
	// DefaultPriorityHeadStart is how much earlier one priority level makes a
	// request rank. It is longer than usual queues, so that priorities are strict
	// in practice, and finite, so that the lowest priority is not starved.
	DefaultPriorityHeadStart = 30 * time.Second

	// maxPriority bounds |Priority|, so that a head start cannot overflow.
	maxPriority = 1 << 16
	// maxHint bounds the number of tokens that Request.MaxNew allocates up front.
	maxHint = 4096
)

// Errors of the package. A call that returns one of them has changed nothing.
var (
	ErrConfig             = errors.New("scheduler: bad config")
	ErrQueueFull          = errors.New("scheduler: queue is full")
	ErrTooLong            = errors.New("scheduler: request is too long")
	ErrEmpty              = errors.New("scheduler: request has no tokens")
	ErrDuplicate          = errors.New("scheduler: duplicate request")
	ErrUnknownRequest     = errors.New("scheduler: no such request")
	ErrUnknownReservation = errors.New("scheduler: no such reservation")
	ErrNotHeld            = errors.New("scheduler: request is not held")
	ErrReserved           = errors.New("scheduler: request has a live reservation")
	ErrLost               = errors.New("scheduler: reservation was given up")
	ErrNoRoom             = errors.New("scheduler: no room for arriving blocks")
	ErrNeverFits          = errors.New("scheduler: more blocks than may ever arrive at once")
	ErrNothingMissing     = errors.New("scheduler: nothing is missing")
	ErrRange              = errors.New("scheduler: reservation is out of range")
	ErrScore              = errors.New("scheduler: request cannot be scored")
)

// RequestID identifies a request among those in the scheduler.
type RequestID uint64

// Request is the argument of Add.
type Request struct {
	ID          RequestID
	Root        kvcache.Hash       // where its block hashes start
	RootDigest  kvcache.RootDigest // where its digests start; zero: at Root
	Tokens      []int32            // prompt, and output so far if it resumes; copied
	ComputeOnly bool               // a prefill job: compute the KV of all Tokens, sample nothing, then finish
	Hold        bool               // KV is expected from another node: not scheduled until Arrived or Proceed
	NoCacheRead bool               // read nothing from the cache; computed blocks still enter it
	Priority    int                // lower goes first; clamped to ±65536
	Ticket      uint64             // identifies the request to the function of OrderBy
	Guided      bool               // Config.Guide drafts for it
	MaxNew      int                // tokens that it may still sample; only a hint that sizes buffers, 0 is valid

	// Chain, if not nil, identifies the tokens, whose values then do not count. It has a link for each
	// unit that the request can fill. Tokens is not copied, and its capacity may be written.
	Chain *kvcache.Chain

	// Once ends the request with its first sample, so that it may fill MaxModelLen and has no drafts.
	Once bool

	// Score is the number of leading tokens, fewer than all, whose following
	// logits are wanted. These tokens are computed in order, each row once,
	// whatever the cache holds. It excludes Hold and ComputeOnly.
	Score int
}

// Config sizes a scheduler. A zero field means the default of the same name.
type Config struct {
	Pool              kvcache.Config
	MaxBatchedTokens  int           // tokens per step, at least MaxSeqs so that decoding never waits for chunks
	MaxSeqs           int           // running requests
	MaxOutputs        int           // rows of logits per step; 0 means MaxSeqs, one for each running request
	MaxQueued         int           // held and waiting requests; preemption may exceed it
	MaxModelLen       int           // tokens per request, output included; 0 means what the pool holds
	ArrivingFraction  float64       // part of the pool that may have incoming pins, (0, 1]
	Watermark         float64       // part of the pool kept for running requests, [0, 1); less than a block is none
	PriorityHeadStart time.Duration // how much earlier one priority level makes a request rank

	// Draft, if set, appends at most n draft tokens to tokens. It must be a
	// function of tokens alone, and cheap compared with a row of the step. A
	// request gets at most MaxDrafts draft tokens: fewer if few of its earlier
	// ones were accepted, none if the step has no room. One more is requested than
	// the step computes.
	Draft     func(tokens []int32, n int) []int32
	MaxDrafts int
	// DraftAll, if set, replaces Draft and drafts for all sequences of a step at
	// once. It may leave a request without drafts. It is not called for a request's
	// first sample. The number of drafts does not adapt, because each draft costs a
	// run of DraftAll's model and none is free to be compared with the samples.
	DraftAll func(requests []DraftRequest)
	// Guide drafts for Guided requests instead of Draft. It appends at most n draft tokens
	// to tokens, of which at most guesses may be guessed; the others are certain to be sampled.
	// It may draft up to DraftLimit tokens, whatever MaxDrafts is.
	Guide func(id RequestID, tokens []int32, n, guesses int) []int32
}

// DraftRequest is a request that may get draft tokens: at most MaxDrafts of them are to be
// appended to Tokens, which are all tokens of the request.
type DraftRequest struct {
	ID        RequestID
	Tokens    []int32
	MaxDrafts int
}

// DraftLimit bounds MaxDrafts: drafts further ahead are almost never accepted.
const DraftLimit = 16

// Scheduler is the state machine. It is owned by one goroutine.
type Scheduler struct {
	cfg         Config
	pool        *kvcache.Pool
	groups      []kvcache.Group
	maxArriving int // blocks
	watermark   int // blocks

	byID         map[RequestID]*request // never ranged over
	held         []*request             // by rank, best first; so are waiting and running
	waiting      []*request
	running      []*request
	reservations []*reservation // by ID, live and lost
	roomQueue    []roomWaiter   // requests that wait for room, in order
	lastID       ReservationID
	arrivals     uint64 // requests added so far

	// The step between Schedule and Update; the slices are reused.
	stepping      bool
	budget        int        // tokens left while a batch is made
	spareRows     int        // rows of logits left after one for each request
	scoreRows     int        // prompt rows that may still be scored in this step
	placed        []*request // in batch order, preempted ones included
	inStep        []*request // requests of the batch, then those of Completed
	batch         Batch
	candidates    []candidate // requests that may be preempted
	victims       []*request  // the requests of candidates
	draftRequests []DraftRequest
	drafting      []*request // the requests of draftRequests
	done          []RequestID
	views         [][]kvcache.BlockID // block tables of Batch, [placed × groups]

	maxScores int // of LimitScores; 0: none
	maxTokens int // of LimitTokens; 0: none

	order func([]Work) // of OrderBy; nil: by arrival
	work  []Work       // reused

	next       ahead             // the step after it, if Ahead has returned one
	duplicates []kvcache.BlockID // duplicates removed from tables, which the step ahead may read

	counters counters
	fault    fault // rule that a test switches off; zero otherwise
}

// counters only grow.
type counters struct {
	prefixQueries, prefixHits     uint64 // tokens
	externalQueries, externalHits uint64 // tokens
	preemptions                   uint64
	reclaimed                     uint64
	queueFull                     uint64
	admitted                      uint64
	queueTime                     time.Duration
	drafts                        uint64             // Seqs that had draft tokens
	drafted                       uint64             // tokens
	accepted                      [DraftLimit]uint64 // tokens, by their place among the drafts
}

// fault switches off one rule, so that tests can prove that they would notice.
type fault uint8

const (
	faultPreemptFreesArriving fault = iota + 1 // preemption removes incoming pins
	faultLostFrees                             // Lost removes incoming pins before the lease has ended
	faultSharedWritten                         // a hit covers the last token too, which is then recomputed in place
	faultAbortFrees                            // Abort frees blocks that the running step writes
	faultScoreHits                             // a hit covers tokens that are still to be scored
	faultDraftsKept                            // KV of a rejected draft counts as that of the token in its place
	faultWindowShort                           // a block is freed while one of its tokens is still in the window
	faultWindowKept                            // blocks that fell out of the window are kept
	faultPreemptByRank                         // the last request by rank is preempted, whatever it loses
	faultAheadFrees                            // a finished request frees blocks that the step ahead writes
	faultDoublesFree                           // a duplicate block that the step ahead reads is freed
)

// New returns a scheduler with an empty pool.
func New(cfg Config) (*Scheduler, error) {
	pool, err := kvcache.NewPool(cfg.Pool)
	if err != nil {
		return nil, err
	}
	setDefault(&cfg.MaxBatchedTokens, DefaultMaxBatchedTokens)
	setDefault(&cfg.MaxSeqs, DefaultMaxSeqs)
	setDefault(&cfg.MaxOutputs, cfg.MaxSeqs)
	setDefault(&cfg.MaxQueued, DefaultMaxQueued)
	setDefault(&cfg.ArrivingFraction, DefaultArrivingFraction)
	setDefault(&cfg.Watermark, DefaultWatermark)
	setDefault(&cfg.PriorityHeadStart, DefaultPriorityHeadStart)
	longest := LongestFit(pool.Groups(), cfg.Pool.Blocks, cfg.MaxBatchedTokens)
	setDefault(&cfg.MaxModelLen, longest)
	if cfg.MaxSeqs < 1 || cfg.MaxQueued < 1 || cfg.MaxModelLen < 1 {
		return nil, fmt.Errorf("%w: MaxSeqs %d, MaxQueued %d and MaxModelLen %d have to be at least 1",
			ErrConfig, cfg.MaxSeqs, cfg.MaxQueued, cfg.MaxModelLen)
	}
	if cfg.MaxBatchedTokens < cfg.MaxSeqs {
		return nil, fmt.Errorf("%w: MaxBatchedTokens %d is less than MaxSeqs %d: a full batch could not decode in one step",
			ErrConfig, cfg.MaxBatchedTokens, cfg.MaxSeqs)
	}
	if cfg.MaxOutputs < cfg.MaxSeqs || cfg.MaxDrafts < 0 || cfg.MaxDrafts > DraftLimit {
		return nil, fmt.Errorf("%w: MaxOutputs %d (at least MaxSeqs, %d), MaxDrafts %d (0 to %d)",
			ErrConfig, cfg.MaxOutputs, cfg.MaxSeqs, cfg.MaxDrafts, DraftLimit)
	}
	if cfg.MaxModelLen > longest {
		return nil, fmt.Errorf("%w: MaxModelLen %d does not fit the pool, which holds %d tokens (%d blocks, %d groups): lower it or add KV memory",
			ErrConfig, cfg.MaxModelLen, longest, cfg.Pool.Blocks, len(pool.Groups()))
	}
	if !(cfg.ArrivingFraction > 0 && cfg.ArrivingFraction <= 1 && cfg.Watermark >= 0 && cfg.Watermark < 1) ||
		cfg.PriorityHeadStart < 0 || cfg.PriorityHeadStart > time.Hour {
		return nil, fmt.Errorf("%w: ArrivingFraction %v (above 0, at most 1), Watermark %v (0 to below 1), PriorityHeadStart %v (0 to 1h)",
			ErrConfig, cfg.ArrivingFraction, cfg.Watermark, cfg.PriorityHeadStart)
	}
	return &Scheduler{
		cfg:         cfg,
		pool:        pool,
		groups:      pool.Groups(),
		maxArriving: int(cfg.ArrivingFraction * float64(cfg.Pool.Blocks)),
		watermark:   int(cfg.Watermark * float64(cfg.Pool.Blocks)),
		byID:        make(map[RequestID]*request),
	}, nil
}

// LongestFit returns the largest number of tokens of a sequence that a pool of
// nBlocks can hold alone, if it is computed in steps of at most chunk tokens.
func LongestFit(groups []kvcache.Group, nBlocks, chunk int) int {
	most := 0
	for _, g := range groups {
		most = max(most, nBlocks*g.BlockTokens)
	}
	if slices.ContainsFunc(groups, func(g kvcache.Group) bool { return g.Window > 0 }) {
		most = max(most, 1<<24) // a window needs no more for a longer one
	}
	return sort.Search(most, func(n int) bool { return kvcache.Peak(groups, n+1, chunk) > nBlocks })
}

func setDefault[T int | float64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Add accepts a request and returns how many of its tokens are cached: whole
// blocks, at most n-1 of n tokens unless it is ComputeOnly. A request on hold
// references these blocks from now on. A running request may still take them when
// memory runs out; Reserve then starts further left. For other requests the
// number is a forecast.
func (s *Scheduler) Add(q Request, now time.Duration) (cached int, err error) {
	n := len(q.Tokens)
	longest := s.cfg.MaxModelLen
	if !q.ComputeOnly && !q.Once {
		longest-- // room for at least one token of output
	}
	switch {
	case n == 0:
		return 0, fmt.Errorf("%w: request %d", ErrEmpty, q.ID)
	case n > longest:
		return 0, fmt.Errorf("%w: request %d has %d tokens, at most %d can be served", ErrTooLong, q.ID, n, longest)
	case q.Score < 0 || q.Score >= n || q.Score > 0 && (q.Hold || q.ComputeOnly):
		return 0, fmt.Errorf("%w: request %d, %d of %d tokens, hold %v, compute only %v", ErrScore, q.ID, q.Score, n, q.Hold, q.ComputeOnly)
	case s.byID[q.ID] != nil:
		return 0, fmt.Errorf("%w: request %d", ErrDuplicate, q.ID)
	case len(s.waiting)+len(s.held) >= s.cfg.MaxQueued:
		s.counters.queueFull++
		return 0, fmt.Errorf("%w: request %d with %d held and %d waiting, at most %d",
			ErrQueueFull, q.ID, len(s.held), len(s.waiting), s.cfg.MaxQueued)
	}
	s.arrivals++
	r := s.newRequest(q)
	r.queuedAt = now
	r.level = min(max(q.Priority, -maxPriority), maxPriority)
	r.rank = rank{
		due:     now + time.Duration(r.level)*s.cfg.PriorityHeadStart,
		arrival: s.arrivals,
	}
	s.byID[q.ID] = r
	if !q.Hold {
		r.state = stateWaiting
		s.waiting = insert(s.waiting, r)
		return s.lookup(r), nil
	}
	r.state = stateHeld
	s.held = insert(s.held, r)
	s.attach(r)
	return r.computed, nil
}

// Proceed ends a hold: this node computes what is not cached. A live reservation
// is given up as by Lost.
func (s *Scheduler) Proceed(id RequestID) error {
	r, err := s.heldRequest(id, "proceed")
	if err != nil {
		return err
	}
	if r.reservation != nil {
		s.giveUp(r.reservation)
	}
	s.unhold(r)
	return nil
}

// SitOut keeps a request from sampling until it is called with false: the request computes all of
// its tokens but the last. Its rank and its blocks stay.
func (s *Scheduler) SitOut(id RequestID, out bool) {
	if r := s.byID[id]; r != nil {
		r.sitsOut = out
	}
}

// Abort ends a request in any state. Blocks that the running step writes are
// freed by Update, which ignores the request's result. Blocks of a reservation
// are freed after Arrived or Release. The ID can be reused at once; in the
// running batch it still means the old request.
func (s *Scheduler) Abort(id RequestID) error {
	r := s.byID[id]
	if r == nil {
		return fmt.Errorf("%w: abort %d", ErrUnknownRequest, id)
	}
	s.remove(r)
	if r.inStep {
		if s.fault != faultAbortFrees {
			return nil
		}
		r.scheduled, r.drafts, r.extra = 0, 0, 0
	}
	s.release(r)
	return nil
}

// PinOut keeps the content of blocks while a push reads them, even after their
// request ends. Only a block in a block table can be pinned.
func (s *Scheduler) PinOut(blocks []kvcache.BlockID) {
	for _, id := range blocks {
		s.pool.PinOut(id)
	}
}

// UnpinOut ends PinOut. It unpins the last block first, so that the cache evicts a
// prefix after what follows it.
func (s *Scheduler) UnpinOut(blocks []kvcache.BlockID) {
	for i := len(blocks) - 1; i >= 0; i-- {
		s.pool.UnpinOut(blocks[i])
	}
}

// Cached returns the length of the longest cached prefix in tokens, whole blocks
// only. It changes nothing.
func (s *Scheduler) Cached(root kvcache.Hash, tokens []int32) int {
	chain := s.pool.NewChain(root, len(tokens))
	s.pool.Extend(&chain, tokens)
	return s.pool.Match(&chain, len(tokens))
}

// Tables returns a request's current block tables, one per group, or nil if the
// request is unknown. Places before a group's window hold kvcache.NoBlock. The
// tables are read-only and valid until the next call. Those of a held request
// hold its cached prefix, without reserved blocks.
func (s *Scheduler) Tables(id RequestID) [][]kvcache.BlockID {
	r := s.byID[id]
	if r == nil {
		return nil
	}
	return r.appendTables(nil)
}

// Align returns the pool's alignment; see kvcache.Pool.Align.
func (s *Scheduler) Align() int { return s.pool.Align() }

// Groups returns the pool's groups, defaults filled in. They must not be changed.
func (s *Scheduler) Groups() []kvcache.Group { return s.groups }

// Events appends the changes of the prefix cache since the last call; see
// kvcache.Pool.Events.
func (s *Scheduler) Events(dst []kvcache.Event) (events []kvcache.Event, gap bool) {
	return s.pool.Events(dst)
}

// HasEvents reports whether Events would return an event.
func (s *Scheduler) HasEvents() bool { return s.pool.HasEvents() }

// AppendHashed appends a snapshot of the prefix cache. Later Events continue it.
func (s *Scheduler) AppendHashed(dst []kvcache.Event) []kvcache.Event {
	return s.pool.AppendHashed(dst)
}

// Stats are current gauges, and counters since New.
type Stats struct {
	Running, Waiting, Held int
	Pending                int                // tokens to compute before the running and waiting requests can advance by one
	Wanted                 int                // blocks that requests lack for the tokens that they have
	StepTokens             int                // most tokens of a step
	Reservations           int                // live, and lost but not yet released
	Blocks                 kvcache.Usage      // by state
	PrefixQueries          uint64             // tokens that were looked up, once per request
	PrefixHits             uint64             // of these, tokens that were cached
	ExternalQueries        uint64             // tokens that were requested from another node, once per request
	ExternalHits           uint64             // tokens that arrived and entered a request's table
	Fetching               int                // held requests with a live reservation
	Fetched                int                // waiting requests with KV that arrived
	ArrivingLimit          int                // blocks that may be arriving at once
	Preemptions            uint64             // requests that lost computed or arrived KV
	Reclaimed              uint64             // held requests that lost their cached prefix
	QueueFull              uint64             // requests refused because the queue was full
	Admitted               uint64             // requests that started to run, once each
	QueueTime              time.Duration      // sum over Admitted from Add to the first step
	Drafts                 uint64             // times that tokens were drafted for a request
	Drafted                uint64             // tokens that were drafted
	Accepted               [DraftLimit]uint64 // of these, accepted tokens, by their place
}

// Stats returns the current numbers.
func (s *Scheduler) Stats() Stats {
	return Stats{
		Running: len(s.running), Waiting: len(s.waiting), Held: len(s.held),
		Pending:         s.pending(),
		Wanted:          s.wanted(),
		StepTokens:      s.stepTokens(),
		Reservations:    len(s.reservations),
		Blocks:          s.pool.Usage(),
		PrefixQueries:   s.counters.prefixQueries,
		PrefixHits:      s.counters.prefixHits,
		ExternalQueries: s.counters.externalQueries,
		ExternalHits:    s.counters.externalHits,
		Fetching:        s.fetching(),
		Fetched:         s.fetched(),
		ArrivingLimit:   s.maxArriving,
		Preemptions:     s.counters.preemptions,
		Reclaimed:       s.counters.reclaimed,
		QueueFull:       s.counters.queueFull,
		Admitted:        s.counters.admitted,
		QueueTime:       s.counters.queueTime,
		Drafts:          s.counters.drafts,
		Drafted:         s.counters.drafted,
		Accepted:        s.counters.accepted,
	}
}

// pending returns the number of tokens to compute, without the one that each step adds.
func (s *Scheduler) pending() (n int) {
	for _, r := range s.running {
		n += max(0, r.missing()-1)
	}
	for _, r := range s.waiting {
		n += r.missing()
	}
	return n
}

// wanted returns the number of blocks that the requests lack for the tokens that
// they have. Requests with a live reservation lack none.
func (s *Scheduler) wanted() (n int) {
	for _, queue := range [...][]*request{s.running, s.waiting, s.held} {
		for _, r := range queue {
			if r.reservation == nil {
				n += s.blocksNeeded(r, r.computed)
			}
		}
	}
	return n
}

// fetching returns the number of held requests whose KV is being transferred.
func (s *Scheduler) fetching() (n int) {
	for _, res := range s.reservations {
		if res.live && res.r.state == stateHeld {
			n++
		}
	}
	return n
}

// fetched returns the number of waiting requests whose KV has arrived.
func (s *Scheduler) fetched() (n int) {
	for _, r := range s.waiting {
		if r.arrived > 0 {
			n++
		}
	}
	return n
}
