package upstream

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/internal/sock"
)

// Bounds of one exchange, in bytes.
const (
	connBuffer = 4 << 10   // read at once: many events
	maxHead    = 32 << 10  // of an answer's head
	maxLine    = 1 << 10   // of a chunk's size line, and of the trailers
	oneWrite   = 16 << 10  // over TLS, bodies up to this are copied behind their head
	atOnce     = 256 << 10 // bodies up to this are written without waiting, as far as the socket takes them
)

// Errors of exchanges.
var (
	// ErrServer is wrapped by every error of a server that did not answer.
	ErrServer = errors.New("upstream: the server failed")
	// ErrStale is an ErrServer: a kept connection was closed before the first byte of the answer
	// arrived, so that the server may not have received the request.
	ErrStale = fmt.Errorf("%w: a kept connection was closed", ErrServer)
	// ErrMalformed is an ErrServer: the answer breaks the rules of HTTP/1, or its length is ambiguous.
	ErrMalformed = fmt.Errorf("%w: a malformed answer", ErrServer)
	// ErrBroken reports that the connection ended before the answer's body did.
	ErrBroken = errors.New("upstream: the answer broke off")
)

// framing is how the end of an answer's body is found.
type framing uint8

const (
	none    framing = iota // there is no body
	length                 // Content-Length
	chunked                // Transfer-Encoding: chunked
	toEnd                  // the end of the connection
)

// conn is one connection to a server. The goroutine that took it from the server owns it; only
// abort may be called by others.
type conn struct {
	nc       net.Conn
	raw      *sock.Conn  // the socket of nc; nil: over TLS, or not supported
	quiet    func() bool // reports whether the connection is open and has nothing to read
	server   *Server
	idleAt   time.Time    // when it became idle; zero: it was never used
	deadline time.Time    // of reads
	index    int          // in the server's active connections
	readEra  atomic.Int64 // the server's era when bytes last arrived

	buf     []byte // [connBuffer] or, for a long head, [maxHead]; nil while idle
	r, w    int    // buf[r:w] was read and not consumed
	body    framing
	left    int64 // bytes until the end of the body, or of the chunk
	inBody  bool  // chunked: the line end behind the last chunk has not been read
	ended   bool  // the body is complete
	closing bool  // the server closes the connection after the answer
	failed  error // of an earlier read, returned by the next fill

	mu      sync.Mutex
	aborted bool
	polled  *sock.Registration // with the poller that reads the connection; nil: none does
}

var connBuffers = sync.Pool{New: func() any { return new([connBuffer]byte) }}

// Reply is an answer's head. Its slices are valid until the body is read.
type Reply struct {
	Status      int
	Lines       []byte // header lines, without the status line
	ContentType []byte
	Length      int64 // of the body; -1: unknown
}

// hold gives the connection a buffer.
func (c *conn) hold() {
	if c.buf == nil {
		c.buf = connBuffers.Get().(*[connBuffer]byte)[:]
	}
	c.r, c.w = 0, 0
}

// drop gives the buffer back to the pool.
func (c *conn) drop() {
	if len(c.buf) == connBuffer {
		connBuffers.Put((*[connBuffer]byte)(c.buf))
	}
	c.buf = nil
}

// send writes a request. Over TLS a small body is copied behind its head, so that both leave in one
// record.
func (c *conn) send(head, body []byte, deadline time.Time) error {
	if c.raw == nil && len(body) <= oneWrite {
		head, body = append(head, body...), nil
	}
	return c.sendRest(head, body, 0, deadline)
}

// sendRest writes a request without its first sent bytes.
func (c *conn) sendRest(head, body []byte, sent int, deadline time.Time) error {
	n := min(sent, len(head))
	head, body = head[n:], body[sent-n:]
	// A server that did not read an earlier body blocks even a small one. The deadline ends with
	// this write.
	if err := c.nc.SetWriteDeadline(deadline); err != nil {
		return err
	}
	err := c.write(head, body)
	if err == nil {
		err = c.nc.SetWriteDeadline(time.Time{})
	}
	return err
}

