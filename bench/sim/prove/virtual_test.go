package prove

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/simulate"
	"github.com/tandem-serving/tandem/bench/sim/sleep"
	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/lengths"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// The real gateway and nodes in virtual time, with engines whose steps sleep as long as the profile
// says, next to the simulator (bench/sim/fleet) on the same trace.

// sleepers is such a fleet and its load.
type sleepers struct {
	prefill, decode int
	profile         *profile.Profile
	batched, seqs   int
	trace           []sim.Request
	prompts         [][]int32
}

const (
	reports          = 100 * time.Millisecond // the least time between two reports of a node
	sleepVocab       = 256
	sleepFingerprint = 7
	sleepLayers      = 2
)

// pages is the memory of a node's KV. The engine calls no other method of its backend.
type pages struct {
	backend.Backend
	regions [][]byte
}

func newPages(kv backend.KVSpec) *pages {
	p := new(pages)
	for range kv.Regions {
		p.regions = append(p.regions, make([]byte, kv.Blocks*kv.PageBytes))
	}
	return p
}

func (p *pages) KVRegion(i int) []byte { return p.regions[i] }
func (p *pages) Region(i int) []byte   { return p.regions[i] }

// address returns the address of a node, which is its name on the rings.
func (s *sleepers) address(t fleet.Target) string { return t.String() + ":7101" }

// options returns those of the simulated fleet.
func (s *sleepers) options() fleet.Options {
	o := simulate.FleetOptions(s.profile, s.profile.Times(), time.Microsecond)
	o.Prefill, o.Decode, o.Policy, o.BatchedTokens, o.MaxSeqs = s.prefill, s.decode, route.Prefix, s.batched, s.seqs
	o.MinRemote = gateway.DefaultMinRemotePrefillTokens
	o.NoEvents, o.KeepGaps, o.GrantTimeout, o.Layers = true, true, 2*time.Second, sleepLayers
	l := limits.Default()
	o.Limits = &l
	o.Names, o.Keys = s.address, Keys(s.prompts, sleepFingerprint, s.profile.Memory.BlockTokens)
	return o
}

// virtualSleepers is the running fleet.
type virtualSleepers struct {
	*sleepers
	t       *testing.T
	net     *rpc.Network // between gateway and nodes
	kv      *kvtransfer.Mem
	door    *rpc.Network // between clients and gateway
	members []nodes.Member
	ctx     context.Context
	stop    []func() // in reverse
	running sync.WaitGroup
}

func (v *virtualSleepers) must(err error) {
	v.t.Helper()
	if err != nil {
		v.t.Fatal(err)
	}
}

// start starts a node.
func (v *virtualSleepers) start(target fleet.Target) {
	p := v.profile
	kv := backend.UniformKV(sleepLayers, p.Memory.Blocks, p.Memory.BlockTokens, 1, 1, backend.F32)
	memory, addr := newPages(kv), v.address(target)
	var d *decode.Node
	eo := engine.Options{
		Model: &sleep.Model{Times: p.Times(), Layers: sleepLayers, Vocab: sleepVocab, Token: 'A'}, Backend: memory, KV: kv,
		Scheduler: v.scheduler(kv), OnStep: func() {
			if d != nil {
				d.Flush()
			}
		},
	}
	role := target.String()[:strings.IndexByte(target.String(), '-')]
	if target.Prefill {
		eo.StepTime = lengths.StepTime
	}
	e, err := engine.New(eo)
	v.must(err)
	layout := kvtransfer.Layout{Regions: kv.Regions, PageBytes: kv.PageBytes, Hash: 1}
	hello := &nodepb.Hello{NodeId: addr, Role: role, Model: "sleep", Fingerprint: sleepFingerprint, NumericsClass: "sleep"}
	var h rpc.Handler
	if target.Prefill {
		w, err := kvtransfer.NewWriter(kvtransfer.WriterOptions{Node: addr, Layout: layout, Memory: memory, Network: v.kv})
		v.must(err)
		v.stop = append(v.stop, func() { v.must(w.Close()) })
		n := prefill.New(prefill.Options{Engine: e, Writer: w, RunAheadTokens: 2 * v.batched, Identity: prefill.Identity{Fingerprint: sleepFingerprint, Class: "sleep", Layout: 1}})
		v.running.Go(func() { n.Positions(v.ctx) })
		v.running.Go(func() { n.Heartbeats(v.ctx) })
		h = n
	} else {
		do := decode.Options{
			Engine: e, MaxModelLen: v.scheduler(kv).MaxModelLen, BlockTokens: p.Memory.BlockTokens, MaxRunning: v.seqs, Bundle: &nodepb.Bundle{
				Model: "sleep", Fingerprint: sleepFingerprint, NumericsClass: "sleep", TokenizerJson: nodestest.Tokenizer(nil),
				MaxModelLen: uint32(v.scheduler(kv).MaxModelLen), VocabSize: sleepVocab, BlockTokens: uint32(p.Memory.BlockTokens),
			},
			Identity: decode.Identity{Model: "sleep", Fingerprint: sleepFingerprint, Class: "sleep", Layout: 1},
		}
		if v.prefill > 0 {
			r, err := kvtransfer.NewReader(kvtransfer.ReaderOptions{Node: addr, Layout: layout, Memory: memory, Network: v.kv, Listen: addr + "-kv", OnEvent: func(ev kvtransfer.Event) { d.TransferEvent(ev) }})
			v.must(err)
			v.stop = append(v.stop, func() { v.must(r.Close()) })
			do.Reader, do.Dial = r, func(h rpc.Handler) decode.Dialer {
				pool := rpc.NewPool(rpc.Options{Hello: hello, Dial: v.net.Dial}, h)
				v.stop = append(v.stop, pool.Close)
				return pool
			}
		}
		d = decode.New(do)
		v.running.Go(func() { d.Heartbeats(v.ctx) })
		h = d
	}
	v.running.Go(func() { e.Run(v.ctx) })
	l, err := v.net.Listen(addr)
	v.must(err)
	v.running.Go(func() { v.must(rpc.Serve(v.ctx, l, rpc.Options{Hello: hello}, h)) })
	v.members = append(v.members, nodes.Member{ID: addr, Role: role, RPC: addr, Model: "sleep", Fingerprint: sleepFingerprint, Class: "sleep", Ready: true})
}

