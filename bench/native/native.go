// Package native loads a decode node directly, as a gateway would: token ids are sent over
// the protocol between nodes, and token ids come back. The difference to a run over the
// OpenAI API is what the gateway adds.
//
// All requests share one connection, and a frame has a step's tokens of all of them. Its
// tokens have the time at which the connection's last bytes arrived at this machine.
// Invariant: a request ends with one outcome, at its last token, when the node ends it, or
// with the connection.
//
// The package does not resume a request on another node, does not join the gossip and is
// not a role: to the node it is a gateway that knows only this node.
package native

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Errors of requests.
var (
	ErrNode  = errors.New("native: the node refused")
	ErrLost  = errors.New("native: the connection to the node is lost")
	ErrOrder = errors.New("native: the node sent a token out of order")
)

// bundleTimeout bounds the request for the model's bundle.
const bundleTimeout = 30 * time.Second

// Options are the settings of New.
type Options struct {
	Addr     string      // of the node's rpc port
	TLS      *tls.Config // of a node's certificate; nil: plain, for tests
	Name     string      // of this client in the node's logs
	KeepText bool        // keep the answers' texts; Decode must be set
	Decode   func(ids []int32) string

	Dial func(ctx context.Context, addr string) (net.Conn, error) // nil: TCP
}

// Client is the client of one node.
type Client struct {
	o    Options
	pool *rpc.Pool

	mu      sync.Mutex
	clocks  map[string]*load.Stamped // of the connections, by their own address
	streams map[uint64]*stream
	bundle  chan *nodepb.Bundle
}

// stream is a running request. The reading goroutine owns its outcome until done is
// closed.
type stream struct {
	conn   *rpc.Conn
	start  time.Time // of the run
	next   uint32    // position of the next token
	chunk  time.Time // of the last token
	out    *load.Outcome
	tokens []int32 // if texts are kept
	done   chan struct{}
}

// New returns a client, which connects on first use.
func New(o Options) *Client {
	c := &Client{o: o, clocks: map[string]*load.Stamped{}, streams: map[uint64]*stream{}, bundle: make(chan *nodepb.Bundle, 1)}
	c.pool = rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: o.Name, Role: "gateway"}, TLS: o.TLS, Dial: c.dial}, c)
	return c
}

// dial opens the transport and keeps its clock.
func (c *Client) dial(ctx context.Context, addr string) (net.Conn, error) {
	dial := c.o.Dial
	if dial == nil {
		dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	raw, err := dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	s := load.NewStamped(raw)
	c.mu.Lock()
	c.clocks[addr] = s // there is one connection per address
	c.mu.Unlock()
	return s, nil
}

// Close closes the connection. Running requests end with ErrLost.
func (c *Client) Close() { c.pool.Close() }

// Bundle requests the node's model: name, tokenizer, end-of-sequence tokens.
func (c *Client) Bundle(ctx context.Context) (*nodepb.Bundle, error) {
	ctx, cancel := context.WithTimeout(ctx, bundleTimeout)
	defer cancel()
	k, err := c.pool.Get(ctx, c.o.Addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLost, err)
	}
	if err := k.Send(rpc.FrameBundleRequest, k.NewStream(), &nodepb.BundleRequest{}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLost, err)
	}
	select {
	case b := <-c.bundle:
		return b, nil
	case <-k.Done():
		return nil, fmt.Errorf("%w: %w", ErrLost, k.Err())
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: no answer to the request for its model: %w", ErrLost, ctx.Err())
	}
}

