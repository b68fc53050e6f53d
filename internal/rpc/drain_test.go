package rpc

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A drain's end comes at its timeout, unless something else was asked for since or the process leaves.
func TestDraining(t *testing.T) {
	ask := func(ms uint64) *nodepb.Drain { return &nodepb.Drain{TimeoutMs: ms} }
	for name, c := range map[string]struct {
		do    func(d *Draining, ask func(*nodepb.Drain) bool)
		on    bool
		after time.Duration // of the end; 0: none
	}{
		"timeout":       {do: func(d *Draining, do func(*nodepb.Drain) bool) { do(ask(1000)) }, on: true, after: time.Second},
		"no timeout":    {do: func(d *Draining, do func(*nodepb.Drain) bool) { do(ask(0)) }, on: true},
		"taken back":    {do: func(d *Draining, do func(*nodepb.Drain) bool) { do(ask(1000)); do(&nodepb.Drain{Cancel: true}) }},
		"asked anew":    {do: func(d *Draining, do func(*nodepb.Drain) bool) { do(ask(1000)); do(ask(3000)) }, on: true, after: 3 * time.Second},
		"leaves":        {do: func(d *Draining, do func(*nodepb.Drain) bool) { do(ask(1000)); d.Leave() }, on: true},
		"leaves before": {do: func(d *Draining, do func(*nodepb.Drain) bool) { d.Leave(); do(&nodepb.Drain{Cancel: true}) }, on: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var d Draining
				start, ended := time.Now(), time.Duration(0)
				mu.Lock()
				leaving := false
				c.do(&d, func(m *nodepb.Drain) bool {
					leaving = d.leaving
					did := d.Ask(m, &mu, func() { ended = time.Since(start) })
					if did == leaving {
						t.Errorf("asked while leaving is %v: did %v", leaving, did)
					}
					return did
				})
				mu.Unlock()
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if d.On() != c.on || ended != c.after {
					t.Errorf("on %v, ended after %v; want %v, %v", d.On(), ended, c.on, c.after)
				}
			})
		})
	}
}
