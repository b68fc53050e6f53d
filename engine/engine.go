// Package engine is the loop between the scheduler and the device: one goroutine
// schedules a batch, runs it, emits the sampled tokens and starts again. Only that
// goroutine, the step goroutine, uses the scheduler, the block pool and the
// device. Other goroutines post functions to an inbox, which run between two
// steps.
//
// If the device accepts a step while another one runs, the engine submits steps
// that only decode one ahead. They start from tokens that the host has not read
// yet. A token after one that turns out to be the last is dropped.
//
// Invariant: a step never waits for a receiver. Emit, Layer and the other
// callbacks run on the step goroutine and must not block; receivers queue what
// they get, with a bound of their own.
//
// The package knows tokens and blocks. It does not know text, the transport of
// requests, nodes or leases. What runs next is decided by the scheduler.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/draft"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Errors of the engine. Errors of the scheduler are returned wrapped, so that
// errors.Is finds them.
var (
	ErrClosed = errors.New("engine: stopped")
	ErrConfig = errors.New("engine: options do not fit together")
	ErrToken  = errors.New("engine: token id outside the vocabulary")
	ErrStep   = errors.New("engine: the step failed")
	ErrStuck  = errors.New("engine: all KV blocks are pinned by jobs that wait for blocks")
)

// Model is what the step loop needs of a loaded model. *model.Model implements it.
type Model interface {
	Step(step *backend.Step, onMark func(layer int)) error
	Logits() backend.Buf
	VocabSize() int
}

// Options configure an engine.
type Options struct {
	Model     Model
	Backend   backend.Backend
	KV        backend.KVSpec
	Scheduler scheduler.Config
	Logger    *slog.Logger

	Workers    int          // tensor-parallel workers, each with KV pages of its own; 0: 1
	WorkerLost <-chan error // receives the error of a lost worker; nil: no worker can be lost

	// AdapterPlaces is the number of places of Adapters; 0: none. New loads Modules.
	Adapters      AdapterDevice
	AdapterPlaces int
	Modules       []AdapterModule
	AdapterRoot   string // absolute path, without links, of the only folder that LoadAdapter reads; empty: any

	// StepTime bounds how long the chunks of a step take, for engines that only
	// compute prompts for other nodes; 0: only Scheduler.MaxBatchedTokens bounds them.
	StepTime time.Duration

	// Synchronous makes every step wait for the tokens of the one before, even if
	// the device can overlap steps. It is for comparison.
	Synchronous bool

	// Classifier is the matrix of PoolScores, [labels, hidden]; nil: the model has none.
	Classifier []float32

	// Drafter, if set, drafts up to Scheduler.MaxDrafts tokens.
	Drafter Drafter

	// Vocabulary returns the model's tokens for requests with a Grammar; nil: they are refused. It
	// is called for the first of them.
	Vocabulary     func() (masks.Vocabulary, error)
	GrammarLimits  grammar.Limits
	MaskWorkers    int // goroutines that compute masks; 0: masks.DefaultWorkers
	MaskCacheBytes int // of masks and states of all grammars; 0: masks.DefaultCacheBytes

	// OnStep is called on the step goroutine after the tokens of a step have been
	// emitted, so that the receiver can send one frame per step. It is called once
	// more when the engine has stopped.
	OnStep func()
	// OnBlocks receives what entered and left the prefix cache, in order. The slice
	// is valid during the call. If gap is set, the events are a snapshot of the
	// whole cache, because events were lost or a snapshot was requested.
	OnBlocks func(events []kvcache.Event, gap bool)
	// Watch receives what the engine measures.
	Watch Watch
	// Probe receives the logits [vocab] of every sampled token before the token is
	// emitted. It is for tests and diagnosis, nil in service.
	Probe func(r *Request, position int, logits []float32)
}

