// Package nodestest is a decode node for tests. It speaks the node protocol and makes up tokens
// that depend on the request alone.
//
// Invariant: the token at a position depends on the prompt, the seed, the choice and the position,
// so that attempts on several nodes agree, as those of one numerics class do.
//
// It computes nothing, has no cache, and never asks a prefill node.
package nodestest

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Options is the behaviour of a node. Functions are called on several goroutines.
type Options struct {
	Bundle *nodepb.Bundle
	Hello  *nodepb.Hello // nil: that of a decode node

	// Token returns the token at a position; nil: Token of this package with the bundle's
	// vocabulary. An EOS or stop token of the request ends the answer.
	Token func(r *nodepb.Generate, position int) int32
	// Gate is received from before each token; nil: tokens do not wait.
	Gate <-chan struct{}
	// Refuse answers an attempt with an error instead of Accepted; nil: never.
	Refuse func(r *nodepb.Generate) (nodepb.Code, string)
	// Vanish closes the connection instead of any answer; nil: never.
	Vanish func(r *nodepb.Generate) bool
	// Mute leaves attempts without any answer; nil: never.
	Mute func(r *nodepb.Generate) bool
	// Leave ends an accepted attempt before its first token; nil, or code 0: never.
	Leave func(r *nodepb.Generate) nodepb.Code
	// CutAfter closes the connection after so many tokens of a stream; 0: never.
	CutAfter int
	// CutCode makes CutAfter end the stream with this code instead.
	CutCode nodepb.Code
	// Garble may change a frame's token before it is sent; nil: unchanged.
	Garble func(t rpc.Token) rpc.Token
	// Score may change the log-probabilities of a prompt, or drop them; nil: unchanged.
	Score func(*nodepb.PromptLogProbs) *nodepb.PromptLogProbs
	// Vector returns the vector of a prompt; nil: the node answers Pooling as one of a version that
	// does not know it.
	Vector func(r *nodepb.Generate) []float32
	Cached uint32 // of Accepted
	// Adapter answers LoadAdapter and UnloadAdapter; nil: they get no answer.
	Adapter func(m proto.Message) *nodepb.AdapterDone
	// MaxRunning is how many requests the node runs at once, according to its heartbeats, which
	// also have how many it runs; 0: it sends no heartbeats.
	MaxRunning uint32
	// Memory returns the KV memory in heartbeats; nil: they have none, as those of older nodes.
	Memory func() (total, used, cached, reserved uint32)
}

// Node is a running node.
type Node struct {
	Addr string
	o    Options
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu        sync.Mutex
	running   map[key]context.CancelFunc
	requests  []*nodepb.Generate
	cancelled int
	drains    []*nodepb.Drain
	steps     uint64
	conns     map[*rpc.Conn]bool
	changed   chan struct{} // closed and made again on each change
}

type key struct {
	c      *rpc.Conn
	stream uint64
}

// Start runs a node at addr of the network.
func Start(n *rpc.Network, addr string, o Options) (*Node, error) {
	l, err := n.Listen(addr)
	if err != nil {
		return nil, err
	}
	return Serve(l, addr, o), nil
}

// Serve runs a node on a listener.
func Serve(l net.Listener, addr string, o Options) *Node {
	if o.Hello == nil {
		o.Hello = &nodepb.Hello{NodeId: addr, Role: "decode"}
	}
	if o.Token == nil {
		vocab := max(o.Bundle.GetVocabSize(), 1)
		o.Token = func(r *nodepb.Generate, position int) int32 { return Token(r, position, vocab) }
	}
	ctx, stop := context.WithCancel(context.Background())
	node := &Node{Addr: addr, o: o, stop: stop, running: map[key]context.CancelFunc{}, conns: map[*rpc.Conn]bool{}, changed: make(chan struct{})}
	node.wg.Go(func() {
		_ = rpc.Serve(ctx, l, rpc.Options{Hello: o.Hello, CloseLinger: 10 * time.Millisecond}, node)
	})
	return node
}

// Token returns the made-up token at a position.
func Token(r *nodepb.Generate, position int, vocab uint32) int32 {
	b := binary.LittleEndian.AppendUint64(nil, r.Sampling.GetSeed())
	b = binary.LittleEndian.AppendUint32(b, r.Sampling.GetChoice())
	b = binary.LittleEndian.AppendUint32(b, uint32(position))
	for _, t := range r.Prompt {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return int32(xxhash.Sum64(b) % uint64(vocab))
}

// Stop ends the node and all its connections.
func (n *Node) Stop() {
	n.stop()
	n.wg.Wait()
}

// Send sends a frame, such as Stats, on all connections.
func (n *Node) Send(t rpc.Type, m proto.Message) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		_ = c.Send(t, 0, m)
	}
}

