package roles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/lengths"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// nodeCommand has the flags of a prefill or decode node.
type nodeCommand struct {
	scrapers int // most connections of --http-port
	*config.Set
	role string
	m    cli.Model
	n    nodeFlags
	c    clusterFlags
	p    processFlags
}

// ports are the roles' ports on separate machines.
var ports = map[string][4]int{ // gossip, rpc, kv, http
	"prefill": {7946, 7101, 7201, 7301},
	"decode":  {7946, 7102, 7202, 7302},
}

func newNodeCommand(role string, out io.Writer) *nodeCommand {
	f := &nodeCommand{Set: table().Find(role).Flags(out), role: role}
	f.First("tls-dir", "join", "host", "model", "max-model-len", "device")
	f.m.Register(f.Set)
	f.n.register(f.Set, ports[role][1], ports[role][2], ports[role][3])
	f.c.register(f.Set, &f.p.Options, ports[role][0])
	f.p.register(f.Set)
	return f
}

// node is a process with a model, its engine and its metrics.
type node struct {
	*engine.Loaded
	*process.Process
	eng    *engine.Engine
	meters NodeMetrics
	id     string // in the cluster
	role   string
	dialed rpc.Counters // of the connections that this node dials
	tr     *trace.Tracer
}

// hooks are a role's callbacks on the step goroutine.
type hooks struct {
	step   func()
	blocks func(events []kvcache.Event, gap bool)
	kvFile engine.KVFile // memory of KV blocks; nil: the device's own
}

// startEngine loads the model and starts its loop.
func startEngine(d *process.Process, environ []string, m *cli.Model, p *processFlags, role string, roles metrics.Role, on hooks) (*node, error) {
	o, err := m.Options(d.Ctx, environ, d.Log)
	if err != nil {
		return nil, err
	}
	progress := o.Progress
	o.Progress = func(done, total int64) {
		progress(done, total)
		d.Loading(fmt.Sprintf("loading weights: %s of %s", memory.Bytes(done), memory.Bytes(total)))
	}
	o.KVFile = on.kvFile
	o.SharedKV = role != "serve"
	if role == "prefill" { // which gives no tokens
		o.Speculation = engine.Speculation{}
	}
	l, err := engine.Load(o)
	if err != nil {
		return nil, err
	}
	d.OnEnd(func() { d.Report("model", l.Close()) })
	if name := m.Names()[0]; name != "" {
		l.Bundle.ModelName = name
	}
	n := &node{Loaded: l, Process: d, id: cluster.NewID(d.Name, time.Now()), role: role}
	if n.tr, err = tracer(d, environ, p, role); err != nil {
		return nil, err
	}
	n.meters.Set = metrics.New(roles, l.Bundle.ModelName)
	traceMetrics(n.meters.Set, n.tr)
	priceMetric(n.meters.Set, p.price)
	clusterExpiry(d, n.meters.Set)
	eo := l.Options()
	if role == "prefill" {
		eo.StepTime, eo.Vocabulary = lengths.StepTime, nil
	}
	eo.Logger, eo.OnStep, eo.OnBlocks, eo.Watch = d.Log, on.step, on.blocks, WatchEngine(n.meters.Set)
	if changeEngine != nil {
		changeEngine(&eo)
	}
	n.eng, err = engine.New(eo)
	if err != nil {
		return nil, err
	}
	d.Work(n.eng.Run)
	n.meters.Stats = n.eng.Stats
	n.meters.Engine(l, version, role)
	d.Log.Info("model loaded", "model", l.Bundle.ModelName, "weights", memory.Bytes(l.WeightBytes), "quantization", l.Quantization.String(),
		"seconds", fmt.Sprintf("%.2f", l.LoadTime.Seconds()), "class", l.Class)
	d.Log.Info("KV cache", "tokens", l.Plan.Tokens, "blocks", l.KV.Blocks, "block_bytes", l.KV.BlockBytes(), "memory", memory.Bytes(l.Plan.Bytes),
		"max_model_len", l.Scheduler.MaxModelLen, "concurrency", fmt.Sprintf("%.2fx", l.Plan.Concurrency))
	process.LimitMemory(d.Log, environ, l.WeightBytes+l.Plan.Bytes)
	for _, line := range l.Plan.Lines {
		d.Log.Debug("KV memory", "derivation", line)
	}
	if !p.quietStats {
		d.Work(func(ctx context.Context) { logs.Rates(ctx, d.Log, logs.RatesInterval, n.meters.Counts) })
	}
	return n, nil
}