// sendAndRead is send, and the first read of the answer if the request can be sent without waiting.
func (c *conn) sendAndRead(head, body []byte, deadline time.Time) error {
	if c.raw == nil || len(body) == 0 || len(body) > atOnce {
		return c.send(head, body, deadline)
	}
	c.makeRoom()
	sent, err, n, failed := c.raw.WriteThenRead(head, body, c.buf[c.w:])
	if sent == 0 && errors.Is(err, os.ErrDeadlineExceeded) { // the read deadline passed before anything was sent
		return c.send(head, body, deadline)
	}
	if err != nil || sent == len(head)+len(body) {
		if n > 0 {
			c.received(n)
		}
		c.failed = failed
		return err
	}
	return c.sendRest(head, body, sent, deadline)
}

func (c *conn) write(head, body []byte) error {
	if _, ok := c.nc.(*tls.Conn); !ok && len(body) > 0 {
		parts := net.Buffers{head, body}
		_, err := parts.WriteTo(c.nc)
		return err
	}
	_, err := c.nc.Write(head)
	if err == nil && len(body) > 0 {
		_, err = c.nc.Write(body)
	}
	return err
}

// fill reads more bytes into the buffer.
func (c *conn) fill() (err error) {
	if err, c.failed = c.failed, nil; err != nil {
		return err
	}
	if c.makeRoom(); c.w == len(c.buf) {
		return io.ErrShortBuffer
	}
	n := 0
	if c.raw != nil {
		n, err = c.raw.Read(c.buf[c.w:])
	} else {
		n, err = c.nc.Read(c.buf[c.w:])
	}
	if n > 0 {
		c.received(n)
		return nil
	}
	return err
}

// bufferOf is a connection as a source of its own buffer: an empty buffer goes back to the pool
// before each wait.
type bufferOf conn

// Buffer implements sock.BufferSource.
func (c *bufferOf) Buffer() []byte {
	(*conn)(c).makeRoom()
	return c.buf[c.w:]
}

// Release implements sock.BufferSource.
func (c *bufferOf) Release() {
	if c.r == c.w {
		(*conn)(c).drop()
		c.r, c.w = 0, 0
	}
}

// makeRoom moves the unread bytes to the front of the buffer if it is full.
func (c *conn) makeRoom() {
	if c.buf == nil {
		c.hold()
	}
	if c.r == c.w {
		c.r, c.w = 0, 0
	}
	if c.w == len(c.buf) {
		c.w = copy(c.buf, c.buf[c.r:c.w])
		c.r = 0
	}
}

// received counts bytes that were read into the buffer.
func (c *conn) received(n int) {
	c.w += n
	c.readEra.Store(c.server.era.Load())
}

// more waits for more of the body. Over a plain socket it holds no buffer meanwhile, unless the
// buffer has bytes that were not consumed.
func (c *conn) more() error {
	if c.raw == nil || c.failed != nil || c.w > c.r {
		return c.bodyError(c.fill())
	}
	n, err := c.raw.ReadInto((*bufferOf)(c))
	if n > 0 {
		c.received(n)
	}
	return c.bodyError(err)
}

// setDeadline sets the deadline of reads.
func (c *conn) setDeadline(t time.Time) error {
	c.deadline = t
	return c.nc.SetReadDeadline(t)
}

// bodyError returns what a failed read means within a body: io.EOF at the end of a body that ends
// with the connection, os.ErrDeadlineExceeded as it is, and otherwise an ErrBroken.
func (c *conn) bodyError(err error) error {
	if err == nil {
		return nil
	}
	if c.body == toEnd && errors.Is(err, io.EOF) {
		c.ended, c.closing = true, true
		return io.EOF
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // io.EOF marks the end of a complete body
	}
	return fmt.Errorf("%w: %w", ErrBroken, err)
}

// head reads the head of an answer, and skips interim (1xx) answers. fresh reports that not a byte
// of it had arrived when it failed.
func (c *conn) head() (rep Reply, fresh bool, err error) {
	for {
		end := bytes.Index(c.buf[c.r:c.w], []byte("\r\n\r\n"))
		if end < 0 {
			fresh = c.r == c.w
			if err := c.fill(); errors.Is(err, io.ErrShortBuffer) && len(c.buf) < maxHead {
				big := make([]byte, maxHead)
				c.w, c.r = copy(big, c.buf[c.r:c.w]), 0
				c.drop()
				c.buf = big
			} else if err != nil {
				return rep, fresh, err
			}
			continue
		}
		head := c.buf[c.r : c.r+end+2]
		c.r += end + 4
		rep, err = c.parse(head)
		if err != nil || rep.Status >= 200 {
			return rep, false, err
		}
	}
}