// Engine steps one model. New makes it, Run runs it.
type Engine struct {
	o        Options
	log      *slog.Logger
	stopErr  error // why the engine stopped by itself; written before done is closed
	sched    *scheduler.Scheduler
	start    time.Time
	next     atomic.Uint64 // request ids
	progress atomic.Uint64 // steps, and layers of steps with jobs
	loaded   atomic.Pointer[[]Adapter]

	// Owned by the step goroutine.
	live            map[scheduler.RequestID]*run
	adapters        adapters
	adaptersChanged bool            // count.Adapters is out of date
	batch           scheduler.Batch // the running one
	step            backend.Step
	tables          [][]int32 // block tables of step, [spans × groups]
	results         []scheduler.Result
	sampled         []int32 // tokens of the results
	draftRequests   []draft.Request
	logits          []float32
	events          []kvcache.Event
	emitted         time.Duration // when the last step's tokens were read
	count           Stats
	pushing         int                                                        // jobs that have ended and whose pushes still pin blocks
	spareInbox      []func()                                                   // second buffer of the inbox
	awaiting        map[scheduler.RequestID]func(scheduler.Reservation, error) // callbacks of ReserveInTurn
	onMark          func(layer int)                                            // layerDone, bound once

	scorer         backend.Scorer    // nil: the host computes log-probabilities from logits
	rows           backend.RowReader // nil: logits are copied, and read on the step goroutine
	kernels        sample.Kernels    // used by rate
	logprobRows    []logprobRow      // rows for rate
	outputLogprobs []*LogProbs       // [outputs of the step], nil if not requested
	pace           scorePace
	stepPace       scheduler.Pace
	hiddenModel    hiddenModel                              // nil: there are no vectors
	hidden         []float32                                // [outputs × hidden] of the step, if a request has Pool
	ruler          backend.Ruler                            // nil: the host applies the rules of requests
	mirror         backend.Mirror                           // nil: KVRegion is the device's own memory
	direct         backend.Direct                           // nil: the network cannot reach the device's memory
	arrivals       []arrival                                // that the device has not completed
	fetch          [][]int32                                // [groups] blocks that the step's jobs push and the mirror lacks
	digest         [][]int32                                // [groups] blocks that pushes read in the device's memory
	starter        starter                                  // nil: steps do not overlap
	inflight       []inflightStep                           // steps on the device, at most two, the oldest first
	collectedAt    time.Duration                            // when the last collected step ended
	lookAheadFunc  func(scheduler.RequestID) scheduler.Next // lookAhead, bound once
	masks          *masks.Masks                             // nil: no request has a Grammar
	guided         []pendingGuide                           // requests whose mask is not known

	mu     sync.Mutex
	inbox  []func()
	closed bool
	stats  Stats
	wake   chan struct{} // capacity 1
	done   chan struct{}
}

// run is the engine's side of one scheduled request.
type run struct {
	req       *Request            // nil for a job
	job       *Job                // nil for a request
	prompt    int                 // tokens at Add, output of earlier attempts included
	output    int                 // tokens generated, earlier attempts included
	adapter   *adapterPlace       // nil: none
	running   bool                // takes part in steps: admitted, and not preempted since
	hostRules bool                // its rules exceed what the device applies
	pinned    [][]kvcache.BlockID // of a job: the block last pinned for each place of its tables, per group
	fetched   [][]kvcache.BlockID // of a job: the block last copied to the mirror for each place
	stats     RequestStats
	guide     *masks.Guide // nil: not constrained
	rowSum    []float64    // [hidden] of the rows so far, with PoolMean
}

