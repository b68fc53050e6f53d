package proxy

import (
	"bytes"
	"errors"
	"io"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/sock"
)

// maxEvent is the size in bytes up to which an event is held until it is complete. A larger one is
// sent in parts.
const maxEvent = 64 << 10

// doneTimeout is the time from [DONE] to the end of the body within which the connection is kept.
const doneTimeout = time.Second

// relayBody is the body of a relayed answer. fasthttp reads it in the connection's goroutine. Only
// whole events are sent, so that an error event can follow where the answer breaks off.
type relayBody struct {
	r      *relay
	done   bool   // it is complete only after [DONE]
	buf    []byte // received and not sent
	sent   int    // bytes of buf that were sent
	whole  int    // bytes of buf that may be sent
	last   bool   // [DONE] was received
	begun  bool   // Read was called
	inside bool   // the sent bytes end inside an event
	end    error

	quiet time.Duration // silence after which the client gets a comment; not positive: never
	wrote time.Time     // when the last events or comment were released
	armed bool          // the read deadline considers quiet

	// Results of pump: why it stopped, and the bytes that the client did not take.
	stopped, failed error
	rest            []byte
}

// Read implements io.Reader. Any error other than io.EOF makes fasthttp abort the connection.
func (b *relayBody) Read(p []byte) (n int, err error) {
	defer b.r.RecoverRead(&n, &err)
	for b.sent == b.whole && b.end == nil {
		if c := b.clientConn(); c == nil {
			b.fill()
		} else if err := b.pump(c); err != nil {
			return 0, err
		}
	}
	if b.sent == b.whole {
		return 0, b.end
	}
	n = copy(p, b.buf[b.sent:b.whole])
	b.sent += n
	return n, nil
}

// fill waits until there is more to send, or for the end.
func (b *relayBody) fill() {
	b.shift()
	var piece []byte
	var err error
	if b.begun || len(b.buf) == 0 { // the bytes that were received with the head come first
		if piece, err = b.next(); b.whole > 0 {
			return
		}
	}
	b.begun = true
	b.buf = append(b.buf, piece...)
	if err == nil && piece != nil {
		err = b.collect()
	}
	b.release(err)
}

// next returns the next piece of the answer, or releases a comment after silence.
func (b *relayBody) next() ([]byte, error) {
	if err := b.arm(); err != nil {
		return nil, err
	}
	piece, err := b.r.call.Next(true)
	for err != nil && b.r.call.Late && b.resume() && b.whole == 0 {
		piece, err = b.r.call.Next(true)
	}
	return piece, err
}

// arm moves the read deadline to the next comment, once the client is watched.
func (b *relayBody) arm() error {
	if b.armed || b.quiet <= 0 || b.last || !b.r.untilDeadline {
		return nil
	}
	return b.setDeadline()
}

// setDeadline sets the read deadline to the request's, or to the next comment if that is earlier.
func (b *relayBody) setDeadline() error {
	b.r.untilDeadline, b.armed = true, true
	until := b.r.Deadline
	if next := b.wrote.Add(b.quiet); b.quiet > 0 && next.Before(until) {
		until = next
	}
	return b.r.call.SetDeadline(until)
}

// resume handles a read deadline that has passed. It starts to watch the client of a slow request.
// After silence it releases a comment, unless the client has a part of an event. It returns false
// if the request's deadline has passed.
func (b *relayBody) resume() bool {
	r := b.r
	if b.last || b.quiet <= 0 {
		return r.wait()
	}
	now := time.Now()
	if !now.Before(r.Deadline) {
		return false
	}
	if !r.untilDeadline {
		r.WatchClient()
	}
	if now.Sub(b.wrote) >= b.quiet {
		if b.wrote = now; !b.inside {
			b.shift()
			b.buf = append([]byte(exchange.KeepAlive), b.buf...)
			b.whole = len(exchange.KeepAlive)
		}
	}
	return b.setDeadline() == nil
}

// shift drops the sent bytes.
func (b *relayBody) shift() {
	if b.whole > 0 {
		b.buf = append(b.buf[:0], b.buf[b.whole:]...)
	}
	b.sent, b.whole = 0, 0
}

