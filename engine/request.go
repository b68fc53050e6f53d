package engine

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Finish says why a request's tokens ended; the numbers are node.proto's
// FinishReason, which travels with the last token.
type Finish uint8

// Reasons to finish.
const (
	FinishStop   Finish = 1   // an end-of-sequence or stop token, itself delivered
	FinishLength Finish = 2   // MaxTokens or the context is used up
	FinishError  Finish = 255 // see Token.Err; never on the wire
)

// Token is one emission.
type Token struct {
	ID       int32
	Position int // in prompt plus output
	Finish   Finish
	Err      error     // with FinishError
	LogProbs *LogProbs // when the request asked for them; the receiver's
}

// LogProbs tells about a token under the model's own distribution, before
// temperature, penalties and masks.
type LogProbs struct {
	LogProb float32
	Rank    int          // 1 is the most probable
	Top     []sample.Top // most probable first
}

// Request is one choice of a client's request, on its way through this engine.
type Request struct {
	Root          kvcache.Hash
	RootDigest    kvcache.RootDigest // zero: of a gateway of the version before
	Prompt        []int32
	Output        []int32  // tokens of earlier attempts; they are not emitted again
	Sampling      Sampling // its Controls are made by Add
	Rules         Rules
	LogProbs      bool    // each token comes with its log-probability
	TopLogProbs   int     // and with that many best tokens
	LogProbTokens []int32 // or, where there are some, with these
	MaxTokens     int     // of the output, that of earlier attempts included; at least 1
	Stop          []int32 // token ids that end the output
	Priority      int
	Hold          bool // KV is expected from another node: see Reserve

	// Adapter is the one that it is computed with, by name; empty: none. Root has to
	// tell adapters apart. AdapterDigest, unless 0, is the one that is meant.
	Adapter       string
	AdapterDigest uint64

	// Added, if set, hears what Add returns as cached, on the step goroutine and
	// so before the first token. It must not block.
	Added func(cached int)
	// Emit receives each token on the step goroutine and must not block.
	Emit func(Token)
	// Ended, if set, hears once what the request went through, however it ended,
	// on the step goroutine. It must not block.
	Ended func(Life)

	// EmitPrompt, where set, receives the log-probabilities of the prompt's tokens
	// from the second on, each with TopPromptLogProbs best tokens: in order, each
	// once, before the first token, a chunk at a time; first is the position of the
	// slice's first, and the slice is the receiver's. Every one of these tokens is
	// then computed here, whatever the cache has: Hold is not possible.
	EmitPrompt        func(first int, probs []LogProbs)
	TopPromptLogProbs int
}

// finishAfter decides whether the token just drawn is the last.
func (r *Request) finishAfter(token int32, output, length, maxLen int) Finish {
	switch {
	case slices.Contains(r.Stop, token):
		return FinishStop
	case output >= r.MaxTokens, length >= maxLen:
		return FinishLength
	}
	return 0
}

// Job is a prompt whose KV another node wants: it is computed, nothing is
// sampled.
type Job struct {
	Root       kvcache.Hash
	RootDigest kvcache.RootDigest // as Request has it
	Tokens     []int32
	Priority   int
	Ticket     uint64 // names the job to the function of OrderJobs

	Adapter       string // as Request has it
	AdapterDigest uint64

	// First are the first places of each group's table whose blocks the push
	// reads; nil is all. Those before are not kept for it.
	First []int

	// Direct says that the push reads the device's own memory, where Direct of
	// Loaded says that it can.
	Direct bool

	// Layer says that the KV of the first upTo tokens of this layer stands in
	// tables, as far as it is still in its group's window. It is called in order of
	// layers for each chunk, again with the same or smaller upTo after a
	// preemption, on the step goroutine. The blocks from First on stay as they are
	// until ReleaseJob; the slices, one per group, are valid during the call.
	Layer func(layer, upTo int, tables [][]kvcache.BlockID)
	// Done is called once, unless ReleaseJob came first: every layer has been
	// announced, or err says why not. On the step goroutine.
	Done func(err error)
	// Ended, if set, hears once what the job went through, before Done. It must
	// not block.
	Ended func(Life)

	// The step goroutine's, until ReleaseJob.
	held    []kvcache.BlockID // one pin each
	pushing bool              // ended, counted in Engine.pushing
}

