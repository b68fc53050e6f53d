//go:build linux

package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// Queues that are as full as a test has made them, and connections whose other end
// takes nothing.

// moments are when something has happened.
type moments struct {
	mu  sync.Mutex
	all []time.Time
}

func (o *moments) add(t time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = append(o.all, t)
}

// since is how long after a moment they were, all of them together.
func (o *moments) since(t time.Time) (n int, sum time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, at := range o.all {
		sum += at.Sub(t)
	}
	return len(o.all), sum
}

// queues fills the gateway while nodes stand still; sent is when nodes were asked.
func (m *meterBed) queues(slow *gate, sent *moments) {
	slow.close()
	const n, stood = 70, 5 * time.Second
	began := time.Now()
	answers := m.crowd(n, 40, 2)
	synctest.Wait()
	owned := 0
	for _, d := range m.nodes[:2] {
		owned += d.decode.Running()
	}
	waiting := float64(60 - owned)
	m.is('G', "tandem:queue_length", `"waiting"`, waiting)
	// What others have asked for and no node is charged with yet may have kept
	// some from a node's KV memory, for no time.
	const waits = "tandem:gateway_queue_time_seconds_count"
	short := m.value('G', waits, "")
	if short > float64(owned) {
		m.errorf("%g have waited, of %d that nodes run", short, owned)
	}
	m.is('G', "tandem:gateway_queue_time_seconds_sum", "", 0)
	m.is('G', "tandem:gateway_requests_in_flight", "", 60)
	m.shows("Gateway queue: requests", 0, waiting, `{node="gw"}`)
	m.shows("Requests in flight", 0, 60, `{node="gw"}`)
	m.fills("requests", map[string]float64{"gateway": 60. / 60})
	m.fills("connections", map[string]float64{"gateway": 60. / float64(limits.MaxConns)})
	m.fills("waiting", map[string]float64{"gateway": waiting / float64(limits.Default().MaxQueuedRequests)})
	m.fills("waiting_tokens", map[string]float64{"gateway": 40 * waiting / float64(limits.Default().MaxQueuedTokens)})
	m.largeBody()
	time.Sleep(stood)
	slow.open()
	refused := 0
	for _, a := range answers() {
		if a.status != 200 {
			refused++
		}
	}
	if refused != n-60 {
		m.errorf("%d were refused, beyond 60", refused)
	}
	m.is('G', "vllm:admission_rejections_total", "", float64(refused))
	m.shows("Refused", 0, float64(refused), `{role="gateway"}`)
	m.is('G', waits, "", short+waiting)
	asked, waited := sent.since(began)
	if asked != 60 || waited < time.Duration(waiting)*stood {
		m.errorf("nodes were asked %d times, %v after the first", asked, waited)
	}
	m.is('G', "tandem:gateway_queue_time_seconds_sum", "", waited.Seconds())
}

// largeBody sends half of a large one, for which memory is taken as a whole.
func (m *meterBed) largeBody() {
	const length = 100_000
	c, err := m.door.Dial(context.Background(), "gateway")
	m.must(err)
	_, err = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n", length)
	m.must(err)
	synctest.Wait()
	_, err = c.Write(make([]byte, length/2))
	m.must(err)
	m.is('G', "tandem:queue_length", `"body_bytes"`, length)
	m.fills("body_bytes", map[string]float64{"gateway": float64(length) / float64(limits.Default().MaxBodyMemory)})
	m.must(c.Close())
	m.is('G', "tandem:queue_length", `"body_bytes"`, 0)
}

// tally counts what comes by node.
type tally struct {
	mu sync.Mutex
	n  map[string]int
}

func (y *tally) add(addr string) int {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.n == nil {
		y.n = map[string]int{}
	}
	y.n[addr]++
	return y.n[addr]
}

// of is the sum, and the most of one, of what f makes of the nodes' counts.
func (y *tally) of(nodes []*node, f func(n int) int) (sum, most float64) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, n := range nodes {
		v := float64(f(y.n[n.addr]))
		sum, most = sum+v, max(most, v)
	}
	return sum, most
}

// ofNodes is a sum over nodes, and the label of each node that is part of it.
type ofNodes struct {
	sum    float64
	labels []string
}

// ofEach adds up what f makes of each node and its count. Nodes without any are left out.
func (m *meterBed) ofEach(nodes []*node, counts *tally, f func(n *node, count int) float64) (all ofNodes) {
	for _, n := range nodes {
		if count, _ := counts.of([]*node{n}, func(n int) int { return n }); count > 0 {
			all.sum += f(n, int(count))
			all.labels = append(all.labels, fmt.Sprintf("{node=%q}", n.addr))
		}
	}
	return all
}

