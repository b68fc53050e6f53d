//go:build linux

package e2e

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// Metrics of KV transfers, and of what prefill nodes hold: a test's hands are on the
// wire, and it knows the virtual time of all that goes by.

// meteredTransfers has KV transfers go wrong.
func meteredTransfers(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const in, out, failures = `"in"`, `"out"`, "tandem:kv_transfer_failures_total"
	page := ds[0].KV.PageBytes
	metered(t, ds, seen, "dials", plainMeters, func(m *meterBed) {
		var refused atomic.Int64
		m.kv.refuse = func() error {
			if refused.Add(1) == 1 {
				return fmt.Errorf("refused: %d", refused.Load())
			}
			return nil
		}
		m.well(m.say(unlike(1, 60), 2, "", ""))
		m.is('P', "tandem:kv_transfer_retries_total", "", 1)
		m.shows("Connections that failed", 2, 1)
		m.is('P', "tandem:kv_transfers_total", out, 1)
	})
	metered(t, ds, seen, "pages that change", func(m *meterBed, _ *gateway.Options) {
		var armed atomic.Bool
		m.granted = func(*leases, kvtransfer.Grant) { armed.Store(true) }
		m.kv.meddle = func(b []byte) []byte { // one page
			if len(b) != page || m.flips.Load() == 1 || !armed.CompareAndSwap(true, false) {
				return b
			}
			m.flips.Add(1)
			c := slices.Clone(b)
			c[len(c)/2] ^= 1
			return c
		}
	}, func(m *meterBed) {
		for i := range 4 {
			m.well(m.say(unlike(i, 60), 2, "", ""))
		}
		if m.flips.Load() != 1 {
			m.errorf("%d pages were changed", m.flips.Load())
		}
		m.is('D', "tandem:fenced_writes_total", `"corrupt"`, 1)
		m.fires("TandemCorruptKV")
		m.shows("KV transfer: failures", 0, 2, `{direction="in"}`, `{direction="out"}`)
		fenced := []string{`{kind="corrupt"}`}
		if m.value('D', "tandem:fenced_writes_total", `"stale"`) > 0 { // of the same transfer, behind that page
			fenced = append(fenced, `{kind="stale"}`)
		}
		m.shows("KV transfer: failures", 2, m.value('D', "tandem:fenced_writes_total", ""), fenced...)
		m.is('D', failures, in, 1)
		m.is('P', failures, out, 1)
	})
	metered(t, ds, seen, "a writer that falls silent", func(m *meterBed, _ *gateway.Options) {
		m.kv.meddle = func(b []byte) []byte {
			if len(b) == page && m.flips.Add(1) == 1 {
				time.Sleep(time.Minute)
			}
			return b
		}
	}, func(m *meterBed) {
		m.well(m.say(unlike(1, 60), 2, "", ""))
		time.Sleep(2 * time.Minute)
		m.is('D', "tandem:kv_leases_expired_total", "", 1)
		m.shows("KV transfer: failures", 1, 1)
		m.shows("KV transfer: failures", 3, m.value('D', "tandem:decode_prefill_failures_total", ""))
		m.is('D', failures, in, 1)
		m.is('P', failures, out, 1)
	})
	metered(t, ds, seen, "leases that are over", func(m *meterBed, _ *gateway.Options) {
		m.granted = func(l *leases, g kvtransfer.Grant) {
			m.lease.Store(&g)
			m.reader.Store(l)
		}
		m.kv.meddle = func(b []byte) []byte {
			if len(b) == page && m.flips.Add(1) == 1 { // while its first page is on its way
				m.reader.Load().Cancel(m.lease.Load().Lease)
			}
			return b
		}
	}, func(m *meterBed) {
		m.well(m.say(unlike(1, 60), 2, "", ""))
		time.Sleep(time.Minute)
		sent, landed := uint64(0), uint64(0)
		for _, n := range m.nodes {
			if n.writer != nil && n.prefill != nil {
				sent += n.writer.Stats().Pieces
			} else {
				landed += n.leases.Stats().Pieces
			}
		}
		if sent == landed {
			m.errorf("no page of a lease that was over was written")
		}
		m.is('D', "tandem:fenced_writes_total", `"stale"`, float64(sent-landed))
		m.is('D', failures, in, 1)
	})
	meteredSlowly(t, ds, seen)
}

// sight is what goes by on the wire, of one transfer after the other.
type sight struct {
	mu       sync.Mutex
	granted  time.Time // this one's grant
	begun    time.Time // its first frame
	landed   time.Time // its last page
	sent     time.Time // whatever went last
	computed time.Time // the last of prefill nodes' steps
	pages    int       // of all
}

