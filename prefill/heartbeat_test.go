package prefill

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// gatewayPeer is a connection of a gateway, which keeps the heartbeats.
type gatewayPeer struct {
	mu    sync.Mutex
	beats []*nodepb.Stats
}

func (*gatewayPeer) Closed(*rpc.Conn, error) {}

func (g *gatewayPeer) Frame(_ *rpc.Conn, t rpc.Type, _ uint64, payload []byte) {
	if t != rpc.FrameStats {
		return
	}
	m := new(nodepb.Stats)
	if err := proto.Unmarshal(payload, m); err != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.beats = append(g.beats, m)
}

// take returns the heartbeats since the last call.
func (g *gatewayPeer) take() []*nodepb.Stats {
	time.Sleep(10 * time.Millisecond) // until they have come
	g.mu.Lock()
	defer g.mu.Unlock()
	beats := g.beats
	g.beats = nil
	return beats
}

// Each gateway gets a heartbeat when it connects, one each half second, and one as
// soon as the node drains. Decode nodes get none.
func TestHeartbeatsToGateways(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		var gateways [2]gatewayPeer
		for i := range gateways {
			pool := rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: "gateway", Role: "gateway"}, Dial: b.net.Dial}, &gateways[i])
			defer pool.Close()
			_, err := pool.Get(context.Background(), "prefill")
			b.must(err)
			if beats := gateways[i].take(); len(beats) == 0 || beats[0].Draining || beats[0].BlocksTotal != 32 {
				t.Errorf("heartbeats to gateway %d as it connects: %v, want one with the node's 32 blocks", i, beats)
			}
		}
		for i := range gateways {
			gateways[i].take()
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.n.Heartbeats(ctx)
		}()
		time.Sleep(5 * time.Second)
		cancel()
		<-ended
		for i := range gateways {
			if beats := gateways[i].take(); len(beats) < 9 || len(beats) > 12 {
				t.Errorf("%d heartbeats to gateway %d in 5 s, want one each 500 ms", len(beats), i)
			}
		}
		b.n.StartDrain()
		for i := range gateways {
			if beats := gateways[i].take(); len(beats) != 1 || !beats[0].Draining {
				t.Errorf("heartbeats to gateway %d as the node drains: %v, want one that says so", i, beats)
			}
		}
	})
}
