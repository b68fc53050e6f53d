package node

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// maxAdapterWork bounds the loads that run at once on a node: each reads files.
const maxAdapterWork = 4

// adapterFrame answers a gateway's LoadAdapter or UnloadAdapter frame on its stream, off the
// reading goroutine. A gateway that gets no answer asks again.
func (b *Base) adapterFrame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	request, err := rpc.Decode(t, payload) // the payload is valid during this call only
	select {
	case b.adapterWork <- struct{}{}:
		go func() {
			done := new(nodepb.AdapterDone)
			switch m := request.(type) {
			case *nodepb.LoadAdapter:
				var rank int
				done.Adapter = &nodepb.Adapter{Name: m.Name}
				done.Adapter.Digest, rank, err = b.o.Engine.LoadAdapter(m.Name, m.Path, m.Replace)
				done.Adapter.Rank = uint32(rank)
			case *nodepb.UnloadAdapter:
				err = b.o.Engine.UnloadAdapter(m.Name)
			}
			if err != nil {
				done = &nodepb.AdapterDone{Code: nodepb.Code_CODE_INVALID, Message: err.Error()}
				if errors.Is(err, engine.ErrAdapter) {
					done.Code = nodepb.Code_CODE_NOT_FOUND
				}
			}
			_ = c.Send(rpc.FrameAdapterDone, stream, done)
			<-b.adapterWork
		}()
	default:
		_ = c.Send(rpc.FrameAdapterDone, stream, &nodepb.AdapterDone{Code: nodepb.Code_CODE_OVERLOADED, Message: fmt.Sprintf("%d adapters are being loaded already", maxAdapterWork)})
	}
}

// adapterList returns the loaded adapters, for heartbeats.
func (b *Base) adapterList() (all []*nodepb.Adapter) {
	b.o.Engine.EachAdapter(func(name string, digest uint64, rank int) {
		all = append(all, &nodepb.Adapter{Name: name, Digest: digest, Rank: uint32(rank)})
	})
	return all
}
