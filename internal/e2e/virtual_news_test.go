//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// What nodes tell of their caches, and what the gateway's cache of messages holds,
// to the message and to the byte.

// meteredNews has nodes tell of their blocks where nobody hears it, and chats come
// again whose messages the gateway has kept.
func meteredNews(t *testing.T, ds []*engine.Loaded, seen *watched) {
	var messages tally // by node
	metered(t, ds, seen, "news that nobody hears", func(m *meterBed, _ *gateway.Options) {
		m.measured.blocks = func(addr string, events []kvcache.Event) {
			// A message removes and then stores: what is removed behind what was
			// stored begins another.
			for i, e := range events {
				if i == 0 || e.Kind != kvcache.Stored && events[i-1].Kind == kvcache.Stored {
					messages.add(addr)
				}
			}
		}
	}, func(m *meterBed) { m.unheard(&messages) })
	const end = "<|end|>"
	metered(t, ds, seen, "chats' messages", func(m *meterBed, _ *gateway.Options) {
		m.bundle.TokenizerJson = nodestest.Tokenizer([][2]string{{"a", "b"}}, end)
		m.bundle.ChatTemplate = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
	}, func(m *meterBed) { m.chats(end) })
}

// unheard counts what nodes tell while there is nobody who takes it.
func (m *meterBed) unheard(messages *tally) {
	const dropped, beats = "tandem:block_events_dropped_total", 2
	m.well(m.crowd(24, 120, 4)()...)
	same := func(n int) int { return n }
	count := func(more float64) (all float64) {
		for role, nodes := range map[byte][]*node{'D': m.nodes[:2], 'P': m.nodes[2:]} {
			sum, most := messages.of(nodes, same)
			if most == sum {
				m.errorf("%c: one node has told all of %g messages", role, sum)
			}
			m.is(role, dropped, "", sum+2*more)
			all += sum + 2*more
		}
		return all
	}
	m.shows("Dropped events and frames", 0, count(0))
	// Who has told something has nothing to say for the next five seconds, then says so, and again after ten.
	time.Sleep(22 * time.Second)
	m.shows("Dropped events and frames", 0, count(beats))
}

// chats asks twice for each of two messages.
func (m *meterBed) chats(end string) {
	const lookups, perEntry = "tandem:tokenizer_cache_lookups_total", 192 // bytes
	bytes := 0
	for i, text := range []string{strings.Repeat("Z", 150), strings.Repeat("ab", 70)} {
		var told struct{ Usage tokenUsage }
		for range 2 {
			a := m.post(context.Background(), "/v1/chat/completions", fmt.Sprintf(`{"max_tokens":1,"messages":[{"role":"user","content":%q}]}`, text), "")
			m.well(a)
			m.must(json.Unmarshal([]byte(a.text), &told))
		}
		// The message's text, four bytes for each of its tokens, of which the client is told, and what it takes besides.
		bytes += len(text+end) + 4*told.Usage.Prompt + perEntry
		if want := []int{151, 71}[i]; told.Usage.Prompt != want {
			m.errorf("%q has %d tokens, want %d", text, told.Usage.Prompt, want)
		}
		m.is('G', "tandem:tokenizer_cache_bytes", "", float64(bytes))
		m.is('G', lookups, `"miss"`, float64(i+1))
		m.is('G', lookups, `"hit"`, float64(i+1))
	}
	m.shows("Tokenizer cache: hits", 0, 0.5)
}
