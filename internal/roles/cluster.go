package roles

import (
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// begin starts a process of the cluster.
func begin(v *cli.Invocation, p *processFlags, role string) (*process.Process, error) {
	if p.TLSDir == "" && role == "gateway" {
		return nil, fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`, for a cluster of nodes, or --upstream for other servers", config.ErrValue)
	}
	if p.TLSDir == "" {
		return nil, fmt.Errorf("%w: give --tls-dir, a folder made by `tandem ca`; nodes trust nobody without it", config.ErrValue)
	}
	d, err := beginAlone(v, p, role)
	if err != nil {
		return nil, err
	}
	if id := d.Certs.Identity(); role == "gateway" && id.Role == tlsconf.Node {
		d.End()
		return nil, fmt.Errorf("%w: --tls-dir %s holds the certificate of node %q, and nodes take requests from gateways alone: `tandem ca DIR gateway/NAME` issues a gateway's",
			config.ErrValue, p.TLSDir, id.Name)
	}
	return d, nil
}

// newBus connects to NATS: the server in this process, --nats-url, or, once
// gossip tells, those of the gateways.
func newBus(d *process.Process, c *clusterFlags, server *cluster.Server) *cluster.Bus {
	b := cluster.NewBus(cluster.BusOptions{Name: d.Name, InProcess: server, TLS: d.Certs.Client(), Log: d.Log})
	if c.natsURL != "" {
		b.SetServers([]string{c.natsURL})
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
func advertised(c *clusterFlags, host string) string {
	if c.advertise != "" {
		return string(c.advertise)
	}
	return host
}

// joinCluster starts gossip, which keeps trying to reach its seeds.
func joinCluster(d *process.Process, c *clusterFlags, bind, host string, self cluster.Member, onChange func([]cluster.Member)) (*cluster.Cluster, error) {
	o := cluster.Options{
		Self: self, Bind: net.JoinHostPort(address(bind), strconv.Itoa(c.gossipPort)), Join: c.join, Key: d.Certs.GossipKey(), OnChange: onChange, Log: d.Log,
	}
	if host != bind {
		o.Advertise = net.JoinHostPort(address(host), strconv.Itoa(c.gossipPort))
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
