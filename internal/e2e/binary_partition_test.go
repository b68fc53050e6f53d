//go:build linux

package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"
)

// Members are cut off from each other while clients stream: one way, the other
// way, both ways, from one and from all, for longer than anyone waits. No stream
// fails, ends early or is altered, and with the network whole again all nodes are
// used.
func TestBinaryPartition(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	b := newBattle(t, 23, ranks{address: func(last int) string { return fmt.Sprintf("10.77.0.%d", last) }, place: w.place})
	g, p0, p1, d0, d1, d2 := b.gateways[0], b.nodes[0], b.nodes[1], b.nodes[2], b.nodes[3], b.nodes[4]
	phases := [][][2]*member{
		{{g, d0}, {p0, d1}, {d1, p1}},                             // d0 does not hear; p0's KV does not arrive; p1 is not asked
		{{d0, g}, {g, d1}, {d1, g}, {p1, d2}, {d2, p1}, {d2, p0}}, // d0 is not heard; d1 is cut off; d2 must prefill by itself
	}
	if os.Getenv("TANDEM_SOAK") != "" {
		phases = b.severed(soakSeed(t, rand.Uint64()), 40)
	}
	resumes := b.disturb(func() {
		for _, cuts := range phases {
			time.Sleep(500 * time.Millisecond) // for streams to be under way
			var told []string
			for _, c := range cuts {
				w.sever(c[0], c[1])
				told = append(told, c[0].name+" to "+c[1].name)
			}
			t.Logf("cut: %s", strings.Join(told, ", "))
			time.Sleep(8 * time.Second) // nodes give up on each other after 6
			w.lab.Mend()
			b.whole(b.gateways...)
			if t.Failed() {
				return
			}
		}
	})
	if resumes == 0 {
		t.Error("no stream was resumed: the cuts have met nobody in the middle of one")
	}
	b.idle(stopBound)
}

// severed draws cuts that leave the gateway one decode node.
func (b *battle) severed(seed uint64, n int) (phases [][][2]*member) {
	rng := rand.New(rand.NewPCG(seed, 5))
	all := b.all()
	for range n {
		spared := b.nodes[ofDecode[rng.IntN(len(ofDecode))]]
		var cuts [][2]*member
		for _, from := range all {
			for _, to := range all {
				if from != to && rng.IntN(5) == 0 && !(from.role == "gateway" && to == spared) && !(to.role == "gateway" && from == spared) {
					cuts = append(cuts, [2]*member{from, to})
				}
			}
		}
		phases = append(phases, cuts)
	}
	return phases
}
