package cluster

import (
	"strings"
	"testing"
)

// A message of a topic reaches listeners at other servers, also one that listened before there was a
// connection. Without a server, or too long, it is lost.
func TestTopic(t *testing.T) {
	m := material(t)
	a := startServer(t, m, "gateway-a", "127.0.0.1:0", "127.0.0.1:0")
	b := startServer(t, m, "gateway-b", "127.0.0.1:0", "127.0.0.1:0")
	for _, s := range []*Server{a, b} {
		if err := s.SetRoutes([]string{a.RouteAddr(), b.RouteAddr()}); err != nil {
			t.Fatal(err)
		}
	}
	from, to := NewBus(BusOptions{InProcess: a}), NewBus(BusOptions{InProcess: b})
	t.Cleanup(from.Close)
	t.Cleanup(to.Close)
	var h, other heard
	to.Listen("demand", func(m []byte) { h.add(string(m)) })
	to.Listen("else", func(m []byte) { other.add(string(m)) })
	eventually(t, "the message arrives", func() bool {
		from.Send("demand", []byte("hello"))
		return h.last() == "hello"
	})
	if from.Send("demand", []byte(strings.Repeat("x", maxTopicMessage+1))) {
		t.Error("a message that is too long is sent")
	}
	if err := from.conn.Load().Publish(topicSubject("demand"), []byte(strings.Repeat("x", maxTopicMessage+1))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a later message arrives", func() bool {
		from.Send("demand", []byte("later"))
		return h.last() == "later"
	})
	if h.has(strings.Repeat("x", maxTopicMessage+1)) || other.last() != "" {
		t.Errorf("a listener has a message that is too long, or of another topic: %q", other.last())
	}
	if alone := bus(t, m); alone.Send("demand", nil) {
		t.Error("a message is sent without a server")
	}
}