// New checks the options and returns an engine. Run starts it.
func New(o Options) (*Engine, error) {
	var e *Engine
	if o.Drafter != nil {
		o.Scheduler.DraftAll = func(requests []scheduler.DraftRequest) { e.draftAll(requests) }
	}
	states := slices.ContainsFunc(o.KV.Groups, func(g backend.KVGroup) bool { return g.State > 0 })
	if states && (o.Drafter != nil || o.Scheduler.Draft != nil) {
		return nil, fmt.Errorf("%w: a rejected guess would change the states of the model", ErrConfig)
	}
	if o.Vocabulary != nil && !states {
		o.Scheduler.Guide = func(id scheduler.RequestID, tokens []int32, n, guesses int) []int32 {
			return e.guideDrafts(id, tokens, n, guesses)
		}
	}
	s, err := scheduler.New(o.Scheduler)
	if err != nil {
		return nil, err
	}
	groups := s.Groups()
	if want := memory.Groups(o.KV); !slices.Equal(groups, want) || o.KV.Blocks < o.Scheduler.Pool.Blocks {
		return nil, fmt.Errorf("%w: the scheduler has %d blocks in groups %+v, the device %d in %+v",
			ErrConfig, o.Scheduler.Pool.Blocks, groups, o.KV.Blocks, want)
	}
	if o.Scheduler.MaxModelLen == 0 {
		chunk := cmp.Or(o.Scheduler.MaxBatchedTokens, scheduler.DefaultMaxBatchedTokens)
		o.Scheduler.MaxModelLen = scheduler.LongestFit(groups, o.Scheduler.Pool.Blocks, chunk) // as the scheduler takes it
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	e = &Engine{
		o: o, log: o.Logger, sched: s, start: time.Now(),
		live: make(map[scheduler.RequestID]*run), awaiting: make(map[scheduler.RequestID]func(scheduler.Reservation, error)),
		wake: make(chan struct{}, 1), done: make(chan struct{}),
		adapters: newAdapters(o.AdapterPlaces),
	}
	e.stepPace = scheduler.NewPace(o.StepTime, cmp.Or(o.Scheduler.MaxBatchedTokens, scheduler.DefaultMaxBatchedTokens))
	e.mirror = mirrorOf(o.Backend)
	e.direct = directOf(e.mirror)
	e.scorer, _ = o.Backend.(backend.Scorer)
	e.kernels = sample.Portable{}
	if e.rows, _ = o.Backend.(backend.RowReader); e.rows != nil {
		e.kernels = e.rows.Kernels()
	}
	e.ruler, _ = o.Backend.(backend.Ruler)
	e.hiddenModel, _ = o.Model.(hiddenModel)
	e.publishAdapters()
	for _, m := range o.Modules {
		a, err := model.OpenAdapter(m.Path)
		if err == nil {
			_, err = e.place(m.Name, a, false)
		}
		if err != nil {
			return nil, fmt.Errorf("--lora-modules %s=%s: %w", m.Name, m.Path, err)
		}
	}
	e.onMark, e.lookAheadFunc, e.starter, e.inflight = e.layerDone, e.lookAhead, o.startsAhead(), make([]inflightStep, 0, 2)
	e.startMasks()
	e.publish()
	return e, nil
}

// arrivalPoll is how often an idle engine asks the device whether KV has arrived there.
const arrivalPoll = 100 * time.Microsecond

// Run steps until ctx ends, then fails what still runs with ErrClosed. If a
// tensor-parallel worker is lost, it stops with that error. It must be called once.
func (e *Engine) Run(ctx context.Context) {
	defer close(e.done)
	stop := context.AfterFunc(ctx, e.poke)
	defer stop()
	for ctx.Err() == nil && e.stopErr == nil {
		e.drainInbox()
		e.settleArrivals()
		e.reserveWaiting() // grants travel while the step runs
		more := e.stepOnce()
		e.reserveWaiting()
		if !more && e.stopErr == nil {
			e.blockEvents() // an arrival for an aborted request changes the cache without a step
			e.publish()
			var poll <-chan time.Time
			if len(e.arrivals) > 0 {
				poll = time.After(arrivalPoll)
			}
			select {
			case <-e.wake:
			case <-poll:
			case e.stopErr = <-e.o.WorkerLost:
			case <-ctx.Done():
			}
		}
	}
	for len(e.inflight) > 0 {
		e.collect(nil) // submits no further step, which would continue to the requests' ends
	}
	e.shutdown()
}

// KVSpec is the shape of the KV store.
type KVSpec = backend.KVSpec

// PageDigest is the expected checksum of a page that has landed in the device.
type PageDigest = backend.PageDigest

// KV returns how the model's layers share block tables and pages.
func (e *Engine) KV() KVSpec { return e.o.KV }

// Groups returns the groups of the block tables. They must not be changed.
func (e *Engine) Groups() []kvcache.Group { return e.sched.Groups() }

// Align returns the least number of tokens at which blocks of all groups end
// together. Cached prefixes and starts of reservations are multiples of it.
func (e *Engine) Align() int { return e.sched.Align() }

// Workers returns the number of tensor-parallel workers, each with KV pages of its own.
func (e *Engine) Workers() int { return max(1, e.o.Workers) }

// Done is closed when Run has returned.
func (e *Engine) Done() <-chan struct{} { return e.done }

// Err returns why Run has returned, after Done; nil if its context had ended.
func (e *Engine) Err() error { return e.stopErr }

// shutdown refuses new work and fails what is left.
func (e *Engine) shutdown() {
	e.mu.Lock()
	e.closed = true
	inbox := e.inbox
	e.inbox = nil
	e.mu.Unlock()
	for _, f := range inbox {
		f()
	}
	ids := slices.Sorted(maps.Keys(e.live))
	for _, id := range ids {
		e.abort(id)
	}
	e.publish()
	for _, id := range ids {
		e.fail(id, cmp.Or(e.stopErr, ErrClosed))
	}
	for id, ready := range e.awaiting {
		ready(scheduler.Reservation{}, fmt.Errorf("%w: request %d waited for room", cmp.Or(e.stopErr, ErrClosed), id))
	}
	clear(e.awaiting)
	if e.masks != nil {
		e.masks.Close()
	}
	e.stepEnd()
}

// poke wakes the loop.
func (e *Engine) poke() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// post queues f for the step goroutine. The inbox needs no bound of its own,
// because each request, job and reservation posts a fixed number of functions in
// its life, and the scheduler bounds those.
func (e *Engine) post(f func()) error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return ErrClosed
	}
	e.inbox = append(e.inbox, f)
	e.mu.Unlock()
	e.poke()
	return nil
}