func (s *sleepers) scheduler(kv backend.KVSpec) scheduler.Config {
	return scheduler.Config{
		Pool: kvcache.Config{Blocks: kv.Blocks, BlockTokens: s.profile.Memory.BlockTokens, Groups: memory.Groups(kv)}, MaxBatchedTokens: s.batched, MaxSeqs: s.seqs,
		MaxOutputs: s.seqs + 64, MaxQueued: 1 << 16, MaxModelLen: kv.Blocks * s.profile.Memory.BlockTokens,
	}
}

// play serves the trace in virtual time and returns what its clients measured.
func (s *sleepers) play(t *testing.T) (rec *load.Record) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		v := &virtualSleepers{sleepers: s, t: t, net: rpc.NewNetwork(), kv: kvtransfer.NewMem(), door: rpc.NewNetwork()}
		var cancel context.CancelFunc
		v.ctx, cancel = context.WithCancel(context.Background())
		for i := range s.decode + s.prefill { // their reports are spread over the interval, as the simulator's
			time.Sleep(reports / time.Duration(s.decode+s.prefill))
			target := fleet.Target{Node: i}
			if i >= s.decode {
				target = fleet.Target{Prefill: true, Node: i - s.decode}
			}
			v.start(target)
		}
		l, err := v.door.Listen("gateway")
		v.must(err)
		g, err := gateway.New(gateway.Options{
			Listener: l, DrainDelay: -1, Members: v.members, Policy: "prefix", Log: slog.New(slog.DiscardHandler),
			RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: v.net.Dial},
		})
		v.must(err)
		served := make(chan error, 1)
		gctx, end := context.WithCancel(context.Background())
		go func() { served <- g.Run(gctx) }()
		time.Sleep(20 * reports) // all nodes have reported
		rec = &load.Record{Outcomes: make([]load.Outcome, len(s.trace))}
		start := time.Now()
		var clients sync.WaitGroup
		for i := range s.trace {
			clients.Go(func() {
				time.Sleep(time.Until(start.Add(s.trace[i].At)))
				rec.Outcomes[i] = v.ask(start, i)
			})
		}
		clients.Wait()
		rec.Duration = time.Since(start)
		end()
		v.must(<-served)
		cancel()
		for i := len(v.stop) - 1; i >= 0; i-- {
			v.stop[i]()
		}
		v.running.Wait()
		time.Sleep(time.Minute) // the HTTP server's own ticker
	})
	return rec
}

// ask sends a request of the trace and measures its stream.
func (v *virtualSleepers) ask(start time.Time, i int) (o load.Outcome) {
	q := &v.trace[i]
	o = load.Outcome{Scheduled: q.At, Ready: q.At, Sent: time.Since(start), Prompt: q.Tokens}
	c, err := v.door.Dial(context.Background(), "gateway")
	if err != nil {
		o.Err = err
		return o
	}
	defer func() { _ = c.Close() }()
	o.Err = v.read(c, start, i, &o)
	return o
}

