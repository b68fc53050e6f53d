package roles

import (
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
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/command"
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

// nodeCommand is the flags of a prefill or decode node.
type nodeCommand struct {
	scrapers int // connections that --http-port may have
	*config.Set
	role string
	m    config.Model
	n    config.Node
	c    config.Cluster
	p    config.Process
}

// ports of the roles on machines of their own; the README has the table.
var ports = map[string][4]int{ // gossip, rpc, kv, http
	"prefill": {7946, 7101, 7201, 7301},
	"decode":  {7946, 7102, 7202, 7302},
}

func nodeFlags(role string, out io.Writer) *nodeCommand {
	f := &nodeCommand{Set: table().Find(role).Flags(out), role: role}
	f.m.Register(f.Set)
	f.n.Register(f.Set, ports[role][1], ports[role][2], ports[role][3])
	f.c.Register(f.Set, ports[role][0])
	f.p.Register(f.Set)
	return f
}

// node is a model on a device with its engine, and what the cluster knows of it.
type node struct {
	*engine.Loaded
	*process.Process
	eng    *engine.Engine
	meters NodeMetrics
	role   string
	asks   rpc.Counters // of the connections that this node dials
	tr     *trace.Tracer
}

// hooks are what a role hears from the step goroutine.
type hooks struct {
	step   func()
	blocks func(events []kvcache.Event, gap bool)
	kvFile engine.KVFile // where KV blocks lie; nil: the device's own memory
}

// startEngine loads the model and starts its loop.
func startEngine(d *process.Process, environ []string, m *config.Model, p *config.Process, role string, roles metrics.Role, on hooks) (*node, error) {
	o, err := command.LoadOptions(m, environ, d.Log)
	if err != nil {
		return nil, err
	}
	o.KVFile = on.kvFile
	o.SharedKV = role != "serve"
	if role == "prefill" { // which draws nothing that could be guessed
		o.Speculation = engine.Speculation{}
	}
	l, err := engine.Load(o)
	if err != nil {
		return nil, err
	}
	d.OnEnd(func() { d.Report("model", l.Close()) })
	if m.ServedName != "" {
		l.Bundle.ModelName = m.ServedName
	}
	n := &node{Loaded: l, Process: d, role: role}
	if n.tr, err = tracer(d, environ, p, role); err != nil {
		return nil, err
	}
	n.meters.Set = metrics.New(roles, l.Bundle.ModelName)
	traceMetrics(n.meters.Set, n.tr)
	eo := l.Options()
	if role == "prefill" {
		eo.StepTime = lengths.StepTime
	}
	eo.Logger, eo.OnStep, eo.OnBlocks, eo.Watch = d.Log, on.step, on.blocks, WatchEngine(n.meters.Set)
	n.eng, err = engine.New(eo)
	if err != nil {
		return nil, err
	}
	if err := gateway.CheckBundle(n.bundle()); err != nil {
		return nil, fmt.Errorf("%w %s: %w", engine.ErrModel, m.Path, err)
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
		d.Log.Info("KV memory", "derivation", line)
	}
	if !p.DisableLogStats {
		d.Work(func(ctx context.Context) { logs.Rates(ctx, d.Log, logs.RatesInterval, n.meters.Counts) })
	}
	return n, nil
}

func (n *node) hello() *nodepb.Hello {
	return &nodepb.Hello{
		NodeId: n.Name, Role: n.role, Build: version, Model: n.Bundle.ModelName,
		Fingerprint: n.Fingerprint, NumericsClass: n.Class,
	}
}

func (n *node) layout() kvtransfer.Layout {
	return kvtransfer.Layout{Regions: n.Regions(), PageBytes: n.KV.PageBytes, Hash: n.LayoutHash()}
}

// gpu is the GPU's own KV memory where the network could reach it; nil: there is none such.
func (n *node) gpu() kvtransfer.DeviceMemory {
	if d := n.Direct(); d != nil {
		return d
	}
	return nil
}

// drainer is a role that can be asked to finish.
type drainer interface {
	Draining() bool
	Drain(ctx context.Context)
}

// serve runs a node's listeners until the first signal and drains it: unready
// at once, accepting for a moment longer, then finishing what runs.
func (n *node) serve(f *nodeCommand, h rpc.Handler, role drainer, bus *cluster.Bus) error {
	rl, err := process.Listen(f.n.Host, f.n.RPCPort, "rpc-port")
	if err != nil {
		return err
	}
	hl, err := process.Listen(f.n.Host, f.n.HTTPPort, "http-port")
	if err != nil {
		return errors.Join(err, rl.Close())
	}
	failed, counters := make(chan error, 2), new(rpc.Counters)
	RPCMetrics(n.meters.Set, counters, &n.asks)
	watched := &gatewayWatch{Handler: h}
	n.Work(func(ctx context.Context) {
		failed <- rpc.Serve(ctx, rl, rpc.Options{Hello: n.hello(), TLS: n.Certs.Server(), Log: n.Log, Counters: counters}, watched)
	})
	host := advertised(&f.c, f.n.Host)
	self := cluster.Member{
		ID: n.Name, Role: n.role, Build: version, RPC: process.At(host, rl.Addr()), HTTP: process.At(host, hl.Addr()), Model: n.Bundle.ModelName,
		Fingerprint: n.Fingerprint, Class: n.Class, Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true,
	}
	cl, err := joinCluster(n.Process, &f.c, f.n.Host, host, self, func(ms []cluster.Member) {
		if bus != nil && f.c.NATSURL == "" {
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
	n.Log.Info("draining", "timeout", time.Duration(f.p.ShutdownTimeout))
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(f.p.ShutdownTimeout))
	defer cancel()
	// Those that have not heard yet may still send something.
	for until := time.Now().Add(drainDelay); ctx.Err() == nil && counters.Conns.Load() > 0 && time.Now().Before(until); {
		time.Sleep(drainPoll)
	}
	role.Drain(ctx)
	return nil
}

// gatewayWatch has gossip look after gateways whose connections end: one that is
// started again at once knows nobody, and is not missed by gossip yet.
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

// drainDelay is how long a node that leaves keeps accepting, while anybody is
// connected who could send something; drainPoll is how often it looks.
const (
	drainDelay = 3 * time.Second
	drainPoll  = 20 * time.Millisecond
)

// open reads the flags and starts the process, which the caller ends.
func (f *nodeCommand) open(v *command.Invocation) (*process.Process, kvtransfer.Transport, error) {
	v.Set = f.Set
	if _, err := v.Parse(0); err != nil {
		return nil, "", err
	}
	d, err := begin(v, &f.p, &f.c, f.role)
	if err != nil {
		return nil, "", err
	}
	t, err := kvTransport(&f.n)
	if err == nil {
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

func runPrefill(v *command.Invocation) error {
	f := nodeFlags("prefill", v.Out)
	d, transport, err := f.open(v)
	if err != nil {
		return err
	}
	defer d.End()
	shared, err := kvFile(d, transport)
	if err != nil {
		return err
	}
	var news blockNews
	on := hooks{blocks: news.tell}
	if shared != nil {
		on.kvFile = shared
	}
	n, err := startEngine(d, v.Environ, &f.m, &f.p, "prefill", metrics.Prefill, on)
	if err != nil {
		return err
	}
	bus := newBus(d, &f.c, nil)
	if err := news.begin(n, bus); err != nil {
		return err
	}
	device, transport, gpu := kvFabric(d, &f.n, transport, n.gpu())
	wo := kvtransfer.WriterOptions{Node: d.Name, Layout: n.layout(), Memory: n.Loaded, Shared: shared, Transport: transport, Fabric: device, Device: gpu,
		Connections: f.n.KVConnections, CongestionControl: f.n.KVCongestion}
	if f.n.KVTLS {
		wo.TLS = d.Certs.Client()
	}
	w, err := kvtransfer.NewWriter(wo)
	if err != nil {
		return err
	}
	d.OnEnd(func() { d.Report("kvtransfer", w.Close()) })
	p := prefill.New(prefill.Options{
		Engine: n.eng, Writer: w, Logger: d.Log, Tracer: n.tr,
		RunAheadTokens: 2 * n.Scheduler.MaxBatchedTokens, MaxQueued: f.m.MaxQueued,
		Identity:    prefill.Identity{Fingerprint: n.Fingerprint, Class: n.Class, Layout: n.LayoutHash(), KV: n.KVText()},
		Transferred: KVSent(n.meters.Set),
	})
	n.meters.Prefill(p.Counters, p.Queued, p.Limit(), w.Stats)
	d.Work(p.Positions)
	d.Work(p.Heartbeats)
	return n.serve(f, p, p, bus)
}

func runDecode(v *command.Invocation) error {
	f := nodeFlags("decode", v.Out)
	d, transport, err := f.open(v)
	if err != nil {
		return err
	}
	defer d.End()
	var role *decode.Node
	var news blockNews
	n, err := startEngine(d, v.Environ, &f.m, &f.p, "decode", metrics.Decode, hooks{
		step: func() {
			if role != nil { // nil when the start failed in between
				role.Flush()
			}
		},
		blocks: news.tell,
	})
	if err != nil {
		return err
	}
	bus := newBus(d, &f.c, nil)
	if err := news.begin(n, bus); err != nil {
		return err
	}
	observe := KVReceived(n.meters.Set)
	device, transport, gpu := kvFabric(d, &f.n, transport, n.gpu())
	ro := kvtransfer.ReaderOptions{
		Node: d.Name, Transport: transport, Fabric: device, Device: gpu, Layout: n.layout(), Memory: n.Loaded, Listen: net.JoinHostPort(f.n.Host, strconv.Itoa(f.n.KVPort)),
		OnEvent: func(ev kvtransfer.Event) {
			observe(ev)
			role.TransferEvent(ev)
		},
	}
	if f.n.KVTLS {
		ro.TLS = d.Certs.Server()
	}
	r, err := kvtransfer.NewReader(ro)
	if err != nil {
		return err
	}
	d.OnEnd(func() { d.Report("kvtransfer", r.Close()) })
	n.meters.Reader(r.Stats)
	role = n.decodeRole(r, func(h rpc.Handler) decode.Dialer {
		p := rpc.NewPool(rpc.Options{Hello: n.hello(), TLS: d.Certs.Client(), Log: d.Log, Counters: &n.asks}, h)
		d.OnEnd(p.Close)
		return p
	})
	d.Work(role.Heartbeats)
	return n.serve(f, role, role, bus)
}

// decodeRole makes the decode side of a node; a nil reader means that it
// prefills by itself.
func (n *node) decodeRole(r decode.Reader, dial func(rpc.Handler) decode.Dialer) *decode.Node {
	role := decode.New(decode.Options{
		Engine: n.eng, Reader: r, Dial: dial, Logger: n.Log, Tracer: n.tr,
		MaxModelLen: n.Scheduler.MaxModelLen, BlockTokens: n.Scheduler.Pool.BlockTokens, MaxRunning: n.Scheduler.MaxSeqs,
		Identity: decode.Identity{Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Layout: n.LayoutHash(), KV: n.KVText()},
		Bundle:   n.bundle(),
	})
	n.meters.Decode(role.Counters, role.Owned, role.PrefillLegs)
	return role
}

// bundle is what gateways need to serve the node's model.
func (n *node) bundle() *nodepb.Bundle {
	b := n.Bundle
	var groups []*nodepb.CacheGroup
	for _, g := range n.eng.Groups() {
		groups = append(groups, &nodepb.CacheGroup{BlockTokens: uint32(g.BlockTokens), Window: uint32(g.Window)})
	}
	return &nodepb.Bundle{
		Groups: groups,
		Model:  b.ModelName, Fingerprint: n.Fingerprint, NumericsClass: n.Class, TokenizerJson: b.TokenizerJSON,
		ChatTemplate: b.ChatTemplate, BosToken: b.BosToken, EosToken: b.EosToken, EosTokenIds: b.EOSTokenIDs,
		MaxModelLen: uint32(b.MaxModelLen), VocabSize: uint32(b.VocabSize), BlockTokens: uint32(n.Scheduler.Pool.BlockTokens),
		Defaults: &nodepb.GenerationDefaults{Temperature: b.Defaults.Temperature, TopP: b.Defaults.TopP, TopK: b.Defaults.TopK},
	}
}

// runServe has gateway and decode node in one process, joined by an in-memory
// connection. The one engine prefills as well, so that no KV travels.
func runServe(v *command.Invocation) error {
	f := serveFlags(v.Set)
	args, err := v.Parse(1)
	if err != nil {
		return err
	}
	m, g, p := f.m, f.g, f.p
	if len(args) == 1 {
		m.Path = args[0]
	}
	listener, err := inherited(&g)
	if err != nil {
		return err
	}
	cert, err := clientTLS(&g)
	if err != nil {
		return err
	}
	if err := errors.Join(checkPolicy(&g), checkOrigins(&g)); err != nil {
		return err
	}
	d, err := process.Start(process.Options{Role: "serve", LogLevel: p.LogLevel, LogFormat: p.LogFormat, Out: v.ErrOut})
	if err != nil {
		return err
	}
	defer d.End()
	d.ExitAtSecondSignal()
	var role *decode.Node
	n, err := startEngine(d, v.Environ, &m, &p, "serve", metrics.Decode|metrics.Gateway, hooks{step: func() { role.Flush() }})
	if err != nil {
		return err
	}
	role = n.decodeRole(nil, nil)
	d.Work(role.Heartbeats)
	inside := rpc.NewNetwork()
	l, err := inside.Listen("engine")
	if err != nil {
		return err
	}
	d.Work(func(ctx context.Context) {
		d.Report("rpc", rpc.Serve(ctx, l, rpc.Options{Hello: n.hello(), Log: d.Log}, role))
	})
	o := gatewayOptions(&g, &p, d)
	if o.MaxConns, err = d.Connections(process.AloneDescriptors, o.MaxConns, v.Origin("max-connections") != "default"); err != nil {
		return err
	}
	o.TLS, o.Listener = tlsOf(cert), listener
	if m.ChatTemplate != "" {
		o.ChatTemplate = n.Bundle.ChatTemplate // told at once where it is wrong
	}
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: d.Name + "-gateway", Role: "gateway", Build: version}, Dial: inside.Dial, Log: d.Log, Counters: &n.asks}
	RPCMetrics(n.meters.Set, &n.asks)
	o.Members = []nodes.Member{{ID: d.Name, Role: "serve", Build: version, RPC: "engine", Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Ready: true}}
	o.Metrics, o.Tracer = n.meters.Set, n.tr
	if o.AdminListener, err = adminListener(&g); err != nil {
		return err
	}
	gw, err := gateway.New(o)
	if err != nil {
		return err
	}
	d.Watch(gw.Ready, n.responsive())
	followClients(d, o.Metrics, cert)
	followConfig(d, o.Metrics, v.Set, func() error {
		again := serveFlags(table().Find("serve").Flags(io.Discard))
		if err := again.Resolve(v.Arguments, v.Environ); err != nil {
			return err
		}
		return gw.SetLimits(gatewayOptions(&again.g, &again.p, d).Limits)
	})
	d.Log.Info("serving", "addr", gw.Addr(), "model", n.Bundle.ModelName, "version", version)
	return n.whileStepping(d.Ctx, gw.Run, func() {
		ctx, cancel := context.WithTimeout(d.Ctx, drainDelay)
		defer cancel()
		role.Drain(ctx)
		alone := gatewayOptions(&g, &p, d)
		alone.Limits.ResumeTimeout = never(0) // there is no other node to wait for
		d.Report("limits", gw.SetLimits(alone.Limits))
	})
}
