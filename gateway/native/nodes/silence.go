package nodes

import (
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/gateway/liveness"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// watchSilence closes the connections of decode nodes that liveness.Decider considers stopped,
// until the fleet closes. Their streams move to other nodes.
func (f *Fleet) watchSilence() {
	d := liveness.New(f.o.NodeSilence)
	var (
		nodes []liveness.Node
		links []*link
		held  bool // logged once for each period in which nodes are held
	)
	next := time.NewTimer(d.Next())
	defer next.Stop()
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-next.C:
		}
		now := time.Now()
		nodes, links = nodes[:0], links[:0]
		for _, n := range f.Now().Decode {
			l := n.link.Load()
			if l == nil || !l.conn.Open() {
				continue
			}
			at := l.conn.ReceivedAt()
			nodes = append(nodes, liveness.Node{Name: n.Name, ReadAt: at, Unread: now.Sub(at) > liveness.Interval && l.conn.Unread()})
			links = append(links, l)
		}
		holding := 0
		for i, verdict := range d.Observe(now, nodes) {
			l, name := links[i], nodes[i].Name
			switch verdict {
			case liveness.Ask:
				l.conn.Ping()
			case liveness.Held:
				holding++
			case liveness.Lost:
				silent := d.Silence(name).Round(time.Millisecond)
				f.o.Meters.Counter(metrics.GatewayNodesLost, "silence").Inc()
				f.o.Log.Warn("silent node loses its streams", "node", name, "silence", silent, "streams", l.count())
				l.conn.GiveUp(fmt.Errorf("%w: no frame from %s for %v", rpc.ErrSilent, name, silent))
			}
		}
		if holding > 0 && !held {
			f.o.Log.Warn("silent nodes keep their streams", "nodes", holding, "connected", len(nodes))
		}
		held = holding > 0
		next.Reset(d.Next())
	}
}
