package node

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A drain's end comes at its timeout, unless something else was asked for since or the process leaves.
func TestDraining(t *testing.T) {
	ask := func(ms uint64) *nodepb.Drain { return &nodepb.Drain{TimeoutMs: ms} }
	for name, c := range map[string]struct {
		do    func(b *Base, ask func(*nodepb.Drain) bool)
		on    bool
		after time.Duration // of the end; 0: none
	}{
		"timeout":       {do: func(b *Base, do func(*nodepb.Drain) bool) { do(ask(1000)) }, on: true, after: time.Second},
		"no timeout":    {do: func(b *Base, do func(*nodepb.Drain) bool) { do(ask(0)) }, on: true},
		"taken back":    {do: func(b *Base, do func(*nodepb.Drain) bool) { do(ask(1000)); do(&nodepb.Drain{Cancel: true}) }},
		"asked anew":    {do: func(b *Base, do func(*nodepb.Drain) bool) { do(ask(1000)); do(ask(3000)) }, on: true, after: 3 * time.Second},
		"leaves":        {do: func(b *Base, do func(*nodepb.Drain) bool) { do(ask(1000)); b.leave() }, on: true},
		"leaves before": {do: func(b *Base, do func(*nodepb.Drain) bool) { b.leave(); do(&nodepb.Drain{Cancel: true}) }, on: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start, ended := time.Now(), time.Duration(0)
				b := New(Options{Lock: new(sync.Mutex), Log: slog.New(slog.DiscardHandler), End: func() { ended = time.Since(start) }})
				c.do(b, func(m *nodepb.Drain) bool {
					payload, err := proto.Marshal(m)
					if err != nil {
						t.Fatal(err)
					}
					leaving := b.drain.leaving
					did := b.asked(payload)
					if did == leaving {
						t.Errorf("asked while leaving is %v: did %v", leaving, did)
					}
					return did
				})
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if b.Draining() != c.on || ended != c.after {
					t.Errorf("on %v, ended after %v; want %v, %v", b.Draining(), ended, c.on, c.after)
				}
			})
		})
	}
}

// Whoever waits for a node to be empty returns when it is, or ends what is left when time is up.
func TestDrainingWait(t *testing.T) {
	for name, c := range map[string]struct {
		left        int
		done, bound time.Duration // when the last work ends by itself, and when waiting does
		returns     time.Duration
		ended       bool
	}{
		"empty":      {bound: time.Minute},
		"work ends":  {left: 3, done: 2 * time.Second, bound: time.Minute, returns: 2 * time.Second},
		"time is up": {left: 3, done: time.Hour, bound: time.Minute, returns: time.Minute, ended: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				left, ended := c.left, false
				b := New(Options{Lock: &mu, Running: func() int { return left }, End: func() {
					mu.Lock()
					defer mu.Unlock()
					ended = true
				}})
				ctx, cancel := context.WithTimeout(t.Context(), c.bound)
				defer cancel()
				work := time.AfterFunc(c.done, func() {
					mu.Lock()
					defer mu.Unlock()
					for left > 0 {
						left--
						b.Ended()
					}
				})
				defer work.Stop()
				start := time.Now()
				b.wait(ctx)
				if took := time.Since(start); took != c.returns || ended != c.ended {
					t.Errorf("returned after %v, ended %v; want %v, %v", took, ended, c.returns, c.ended)
				}
			})
		})
	}
}

// What a gateway sends is taken, or said not to be.
func TestDrainingAsked(t *testing.T) {
	b := New(Options{Lock: new(sync.Mutex), Log: slog.New(slog.DiscardHandler)})
	payload, err := proto.Marshal(&nodepb.Drain{})
	if err != nil {
		t.Fatal(err)
	}
	if b.asked([]byte{0xff}) || b.Draining() {
		t.Error("what does not parse was taken")
	}
	if !b.asked(payload) || !b.Draining() {
		t.Error("a drain was not taken")
	}
	if b.leave(); b.asked(payload) {
		t.Error("a node that leaves was asked")
	}
}
