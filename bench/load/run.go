// Package load sends requests at given times and records when each chunk of each answer
// arrived.
//
// It is an open loop: arrivals are drawn before the run and do not wait for answers. A
// request that cannot be sent in time, because --max-concurrency is reached or because
// this process is slow, keeps its scheduled time. So waiting is measured (no coordinated
// omission) and reported separately. Each stream has a goroutine and a connection. An
// event is searched for its text and not parsed.
//
// Invariant: every request has exactly one outcome, an error or the times of its chunks.
// The package knows no dataset and computes no statistics.
package load

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Plan is the input of a run.
type Plan struct {
	At             []time.Duration    // sending time of each request
	Body           func(i int) []byte // its body; called in order from one goroutine
	ID             func(i int) string // its X-Request-Id; nil: none
	MaxConcurrency int                // 0: only bounded by the number of requests
	Progress       func(done, failed, running int)
}

// Record is the result of a run.
type Record struct {
	Start    time.Time
	Duration time.Duration // to the end of the last answer
	Outcomes []Outcome     // in the order of the plan
	Self     Self
}

// Self is the performance of the client itself.
type Self struct {
	Cores      float64       // CPU used, in cores
	Available  int           // cores that Go may use
	Lag        time.Duration // 99th percentile of the time from ready to sent
	TimerLag   time.Duration // 99th percentile of how late a sleeping goroutine wakes
	Overloaded string        // why the client was the limit; empty: it was not
}

// Limits beyond which the client, not the server, determines the figures: the client used
// this share of its cores, or more than 1 % of its requests (of its timers) were sent
// (fired) this much too late. One or two late ones are not enough: one request of twenty
// is 5 % of them, and still an accident.
const (
	maxShare    = 0.8 // of the cores
	maxLag      = 10 * time.Millisecond
	maxTimerLag = 10 * time.Millisecond
	lateShare   = 0.01
	leastLate   = 3
)

// late returns how many of the sorted delays exceed a bound, or 0 if they are too few to
// conclude that the client is slow.
func late(sorted []time.Duration, bound time.Duration) int {
	at, _ := slices.BinarySearch(sorted, bound+1)
	n := len(sorted) - at
	if n < leastLate || float64(n) <= lateShare*float64(len(sorted)) {
		return 0
	}
	return n
}

// Doer sends one request, waits for the end of its answer and fills its outcome. Times
// are since start.
type Doer interface {
	Do(ctx context.Context, start time.Time, body []byte, id string, o *Outcome)
}

// Run executes the plan over HTTP.
func (c *Client) Run(ctx context.Context, p Plan) (*Record, error) { return Run(ctx, c, p) }

// Run executes the plan. It ends early only with ctx.
func Run(ctx context.Context, c Doer, p Plan) (*Record, error) {
	r := &Record{Outcomes: make([]Outcome, len(p.At))}
	slots := make(chan struct{}, max(1, p.MaxConcurrency))
	watchCtx, stopWatch := context.WithCancel(ctx)
	defer stopWatch()
	cpu := CPUTime()
	r.Start = time.Now()
	w := watch(watchCtx)
	var done, failed, running atomic.Int64
	stopProgress := progress(p.Progress, &done, &failed, &running)
	var wg sync.WaitGroup
	var err error
	var freed time.Duration // when the last wait for a slot ended
	for i := range p.At {
		o := &r.Outcomes[i]
		o.Scheduled = p.At[i]
		body := p.Body(i)
		if err = sleep(ctx, time.Until(r.Start.Add(o.Scheduled))); err != nil {
			break
		}
		o.Ready = max(o.Scheduled, freed) // a request that waits for a slot delays those behind it
		if p.MaxConcurrency > 0 {
			select {
			case slots <- struct{}{}:
			default:
				select {
				case slots <- struct{}{}:
					freed = time.Since(r.Start)
					o.Ready = freed
				case <-ctx.Done():
					err = ctx.Err()
				}
			}
		}
		if err != nil {
			break
		}
		running.Add(1)
		wg.Go(func() {
			id := ""
			if p.ID != nil {
				id = p.ID(i)
			}
			c.Do(ctx, r.Start, body, id, o)
			running.Add(-1)
			if o.Err != nil {
				failed.Add(1)
			}
			done.Add(1)
			if p.MaxConcurrency > 0 {
				<-slots
			}
		})
	}
	wg.Wait()
	r.Duration = time.Since(r.Start)
	stopProgress()
	stopWatch()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("the run was stopped: %w", err)
	}
	r.Self = judgeClient(r, CPUTime()-cpu, <-w)
	return r, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// progressInterval is how often the progress line is drawn.
const progressInterval = 500 * time.Millisecond

// progress calls f periodically until stop is called.
func progress(f func(done, failed, running int), done, failed, running *atomic.Int64) (stop func()) {
	if f == nil {
		return func() {}
	}
	report := func() { f(int(done.Load()), int(failed.Load()), int(running.Load())) }
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		t := time.NewTicker(progressInterval)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				report()
			case <-quit:
				report()
				return
			}
		}
	}()
	return func() { close(quit); <-ended }
}

// Interval and number of samples of the timers' lag.
const (
	watchInterval = 20 * time.Millisecond
	watchSamples  = 1 << 16
)

// watch sleeps repeatedly until ctx ends, and then sends how late each wake-up was, in
// ascending order.
func watch(ctx context.Context) <-chan []time.Duration {
	out := make(chan []time.Duration, 1)
	go func() {
		var late []time.Duration
		for i := 0; ; i++ {
			before := time.Now()
			if sleep(ctx, watchInterval) != nil {
				slices.Sort(late)
				out <- late
				return
			}
			l := time.Since(before) - watchInterval
			if len(late) < watchSamples {
				late = append(late, l)
			} else {
				late[i%watchSamples] = l
			}
		}
	}()
	return out
}

// p99 returns the 99th percentile of sorted values, or 0 if there are none.
func p99(sorted []time.Duration) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(math.Ceil(0.99*float64(len(sorted))))-1)]
}

// judgeClient determines whether the client kept up.
func judgeClient(r *Record, cpu time.Duration, timers []time.Duration) Self {
	var lags []time.Duration
	burst := true // all at once: sending one after the other is not lateness
	for i := range r.Outcomes {
		o := &r.Outcomes[i]
		lags = append(lags, o.Sent-o.Ready)
		burst = burst && o.Scheduled == 0
	}
	slices.Sort(lags)
	s := Self{Cores: cpu.Seconds() / r.Duration.Seconds(), Available: runtime.GOMAXPROCS(0), Lag: p99(lags), TimerLag: p99(timers)}
	left, fired := late(lags, maxLag), late(timers, maxTimerLag)
	switch {
	case s.Cores > maxShare*float64(s.Available):
		s.Overloaded = fmt.Sprintf("it used %.2f of %d cores", s.Cores, s.Available)
	case !burst && left > 0:
		s.Overloaded = fmt.Sprintf("%d of %d requests left more than %v after their time, up to %v", left, len(lags), maxLag, lags[len(lags)-1].Round(time.Millisecond))
	case fired > 0:
		s.Overloaded = fmt.Sprintf("%d of %d of its timers fired more than %v too late: the machine is busy", fired, len(timers), maxTimerLag)
	}
	return s
}