func (n *node) hello() *nodepb.Hello {
	return &nodepb.Hello{
		NodeId: n.id, Role: n.role, Build: version, Model: n.Bundle.ModelName,
		Fingerprint: n.Fingerprint, NumericsClass: n.Class, Grammar: n.grammars(), Vectors: n.vectors(),
	}
}

// vectors returns the version of the vectors that the node computes; 0: it computes none.
func (n *node) vectors() uint32 {
	if n.eng.VectorSize() == 0 {
		return 0
	}
	return rpc.VectorVersion
}

// grammars returns the version of the grammars that the node constrains outputs by; 0: it does not.
func (n *node) grammars() uint32 {
	if n.role == "prefill" || !n.eng.Constrains() {
		return 0
	}
	return engine.GrammarVersion
}

func (n *node) layout() kvtransfer.Layout {
	return kvtransfer.Layout{Regions: n.Regions(), PageBytes: n.KV.PageBytes, Hash: n.LayoutHash()}
}

// gpu returns the GPU's KV memory for RDMA; nil if there is none.
func (n *node) gpu() kvtransfer.DeviceMemory {
	if d := n.Direct(); d != nil {
		return d
	}
	return nil
}

// drainer is a role that can drain.
type drainer interface {
	Draining() bool
	Drain(ctx context.Context)
}

// serve runs a node's listeners until the first signal and drains it: it is not ready at once,
// accepts work for a moment longer, and then finishes running work.
func (n *node) serve(f *nodeCommand, h rpc.Handler, role drainer, bus *cluster.Bus) error {
	rl, err := process.Listen(f.n.host, f.n.rpcPort, "rpc-port")
	if err != nil {
		return err
	}
	hl, err := process.Listen(f.n.host, f.n.httpPort, "http-port")
	if err != nil {
		return errors.Join(err, rl.Close())
	}
	failed, counters := make(chan error, 2), new(rpc.Counters)
	RPCMetrics(n.meters.Set, counters, &n.dialed)
	watched := &gatewayWatch{Handler: h}
	n.Work(func(ctx context.Context) {
		failed <- rpc.Serve(ctx, rl, rpc.Options{Hello: n.hello(), TLS: n.Certs.Server(), Log: n.Log, Counters: counters}, watched)
	})
	host := cmp.Or(f.c.advertise, f.n.host) // at which others reach this process
	self := cluster.Member{
		ID: n.id, Role: n.role, Build: version, RPC: process.At(host, rl.Addr()), HTTP: process.At(host, hl.Addr()), Model: n.Bundle.ModelName,
		Fingerprint: n.Fingerprint, Class: n.Class, Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true,
	}
	cl, err := joinCluster(n.Process, &f.c, f.n.host, host, self, func(ms []cluster.Member) {
		if bus != nil && f.c.natsURL == "" {
			bus.SetServers(addresses(ms, func(m cluster.Member) string { return m.NATS }))
		}
	})
	if err != nil {
		return errors.Join(err, hl.Close())
	}
	watched.cluster.Store(cl)
	var draining atomic.Bool
	ready, alive := func() error {
		switch {
		case draining.Load() || role.Draining():
			return errors.New("draining")
		case !cl.Joined():
			return errors.New("not joined to the cluster yet")
		}
		return nil
	}, n.responsive()
	n.Work(func(ctx context.Context) {
		failed <- metrics.ServeNode(ctx, hl, metrics.NodeOptions{Set: n.meters.Set, Version: version, Level: n.Level, Log: n.Log, MaxConns: f.scrapers, Ready: ready, Live: alive})
	})
	n.Watch(ready, alive)
	n.Log.Info(n.role+" node listens", "node", n.Name, "rpc", self.RPC, "metrics", self.HTTP, "gossip", cl.Addr(), "version", version)
	if len(f.c.join) == 0 {
		n.Log.Info("--join is not set: the node waits until another member joins it", "gossip", cl.Addr())
	}
	select {
	case err := <-failed:
		return fmt.Errorf("a listener ended: %w", err)
	case <-n.eng.Done():
		return n.eng.Err()
	case <-n.Ctx.Done():
	}
	draining.Store(true)
	self.Ready, self.Draining = false, true
	n.Report("gossip", cl.Update(self))
	n.Log.Info("draining", "timeout", f.p.shutdownTimeout)
	ctx, cancel := context.WithTimeout(context.Background(), f.p.shutdownTimeout)
	defer cancel()
	// Gateways that have not received the update may still send requests.
	for until := time.Now().Add(drainDelay); ctx.Err() == nil && counters.Conns.Load() > 0 && time.Now().Before(until); {
		time.Sleep(drainPoll)
	}
	role.Drain(ctx)
	return nil
}