// collect appends the received bytes to buf, without waiting.
func (b *relayBody) collect() error {
	for len(b.buf) < maxEvent {
		piece, err := b.r.call.Next(false)
		if piece == nil || err != nil {
			return err
		}
		b.buf = append(b.buf, piece...)
	}
	return nil
}

// clientConn returns the client's connection if events may be written to it directly, and otherwise
// nil. fasthttp's writer is empty then, because it sends each piece at once.
func (b *relayBody) clientConn() *httpserver.Conn {
	if !b.begun || !b.r.events || b.last || b.r.renames() {
		return nil
	}
	return httpserver.ChunkWriter(b.r.Ctx)
}

// pump writes events to the client as they arrive, until a write has to wait or the answer ends.
// Most of a stream's events pass here, so that a token costs one read, one write and one wait,
// without deadlines and without calls that the scheduler tracks.
func (b *relayBody) pump(c *httpserver.Conn) error {
	b.stopped, b.failed, b.rest = nil, nil, nil
	if b.pass(c) {
		err := b.poll(c)
		if errors.Is(err, sock.ErrPeerClosed) {
			b.r.ClientGone()
		}
		if err != nil {
			if !b.r.call.Late || !b.resume() {
				b.shift() // the sent bytes were counted
				b.release(err)
			}
			return nil
		}
	}
	if b.stopped != nil { // not within poll, because release may close the connection
		b.release(b.stopped)
	}
	if len(b.rest) > 0 {
		_, b.failed = c.Write(b.rest)
	}
	return b.failed
}

// poll waits for more of the answer, and for the client's end, by a poller if possible. Then no
// goroutine is woken for each event, and none has to watch the client.
func (b *relayBody) poll(c *httpserver.Conn) error {
	r := b.r
	if !r.call.CanPoll() {
		if err := b.arm(); err != nil {
			return err
		}
		return r.call.More()
	}
	if r.Watch != nil {
		r.Watch.Stop()
		r.Watch = nil
	}
	if err := b.setDeadline(); err != nil {
		return err
	}
	if !c.OnClose(r.ClientGone) {
		return sock.ErrPeerClosed
	}
	err, ok := r.call.Poll(r.p.poller(), c.Raw, func() bool { return b.pass(c) })
	c.OnClose(nil)
	if ok {
		return err
	}
	r.WatchClient()
	return r.call.More()
}

// pass sends the received events. It returns false if pump has to continue: at the end, or if a
// write has to wait.
func (b *relayBody) pass(c *httpserver.Conn) bool {
	for {
		b.shift()
		if b.stopped = b.collect(); b.stopped != nil {
			return false
		}
		more := len(b.buf) >= maxEvent
		if b.release(nil); b.last {
			return false
		}
		if b.whole == 0 {
			return true
		}
		b.sent = b.whole
		if !b.write(c) {
			return false
		}
		if !more {
			return true
		}
	}
}

// write sends the whole events. It returns false if the client did not take all bytes at once.
func (b *relayBody) write(c *httpserver.Conn) bool {
	b.rest, b.failed = c.WriteChunkNow(b.buf[:b.whole])
	return b.failed == nil && len(b.rest) == 0
}