// meteredQueues has nodes stand still, first those of prefill and then those of
// decode, with as much in each of their queues as has come to them.
func meteredQueues(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const n, prompt, tokens, blocks = 8, 100, 100, (100 - 1 + 15) / 16
	const batch, took = 64, 10 * time.Millisecond // a prefill node's step of full size
	if most := n * (prompt + tokens + 15) / 16; most > ds[0].KV.Blocks {
		t.Fatalf("%d blocks are too few for all on one node, which needs %d", ds[0].KV.Blocks, most)
	}
	var asked, owned, granted, steps tally
	var p, d gate
	metered(t, ds, seen, "queues of nodes", func(m *meterBed, o *gateway.Options) {
		o.Limits.NodeBacklog, o.Limits.NodeBacklogTime, o.StallTimeout = 1000, -1, -1
		m.measured.scheduler = func(addr string, o *scheduler.Config) {
			if o.Pool.Blocks, o.MaxSeqs, o.MaxBatchedTokens = ds[0].KV.Blocks, n, batch; addr[0] == 'p' {
				o.MaxSeqs = 1
			}
		}
		m.measured.prefill = func(o *prefill.Options) { o.RunAheadTokens = prompt - 1 } // beside one job that is one more
		m.measured.framed = func(addr string, t rpc.Type) {
			switch t {
			case rpc.FrameGenerate:
				owned.add(addr)
			case rpc.FramePrefill:
				asked.add(addr)
			}
		}
		m.granted = func(l *leases, _ kvtransfer.Grant) {
			for _, n := range m.nodes {
				if n.leases == l {
					granted.add(n.addr)
				}
			}
		}
		m.measured.step = func(addr string) {
			if addr[0] == 'd' {
				d.pass()
				return
			}
			if steps.add(addr) == 1 {
				time.Sleep(took)
			} else { // what a step brings is told at its end
				p.pass()
			}
		}
	}, func(m *meterBed) {
		decodes, prefills := m.nodes[:2], m.nodes[2:]
		p.close()
		answers := m.crowd(n, prompt, tokens)
		time.Sleep(time.Second)
		same := func(n int) int { return n }
		full := map[string]map[string]float64{"engine_running": {"decode": 0}} // of its bound, by queue and role
		for _, q := range []struct {
			role  byte
			name  string
			bound float64
			by    *tally
			nodes []*node
			f     func(int) int
		}{
			{'D', "attempts", 1024, &owned, decodes, same},
			{'D', "engine_waiting", 1024, &owned, decodes, same},
			{'D', "arriving_blocks", float64(ds[0].KV.Blocks / 2), &granted, decodes, func(n int) int { return blocks * n }},
			{'P', "engine_running", 1, &asked, prefills, func(n int) int { return min(n, 1) }},
			{'P', "engine_waiting", 1024, &asked, prefills, func(n int) int { return max(0, min(n-1, 1)) }},
			{'P', "prefill_jobs", 1024, &asked, prefills, func(n int) int { return max(0, n-2) }},
		} {
			sum, most := q.by.of(q.nodes, q.f)
			m.is(q.role, "tandem:queue_length", `"`+q.name+`"`, sum)
			if full[q.name] == nil {
				full[q.name] = map[string]float64{}
			}
			full[q.name][map[byte]string{'P': "prefill", 'D': "decode"}[q.role]] = most / q.bound
		}
		for queue, want := range full {
			m.fills(queue, want)
		}
		left := m.ofEach(prefills, &asked, func(n *node, jobs int) float64 { // the engine leaves out a token of the job that it runs
			rate := n.eng.Stats().PromptRate
			if rate > batch/took.Seconds() || rate < batch/took.Seconds()/2 {
				m.errorf("%s: %g tokens/s, want at most %d in %v", n.addr, rate, batch, took)
			}
			return float64(max(0, jobs*(prompt-1)-batch-1)) / rate
		})
		m.is('P', "tandem:prefill_queue_seconds", "", left.sum)
		m.shows("Prefill pool: seconds of queued prompts", 0, left.sum, left.labels...)
		pressure := m.ofEach(decodes, &owned, func(_ *node, k int) float64 { return float64(k) / n }) // all wait; their blocks are fewer
		m.is('D', "tandem:decode_pressure", "", pressure.sum)
		m.shows("Decode pool: pressure", 0, pressure.sum, pressure.labels...)
		p.open()
		for m.value('G', "vllm:time_to_first_token_seconds_count", "") < n {
			time.Sleep(time.Millisecond)
		}
		d.close()
		time.Sleep(time.Second)
		running, most := owned.of(decodes, same)
		m.is('D', "tandem:queue_length", `"engine_running"`, running)
		m.fills("engine_running", map[string]float64{"prefill": 0, "decode": most / n})
		d.open()
		m.well(answers()...)
	})
}

