package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Finish is the reason why a request's tokens ended. The numbers are those of
// FinishReason in node.proto, which travels with the last token.
type Finish uint8

// Reasons to finish.
const (
	FinishStop   Finish = 1   // an end-of-sequence or stop token, which is emitted too
	FinishLength Finish = 2   // MaxTokens or the context is used up
	FinishError  Finish = 255 // see Token.Err; never on the wire
)

// Token is one emitted token.
type Token struct {
	ID       int32
	Position int // in prompt plus output
	Finish   Finish
	Err      error     // with FinishError
	LogProbs *LogProbs // if the request wants them; owned by the receiver
	Vector   []float32 // [hidden] of a request with Pool, whose only Token this is; owned by the receiver
}

// LogProbs describes a token under the model's own distribution, before
// temperature, penalties and masks.
type LogProbs struct {
	LogProb float32
	Rank    int          // 1 is the most probable
	Top     []sample.Top // most probable first
}

// Request is one choice of a client's request in this engine.
type Request struct {
	Root          kvcache.Hash
	RootDigest    kvcache.RootDigest // zero: from a gateway of the version before
	Prompt        []int32
	Output        []int32  // tokens of earlier attempts; they are not emitted again
	Sampling      Sampling // Add sets its Controls
	Rules         Rules
	Grammar       *Grammar // that Output and what follows match; nil: none
	LogProbs      bool     // each token has its log-probability
	TopLogProbs   int      // number of best tokens that come with it
	LogProbTokens []int32  // if not empty, the tokens that come with it instead
	MaxTokens     int      // output tokens, earlier attempts included; at least 1
	Stop          []int32  // token ids that end the output
	Priority      int
	Ticket        uint64 // identifies the request to the function of OrderJobs
	Hold          bool   // KV is expected from another node: see Reserve

	// Pool, if set, asks for the vector of the prompt instead of tokens. It excludes Output, Grammar
	// and log-probabilities, and PoolMean excludes Hold. MaxTokens is 1.
	Pool       Pool
	PoolTokens []int32 // of PoolLogits, at most maxPoolTokens

	// Adapter is the name of the adapter to compute with; empty: none. Root must
	// differ between adapters. AdapterDigest, unless 0, must be the adapter's digest.
	Adapter       string
	AdapterDigest uint64

	// OnAdded, if set, receives the cached tokens that Add returns. It is called on
	// the step goroutine before the first token, and must not block.
	OnAdded func(cached int)
	// Emit receives each token on the step goroutine and must not block.
	Emit func(Token)
	// OnFinish, if set, is called once when the request has ended, for any reason.
	// It is called on the step goroutine and must not block.
	OnFinish func(RequestStats)

	// EmitPrompt, if set, receives the log-probabilities of the prompt's tokens from
	// the second on, each with TopPromptLogProbs best tokens. They come in order and
	// once each, a chunk at a time, before the first token. first is the position of
	// the slice's first entry; the receiver owns the slice. All these tokens are
	// then computed here, whatever the cache holds, so that Hold is not possible.
	EmitPrompt        func(first int, logprobs []LogProbs)
	TopPromptLogProbs int
}

// finishAfter returns why the token just sampled is the last, or 0 if it is not.
func (r *Request) finishAfter(token int32, output, length, maxLen int) Finish {
	switch {
	case slices.Contains(r.Stop, token):
		return FinishStop
	case output >= r.MaxTokens, length >= maxLen:
		return FinishLength
	}
	return 0
}

// Job is a prompt whose KV another node needs. It is computed, and nothing is
// sampled.
type Job struct {
	Root       kvcache.Hash
	RootDigest kvcache.RootDigest // see Request
	Tokens     []int32
	Priority   int
	Ticket     uint64 // identifies the job to the function of OrderJobs

	Adapter       string // see Request
	AdapterDigest uint64

	// First is the first place of each group's table whose block the push reads; nil
	// is all. Blocks before it are not kept for the push.
	First []int

	// Direct means that the push reads the device's own memory. Loaded.Direct must
	// support it.
	Direct bool

	// Layer is called when the KV of the first upTo tokens of this layer is stored in the
	// blocks of tables. Tokens that fell out of the group's window are left out. It is
	// called on the step goroutine, in order of layers for each chunk, and again with the
	// same or smaller upTo after a preemption. The blocks from First on do not change
	// until ReleaseJob. The slices, one per group, are valid during the call.
	Layer func(layer, upTo int, tables [][]kvcache.BlockID)
	// Done is called once on the step goroutine, unless ReleaseJob came first. err
	// is nil if Layer was called for every layer.
	Done func(err error)
	// OnFinish, if set, is called once before Done. It must not block.
	OnFinish func(RequestStats)

	// Owned by the step goroutine until ReleaseJob.
	held    []kvcache.BlockID // one pin each
	pushing bool              // ended and counted in Engine.pushing
}

