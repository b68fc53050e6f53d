package native

import (
	"slices"
	"sync"

	"github.com/tandem-serving/tandem/internal/cluster"
)

// Hear makes the fleet listen to what nodes cache, so that prompts go where their prefix
// is. It is called at most once.
func (fl *Fleet) Hear(bus *cluster.Bus) {
	fl.news.mu.Lock()
	fl.bus = bus
	fl.news.mu.Unlock()
	var names []string
	for _, m := range fl.Models.All() {
		names = append(names, m.bundle.Model)
	}
	fl.subscribe(names)
}

// news are the subscriptions to what the models' nodes cache.
type news struct {
	mu sync.Mutex
	of map[string]*cluster.Subscription // by the model's own name
}

// subscribe follows the news of the models' nodes; those of others are let go.
func (fl *Fleet) subscribe(names []string) {
	n := &fl.news
	n.mu.Lock()
	defer n.mu.Unlock()
	if fl.bus == nil {
		return
	}
	if n.of == nil {
		n.of = map[string]*cluster.Subscription{}
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

func (n *news) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, s := range n.of {
		s.Close()
		delete(n.of, name)
	}
}

// left has the news of a node that is gone forgotten, too: when it comes back, it
// is asked for everything.
func (fl *Fleet) left(id string) {
	fl.news.mu.Lock()
	defer fl.news.mu.Unlock()
	for _, s := range fl.news.of {
		s.Drop(id)
	}
}