// Add queues a request and returns its id and how many tokens of it are in the
// prefix cache. With Hold these are pinned, and the request waits for Reserve
// and Arrived, or Proceed.
func (e *Engine) Add(r *Request) (id scheduler.RequestID, cached int, err error) {
	tokens := make([]int32, 0, len(r.Prompt)+len(r.Output))
	tokens = append(append(tokens, r.Prompt...), r.Output...)
	if err := e.checkTokens(tokens); err != nil {
		return 0, 0, err
	}
	r.Sampling.Controls = sample.NewControls(r.Rules, r.Prompt, r.Output)
	id = scheduler.RequestID(e.next.Add(1))
	score := 0
	if r.EmitPrompt != nil {
		score = max(0, len(r.Prompt)-1)
	}
	came := e.now() // whoever comes during a step waits for its end
	derr := e.do(func() {
		var adapter *adapterPlace
		if adapter, err = e.adapter(r.Adapter, r.AdapterDigest); err != nil {
			return
		}
		cached, err = e.sched.Add(scheduler.Request{
			ID: id, Root: r.Root, RootDigest: r.RootDigest, Tokens: tokens, Hold: r.Hold, Priority: r.Priority,
			MaxNew: r.MaxTokens - len(r.Output), Score: score,
		}, e.now())
		if err == nil {
			run := &run{req: r, prompt: len(tokens), output: len(r.Output), life: Life{Prompt: len(tokens), MaxTokens: r.MaxTokens, Added: came}}
			e.enter(id, run, adapter)
			if r.Added != nil {
				r.Added(cached)
			}
		}
	})
	if derr != nil {
		err = derr
	}
	return id, cached, err
}

// AddJob queues a job and returns its id and how many of its tokens are in the
// prefix cache. The job's source blocks are pinned until Release.
func (e *Engine) AddJob(j *Job) (id scheduler.RequestID, cached int, err error) {
	if err := e.checkTokens(j.Tokens); err != nil {
		return 0, 0, err
	}
	if j.Direct && e.direct == nil {
		return 0, 0, fmt.Errorf("%w: a push that reads the device's memory, which nobody reaches", ErrConfig)
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
			run := &run{job: j, prompt: len(j.Tokens), life: Life{Job: true, Prompt: len(j.Tokens), Added: came}}
			e.enter(id, run, adapter)
		}
	})
	if derr != nil {
		err = derr
	}
	return id, cached, err
}

// OrderJobs has order sort the jobs before each step, best first, on the step goroutine:
// see scheduler.Scheduler.OrderBy. It is for an engine that has nothing but jobs. order
// must not block.
func (e *Engine) OrderJobs(order func(work []scheduler.Work)) {
	e.later(func() { e.sched.OrderBy(order) })
}

// CheckJob says what AddJob would refuse whatever the load is, so that a job can
// be refused before it waits for its turn.
func (e *Engine) CheckJob(tokens []int32) error {
	if n, longest := len(tokens), e.o.Scheduler.MaxModelLen; n > longest {
		return fmt.Errorf("%w: %d tokens, at most %d can be computed", scheduler.ErrTooLong, n, longest)
	}
	return e.checkTokens(tokens)
}

// ReleaseJob lets go of a job's source blocks: its push has ended and reads
// them no more. It ends a job that still runs.
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

// Reserve takes blocks for the KV of a held request's tokens up to upTo, which
// another node will write.
func (e *Engine) Reserve(id scheduler.RequestID, upTo int) (res scheduler.Reservation, err error) {
	if derr := e.do(func() { res, err = e.sched.Reserve(id, upTo) }); derr != nil {
		err = derr
	}
	return res, err
}

