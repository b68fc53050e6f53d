package main

import (
	"context"
	"fmt"
	"time"
)

// cell is one measurement of one proxy.
type cell struct {
	name string
	run  func(ctx context.Context, o *options, b *bed, p *proxy, res *result) error
}

// Units of figures.
const (
	perRequest = "CPU µs/request"
	perToken   = "CPU µs/token"
	perSecond  = "per second"
	memory     = "MB"
	first50    = "ms p50"
	first99    = "ms p99"
)

// nFlood is the number of tokens of a stream of the flood, so that it is as long as the others in
// time.
const nFlood = 256

// cells has the measurements of each part. Streams have 64 tokens, 10 ms apart, and in the flood
// nFlood tokens, 2.5 ms apart.
var cells = map[string][]cell{
	"requests":   {busy("tiny", 64, ask{prompt: 100}, 1), busy("8 KB", 64, ask{prompt: 8 << 10}, 1), busy("100 KB", 64, ask{prompt: 100 << 10}, 1)},
	"streams":    {busy("256 streams", 256, ask{prompt: 200, tokens: 64}, 2), {"first token", firstTokenTime}},
	"many":       {busy("1000 streams", 1000, ask{prompt: 200, tokens: 64}, 3)},
	"flood":      {busy("flood", 1000, ask{prompt: 200, tokens: nFlood}, 2)},
	clientsTLS:   {busy("256 streams", 256, ask{prompt: 200, tokens: 64}, 2)},
	upstreamsTLS: {busy("256 streams", 256, ask{prompt: 200, tokens: 64}, 2)},
	"native":     {busy("256 streams", 256, ask{prompt: 200, tokens: 64}, 2), busy("1000 streams", 1000, ask{prompt: 200, tokens: 64}, 2)},
}

// busy keeps n connections busy. Once all are, it measures the CPU time per request or token over a
// number of windows.
func busy(name string, n int, a ask, windows int) cell {
	return cell{name, func(ctx context.Context, o *options, b *bed, p *proxy, res *result) error {
		l := drive(p, n, a)
		warm := o.window / 4
		if a.tokens > 0 {
			warm = time.Duration(a.tokens) * gap * 3 / 2
		}
		err := func() error {
			if err := pause(ctx, warm); err != nil {
				return err
			}
			cpu, err := p.cpu()
			if err != nil {
				return err
			}
			began, answers, tokens := time.Now(), l.answers.Load(), l.tokens.Load()
			if err := pause(ctx, time.Duration(windows)*o.window); err != nil {
				return err
			}
			took, done, got := time.Since(began), l.answers.Load()-answers, l.tokens.Load()-tokens
			after, err := p.cpu()
			if err != nil {
				return err
			}
			mb, err := p.anonymous()
			if err != nil {
				return err
			}
			unit, what := done, perRequest
			if a.tokens > 0 {
				unit, what = got, perToken
			}
			if unit == 0 {
				return fmt.Errorf("no answer in %v", took)
			}
			res.add(p.name, name+", "+what, float64((after-cpu).Microseconds())/float64(unit))
			res.add(p.name, name+", "+perSecond, float64(unit)/took.Seconds())
			res.add(p.name, name+", "+memory, mb)
			return nil
		}()
		if ended := l.end(); ended != nil {
			return ended
		}
		return err
	}}
}

// firstTokenTime measures one connection that requests streams of one token.
func firstTokenTime(ctx context.Context, _ *options, _ *bed, p *proxy, res *result) error {
	const asks = 500
	times, err := firstTokens(ctx, p, asks)
	if err != nil {
		return err
	}
	res.add(p.name, first50, times[len(times)/2])
	res.add(p.name, first99, times[len(times)*99/100])
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
