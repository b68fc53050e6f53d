package engine

import (
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// RequestStats is what happened to a request or job in this engine. Times are on
// the engine's clock (see Engine.At); zero means that it has not happened.
type RequestStats struct {
	Job         bool
	Finish      Finish // 0: aborted, or a job that was computed
	Prompt      int    // tokens at Add, output of earlier attempts included
	Cached      int    // prompt tokens found in the prefix cache when it began to run
	Arrived     int    // prompt tokens whose KV came from another node
	Output      int    // tokens sampled here
	MaxTokens   int    // allowed output tokens, earlier attempts included
	Preemptions int

	Added    time.Duration
	Admitted time.Duration // first step
	First    time.Duration // first token, or a job's end
	Last     time.Duration // last token
	Ended    time.Duration
}

// Source counts where the KV of prompt tokens came from.
type Source struct{ Computed, Cached, Arrived uint64 }

// Total returns the sum of all sources.
func (s Source) Total() uint64 { return s.Computed + s.Cached + s.Arrived }

// Watch receives what the engine measures, on the step goroutine. Its functions
// must not block; each may be nil.
type Watch struct {
	Step     func(s scheduler.Shape, d time.Duration) // a step took d on the device; its tokens are emitted next
	First    func(d time.Duration)                    // from a request's Add to its first token
	Next     func(d time.Duration)                    // between two tokens of a request
	OnFinish func(s RequestStats)                     // a request or job has ended, for any reason
}

func (w *Watch) step(b *scheduler.Batch, d time.Duration) {
	if w.Step != nil {
		w.Step(b.Shape(), d)
	}
}

// At returns the wall-clock time of a moment on the engine's clock.
func (e *Engine) At(d time.Duration) time.Time { return e.start.Add(d) }

// recordTurns records which requests are admitted and which are preempted.
func (e *Engine) recordTurns(b scheduler.Batch, now time.Duration) {
	for _, a := range b.Admitted {
		if r := e.live[a.ID]; r != nil {
			r.stats.Admitted, r.stats.Cached, r.stats.Arrived = now, a.Cached, a.Arrived
		}
	}
	for _, id := range b.Preempted {
		if r := e.live[id]; r != nil {
			r.stats.Preemptions++
			e.setRunning(r, false)
		}
	}
}

// recordToken records a request's token. All tokens of a step have the same time.
func (e *Engine) recordToken(r *run, finish Finish) {
	l, w, now := &r.stats, &e.o.Watch, e.emitted
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
		e.reportEnd(r, now)
	}
}

// recordJob records that a job's prompt has its KV.
func (e *Engine) recordJob(r *run) {
	r.stats.First = e.now()
	e.countSource(&r.stats)
	e.publish()
}

func (e *Engine) countSource(l *RequestStats) {
	s := &e.count.Prompts
	s.Computed += uint64(l.Prompt - l.Cached - l.Arrived)
	s.Cached += uint64(l.Cached)
	s.Arrived += uint64(l.Arrived)
}

// reportEnd reports the end of a request or job.
func (e *Engine) reportEnd(r *run, now time.Duration) {
	l := &r.stats
	l.Ended = now
	if e.o.Watch.OnFinish != nil {
		e.o.Watch.OnFinish(*l)
	}
	switch {
	case r.req != nil && r.req.OnFinish != nil:
		r.req.OnFinish(*l)
	case r.job != nil && r.job.OnFinish != nil:
		r.job.OnFinish(*l)
	}
}
