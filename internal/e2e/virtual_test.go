package e2e

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// A whole cluster in virtual time: HTTP clients of every manner, a gateway, two
// decode nodes and two prefill nodes, all of it what ships but for the networks,
// while nodes are killed, restarted, drained, cut off and slowed. Then
//
//   - every request has ended: with the answer that it gets when nothing happens,
//     text, log-probabilities, finish and usage, or with an error that says what
//     is wrong, and where its stream had begun visibly cut, after a prefix of it;
//   - in gentle weather, which hurts one node at a time, no request has failed
//     that had not begun, and none at all where streams survive;
//   - nothing is left of any of them, and the accounts of all parts hold.

// streamsSurvive says that a started answer outlives its decode node, as long as
// one of each role lives.
const streamsSurvive = true

const slowClientTimeout = 2 * time.Second

// virtual is one seed's cluster.
type virtual struct {
	*storm
	rng       *rand.Rand
	inquiries []*inquiry
	gentle    bool                    // one node at a time
	timeout   time.Duration           // of a request
	behave    func(*rand.Rand) manner // of the next client

	key      string            // for its own pages; empty: none
	door     *rpc.Network      // between clients and gateway
	edges    map[string]*wires // from the gateway to each decode node
	g        *gateway.Gateway
	meters   *metrics.Set
	gossip   *gossip // nil: the gateway is told who is there
	log      output  // the gateway's
	stop     context.CancelFunc
	done     chan error
	requests atomic.Int64
	closing  atomic.Bool // the gateway has been told to stop

	mu   sync.Mutex
	down map[string]bool // nodes that do not run
}

// byteBundle is a made-up text model for the checkpoint: ids below 256 are
// bytes, the others pairs of letters.
func byteBundle(d *engine.Loaded) *nodepb.Bundle {
	const letters = "abcdefghijklmnop"
	var pairs [][2]string
	for i := range 256 {
		pairs = append(pairs, [2]string{letters[i/16 : i/16+1], letters[i%16 : i%16+1]})
	}
	return &nodepb.Bundle{
		Model: "tiny", Fingerprint: d.Fingerprint, NumericsClass: d.Class, TokenizerJson: nodestest.Tokenizer(pairs),
		ChatTemplate: "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] ",
		EosTokenIds:  []int32{7, 100, 200, 300, 400}, MaxModelLen: 13 * 16, VocabSize: 512, BlockTokens: 16,
	}
}

// newVirtual starts the nodes and their gateway.
func newVirtual(t *testing.T, seed uint64, ds []*engine.Loaded, qs []*inquiry, count *counts, change func(*virtual, *gateway.Options)) *virtual {
	rng := rand.New(rand.NewPCG(seed, 29))
	v := &virtual{
		storm: &storm{
			t: t, seed: seed, count: count, net: rpc.NewNetwork(), kv: &kvWires{Mem: kvtransfer.NewMem(), seed: seed},
			probes: &probes{by: map[uint64]map[int]uint64{}}, bundle: byteBundle(ds[0]),
		},
		rng: rng, inquiries: qs, timeout: 2 * time.Minute, behave: anyManner, door: rpc.NewNetwork(), edges: map[string]*wires{},
		meters: metrics.New(metrics.Gateway, ""), done: make(chan error, 1), down: map[string]bool{},
	}
	v.heard = v.hear
	v.door.Buffer = 2 << 10
	l, err := v.door.Listen("gateway")
	v.must(err)
	remote := rng.IntN(40)
	if remote == 0 {
		remote = -1 // always
	}
	o := gateway.Options{
		Listener: l, Metrics: v.meters, DrainDelay: -1, MinRemotePrefillTokens: remote, StreamTokens: 4 + rng.IntN(1+rng.IntN(40)),
		Limits: gateway.Limits{SlowClientTimeout: slowClientTimeout, NodeBacklog: 1 + rng.IntN(3)},
		RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: func(ctx context.Context, addr string) (net.Conn, error) {
			return v.edges[addr].keep(v.net.Dial(ctx, addr))
		}},
		Log: slog.New(slog.NewMultiHandler(faults{slog.DiscardHandler, v.storm, "gateway"}, slog.NewTextHandler(&v.log, nil))),
	}
	change(v, &o)
	if v.gossip != nil {
		v.heard = v.gossip.hear
	}
	o.Limits.RequestTimeout = v.timeout
	for i, d := range ds {
		n := &node{c: v.storm, addr: []string{"d0", "d1", "p0", "p1", "d2"}[i], device: d}
		v.edges[n.addr] = new(wires)
		n.start(rng)
		v.nodes = append(v.nodes, n)
	}
	v.g, err = gateway.New(o)
	v.must(err)
	if v.gossip != nil {
		v.gossip.join("gw", "gateway", v.gossip.told)
	} else {
		v.g.SetMembers(v.members())
	}
	var ctx context.Context
	ctx, v.stop = context.WithCancel(context.Background())
	go func() { v.done <- v.g.Run(ctx) }()
	v.recovered("at the start")
	return v
}

