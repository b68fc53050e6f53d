package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/internal/cluster"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Environment of the mock node: its certificates, and the gateway's gossip.
const (
	envCerts = "BENCH_NODE_CERTS"
	envJoin  = "BENCH_NODE_JOIN"
)

const (
	mockFingerprint = 7
	mockClass       = "mock"
	tokenFrom       = 300 // token ids of answers count from here up to
	tokenTo         = 900
)

// serveNode runs a decode node that computes nothing, until its input ends. Every gap it sends a
// token of each stream in one frame, as an engine's step does. It joins a cluster and prints its
// address.
func serveNode() error {
	material, err := tlsconf.Load(os.Getenv(envCerts), nil)
	if err != nil {
		return err
	}
	defer material.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	tokenizer, err := fs.ReadFile(builtin.FS(), "tokenizer.json")
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	n := &node{streams: map[streamKey]*streamState{}, conns: map[*rpc.Conn]bool{}, bundle: &nodepb.Bundle{
		Model: "mock", Fingerprint: mockFingerprint, NumericsClass: mockClass, TokenizerJson: tokenizer, MaxModelLen: 1 << 20, VocabSize: 1 << 16, BlockTokens: 16,
		ChatTemplate: "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
	}}
	cl, err := cluster.New(cluster.Options{
		Self: cluster.Member{ID: "mock-node", Role: "decode", RPC: l.Addr().String(), Model: "mock", Fingerprint: mockFingerprint, Class: mockClass,
			Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Ready: true},
		Bind: "127.0.0.1:0", Join: []string{os.Getenv(envJoin)}, Key: material.GossipKey(),
	})
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	go n.steps(ctx)
	hello := &nodepb.Hello{NodeId: "mock-node", Role: "decode", Fingerprint: mockFingerprint, NumericsClass: mockClass}
	return errors.Join(rpc.Serve(ctx, l, rpc.Options{Hello: hello, TLS: material.Server()}, n), cl.Leave(time.Second))
}

type streamKey struct {
	c  *rpc.Conn
	id uint64
}

// streamState is one attempt. The tokens from next to end have not been sent.
type streamState struct{ attempt, next, end uint32 }

// node implements rpc.Handler.
type node struct {
	bundle  *nodepb.Bundle
	mu      sync.Mutex
	conns   map[*rpc.Conn]bool
	streams map[streamKey]*streamState
	made    uint64 // number of steps
}

// Frame implements rpc.Handler.
func (n *node) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	m, err := rpc.Decode(t, payload)
	if err != nil {
		c.Close(err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch m := m.(type) {
	case *nodepb.Hello:
		n.conns[c] = true
		err = n.beat(c)
	case *nodepb.BundleRequest:
		err = c.Send(rpc.FrameBundle, stream, n.bundle)
	case *nodepb.Generate:
		first := uint32(len(m.Prompt) + len(m.Output))
		n.streams[streamKey{c, stream}] = &streamState{attempt: m.Attempt, next: first, end: uint32(len(m.Prompt)) + m.MaxTokens}
		err = c.Send(rpc.FrameAccepted, stream, &nodepb.Accepted{Attempt: m.Attempt})
	case *nodepb.Cancel:
		delete(n.streams, streamKey{c, stream})
	}
	if err != nil {
		c.Close(err)
	}
}

// Closed implements rpc.Handler.
func (n *node) Closed(c *rpc.Conn, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
	for k := range n.streams {
		if k.c == c {
			delete(n.streams, k)
		}
	}
}

func (n *node) beat(c *rpc.Conn) error {
	return c.Send(rpc.FrameStats, 0, &nodepb.Stats{Steps: n.made, MaxRunning: 4096, Running: uint32(len(n.streams)), PrefillTokensPerS: 1e5})
}

// steps makes a step every gap, and sends a heartbeat every hundred steps.
func (n *node) steps(ctx context.Context) {
	tick := time.NewTicker(gap)
	defer tick.Stop()
	frames := map[*rpc.Conn][]rpc.Token{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		n.mu.Lock()
		n.made++
		for c := range frames {
			frames[c] = frames[c][:0]
		}
		for k, s := range n.streams {
			t := rpc.Token{Stream: k.id, Attempt: s.attempt, Position: s.next, ID: tokenFrom + int32(s.next%(tokenTo-tokenFrom))}
			if s.next++; s.next >= s.end {
				t.Finish = uint8(nodepb.FinishReason_FINISH_REASON_LENGTH)
				delete(n.streams, k)
			}
			frames[k.c] = append(frames[k.c], t)
		}
		for c, ts := range frames {
			err := c.SendTokens(ts)
			if err == nil && n.made%100 == 0 && n.conns[c] {
				err = n.beat(c)
			}
			if err != nil {
				c.Close(err)
				delete(frames, c)
			}
		}
		n.mu.Unlock()
	}
}
