package nodes

import (
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/lengths"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Errors of attempts.
var (
	ErrLost     = errors.New("nodes: connection to the node lost")
	ErrPosition = errors.New("nodes: the node sent a token out of order")
	ErrNode     = errors.New("nodes: node not usable")
	ErrStalled  = errors.New("nodes: the node has work and makes no steps")
)

// CodeError is the code with which a node ended an attempt.
type CodeError struct {
	Code    nodepb.Code
	Message string
}

// Error implements error.
func (e *CodeError) Error() string {
	return fmt.Sprintf("nodes: node answered %s: %s", e.Code, e.Message)
}

// heartbeat is the last Stats of a node on a connection. It is not changed once made.
type heartbeat struct {
	route.Report
	number     uint64 // among those of the connection, from 1; 0: none has come
	steps      uint64
	kvUsage    float64 // share of blocks in use
	maxRunning int     // requests; 0: not reported
	own        int     // streams of this connection then
	draining   bool
	adapters   []Adapter
	prompts    float64 // tokens computed per second
	outputs    float64 // tokens generated per second
}

// link is the state of one open connection to a node.
type link struct {
	conn    *rpc.Conn
	model   uint64 // fingerprint in the node's Hello; 0: none
	grammar uint32 // version of the grammars in the node's Hello; 0: the node constrains no outputs
	vectors uint32 // version of the vectors in the node's Hello; 0: the node computes none
	stale   *metrics.Value
	token   func(rpc.Token) // l.take, made once because a method value allocates
	reports

	mu      sync.Mutex
	closed  bool
	cut     int // streams that the connection's end has cut
	streams map[uint64]*Stream
	replies map[uint64]chan proto.Message // of Node.ask, by stream; each has room for one
}

func newLink(c *rpc.Conn, stale *metrics.Value) *link {
	l := &link{conn: c, stale: stale, streams: map[uint64]*Stream{}, replies: map[uint64]chan proto.Message{}}
	l.token = l.take
	return l
}

// last returns the last heartbeat; of a nil link, or before the first, a zero one.
func (l *link) last() *heartbeat {
	if l != nil {
		if h := l.heart.Load(); h != nil {
			return h
		}
	}
	return &noHeart
}

// noHeart is the heartbeat of a node that has sent none.
var noHeart heartbeat

// reply delivers the answer to Node.ask; nil: it was refused. The caller holds l.mu.
func (l *link) reply(stream uint64, m proto.Message) {
	if ch := l.replies[stream]; ch != nil {
		delete(l.replies, stream)
		ch <- m
	}
}

// VectorVersion is the version of vectors that this build's gateways ask for.
const VectorVersion = rpc.VectorVersion

// Stream is one attempt of one choice on a node. The fleet delivers its events to its Inbox until
// one ends it.
type Stream struct {
	l       *link
	in      *Inbox
	id      uint64
	choice  int32
	attempt uint32
	next    uint32 // position of the next token; guarded by l.mu
	// scored is the position of the prompt's next log-probabilities, and prompt where they end.
	// They are equal if none are missing or requested. Guarded by l.mu.
	scored, prompt uint32
	// probs belong to the tokens of the next Tokens frame; guarded by l.mu.
	probs []*nodepb.TokenLogProbs
	// blocks is what the request is expected to take of the node's KV memory. accepted: the node's
	// next heartbeat includes it. Guarded by l.mu.
	blocks   int
	accepted bool
	pools    bool // a Vector ends it, and it has no tokens
}

// open registers the stream before the node can answer, then sends the request.
func (l *link) open(req *nodepb.Generate, in *Inbox, choice int32) (*Stream, error) {
	if g := req.Grammar; g != nil && g.Version != l.grammar { // another process has taken the node's address
		return nil, fmt.Errorf("%w: %s has grammars of version %d, not %d", ErrNode, l.conn.RemoteAddr(), l.grammar, g.Version)
	}
	if p := req.Pooling; p != nil && p.Version != l.vectors {
		return nil, fmt.Errorf("%w: %s has vectors of version %d, not %d", ErrNode, l.conn.RemoteAddr(), l.vectors, p.Version)
	}
	s := &Stream{l: l, in: in, id: l.conn.NewStream(), choice: choice, attempt: req.Attempt, pools: req.Pooling != nil,
		next: uint32(len(req.Prompt) + len(req.Output)), prompt: uint32(len(req.Prompt)), scored: uint32(len(req.Prompt))}
	if req.PromptLogprobs != nil {
		s.scored = min(1, s.prompt)
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, fmt.Errorf("%w: %s", ErrLost, l.conn.RemoteAddr())
	}
	l.streams[s.id] = s
	l.mu.Unlock()
	if err := l.conn.Send(rpc.FrameGenerate, s.id, req); err != nil {
		if !l.drop(s) {
			return s, nil // the connection's end is in the inbox already
		}
		return nil, fmt.Errorf("%w: sending to %s: %w", ErrLost, l.conn.RemoteAddr(), err)
	}
	return s, nil
}

// count returns the number of the link's streams.
func (l *link) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.streams)
}

