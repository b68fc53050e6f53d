package nodes

import (
	"testing"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"google.golang.org/protobuf/proto"
)

// Log-probabilities reach the token they tell about, those of another attempt
// or position reach nobody, and what waits is bounded.
func TestLogProbsJoinTheirToken(t *testing.T) {
	in := NewInbox(100)
	l := &link{stale: new(metrics.Value), streams: map[uint64]*Stream{}}
	l.streams[5] = &Stream{l: l, in: in, id: 5, attempt: 2, next: 10}
	frame := func(ps ...*nodepb.TokenLogProbs) {
		t.Helper()
		b, err := proto.Marshal(&nodepb.LogProbs{Tokens: ps})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.frame(rpc.FrameLogProbs, 0, b); err != nil {
			t.Fatal(err)
		}
	}
	probs := func(stream uint64, attempt, position uint32) *nodepb.TokenLogProbs {
		return &nodepb.TokenLogProbs{Stream: stream, Attempt: attempt, Position: position, Logprob: -float32(position)}
	}
	next := func() *nodepb.TokenLogProbs {
		t.Helper()
		l.mu.Lock()
		l.take(rpc.Token{Stream: 5, Attempt: 2, Position: l.streams[5].next, ID: 1})
		l.mu.Unlock()
		got := in.Drain(nil)
		if len(got) != 1 || got[0].Kind != Token {
			t.Fatalf("got %+v, want one token", got)
		}
		return got[0].Probs
	}
	frame(probs(5, 2, 10), probs(6, 2, 10))
	if p := next(); p == nil || p.Logprob != -10 {
		t.Errorf("token 10 came with %v", p)
	}
	if p := next(); p != nil {
		t.Errorf("token 11 came with %v, nothing was told", p)
	}
	frame(probs(5, 2, 12), probs(5, 2, 13), probs(5, 2, 14)) // a step brings several where guesses were right
	for want := float32(-12); want > -15; want-- {
		if p := next(); p == nil || p.Logprob != want {
			t.Errorf("came with %v, want %g", p, want)
		}
	}
	frame(probs(5, 1, 15), probs(5, 2, 40))
	if p := next(); p != nil {
		t.Errorf("token 15 came with another's: %v", p)
	}
	for range 1000 {
		frame(probs(5, 2, 16))
	}
	if n := len(l.streams[5].probs); n != maxProbs {
		t.Errorf("%d wait, the bound is %d", n, maxProbs)
	}
}

// A vector ends its stream, once; one of another attempt reaches nobody.
func TestVectorEndsItsStream(t *testing.T) {
	in := NewInbox(1)
	l := &link{stale: new(metrics.Value), streams: map[uint64]*Stream{}}
	l.streams[5] = &Stream{l: l, in: in, id: 5, choice: 3, attempt: 2, pools: true}
	frame := func(stream uint64, attempt uint32) []Event {
		t.Helper()
		b, err := proto.Marshal(&nodepb.Vector{Attempt: attempt, Values: []float32{1, -2}})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.frame(rpc.FrameVector, stream, b); err != nil {
			t.Fatal(err)
		}
		return in.Drain(nil)
	}
	if got := append(frame(5, 1), frame(6, 2)...); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if got := frame(5, 2); len(got) != 1 || got[0].Kind != Vector || got[0].Choice != 3 || len(got[0].Vector.Values) != 2 || l.count() != 0 {
		t.Errorf("%+v, %d streams", got, l.count())
	}
	if got := frame(5, 2); len(got) != 0 {
		t.Errorf("again: %+v", got)
	}
	if err := l.frame(rpc.FrameVector, 5, []byte{0xff}); err == nil {
		t.Error("no error of a payload that is no message")
	}
}