// members is who runs, as gossip would tell.
func (v *virtual) members() []nodes.Member {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []nodes.Member
	for _, n := range v.nodes {
		if !v.down[n.addr] {
			out = append(out, nodes.Member{ID: n.addr, Role: roleOf(n.addr), RPC: n.addr, Model: "tiny", Fingerprint: n.device.Fingerprint, Class: n.device.Class, Ready: true})
		}
	}
	return out
}

// hear brings the news of a node to the gateway, some time later.
func (v *virtual) hear(addr string, up bool) {
	if v.g == nil {
		return
	}
	v.mu.Lock()
	v.down[addr] = !up
	late := time.Duration(v.rng.IntN(2000)) * time.Millisecond
	v.mu.Unlock()
	time.AfterFunc(late, func() { v.g.SetMembers(v.members()) })
}

// recovered waits until the gateway can use both decode nodes.
func (v *virtual) recovered(when string) {
	synctest.Wait() // it has noticed what happened
	usable := v.meters.Gauge(metrics.GatewayUsableDecodeNodes)
	for began := time.Now(); usable.Get() < 2; time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 5*time.Second {
			v.errorf("%s: after 5 s the gateway uses %g decode nodes of 2", when, usable.Get())
			return
		}
	}
}

// get asks the gateway for one of its own pages.
func (v *virtual) get(path string) string { return v.ask("GET", path) }

// ask does that with a method.
func (v *virtual) ask(method, path string) string {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return v.door.Dial(ctx, "gateway")
	}}}
	req, err := http.NewRequest(method, "http://gateway"+path, nil)
	v.must(err)
	req.Header.Set("Authorization", "Bearer "+v.key)
	resp, err := c.Do(req)
	v.must(err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	v.must(err)
	if resp.StatusCode != http.StatusOK {
		v.errorf("%s %s: %d %s", method, path, resp.StatusCode, text)
	}
	return string(text)
}

// gentleFault hurts one node, or a connection, and waits until that is over.
func (v *virtual) gentleFault() {
	n := v.nodes[v.rng.IntN(len(v.nodes))]
	switch v.rng.IntN(6) {
	case 0:
		if v.edges[n.addr].cut(v.rng) {
			v.saw("edge cut")
		} else if v.rpc.cut(v.rng) { // decode nodes have another way to get a prompt computed
			v.saw("rpc connection cut")
		}
	case 1:
		if v.kv.cut(v.rng) {
			v.saw("kv connection cut")
		}
	case 2:
		v.check("between faults")
	case 3:
		v.silence(n, v.rng)
	case 4:
		v.restart(n, v.rng)
	case 5:
		v.roll(n, v.rng)
	}
	v.recovered("after a gentle fault")
}

// wildFault does not wait, and may hurt anything.
func (v *virtual) wildFault() {
	if addr := []string{"d0", "d1"}[v.rng.IntN(2)]; v.rng.IntN(4) == 0 && v.edges[addr].cut(v.rng) {
		v.saw("edge cut")
		return
	}
	v.fault(v.rng)
}

