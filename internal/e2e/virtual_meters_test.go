//go:build linux

package e2e

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/roles"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// Metrics of what real processes cannot be made to do on time: the real gateway, two
// prefill and two decode nodes in virtual time, with the metrics that main gives
// them. Each value is held against a count of the test's own, of the other side of
// the same event, or of what clients were told.

// meterBed is a cluster whose metrics are looked at.
type meterBed struct {
	*virtual
	seen   map[string]bool // "metric role" that was held to a value other than zero
	alerts *liveAlerts
	base   map[string]float64 // what processes exposed at the start

	dials  atomic.Int64 // of the gateway, that failed, or whose other end never said a word
	flips  atomic.Int64 // pages that went by a test's hands
	lease  atomic.Pointer[kvtransfer.Grant]
	reader atomic.Pointer[leases]
}

// metered runs f on a cluster of its own and takes it down.
func metered(t *testing.T, ds []*engine.Loaded, seen *watched, name string, change func(*meterBed, *gateway.Options), f func(*meterBed)) {
	t.Run(name, func(t *testing.T) {
		var m *meterBed
		inBubble(t, ds, nil, &counts{n: map[string]int{}}, func(v *virtual, o *gateway.Options) {
			m = &meterBed{virtual: v, seen: seen.metrics, alerts: &seen.alerts}
			v.measured = &measured{scheduler: func(_ string, o *scheduler.Config) { o.Pool.Blocks, o.MaxSeqs, o.MaxBatchedTokens = 26, 8, 64 }}
			v.heard = func(string, bool) {} // the gateway believes in its members
			o.MinRemotePrefillTokens, o.Limits.SlowClientTimeout, o.DrainDelay = -1, time.Minute, -1
			dial := o.RPC.Dial
			o.RPC.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
				c, err := dial(ctx, addr)
				if err != nil {
					m.dials.Add(1)
					return nil, err
				}
				return &greeted{Conn: c, unheard: &m.dials}, nil
			}
			o.RPC.Counters = new(rpc.Counters)
			roles.RPCMetrics(v.meters, o.RPC.Counters)
			change(m, o)
		}, func(*virtual) {
			time.Sleep(time.Second) // nodes have told of themselves
			m.base = m.samples()
			f(m)
			m.finish()
		})
	})
}

// greeted notes a connection that ends before anything was heard on it.
type greeted struct {
	net.Conn
	heard   atomic.Bool
	once    sync.Once
	unheard *atomic.Int64
}

func (g *greeted) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	if n > 0 {
		g.heard.Store(true)
	}
	return n, err
}

func (g *greeted) Close() error {
	g.once.Do(func() {
		if !g.heard.Load() {
			g.unheard.Add(1)
		}
	})
	return g.Conn.Close()
}

// finish ends all of it.
func (m *meterBed) finish() {
	m.stop()
	m.must(<-m.done)
	for _, n := range m.nodes {
		if !m.down[n.addr] {
			n.kill()
		}
	}
	time.Sleep(time.Minute) // the HTTP server's own ticker
}

// take kills a node without telling anybody.
func (m *meterBed) take(n *node) {
	n.kill()
	m.down[n.addr] = true
}

// value is a metric's sum over the processes of a role.
func (m *meterBed) value(role byte, name, label string) (sum float64) {
	m.t.Helper()
	synctest.Wait()
	texts := []string{}
	if role == 'G' {
		texts = append(texts, string(m.meters.Append(nil)))
	}
	for _, n := range m.nodes {
		if n.addr[0] == role|0x20 {
			texts = append(texts, string(n.meters.Set.Append(nil)))
		}
	}
	for _, text := range texts {
		v, found := pick(text, name, label)
		if !found {
			m.t.Fatalf("%c exposes no %s{%s}", role, name, label)
		}
		sum += v
	}
	return sum
}

// is has a metric have a value, to the microsecond where it is a time.
func (m *meterBed) is(role byte, name, label string, want float64) {
	m.t.Helper()
	v := m.value(role, name, label)
	if math.Abs(v-want) > 1e-6 {
		m.errorf("%c: %s{%s} is %g, want %g", role, name, label, v, want)
	} else if v != 0 {
		m.seen[strings.TrimSuffix(name, "_sum")+" "+string(role)] = true
	}
}

// told is what a client got.
type told struct {
	status int
	text   string
}

// say sends a completion and waits for its answer.
func (m *meterBed) say(prompt string, tokens int, more string, key string) told {
	return m.sayIn(context.Background(), prompt, tokens, more, key)
}

