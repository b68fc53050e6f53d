package prefill

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A cancel that comes while the push still looks for its reader is no failure.
func TestCancelWhileConnecting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		b.dial.Store(int64(3 * time.Second))
		a := b.dec.ask(tokens(30, 1), nil)
		a.grant(0, 0)
		time.Sleep(time.Second)
		a.send(rpc.FrameCancel, &nodepb.Cancel{})
		a.revoke()
		b.idle()
		if c := b.n.Counters(); c.Cancelled != 1 || a.end != nil {
			t.Errorf("%+v, %v", c, a.end)
		}
		b.dial.Store(0)
		time.Sleep(5 * time.Second)
		again := b.dec.ask(tokens(30, 1), nil)
		again.grant(0, 0)
		again.arrived(30)
	})
}
