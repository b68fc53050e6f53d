package engine

import (
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Life is what a request or job went through in this engine. Times are on the
// engine's clock (see Engine.At); a zero one has not come.
type Life struct {
	Job         bool
	Finish      Finish // 0: aborted, or a job that was computed
	Prompt      int    // tokens at Add, output of earlier attempts included
	Cached      int    // of these, found in the prefix cache when it began to run
	Arrived     int    // of these, whose KV came from another node
	Output      int    // tokens sampled here
	MaxTokens   int    // that it was allowed, of earlier attempts included
	Preemptions int

	Added    time.Duration
	Admitted time.Duration // first turn
	First    time.Duration // first token, or a job's end
	Last     time.Duration // last token
	Ended    time.Duration
}

// Source says where the KV of prompt tokens came from.
type Source struct{ Computed, Cached, Arrived uint64 }

// Total is all of them.
func (s Source) Total() uint64 { return s.Computed + s.Cached + s.Arrived }

// Watch hears what the engine measures, on the step goroutine. Its functions
// must not block; nil ones hear nothing.
type Watch struct {
	Step  func(nTokens int, d time.Duration) // a step has run over so many tokens, on the device for d
	First func(d time.Duration)              // from a request's Add to its first token
	Next  func(d time.Duration)              // between two tokens of a request
	Ended func(l Life)                       // a request's or job's end, whichever it is
}

func (w *Watch) step(nTokens int, d time.Duration) {
	if w.Step != nil {
		w.Step(nTokens, d)
	}
}

// At is the wall-clock time of a moment on the engine's clock.
func (e *Engine) At(d time.Duration) time.Time { return e.start.Add(d) }

// turns notes who runs for the first time, and who gave way.
func (e *Engine) turns(b scheduler.Batch, now time.Duration) {
	for _, a := range b.Admitted {
		if r := e.live[a.ID]; r != nil {
			r.life.Admitted, r.life.Cached, r.life.Arrived = now, a.Cached, a.Arrived
		}
	}
	for _, id := range b.Preempted {
		if r := e.live[id]; r != nil {
			r.life.Preemptions++
			e.takesPart(r, false)
		}
	}
}

// measure notes a request's token. Those of one step are there at once.
func (e *Engine) measure(r *run, finish Finish) {
	l, w, now := &r.life, &e.o.Watch, e.emitted
	if l.Output == 0 {
		l.First = now
		e.countSource(l)
		if w.First != nil {
			w.First(now - l.Added)
		}
	} else if w.Next != nil && now > l.Last {
		w.Next(now - l.Last)
	}
	l.Output++
	l.Last = now
	if finish != 0 {
		l.Finish = finish
		e.ended(r, now)
	}
}

// countJob notes that a job's prompt has its KV.
func (e *Engine) countJob(r *run) {
	r.life.First = e.now()
	e.countSource(&r.life)
	e.publish()
}

func (e *Engine) countSource(l *Life) {
	s := &e.count.Prompts
	s.Computed += uint64(l.Prompt - l.Cached - l.Arrived)
	s.Cached += uint64(l.Cached)
	s.Arrived += uint64(l.Arrived)
}

// ended tells of a request's or job's end.
func (e *Engine) ended(r *run, now time.Duration) {
	l := &r.life
	l.Ended = now
	if e.o.Watch.Ended != nil {
		e.o.Watch.Ended(*l)
	}
	switch {
	case r.req != nil && r.req.Ended != nil:
		r.req.Ended(*l)
	case r.job != nil && r.job.Ended != nil:
		r.job.Ended(*l)
	}
}
