package roles

import (
	"cmp"
	"crypto/tls"
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
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// clientTLS returns the certificate for clients and the authorities of theirs; nil for plain
// HTTP on loopback.
func clientTLS(g *gatewayFlags) (*tlsconf.Listener, error) {
	switch c := &g.clients; {
	case (c.Cert == "") != (c.Key == ""):
		return nil, fmt.Errorf("%w: --ssl-certfile and --ssl-keyfile go together", config.ErrValue)
	case c.Cert == "" && (c.CA != "" || g.certReqs != 0):
		return nil, fmt.Errorf("%w: --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile and --ssl-keyfile", config.ErrValue)
	case (c.CA == "") != (g.certReqs == 0):
		return nil, fmt.Errorf("%w: --ssl-ca-certs and --ssl-cert-reqs go together: the authorities of client certificates, and 1 to verify one if sent or 2 to require one", config.ErrValue)
	case g.certReqs > 2:
		return nil, fmt.Errorf("%w: --ssl-cert-reqs %d: want 0 (no certificate), 1 (if the client has one) or 2 (always)", config.ErrValue, g.certReqs)
	}
	if g.clients.Cert != "" {
		g.clients.Auth = []tls.ClientAuthType{tls.NoClientCert, tls.VerifyClientCertIfGiven, tls.RequireAndVerifyClientCert}[g.certReqs]
		l, err := tlsconf.ClientFacing(g.clients)
		if err != nil {
			err = fmt.Errorf("%w: --ssl-certfile %s, --ssl-keyfile %s: %w", config.ErrValue, g.clients.Cert, g.clients.Key, err)
		}
		return l, err
	}
	if !process.Loopback(g.Host) && !g.insecure {
		return nil, fmt.Errorf("%w: --host %s is reachable from other machines: give --ssl-certfile and --ssl-keyfile, or --insecure to serve plain HTTP there", config.ErrValue, g.Host)
	}
	return nil, nil
}

// open checks the flags and sets the listener that systemd passed, if any, and the certificate for
// clients, which it returns.
func (g *gatewayFlags) open() (*tlsconf.Listener, error) {
	var err error
	if g.Listener, err = inherited(g); err != nil {
		return nil, err
	}
	cert, err := clientTLS(g)
	if cert != nil {
		g.TLS = cert.Config()
	}
	return cert, errors.Join(err, checkPolicy(&g.Options), checkOrigins(&g.Options))
}

// asked reports whether the user has set a flag. A default in a file is none, because --dry-run
// writes all of them.
func asked(s *config.Set, flag string) bool {
	f, from := s.Lookup(flag), s.Origin(flag)
	return from != "default" && !(strings.HasPrefix(from, "file ") && f.Value.String() == f.DefValue)
}

// checkPolicy refuses an unknown --policy.
func checkPolicy(g *gateway.Options) error {
	if _, err := route.ParsePolicy(g.Policy); err != nil {
		return fmt.Errorf("%w: --policy %q: want one of %s", config.ErrValue, g.Policy, route.Policies())
	}
	return nil
}

// checkKeys refuses an empty --api-key, such as that of an unset variable of a shell. The list
// without entries that --dry-run prints for a gateway without keys is allowed in a file.
func checkKeys(s *config.Set, keys []string) error {
	if !s.Blank("api-key") && !slices.ContainsFunc(keys, func(key string) bool { return strings.TrimSpace(key) == "" }) {
		return nil
	}
	return fmt.Errorf("%w: --api-key (%s) has an empty key; without another key the gateway would be open to all: give a key, or leave it out", config.ErrValue, s.Origin("api-key"))
}

// checkOrigins refuses malformed --allowed-origins, and * without API keys.
func checkOrigins(g *gateway.Options) error {
	if err := gateway.CheckOrigins(g.AllowedOrigins); err != nil {
		return fmt.Errorf("%w: --allowed-origins: %w", config.ErrValue, err)
	}
	if slices.Contains(g.AllowedOrigins, "*") && len(g.APIKeys) == 0 && g.APIKeyFile == "" {
		return fmt.Errorf("%w: --allowed-origins * lets every web page use a gateway without API keys: list the origins, or give --api-key or --api-key-file", config.ErrValue)
	}
	return nil
}

// gatewayCommand has the flags of a gateway.
type gatewayCommand struct {
	*config.Set
	g        gatewayFlags
	u        upstreamFlags
	c        clusterFlags
	p        processFlags
	natsPort int
	name     string
	template string // file, or its text

	// Set by check.
	text       string // of the template
	tokenizers map[string]*proxy.Tokenizer
}

func newGatewayCommand(out io.Writer) *gatewayCommand {
	f := &gatewayCommand{Set: table().Find("gateway").Flags(out)}
	f.First("tls-dir", "host", "port", "ssl-certfile", "ssl-keyfile", "api-key-file")
	f.g.register(f.Set, gateway.DefaultMinRemotePrefillTokens)
	f.g.planner.register(f.Set)
	f.StringVar(&f.name, "served-model-name", "", "name in the API of the nodes' model, the first of several; default: its own; further names of that model, and NAME=MODEL for one of nodes or upstreams; a list with commas")
	f.StringVar(&f.template, "chat-template", "", "chat template instead of the model's own: a file, or the template itself")
	f.u.register(f.Set, &f.g.Limits)
	f.c.register(f.Set, &f.p.Options, 7946)
	f.PortVar(&f.natsPort, "nats-port", 4222, "port of the embedded NATS server; 0: any")
	f.p.register(f.Set)
	return f
}

// begin starts a process, whose flags were checked.
func begin(v *cli.Invocation, p *processFlags, role string) (*process.Process, error) {
	p.Role, p.Out = role, v.ErrOut
	d, err := process.Start(p.Options)
	if err == nil {
		d.ExitAtSecondSignal()
	}
	return d, err
}

// servedNames parses --served-model-name: the name of the nodes' model, and further names by
// name.
func servedNames(given string) (own string, further map[string]string, err error) {
	further = map[string]string{}
	for part := range strings.SplitSeq(given, ",") {
		name, of, ok := strings.Cut(part, "=")
		switch {
		case ok && (name == "" || of == ""):
			return "", nil, fmt.Errorf("%w: --served-model-name %q: want NAME, or NAME=MODEL for further names, separated by commas", config.ErrValue, given)
		case ok:
			further[name] = of
		case own == "":
			own = part
		case part != "":
			further[part] = own
		}
	}
	return own, further, nil
}

// lacksScheme reports whether an upstream is HOST:PORT, with or without a path.
func lacksScheme(url string) bool {
	address, _, _ := strings.Cut(url, "/")
	host, port, err := net.SplitHostPort(address)
	_, number := strconv.ParseUint(port, 10, 16)
	return err == nil && number == nil && !slices.Contains([]string{"dns", "srv", "k8s"}, host)
}

// upstreamServers returns the options of the upstreams.
func upstreamServers(u *upstreamFlags, log *slog.Logger) (upstream.Options, error) {
	o := u.Options
	var errs []error
	for role, urls := range [][]string{upstream.Whole: u.urls, upstream.Prefill: u.prefill, upstream.Decode: u.decode} {
		for _, url := range urls {
			source, target, err := discover.Parse(url, upstream.Role(role), u.bootstrapPort, discover.Options{Kubernetes: u.kubernetes, Log: log})
			switch {
			case err != nil && lacksScheme(url):
				errs = append(errs, fmt.Errorf("%w: upstream %q has no scheme: write http://%s", config.ErrValue, url, url))
			case err != nil:
				errs = append(errs, fmt.Errorf("%w: %w", config.ErrValue, err))
			case source != nil:
				o.Sources = append(o.Sources, source)
			default:
				o.Targets = append(o.Targets, target)
			}
		}
	}
	if (len(u.prefill) > 0) != (len(u.decode) > 0) {
		errs = append(errs, fmt.Errorf("%w: --upstream-prefill and --upstream-decode go together", config.ErrValue))
	}
	var err error
	if o.Protocol, err = upstream.ParseProtocol(u.protocol); err != nil {
		errs = append(errs, fmt.Errorf("%w: --upstream-protocol %q: want vllm or sglang", config.ErrValue, u.protocol))
	}
	if u.caFile != "" {
		pool, err := tlsconf.Pool(u.caFile)
		if err != nil {
			errs = append(errs, fmt.Errorf("%w: --upstream-ca-file: %w", config.ErrValue, err))
		}
		o.TLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return o, errors.Join(errs...)
}

// upstreamTokenizers loads the folders of --tokenizer, by model; "" is that of all other models.
func upstreamTokenizers(u *upstreamFlags, template string) (map[string]*proxy.Tokenizer, error) {
	all := map[string]*proxy.Tokenizer{}
	for _, given := range u.tokenizers {
		name, folder, named := strings.Cut(given, "=")
		if !named {
			name, folder = "", given
		}
		switch {
		case !u.any():
			return nil, fmt.Errorf("%w: --tokenizer %s is for upstreams: give --upstream, or leave it out; nodes send their own", config.ErrValue, given)
		case all[name] != nil:
			return nil, fmt.Errorf("%w: --tokenizer %s: there is one for that model already; name the model of each, as MODEL=FOLDER", config.ErrValue, given)
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

func runGateway(v *cli.Invocation) error {
	f := newGatewayCommand(v.Out)
	v.Set = f.Set
	v.Check(f.check)
	if _, err := v.Parse(0); err != nil {
		return err
	}
	alone := f.alone()
	d, err := begin(v, &f.p, "gateway")
	if err != nil {
		return err
	}
	defer d.End()
	process.LimitMemory(d.Log, v.Environ, 0)
	o := f.g.options(&f.p, d)
	o.Upstreams = f.u.Upstreams
	if o.Upstreams.Options, err = upstreamServers(&f.u, d.Log); err != nil {
		return err
	}
	o.Upstreams.Tokenizers = f.tokenizers
	if o.MaxConns, err = d.Connections(descriptors(&f.u, alone), o.MaxConns, asked(f.Set, "max-connections")); err != nil {
		return err
	}
	if f.name, o.Upstreams.Names, err = servedNames(f.name); err != nil {
		return err
	}
	o.ServedModelName, o.ChatTemplate = f.name, f.text
	id := cluster.NewID(d.Name, time.Now())
	o.Planner = f.g.planner.options(id)
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: id, Role: "gateway", Build: version}, Log: d.Log, Counters: new(rpc.Counters)}
	if !alone {
		o.RPC.TLS, o.ResponseSecret = d.Certs.Client(), d.Certs.GossipKey()
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
	priceMetric(o.Metrics, f.p.price)
	clusterExpiry(d, o.Metrics)
	RPCMetrics(o.Metrics, o.RPC.Counters)
	g, err := gateway.New(o)
	if err != nil {
		return err
	}
	d.Watch(g.Ready, nil)
	followClients(d, o.Metrics, f.g.cert)
	again := f // the flags of the last reload
	followConfig(d, o.Metrics, v.Set, func() (*config.Set, error) {
		again = newGatewayCommand(io.Discard)
		return again.Set, again.Resolve(v.Arguments, v.Environ)
	}, func() error {
		servers, err := upstreamServers(&again.u, d.Log)
		if err != nil {
			return err
		}
		next := again.g.options(&again.p, d)
		if err := errors.Join(next.Check()...); err != nil {
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
	host := cmp.Or(f.c.advertise, f.g.Host) // at which others reach this process
	self := cluster.Member{ID: id, Role: "gateway", Build: version, HTTP: g.Addr(), Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true}
	var server *cluster.Server
	if f.c.natsURL == "" {
		// The server would not name the port that is in use.
		if err := process.CheckPort(host, f.natsPort, "nats-port"); err != nil {
			return err
		}
		if server, err = cluster.StartServer(cluster.ServerOptions{
			Name: id, Listen: net.JoinHostPort(host, strconv.Itoa(f.natsPort)), Route: net.JoinHostPort(host, "0"),
			TLS: d.Certs.Server(), Log: d.Log,
		}); err != nil {
			return err
		}
		d.OnEnd(server.Close)
		self.NATS, self.NATSRoute = server.Addr(), server.RouteAddr()
	}
	g.FollowEvents(newBus(d, &f.c, server))
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

// options returns the options of the flags, completed for a process.
func (g *gatewayFlags) options(p *processFlags, d *process.Process) gateway.Options {
	o := g.Options
	o.AllowedHosts = append(ownNames(g), g.AllowedHosts...)
	o.Port, o.MinRemotePrefillTokens = cmp.Or(g.Port, -1), cmp.Or(g.MinRemotePrefillTokens, -1) // in a flag, 0 means any or always
	o.CompactJSON = g.structured.Compact
	o.NoToolCalls = !g.toolCalls
	o.ShutdownTimeout, o.QuietStats = p.shutdownTimeout, p.quietStats
	o.Version, o.Log, o.Level = version, d.Log, d.Level
	return o
}

// descriptors returns the file descriptors that a gateway needs. A relayed request has
// one connection to an upstream, or one to each of a pair.
func descriptors(u *upstreamFlags, alone bool) process.Descriptors {
	need := process.GatewayDescriptors
	if alone {
		need = process.AloneDescriptors
	}
	switch {
	case len(u.prefill) > 0:
		need.Each = 3
	case u.any():
		need.Each = 2
	}
	return need
}

// adminListener returns the listener of --admin-listen; nil without the flag.
func adminListener(g *gatewayFlags) (net.Listener, error) {
	if g.adminListen == "" {
		return nil, nil
	}
	l, err := net.Listen("tcp", g.adminListen)
	if err != nil {
		return nil, fmt.Errorf("cannot listen for --admin-listen: %w", err)
	}
	return l, nil
}

// ownNames returns the names of the gateway that need no --allowed-hosts.
func ownNames(g *gatewayFlags) []string {
	names := []string{g.Host}
	if host, _, err := net.SplitHostPort(g.adminListen); err == nil && host != "" {
		names = append(names, host)
	}
	return names
}

// upstreamMembers returns the members that a gateway can use.
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
