package cluster

import (
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// cache is a node's prefix cache that tells of itself, as an engine does.
type cache struct {
	mu   sync.Mutex
	has  map[kvcache.Hash]bool
	news *Publisher
}

func (c *cache) change(kind kvcache.EventKind, h kvcache.Hash, gap bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.has[h] = kind == kvcache.Stored; !gap { // else it is lost on the way
		c.news.Publish([]kvcache.Event{{Kind: kind, Hash: h}}, false)
	}
}

func (c *cache) all() {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []kvcache.Event
	for h, in := range c.has {
		if in {
			all = append(all, kvcache.Event{Kind: kvcache.Stored, Hash: h})
		}
	}
	c.news.Publish(all, true)
}

// known is a Subscriber that keeps what it is told.
type known struct {
	mu  sync.Mutex
	has map[uint64]bool
}

func (k *known) Blocks(e BlockEvent) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range e.Removed {
		delete(k.has, h)
	}
	for _, s := range e.Stored {
		k.has[s.Hash] = true
	}
}

func (k *known) Forget(string, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.has)
}

func (k *known) is(c *cache) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	n := 0
	for h, in := range c.has {
		if in {
			n++
		}
		if in != k.has[uint64(h)] {
			return false
		}
	}
	return n == len(k.has)
}

// A gateway that comes late, and one that has missed messages, ask and then know
// all that a node holds.
func TestBlocksArePublishedAgain(t *testing.T) {
	s := startServer(t, nil, "gateway", "127.0.0.1:0", "")
	node := bus(t, nil, s.Addr())
	c := &cache{has: map[kvcache.Hash]bool{}}
	var err error
	if c.news, err = node.Publisher("m", "d1"); err != nil {
		t.Fatal(err)
	}
	c.news.Answer(c.all)
	gateway := bus(t, nil, s.Addr())
	first := &known{has: map[uint64]bool{}}
	gateway.Subscribe("m", first)
	eventually(t, "both are connected", func() bool { return node.Connected() && gateway.Connected() })
	next := kvcache.Hash(1)
	looks := 0
	store := func() { // now and then: what is on its way is not yet known
		if looks++; looks%40 == 1 {
			c.change(kvcache.Stored, next, false)
			next++
		}
	}
	eventually(t, "the first gateway knows what is cached", func() bool { store(); return first.is(c) })
	for range 5000 { // more than one message holds
		c.change(kvcache.Stored, next, false)
		next++
	}
	second := &known{has: map[uint64]bool{}}
	gateway.Subscribe("m", second)
	c.change(kvcache.Removed, 1, false)
	eventually(t, "a gateway that comes late knows all", func() bool { store(); return second.is(c) && first.is(c) })

	// A message is lost: the node drops it where its queue is full.
	c.news.mu.Lock()
	c.news.seq++
	c.news.mu.Unlock()
	c.change(kvcache.Stored, next, true)
	next++
	eventually(t, "gateways that have missed something know all", func() bool { store(); return second.is(c) && first.is(c) })
}
