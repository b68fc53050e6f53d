package httpserver

import (
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc"
)

// The server's own bound on reading a request does not blind the watch.
func TestWatchOutlastsReadDeadline(t *testing.T) {
	n := rpc.NewNetwork()
	raw, err := n.Listen("x")
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	far, err := n.Dial(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	nc, err := newListener(raw, 0, Counters{}, nil).Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	w := nc.(*Conn).Watch(nil)
	defer w.Stop()
	select {
	case <-w.done:
		t.Fatal("the watch ended")
	case <-time.After(20 * time.Millisecond):
	}
	far.Close()
	select {
	case <-w.Gone:
	case <-time.After(10 * time.Second):
		t.Fatal("the client's going was not seen")
	}
}
