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

// maxParams bounds what a prefill server answers in VLLM's first leg, in bytes:
// the block ids of a prompt of a million tokens take some 500 KB.
const maxParams = 4 << 20

// alone says that one server has to compute prompt and answer: of several answers
// to one prompt each would fetch, and free, the same blocks.
func (r *relay) alone() bool { return r.look.Whole || r.look.N > 1 || r.look.Batch > 1 }

// chargePair counts the body of a pair's legs, which is the client's with members
// added: for SGLang an address and a number for each prompt of a batch.
func (r *relay) chargePair() *openai.Error {
	if len(r.model.Prefill) == 0 {
		return nil
	}
	n := len(r.body)
	if r.p.Pool.Protocol() == upstream.SGLang && r.look.Batch > 1 {
		n += r.look.Batch * maxBootstrap
	}
	return r.p.Charge(r.Ctx)(n)
}

// maxBootstrap is the most that a prompt of a batch adds to the body of SGLang's
// legs and to the lists on the way there: a host name, a port and a number.
const maxBootstrap = 2 * (256 + 6 + 21)

// attempt has one server answer, or a pair of them. r.server is then the one that
// an error is about.
func (r *relay) attempt(s, prefill *upstream.Server, force upstream.Forced) error {
	r.mu.Lock()
	r.unfed, r.fed = false, false
	r.mu.Unlock()
	switch {
	case s.Role != upstream.Decode || r.p.Pool.Protocol() == upstream.VLLM && prefill == nil:
		return r.ask(s, force.Server, r.body, maxHeld)
	case prefill == nil:
		r.server = s
		return fmt.Errorf("%w: no prefill server is left for %s", upstream.ErrServer, s.Name)
	case r.p.Pool.Protocol() == upstream.VLLM:
		return r.inTurn(s, prefill, force)
	}
	return r.atOnce(s, prefill, force)
}

// inTurn is VLLM's pair: the prompt first, then the answer from its KV. What the
// client did wrong it is told by the first leg.
func (r *relay) inTurn(s, prefill *upstream.Server, force upstream.Forced) error {
	r.patched = upstream.PrefillRequest(r.patched[:0], r.body)
	if err := r.ask(prefill, force.Prefill, r.patched, maxParams); err != nil {
		return err
	}
	if r.call.Status != 200 {
		return nil
	}
	if !r.full {
		return fmt.Errorf("%w: the prefill leg's answer is longer than %d bytes, or cut off", upstream.ErrServer, maxParams)
	}
	params, err := upstream.TransferParams(r.held)
	if err != nil {
		return fmt.Errorf("%w: the prefill leg's answer: %w", upstream.ErrServer, err)
	}
	r.patched = upstream.DecodeRequest(r.patched[:0], r.body, params)
	r.end(nil)
	return r.ask(s, force.Server, r.patched, maxHeld)
}

// leg is the prefill half of an SGLang pair. Its goroutine owns the call.
type leg struct {
	call   *upstream.Call
	server *upstream.Server
	done   chan struct{} // closed at its end; what follows is set before
	err    error         // why there will be no KV; nil: there is
	status int           // of an answer that is an error
	lines  []byte
	body   []byte

	mu      sync.Mutex // of the two below
	over    bool       // the call is not to be aborted any more
	aborted bool
}

// atOnce is SGLang's pair: both legs carry the same body; the prefill server's
// answer is read and dropped, the decode server's is the client's.
func (r *relay) atOnce(s, prefill *upstream.Server, force upstream.Forced) error {
	host, port := prefill.Bootstrap()
	r.patched = upstream.BootstrapRequest(r.patched[:0], r.body, &r.look, host, port, rand.Int64)
	if err := r.open(prefill, force.Prefill); err != nil {
		return err
	}
	if err := r.call.Send(r.appendHead(prefill, len(r.patched)), r.patched, r.Deadline); err != nil {
		return err
	}
	if err := r.call.SetDeadline(r.Deadline); err != nil {
		return fmt.Errorf("%w: %s: %w", upstream.ErrServer, prefill.Name, err)
	}
	l := &leg{call: r.call, server: prefill, done: make(chan struct{})}
	r.mu.Lock()
	r.prefill, r.cur, r.call = l, nil, nil
	gone := r.gone
	r.mu.Unlock()
	go l.run(r.starve)
	if gone {
		return exchange.ErrGone
	}
	err := r.open(s, force.Server)
	if err == nil {
		if err = r.call.Send(r.appendHead(s, len(r.patched)), r.patched, r.Deadline); err == nil {
			err = r.await(maxHeld)
		}
	}
	r.mu.Lock()
	r.fed = err == nil
	unfed := r.unfed && !r.gone
	r.mu.Unlock()
	if !unfed {
		return err
	}
	// What came in spite of it is not taken: its connection is closed.
	<-l.done
	// The decode leg was ended because of the other: the error is that one's.
	r.drop(nil)
	r.server = l.server
	if l.status == 0 || retried(l.status) {
		return l.err
	}
	// A client's fault, which both would tell.
	r.lines, r.held, r.full, r.events, r.Status = l.lines, append(r.held[:0], l.body...), true, false, l.status
	return nil
}

// starve ends the decode leg, which would wait for KV that does not come; the
// other leg's goroutine calls it.
func (r *relay) starve() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unfed = !r.fed; r.unfed && r.cur != nil {
		r.cur.Abort()
	}
}

// run reads the prefill server's answer; fail is called when there will be no KV.
func (l *leg) run(fail func()) {
	defer close(l.done)
	err := l.read()
	l.mu.Lock()
	l.over = true
	aborted := l.aborted
	l.mu.Unlock()
	switch {
	case err == nil && !aborted:
		l.call.Close(nil)
		return
	case err == nil: // its connection was closed when all of the answer had been read
		l.call.NoVerdict()
		return
	case aborted, l.status > 0: // of its own doing; Head has told
		l.call.NoVerdict()
	default:
		l.call.Close(err)
	}
	if l.err = err; !aborted {
		fail()
	}
}

// abort ends the leg from any goroutine.
func (l *leg) abort() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.aborted = true; !l.over {
		l.call.Abort()
	}
}

func (l *leg) read() error {
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

// unpair ends the other leg, and waits for it.
func (r *relay) unpair() {
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