// gatewayWatch asks gossip to probe a gateway whose connection closed. A gateway that restarts
// at once knows no members, and gossip has not noticed yet.
type gatewayWatch struct {
	rpc.Handler
	cluster atomic.Pointer[cluster.Cluster] // nil: not joined yet
}

// Closed implements rpc.Handler.
func (w *gatewayWatch) Closed(c *rpc.Conn, err error) {
	w.Handler.Closed(c, err)
	if cl := w.cluster.Load(); cl != nil && c.Peer().GetRole() == "gateway" {
		cl.Lost(c.Peer().GetNodeId())
	}
}

// drainDelay is how long a draining node accepts work while peers are connected; drainPoll is
// how often it checks.
const (
	drainDelay = 3 * time.Second
	drainPoll  = 20 * time.Millisecond
)

// open parses the flags and starts the process, which the caller ends.
func (f *nodeCommand) open(v *cli.Invocation) (*process.Process, kvtransfer.Transport, error) {
	v.Set = f.Set
	var t kvtransfer.Transport
	v.Check(func() (err error) {
		t, err = kvTransport(&f.n)
		return errors.Join(f.p.check(), f.p.checkCluster(f.role), f.c.check(), err)
	})
	f.m.CheckIn(v, checkModel)
	if _, err := v.Parse(0); err != nil {
		return nil, "", err
	}
	d, err := begin(v, &f.p, f.role)
	if err != nil {
		return nil, "", err
	}
	if err = f.portsFree(); err == nil {
		var limit int
		if limit, err = process.DescriptorLimit(); err == nil {
			f.scrapers, err = process.NodeDescriptors.Clients(limit)
		}
	}
	if err != nil {
		d.End()
		return nil, "", err
	}
	return d, t, nil
}

func runPrefill(v *cli.Invocation) error {
	f := newNodeCommand("prefill", v.Out)
	d, transport, err := f.open(v)
	if err != nil {
		return err
	}
	defer d.End()
	shared, err := kvFile(d, transport)
	if err != nil {
		return err
	}
	var blocks blockPublisher
	on := hooks{blocks: blocks.publish}
	if shared != nil {
		on.kvFile = shared
	}
	n, err := startEngine(d, v.Environ, &f.m, &f.p, "prefill", metrics.Prefill, on)
	if err != nil {
		return err
	}
	bus := newBus(d, &f.c, nil)
	if err := blocks.start(n, bus); err != nil {
		return err
	}
	device, transport, gpu := kvFabric(d, &f.n, transport, n.gpu())
	wo := f.n.writer
	wo.Node, wo.Layout, wo.Memory, wo.Shared, wo.Transport, wo.Fabric, wo.Device = d.Name, n.layout(), n.Loaded, shared, transport, device, gpu
	if f.n.tls {
		wo.TLS = d.Certs.Client()
	}
	w, err := kvtransfer.NewWriter(wo)
	if err != nil {
		return err
	}
	d.OnEnd(func() { d.Report("kvtransfer", w.Close()) })
	p := prefill.New(prefill.Options{
		Engine: n.eng, Writer: w, Logger: d.Log, Tracer: n.tr,
		RunAheadTokens: 2 * n.Scheduler.MaxBatchedTokens, MaxQueued: f.m.MaxQueued, MaxRunning: n.Scheduler.MaxSeqs,
		Identity:    prefill.Identity{Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Layout: n.LayoutHash(), KV: n.KVText()},
		Transferred: KVSent(n.meters.Set),
	})
	n.meters.Prefill(p.Counters, p.Queued, p.QueuedTokens, p.Limit(), w.Stats)
	d.Work(p.Positions)
	d.Work(p.Heartbeats)
	return n.serve(f, p, p, bus)
}