// outage has no decode node for a while.
func (v *virtual) outage() {
	for _, n := range v.nodes[:2] {
		n.kill()
	}
	time.Sleep(time.Duration(100+v.rng.IntN(400)) * time.Millisecond)
	for _, n := range v.nodes[:2] {
		n.start(v.rng)
	}
}

func (v *virtual) check(when string) {
	for _, n := range v.nodes {
		v.mu.Lock()
		down := v.down[n.addr]
		v.mu.Unlock()
		if !down {
			n.check(when)
		}
	}
	if err := v.g.Check(); err != nil {
		v.errorf("gateway %s: %v", when, err)
	}
	v.saw("checked")
}

// end stops the gateway, and the nodes when they are idle.
func (v *virtual) end(clients *sync.WaitGroup) {
	v.faulty.Store(false)
	if v.closing.Load() { // in the middle of everything
		v.stop()
		v.must(<-v.done)
		v.saw("gateway stopped while it served")
	}
	clients.Wait()
	time.Sleep(time.Minute) // leases, quarantines, idle connections
	v.check("after all")
	for _, n := range v.nodes {
		n.idle("after all")
		if n.decode != nil {
			k := n.decode.Counters()
			v.add("remote prefills", k.RemotePrefills)
			v.add("local prefills", k.LocalPrefills)
			v.add("prefill failures", k.PrefillFailures)
		}
		v.add("preemptions", n.eng.Stats().Scheduler.Preemptions)
	}
	if !v.closing.Load() {
		if load := v.get("/load"); load != `{"server_load":0}` {
			v.errorf("load is %s after all", load)
		}
		v.stop()
		v.must(<-v.done)
	}
	v.add("resumed", uint64(v.meters.Counter(metrics.GatewayResumes).Get()))
	v.add("pauses for slow clients", uint64(v.meters.Counter(metrics.GatewayStreamsPaused).Get()))
	for _, cause := range metrics.StreamAborts {
		v.add("aborts: "+cause, uint64(v.meters.Counter(metrics.GatewayStreamsAborted, cause).Get()))
	}
	for _, n := range v.nodes {
		n.kill()
	}
	if v.gossip != nil {
		v.gossip.close()
	}
	time.Sleep(time.Minute) // the HTTP server's own ticker, gossip's deadlines
}

// sampler leaves out the timer by which the NATS server's package samples the process's use of the
// CPU: it runs outside every bubble, once a second, as long as the process.
var sampler = goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/pse.periodic")

// rounds of clients and faults in a seed.
const rounds = 4

// virtualSeed runs one seed with some 60 requests. What is rare, or depends on the order in which
// goroutines run, has seeds in which it happens for certain.
func virtualSeed(t *testing.T, seed uint64, ds []*engine.Loaded, qs []*inquiry, count *counts) {
	before := goleak.IgnoreCurrent()
	v := newVirtual(t, seed, ds, qs, count, func(v *virtual, o *gateway.Options) {
		if v.gentle = seed%2 == 0; !v.gentle {
			if seed%6 == 1 {
				v.stepFaults = 0.01
			}
			if v.rng.IntN(3) == 0 {
				v.timeout = time.Duration(20+v.rng.IntN(400)) * time.Millisecond
			}
		}
		if v.gentle {
			o.Limits.MaxAttempts = rounds + 1 // nobody is hit more often
		}
		if seed%3 == 2 {
			v.gossip = newGossip(v)
			v.saw("gossip")
		}
		o.ShutdownTimeout = time.Duration(1+v.rng.IntN(300)) * time.Millisecond
		v.faulty.Store(seed%5 > 0)
		v.tight = seed%3 == 1
	})
	closing := seed%3 == 0 // the gateway stops in the middle of the last round
	var clients sync.WaitGroup
	byLength := slices.SortedFunc(slices.Values(qs), func(a, b *inquiry) int { return cmp.Compare(a.usage.Completion, b.usage.Completion) })
	if v.tight { // the gateway expects short answers, and the next are long: nodes preempt some
		v.single(byLength[0], patient)
		for _, q := range byLength[len(byLength)-8:] {
			clients.Go(func() { v.single(q, patient) })
		}
		clients.Wait()
	}
	if v.gentle {
		v.single(byLength[len(byLength)-1], stalls)
	}
	for round := range rounds {
		v.failNext.Store(v.stepFaults > 0)
		for range 8 {
			mine := rand.New(rand.NewPCG(v.rng.Uint64(), 31))
			clients.Go(func() { v.client(mine) })
		}
		for range 1 + v.rng.IntN(3) {
			time.Sleep(time.Duration(v.rng.IntN(25_000)) * time.Microsecond)
			if closing && round == rounds-1 {
				break
			}
			if v.gentle {
				v.gentleFault()
				break // it has waited
			}
			v.wildFault()
		}
		if !v.gentle && round == 1 && seed%8 == 3 {
			v.outage()
		}
	}
	v.closing.Store(closing)
	v.end(&clients)
	if err := goleak.Find(before, sampler); err != nil {
		v.errorf("%v", err)
	}
	if t.Failed() {
		t.Logf("the gateway's log:\n%s", &v.log)
	}
}

