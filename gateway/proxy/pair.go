package proxy

import (
	"fmt"
	"io"
	"math/rand/v2"
	"sync"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// maxParams bounds a prefill server's answer with VLLM, in bytes. The block ids of a prompt of a
// million tokens take some 500 KB.
const maxParams = 4 << 20

// oneServer reports that one server has to compute prompt and answer: several answers to one prompt
// would each fetch, and free, the same blocks.
func (r *relay) oneServer() bool { return r.envelope.Whole || r.envelope.N > 1 || r.envelope.Batch > 1 }

// chargePair reserves memory for the body that a pair of servers gets: the client's with further
// members, which for SGLang are an address and a number for each prompt of a batch.
func (r *relay) chargePair() *openai.Error {
	if len(r.model.Prefill) == 0 {
		return nil
	}
	n := len(r.body)
	if r.p.Pool.Protocol() == upstream.SGLang && r.envelope.Batch > 1 {
		n += r.envelope.Batch * maxBootstrap
	}
	return r.p.Charge(r.Ctx)(n)
}

// maxBootstrap is the most bytes that a prompt of a batch adds to SGLang's body and to the lists
// from which it is made: a host name, a port and a number.
const maxBootstrap = 2 * (256 + 6 + 21)

// attempt has one server answer, or a pair of them. r.server is then the server that an error is
// about.
func (r *relay) attempt(s, prefill *upstream.Server, force upstream.Forced) error {
	r.mu.Lock()
	r.prefillFailed, r.prefillDone = false, false
	r.mu.Unlock()
	switch {
	case s.Role != upstream.Decode || r.p.Pool.Protocol() == upstream.VLLM && prefill == nil:
		return r.ask(s, force.Server, r.body, maxHeld)
	case prefill == nil:
		r.server = s
		return fmt.Errorf("%w: no prefill server is left for %s", upstream.ErrServer, s.Name)
	case r.p.Pool.Protocol() == upstream.VLLM:
		return r.relayVLLM(s, prefill, force)
	}
	return r.relaySGLang(s, prefill, force)
}

// relayVLLM requests the prompt from the prefill server and then the answer from the decode server.
// The prefill server's answer is the client's if it reports a client's error.
func (r *relay) relayVLLM(s, prefill *upstream.Server, force upstream.Forced) error {
	r.patched = upstream.PrefillRequest(r.patched[:0], r.body)
	if err := r.ask(prefill, force.Prefill, r.patched, maxParams); err != nil {
		return err
	}
	if r.call.Status != 200 {
		return nil
	}
	if !r.full {
		return fmt.Errorf("%w: the prefill server's answer is longer than %d bytes, or cut off", upstream.ErrServer, maxParams)
	}
	params, err := upstream.TransferParams(r.held)
	if err != nil {
		return fmt.Errorf("%w: the prefill server's answer: %w", upstream.ErrServer, err)
	}
	r.patched = upstream.DecodeRequest(r.patched[:0], r.body, params)
	r.end(nil)
	return r.ask(s, force.Server, r.patched, maxHeld)
}

// prefillCall is the request to the prefill server of an SGLang pair. Its goroutine owns the call.
type prefillCall struct {
	call   *upstream.Call
	server *upstream.Server
	done   chan struct{} // closed at its end, after the next fields are set
	err    error         // why there is no KV, or nil
	status int           // of an answer that is an error
	lines  []byte
	body   []byte

	mu      sync.Mutex // of the two below
	over    bool       // the call must not be aborted any more
	aborted bool
}

// relaySGLang sends the same body to both servers. The prefill server's answer is read and dropped,
// the decode server's answer is the client's.
func (r *relay) relaySGLang(s, prefill *upstream.Server, force upstream.Forced) error {
	host, port := prefill.Bootstrap()
	r.patched = upstream.BootstrapRequest(r.patched[:0], r.body, &r.envelope, host, port, rand.Int64)
	if err := r.open(prefill, force.Prefill); err != nil {
		return err
	}
	if err := r.call.Send(r.appendHead(prefill, len(r.patched)), r.patched, r.Deadline, false); err != nil {
		return err
	}
	if err := r.call.SetDeadline(r.Deadline); err != nil {
		return fmt.Errorf("%w: %s: %w", upstream.ErrServer, prefill.Name, err)
	}
	l := &prefillCall{call: r.call, server: prefill, done: make(chan struct{})}
	r.mu.Lock()
	r.prefill, r.cur, r.call = l, nil, nil
	gone := r.gone
	r.mu.Unlock()
	go l.run(r.failPrefill)
	if gone {
		return exchange.ErrGone
	}
	err := r.ask(s, force.Server, r.patched, maxHeld)
	r.mu.Lock()
	r.prefillDone = err == nil
	prefillFailed := r.prefillFailed && !r.gone
	r.mu.Unlock()
	if !prefillFailed {
		return err
	}
	// An answer of the decode server is dropped with its connection.
	<-l.done
	// The decode request was aborted because the prefill request failed, so the error is that one's.
	r.end(upstream.ErrNoVerdict)
	r.server = l.server
	if l.status == 0 || retried(l.status) {
		return l.err
	}
	// A client's error, which both servers report.
	r.lines, r.held, r.full, r.events, r.Status = l.lines, append(r.held[:0], l.body...), true, false, l.status
	return nil
}

// failPrefill aborts the decode request, which would wait for KV without end. The goroutine of the
// prefill request calls it.
func (r *relay) failPrefill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.prefillFailed = !r.prefillDone; r.prefillFailed && r.cur != nil {
		r.cur.Abort()
	}
}

// run reads the prefill server's answer. It calls fail if there will be no KV.
func (l *prefillCall) run(fail func()) {
	defer close(l.done)
	err := l.read()
	l.mu.Lock()
	l.over = true
	aborted := l.aborted
	l.mu.Unlock()
	verdict := err
	if aborted || l.status > 0 { // aborted here, or reported by Head
		verdict = upstream.ErrNoVerdict
	}
	l.call.Close(verdict)
	if l.err = err; err != nil && !aborted {
		fail()
	}
}

// abort ends the call. Any goroutine may call it.
func (l *prefillCall) abort() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.aborted = true; !l.over {
		l.call.Abort()
	}
}

func (l *prefillCall) read() error {
	if err := l.call.Head(); err != nil {
		return err
	}
	bad := l.call.Status >= 400
	if bad {
		l.status, l.lines = l.call.Status, append([]byte(nil), l.call.Lines...)
	}
	for {
		piece, err := l.call.Next(true)
		if bad && len(l.body)+len(piece) <= maxHeld {
			l.body = append(l.body, piece...)
		}
		switch {
		case err == io.EOF && bad:
			return fmt.Errorf("%w: %d", errStatus, l.status)
		case err == io.EOF:
			return nil
		case err != nil:
			return fmt.Errorf("%w: %s: %w", upstream.ErrServer, l.server.Name, err)
		}
	}
}

// endPrefill aborts the prefill request and waits for its end.
func (r *relay) endPrefill() {
	r.mu.Lock()
	l := r.prefill
	r.prefill = nil
	r.mu.Unlock()
	if l == nil {
		return
	}
	l.abort()
	<-l.done
}