func runDecode(v *cli.Invocation) error {
	f := newNodeCommand("decode", v.Out)
	d, transport, err := f.open(v)
	if err != nil {
		return err
	}
	defer d.End()
	var role *decode.Node
	var blocks blockPublisher
	n, err := startEngine(d, v.Environ, &f.m, &f.p, "decode", metrics.Decode, hooks{
		step: func() {
			if role != nil { // nil when the start failed in between
				role.Flush()
			}
		},
		blocks: blocks.publish,
	})
	if err != nil {
		return err
	}
	bus := newBus(d, &f.c, nil)
	if err := blocks.start(n, bus); err != nil {
		return err
	}
	observe := KVReceived(n.meters.Set)
	device, transport, gpu := kvFabric(d, &f.n, transport, n.gpu())
	ro := kvtransfer.ReaderOptions{
		Node: d.Name, Transport: transport, Fabric: device, Device: gpu, Layout: n.layout(), Memory: n.Loaded, Listen: net.JoinHostPort(f.n.host, strconv.Itoa(f.n.kvPort)),
		OnEvent: func(ev kvtransfer.Event) {
			observe(ev)
			role.TransferEvent(ev)
		},
	}
	if f.n.tls {
		ro.TLS = d.Certs.Server()
	}
	r, err := kvtransfer.NewReader(ro)
	if err != nil {
		return err
	}
	d.OnEnd(func() { d.Report("kvtransfer", r.Close()) })
	n.meters.Reader(r.Stats)
	role = n.decodeRole(r, func(h rpc.Handler) decode.Dialer {
		p := rpc.NewPool(rpc.Options{Hello: n.hello(), TLS: d.Certs.Client(), Log: d.Log, Counters: &n.dialed}, h)
		d.OnEnd(p.Close)
		return p
	})
	d.Work(role.Heartbeats)
	return n.serve(f, role, role, bus)
}

// decodeRole returns the decode role of a node. With a nil reader, it prefills all prompts
// itself.
func (n *node) decodeRole(r decode.Reader, dial func(rpc.Handler) decode.Dialer) *decode.Node {
	role := decode.New(decode.Options{
		Engine: n.eng, Reader: r, Dial: dial, Logger: n.Log, Tracer: n.tr,
		MaxModelLen: n.Scheduler.MaxModelLen, BlockTokens: n.Scheduler.Pool.BlockTokens, MaxRunning: n.Scheduler.MaxSeqs,
		Identity: decode.Identity{Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Layout: n.LayoutHash(), KV: n.KVText()},
		Bundle:   n.bundle(),
	})
	n.meters.Decode(role.Counters, role.Owned, role.PrefillBreakers)
	return role
}

// bundle returns the Bundle of the node's model.
func (n *node) bundle() *nodepb.Bundle {
	b := n.Bundle
	var groups []*nodepb.CacheGroup
	for _, g := range n.eng.Groups() {
		groups = append(groups, &nodepb.CacheGroup{BlockTokens: uint32(g.BlockTokens), Window: uint32(g.Window), Every: uint32(g.Every)})
	}
	return &nodepb.Bundle{
		Groups: groups, Vectors: n.vectorsOf(),
		Model: b.ModelName, Fingerprint: n.Fingerprint, NumericsClass: n.Class, TokenizerJson: b.TokenizerJSON,
		ChatTemplate: b.ChatTemplate, BosToken: b.BosToken, EosToken: b.EosToken, EosTokenIds: b.EOSTokenIDs,
		MaxModelLen: uint32(b.MaxModelLen), VocabSize: uint32(b.VocabSize), BlockTokens: uint32(n.Scheduler.Pool.BlockTokens), StepTokens: uint32(n.Scheduler.MaxBatchedTokens),
		Defaults: &nodepb.GenerationDefaults{Temperature: b.Defaults.Temperature, TopP: b.Defaults.TopP, TopK: b.Defaults.TopK},
	}
}

