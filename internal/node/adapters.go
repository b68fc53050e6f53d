package node

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// maxAdapterWork bounds the loads that run at once on a node, because each reads files.
const maxAdapterWork = 4

// adapter answers a gateway's LoadAdapter or UnloadAdapter on its stream, off the reading
// goroutine. A gateway that gets no answer asks again.
func (b *Base) adapter(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	m, err := rpc.Decode(t, payload)
	select {
	case b.busy <- struct{}{}:
		go func() {
			_ = c.Send(rpc.FrameAdapterDone, stream, b.change(m, err))
			<-b.busy
		}()
	default:
		_ = c.Send(rpc.FrameAdapterDone, stream, &nodepb.AdapterDone{Code: nodepb.Code_CODE_OVERLOADED, Message: fmt.Sprintf("%d adapters are being loaded already", maxAdapterWork)})
	}
}

// change loads or removes an adapter. err is why its message does not parse.
func (b *Base) change(m proto.Message, err error) *nodepb.AdapterDone {
	done := new(nodepb.AdapterDone)
	switch m := m.(type) {
	case *nodepb.LoadAdapter:
		digest, rank, failed := b.o.Engine.LoadAdapter(m.Name, m.Path, m.Replace)
		done.Adapter, err = &nodepb.Adapter{Name: m.Name, Digest: digest, Rank: uint32(rank)}, failed
	case *nodepb.UnloadAdapter:
		err = b.o.Engine.UnloadAdapter(m.Name)
	}
	switch {
	case errors.Is(err, engine.ErrAdapter):
		return &nodepb.AdapterDone{Code: nodepb.Code_CODE_NOT_FOUND, Message: err.Error()}
	case err != nil:
		return &nodepb.AdapterDone{Code: nodepb.Code_CODE_INVALID, Message: err.Error()}
	}
	b.Heartbeat() // gateways learn of the change before its answer
	return done
}

// adapters returns the loaded adapters, for heartbeats.
func (b *Base) adapters() (all []*nodepb.Adapter) {
	b.o.Engine.EachAdapter(func(name string, digest uint64, rank int) {
		all = append(all, &nodepb.Adapter{Name: name, Digest: digest, Rank: uint32(rank)})
	})
	return all
}