// read returns what f reads under the node's lock.
func read[T any](n *Node, f func() T) T {
	n.mu.Lock()
	defer n.mu.Unlock()
	return f()
}

// Requests returns the attempts received so far.
func (n *Node) Requests() []*nodepb.Generate {
	return read(n, func() []*nodepb.Generate { return slices.Clone(n.requests) })
}

// Drains returns the Drains received so far. The node reports draining and does nothing else.
func (n *Node) Drains() []*nodepb.Drain {
	return read(n, func() []*nodepb.Drain { return slices.Clone(n.drains) })
}

// Running returns how many attempts are being generated.
func (n *Node) Running() int { return read(n, func() int { return len(n.running) }) }

// Cancelled returns how many running attempts were cancelled from outside.
func (n *Node) Cancelled() int { return read(n, func() int { return n.cancelled }) }

// Connected returns the number of open connections.
func (n *Node) Connected() int { return read(n, func() int { return len(n.conns) }) }

// ErrTimeout is the error of Wait.
var ErrTimeout = errors.New("nodestest: condition did not come true in time")

// Wait waits until cond holds. It calls cond again whenever attempts begin or end.
func (n *Node) Wait(d time.Duration, cond func() bool) error {
	after := time.After(d)
	for {
		n.mu.Lock()
		changed := n.changed
		n.mu.Unlock()
		if cond() {
			return nil
		}
		select {
		case <-changed:
		case <-after:
			return ErrTimeout
		}
	}
}

// beat sends heartbeats. The caller holds mu.
func (n *Node) beat() {
	if n.o.MaxRunning == 0 {
		return
	}
	n.steps++
	m := &nodepb.Stats{Steps: n.steps, MaxRunning: n.o.MaxRunning, Running: uint32(len(n.running))}
	if n.o.Memory != nil {
		var cached, reserved uint32
		m.BlocksTotal, m.BlocksUsed, cached, reserved = n.o.Memory()
		m.BlocksCached, m.BlocksReserved = &cached, &reserved
	}
	for c := range n.conns {
		_ = c.Send(rpc.FrameStats, 0, m)
	}
}

// Beat sends a heartbeat to every gateway.
func (n *Node) Beat() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.beat()
}

// note wakes Wait. The caller holds mu.
func (n *Node) note() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// Frame implements rpc.Handler.
func (n *Node) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	m, err := rpc.Decode(t, payload)
	if err != nil {
		c.Close(err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	defer n.note()
	switch m := m.(type) {
	case *nodepb.Hello:
		c.SetSilence(rpc.StreamSilence)
		n.conns[c] = true
		n.beat()
	case *nodepb.BundleRequest:
		_ = c.Send(rpc.FrameBundle, stream, n.o.Bundle)
	case *nodepb.Generate:
		n.requests = append(n.requests, m)
		n.accept(c, stream, m)
	case *nodepb.LoadAdapter, *nodepb.UnloadAdapter:
		if n.o.Adapter != nil {
			_ = c.Send(rpc.FrameAdapterDone, stream, n.o.Adapter(m))
		}
	case *nodepb.Drain:
		n.drains = append(n.drains, m)
		_ = c.Send(rpc.FrameStats, 0, &nodepb.Stats{Draining: !m.Cancel})
	case *nodepb.Cancel:
		if cancel := n.running[key{c, stream}]; cancel != nil {
			cancel()
			delete(n.running, key{c, stream})
			n.cancelled++
			n.beat()
		}
	}
}

// accept starts an attempt. The caller holds mu.
func (n *Node) accept(c *rpc.Conn, stream uint64, r *nodepb.Generate) {
	if n.o.Mute != nil && n.o.Mute(r) {
		return
	}
	if n.o.Vanish != nil && n.o.Vanish(r) {
		c.Close(errors.New("nodestest: vanished"))
		return
	}
	if n.o.Refuse != nil {
		if code, why := n.o.Refuse(r); code != 0 {
			_ = c.Send(rpc.FrameEnd, stream, &nodepb.End{Code: code, Message: why, Attempt: r.Attempt})
			return
		}
	}
	if n.limit(r) == 0 && !n.pools(r) {
		_ = c.Send(rpc.FrameEnd, stream, &nodepb.End{Code: nodepb.Code_CODE_INVALID, Message: "max_tokens is 0", Attempt: r.Attempt})
		return
	}
	_ = c.Send(rpc.FrameAccepted, stream, &nodepb.Accepted{Attempt: r.Attempt, CachedTokens: n.o.Cached})
	ctx, cancel := context.WithCancel(context.Background())
	n.running[key{c, stream}] = cancel
	n.beat()
	n.wg.Go(func() {
		n.generate(ctx, c, stream, r)
		cancel()
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.running, key{c, stream})
		n.beat()
		n.note()
	})
}