// do runs f on the step goroutine and waits for it.
func (e *Engine) do(f func()) error {
	ran := make(chan struct{})
	if err := e.post(func() { f(); close(ran) }); err != nil {
		return err
	}
	select {
	case <-ran:
		return nil
	case <-e.done:
		// Run drains the inbox before it closes done.
		select {
		case <-ran:
			return nil
		default:
			return ErrClosed
		}
	}
}

// drainInbox runs the functions posted until now. Functions that these post wait
// for the next call, so that no caller can hold up steps.
func (e *Engine) drainInbox() {
	e.mu.Lock()
	e.inbox, e.spareInbox = e.spareInbox[:0], e.inbox
	e.mu.Unlock()
	for _, f := range e.spareInbox {
		f()
	}
	clear(e.spareInbox)
}

// stepOnce runs one step and reports whether there may be more to do. If a step is
// already on the device, it is that one.
func (e *Engine) stepOnce() bool {
	if len(e.inflight) > 0 {
		e.overlap()
		return true
	}
	if len(e.guided) > 0 {
		e.awaitMasks()
	}
	now := e.now()
	e.sched.LimitScores(e.pace.limit())
	e.batch = e.sched.Schedule(now)
	b := e.batch
	e.recordTurns(b, now)
	if len(b.Seqs) > 0 && e.canOverlap(b) {
		if err := e.submit(b, nil); err != nil {
			e.failBatch(b, err)
		} else {
			e.overlap()
		}
		return true
	}
	if len(b.Seqs) > 0 {
		if err := e.runBatch(b); err != nil {
			e.failBatch(b, err)
			return true
		}
	}
	return e.complete(b)
}

// complete ends a step whose tokens have been emitted.
func (e *Engine) complete(b scheduler.Batch) bool {
	for _, id := range b.Completed {
		e.announceCached(id)
	}
	done := e.sched.Update(b, e.results)
	e.results, e.sampled = e.results[:0], e.sampled[:0]
	if len(b.Seqs) == 0 && len(done) == 0 {
		if len(b.Preempted) > 0 {
			return true // a preempted request is kept out of this step only
		}
		if len(e.guided) == 0 { // a request that sits out frees its blocks in the end
			e.unstick()
		}
		return false
	}
	e.publish() // before a receiver acts on the results of the step
	for _, id := range done {
		e.finish(id)
	}
	e.stepEnd()
	return true
}

