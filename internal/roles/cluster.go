package roles

import (
	"net"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/process"
)

// newBus connects to NATS: to the server in this process, to --nats-url, or to the gateways'
// servers once gossip has their addresses.
func newBus(d *process.Process, c *clusterFlags, server *cluster.Server) *cluster.Bus {
	b := cluster.NewBus(cluster.BusOptions{Name: d.Name, InProcess: server, TLS: d.Certs.Client(), Log: d.Log})
	if c.natsURL != "" {
		b.SetServers([]string{c.natsURL})
	}
	d.OnEnd(b.Close)
	return b
}

// addresses returns one kind of address of the members that have it.
func addresses(ms []cluster.Member, of func(cluster.Member) string) (as []string) {
	for _, m := range ms {
		if a := of(m); a != "" {
			as = append(as, a)
		}
	}
	return as
}

// joinCluster starts gossip, which retries its seeds.
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
		if err := cl.Leave(leaveTimeout); err != nil { // the other members notice by themselves
			d.Log.Debug("left without a confirmation", "err", err)
		}
	})
	return cl, nil
}

// address returns the address that gossip, which accepts addresses only, binds for a host.
func address(host string) string {
	if host == "localhost" {
		return "127.0.0.1"
	}
	return host
}

// leaveTimeout bounds the announcement that a process leaves.
const leaveTimeout = 500 * time.Millisecond
