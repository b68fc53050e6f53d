package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Grammar is what a request's output has to match, and GrammarKind its language.
type (
	Grammar     = grammar.Source
	GrammarKind = grammar.Kind
)

// GrammarVersion identifies what grammars accept in this release.
const GrammarVersion = grammar.Version

// ErrGrammar means that this engine does not constrain outputs.
var ErrGrammar = errors.New("engine: outputs cannot be constrained here")

// ErrConstraint means that a request cannot continue under its grammar: a dead end, or a limit of
// counted work.
var ErrConstraint = masks.ErrEnded

// maskWait bounds how long a step waits for masks that are being computed.
const maskWait = time.Millisecond

// pendingGuide is a constrained request whose mask is not known.
type pendingGuide struct {
	id    scheduler.RequestID
	run   *run
	fresh bool // no step has waited for it
}

// startMasks starts the workers of constrained requests, if the options have a vocabulary.
func (e *Engine) startMasks() {
	if e.o.Vocabulary == nil {
		return
	}
	e.masks = masks.New(masks.Options{
		Vocabulary: e.o.Vocabulary, Limits: e.o.GrammarLimits, Workers: e.o.MaskWorkers, CacheBytes: e.o.MaskCacheBytes, Ready: e.poke,
	})
}

// Constrains reports whether the engine takes requests with a Grammar.
func (e *Engine) Constrains() bool { return e.masks != nil }

// guide starts the masks of a request, which sits out until the first is known.
func (e *Engine) guide(id scheduler.RequestID, r *run) {
	if r.req.Grammar == nil {
		return
	}
	r.guide = e.masks.Start(*r.req.Grammar, r.req.Output)
	e.sched.SitOut(id, true)
	e.guided = append(e.guided, pendingGuide{id: id, run: r})
}

// checkGrammar refuses a constrained request on an engine without masks.
func (e *Engine) checkGrammar(r *Request) error {
	if r.Grammar != nil && e.masks == nil {
		return fmt.Errorf("%w: this node has no vocabulary for grammars", ErrGrammar)
	}
	return nil
}

// awaitMasks waits up to maskWait for the masks of requests that sampled in the last step. Requests
// whose mask is still not known sit the next step out.
func (e *Engine) awaitMasks() {
	if e.settleGuides(); len(e.guided) == 0 {
		return
	}
	var expired <-chan time.Time
	for e.anyFresh() {
		if expired == nil {
			t := time.NewTimer(maskWait)
			defer t.Stop()
			expired = t.C
		}
		select {
		case <-e.masks.Ready():
			e.settleGuides()
			continue
		case <-expired:
		}
		break
	}
	for i := range e.guided {
		if p := &e.guided[i]; p.fresh {
			p.fresh = false
			e.sched.SitOut(p.id, true)
		}
	}
	e.count.SatOut += uint64(len(e.guided))
}

func (e *Engine) anyFresh() bool {
	for i := range e.guided {
		if e.guided[i].fresh {
			return true
		}
	}
	return false
}

// settleGuides ends the wait of requests whose mask is known, and the requests that cannot
// continue.
func (e *Engine) settleGuides() {
	kept := e.guided[:0]
	for _, p := range e.guided {
		if e.live[p.id] != p.run {
			continue
		}
		if !p.run.guide.Ready() {
			kept = append(kept, p)
			continue
		}
		e.sched.SitOut(p.id, false)
		if err := p.run.guide.Err(); err != nil {
			e.abort(p.id)
			e.publish()
			e.fail(p.id, err)
		}
	}
	clear(e.guided[len(kept):])
	e.guided = kept
}

// advanceGuide accepts the tokens that a step sampled for a request.
func (e *Engine) advanceGuide(id scheduler.RequestID, r *run, sampled int, last int32) {
	r.guide.Advance(e.masks, sampled, last)
	e.awaitGuide(id, r)
}

// awaitGuide has settleGuides look at an advanced guide before the next step, unless its mask is
// known. A worker may have been faster than the step: its error also has to end the request.
func (e *Engine) awaitGuide(id scheduler.RequestID, r *run) {
	if !r.guide.Ready() || r.guide.Err() != nil {
		e.guided = append(e.guided, pendingGuide{id: id, run: r, fresh: true})
	}
}

// failGuided ends a request in a step: the token sampled after n drafts is outside its mask.
func (e *Engine) failGuided(r *run, n int, token int32) bool {
	c := r.req.Sampling.Controls
	err := r.guide.Allows(e.masks, n, token, c != nil && c.Excludes(token))
	if err == nil {
		return false
	}
	r.stats.Finish = FinishError
	e.reportEnd(r, e.emitted)
	r.req.Emit(Token{ID: -1, Finish: FinishError, Err: err})
	return true
}

// guideDrafts is the scheduler's Guide.
func (e *Engine) guideDrafts(id scheduler.RequestID, tokens []int32, n, guesses int) []int32 {
	r := e.live[id]
	if r == nil || r.guide == nil {
		return tokens
	}
	n = min(n, r.req.MaxTokens-r.output-1) // one more is sampled after them
	return r.guide.Drafts(tokens, max(0, n), guesses, e.o.Scheduler.Draft)
}