// parse reads the status line and the headers that framing needs. Its errors wrap
// ErrMalformed.
func (c *conn) parse(head []byte) (rep Reply, err error) {
	line, lines, _ := bytes.Cut(head, []byte("\r\n"))
	if len(line) < 12 || string(line[:7]) != "HTTP/1." || line[8] != ' ' || len(line) > 12 && line[12] != ' ' {
		return rep, fmt.Errorf("%w: it is not HTTP/1", ErrMalformed)
	}
	status, err := strconv.ParseUint(string(line[9:12]), 10, 16)
	if err != nil || status < 100 || status > 599 || hasControl(line) {
		return rep, fmt.Errorf("%w: its status line is %q", ErrMalformed, line[:min(len(line), 64)])
	}
	rep.Status = int(status)
	rep.Lines, rep.Length = lines, -1
	c.body, c.left, c.inBody, c.ended = toEnd, 0, false, false
	old := line[7] == '0'
	sized, coded, closing, keeping := false, false, false, false
	for len(lines) > 0 {
		line, _, _ := bytes.Cut(lines, []byte("\r\n"))
		var name, value []byte
		if name, value, lines = CutLine(lines); !token(name) || len(name) == len(line) || hasControl(line) {
			return rep, fmt.Errorf("%w: its head has the line %q", ErrMalformed, line[:min(len(line), 64)])
		}
		switch {
		case equalFold(name, "content-type"):
			rep.ContentType = value
		case equalFold(name, "content-length"):
			size, err := strconv.ParseUint(string(value), 10, 63) // it takes no sign
			n := int64(size)
			if err != nil || sized && n != c.left {
				return rep, fmt.Errorf("%w: its Content-Length is %q", ErrMalformed, value[:min(len(value), 64)])
			}
			sized = true
			c.body, c.left, rep.Length = length, n, n
		case equalFold(name, "transfer-encoding"):
			if !equalFold(value, "chunked") || coded {
				return rep, fmt.Errorf("%w: its Transfer-Encoding is %q", ErrMalformed, value[:min(len(value), 64)])
			}
			coded = true
		case equalFold(name, "connection"):
			closing = closing || HasToken(value, "close")
			keeping = keeping || HasToken(value, "keep-alive")
		}
	}
	switch {
	case coded && sized:
		return rep, fmt.Errorf("%w: it has Transfer-Encoding and Content-Length", ErrMalformed)
	case coded && old:
		return rep, fmt.Errorf("%w: it has Transfer-Encoding in HTTP/1.0", ErrMalformed)
	case coded:
		c.body = chunked
	}
	c.closing = closing || old && !keeping
	if rep.Status < 200 || rep.Status == 204 || rep.Status == 304 {
		c.body = none
	}
	c.ended = c.body == none || c.body == length && c.left == 0
	return rep, nil
}