// unstick breaks the one deadlock that waiting cannot. A preempted job keeps its
// blocks because its push reads them, and its push lasts until the job is
// computed. When nothing can be placed, and no push or arrival under way will free
// a block, the youngest job that pins some fails.
func (e *Engine) unstick() {
	s := e.sched.Stats()
	if s.Running+s.Waiting == 0 || s.Reservations > 0 || e.pushing > 0 {
		return
	}
	var youngest scheduler.RequestID
	for id, r := range e.live {
		if r.job != nil && len(r.job.held) > 0 {
			youngest = max(youngest, id)
		}
	}
	if youngest != 0 {
		e.log.Warn("prefill job failed: all KV blocks are pinned", "id", youngest, "err", ErrStuck)
		e.abort(youngest)
		e.fail(youngest, ErrStuck)
	}
}

// runBatch runs the batch on the device and fills e.results.
func (e *Engine) runBatch(b scheduler.Batch) error {
	prompts := e.count.PromptComputed
	e.fillStep(b)
	prompts = e.count.PromptComputed - prompts
	var onMark func(int)
	e.resetFetch()
	for i := range b.Seqs {
		q := &b.Seqs[i]
		if r := e.live[q.ID]; r != nil && r.job != nil {
			e.pin(r, q.Tables)
			if e.mirror != nil {
				e.addPushBlocks(r, q.Tables, q.Start+len(q.Tokens))
			}
			onMark = e.onMark
		}
	}
	e.step.Fetch, e.step.Digest = e.fetch, e.digest
	// A push can arrive before its step has ended, and the receiver may then read
	// the counters at once.
	e.publish()
	began := time.Now()
	if err := e.o.Model.Step(&e.step, onMark); err != nil {
		return fmt.Errorf("%w: %d tokens, %d sequences: %w", ErrStep, b.Tokens, len(b.Seqs), err)
	}
	e.countStep(b, prompts, time.Since(began))
	e.emit(b, e.step.Sampled)
	e.recordPace(b, time.Since(began))
	return nil
}

// recordPace updates the bounds of later steps by the time that a step took.
func (e *Engine) recordPace(b scheduler.Batch, took time.Duration) {
	e.pace.record(b, took)
	e.stepPace.Record(b.Tokens, took)
	e.sched.LimitTokens(e.stepPace.Limit())
}

// countStep counts a step that took this long on the device.
func (e *Engine) countStep(b scheduler.Batch, prompts uint64, took time.Duration) {
	e.count.Steps++
	e.count.ratePrompts(prompts, b.Tokens, took)
	e.o.Watch.step(&b, took)
	e.progress.Add(1)
	if len(b.Seqs) > 1 {
		e.count.BatchedSteps++
	}
}

// fillStep writes the batch into e.step.
func (e *Engine) fillStep(b scheduler.Batch) {
	s := &e.step
	s.Tokens, s.Positions, e.tables = s.Tokens[:0], s.Positions[:0], e.tables[:0]
	s.Spans, s.Outputs = s.Spans[:0], s.Outputs[:0]
	e.tables = slices.Grow(e.tables, len(b.Seqs)*len(e.o.KV.Groups)) // so that no append moves them
	for i := range b.Seqs {
		q := &b.Seqs[i]
		row := len(s.Tokens)
		for j, t := range q.Tokens {
			s.Tokens = append(s.Tokens, t)
			s.Positions = append(s.Positions, int32(q.Start+j))
		}
		at := len(e.tables)
		for _, table := range q.Tables {
			e.tables = append(e.tables, blockInts(table))
		}
		r := e.live[q.ID]
		s.Spans = append(s.Spans, backend.Span{
			Row: int32(row), Tokens: int32(len(q.Tokens)), Start: int32(q.Start),
			Adapter: r.span(), Tables: e.tables[at:len(e.tables):len(e.tables)],
		})
		if r != nil {
			e.setRunning(r, true)
			e.countPrompt(r, q.Start, len(q.Tokens)-q.Drafts)
		}
		e.outputs(q, r, row)
	}
	if cap(s.Sampled) < len(s.Outputs) {
		s.Sampled = make([]int32, max(len(s.Outputs), e.o.Scheduler.MaxOutputs, e.o.Scheduler.MaxSeqs))
	}
	s.Sampled = s.Sampled[:len(s.Outputs)]
}