// idle reports whether the link has no streams, and its end has cut none.
func (l *link) idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.streams)+l.cut == 0
}

// drop removes the stream. It returns false if the stream had ended before.
func (l *link) drop(s *Stream) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, was := l.streams[s.id]
	l.forget(s)
	return was
}

// Cancel ends the attempt. The node frees what it holds, and after Cancel has returned no event of
// the attempt reaches the inbox. It may be called at any time and again.
func (s *Stream) Cancel(reason string) {
	if s.l.drop(s) {
		s.l.cancel(s.id, reason)
	}
}

// cancel sends a Cancel to the node. If the outbox refuses it, the connection is closed, because a
// request without a reader must not continue.
func (l *link) cancel(id uint64, reason string) {
	if err := l.conn.Send(rpc.FrameCancel, id, &nodepb.Cancel{Reason: reason}); err != nil {
		l.conn.Close(fmt.Errorf("nodes: cancel of stream %d not sent: %w", id, err))
	}
}

// take delivers one token. The caller holds l.mu.
func (l *link) take(t rpc.Token) {
	s := l.streams[t.Stream]
	if s == nil || t.Attempt != s.attempt {
		l.stale.Inc()
		return
	}
	if s.pools {
		l.disorder(s, fmt.Errorf("%w: a token for a request for a vector, from %s", ErrPosition, l.conn.RemoteAddr()))
		return
	}
	if t.ID >= 0 {
		if t.Position != s.next || s.scored != s.prompt {
			l.disorder(s, fmt.Errorf("%w: position %d, expected %d (of the prompt %d of %d), from %s",
				ErrPosition, t.Position, s.next, s.scored, s.prompt, l.conn.RemoteAddr()))
			return
		}
		s.next++
	}
	if t.Finish != 0 {
		l.forget(s)
	}
	if !s.in.push(Event{Kind: Token, Choice: s.choice, Attempt: s.attempt, Token: t.ID, Finish: t.Finish, Probs: s.takeProbs(t.Position)}) {
		l.forget(s)
		l.cancel(s.id, "client reads too slowly")
		s.in.push(Event{Kind: Overflow, Choice: s.choice, Attempt: s.attempt})
	}
}

// disorder ends a stream whose node does not keep its tokens in order.
func (l *link) disorder(s *Stream, err error) {
	l.forget(s)
	l.cancel(s.id, "token out of order")
	s.in.push(Event{Kind: Failed, Choice: s.choice, Attempt: s.attempt, Err: err})
}

// score delivers log-probabilities of the prompt. The caller holds l.mu.
func (l *link) score(s *Stream, m *nodepb.PromptLogProbs) {
	n := len(m.Logprobs)
	if m.First != s.scored || n == 0 || n > int(s.prompt-s.scored) || len(m.Ranks) != n ||
		len(m.TopTokens)%n != 0 || len(m.TopLogprobs) != len(m.TopTokens) {
		l.disorder(s, fmt.Errorf("%w: %d log-probabilities, %d ranks and %d and %d of best tokens from %d on, expected %d to %d, from %s",
			ErrPosition, n, len(m.Ranks), len(m.TopTokens), len(m.TopLogprobs), m.First, s.scored, s.prompt, l.conn.RemoteAddr()))
		return
	}
	s.scored += uint32(n)
	s.in.push(Event{Kind: Scored, Choice: s.choice, Attempt: s.attempt, Prompt: m})
}

// vectorEvent returns the event of a vector, with which a node ends the stream.
func (s *Stream) vectorEvent(m *nodepb.Vector) Event {
	e := Event{Kind: Vector, Choice: s.choice, Attempt: s.attempt, Vector: m}
	if !s.pools {
		e.Kind, e.Err = Failed, fmt.Errorf("%w: a vector for a request for tokens, from %s", ErrPosition, s.l.conn.RemoteAddr())
	}
	return e
}