// pools reports whether the answer is a vector.
func (n *Node) pools(r *nodepb.Generate) bool { return r.Pooling != nil && n.o.Vector != nil }

// limit returns the most tokens of an answer. A node without grammars does not know the field.
func (n *Node) limit(r *nodepb.Generate) int {
	if r.Grammar != nil && n.o.Hello.Grammar != 0 {
		return int(r.Grammar.MaxTokens)
	}
	return int(r.MaxTokens)
}

func (n *Node) generate(ctx context.Context, c *rpc.Conn, stream uint64, r *nodepb.Generate) {
	if r.PromptLogprobs != nil && !n.score(c, stream, r) {
		return
	}
	if n.o.Leave != nil {
		if code := n.o.Leave(r); code != 0 {
			_ = c.Send(rpc.FrameEnd, stream, &nodepb.End{Code: code, Message: "left", Attempt: r.Attempt})
			return
		}
	}
	if n.pools(r) {
		if n.o.Gate != nil {
			select {
			case <-n.o.Gate:
			case <-ctx.Done():
				return
			}
		}
		_ = c.Send(rpc.FrameVector, stream, &nodepb.Vector{Attempt: r.Attempt, Values: n.o.Vector(r)})
		return
	}
	for made := len(r.Output); ; made++ {
		if n.o.Gate != nil {
			select {
			case <-n.o.Gate:
			case <-ctx.Done():
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
		t := rpc.Token{Stream: stream, Attempt: r.Attempt, Position: uint32(len(r.Prompt) + made)}
		t.ID = n.o.Token(r, int(t.Position))
		switch {
		case slices.Contains(r.StopTokenIds, t.ID), !r.IgnoreEos && slices.Contains(r.EosTokenIds, t.ID):
			t.Finish = uint8(nodepb.FinishReason_FINISH_REASON_STOP)
		case made+1 >= n.limit(r):
			t.Finish = uint8(nodepb.FinishReason_FINISH_REASON_LENGTH)
		}
		finish := t.Finish
		if n.o.Garble != nil {
			t = n.o.Garble(t)
		}
		if r.Logprobs && c.Send(rpc.FrameLogProbs, 0, LogProbs(r, stream, t)) != nil {
			return
		}
		if c.SendTokens([]rpc.Token{t}) != nil {
			return
		}
		if n.o.CutAfter > 0 && made+1 == n.o.CutAfter {
			if n.o.CutCode != 0 {
				_ = c.Send(rpc.FrameEnd, stream, &nodepb.End{Code: n.o.CutCode, Message: "cut", Attempt: r.Attempt})
				return
			}
			c.Close(errors.New("nodestest: cut"))
			return
		}
		if finish != 0 {
			return
		}
	}
}

// score sends the log-probabilities of the prompt, two tokens at a time.
func (n *Node) score(c *rpc.Conn, stream uint64, r *nodepb.Generate) bool {
	for first := 1; first < len(r.Prompt); first += 2 {
		m := &nodepb.PromptLogProbs{Attempt: r.Attempt, First: uint32(first)}
		for at := first; at < min(first+2, len(r.Prompt)); at++ {
			m.Logprobs, m.Ranks = append(m.Logprobs, -float32(at)), append(m.Ranks, uint32(at))
			for i := range r.GetPromptLogprobs() {
				m.TopTokens = append(m.TopTokens, r.Prompt[at]+int32(i))
				m.TopLogprobs = append(m.TopLogprobs, -float32(at)-float32(i)/2)
			}
		}
		if n.o.Score != nil {
			m = n.o.Score(m)
		}
		if m != nil && c.Send(rpc.FramePromptProbs, stream, m) != nil {
			return false
		}
	}
	return true
}

// Closed implements rpc.Handler.
func (n *Node) Closed(c *rpc.Conn, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
	for k, cancel := range n.running {
		if k.c == c {
			cancel()
		}
	}
	n.note()
}

// LogProbs makes up the log-probabilities of a token: its own, and as the best ones the ids after
// it.
func LogProbs(r *nodepb.Generate, stream uint64, t rpc.Token) *nodepb.LogProbs {
	p := &nodepb.TokenLogProbs{Stream: stream, Attempt: t.Attempt, Position: t.Position, Logprob: -0.5, Rank: 1}
	for _, id := range r.LogprobTokenIds {
		p.TopTokens, p.TopLogprobs = append(p.TopTokens, id), append(p.TopLogprobs, -9)
	}
	for i := range r.TopLogprobs {
		if len(r.LogprobTokenIds) > 0 {
			break
		}
		p.TopTokens = append(p.TopTokens, t.ID+int32(i))
		p.TopLogprobs = append(p.TopLogprobs, -0.5-float32(i))
	}
	return &nodepb.LogProbs{Tokens: []*nodepb.TokenLogProbs{p}}
}