// countPrompt counts the prompt tokens among those that this step computes.
func (e *Engine) countPrompt(r *run, start, n int) {
	if p := min(start+n, r.prompt) - start; p > 0 {
		e.count.PromptComputed += uint64(p)
	}
}

// layerDone notifies the running batch's jobs that one more layer of their tokens
// is in place.
func (e *Engine) layerDone(layer int) {
	e.progress.Add(1)
	for i := range e.batch.Seqs {
		q := &e.batch.Seqs[i]
		if r := e.live[q.ID]; r != nil && r.job != nil {
			r.job.Layer(layer, q.Start+len(q.Tokens), q.Tables)
		}
	}
}

// finish ends a request or job that the scheduler has removed.
func (e *Engine) finish(id scheduler.RequestID) {
	r := e.live[id]
	if r == nil {
		return
	}
	e.remove(id, r)
	if r.job != nil {
		e.recordJob(r)
		e.reportEnd(r, e.now())
		e.jobDone(r.job, nil)
	}
}

// jobDone ends a job. Its blocks stay pinned until its owner releases it.
func (e *Engine) jobDone(j *Job, err error) {
	if len(j.held) > 0 {
		j.pushing = true
		e.pushing++
	}
	j.Done(err)
}

// fail ends a request or job with an error, after the scheduler has removed it.
func (e *Engine) fail(id scheduler.RequestID, err error) {
	r := e.live[id]
	if r == nil {
		return
	}
	e.remove(id, r)
	r.stats.Finish = FinishError
	e.reportEnd(r, e.now())
	if r.job != nil {
		e.jobDone(r.job, err)
		return
	}
	r.req.Emit(Token{ID: -1, Finish: FinishError, Err: err})
}

// failBatch fails everything in a batch that the device refused. What the step
// wrote is not trusted: none of it enters the prefix cache. The engine stops if no later step
// could succeed.
func (e *Engine) failBatch(b scheduler.Batch, err error) {
	e.log.Error("step failed", "err", err)
	if errors.Is(err, ErrLost) || errors.Is(err, ErrDevice) {
		e.stopErr = err
	}
	e.count.FailedSteps++
	e.results, e.sampled = e.results[:0], e.sampled[:0]
	gone := e.sched.Discard(b)
	e.publish()
	for _, id := range gone {
		e.fail(id, err)
	}
	e.stepEnd()
}

// stepEnd flushes the step's tokens and block events to their receivers.
func (e *Engine) stepEnd() {
	if e.o.OnStep != nil {
		e.o.OnStep()
	}
	e.blockEvents()
	if runtime.GOMAXPROCS(0) == 1 {
		// The receivers run before the next step. In C, that step would keep Go's only processor for
		// milliseconds, until the runtime takes it away.
		runtime.Gosched()
	}
}

func (e *Engine) blockEvents() {
	var gap bool
	e.events, gap = e.sched.Events(e.events[:0])
	if gap {
		e.events = e.sched.AppendHashed(e.events[:0])
	}
	if e.o.OnBlocks != nil && (len(e.events) > 0 || gap) {
		e.o.OnBlocks(e.events, gap)
	}
}

// PublishBlocks requests a call of OnBlocks with a snapshot of the prefix cache. It
// does not wait for the call.
func (e *Engine) PublishBlocks() {
	// An engine that has stopped has no blocks to publish.
	_ = e.post(func() {
		if e.o.OnBlocks == nil {
			return
		}
		e.events, _ = e.sched.Events(e.events[:0]) // they are in what follows
		e.events = e.sched.AppendHashed(e.events[:0])
		e.o.OnBlocks(e.events, true)
	})
}

// Sampling, Rules and their parts are re-exported so that roles need not import
// engine/sample.
type (
	Sampling = sample.Params
	Rules    = sample.Rules
	Bias     = sample.Bias
)
