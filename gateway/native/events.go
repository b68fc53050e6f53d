package native

import (
	"slices"
	"sync"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// FollowEvents subscribes to the block events of nodes, so that prompts are routed to cached
// prefixes. It is called at most once.
func (fl *Fleet) FollowEvents(bus *cluster.Bus) {
	fl.events.mu.Lock()
	fl.bus = bus
	fl.events.mu.Unlock()
	fl.subscribe(fl.Nodes.Now(), fl.Models.All())
}

// subscriptions are those to block events of the present models.
type subscriptions struct {
	mu sync.Mutex
	of map[string]*cluster.Subscription // by the name that nodes announce
}

// subscribe subscribes to the block events of the models, under all names that nodes announce, and
// to no others.
func (fl *Fleet) subscribe(fleet *nodes.Snapshot, models []*Model) {
	var names []string
	for _, m := range models {
		_, events := fleet.Names(m.Fingerprint, m.bundle.Model)
		names = append(names, events...)
	}
	n := &fl.events
	n.mu.Lock()
	defer n.mu.Unlock()
	if fl.bus == nil {
		return
	}
	for name, s := range n.of {
		if !slices.Contains(names, name) {
			s.Close()
			delete(n.of, name)
		}
	}
	for _, name := range names {
		if n.of[name] == nil {
			n.of[name] = fl.bus.Subscribe(name, fl.Blocks)
		}
	}
}

func (n *subscriptions) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, s := range n.of {
		s.Close()
		delete(n.of, name)
	}
}

// left drops the event state of a node that has left. When the node returns, it is asked for all
// its blocks.
func (fl *Fleet) left(id string) {
	fl.events.mu.Lock()
	defer fl.events.mu.Unlock()
	for _, s := range fl.events.of {
		s.Drop(id)
	}
}