// calmAnswers learns what the inquiries' answers are when nothing happens.
func calmAnswers(t *testing.T, ds []*engine.Loaded, qs []*inquiry) {
	synctest.Test(t, func(t *testing.T) {
		v := newVirtual(t, 0, ds, qs, &counts{n: map[string]int{}}, func(_ *virtual, o *gateway.Options) { o.MinRemotePrefillTokens = 1000 })
		v.learn(t)
		v.end(new(sync.WaitGroup))
	})
}

func virtualDevices(t *testing.T) (ds []*engine.Loaded, kernels string) {
	kernels = native()
	return devices(t, filepath.Join(checkpoints, "gqa-tied"), kernels, 4, engine.Adapters{}), kernels
}

func TestVirtualCluster(t *testing.T) {
	ds, kernels := virtualDevices(t)
	seeds, count := 45, &counts{n: map[string]int{}}
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		seeds = 4500
	case testing.Short() || raceEnabled || kernels == cpu.Portable: // which are many times slower
		seeds = 15
	}
	qs := inquiries(96)
	calmAnswers(t, ds, qs)
	ran := 0
	for seed := uint64(1); seed <= uint64(seeds) && !t.Failed(); seed++ {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			ran++
			synctest.Test(t, func(t *testing.T) { virtualSeed(t, seed, ds, qs, count) })
		})
	}
	t.Logf("kernels %s, %d seeds: %v", kernels, ran, count.n)
	if t.Failed() || ran < seeds {
		return // -run has picked some
	}
	for what, least := range map[string]int{
		"requests": 50 * seeds, "whole answers": 10 * seeds, "whole streams": 20 * seeds, "resumed": seeds / 2, "slow clients served": seeds,
		"pauses for slow clients": seeds / 15, "left": seeds, "left while it was answered": seeds / 10, "frozen clients cut": seeds / 2,
		"refused with 400": seeds, "refused with 503": seeds / 5, "refused with 504": seeds / 15,
		"gateway gone": seeds / 10, "gateway stopped while it served": seeds / 15, "checked": seeds, "gossip": seeds / 6,
		"remote prefills": 15 * seeds, "local prefills": 8 * seeds, "prefill failures": 3 * seeds, "preemptions": seeds / 5, // rare: the gateway sends no more than KV memory is expected to hold
		"edge cut": seeds / 3, "rpc connection cut": seeds / 5, "kv connection cut": seeds / 6, "lease taken away": seeds / 3, "silence": seeds / 5,
		"decode node stopped": seeds / 10, "prefill node stopped": seeds / 10, "node drained": seeds / 5, "failed step": seeds / 5,
		"lost Grant": seeds / 3, "lost GrantRequest": seeds / 3,
	} {
		if got := count.n[what]; got < least {
			t.Errorf("%s: %d times, want %d: the campaign no longer covers this", what, got, least)
		}
	}
}