func (v *virtualSleepers) read(c net.Conn, start time.Time, i int, o *load.Outcome) error {
	want := max(1, v.trace[i].Output)
	body := fmt.Appendf(nil, `{"max_tokens":%d,"ignore_eos":true,"temperature":0,"stream":true,"prompt":[`, want)
	for j, t := range v.prompts[i] {
		if j > 0 {
			body = append(body, ',')
		}
		body = fmt.Append(body, t)
	}
	body = append(body, "]}"...)
	if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("%d %s", resp.StatusCode, text)
	}
	for lines := bufio.NewReader(resp.Body); ; {
		line, err := lines.ReadString('\n')
		now := time.Since(start)
		switch {
		case strings.HasPrefix(line, "data: [DONE]"):
			if o.Output != want {
				return fmt.Errorf("%d tokens of %d", o.Output, want)
			}
			return nil
		case err != nil:
			return errors.Join(io.ErrUnexpectedEOF, err)
		case strings.HasPrefix(line, "data: {"):
			if o.Output++; o.Output == 1 {
				o.First = now
			} else {
				o.ITL = append(o.ITL, now-o.Last)
			}
			o.Last = now
		}
	}
}

// newSleepers draws a load for a fleet of a kind of node, at a share of the fleet's capacity.
func newSleepers(t *testing.T, prefill, decode, requests int, share float64) *sleepers {
	t.Helper()
	s := &sleepers{prefill: prefill, decode: decode, batched: 2048, seqs: 256}
	var known bool
	var err error
	if s.profile, known, err = profile.Named("h100:llama-8b"); err != nil || !known {
		t.Fatal(known, err)
	}
	s.profile.Memory.BlockTokens, s.profile.Memory.Blocks = 16, 6000
	// In virtual time, neither gateways nor transfers take any.
	s.profile.Step.Overhead, s.profile.Gateway = profile.Overhead{}, profile.Gateway{Heartbeat: reports.Seconds()}
	s.profile.Transfer.Setup, s.profile.Transfer.BytesPerSecond = 0, 1e15
	l, err := sim.ParseLoad(fmt.Sprintf("rps=10,n=%d,in=lognormal(6.5,0.8),out=10-80,prefix=0.3,prefixes=16", requests))
	if err != nil {
		t.Fatal(err)
	}
	if s.trace, err = l.Trace(3); err != nil {
		t.Fatal(err)
	}
	s.prompts = Tokens(s.trace, sleepVocab)
	capacity, err := Capacity(s.trace, s.options())
	if err != nil {
		t.Fatal(err)
	}
	s.trace = Pace(s.trace, share*capacity)
	return s
}

// simulate runs the simulator with several seeds, which order simultaneous grants differently, and
// returns the outcomes of all.
func (s *sleepers) simulate(t *testing.T, seeds int) *load.Record {
	t.Helper()
	all := new(load.Record)
	for seed := range seeds {
		o := s.options()
		o.Seed = uint64(seed)
		r, err := fleet.Run(s.trace, o)
		if err != nil {
			t.Fatal(err)
		}
		all.Outcomes = append(all.Outcomes, simulate.Record(r).Outcomes...)
	}
	return all
}

// Without prefill nodes, every token comes at the time that is predicted. With them, goroutines answer
// simultaneous grants in an order that differs from run to run, and with it the wait of single
// prompts. So several runs count together, and the short form of two runs has wider bounds for TTFT.
func TestVirtualFleets(t *testing.T) {
	type form struct {
		prefill, decode, requests, plays, seeds int
		ttft                                    float64 // factor on the bounds
	}
	forms := []form{{0, 4, 300, 1, 1, 1}, {2, 2, 600, 2, 16, 4}}
	switch {
	case testing.Short():
		forms = forms[:1]
	case os.Getenv("TANDEM_SOAK") != "":
		forms = []form{{0, 4, 2000, 1, 1, 1}, {2, 2, 2000, 4, 8, 1}, {4, 4, 2000, 4, 8, 1}}
	}
	goals := Goals{TTFT: 150 * time.Millisecond, TPOT: 20 * time.Millisecond}
	var table strings.Builder
	for _, f := range forms {
		for _, share := range []float64{.3, .6, .85} {
			name := fmt.Sprintf("%dP%dD at %.2f", f.prefill, f.decode, share)
			s := newSleepers(t, f.prefill, f.decode, f.requests, share)
			measured := new(load.Record)
			for range f.plays {
				measured.Outcomes = append(measured.Outcomes, s.play(t).Outcomes...)
			}
			for i := range measured.Outcomes {
				if err := measured.Outcomes[i].Err; err != nil {
					t.Fatalf("%s: request %d: %v", name, i, err)
				}
			}
			factor, figures := f.ttft, Compare(Summarize(s.simulate(t, f.seeds), goals), Summarize(measured, goals), Bounds{P50: .03, P90: .03, P99: .08, Goodput: .03})
			if err := WriteRows(&table, name, figures); err != nil {
				t.Fatal(err)
			}
			for i := range figures {
				f := &figures[i]
				if strings.HasPrefix(f.Name, "TTFT") {
					f.Bound *= factor
				}
				if !f.Within() {
					t.Errorf("%s: %s: predicted %.3f, measured %.3f: error %+.1f %%, at most %.0f", name, f.Name, f.Predicted, f.Measured, 100*f.Error(), 100*f.Bound)
				}
			}
		}
	}
	t.Log("\n" + TableHead + table.String())
}