func (m *meterBed) sayIn(ctx context.Context, prompt string, tokens int, more string, key string) told {
	return m.post(ctx, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"ignore_eos":true,"temperature":0%s}`, prompt, tokens, more), key)
}

// post sends a request and waits for its answer.
func (m *meterBed) post(ctx context.Context, path, body, key string) told {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return m.door.Dial(ctx, "gateway")
	}}}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://gateway"+path, strings.NewReader(body))
	m.must(err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := c.Do(req)
	if err != nil {
		return told{text: err.Error()}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return told{text: err.Error()}
	}
	return told{resp.StatusCode, string(text)}
}

// unlike is a prompt of n tokens that shares no block with that of another i.
func unlike(i, n int) string { return (fmt.Sprintf("%03d", i) + strings.Repeat("Z", n))[:n] }

// crowd sends n prompts at once and returns what comes of them.
func (m *meterBed) crowd(n, promptTokens, tokens int) (answers func() []told) {
	return m.crowdApart(0, n, promptTokens, tokens)
}

// inTurn is crowd with requests that are routed one after the other, so that each is routed by the
// load of those before it.
func (m *meterBed) inTurn(n, promptTokens, tokens int) (answers func() []told) {
	return m.crowdApart(time.Microsecond, n, promptTokens, tokens)
}

func (m *meterBed) crowdApart(apart time.Duration, n, promptTokens, tokens int) (answers func() []told) {
	all := make([]told, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * apart)
			all[i] = m.say(unlike(i, promptTokens), tokens, "", "")
		})
	}
	return func() []told { wg.Wait(); return all }
}

// well wants all of them answered.
func (m *meterBed) well(all ...told) {
	m.t.Helper()
	for _, a := range all {
		if a.status != 200 {
			m.errorf("%d %s", a.status, a.text)
		}
	}
}

// gate holds what asks while it is shut.
type gate struct {
	mu   sync.Mutex
	shut chan struct{} // nil: open
}

func (g *gate) close() {
	g.mu.Lock()
	g.shut = make(chan struct{})
	g.mu.Unlock()
}

func (g *gate) open() {
	g.mu.Lock()
	close(g.shut)
	g.shut = nil
	g.mu.Unlock()
}

func (g *gate) pass() {
	g.mu.Lock()
	c := g.shut
	g.mu.Unlock()
	if c != nil {
		<-c
	}
}

func TestVirtualMeters(t *testing.T) {
	ds, _ := virtualDevices(t)
	seen := &watched{metrics: map[string]bool{}}
	plain := func(*meterBed, *gateway.Options) {}
	for _, c := range []struct {
		name   string
		change func(*meterBed, *gateway.Options)
		f      func(*meterBed)
	}{
		{"cached on prefill nodes", plain, (*meterBed).prefillCaches},
		{"prefill nodes that are gone", plain, (*meterBed).prefillGone},
		{"strangers", plain, (*meterBed).strangers},
		{"silence", plain, (*meterBed).silences},
	} {
		metered(t, ds, seen, c.name, c.change, c.f)
	}
	meteredLimits(t, ds, seen)
	meteredAlerts(t, ds, seen)
	meteredTimes(t, ds, seen)
	meteredTurns(t, ds, seen)
	meteredQueues(t, ds, seen)
	meteredOutboxes(t, ds, seen)
	meteredTransfers(t, ds, seen)
	meteredClients(t, ds, seen)
	meteredMemory(t, ds, seen)
	meteredAdapters(t, seen)
	meteredNews(t, ds, seen)
	meteredEnds(t, ds, seen)
	if !t.Failed() {
		holdSeen(t, seen.metrics)
		seen.alerts.hold(t)
	}
}

// prefillCaches has a prompt computed by a prefill node that has most of it.
func (m *meterBed) prefillCaches() {
	const prompt, blocks = 120, (120 - 1) / 16
	m.well(m.say(unlike(1, prompt), 2, "", ""))
	m.is('P', "vllm:prefix_cache_hits_total", "", 0)
	used := m.nodes[0]
	if used.decode.Counters().Accepted == 0 {
		used = m.nodes[1]
	}
	m.ask("POST", "/admin/drain/"+used.addr+"?timeout=1s")
	m.well(m.say(unlike(1, prompt), 2, "", "")) // on the other one, which has nothing of it
	m.is('D', "vllm:external_prefix_cache_hits_total", "", 2*(prompt-1))
	m.is('P', "vllm:prefix_cache_hits_total", "", blocks*16)
	m.is('P', "vllm:prompt_tokens_cached_total", "", blocks*16)
	m.is('P', "vllm:prompt_tokens_cached_by_source_total", `"device"`, blocks*16)
	m.is('P', "tandem:prefill_tokens_computed_total", "", 2*(prompt-1)-blocks*16)
	bytes := 0.0
	for series, v := range m.samples() {
		if strings.HasPrefix(series, `tandem:rpc_bytes_total{direction="out"`) {
			bytes += v - m.base[series]
		}
	}
	m.shows("Traffic between nodes", 0, bytes, `{role="decode"}`, `{role="gateway"}`, `{role="prefill"}`)
}

// prefillGone has decode nodes dial prefill nodes that are not there.
func (m *meterBed) prefillGone() {
	var mu sync.Mutex
	failed, last := map[string]int{}, "" // by "from to"; from
	m.measured.dialled = func(from, to string, err error) {
		if err != nil {
			mu.Lock()
			failed[from+" "+to]++
			last = from
			mu.Unlock()
		}
	}
	for _, p := range m.nodes[2:] {
		m.take(p)
	}
	const n = 9
	for i := range n {
		if i > 0 {
			time.Sleep(10 * time.Second) // longer than any pause before the next dial, or the next try of an open way
		}
		m.well(m.say(unlike(i, 40), 2, "", ""))
	}
	time.Sleep(100 * time.Millisecond) // the last one's have all failed, and are not yet tried again
	mu.Lock()
	dials := 0
	for _, k := range failed {
		dials += k
	}
	asked := len(failed)
	mu.Unlock()
	broken, open := 0, 0 // three failures in a row open a way, and each request asks both nodes
	for _, d := range m.nodes[:2] {
		if d.decode.Counters().Accepted >= 3 {
			if broken += 2; d.addr == last { // others' next try is due
				open += 2
			}
		}
	}
	m.is('D', "tandem:rpc_dial_errors_total", "", float64(dials))
	m.is('D', "tandem:decode_prefill_failures_total", "", 2*n)
	m.is('D', "tandem:decode_prefill_breakers", "", float64(asked))
	m.is('D', "tandem:decode_prefill_breakers", `"closed"`, float64(asked-broken))
	m.showsEach("Prefill nodes as decode nodes see them", 0, map[string]float64{`{state="closed"}`: float64(asked - broken), `{state="half-open"}`: float64(broken - open), `{state="open"}`: float64(open)})
	m.is('P', "tandem:prefill_jobs_total", "", 0)
	m.is('D', "tandem:decode_prefills_total", `"local"`, n)
	m.shows("Connections that failed", 0, float64(dials)+m.value('G', "tandem:rpc_dial_errors_total", ""))
	if dials != 2*n || broken == 0 {
		m.errorf("%d dials of %d requests have failed, %d ways are broken", dials, n, broken)
	}
}

// strangers knock at nodes' doors.
func (m *meterBed) strangers() {
	const each = 3
	for _, n := range m.nodes {
		for range each {
			c, err := m.net.Dial(context.Background(), n.addr)
			m.must(err)
			_, err = c.Write([]byte("GET / HTTP/1.1\r\nHost: node\r\n\r\n"))
			m.must(err)
			_, _ = io.ReadAll(c) // until it is closed
			_ = c.Close()
		}
	}
	m.is('D', "tandem:rpc_refused_connections_total", "", 2*each)
	m.is('P', "tandem:rpc_refused_connections_total", "", 2*each)
	m.shows("Connections that failed", 1, 4*each)
}

// silences cuts nodes off for longer than connections wait.
func (m *meterBed) silences() {
	m.well(m.crowd(8, 40, 2)()...) // decode nodes know the prefill nodes
	d0, p0 := m.nodes[0], m.nodes[2]
	one := func(n *node, name string) float64 { v, _ := pick(string(n.meters.Set.Append(nil)), name, ""); return v }
	const conns, silent, errors = "tandem:rpc_connections", "tandem:rpc_silent_connections_total", "tandem:rpc_dial_errors_total"
	links := one(p0, conns) // of gateway and decode nodes
	m.net.Silence(p0.addr, true)
	time.Sleep(10 * time.Second)
	m.net.Silence(p0.addr, false)
	time.Sleep(10 * time.Second)
	m.is('P', silent, "", links)
	gw := m.value('G', silent, "")
	m.is('D', silent, "", links-gw)
	if gw != 1 {
		m.errorf("the gateway has found %g connections silent", gw)
	}

	m.net.Silence(d0.addr, true)
	time.Sleep(10 * time.Second)
	m.net.Silence(d0.addr, false)
	time.Sleep(10 * time.Second)
	m.is('G', silent, "", gw+1)
	m.is('G', "tandem:gateway_nodes_lost_total", `"silence"`, 1)
	m.is('D', silent, "", links-gw) // a decode node waits rpc.StreamSilence for a gateway
	m.shows("Dropped events and frames", 2, links+gw+1+links-gw)

	// Dials to one that is gone, as the gateway counts them and as they were.
	dials := m.dials.Load()
	before := m.value('G', errors, "")
	m.take(d0)
	time.Sleep(20 * time.Second)
	if m.dials.Load() == dials {
		m.errorf("nobody dialled a node that is gone")
	}
	synctest.Wait()
	m.is('G', errors, "", before+float64(m.dials.Load()-dials))
	m.is('G', "tandem:gateway_breakers", `"open"`, 1)
	m.is('G', "tandem:gateway_usable_decode_nodes", "", 1)
	m.showsEach("Decode nodes as gateways see them", 0, map[string]float64{`{state="closed"}`: 1, `{state="half-open"}`: 0, `{state="open"}`: 1})
	m.shows("Decode nodes as gateways see them", 1, 1)
}

// meteredLimits has gateway and nodes refuse what is beyond a limit.
func meteredLimits(t *testing.T, ds []*engine.Loaded, seen *watched) {
	keys := filepath.Join(t.TempDir(), "keys")
	write := func(text string) {
		if err := os.WriteFile(keys, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("one concurrency=2\n")
	var still gate
	metered(t, ds, seen, "limits of keys", func(m *meterBed, o *gateway.Options) {
		m.key, o.APIKeyFile, o.Log = "one", keys, slog.New(slog.DiscardHandler) // which tells of the bad file
		m.measured.step = func(string) { still.pass() }
	}, func(m *meterBed) {
		still.close()
		all := make([]told, 7)
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() { all[i] = m.say(unlike(i, 40), 2, "", "one") })
		}
		synctest.Wait()
		still.open()
		wg.Wait()
		refused := 0
		for _, a := range all {
			if a.status == 429 {
				refused++
			}
		}
		if refused != len(all)-2 {
			m.errorf("%d of %d were refused: %v", refused, len(all), all)
		}
		m.is('G', "tandem:gateway_refused_total", `"concurrency"`, float64(refused))
		m.is('G', "tandem:gateway_refused_total", "", float64(refused))
		m.shows("Refused by gateways", 0, float64(refused), `{limit="concurrency"}`)

		write("one concurrency=many\n")
		time.Sleep(3 * time.Second)
		m.is('G', "tandem:gateway_key_file_bad", "", 1)
		m.fires("TandemFileNotTaken")
		m.shows("Gateway files not reloaded", 1, 1)
		write("one\n")
		time.Sleep(3 * time.Second)
		m.is('G', "tandem:gateway_key_file_bad", "", 0)
	})
	var slow gate
	var sent moments
	metered(t, ds, seen, "queues", func(m *meterBed, o *gateway.Options) {
		o.Limits.MaxInFlight, o.Limits.NodeBacklog, o.Limits.QueueTimeout = 60, 1, time.Hour
		m.measured.step = func(addr string) { slow.pass() }
		m.measured.framed = func(_ string, t rpc.Type) {
			if t == rpc.FrameGenerate {
				sent.add(time.Now())
			}
		}
	}, func(m *meterBed) { m.queues(&slow, &sent) })
	metered(t, ds, seen, "nodes that have no room", func(m *meterBed, o *gateway.Options) {
		o.Limits.NodeBacklog, o.Limits.NodeBacklogTime = 1000, -1
		m.measured.step = func(addr string) { slow.pass() }
		m.measured.decode = func(o *decode.Options) { o.MaxRequests = 4 }
	}, func(m *meterBed) {
		slow.close()
		answers := m.crowd(20, 40, 2)
		time.Sleep(10 * time.Second)
		refused := m.value('G', "tandem:gateway_attempt_failures_total", `"overloaded"`)
		if refused < 20-2*4 {
			m.errorf("the gateway was refused %g times", refused)
		}
		m.is('D', "tandem:decode_refused_total", "", refused)
		m.is('D', "vllm:admission_rejections_total", "", refused)
		m.shows("Decode nodes: refused and dropped", 0, refused)
		m.failedAttempts(map[string]float64{"overloaded": refused})
		slow.open()
		answers()
	})
	metered(t, ds, seen, "prefill nodes that have no room", func(m *meterBed, o *gateway.Options) {
		o.Limits.NodeBacklog, o.Limits.NodeBacklogTime = 1000, -1
		m.measured.step = func(addr string) {
			if addr[0] == 'p' {
				slow.pass()
			}
		}
		m.measured.prefill = func(o *prefill.Options) { o.MaxQueued, o.RunAheadTokens = 1, 40 }
	}, func(m *meterBed) {
		slow.close()
		answers := m.crowd(20, 40, 2)
		time.Sleep(time.Second)
		jobs := m.value('P', "tandem:prefill_jobs_total", `"refused"`)
		if jobs < 4 {
			m.errorf("%g jobs were refused", jobs)
		}
		m.is('P', "vllm:admission_rejections_total", "", jobs)
		m.is('D', "tandem:decode_prefill_failures_total", "", jobs)
		slow.open()
		answers()
	})
}

func plainMeters(*meterBed, *gateway.Options) {}

// meteredClients has clients that do not read, and tokens that come too late.
func meteredClients(t *testing.T, ds []*engine.Loaded, seen *watched) {
	metered(t, ds, seen, "clients that do not read", func(m *meterBed, o *gateway.Options) {
		o.StreamTokens = 8
	}, func(m *meterBed) {
		const clients, buffer = 3, 512 // bytes, which hold an event or two
		runtime.GC()
		runtime.GC() // of no stream before there is a buffer that it has made larger
		var all []net.Conn
		for i := range clients {
			all = append(all, m.stream(unlike(i, 20), 150))
		}
		time.Sleep(10 * time.Second)
		for i, c := range all {
			held := float64(buffer * (clients - i))
			m.is('G', "tandem:gateway_stream_buffer_bytes", "", held)
			m.shows("Slow clients: memory", 0, held, `{node="gw"}`)
			text, err := io.ReadAll(c)
			m.must(err)
			_ = c.Close()
			if events := strings.Count(string(text), "data: {"); events < 100 || len(text)/events > buffer/2 {
				m.errorf("%d events in %d bytes", events, len(text))
			}
		}
		m.is('G', "tandem:gateway_stream_buffer_bytes", "", 0)
		paused := m.value('G', "tandem:gateway_attempts_total", "") - clients // each is an attempt more
		m.is('G', "tandem:gateway_streams_paused_total", "", paused)
		m.shows("Slow clients: pauses and late tokens", 0, paused)
	})
	metered(t, ds, seen, "tokens that come too late", func(m *meterBed, o *gateway.Options) {
		o.StallTimeout = -1
	}, func(m *meterBed) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		done := make(chan told, 1)
		go func() { done <- m.sayIn(ctx, unlike(1, 20), 180, "", "") }()
		for m.value('G', "vllm:generation_tokens_total", "") < 5 {
			time.Sleep(time.Millisecond)
		}
		for _, d := range m.nodes[:2] { // what they say stays on its way
			m.net.Silence(d.addr, true)
		}
		time.Sleep(50 * time.Millisecond)
		cancel()
		<-done
		time.Sleep(time.Second)
		m.is('G', "tandem:gateway_requests_in_flight", "", 0)
		for _, d := range m.nodes[:2] {
			m.net.Silence(d.addr, false)
		}
		time.Sleep(10 * time.Second)
		late := m.value('D', "vllm:generation_tokens_total", "") - m.value('G', "vllm:generation_tokens_total", "")
		if late < 1 {
			m.errorf("no token came too late")
		}
		m.is('G', "tandem:gateway_stale_tokens_total", "", late)
		m.shows("Slow clients: pauses and late tokens", 1, late)
	})
}

// holdSeen has every metric that the table of internal/obs/metrics says the test has
// seen at its right value be among them.
func holdSeen(t *testing.T, seen map[string]bool) {
	t.Helper()
	text, err := os.ReadFile("../obs/metrics/testdata/seen")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[2] != "internal/e2e:"+t.Name() {
			continue
		}
		for _, role := range f[1] {
			n++
			if !seen[f[0]+" "+string(role)] {
				t.Errorf("%s was not seen at its right value, other than 0, in role %c", f[0], role)
			}
		}
	}
	if n == 0 {
		t.Error("the table names no metric of this test")
	}
}
