// Command tandem serves large language models on a fleet: a gateway that speaks
// the OpenAI API, prefill nodes, decode nodes, or all of them in one process.
//
// The files of this folder are the subcommands, and all that knows every role: they
// map what internal/config resolved to each package's Options, start the parts in
// order and stop them in reverse.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/command"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/launch"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// version is the release, which the Makefile may set; main adds what tells builds apart.
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
	version = command.Build(version)
	os.Exit(table().Main(version, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
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
	if err := errors.Join(checkPolicy(&g), checkOrigins(&g)); err != nil {
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

// begin starts a process of the cluster.
func begin(v *command.Invocation, p *config.Process, c *config.Cluster, role string) (*process.Process, error) {
	if c.TLSDir == "" && role == "gateway" {
		return nil, fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`, for a cluster of nodes, or --upstream for other servers", config.ErrValue)
	}
	if c.TLSDir == "" {
		return nil, fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`; nodes trust nobody without it", config.ErrValue)
	}
	d, err := process.Start(process.Options{Role: role, Name: c.Name, LogLevel: p.LogLevel, LogFormat: p.LogFormat, Out: v.ErrOut, TLSDir: c.TLSDir})
	if err != nil {
		return nil, err
	}
	if id := d.Certs.Identity(); role == "gateway" && id.Role == tlsconf.Node {
		d.End()
		return nil, fmt.Errorf("%w: --tls-dir %s holds the certificate of node %q, and nodes take requests from gateways alone: `tandem ca DIR gateway/NAME` issues a gateway's",
			config.ErrValue, c.TLSDir, id.Name)
	}
	d.ExitAtSecondSignal()
	return d, nil
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
