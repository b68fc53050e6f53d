package rpc

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// AdapterHost loads a node's low-rank adapters; *engine.Engine is one.
type AdapterHost interface {
	LoadAdapter(name, path string, replace bool) (digest uint64, rank int, err error)
	UnloadAdapter(name string) error
	EachAdapter(f func(name string, digest uint64, rank int))
}

// maxAdapterWork bounds the loads that run at once on a node: each reads files.
const maxAdapterWork = 4

// AdapterDesk answers gateways' LoadAdapter and UnloadAdapter frames, off the
// reading goroutine.
type AdapterDesk struct {
	Host    AdapterHost
	Unknown error  // the host's error for an adapter that is not loaded
	Changed func() // called after a change, before its answer; may be nil

	busy chan struct{} // capacity maxAdapterWork
}

// NewAdapterDesk returns an AdapterDesk without work.
func NewAdapterDesk(host AdapterHost, unknown error, changed func()) *AdapterDesk {
	return &AdapterDesk{Host: host, Unknown: unknown, Changed: changed, busy: make(chan struct{}, maxAdapterWork)}
}

// Frame handles either frame and answers it on its stream.
func (d *AdapterDesk) Frame(c *Conn, t Type, stream uint64, payload []byte) {
	payload = append([]byte(nil), payload...) // valid during this call only
	select {
	case d.busy <- struct{}{}:
		go func() {
			d.answer(c, stream, d.work(t, payload))
			<-d.busy
		}()
	default:
		d.answer(c, stream, &nodepb.AdapterDone{Code: nodepb.Code_CODE_OVERLOADED, Message: fmt.Sprintf("%d adapters are being loaded already", maxAdapterWork)})
	}
}

// answer sends the result. A gateway that gets no answer asks again.
func (d *AdapterDesk) answer(c *Conn, stream uint64, m *nodepb.AdapterDone) {
	_ = c.Send(FrameAdapterDone, stream, m)
}

func (d *AdapterDesk) work(t Type, payload []byte) *nodepb.AdapterDone {
	load, unload, done := new(nodepb.LoadAdapter), new(nodepb.UnloadAdapter), new(nodepb.AdapterDone)
	var err error
	if t == FrameLoadAdapter {
		if err = proto.Unmarshal(payload, load); err == nil {
			done.Adapter = &nodepb.Adapter{Name: load.Name}
			var rank int
			done.Adapter.Digest, rank, err = d.Host.LoadAdapter(load.Name, load.Path, load.Replace)
			done.Adapter.Rank = uint32(rank)
		}
	} else if err = proto.Unmarshal(payload, unload); err == nil {
		err = d.Host.UnloadAdapter(unload.Name)
	}
	if err != nil {
		done = &nodepb.AdapterDone{Code: nodepb.Code_CODE_INVALID, Message: err.Error()}
		if errors.Is(err, d.Unknown) {
			done.Code = nodepb.Code_CODE_NOT_FOUND
		}
	} else if d.Changed != nil {
		d.Changed()
	}
	return done
}

// List returns the loaded adapters, for heartbeats.
func (d *AdapterDesk) List() (all []*nodepb.Adapter) {
	d.Host.EachAdapter(func(name string, digest uint64, rank int) {
		all = append(all, &nodepb.Adapter{Name: name, Digest: digest, Rank: uint32(rank)})
	})
	return all
}