// Add queues a request and returns its id and how many of its tokens are in the
// prefix cache. With Hold these are pinned, and the request waits for Reserve
// and Arrived, or Proceed.
func (e *Engine) Add(r *Request) (id scheduler.RequestID, cached int, err error) {
	tokens := make([]int32, 0, len(r.Prompt)+len(r.Output))
	tokens = append(append(tokens, r.Prompt...), r.Output...)
	if err := e.checkTokens(tokens); err != nil {
		return 0, 0, err
	}
	if err := e.checkGrammar(r); err != nil {
		return 0, 0, err
	}
	if err := cmp.Or(e.checkPool(r), e.checkTokens(r.PoolTokens)); err != nil {
		return 0, 0, err
	}
	r.Sampling.Controls = sample.NewControls(r.Rules, r.Prompt, r.Output)
	id = scheduler.RequestID(e.next.Add(1))
	score := 0
	if r.EmitPrompt != nil || r.Pool == PoolMean {
		score = max(0, len(r.Prompt)-1)
	}
	came := e.now() // a request that comes during a step waits for its end
	derr := e.do(func() {
		var adapter *adapterPlace
		if adapter, err = e.adapter(r.Adapter, r.AdapterDigest); err != nil {
			return
		}
		cached, err = e.sched.Add(scheduler.Request{
			ID: id, Root: r.Root, RootDigest: r.RootDigest, Tokens: tokens, Hold: r.Hold, Priority: r.Priority, Ticket: r.Ticket,
			MaxNew: r.MaxTokens - len(r.Output), Score: score, Guided: r.Grammar != nil, Once: r.Pool != PoolNone,
		}, e.now())
		if err == nil {
			run := &run{req: r, prompt: len(tokens), output: len(r.Output), stats: RequestStats{Prompt: len(tokens), MaxTokens: r.MaxTokens, Added: came}}
			e.register(id, run, adapter)
			e.guide(id, run)
			if r.OnAdded != nil {
				r.OnAdded(cached)
			}
		}
	})
	if derr != nil {
		err = derr
	}
	return id, cached, err
}

// AddJob queues a job and returns its id and how many of its tokens are in the
// prefix cache. The job's source blocks are pinned until ReleaseJob.
func (e *Engine) AddJob(j *Job) (id scheduler.RequestID, cached int, err error) {
	if err := e.checkTokens(j.Tokens); err != nil {
		return 0, 0, err
	}
	if j.Direct && e.direct == nil {
		return 0, 0, fmt.Errorf("%w: a push from device memory, which the network cannot reach", ErrConfig)
	}
	id = scheduler.RequestID(e.next.Add(1))
	came := e.now()
	derr := e.do(func() {
		var adapter *adapterPlace
		if adapter, err = e.adapter(j.Adapter, j.AdapterDigest); err != nil {
			return
		}
		cached, err = e.sched.Add(scheduler.Request{
			ID: id, Root: j.Root, RootDigest: j.RootDigest, Tokens: j.Tokens, ComputeOnly: true, Priority: j.Priority, Ticket: j.Ticket,
		}, e.now())
		if err == nil {
			run := &run{job: j, prompt: len(j.Tokens), stats: RequestStats{Job: true, Prompt: len(j.Tokens), Added: came}}
			e.register(id, run, adapter)
		}
	})
	if derr != nil {
		err = derr
	}
	return id, cached, err
}

// OrderJobs sets order to sort jobs and requests before each step, best first, on the
// step goroutine; see scheduler.Scheduler.OrderBy. It is for engines that only have jobs
// and requests for vectors. order must not block.
func (e *Engine) OrderJobs(order func(work []scheduler.Work)) {
	e.later(func() { e.sched.OrderBy(order) })
}

// CheckJob returns the error that AddJob would return whatever the load is, so that
// a job can be refused before it waits for its turn.
func (e *Engine) CheckJob(tokens []int32) error {
	if n, longest := len(tokens), e.o.Scheduler.MaxModelLen; n > longest {
		return fmt.Errorf("%w: %d tokens, at most %d can be computed", scheduler.ErrTooLong, n, longest)
	}
	return e.checkTokens(tokens)
}

// ReleaseJob releases a job's source blocks after its push has ended. It ends a job
// that still runs.
func (e *Engine) ReleaseJob(id scheduler.RequestID, j *Job) {
	e.later(func() {
		e.drop(id)
		e.sched.UnpinOut(j.held)
		j.held = nil
		if j.pushing {
			j.pushing = false
			e.pushing--
		}
	})
}

