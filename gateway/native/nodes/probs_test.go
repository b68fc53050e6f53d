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