func (s *sight) see(f func(now time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(time.Now())
}

// meteredSlowly has each page take its time on the wire: so the test knows how many
// there are, and when the first and the last byte of each transfer went.
func meteredSlowly(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const prompt, blocks, perPage, requests = 60, (60 - 1 + 15) / 16, 100 * time.Millisecond, 3
	page, pages := ds[0].KV.PageBytes, requests*blocks*ds[0].KV.Regions
	var s sight
	metered(t, ds, seen, "a slow network", func(m *meterBed, _ *gateway.Options) {
		wire := make(chan bool, 1) // no mutex: who waits for one holds virtual time up
		m.measured.stepped = func(addr string) {
			if addr[0] == 'p' {
				s.see(func(now time.Time) { s.computed = now })
			}
		}
		m.granted = func(*leases, kvtransfer.Grant) { s.see(func(now time.Time) { s.granted, s.begun = now, time.Time{} }) }
		m.kv.meddle = func(b []byte) []byte {
			switch {
			case len(b) == page:
				wire <- true
				time.Sleep(perPage)
				s.see(func(now time.Time) { s.pages, s.landed = s.pages+1, now })
				<-wire
			case bytes.HasPrefix(b, []byte("TKVF")): // a frame's header
				s.see(func(now time.Time) {
					if s.begun.IsZero() {
						s.begun = now
					}
				})
			}
			s.see(func(now time.Time) { s.sent = now })
			return b
		}
	}, func(m *meterBed) {
		var first, last, exposed time.Duration
		for i := range requests {
			answer := make(chan told, 1)
			go func() { answer <- m.say(unlike(i, prompt), 2, "", "") }()
			if i == 0 { // some of its pages are still to come
				time.Sleep(2*perPage + perPage/2)
				m.is('D', "tandem:kv_blocks_in_transfer", `"in"`, blocks)
				m.is('P', "tandem:kv_blocks_in_transfer", `"out"`, blocks)
				m.shows("KV in transfer", 0, 2*blocks, `{direction="in"}`, `{direction="out"}`)
				m.is('D', "vllm:num_requests_kv_fetch_by_stage", `"in_progress"`, 1)
				m.shows("KV in transfer", 1, 1, `{stage="in_progress"}`)
				m.is('D', "tandem:kv_leases", `"arriving"`, 1)
				m.shows("KV in transfer", 2, 1, `{state="arriving"}`)
				m.is('P', "tandem:queue_length", `"pushes"`, 1)
				m.fills("pushes", map[string]float64{"prefill": 1. / 1024})
			}
			m.well(<-answer)
			s.see(func(time.Time) {
				first += s.begun.Sub(s.granted)
				last += s.landed.Sub(s.granted)
				exposed += s.sent.Sub(s.computed)
			})
		}
		if s.pages != pages || first <= 0 || last < time.Duration(pages)*perPage || exposed < requests*time.Second/2 {
			m.errorf("%d pages went by, want %d; in all %v until first bytes, %v until last ones, %v after prompts were computed", s.pages, pages, first, last, exposed)
		}
		m.is('P', "tandem:kv_transfer_pieces_total", `"out"`, float64(s.pages))
		m.is('D', "tandem:kv_transfer_pieces_total", `"in"`, float64(s.pages))
		m.is('D', "tandem:kv_transfer_first_byte_seconds_count", "", requests)
		m.is('D', "tandem:kv_transfer_first_byte_seconds_sum", "", first.Seconds())
		m.is('D', "tandem:kv_transfer_last_byte_seconds_sum", "", last.Seconds())
		m.is('P', "tandem:kv_transfer_exposed_seconds_count", "", requests)
		m.is('P', "tandem:kv_transfer_exposed_seconds_sum", "", exposed.Seconds())
	})
}

// meteredMemory asks prefill nodes for many times what they have blocks for, over a
// network that is slow to take what is computed: nothing computed is ever lost.
func meteredMemory(t *testing.T, ds []*engine.Loaded, seen *watched) {
	const requests, prompt = 24, 190
	page := ds[0].KV.PageBytes
	var pressed [2]atomic.Int64 // steps of each prefill node with no block to give and jobs that wait
	metered(t, ds, seen, "prefill nodes without a block to spare", func(m *meterBed, o *gateway.Options) {
		o.Limits.NodeBacklog, o.Limits.NodeBacklogTime = 1000, -1
		m.measured.scheduler = func(addr string, o *scheduler.Config) {
			if o.Pool.Blocks = 13; addr[0] == 'd' {
				o.Pool.Blocks, o.MaxSeqs = ds[0].KV.Blocks, 8
			}
		}
		m.measured.prefill = func(o *prefill.Options) { o.RunAheadTokens = 10 * prompt }
		m.measured.stepped = func(addr string) {
			for i, n := range m.nodes[min(2, len(m.nodes)):] {
				if s := n.eng.Stats().Scheduler; n.addr == addr && s.Blocks.Free+s.Blocks.Cached == 0 && s.Waiting > 0 {
					pressed[i].Add(1)
				}
			}
		}
		m.kv.meddle = func(b []byte) []byte {
			if len(b) == page {
				time.Sleep(5 * time.Millisecond)
			}
			return b
		}
	}, func(m *meterBed) {
		m.well(m.crowd(requests, prompt, 2)()...)
		m.is('P', "tandem:prefill_jobs_total", `"done"`, requests)
		m.is('P', "vllm:request_num_preemptions_count", "", requests)
		m.is('P', "vllm:request_num_preemptions_sum", "", 0)
		m.is('P', "vllm:num_preemptions_total", "", 0)
		if pressed[0].Load() == 0 || pressed[1].Load() == 0 {
			m.errorf("%d and %d steps had no block left while jobs waited", pressed[0].Load(), pressed[1].Load())
		}
	})
}

// meteredAdapters holds a request still that runs with an adapter, first on its
// prefill node and then on its decode node.
func meteredAdapters(t *testing.T, seen *watched) {
	const name = "all"
	ds := devices(t, filepath.Join(checkpoints, "gqa-tied"), native(), 4, adaptersOf(filepath.Join(checkpoints, "gqa-tied")))
	roles := map[byte]*struct {
		gate
		steps atomic.Int64
	}{'p': {}, 'd': {}}
	metered(t, ds, seen, "adapters", func(m *meterBed, o *gateway.Options) {
		o.StallTimeout = -1
		m.measured.step = func(addr string) {
			if r := roles[addr[0]]; r.steps.Add(1) > 1 { // what a step brings is told at its end
				r.pass()
			}
		}
	}, func(m *meterBed) {
		still := []string{"", ""} // running and waiting, on two nodes
		m.adapters('P', still, still)
		m.adapters('D', still, still)
		roles['p'].close()
		roles['d'].close()
		answer := make(chan told, 1)
		go func() { answer <- m.say(unlike(1, 100), 3, fmt.Sprintf(`,"model":%q`, name), "") }()
		time.Sleep(time.Second)
		m.adapters('P', still, []string{name, ""})
		m.adapters('D', still, []string{"", name})
		roles['p'].open()
		time.Sleep(time.Second)
		m.adapters('P', still, still)
		m.adapters('D', still, []string{name, ""})
		roles['d'].open()
		m.well(<-answer)
		m.adapters('P', still, still)
		m.adapters('D', still, still)
	})
}

// adapters wants a role's nodes, in any order, to name adapters that requests run and
// wait with, as of now.
func (m *meterBed) adapters(role byte, want ...[]string) {
	m.t.Helper()
	synctest.Wait()
	var got [][]string
	for _, n := range m.nodes {
		if n.addr[0] != role|0x20 {
			continue
		}
		line := regexp.MustCompile(`(?m)^vllm:lora_requests_info\{.*max_lora="(\d+)".*running_lora_adapters="([^"]*)".*waiting_lora_adapters="([^"]*)".*\} (\S+)$`).FindSubmatch(n.meters.Set.Append(nil))
		if line == nil {
			m.t.Fatalf("%s names no adapters: %s", n.addr, n.meters.Set.Append(nil))
		}
		if at, err := strconv.ParseFloat(string(line[4]), 64); err != nil || at != float64(time.Now().UnixMilli())/1e3 || string(line[1]) != strconv.Itoa(n.device.Adapters.Places) {
			m.errorf("%s: %s", n.addr, line[0])
		}
		got = append(got, []string{string(line[2]), string(line[3])})
	}
	slices.SortFunc(got, slices.Compare[[]string])
	slices.SortFunc(want, slices.Compare[[]string])
	if !slices.EqualFunc(got, want, slices.Equal[[]string]) {
		m.errorf("%c names adapters %q, want %q", role, got, want)
	} else if want[1][0]+want[1][1] != "" {
		m.seen["vllm:lora_requests_info "+string(role)] = true
	}
}