// ReserveInTurn is Reserve, where the request waits for room if there is none: an
// error that is scheduler.ErrNoRoom and not scheduler.ErrNeverFits says so, and ready is
// called once, on the step goroutine, when its turn comes or the wait fails, unless
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

// StopWaiting ends a wait of ReserveInTurn. False: ready was called before.
func (e *Engine) StopWaiting(id scheduler.RequestID) (waited bool) {
	derr := e.do(func() {
		waited = e.sched.StopWaiting(id)
		delete(e.awaiting, id)
	})
	return waited && derr == nil
}

// reserveWaiting gives blocks to those that wait for them, as far as there are any.
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

// Arrived says that everything reserved has landed and matches; the request
// goes on from there.
func (e *Engine) Arrived(res scheduler.ReservationID) {
	e.later(func() { _ = e.arrived(res, nil) }) // which has told
}

// ArrivedOnDevice says that everything reserved has landed in the device's own memory,
// and with which checksums it was sent; they are compared before the request goes on.
// Where one differs the request computes here, and mismatch is called.
func (e *Engine) ArrivedOnDevice(res scheduler.ReservationID, pages []backend.PageDigest, mismatch func()) {
	e.later(func() {
		if errors.Is(e.arrived(res, pages), backend.ErrDigest) {
			mismatch()
		}
	})
}

// Lost gives a reservation up. Its blocks stay out of use until Release. Calls
// take effect in the order they were made.
func (e *Engine) Lost(res scheduler.ReservationID) {
	e.later(func() { e.logErr("lost", uint64(res), e.sched.Lost(res)) })
}

// Release ends a lost or abandoned reservation: no write can land any more.
func (e *Engine) Release(res scheduler.ReservationID) {
	e.later(func() { e.logErr("release", uint64(res), e.sched.Release(res)) })
}

// Proceed stops a held request's waiting: its prompt is computed here.
func (e *Engine) Proceed(id scheduler.RequestID) {
	e.later(func() {
		if e.live[id] != nil {
			e.logErr("proceed", uint64(id), e.sched.Proceed(id))
		}
	})
}

// Abort ends a request without a further token. Unknown ids are ignored: it may
// just have finished.
func (e *Engine) Abort(id scheduler.RequestID) {
	e.later(func() { e.drop(id) })
}

// drop ends what its owner no longer wants, if it is still here.
func (e *Engine) drop(id scheduler.RequestID) {
	r := e.live[id]
	if r == nil {
		return
	}
	e.leave(id, r)
	e.count.Aborted++
	e.abort(id)
	e.ended(r, e.now())
}

func (e *Engine) abort(id scheduler.RequestID) { e.logErr("abort", uint64(id), e.sched.Abort(id)) }

// later posts f; after the engine has stopped there is nothing left to change.
func (e *Engine) later(f func()) {
	if err := e.post(f); err != nil {
		e.log.Debug("engine stopped", "err", err)
	}
}

// logErr reports what only a fault of ours can cause.
func (e *Engine) logErr(what string, id uint64, err error) {
	if err != nil {
		e.log.Error("scheduler refused", "call", what, "id", id, "err", err)
	}
}

// checkTokens keeps ids that the embedding table does not have out of a batch,
// where they would fail everybody.
func (e *Engine) checkTokens(tokens []int32) error {
	vocab := e.o.Model.VocabSize()
	for i, t := range tokens {
		if t < 0 || int(t) >= vocab {
			return fmt.Errorf("%w: %d at position %d, the vocabulary has %d", ErrToken, t, i, vocab)
		}
	}
	return nil
}

// blockInts views block ids as the device's integers without copying.
func blockInts(b []kvcache.BlockID) []int32 {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&b[0])), len(b))
}