// Do sends one request, whose body is an encoded Generate, and waits for its last token.
// start is the run's start.
func (c *Client) Do(ctx context.Context, start time.Time, body []byte, id string, o *load.Outcome) {
	o.Prompt, o.Output, o.Sent = -1, -1, time.Since(start)
	var g nodepb.Generate
	if o.Err = proto.Unmarshal(body, &g); o.Err != nil {
		return
	}
	g.RequestId, g.Attempt = id, 1
	k, err := c.pool.Get(ctx, c.o.Addr)
	if err != nil {
		o.Err = fmt.Errorf("%w: %w", ErrLost, err)
		return
	}
	s := &stream{conn: k, start: start, next: uint32(len(g.Prompt)), out: o, done: make(chan struct{})}
	o.Prompt, o.Output, o.Sent = len(g.Prompt), 0, time.Since(start)
	n := k.NewStream()
	c.mu.Lock()
	c.streams[n] = s
	c.mu.Unlock()
	if err := k.Send(rpc.FrameGenerate, n, &g); err != nil {
		c.end(n, fmt.Errorf("%w: %w", ErrLost, err))
	}
	select {
	case <-s.done:
	case <-k.Done():
		c.end(n, fmt.Errorf("%w: %w", ErrLost, k.Err()))
	case <-ctx.Done():
		if c.end(n, ctx.Err()) {
			_ = k.Send(rpc.FrameCancel, n, &nodepb.Cancel{Reason: "the load test was stopped"}) // its connection ends soon in any case
		}
	}
	<-s.done
	if o.Err == nil && c.o.KeepText {
		if text, err := json.Marshal(c.o.Decode(s.tokens)); err == nil {
			o.Text = text[1 : len(text)-1]
		}
	}
}

// end finishes a request that still runs, with its error or nil.
func (c *Client) end(n uint64, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.endLocked(n, err)
}

func (c *Client) endLocked(n uint64, err error) bool {
	s := c.streams[n]
	if s == nil {
		return false
	}
	delete(c.streams, n)
	s.out.Err = err
	close(s.done)
	return true
}

// Frame handles a frame of the node.
func (c *Client) Frame(k *rpc.Conn, t rpc.Type, n uint64, payload []byte) {
	switch t {
	case rpc.FrameTokens:
		now := time.Now()
		c.mu.Lock()
		if s := c.clocks[c.o.Addr]; s != nil {
			now = s.At() // of this connection, whose reading goroutine this is
		}
		err := rpc.DecodeTokens(payload, func(t rpc.Token) { c.token(now, t) })
		c.mu.Unlock()
		if err != nil {
			k.Close(err)
		}
	case rpc.FrameEnd, rpc.FrameBundle:
		m, err := rpc.Decode(t, payload)
		if err != nil {
			k.Close(err)
			return
		}
		switch m := m.(type) {
		case *nodepb.End:
			if m.Code == nodepb.Code_CODE_FORBIDDEN {
				k.Close(fmt.Errorf("%w: %s: %s", ErrNode, m.Code, m.Message)) // fails the BundleRequest, too
				return
			}
			c.end(n, fmt.Errorf("%w: %s: %s", ErrNode, m.Code, m.Message))
		case *nodepb.Bundle:
			select {
			case c.bundle <- m:
			default: // a second answer is not expected
			}
		}
	}
}

// token records one token. The caller holds c.mu.
func (c *Client) token(at time.Time, t rpc.Token) {
	s := c.streams[t.Stream]
	if s == nil {
		return
	}
	if t.ID >= 0 {
		if t.Position != s.next {
			c.endLocked(t.Stream, fmt.Errorf("%w: position %d, want %d", ErrOrder, t.Position, s.next))
			return
		}
		s.next++
		s.addToken(at, t.ID, c.o.KeepText)
	}
	if t.Finish != 0 {
		c.endLocked(t.Stream, nil)
	}
}

// addToken records when a token arrived. Tokens of one frame are one chunk, as those of one
// event would be.
func (s *stream) addToken(at time.Time, id int32, keep bool) {
	o := s.out
	o.Output++
	if keep {
		s.tokens = append(s.tokens, id)
	}
	since := at.Sub(s.start)
	switch {
	case o.Chunks == 0:
		o.First = since
	case at.Equal(s.chunk):
		return
	default:
		o.ITL = append(o.ITL, since-o.Last)
	}
	s.chunk, o.Last = at, since
	o.Chunks++
}

// Closed ends the requests of the connection.
func (c *Client) Closed(k *rpc.Conn, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n, s := range c.streams {
		if s.conn == k {
			c.endLocked(n, fmt.Errorf("%w: %w", ErrLost, err))
		}
	}
}