// token reports whether a header's name is a token (RFC 9110, 5.6.2). A space before the colon and
// the beginning of a folded line are none.
func token(name []byte) bool {
	for _, c := range name {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return len(name) > 0
}

// hasControl reports whether a line of a head has a control character other than a tab.
func hasControl(line []byte) bool {
	for _, c := range line {
		if c < ' ' && c != '\t' || c == 0x7f {
			return true
		}
	}
	return false
}

// CutLine returns name and value of the first header line, and the lines behind it. The name is
// empty if the line has none.
func CutLine(lines []byte) (name, value, rest []byte) {
	line, rest, _ := bytes.Cut(lines, []byte("\r\n"))
	name, value, _ = bytes.Cut(line, []byte{':'})
	return name, bytes.TrimSpace(value), rest
}

// HasToken reports whether a comma-separated value, such as Connection's, contains the token, which
// is in lower case.
func HasToken(value []byte, token string) bool {
	for one := range bytes.SplitSeq(value, []byte{','}) {
		if equalFold(bytes.TrimSpace(one), token) {
			return true
		}
	}
	return false
}

// equalFold compares without regard to the case of ASCII letters; want is ASCII. Other characters
// that strings.EqualFold takes for ASCII letters are longer than those.
func equalFold(name []byte, want string) bool {
	return len(name) == len(want) && strings.EqualFold(string(name), want)
}

// next returns the next piece of the body, which is part of the buffer and valid until the next
// call, or io.EOF at the end. Without wait it returns neither piece nor error if more has to be
// read.
func (c *conn) next(wait bool) ([]byte, error) {
	for !c.ended {
		if c.r < c.w {
			if c.body == chunked && c.left == 0 {
				ok, err := c.chunk()
				if err != nil {
					return nil, err
				}
				if ok {
					continue
				}
			} else {
				n := c.w - c.r
				if c.body != toEnd {
					n = int(min(int64(n), c.left))
					c.left -= int64(n)
					c.ended = c.body == length && c.left == 0
				}
				piece := c.buf[c.r : c.r+n]
				c.r += n
				return piece, nil
			}
		}
		if !wait {
			return nil, nil
		}
		if err := c.fill(); err != nil {
			return nil, c.bodyError(err)
		}
	}
	return nil, io.EOF
}

// chunk consumes the line before the next chunk, or the lines after the last. It returns false if
// they have not all arrived.
func (c *conn) chunk() (bool, error) {
	b := c.buf[c.r:c.w]
	if c.inBody { // the line end behind the chunk before
		if len(b) < 2 {
			return false, nil
		}
		if b[0] != '\r' || b[1] != '\n' {
			return false, fmt.Errorf("%w: a chunk is longer than its size", ErrBroken)
		}
		b, c.r, c.inBody = b[2:], c.r+2, false
	}
	end := bytes.IndexByte(b, '\n')
	if end < 0 {
		if len(b) > maxLine {
			return false, fmt.Errorf("%w: a chunk's head has more than %d bytes", ErrBroken, maxLine)
		}
		return false, nil
	}
	n, digits := int64(0), 0
	for ; digits < end; digits++ {
		d := unhex(b[digits])
		if d < 0 {
			break
		}
		if n = n<<4 | int64(d); digits > 14 {
			return false, fmt.Errorf("%w: a chunk's size is too large", ErrBroken)
		}
	}
	if digits == 0 {
		return false, fmt.Errorf("%w: a chunk has no size", ErrBroken)
	}
	if n > 0 {
		c.r += end + 1
		c.left, c.inBody = n, true
		return true, nil
	}
	// The last: trailers, which are not passed on, and an empty line.
	for rest := b[end+1:]; ; {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			if len(rest) > maxLine {
				return false, fmt.Errorf("%w: its trailers have more than %d bytes", ErrBroken, maxLine)
			}
			return false, nil
		}
		line := bytes.TrimRight(rest[:i], "\r")
		rest = rest[i+1:]
		if len(line) == 0 {
			c.r = c.w - len(rest)
			c.ended = true
			return true, nil
		}
	}
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// reusable reports whether the connection can carry another request.
func (c *conn) reusable() bool { return c.ended && !c.closing && c.r == c.w }

// abort closes the connection, and ends what waits on it. Any goroutine may call it.
func (c *conn) abort() {
	c.mu.Lock()
	c.aborted = true
	polled := c.polled
	c.mu.Unlock()
	if polled != nil {
		polled.Cancel(net.ErrClosed) // before the descriptor is closed and its number used again
	}
	_ = c.nc.Close()
}

// canPoll reports whether poll works: it needs a plain socket, and a body whose end shows in its
// bytes.
func (c *conn) canPoll() bool { return c.raw != nil && c.body != toEnd }

// poll has a poller read the body until the connection to, which the body is written to, ends.
// onRead is called whenever more has arrived, until it returns false. ok is false if the poller
// could not take the connection.
func (c *conn) poll(w *sock.Poller, to *sock.Conn, onRead func() bool) (err error, ok bool) {
	polled := sock.NewRegistration(c.raw, to, (*bufferOf)(c), func(n int) bool {
		c.received(n)
		return onRead()
	})
	c.mu.Lock()
	c.polled = polled
	aborted := c.aborted
	c.mu.Unlock()
	if !aborted {
		err, ok = polled.Wait(w, c.deadline)
	}
	c.mu.Lock()
	c.polled = nil
	c.mu.Unlock()
	if !errors.Is(err, sock.ErrPeerClosed) {
		err = c.bodyError(err)
	}
	return err, ok
}
