package node

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A node whose load stays tells of itself once in each interval; one whose load
// changes does five times as often, with what it is then.
func TestBeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		var mu sync.Mutex
		busy, queued := false, uint32(0)
		var told []uint32
		go beat(ctx, func() *nodepb.Stats {
			mu.Lock()
			defer mu.Unlock()
			if busy {
				queued++
			}
			return &nodepb.Stats{QueuedTokens: queued, Steps: uint64(len(told))}
		}, func(m *nodepb.Stats) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, m.QueuedTokens)
		})
		time.Sleep(10*statsInterval + statsInterval/100)
		synctest.Wait()
		mu.Lock()
		if len(told) != 10 {
			t.Errorf("an idle node told of itself %d times in 10 intervals", len(told))
		}
		told, busy = nil, true
		mu.Unlock()
		time.Sleep(10 * statsInterval)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if len(told) != 50 || told[0] != 1 || told[49] != 50 {
			t.Errorf("a busy node told of itself %d times in 10 intervals: %v", len(told), told)
		}
		cancel()
	})
}