// maxProbs bounds the log-probabilities that wait for their tokens: those of one step, which has a
// token behind the last one and behind each draft token.
const maxProbs = 1 + 16

// keepProbs keeps a token's log-probabilities until the next frame brings the token.
func (s *Stream) keepProbs(p *nodepb.TokenLogProbs) {
	if p.Attempt == s.attempt && len(s.probs) < maxProbs {
		s.probs = append(s.probs, p)
	}
}

// takeProbs returns the log-probabilities of a position, and keeps those of later ones.
func (s *Stream) takeProbs(position uint32) (found *nodepb.TokenLogProbs) {
	if len(s.probs) == 0 {
		return nil
	}
	later := s.probs[:0]
	for _, p := range s.probs {
		if p.Position == position {
			found = p
		} else if p.Position > position && p.Position < position+maxProbs {
			later = append(later, p)
		}
	}
	s.probs = later
	return found
}

// frame handles a frame of the node on the connection's reading goroutine. A malformed payload ends
// the connection, because the two sides disagree.
func (l *link) frame(t rpc.Type, stream uint64, payload []byte) error {
	if t == rpc.FrameTokens {
		l.mu.Lock()
		defer l.mu.Unlock()
		return rpc.DecodeTokens(payload, l.token)
	}
	switch t {
	case rpc.FrameAccepted, rpc.FrameEnd, rpc.FrameStats, rpc.FrameBundle, rpc.FrameLogProbs, rpc.FramePromptProbs, rpc.FrameAdapterDone, rpc.FrameVector:
	default:
		return nil // not for gateways
	}
	m, err := rpc.Decode(t, payload)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch m := m.(type) {
	case *nodepb.Accepted:
		if s := l.streams[stream]; s != nil && m.Attempt == s.attempt {
			s.accepted = true
			s.in.push(Event{Kind: Accepted, Choice: s.choice, Attempt: s.attempt, Cached: m.CachedTokens})
		}
	case *nodepb.End:
		if s := l.streams[stream]; s != nil && m.Attempt == s.attempt {
			l.forget(s)
			s.in.push(Event{Kind: Failed, Choice: s.choice, Attempt: s.attempt, Err: &CodeError{m.Code, m.Message}})
		} else {
			l.reply(stream, nil)
		}
	case *nodepb.LogProbs:
		for _, p := range m.Tokens {
			if s := l.streams[p.Stream]; s != nil {
				s.keepProbs(p)
			}
		}
	case *nodepb.PromptLogProbs:
		if s := l.streams[stream]; s != nil && m.Attempt == s.attempt {
			l.score(s, m)
		}
	case *nodepb.Vector:
		if s := l.streams[stream]; s != nil && m.Attempt == s.attempt {
			l.forget(s)
			s.in.push(s.vectorEvent(m))
		}
	case *nodepb.Stats:
		l.reported()
		l.setHeart(&heartbeat{
			number: l.last().number + 1, steps: m.Steps, kvUsage: float64(m.BlocksUsed) / float64(max(1, m.BlocksTotal)),
			Report: route.Report{
				Running: int(m.Running), Waiting: int(m.Waiting), Held: int(m.Held),
				Queued: int(m.QueuedTokens), ShortFirst: len(m.QueuedByLength) >= lengths.N, Lengths: lengthsOf(m),
				Rate: m.PrefillTokensPerS, StepTokens: int(m.StepTokens), Memory: memoryOf(m),
			},
			maxRunning: int(m.MaxRunning), own: len(l.streams), draining: m.Draining,
			adapters: adaptersOf(m.Adapters), prompts: m.PromptTokensPerS, outputs: m.OutputTokensPerS,
		})
	case *nodepb.AdapterDone, *nodepb.Bundle:
		l.reply(stream, m)
	}
	return nil
}

// lost ends everything that waits for the connection.
func (l *link) lost(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.cut = true, len(l.streams)
	l.changed()
	for _, s := range l.streams {
		l.forget(s)
		s.in.push(Event{Kind: Failed, Choice: s.choice, Attempt: s.attempt, Err: fmt.Errorf("%w: %w", ErrLost, err)})
	}
	for id, ch := range l.replies {
		delete(l.replies, id)
		close(ch)
	}
}
