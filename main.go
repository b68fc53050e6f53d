// Command tandem serves large language models on a fleet: a gateway that speaks
// the OpenAI API, prefill nodes, decode nodes, or all of them in one process.
//
// This file is the subcommands, and the only one that knows every role: it maps
// what internal/config resolved to each package's Options, starts the parts in
// order and stops them in reverse.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/foreign"
	"github.com/tandem-serving/tandem/gateway/foreign/discover"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/command"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/launch"
	"github.com/tandem-serving/tandem/internal/logs"
	"github.com/tandem-serving/tandem/internal/meter"
	"github.com/tandem-serving/tandem/internal/metrics"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
	"github.com/tandem-serving/tandem/internal/trace"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// version is the release; the Makefile may set it.
var version = "0.1.0"

// table is the subcommands in the order that help shows.
func table() command.Table {
	return append(command.Table{
		command.New("up", "[flags]", "Starts a cluster on this machine: a gateway, prefill and decode nodes as processes of their own.",
			"tandem up --prefill 1 --decode 2 --model ./Llama-3.2-1B-Instruct", runUp),
		command.New("gateway", "[flags]", "Runs a gateway: the OpenAI API in, tokens of the fleet out.",
			"tandem gateway --tls-dir certs/gw1 --host 0.0.0.0 --advertise 10.0.0.1 --ssl-certfile gw.crt --ssl-keyfile gw.key", runGateway),
		command.New("prefill", "[flags]", "Runs a prefill node: computes prompts' KV and pushes it to decode nodes.",
			"tandem prefill --tls-dir certs/p1 --join 10.0.0.1:7946 --host 10.0.0.2 --model ./Llama-3.2-1B-Instruct", runPrefill),
		command.New("decode", "[flags]", "Runs a decode node: owns requests and streams their tokens.",
			"tandem decode --tls-dir certs/d1 --join 10.0.0.1:7946 --host 10.0.0.3 --model ./Llama-3.2-1B-Instruct", runDecode),
		command.New("serve", "[MODEL] [flags]", "Serves a model with all roles in this one process.",
			"tandem serve ./Llama-3.2-1B-Instruct --port 8000", runServe),
	}, command.Tools()...)
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == command.RankCommand {
		os.Exit(rank(os.Args[2]))
	}
	os.Exit(table().Main(version, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// clientTLS is the certificate that clients see, and by what they are known, or nil
// on loopback.
func clientTLS(g *config.Gateway) (*tlsconf.Listener, error) {
	switch {
	case (g.SSLCert == "") != (g.SSLKey == ""):
		return nil, fmt.Errorf("%w: --ssl-certfile and --ssl-keyfile go together", config.ErrValue)
	case g.SSLCert == "" && (g.SSLCA != "" || g.SSLCertReqs != 0):
		return nil, fmt.Errorf("%w: --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile and --ssl-keyfile", config.ErrValue)
	case (g.SSLCA == "") != (g.SSLCertReqs == 0):
		return nil, fmt.Errorf("%w: --ssl-ca-certs says whose certificates clients may show and --ssl-cert-reqs whether they are asked: 1, if they have one, or 2, always; give both", config.ErrValue)
	case g.SSLCertReqs > 2:
		return nil, fmt.Errorf("%w: --ssl-cert-reqs %d: want 0 (no certificate), 1 (if the client has one) or 2 (always)", config.ErrValue, g.SSLCertReqs)
	}
	if g.SSLCert != "" {
		auth := []tls.ClientAuthType{tls.NoClientCert, tls.VerifyClientCertIfGiven, tls.RequireAndVerifyClientCert}[g.SSLCertReqs]
		l, err := tlsconf.ClientFacing(tlsconf.ClientFiles{Cert: g.SSLCert, Key: g.SSLKey, CA: g.SSLCA, Auth: auth})
		if err != nil {
			err = fmt.Errorf("%w: --ssl-certfile %s, --ssl-keyfile %s: %w", config.ErrValue, g.SSLCert, g.SSLKey, err)
		}
		return l, err
	}
	if !process.Loopback(g.Host) && !g.Insecure {
		return nil, fmt.Errorf("%w: --host %s is reachable from other machines: give --ssl-certfile and --ssl-keyfile, or --insecure to serve plain HTTP there", config.ErrValue, g.Host)
	}
	return nil, nil
}

// checkPolicy refuses a --policy that is none.
func checkPolicy(g *config.Gateway) error {
	if _, err := route.ParsePolicy(g.Policy); err != nil {
		return fmt.Errorf("%w: --policy %q: want one of %s", config.ErrValue, g.Policy, route.Policies())
	}
	return nil
}

// runUp starts the cluster's processes from this same binary.
func runUp(v *command.Invocation) error {
	var m config.Model
	var g config.Gateway
	var p config.Process
	m.Register(v.Set)
	g.Register(v.Set, gateway.DefaultMinRemotePrefillTokens)
	p.Register(v.Set)
	nPrefill := v.Int("prefill", 1, "prefill nodes")
	nDecode := v.Int("decode", 1, "decode nodes")
	stateDir := v.String("state-dir", "", "where the cluster's certificates live; default: $XDG_STATE_HOME/tandem or ~/.local/state/tandem")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if *nDecode < 1 || *nPrefill < 0 || *nDecode+*nPrefill > 64 {
		return fmt.Errorf("%w: --prefill %d --decode %d: want at least one decode node and at most 64 nodes", config.ErrValue, *nPrefill, *nDecode)
	}
	if last := g.Port + *nPrefill + *nDecode; g.Port == 0 || last > 65535 {
		return fmt.Errorf("%w: --port %d: the nodes' metrics take the ports up to %d after it; want --port 1 to %d", config.ErrValue, g.Port, last, 65535-*nPrefill-*nDecode)
	}
	// The gateway would say so too, but with all nodes started already.
	if _, err := clientTLS(&g); err != nil {
		return err
	}
	if err := checkPolicy(&g); err != nil {
		return err
	}
	log, _, err := process.Logger(p.LogLevel, p.LogFormat, v.ErrOut)
	if err != nil {
		return err
	}
	certs, err := launch.LocalCerts(*stateDir)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	local := launch.Local{
		Prefill: *nPrefill, Decode: *nDecode, Port: g.Port, Threads: m.Threads, Certs: certs,
		KVMemory: sharedKV(&m, *nPrefill+*nDecode),
		Flags: map[string][]string{
			"gateway": v.Forward(gatewayFlags(v.Out).Set),
			"prefill": v.Forward(nodeFlags("prefill", v.Out).Set),
			"decode":  v.Forward(nodeFlags("decode", v.Out).Set),
		},
	}
	if err := local.PortsFree(g.Host); err != nil {
		return err
	}
	processes, err := local.Processes()
	if err != nil {
		return err
	}
	ctx, second, stop := process.Signals()
	defer stop()
	key := ""
	if len(g.APIKeys) > 0 {
		key = g.APIKeys[0]
	}
	scheme := "http"
	if g.SSLCert != "" {
		scheme = "https"
	}
	url := fmt.Sprintf("%s://%s", scheme, net.JoinHostPort(g.Host, strconv.Itoa(g.Port)))
	began := time.Now()
	return launch.Run(ctx, launch.Options{
		Binary: self, Processes: processes, Out: v.ErrOut, Logger: log,
		Grace: time.Duration(p.ShutdownTimeout) + 10*time.Second,
		Started: func(ctx context.Context) error {
			return local.Announce(ctx, v.Out, url, key, g.SSLCert, began)
		},
	}, second)
}

// sharedKV is what each of n nodes on this machine takes for KV blocks where the
// memory limit does not hold the default of all and the weights: a quarter of it
// together. Otherwise it is 0, for what was given or the default.
func sharedKV(m *config.Model, n int) int64 {
	if limit := process.MemoryLimit(os.DirFS("/")); m.KVMemory == 0 && limit > 0 && limit/4 < int64(n)<<30 {
		return max(1, limit/4/int64(n))
	}
	return 0
}

// gatewayCommand is the flags of a gateway.
type gatewayCommand struct {
	*config.Set
	g        config.Gateway
	u        config.Upstreams
	c        config.Cluster
	p        config.Process
	natsPort int
	name     string
	template string // file
}

func gatewayFlags(out io.Writer) *gatewayCommand {
	f := &gatewayCommand{Set: table().Find("gateway").Flags(out)}
	f.g.Register(f.Set, gateway.DefaultMinRemotePrefillTokens)
	f.StringVar(&f.name, "served-model-name", "", "name in the API of the nodes' model, the first of several; default: its own; NAME=MODEL gives a model of nodes or upstreams a further name, several separated by commas")
	f.StringVar(&f.template, "chat-template", "", "file with a chat template instead of the model's own")
	f.u.Register(f.Set)
	f.c.Register(f.Set, 7946)
	f.PortVar(&f.natsPort, "nats-port", 4222, "port of the embedded NATS server; 0: any")
	f.p.Register(f.Set)
	return f
}

// nodeCommand is the flags of a prefill or decode node.
type nodeCommand struct {
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

// begin starts a process of the cluster.
func begin(v *command.Invocation, p *config.Process, c *config.Cluster, role string) (*process.Process, error) {
	if c.TLSDir == "" && role == "gateway" {
		return nil, fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`, for a cluster of nodes, or --upstream for other servers", config.ErrValue)
	}
	if c.TLSDir == "" {
		return nil, fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`; nodes trust nobody without it", config.ErrValue)
	}
	d, err := process.Start(process.Options{Role: role, Name: c.Name, LogLevel: p.LogLevel, LogFormat: p.LogFormat, Out: v.ErrOut, TLSDir: c.TLSDir})
	if err == nil {
		d.ExitAtSecondSignal()
	}
	return d, err
}

// beginAlone starts a gateway without a cluster.
func beginAlone(v *command.Invocation, p *config.Process, c *config.Cluster, role string) (*process.Process, error) {
	d, err := process.Start(process.Options{Role: role, Name: c.Name, LogLevel: p.LogLevel, LogFormat: p.LogFormat, Out: v.ErrOut})
	if err == nil {
		d.ExitAtSecondSignal()
	}
	return d, err
}

// servedNames takes --served-model-name apart: the nodes' model's name, and
// further names of upstreams' models.
func servedNames(given string) (own string, further map[string]string, err error) {
	for part := range strings.SplitSeq(given, ",") {
		name, of, ok := strings.Cut(part, "=")
		switch {
		case ok && (name == "" || of == "") || !ok && part != "" && own != "":
			return "", nil, fmt.Errorf("%w: --served-model-name %q: want NAME, or NAME=MODEL for further names, separated by commas", config.ErrValue, given)
		case ok && further == nil:
			further = map[string]string{name: of}
		case ok:
			further[name] = of
		case part != "":
			own = part
		}
	}
	return own, further, nil
}

// upstreamServers are the servers of another kind.
func upstreamServers(u *config.Upstreams, log *slog.Logger) (foreign.Options, error) {
	o := foreign.Options{APIKey: u.APIKey, HealthPath: u.HealthPath}
	for role, urls := range [][]string{foreign.Whole: u.URLs, foreign.Prefill: u.Prefill, foreign.Decode: u.Decode} {
		for _, url := range urls {
			source, target, err := discover.Parse(url, foreign.Role(role), u.BootstrapPort, discover.Options{API: u.KubernetesAPI, Log: log})
			switch {
			case err != nil:
				return o, fmt.Errorf("%w: %w", config.ErrValue, err)
			case source != nil:
				o.Sources = append(o.Sources, source)
			default:
				o.Targets = append(o.Targets, target)
			}
		}
	}
	if (len(u.Prefill) > 0) != (len(u.Decode) > 0) {
		return o, fmt.Errorf("%w: --upstream-prefill and --upstream-decode go together", config.ErrValue)
	}
	var err error
	if o.Protocol, err = foreign.ParseProtocol(u.Protocol); err != nil {
		return o, fmt.Errorf("%w: --upstream-protocol %q: want vllm or sglang", config.ErrValue, u.Protocol)
	}
	if u.CAFile != "" {
		pem, err := os.ReadFile(u.CAFile)
		if err != nil {
			return o, fmt.Errorf("%w: --upstream-ca-file: %w", config.ErrValue, err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return o, fmt.Errorf("%w: --upstream-ca-file %s has no certificate in PEM", config.ErrValue, u.CAFile)
		}
		o.TLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return o, nil
}

func runGateway(v *command.Invocation) error {
	f := gatewayFlags(v.Out)
	v.Set = f.Set
	if _, err := v.Parse(0); err != nil {
		return err
	}
	cert, err := clientTLS(&f.g)
	if err != nil {
		return err
	}
	if err := checkPolicy(&f.g); err != nil {
		return err
	}
	template, err := command.ReadTemplate(f.template)
	if err != nil {
		return err
	}
	alone := f.u.Any() && f.c.TLSDir == "" // no cluster
	start := begin
	if alone {
		start = beginAlone
	}
	d, err := start(v, &f.p, &f.c, "gateway")
	if err != nil {
		return err
	}
	defer d.End()
	o := gatewayOptions(&f.g, &f.p, d)
	if o.Foreign, err = upstreamServers(&f.u, d.Log); err != nil {
		return err
	}
	o.ForwardAuthorization, o.UpstreamRequests = f.u.ForwardCredentials, f.u.MaxRequests
	if f.name, o.Foreign.Names, err = servedNames(f.name); err != nil {
		return err
	}
	o.TLS, o.ServedModelName, o.ChatTemplate = tlsOf(cert), f.name, template
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: d.Name, Role: "gateway", Build: version}, Log: d.Log, Counters: new(rpc.Counters)}
	if !alone {
		o.RPC.TLS = d.Certs.Client()
	}
	if o.Tracer, err = tracer(d, v.Environ, &f.p, "gateway"); err != nil {
		return err
	}
	o.Metrics = metrics.New(metrics.Gateway, f.name)
	meter.Traces(o.Metrics, o.Tracer)
	if o.AdminListener, err = adminListener(&f.g); err != nil {
		return err
	}
	o.Metrics.Info(metrics.BuildInfo, version, "gateway")
	meter.RPC(o.Metrics, o.RPC.Counters)
	g, err := gateway.New(o)
	if err != nil {
		return err
	}
	followClients(d, o.Metrics, cert)
	followConfig(d, o.Metrics, v.Set, func() error {
		again := gatewayFlags(io.Discard)
		if err := again.Resolve(v.Arguments, v.Environ); err != nil {
			return err
		}
		servers, err := upstreamServers(&again.u, d.Log)
		if err != nil {
			return err
		}
		limits := gatewayOptions(&again.g, &again.p, d)
		limits.UpstreamRequests = again.u.MaxRequests
		if err := limits.CheckLimits(); err != nil {
			return err
		}
		if o.Foreign.Any() {
			if err := g.SetUpstreams(servers.Targets, servers.Sources); err != nil {
				return err
			}
		}
		return g.SetLimits(limits)
	})
	if alone {
		d.Log.Info("gateway listens", "addr", g.Addr(), "node", d.Name, "version", version)
		return g.Run(d.Ctx)
	}
	host := advertised(&f.c, f.g.Host)
	self := cluster.Member{ID: d.Name, Role: "gateway", HTTP: g.Addr(), Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true}
	var server *cluster.Server
	if f.c.NATSURL == "" {
		// The server itself would only say that it is not ready in time.
		probe, err := process.Listen(host, f.natsPort, "nats-port")
		if err != nil {
			return err
		}
		if err := probe.Close(); err != nil {
			return err
		}
		if server, err = cluster.StartServer(cluster.ServerOptions{
			Name: d.Name, Listen: net.JoinHostPort(host, strconv.Itoa(f.natsPort)), Route: net.JoinHostPort(host, "0"),
			TLS: d.Certs.Server(), Log: d.Log,
		}); err != nil {
			return err
		}
		d.OnEnd(server.Close)
		self.NATS, self.NATSRoute = server.Addr(), server.RouteAddr()
	}
	g.Hear(newBus(d, &f.c, server))
	cl, err := joinCluster(d, &f.c, f.g.Host, host, self, func(ms []cluster.Member) {
		g.SetMembers(upstreamMembers(ms))
		if server != nil {
			d.Report("NATS routes", server.SetRoutes(addresses(ms, func(m cluster.Member) string { return m.NATSRoute })))
		}
	})
	if err != nil {
		return err
	}
	d.Log.Info("gateway listens", "addr", g.Addr(), "node", d.Name, "gossip", cl.Addr(), "nats", self.NATS, "version", version)
	return g.Run(d.Ctx)
}

func gatewayOptions(g *config.Gateway, p *config.Process, d *process.Process) gateway.Options {
	port := g.Port
	if port == 0 {
		port = -1
	}
	return gateway.Options{
		Host: g.Host, Port: port, APIKeys: g.APIKeys, APIKeyFile: g.APIKeyFile, MaxQueuedTokens: g.MaxQueuedTokens, MaxQueuedRequests: g.MaxQueuedRequests,
		QueueTimeout: time.Duration(g.QueueTimeout), NodeBacklog: g.NodeBacklog, NodeBacklogTime: never(time.Duration(g.NodeBacklogTime)), Version: version, Log: d.Log,
		MinRemotePrefillTokens: g.MinRemotePrefill, RequestTimeout: time.Duration(g.RequestTimeout),
		ResumeTimeout: never(time.Duration(g.ResumeTimeout)), StallTimeout: never(time.Duration(g.StallTimeout)), MaxAttempts: g.MaxAttempts, Policy: g.Policy,
		ShutdownTimeout: time.Duration(p.ShutdownTimeout), MaxBodyBytes: int(g.MaxBody), MaxLogprobs: g.MaxLogprobs,
		MaxBodyMemory: boundless(int(g.MaxBodyMemory)), HeaderTimeout: time.Duration(g.HeaderTimeout), MinBodyRate: boundless(int(g.MinBodyRate)),
		MaxN: g.MaxN, MaxPromptTokens: g.MaxPromptTokens, MaxInFlight: g.MaxRequests, MaxConns: g.MaxConns, MaxConnsPerAddress: g.MaxConnsPerAddress,
		SlowClientTimeout: time.Duration(g.SlowClientTimeout), StreamTokens: g.StreamTokens,
		RetriesPerSecond: float64(g.RetriesPerSecond), ResumesPerSecond: float64(g.ResumesPerSecond),
		Level: d.Level, LogRequests: g.LogRequests, LogPromptText: g.MaxLogLen, QuietStats: p.DisableLogStats,
	}
}

// adminListener is that of --admin-listen; nil without one.
func adminListener(g *config.Gateway) (net.Listener, error) {
	if g.AdminListen == "" {
		return nil, nil
	}
	host, _, err := net.SplitHostPort(g.AdminListen)
	if err != nil {
		return nil, fmt.Errorf("%w: --admin-listen %q: want host:port", config.ErrValue, g.AdminListen)
	}
	if !process.Loopback(host) && !g.Insecure {
		return nil, fmt.Errorf("%w: --admin-listen %s is reachable from other machines, which need no key there: add --insecure if only operators reach it", config.ErrValue, g.AdminListen)
	}
	l, err := net.Listen("tcp", g.AdminListen)
	if err != nil {
		return nil, fmt.Errorf("cannot listen for --admin-listen: %w", err)
	}
	return l, nil
}

// never is what Options take for a bound that is 0, off, in a flag.
func never(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

// newBus connects to NATS: the server in this process, --nats-url, or, once
// gossip tells, those of the gateways.
func newBus(d *process.Process, c *config.Cluster, server *cluster.Server) *cluster.Bus {
	b := cluster.NewBus(cluster.BusOptions{Name: d.Name, InProcess: server, TLS: d.Certs.Client(), Log: d.Log})
	if c.NATSURL != "" {
		b.SetServers([]string{c.NATSURL})
	}
	d.OnEnd(b.Close)
	return b
}

// addresses is one kind of address of those members that have it.
func addresses(ms []cluster.Member, of func(cluster.Member) string) (as []string) {
	for _, m := range ms {
		if a := of(m); a != "" {
			as = append(as, a)
		}
	}
	return as
}

// advertised is the host that others reach this process at.
func advertised(c *config.Cluster, host string) string {
	if c.Advertise != "" {
		return string(c.Advertise)
	}
	return host
}

// upstreamMembers is the fleet as a gateway needs it.
func upstreamMembers(ms []cluster.Member) []upstream.Member {
	var us []upstream.Member
	for _, m := range ms {
		if m.Role != "gateway" && m.Mismatch == "" {
			us = append(us, upstream.Member{
				ID: m.ID, Role: m.Role, RPC: m.RPC, HTTP: m.HTTP, Model: m.Model, Fingerprint: m.Fingerprint, Class: m.Class,
				Ready: m.Ready, Draining: m.Draining,
			})
		}
	}
	return us
}

// joinCluster starts gossip, which keeps trying to reach its seeds.
func joinCluster(d *process.Process, c *config.Cluster, bind, host string, self cluster.Member, onChange func([]cluster.Member)) (*cluster.Cluster, error) {
	o := cluster.Options{
		Self: self, Bind: net.JoinHostPort(address(bind), strconv.Itoa(c.GossipPort)), Join: c.Join, Key: d.Certs.GossipKey(), OnChange: onChange, Log: d.Log,
	}
	if host != bind {
		o.Advertise = net.JoinHostPort(address(host), strconv.Itoa(c.GossipPort))
	}
	cl, err := cluster.New(o)
	if err != nil {
		return nil, err
	}
	d.OnEnd(func() {
		if err := cl.Leave(leaveTimeout); err != nil { // whoever is left notices by itself
			d.Log.Debug("left without a confirmation", "err", err)
		}
	})
	return cl, nil
}

// address is what gossip, which takes addresses only, binds for a host.
func address(host string) string {
	if host == "localhost" {
		return "127.0.0.1"
	}
	return host
}

// leaveTimeout is how long a process tells the others that it goes.
const leaveTimeout = 500 * time.Millisecond

// node is a model on a device with its engine, and what the cluster knows of it.
type node struct {
	*engine.Loaded
	*process.Process
	eng    *engine.Engine
	meters meter.Node
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
	if err := gateway.CheckBundle(n.bundle()); err != nil {
		return nil, fmt.Errorf("%w %s: %w", engine.ErrModel, m.Path, err)
	}
	if n.tr, err = tracer(d, environ, p, role); err != nil {
		return nil, err
	}
	n.meters.Set = metrics.New(roles, l.Bundle.ModelName)
	meter.Traces(n.meters.Set, n.tr)
	eo := l.Options()
	eo.Logger, eo.OnStep, eo.OnBlocks, eo.Watch = d.Log, on.step, on.blocks, meter.Watch(n.meters.Set)
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
	meter.RPC(n.meters.Set, counters, &n.asks)
	watched := &gatewayWatch{Handler: h}
	n.Work(func(ctx context.Context) {
		failed <- rpc.Serve(ctx, rl, rpc.Options{Hello: n.hello(), TLS: n.Certs.Server(), Log: n.Log, Counters: counters}, watched)
	})
	host := advertised(&f.c, f.n.Host)
	self := cluster.Member{
		ID: n.Name, Role: n.role, RPC: process.At(host, rl.Addr()), HTTP: process.At(host, hl.Addr()), Model: n.Bundle.ModelName,
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
	n.Work(func(ctx context.Context) {
		failed <- metrics.ServeNode(ctx, hl, metrics.NodeOptions{Set: n.meters.Set, Version: version, Level: n.Level, Ready: func() error {
			switch {
			case draining.Load() || role.Draining():
				return errors.New("draining")
			case !cl.Joined():
				return errors.New("not joined to the cluster yet")
			}
			return nil
		}})
	})
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

func runPrefill(v *command.Invocation) error {
	f := nodeFlags("prefill", v.Out)
	v.Set = f.Set
	if _, err := v.Parse(0); err != nil {
		return err
	}
	d, err := begin(v, &f.p, &f.c, "prefill")
	if err != nil {
		return err
	}
	defer d.End()
	transport, err := kvTransport(&f.n)
	if err != nil {
		return err
	}
	device, transport := kvFabric(d, &f.n, transport)
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
	wo := kvtransfer.WriterOptions{Node: d.Name, Layout: n.layout(), Memory: n.Loaded, Shared: shared, Transport: transport, Fabric: device,
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
		Identity:    prefill.Identity{Fingerprint: n.Fingerprint, Class: n.Class, Layout: n.LayoutHash()},
		Transferred: meter.Transferred(n.meters.Set),
	})
	n.meters.Prefill(p.Counters, p.Queued, p.Limit(), w.Stats)
	d.Work(p.Positions)
	d.Work(p.Heartbeats)
	return n.serve(f, p, p, bus)
}

func runDecode(v *command.Invocation) error {
	f := nodeFlags("decode", v.Out)
	v.Set = f.Set
	if _, err := v.Parse(0); err != nil {
		return err
	}
	d, err := begin(v, &f.p, &f.c, "decode")
	if err != nil {
		return err
	}
	defer d.End()
	transport, err := kvTransport(&f.n)
	if err != nil {
		return err
	}
	device, transport := kvFabric(d, &f.n, transport)
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
	observe := meter.Arrived(n.meters.Set)
	ro := kvtransfer.ReaderOptions{
		Node: d.Name, Transport: transport, Fabric: device, Layout: n.layout(), Memory: n.Loaded, Listen: net.JoinHostPort(f.n.Host, strconv.Itoa(f.n.KVPort)),
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
		Identity: decode.Identity{Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Layout: n.LayoutHash()},
		Bundle:   n.bundle(),
	})
	n.meters.Decode(role.Counters, role.Owned, role.PrefillLegs)
	return role
}

// bundle is what gateways need to serve the node's model.
func (n *node) bundle() *nodepb.Bundle {
	b := n.Bundle
	return &nodepb.Bundle{
		Model: b.ModelName, Fingerprint: n.Fingerprint, NumericsClass: n.Class, TokenizerJson: b.TokenizerJSON,
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
	cert, err := clientTLS(&g)
	if err != nil {
		return err
	}
	if err := checkPolicy(&g); err != nil {
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
	o.TLS = tlsOf(cert)
	if m.ChatTemplate != "" {
		o.ChatTemplate = n.Bundle.ChatTemplate // told at once where it is wrong
	}
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: d.Name + "-gateway", Role: "gateway", Build: version}, Dial: inside.Dial, Log: d.Log, Counters: &n.asks}
	meter.RPC(n.meters.Set, &n.asks)
	o.Members = []upstream.Member{{ID: d.Name, Role: "serve", RPC: "engine", Model: n.Bundle.ModelName, Fingerprint: n.Fingerprint, Class: n.Class, Ready: true}}
	o.Metrics, o.Tracer = n.meters.Set, n.tr
	if o.AdminListener, err = adminListener(&g); err != nil {
		return err
	}
	gw, err := gateway.New(o)
	if err != nil {
		return err
	}
	followClients(d, o.Metrics, cert)
	followConfig(d, o.Metrics, v.Set, func() error {
		again := serveFlags(table().Find("serve").Flags(io.Discard))
		if err := again.Resolve(v.Arguments, v.Environ); err != nil {
			return err
		}
		return gw.SetLimits(gatewayOptions(&again.g, &again.p, d))
	})
	d.Log.Info("serving", "addr", gw.Addr(), "model", n.Bundle.ModelName, "version", version)
	return n.whileStepping(d.Ctx, gw.Run, func() {
		ctx, cancel := context.WithTimeout(d.Ctx, drainDelay)
		defer cancel()
		role.Drain(ctx)
		alone := gatewayOptions(&g, &p, d)
		alone.ResumeTimeout = never(0) // there is no other node to wait for
		d.Report("limits", gw.SetLimits(alone))
	})
}