// Reserve allocates blocks for the KV of a held request's tokens up to upTo, which
// another node will write.
func (e *Engine) Reserve(id scheduler.RequestID, upTo int) (res scheduler.Reservation, err error) {
	if derr := e.do(func() { res, err = e.sched.Reserve(id, upTo) }); derr != nil {
		err = derr
	}
	return res, err
}

// ReserveInTurn is Reserve, but the request waits for room if there is none. Then
// the error is scheduler.ErrNoRoom and not scheduler.ErrNeverFits. ready is called
// once, on the step goroutine, when its turn comes or the wait fails, unless
// StopWaiting ended it. ready must not block.
func (e *Engine) ReserveInTurn(id scheduler.RequestID, upTo int, ready func(scheduler.Reservation, error)) (res scheduler.Reservation, err error) {
	derr := e.do(func() {
		res, err = e.sched.ReserveInTurn(id, upTo)
		if errors.Is(err, scheduler.ErrNoRoom) && !errors.Is(err, scheduler.ErrNeverFits) {
			e.awaiting[id] = ready
		}
	})
	if derr != nil {
		err = derr
	}
	return res, err
}

// StopWaiting ends a wait of ReserveInTurn. It returns false if ready was called before.
func (e *Engine) StopWaiting(id scheduler.RequestID) (waited bool) {
	derr := e.do(func() {
		waited = e.sched.StopWaiting(id)
		delete(e.awaiting, id)
	})
	return waited && derr == nil
}

// reserveWaiting reserves blocks for waiting requests while there is room.
func (e *Engine) reserveWaiting() {
	if len(e.awaiting) == 0 {
		return
	}
	for {
		id, res, err, ok := e.sched.NextReserved()
		if !ok {
			return
		}
		ready := e.awaiting[id]
		delete(e.awaiting, id)
		ready(res, err)
	}
}

// Arrived reports that everything reserved has landed and matches. The request
// continues from there.
func (e *Engine) Arrived(res scheduler.ReservationID) {
	e.later(func() { e.arrived(res, nil, nil) })
}

// ArrivedOnDevice reports that everything reserved has landed in the device's own
// memory. pages are the checksums of the sender; they are compared before the
// request continues. If one differs, the request computes here and mismatch is
// called.
func (e *Engine) ArrivedOnDevice(res scheduler.ReservationID, pages []backend.PageDigest, mismatch func()) {
	e.later(func() { e.arrived(res, pages, mismatch) })
}

// Lost gives a reservation up. Its blocks stay out of use until Release. Calls take
// effect in order.
func (e *Engine) Lost(res scheduler.ReservationID) {
	e.later(func() { e.logErr("lost", uint64(res), e.sched.Lost(res)) })
}

// Release ends a lost or abandoned reservation: no write can land any more.
func (e *Engine) Release(res scheduler.ReservationID) {
	e.later(func() { e.logErr("release", uint64(res), e.sched.Release(res)) })
}

// Proceed ends a held request's wait: its prompt is computed here.
func (e *Engine) Proceed(id scheduler.RequestID) {
	e.later(func() {
		if e.live[id] != nil {
			e.logErr("proceed", uint64(id), e.sched.Proceed(id))
		}
	})
}

// Abort ends a request without a further token. Unknown ids are ignored, because
// the request may just have finished.
func (e *Engine) Abort(id scheduler.RequestID) {
	e.later(func() { e.drop(id) })
}

// drop ends a request or job that its owner no longer wants, if it is still here.
func (e *Engine) drop(id scheduler.RequestID) {
	r := e.live[id]
	if r == nil {
		return
	}
	e.remove(id, r)
	e.count.Aborted++
	e.abort(id)
	e.reportEnd(r, e.now())
}

func (e *Engine) abort(id scheduler.RequestID) { e.logErr("abort", uint64(id), e.sched.Abort(id)) }

// later posts f. After the engine has stopped, f is not needed any more.
func (e *Engine) later(f func()) {
	if err := e.post(f); err != nil {
		e.log.Debug("engine stopped", "err", err)
	}
}

// logErr logs an error that only a bug of this package can cause.
func (e *Engine) logErr(what string, id uint64, err error) {
	if err != nil {
		e.log.Error("scheduler refused", "call", what, "id", id, "err", err)
	}
}

// checkTokens refuses ids that the embedding table does not have. In a batch they
// would fail every request of the step.
func (e *Engine) checkTokens(tokens []int32) error {
	vocab := e.o.Model.VocabSize()
	for i, t := range tokens {
		if t < 0 || int(t) >= vocab {
			return fmt.Errorf("%w: %d at position %d, the vocabulary has %d", ErrToken, t, i, vocab)
		}
	}
	return nil
}

// blockInts returns block ids as the device's integers without copying.
func blockInts(b []kvcache.BlockID) []int32 {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&b[0])), len(b))
}
