//go:build linux

package e2e

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// rpcPeer is a peer of a node's rpc port with a certificate of the fleet's authority.
type rpcPeer struct {
	t      *testing.T
	conn   *rpc.Conn
	frames chan rpcFrame
}

type rpcFrame struct {
	t       rpc.Type
	stream  uint64
	payload []byte
}

// Frame keeps answers; heartbeats are dropped.
func (p *rpcPeer) Frame(_ *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	if t != rpc.FrameHello && t != rpc.FrameStats {
		p.frames <- rpcFrame{t, stream, append([]byte(nil), payload...)}
	}
}

// Closed implements rpc.Handler.
func (p *rpcPeer) Closed(*rpc.Conn, error) {}

// dialRPC issues a certificate and connects to the decode node.
func (f *knownFleet) dialRPC(t *testing.T, name string) *rpcPeer {
	t.Helper()
	dir, err := tlsconf.IssueNode(f.certs, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := tlsconf.Load(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p := &rpcPeer{t: t, frames: make(chan rpcFrame, 256)}
	pool := rpc.NewPool(rpc.Options{Hello: &nodepb.Hello{NodeId: filepath.Base(dir), Role: "gateway"}, TLS: m.Client()}, p)
	t.Cleanup(func() {
		pool.Close()
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	if p.conn, err = pool.Get(t.Context(), fmt.Sprintf("127.0.0.1:%d", f.rpc)); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return p
}

// next returns the next answer.
func (p *rpcPeer) next() rpcFrame {
	p.t.Helper()
	select {
	case f := <-p.frames:
		return f
	case <-p.conn.Done():
		p.t.Fatal(p.conn.Err())
	case <-time.After(time.Minute):
		p.t.Fatal("no answer within a minute")
	}
	return rpcFrame{}
}

// A node's certificate cannot generate, load an adapter or drain at a decode node, and its
// attempts leave the fleet as it was. A gateway's can, and so can one without a role, with
// a warning. A gateway does not start with a node's certificate.
func TestBinaryHostileRoles(t *testing.T) {
	t.Parallel()
	f := startKnownFleet(t)
	question := []byte(`{"messages":[{"role":"user","content":"What is prefill?"}],"max_tokens":4,"temperature":0}`)
	status, want := f.ask(t, "/v1/chat/completions", question)
	if status != 200 {
		t.Fatalf("before: %d %s", status, want)
	}
	generate := &nodepb.Generate{RequestId: "r", Attempt: 3, Prompt: []int32{5, 6, 7}, MaxTokens: 1, IgnoreEos: true, Sampling: &nodepb.Sampling{Seed: 1}}

	evil := f.dialRPC(t, "node/d2")
	for ty, m := range map[rpc.Type]func(stream uint64) error{
		rpc.FrameGenerate:      func(s uint64) error { return evil.conn.Send(rpc.FrameGenerate, s, generate) },
		rpc.FrameBundleRequest: func(s uint64) error { return evil.conn.Send(rpc.FrameBundleRequest, s, nil) },
		rpc.FrameLoadAdapter: func(s uint64) error {
			return evil.conn.Send(rpc.FrameLoadAdapter, s, &nodepb.LoadAdapter{Name: "a", Path: "/tmp"})
		},
		rpc.FrameUnloadAdapter: func(s uint64) error {
			return evil.conn.Send(rpc.FrameUnloadAdapter, s, &nodepb.UnloadAdapter{Name: "a"})
		},
	} {
		stream := evil.conn.NewStream()
		if err := m(stream); err != nil {
			t.Fatal(err)
		}
		a := evil.next()
		m, err := rpc.Decode(a.t, a.payload)
		coded, ok := m.(interface {
			GetCode() nodepb.Code
			GetMessage() string
		})
		if err != nil || !ok || a.stream != stream || coded.GetCode() != nodepb.Code_CODE_FORBIDDEN || !strings.Contains(coded.GetMessage(), "tandem ca DIR gateway/d2") {
			t.Errorf("%v is answered by %v on stream %d: %v", ty, a.t, a.stream, m)
		}
	}
	if err := evil.conn.Send(rpc.FrameDrain, 0, &nodepb.Drain{TimeoutMs: 1}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-evil.conn.Done():
	case <-time.After(time.Minute):
		t.Fatal("the connection that sent Drain is open after a minute")
	}
	if err := evil.conn.Err(); !strings.Contains(err.Error(), `Drain from node "d2"`) {
		t.Error(err)
	}
	if text := f.nodeMetrics(t); !strings.Contains(text, "\ntandem:rpc_forbidden_frames_total 5\n") {
		t.Error("tandem:rpc_forbidden_frames_total is not 5")
	}
	f.waitReady(t, startBound)
	if status, got := f.ask(t, "/v1/chat/completions", question); status != 200 || content(want) == "" || content(got) != content(want) {
		t.Errorf("after: %d %s, before: %s", status, got, want)
	}
	log := f.decode.log.String()
	if n := strings.Count(log, "a node sent a frame that only gateways may send"); n != 1 || strings.Contains(log, "drain requested") || strings.Contains(log, "has no role") {
		t.Errorf("%d warnings, want 1 and nothing drained or without a role:\n%s", n, log)
	}

	for _, name := range []string{"gateway/bench", "old"} {
		p := f.dialRPC(t, name)
		if err := p.conn.Send(rpc.FrameGenerate, p.conn.NewStream(), generate); err != nil {
			t.Fatal(err)
		}
		for a := p.next(); a.t != rpc.FrameTokens; a = p.next() {
			if a.t == rpc.FrameEnd {
				t.Fatalf("%s: Generate is refused: %q", name, a.payload)
			}
		}
	}
	if log := f.decode.log.String(); strings.Count(log, "a peer's certificate has no role") != 1 || !strings.Contains(log, "peer=old") {
		t.Errorf("the certificate without a role is not warned about once:\n%s", log)
	}
	refusedStart(t, "gateway", 2, []string{"d2", "tandem ca DIR gateway/NAME"}, "gateway", "--tls-dir", filepath.Join(f.certs, "d2"), "--port", "0")
}

// A fleet whose certificates have no role works, with warnings. It gets roles while it
// runs: new certificates are taken without a restart.
func TestBinaryCertificatesWithoutRoles(t *testing.T) {
	t.Parallel()
	f := startKnownFleet(t, "g", "d")
	question := []byte(`{"messages":[{"role":"user","content":"What is prefill?"}],"max_tokens":4,"temperature":0}`)
	if status, answer := f.ask(t, "/v1/chat/completions", question); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	for name, d := range map[string]*daemon{"gateway": f.gateway, "decode": f.decode} {
		if !strings.Contains(d.log.String(), "this certificate has no role") {
			t.Errorf("%s does not warn about its certificate:\n%s", name, &d.log)
		}
	}
	if log := f.decode.log.String(); strings.Count(log, "a peer's certificate has no role") != 1 {
		t.Errorf("the decode node does not warn once about the gateway's certificate:\n%s", log)
	}
	if _, warned, err := tandem(t, nil, "ca", f.certs, "d3"); err != nil || !strings.Contains(warned, "no role") {
		t.Errorf("tandem ca without a role: %v, %q", err, warned)
	}
	if _, warned, err := tandem(t, nil, "ca", f.certs, "gateway/g", "node/d"); err != nil || warned != "" {
		t.Errorf("tandem ca: %v, %q", err, warned)
	}
	for _, d := range []*daemon{f.gateway, f.decode} {
		for began := time.Now(); !strings.Contains(d.log.String(), "certificates reloaded"); time.Sleep(20 * time.Millisecond) {
			if time.Since(began) > startBound {
				t.Fatalf("certificates are not reloaded within %v:\n%s", startBound, &d.log)
			}
		}
	}
	if status, answer := f.ask(t, "/v1/chat/completions", question); status != 200 {
		t.Errorf("after the renewal: %d %s", status, answer)
	}
}

// nodeMetrics is the decode node's /metrics.
func (f *knownFleet) nodeMetrics(t *testing.T) string {
	t.Helper()
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", f.metrics))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
