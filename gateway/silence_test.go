package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const (
	silentStreams = 12
	silentTokens  = 200
	silentPace    = 50 * time.Millisecond // between two tokens
)

// A decode node that falls silent over open connections: how long streams pause, how
// many are resumed and how many nodes lose theirs.
func TestSilentNode(t *testing.T) {
	for name, c := range map[string]struct {
		nodes   int
		silence time.Duration // Options.NodeSilence
		step    time.Duration // one step of every node takes so long
		fault   func(b *bed)
		pause   time.Duration // at most
		lost    float64       // nodes
	}{
		"one of three":            {3, 0, 0, func(b *bed) { b.mute(time.Minute, "d2") }, 2150 * time.Millisecond, 1},
		"one of three, back soon": {3, 0, 0, func(b *bed) { b.mute(1500*time.Millisecond, "d2") }, 1600 * time.Millisecond, 0},
		"one of three, back":      {3, 0, 0, func(b *bed) { b.mute(4*time.Second, "d2") }, 2150 * time.Millisecond, 1},
		"one of three, 4 s":       {3, 4 * time.Second, 0, func(b *bed) { b.mute(time.Minute, "d2") }, 4150 * time.Millisecond, 1},
		"one of three, off":       {3, -1, 0, func(b *bed) { b.mute(time.Minute, "d2") }, 8 * time.Second, 0},
		"all":                     {3, 0, 0, func(b *bed) { b.mute(5*time.Second, "d1", "d2", "d3") }, 5100 * time.Millisecond, 0},
		"the only one":            {1, 0, 0, func(b *bed) { b.mute(20*time.Second, "d1") }, 20150 * time.Millisecond, 0},
		"steps of 20 s":           {3, 0, 20 * time.Second, func(*bed) {}, 20150 * time.Millisecond, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				t.Cleanup(func() { time.Sleep(2 * time.Minute) }) // the server's own ticker
				var steps atomic.Int64
				nodes := map[string]nodestest.Options{}
				for i := range c.nodes {
					nodes[fmt.Sprintf("d%d", i+1)] = nodestest.Options{Token: func(r *nodepb.Generate, position int) int32 {
						if steps.Add(1) == 20 {
							time.Sleep(c.step)
						}
						time.Sleep(silentPace)
						return ramble(r, position)
					}}
				}
				b := newBed(t, Options{NodeSilence: c.silence, Policy: "round_robin"}, nodes)
				var (
					streams sync.WaitGroup
					longest atomic.Int64
				)
				for i := range silentStreams {
					streams.Go(func() { b.paused(i, &longest) })
				}
				time.Sleep(time.Second)
				c.fault(b)
				streams.Wait()
				if got := time.Duration(longest.Load()); got > c.pause {
					t.Errorf("the longest pause is %v, want at most %v", got, c.pause)
				}
				if got := b.g.Meters.Counter(metrics.GatewayNodesLost, "silence").Get(); got != c.lost {
					t.Errorf("%g nodes lost their streams, want %g; log:\n%s", got, c.lost, b.log.String())
				}
				if got := b.g.Meters.Counter(metrics.GatewayResumes).Get(); (got > 0) != (c.lost > 0 || c.silence < 0) {
					t.Errorf("%g streams were resumed", got)
				}
				for i := range c.nodes { // all nodes serve again
					b.net.Silence(fmt.Sprintf("d%d", i+1), false)
				}
				b.until(func() bool { return b.g.native.Usable() == c.nodes })
				b.stop()
				synctest.Wait()
				for name, n := range b.nodes {
					if n.Running() > 0 {
						t.Errorf("%s still runs %d attempts", name, n.Running())
					}
				}
			})
		})
	}
}

// mute cuts nodes off for a while.
func (b *bed) mute(d time.Duration, nodes ...string) {
	for _, n := range nodes {
		b.net.Silence(n, true)
	}
	time.AfterFunc(d, func() {
		for _, n := range nodes {
			b.net.Silence(n, false)
		}
	})
}

// paused reads a stream to its end, wants its text and notes the longest pause between
// two events.
func (b *bed) paused(i int, longest *atomic.Int64) {
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", fmt.Sprintf(`{"prompt":"prompt %d","max_tokens":%d,"stream":true,"return_token_ids":true}`, i, silentTokens))
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		b.Errorf("stream %d: %v", i, err)
		return
	}
	var (
		got  []string
		body = bufio.NewReader(resp.Body)
	)
	for last := time.Now(); ; {
		line, err := body.ReadString('\n')
		if err == io.EOF || strings.HasPrefix(line, "data: [DONE]") {
			break
		}
		if err != nil {
			b.Errorf("stream %d: %v", i, err)
			return
		}
		if !strings.HasPrefix(line, "data: ") {
			continue
		}
		if _, ids, ok := strings.Cut(line, `"token_ids":[`); ok {
			ids, _, _ = strings.Cut(ids, "]")
			got = append(got, strings.Split(ids, ",")...)
		}
		for pause := int64(time.Since(last)); ; {
			if most := longest.Load(); pause <= most || longest.CompareAndSwap(most, pause) {
				break
			}
		}
		last = time.Now()
	}
	if len(got) != silentTokens {
		b.Errorf("stream %d: %d tokens, want %d", i, len(got), silentTokens)
	}
	for at, id := range got {
		if want := fmt.Sprint(lore[at%len(lore)]); id != want {
			b.Errorf("stream %d: token %d is %s, want %s", i, at, id, want)
			return
		}
	}
}
