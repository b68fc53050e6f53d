package e2e

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	members "github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// gossip is the membership of a virtual cluster as it really spreads, over a
// network that loses packets: the gateway learns late that a node has come, and
// later still that one has gone without a word.
type gossip struct {
	v   *virtual
	net *members.Network

	mu    sync.Mutex
	by    map[string]*members.Cluster // by the node's address
	lives map[string]int              // starts of each, which make its ID
}

func newGossip(v *virtual) *gossip {
	return &gossip{v: v, net: members.NewNetwork(v.seed, 0.02), by: map[string]*members.Cluster{}, lives: map[string]int{}}
}

// at is where a node gossips.
func (g *gossip) at(addr string) string {
	return map[string]string{"gw": "10.0.0.1:7946", "d0": "10.0.0.2:7946", "d1": "10.0.0.3:7946", "p0": "10.0.0.4:7946", "p1": "10.0.0.5:7946"}[addr]
}

// join has a node take part.
func (g *gossip) join(addr, role string, onChange func([]members.Member)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	tr, err := g.net.Transport(g.at(addr))
	g.v.must(err)
	g.lives[addr]++
	o := members.Options{
		Self: members.Member{
			ID: fmt.Sprintf("%s-%d", addr, g.lives[addr]), Role: role, RPC: addr, Model: "tiny", Fingerprint: g.v.bundle.Fingerprint,
			Class: g.v.bundle.NumericsClass, Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true,
		},
		Key: bytes.Repeat([]byte{9}, 32), Transport: tr, OnChange: onChange,
	}
	if addr != "gw" {
		o.Join = []string{g.at("gw")}
	}
	g.by[addr], err = members.New(o)
	g.v.must(err)
}

// hear follows a node's starts and ends; it ends without a word.
func (g *gossip) hear(addr string, up bool) {
	if up {
		g.join(addr, roleOf(addr), nil)
		return
	}
	g.mu.Lock()
	c := g.by[addr]
	delete(g.by, addr)
	g.mu.Unlock()
	g.v.must(c.Close())
}

// close ends what is left.
func (g *gossip) close() {
	for _, c := range g.by {
		g.v.must(c.Close())
	}
}

// told brings the list to the gateway.
func (g *gossip) told(ms []members.Member) {
	var us []nodes.Member
	for _, m := range ms {
		if m.Role != "gateway" && m.Mismatch == "" {
			us = append(us, nodes.Member{ID: m.ID, Role: m.Role, RPC: m.RPC, Model: m.Model, Fingerprint: m.Fingerprint, Class: m.Class, Ready: m.Ready, Draining: m.Draining})
		}
	}
	g.v.g.SetMembers(us)
}

// roleOf is the role of a node by its address.
func roleOf(addr string) string { return map[byte]string{'d': "decode", 'p': "prefill"}[addr[0]] }
