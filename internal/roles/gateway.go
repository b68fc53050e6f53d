package roles

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/discover"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/command"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/regular"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

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

// checkOrigins refuses --allowed-origins that are none, and all pages without keys.
func checkOrigins(g *config.Gateway) error {
	if err := gateway.CheckOrigins(g.AllowedOrigins); err != nil {
		return fmt.Errorf("%w: --allowed-origins: %w", config.ErrValue, err)
	}
	if slices.Contains(g.AllowedOrigins, "*") && len(g.APIKeys) == 0 && g.APIKeyFile == "" {
		return fmt.Errorf("%w: --allowed-origins * lets every web page use a gateway without API keys: name the pages' origins, or give --api-key or --api-key-file", config.ErrValue)
	}
	return nil
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
func upstreamServers(u *config.Upstreams, log *slog.Logger) (upstream.Options, error) {
	o := upstream.Options{APIKey: u.APIKey, HealthPath: u.HealthPath}
	for role, urls := range [][]string{upstream.Whole: u.URLs, upstream.Prefill: u.Prefill, upstream.Decode: u.Decode} {
		for _, url := range urls {
			source, target, err := discover.Parse(url, upstream.Role(role), u.BootstrapPort, discover.Options{API: u.KubernetesAPI, Log: log})
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
	if o.Protocol, err = upstream.ParseProtocol(u.Protocol); err != nil {
		return o, fmt.Errorf("%w: --upstream-protocol %q: want vllm or sglang", config.ErrValue, u.Protocol)
	}
	if u.CAFile != "" {
		pem, err := regular.ReadFile(u.CAFile, tlsconf.MaxFile)
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

// upstreamTokenizers reads --tokenizer: by models' names, and as "" that of all others.
func upstreamTokenizers(u *config.Upstreams, template string) (map[string]*proxy.Tokenizer, error) {
	all := map[string]*proxy.Tokenizer{}
	for _, given := range u.Tokenizers {
		name, folder, named := strings.Cut(given, "=")
		if !named {
			name, folder = "", given
		}
		switch {
		case !u.Any():
			return nil, fmt.Errorf("%w: --tokenizer %s is for prompts that go to upstreams: give --upstream, or leave it out; nodes bring their own", config.ErrValue, given)
		case all[name] != nil:
			return nil, fmt.Errorf("%w: --tokenizer %s: there is one for that model already; say which model each is for, as MODEL=FOLDER", config.ErrValue, given)
		}
		b, err := engine.ReadTokenizer(folder)
		if err == nil {
			all[name], err = proxy.NewTokenizer(&nodepb.Bundle{TokenizerJson: b.TokenizerJSON, ChatTemplate: b.ChatTemplate, BosToken: b.BosToken, EosToken: b.EosToken}, template)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: --tokenizer %s: want a folder with a model's tokenizer.json: %w", config.ErrValue, given, err)
		}
	}
	return all, nil
}

func runGateway(v *command.Invocation) error {
	f := gatewayFlags(v.Out)
	v.Set = f.Set
	if _, err := v.Parse(0); err != nil {
		return err
	}
	listener, err := inherited(&f.g)
	if err != nil {
		return err
	}
	cert, err := clientTLS(&f.g)
	if err != nil {
		return err
	}
	if err := errors.Join(checkPolicy(&f.g), checkOrigins(&f.g)); err != nil {
		return err
	}
	template, err := command.ReadTemplate(f.template)
	if err != nil {
		return err
	}
	tokenizers, err := upstreamTokenizers(&f.u, template)
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
	process.LimitMemory(d.Log, v.Environ, 0)
	o := gatewayOptions(&f.g, &f.p, d)
	if o.Upstreams.Options, err = upstreamServers(&f.u, d.Log); err != nil {
		return err
	}
	if o.MaxConns, err = d.Connections(descriptors(&f.u, alone), o.MaxConns, f.Origin("max-connections") != "default"); err != nil {
		return err
	}
	o.Upstreams.ForwardAuthorization, o.Limits.UpstreamRequests, o.Upstreams.Tokenizers = f.u.ForwardCredentials, f.u.MaxRequests, tokenizers
	if f.name, o.Upstreams.Names, err = servedNames(f.name); err != nil {
		return err
	}
	o.TLS, o.Listener, o.ServedModelName, o.ChatTemplate = tlsOf(cert), listener, f.name, template
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: d.Name, Role: "gateway", Build: version}, Log: d.Log, Counters: new(rpc.Counters)}
	if !alone {
		o.RPC.TLS = d.Certs.Client()
	}
	if o.Tracer, err = tracer(d, v.Environ, &f.p, "gateway"); err != nil {
		return err
	}
	o.Metrics = metrics.New(metrics.Gateway, f.name)
	traceMetrics(o.Metrics, o.Tracer)
	if o.AdminListener, err = adminListener(&f.g); err != nil {
		return err
	}
	o.Metrics.Info(metrics.BuildInfo, version, "gateway")
	RPCMetrics(o.Metrics, o.RPC.Counters)
	g, err := gateway.New(o)
	if err != nil {
		return err
	}
	d.Watch(g.Ready, nil)
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
		next := gatewayOptions(&again.g, &again.p, d)
		next.Limits.UpstreamRequests = again.u.MaxRequests
		if err := next.Check(); err != nil {
			return err
		}
		if o.Upstreams.Any() {
			if err := g.SetUpstreams(servers.Targets, servers.Sources); err != nil {
				return err
			}
		}
		return g.SetLimits(next.Limits)
	})
	if alone {
		d.Log.Info("gateway listens", "addr", g.Addr(), "node", d.Name, "version", version)
		return g.Run(d.Ctx)
	}
	host := advertised(&f.c, f.g.Host)
	self := cluster.Member{ID: d.Name, Role: "gateway", Build: version, HTTP: g.Addr(), Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true}
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
		Host: g.Host, Port: port, MaxConns: g.MaxConns,
		APIKeys: g.APIKeys, APIKeyFile: g.APIKeyFile, AllowedOrigins: g.AllowedOrigins, AllowedHosts: append(ownNames(g), g.AllowedHosts...),
		RejectSpecialTokens: g.SpecialTokens == config.RejectSpecialTokens,
		Policy:              g.Policy, MinRemotePrefillTokens: boundless(g.MinRemotePrefill), StreamTokens: g.StreamTokens,
		StallTimeout: never(time.Duration(g.StallTimeout)), NodeSilence: never(time.Duration(g.NodeSilence)), ShutdownTimeout: time.Duration(p.ShutdownTimeout),
		Limits: gateway.Limits{
			HeaderTimeout: time.Duration(g.HeaderTimeout), SlowClientTimeout: time.Duration(g.SlowClientTimeout), MinBodyRate: boundless(int(g.MinBodyRate)),
			MaxBodyBytes: int(g.MaxBody), MaxBodyMemory: boundless(int(g.MaxBodyMemory)), MaxConnsPerAddress: g.MaxConnsPerAddress,
			MaxN: g.MaxN, MaxPromptTokens: g.MaxPromptTokens, MaxLogprobs: g.MaxLogprobs,
			RequestTimeout: time.Duration(g.RequestTimeout), MaxAttempts: g.MaxAttempts, ResumeTimeout: never(time.Duration(g.ResumeTimeout)),
			MaxInFlight: g.MaxRequests, MaxQueuedRequests: g.MaxQueuedRequests, MaxQueuedTokens: g.MaxQueuedTokens, QueueTimeout: time.Duration(g.QueueTimeout),
			NodeBacklog: g.NodeBacklog, NodeBacklogTime: never(time.Duration(g.NodeBacklogTime)),
			RetriesPerSecond: float64(g.RetriesPerSecond), ResumesPerSecond: float64(g.ResumesPerSecond),
		},
		Version: version, Log: d.Log, Level: d.Level, LogRequests: g.LogRequests, LogPromptText: g.MaxLogLen, QuietStats: p.DisableLogStats,
	}
}

