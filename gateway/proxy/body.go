package proxy

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/sock"
)

// maxEvent is how much of an event is held until the rest of it is there, in
// bytes; a larger one leaves in parts.
const maxEvent = 64 << 10

// lastPatience is how long a server may take from [DONE] to its body's end, for
// its connection to be kept.
const lastPatience = time.Second

// relayBody is a relayed answer's body: the server reads it on the connection's
// own goroutine, as it reads a stream's. Of events only whole ones leave, so that
// where the answer breaks off an event can tell of it.
type relayBody struct {
	r      *relay
	done   bool   // it is whole only behind [DONE]
	buf    []byte // what came and has not left; its first bytes of whole may leave
	sent   int
	whole  int
	last   bool // [DONE] was seen
	begun  bool // something was asked for
	inside bool // what left ended inside an event
	end    error

	// Of pump: why it stopped, and what it wrote and the client has not taken.
	stopped, failed error
	rest            []byte
}

// Read implements io.Reader. Any error but io.EOF makes the server abort the
// connection.
func (b *relayBody) Read(p []byte) (n int, err error) {
	defer b.r.RecoverRead(&n, &err)
	for b.sent == b.whole && b.end == nil {
		if c := b.straight(); c == nil {
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

// fill waits until there is more to send, or the end.
func (b *relayBody) fill() {
	b.shift()
	var piece []byte
	var err error
	if b.begun || len(b.buf) == 0 { // what was held before the head was sent comes first
		piece, err = b.r.next()
	}
	b.begun = true
	b.buf = append(b.buf, piece...)
	if err == nil && piece != nil {
		err = b.collect()
	}
	b.settle(err)
}

// shift forgets what has left.
func (b *relayBody) shift() {
	if b.whole > 0 {
		b.buf = append(b.buf[:0], b.buf[b.whole:]...)
	}
	b.sent, b.whole = 0, 0
}

// collect takes what has come, without waiting.
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

// straight is the client's connection where events may be written to it past the
// server's writer, which is empty: it writes each piece at once.
func (b *relayBody) straight() *httpserver.Conn {
	if !b.begun || !b.r.events || b.last || b.r.renames() || !b.r.Ctx.Request.Header.IsHTTP11() {
		return nil
	}
	if c, ok := b.r.Ctx.Conn().(*httpserver.Conn); ok && c.Raw != nil {
		return c
	}
	return nil
}

// pump passes events on as they come, until something has to wait or the answer
// ends. That is most of what the gateway does with a stream, so a token costs it
// one read, one write and one wait: no deadlines are set, nothing is announced to
// the scheduler.
func (b *relayBody) pump(c *httpserver.Conn) error {
	b.stopped, b.failed, b.rest = nil, nil, nil
	if b.pass(c) {
		err := b.poll(c)
		if errors.Is(err, sock.ErrPeerClosed) {
			b.r.ClientGone()
		}
		if err != nil {
			if !b.r.call.Late || !b.r.wait() {
				b.shift() // what has left was counted
				b.settle(err)
			}
			return nil
		}
	}
	if b.stopped != nil { // not within the stay: settling may close the connection
		b.settle(b.stopped)
	}
	if len(b.rest) > 0 {
		_, b.failed = c.Write(b.rest)
	}
	return b.failed
}

// stay waits for more of the answer, and for the client's end, in a crowd if it can: no goroutine
// is woken for each event, and none has to watch the client.
func (b *relayBody) poll(c *httpserver.Conn) error {
	r := b.r
	if !r.call.CanPoll() {
		return r.call.More()
	}
	if r.Watch != nil {
		r.Watch.Stop()
		r.Watch = nil
	}
	r.patient = true
	if err := r.call.SetDeadline(r.Deadline); err != nil {
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

// pass sends on what has come; false: pump has to look.
func (b *relayBody) pass(c *httpserver.Conn) bool {
	for {
		b.shift()
		if b.stopped = b.collect(); b.stopped != nil {
			return false
		}
		more := len(b.buf) >= maxEvent
		if b.settle(nil); b.last {
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

// frames are what events are framed in, and gathered in, until they have left: a
// stream that waits for its next token holds neither.
var frames = sync.Pool{New: func() any { return new([]byte) }}

// write sends what may leave; false: the client did not take all of it at once.
func (b *relayBody) write(c *httpserver.Conn) bool {
	frame := frames.Get().(*[]byte)
	*frame = appendChunk((*frame)[:0], b.buf[:b.whole])
	n, err := c.Raw.WriteNow(*frame)
	if b.failed, b.rest = err, (*frame)[n:]; err != nil || len(b.rest) > 0 {
		return false // rest is the frame's
	}
	frames.Put(frame)
	return true
}

// appendChunk appends data as a chunk of HTTP.
func appendChunk(dst, data []byte) []byte {
	dst = strconv.AppendUint(dst, uint64(len(data)), 16)
	dst = append(append(dst, "\r\n"...), data...)
	return append(dst, "\r\n"...)
}

// settle decides what of the bytes may leave; err is behind them.
func (b *relayBody) settle(err error) {
	switch {
	case b.r.events && len(b.buf) >= maxEvent && err == nil:
		b.whole, b.inside = wholeEvents(b.buf), false
		if b.whole == 0 {
			b.whole, b.inside = len(b.buf), true
		}
	case !b.r.events && err == nil && b.r.renames():
		// The name may be in parts: what could be its beginning waits for the rest.
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
		events := max(1, bytes.Count(b.buf[:b.whole], []byte("\n\n")))
		b.r.nEvents += events
		b.r.CountTokens(&b.r.times, events, time.Now())
		b.r.told.learn(b.buf[:b.whole])
		if b.last = endsDone(b.buf[:b.whole]); b.last {
			// Only the body's end is missing, which the client need not wait for.
			b.r.patient = true
			_ = b.r.call.SetDeadline(time.Now().Add(lastPatience)) // an error shows at the next read
		}
	}
	if b.r.renames() && b.whole > 0 && (b.r.events || err != nil) {
		named := b.r.rename(b.buf[:b.whole:b.whole])
		b.buf, b.whole = append(named, b.buf[b.whole:]...), len(named)
	}
	if err != nil {
		b.over(err)
	}
}

// over is the answer's end.
func (b *relayBody) over(err error) {
	r := b.r
	if err == io.EOF && (!b.done || b.last) {
		b.end = io.EOF
		return
	}
	if b.last { // all that a client waits for is there
		b.end = io.EOF
		r.drop(nil)
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
		b.buf = fault.AppendEvent(b.buf[:b.whole])
		b.whole = len(b.buf)
	}
}

// CloseWithError implements fasthttp.ReadCloserWithError; err is why the body
// could not be written to its end, or nil.
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

// renames says whether the client knows the model by another name than its server.
func (r *relay) renames() bool { return r.model != nil && r.model.As != "" }

// longestName bounds what rename looks for, in bytes.
func (r *relay) longestName() int { return len(`"model": ""`) + 6*len(r.model.As) }

// rename gives a piece of an answer the name by which the client knows the model.
// Within JSON's strings quotes are escaped, so that only members are met.
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

// doneEvent ends streams of completions.
var doneEvent = []byte("[DONE]")

// endsDone says whether whole events end in that one.
func endsDone(b []byte) bool {
	b = bytes.TrimRight(b, "\r\n")
	if !bytes.HasSuffix(b, doneEvent) {
		return false
	}
	b = bytes.TrimRight(b[:len(b)-len(doneEvent)], " ")
	line, ok := bytes.CutSuffix(b, []byte("data:"))
	return ok && (len(line) == 0 || line[len(line)-1] == '\n')
}

// wholeEvents is the length of the whole events that b begins with.
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