// refuses has a role's connections, whose outboxes are full, refuse so many frames
// within a time, which is a whole number of all beats.
func (m *meterBed) refuses(role byte, d time.Duration, want func() float64) {
	m.t.Helper()
	const refused = "tandem:rpc_outbox_full_total"
	before := m.value(role, refused, "")
	time.Sleep(d)
	m.is(role, refused, "", before+want())
}

// meteredOutboxes fills connections' outboxes.
func meteredOutboxes(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const failures, beat = "tandem:gateway_attempt_failures_total", 100 * time.Millisecond
	metered(t, ds, seen, "decode nodes' outboxes", func(m *meterBed, o *gateway.Options) {
		m.outbox, m.net.Buffer, o.StallTimeout, m.measured.heartbeat, o.NodeSilence = 1<<10, 256, -1, beat, -1
	}, func(m *meterBed) {
		answers := m.inTurn(4, 20, 150) // as many as the nodes have KV memory for
		for m.value('G', "vllm:generation_tokens_total", "") < 12 {
			time.Sleep(time.Millisecond)
		}
		for _, d := range m.nodes[:2] {
			m.net.Silence(d.addr, true)
		}
		time.Sleep(2 * time.Second)
		dropped := m.value('D', "tandem:decode_dropped_streams_total", "")
		// All streams have ended, and each connection to the gateway refuses what it
		// is given: its own heartbeats, twice a second the node's, and before that
		// what the first stream that ended is owed.
		m.refuses('D', 2*time.Second, func() float64 { return 2 * float64(2*time.Second/beat+2*2*2) })
		for _, d := range m.nodes[:2] {
			m.net.Silence(d.addr, false)
		}
		m.well(answers()...)
		if dropped != 4 {
			m.errorf("%g streams were dropped", dropped)
		}
		m.fires("TandemStreamsDropped")
		// Each dropped stream is told to the gateway, which begins it again elsewhere.
		failed := m.value('G', failures, "")
		m.is('D', "tandem:decode_dropped_streams_total", "", failed)
		m.shows("Decode nodes: refused and dropped", 1, failed)
	})
	metered(t, ds, seen, "a gateway's outboxes", func(m *meterBed, o *gateway.Options) {
		o.RPC.OutboxBytes, o.RPC.Heartbeat, m.net.Buffer, o.StallTimeout, o.Limits.NodeBacklog, o.Limits.NodeBacklogTime, o.NodeSilence = 256, beat, 64, -1, 1000, -1, -1
	}, func(m *meterBed) {
		for _, d := range m.nodes[:2] {
			m.net.Silence(d.addr, true)
		}
		time.Sleep(2500 * time.Millisecond) // the gateway's heartbeats have filled them
		var answers func() []told
		began := m.value('G', failures, "")
		time.AfterFunc(time.Second/2, func() { answers = m.crowd(24, 180, 2) })
		// Each attempt is refused, and has failed at once.
		m.refuses('G', time.Second, func() float64 {
			failed := m.value('G', failures, "") - began
			if failed < 24 {
				m.errorf("%g attempts have failed", failed)
			}
			return 2*float64(time.Second/beat) + failed
		})
		full := 0.0
		for _, role := range "GPD" {
			full += m.value(byte(role), "tandem:rpc_outbox_full_total", "")
		}
		m.shows("Dropped events and frames", 1, full)
		for _, d := range m.nodes[:2] {
			m.net.Silence(d.addr, false)
		}
		answers() // those whose every attempt was refused were told so
	})
	metered(t, ds, seen, "prefill nodes' outboxes", func(m *meterBed, o *gateway.Options) {
		m.outbox, m.net.Buffer, o.StallTimeout, m.measured.heartbeat, o.NodeSilence = 64, 16, -1, beat, -1
		o.Limits.NodeBacklog, o.Limits.NodeBacklogTime = 1000, -1
	}, func(m *meterBed) {
		m.well(m.crowd(8, 40, 2)()...)
		for _, p := range m.nodes[2:] {
			m.net.Silence(p.addr, true)
		}
		links := m.value('P', "tandem:rpc_connections", "")
		time.Sleep(2 * time.Second)
		m.refuses('P', 3*time.Second, func() float64 { return links * float64(3*time.Second/beat) }) // heartbeats
		for _, p := range m.nodes[2:] {
			m.net.Silence(p.addr, false)
		}
		time.Sleep(5 * time.Second)
	})
}