// descriptors returns the file descriptors that a gateway needs. A relayed request has
// one connection to an upstream, or one to each of a pair.
func descriptors(u *config.Upstreams, alone bool) process.Descriptors {
	need := process.GatewayDescriptors
	if alone {
		need = process.AloneDescriptors
	}
	switch {
	case len(u.Prefill) > 0:
		need.Each = 3
	case u.Any():
		need.Each = 2
	}
	return need
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

// ownNames are names of the gateway that need no --allowed-hosts.
func ownNames(g *config.Gateway) []string {
	names := []string{g.Host}
	if host, _, err := net.SplitHostPort(g.AdminListen); err == nil && host != "" {
		names = append(names, host)
	}
	return names
}

// never is what Options take for a bound that is 0, off, in a flag.
func never(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

// upstreamMembers is the fleet as a gateway needs it.
func upstreamMembers(ms []cluster.Member) []nodes.Member {
	var us []nodes.Member
	for _, m := range ms {
		if m.Mismatch == "" {
			us = append(us, nodes.Member{
				ID: m.ID, Role: m.Role, RPC: m.RPC, HTTP: m.HTTP, Model: m.Model, Build: m.Build, Fingerprint: m.Fingerprint, Class: m.Class,
				Ready: m.Ready, Draining: m.Draining,
			})
		}
	}
	return us
}
