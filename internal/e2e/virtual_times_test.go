//go:build linux

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// Times, to the microsecond: in virtual time nothing lasts but what nodes compute,
// and so what a client waits for is what the gateway says, and steps are the rest.

// clock is what a test sees of one request's steps, by the role of who made them.
type clock struct {
	mu          sync.Mutex
	first, last map[byte]time.Time     // of a step's begin and of one's end
	steps       map[byte]time.Duration // all of them together
}

func (k *clock) took(addr string, began time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.first[addr[0]].IsZero() {
		k.first[addr[0]] = began
	}
	k.last[addr[0]] = time.Now()
	k.steps[addr[0]] += time.Since(began)
}

// next forgets when the last request's steps were.
func (k *clock) next() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.first, k.last = map[byte]time.Time{}, map[byte]time.Time{}
}

// watchStream streams a completion and says when its first and its last token came,
// and its end.
func (m *meterBed) watchStream(prompt string, tokens int) (first, last, end time.Time) {
	m.t.Helper()
	c, err := m.door.Dial(context.Background(), "gateway")
	m.must(err)
	defer func(c net.Conn) { _ = c.Close() }(c)
	// Letters alone, of which none is ever half a character.
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"ignore_eos":true,"temperature":0,"stream":true,"allowed_token_ids":[65,66,67,68,69,70]}`, prompt, tokens)
	_, err = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	m.must(err)
	events := 0
	for r := bufio.NewReader(c); ; {
		line, err := r.ReadString('\n')
		now := time.Now()
		switch {
		case err != nil:
			if events != tokens || end.IsZero() {
				m.errorf("%d events of %d tokens: %v", events, tokens, err)
			}
			return first, last, end
		case strings.HasPrefix(line, "data: [DONE]"):
			end = now
		case strings.HasPrefix(line, "data: {"):
			if events++; events == 1 {
				first = now
			}
			last = now
		}
	}
}

func meteredTimes(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const requests, prompt, tokens = 4, 90, 6
	k := clock{steps: map[byte]time.Duration{}}
	k.next()
	metered(t, ds, seen, "times", func(m *meterBed, _ *gateway.Options) { m.measured.took = k.took }, func(m *meterBed) {
		const ttft, e2e, decoding, gap, perToken = "vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum", "vllm:request_decode_time_seconds_sum", "vllm:inter_token_latency_seconds_sum", "vllm:request_time_per_output_token_seconds_sum"
		const queue, computing, inference, steps = "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum", "vllm:request_inference_time_seconds_sum", "tandem:engine_step_seconds_sum"
		sums := map[byte]map[string]float64{'G': {}, 'D': {}, 'P': {}}
		for i := range requests {
			k.next()
			began := time.Now()
			first, last, end := m.watchStream(unlike(i, prompt), tokens)
			add := func(role byte, name string, from, to time.Time) { sums[role][name] += to.Sub(from).Seconds() }
			for role, over := range map[byte]time.Time{'G': end, 'D': last} {
				add(role, ttft, began, first)
				add(role, e2e, began, over)
				add(role, decoding, first, last)
				add(role, gap, first, last)
				sums[role][perToken] += last.Sub(first).Seconds() / (tokens - 1)
			}
			add('D', queue, began, k.first['d'])
			add('D', computing, k.first['d'], first)
			add('D', inference, k.first['d'], last)
			add('P', queue, began, began) // its engine has nothing else to do
			add('P', computing, k.first['p'], k.last['p'])
			add('P', inference, k.first['p'], k.last['p'])
		}
		for role, node := range map[byte]byte{'D': 'd', 'P': 'p'} {
			sums[role][steps] = k.steps[node].Seconds()
			sums[role]["tandem:engine_work_seconds_total"] = k.steps[node].Seconds()
		}
		m.is('D', "tandem:decode_prefills_total", `"remote"`, requests)
		for role, all := range sums {
			for name, want := range all {
				m.is(role, name, "", want)
			}
		}
	})
}

// meteredTurns has a prefill node that computes one prompt at a time get several.
func meteredTurns(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const n, prompt = 4, 60 // tokens, which one step computes
	var granted, began moments
	metered(t, ds, seen, "prompts that wait for their turn", func(m *meterBed, o *gateway.Options) {
		m.measured.scheduler = func(addr string, o *scheduler.Config) {
			if o.Pool.Blocks, o.MaxSeqs, o.MaxBatchedTokens = 26, 8, 64; addr[0] == 'p' {
				o.MaxSeqs = 1
			}
		}
		m.measured.framed = func(addr string, t rpc.Type) {
			if t == rpc.FrameGrant { // from here on a job is the engine's
				granted.add(time.Now())
			}
		}
		m.measured.took = func(addr string, at time.Time) {
			if addr[0] == 'p' {
				began.add(at)
			}
		}
	}, func(m *meterBed) {
		m.ask("POST", "/admin/drain/"+m.nodes[3].addr+"?timeout=1s")
		m.well(m.inTurn(n, prompt, 2)()...) // it is connected to both decode nodes
		for _, d := range m.nodes[:2] {
			if d.decode.Counters().RemotePrefills == 0 {
				m.errorf("%s has asked for no prompt", d.addr)
			}
		}
		const queue = "vllm:request_queue_time_seconds_sum"
		before, start := m.value('P', queue, ""), time.Now()
		granted.all, began.all = nil, nil
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { m.well(m.say(unlike(n+i, prompt), 2, "", "")) })
		}
		wg.Wait()
		jobs, asked := granted.since(start)
		steps, turns := began.since(start)
		if jobs != n || steps != n || turns-asked < time.Millisecond {
			m.errorf("%d jobs, %d steps, %v apart in all", jobs, steps, turns-asked)
		}
		m.is('P', queue, "", before+(turns-asked).Seconds())
	})
}
