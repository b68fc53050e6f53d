package kvcache

import (
	"slices"
	"testing"
)

// Named units are found like those of tokens: by equal names after equal names, and with the hashes
// of AppendNamed.
func TestNamedUnits(t *testing.T) {
	p, err := NewPool(Config{Blocks: 8, BlockTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	chain := func(names ...Hash) *Chain {
		c := p.NewChain(5, 16)
		c.Name(names[:1]...)
		c.Name(names[1:]...)
		p.Extend(&c, make([]int32, 4*len(names))) // has a link for each
		return &c
	}
	c := chain(1, 2, 3)
	for place := range 3 {
		id, _ := p.Alloc()
		p.Store(id, 0, c, place)
	}
	for _, test := range []struct {
		names []Hash
		want  int
	}{{[]Hash{1, 2, 3, 4}, 12}, {[]Hash{1, 2, 4}, 8}, {[]Hash{2, 2, 3}, 0}, {[]Hash{1, 3, 3}, 4}} {
		if n := p.Match(chain(test.names...), 16); n != test.want {
			t.Errorf("%v: %d tokens are cached, want %d", test.names, n, test.want)
		}
	}
	events, _ := p.Events(nil)
	var stored []Hash
	for _, e := range events {
		stored = append(stored, e.Hash)
	}
	if want := AppendNamed(nil, 5, 1, 2, 3); !slices.Equal(stored, want) {
		t.Errorf("stored %x, want %x", stored, want)
	}
}

// The ring of events grows with its use up to MaxEvents, in order, and then drops the oldest.
func TestEventRingGrows(t *testing.T) {
	r := eventRing{most: 200}
	p := Pool{events: r}
	next, expected := Hash(0), Hash(0)
	push := func(n int) {
		for range n {
			p.events.push(Event{Hash: next})
			next++
		}
	}
	drain := func(want int, wantGap bool) {
		t.Helper()
		events, gap := p.Events(nil)
		if len(events) != want || gap != wantGap {
			t.Fatalf("%d events, gap %v, want %d, %v", len(events), gap, want, wantGap)
		}
		expected = next - Hash(want)
		for _, e := range events {
			if e.Hash != expected {
				t.Fatalf("event %d, want %d", e.Hash, expected)
			}
			expected++
		}
	}
	push(40)
	drain(40, false)
	push(60)
	push(30)
	drain(90, false)
	push(200)
	drain(200, false)
	push(203)
	drain(200, true)
	if len(p.events.buf) != 200 {
		t.Errorf("the ring has %d places", len(p.events.buf))
	}
}