// release sets how many bytes of buf may be sent. err is the error after them.
func (b *relayBody) release(err error) {
	wasInside := b.inside
	switch {
	case b.r.events && len(b.buf) >= maxEvent && err == nil:
		b.whole, b.inside = wholeEvents(b.buf), false
		if b.whole == 0 {
			b.whole, b.inside = len(b.buf), true
		}
	case !b.r.events && err == nil && b.r.renames():
		// The name may be incomplete: bytes that could be its beginning wait for the rest.
		b.buf = b.r.rename(b.buf)
		b.whole = max(0, len(b.buf)-b.r.longestName())
	case !b.r.events, err == io.EOF:
		b.whole = len(b.buf)
	default:
		if b.whole = wholeEvents(b.buf); b.whole > 0 {
			b.inside = false
		}
	}
	if b.r.events && b.whole > 0 {
		b.wrote = time.Now()
		if n := b.r.nTokens(b.buf[:b.whole]); n > 0 {
			b.r.nEvents += n
			b.r.CountTokens(&b.r.times, n, b.wrote)
		}
		b.r.learnEvents(b.buf[:b.whole], wasInside, b.inside && err == nil)
		if b.last = endsDone(b.buf[:b.whole]); b.last {
			// Only the end of the body is missing, for which the client need not wait.
			b.r.untilDeadline = true
			_ = b.r.call.SetDeadline(time.Now().Add(doneTimeout)) // the next read returns an error
		}
	}
	if !b.r.events {
		b.r.learnPart(b.buf[:b.whole], err == io.EOF)
	}
	if b.r.renames() && b.whole > 0 && (b.r.events || err != nil) {
		named := b.r.rename(b.buf[:b.whole:b.whole])
		b.buf, b.whole = append(named, b.buf[b.whole:]...), len(named)
	}
	if err != nil {
		b.finish(err)
	}
}

// finish ends the answer.
func (b *relayBody) finish(err error) {
	r := b.r
	if err == io.EOF && (!b.done || b.last) {
		b.end = io.EOF
		return
	}
	if b.last { // the client has all of it
		b.end = io.EOF
		r.end(upstream.ErrNoVerdict)
		return
	}
	b.end = exchange.ErrCut
	fault := r.interrupted()
	if fault == nil {
		r.Cause = exchange.CauseUpstream
		fault = openai.BadGateway("the upstream's answer broke off")
		r.S.Log.Warn("answer broke off", "request", string(r.ID), "upstream", r.server.Name, "error", err)
		r.end(errors.Join(upstream.ErrServer, err))
	}
	if b.r.events && !r.Unread() && !b.inside {
		b.buf, _ = r.AppendFault(b.buf[:b.whole], fault)
		b.whole = len(b.buf)
	}
}

// CloseWithError implements fasthttp.ReadCloserWithError. err is why the body could not be written
// to its end, or nil.
func (b *relayBody) CloseWithError(err error) error {
	r := b.r
	if r == nil {
		return nil
	}
	b.r = nil
	if r.Cause == "" && (err == nil || b.end != nil) {
		r.end(nil)
	}
	r.held = b.buf
	r.CloseBody(err, b.end != nil)
	return nil
}

// renames reports whether the client's name of the model differs from the server's.
func (r *relay) renames() bool { return r.model != nil && r.model.As != "" }

// longestName bounds the length of the member that rename replaces, in bytes.
func (r *relay) longestName() int { return len(`"model": ""`) + 6*len(r.model.As) }

// rename replaces the server's name of the model by the client's in a piece of an answer. Only
// members are found, because quotes within strings are escaped.
func (r *relay) rename(b []byte) []byte {
	if !r.renames() {
		return b
	}
	for _, gap := range []string{"", " "} {
		from := openai.AppendString([]byte(`"model":`+gap), r.model.As)
		if bytes.Contains(b, from) {
			b = bytes.ReplaceAll(b, from, openai.AppendString([]byte(`"model":`+gap), r.model.Name))
		}
	}
	return b
}

// doneEvent is the data of the last event of a completion's stream.
var doneEvent = []byte("[DONE]")

// endsDone reports whether whole events end in doneEvent.
func endsDone(b []byte) bool {
	b = bytes.TrimRight(b, "\r\n")
	if !bytes.HasSuffix(b, doneEvent) {
		return false
	}
	b = bytes.TrimRight(b[:len(b)-len(doneEvent)], " ")
	line, ok := bytes.CutSuffix(b, []byte("data:"))
	return ok && (len(line) == 0 || line[len(line)-1] == '\n')
}

// wholeEvents returns the length of the whole events at the beginning of b.
func wholeEvents(b []byte) int {
	for i := len(b); i > 1; {
		if i = bytes.LastIndexByte(b[:i], '\n'); i < 1 {
			return 0
		}
		if b[i-1] == '\n' || i > 1 && b[i-1] == '\r' && b[i-2] == '\n' {
			return i + 1
		}
	}
	return 0
}
