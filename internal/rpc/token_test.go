package rpc

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// counter is a Handler that counts tokens without keeping anything.
type counter struct {
	nTokens atomic.Int64
	add     func(Token)
	bad     atomic.Int64
	frames  chan struct{} // one for each token frame
}

func newCounter() *counter {
	h := &counter{frames: make(chan struct{}, 1)}
	h.add = func(Token) { h.nTokens.Add(1) }
	return h
}

func (h *counter) Frame(c *Conn, t Type, stream uint64, payload []byte) {
	if t == FrameTokens {
		if err := DecodeTokens(payload, h.add); err != nil {
			h.bad.Add(1)
		}
		h.frames <- struct{}{}
	}
}

func (h *counter) Closed(*Conn, error) {}

// connect joins a sender to a server that counts what it gets.
func connect(t testing.TB, network string, server, client Options) (*Conn, *counter) {
	t.Helper()
	l, dial := listen(t, network)
	server.Hello, client.Hello, client.Dial = hello("server"), hello("client"), dial
	ctx, cancel := context.WithCancel(context.Background())
	h := newCounter()
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, server, h) }()
	pool := NewPool(client, newCounter())
	t.Cleanup(func() {
		pool.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	c, err := pool.Get(ctx, l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return c, h
}

// step sends one frame and waits until its tokens were handled.
func step(t testing.TB, c *Conn, h *counter, ts []Token) {
	want := h.nTokens.Load() + int64(len(ts))
	if err := c.SendTokens(ts); err != nil {
		t.Fatal(err)
	}
	select {
	case <-h.frames:
	case <-c.Done():
		t.Fatal(c.Err())
	}
	if got := h.nTokens.Load(); got != want {
		t.Fatalf("%d tokens arrived, want %d", got, want)
	}
}

func batch(n int) []Token {
	ts := make([]Token, n)
	for i := range ts {
		ts[i] = Token{Stream: uint64(i + 1), Attempt: 1, Position: uint32(i), ID: int32(i)}
	}
	return ts
}

func TestMalformedTokensReachNobody(t *testing.T) {
	good := make([]byte, 3*tokenBytes)
	for i := range 3 {
		putToken(good[i*tokenBytes:], Token{Stream: 1, ID: int32(i)})
	}
	for name, spoil := range map[string]func(b []byte) []byte{
		"torn":          func(b []byte) []byte { return b[:len(b)-1] },
		"trailing":      func(b []byte) []byte { b[2*tokenBytes+22] = 1; return b },
		"finish":        func(b []byte) []byte { b[2*tokenBytes+20] = 4; return b },
		"no token":      func(b []byte) []byte { putToken(b[2*tokenBytes:], Token{ID: -1}); return b },
		"negative id":   func(b []byte) []byte { putToken(b[2*tokenBytes:], Token{ID: -2, Finish: 1}); return b },
		"one too short": func(b []byte) []byte { return b[:tokenBytes-1] },
	} {
		n := 0
		err := DecodeTokens(spoil(append([]byte(nil), good...)), func(Token) { n++ })
		if !errors.Is(err, ErrBadPayload) || n != 0 {
			t.Errorf("%s: %d tokens, error %v", name, n, err)
		}
	}
	end := make([]byte, tokenBytes)
	putToken(end, Token{Stream: 9, Position: 4, ID: -1, Finish: uint8(nodepb.FinishReason_FINISH_REASON_LENGTH)})
	if err := DecodeTokens(end, func(k Token) {
		if k.ID != -1 || k.Finish != 2 || k.Stream != 9 || k.Position != 4 {
			t.Errorf("%+v", k)
		}
	}); err != nil {
		t.Error(err)
	}
}

func BenchmarkTokenFrame(b *testing.B) {
	for _, network := range []string{"memory", "tcp"} {
		b.Run(network, func(b *testing.B) {
			c, h := connect(b, network, Options{}, Options{})
			ts := batch(64)
			b.ReportAllocs()
			for b.Loop() {
				step(b, c, h, ts)
			}
		})
	}
}