// vectorsOf returns how the node's model makes a text a vector; nil: the node computes none.
func (n *node) vectorsOf() *nodepb.Vectors {
	if n.vectors() == 0 {
		return nil
	}
	v := &n.Bundle.Vectors
	m := &nodepb.Vectors{Size: uint32(v.Size), Kind: nodepb.PoolingKind_POOLING_KIND_LAST, Raw: v.Raw, Only: v.Only, Whole: v.Whole, Refused: v.Refused,
		Labels: uint32(v.Labels), ScoreTokens: v.ScoreTokens, Prompts: v.Prompts}
	if v.Mean {
		m.Kind = nodepb.PoolingKind_POOLING_KIND_MEAN
	}
	for _, d := range v.Dimensions {
		m.Dimensions = append(m.Dimensions, uint32(d))
	}
	return m
}

// runServe runs a gateway and a decode node in one process, connected in memory. The engine
// prefills as well, so that no KV is transferred.
func runServe(v *cli.Invocation) error {
	f := serveFlags(v.Set)
	m, g, p := &f.m, &f.g, &f.p
	v.Check(func() error { return errors.Join(g.check(), p.check()) })
	m.CheckIn(v, checkModel)
	if _, err := v.Parse(1); err != nil {
		return err
	}
	d, err := begin(v, p, "serve")
	if err != nil {
		return err
	}
	defer d.End()
	if err := g.portsFree(); err != nil {
		return err
	}
	s, err := f.start(v, d, rpc.NewNetwork())
	if err != nil {
		return err
	}
	followClients(d, s.n.meters.Set, g.cert)
	again := f // the flags of the last reload
	followConfig(d, s.n.meters.Set, v.Set, func() (*config.Set, error) {
		again = serveFlags(table().Find("serve").Flags(io.Discard))
		return again.Set, again.Resolve(v.Arguments, v.Environ)
	}, func() error {
		return s.gw.SetLimits(again.g.options(&again.p, d).Limits)
	})
	d.Log.Info("serving", "addr", s.gw.Addr(), "model", s.n.Bundle.ModelName, "version", version)
	return s.n.whileStepping(d.Ctx, s.gw.Run, s.leave)
}

// served is a gateway and a decode node in this process.
type served struct {
	n     *node
	gw    *gateway.Gateway // not running
	leave func()           // drains the node, whose engine has ended
}

// start loads the model and starts a decode node, which the gateway reaches by the network in
// memory.
func (f *serveCommand) start(v *cli.Invocation, d *process.Process, inside *rpc.Network) (*served, error) {
	m, g, p := &f.m, &f.g, &f.p
	var role *decode.Node
	n, err := startEngine(d, v.Environ, m, p, "serve", metrics.Decode|metrics.Gateway, hooks{step: func() { role.Flush() }})
	if err != nil {
		return nil, err
	}
	role = n.decodeRole(nil, nil)
	d.Work(role.Heartbeats)
	l, err := inside.Listen("engine")
	if err != nil {
		return nil, err
	}
	d.Work(func(ctx context.Context) {
		d.Report("rpc", rpc.Serve(ctx, l, rpc.Options{Hello: n.hello(), Log: d.Log}, role))
	})
	o := g.options(p, d)
	if names := m.Names(); len(names) > 1 {
		o.ServedModelName, o.Upstreams.Names, _ = servedNames(m.ServedName)
	}
	if o.MaxConns, err = d.Connections(process.AloneDescriptors, o.MaxConns, asked(v.Set, "max-connections")); err != nil {
		return nil, err
	}
	if v.Lookup("chat-template").Value.String() != "" {
		o.ChatTemplate = n.Bundle.ChatTemplate // New refuses a bad one at once
	}
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: d.Name + "-gateway", Role: "gateway", Build: version}, Dial: inside.Dial, Log: d.Log, Counters: &n.dialed}
	RPCMetrics(n.meters.Set, &n.dialed)
	o.Members = []nodes.Member{{ID: d.Name, Role: "serve", Build: version, RPC: "engine", Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Ready: true}}
	o.Metrics, o.Tracer = n.meters.Set, n.tr
	if o.AdminListener, err = adminListener(g); err != nil {
		return nil, err
	}
	gw, err := gateway.New(o)
	if err != nil {
		return nil, err
	}
	d.Watch(gw.Ready, n.responsive())
	return &served{n, gw, func() {
		ctx, cancel := context.WithTimeout(d.Ctx, drainDelay)
		defer cancel()
		role.Drain(ctx)
		alone := g.options(p, d).Limits
		alone.ResumeTimeout = -1 // there is no other node to wait for
		d.Report("limits", gw.SetLimits(alone))
	}}, nil
}
