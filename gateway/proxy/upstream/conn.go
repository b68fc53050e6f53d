package upstream

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
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
	connBuffer = 4 << 10   // what a connection reads at once: many events
	maxHead    = 32 << 10  // of an answer
	maxLine    = 1 << 10   // of a chunk's head or a trailer
	oneWrite   = 16 << 10  // bodies up to this leave with their head, copied
	atOnce     = 256 << 10 // and up to this without waiting, as far as a plain socket takes them
)

// Errors of exchanges.
var (
	// ErrServer is behind every failure of a server to answer at all.
	ErrServer = errors.New("foreign: the server failed")
	// ErrStale is ErrServer where the connection had been kept from an earlier
	// request and was closed before a byte of the answer came: the server may
	// not have seen the request.
	ErrStale = fmt.Errorf("%w: a kept connection was closed", ErrServer)
	// ErrMalformed is ErrServer where the server's answer is not HTTP/1 by its rules, or
	// says its length in a way that others may read differently.
	ErrMalformed = fmt.Errorf("%w: a malformed answer", ErrServer)
	// ErrBroken says that an answer's body ended before its end.
	ErrBroken = errors.New("foreign: the answer broke off")
)

// framing is how the end of an answer's body is found.
type framing uint8

const (
	none    framing = iota // there is no body
	length                 // Content-Length
	chunked                // Transfer-Encoding: chunked
	toEnd                  // the connection's end
)

// conn is one connection to a server. Whoever took it from the server owns it;
// only abort may be called from elsewhere.
type conn struct {
	nc     net.Conn
	raw    *sock.Conn  // the same; nil: there is none
	quiet  func() bool // nothing is to be read: neither data nor an end
	server *Server
	kept   time.Time    // when it became idle; zero: never yet
	until  time.Time    // how long reads wait
	bed    int          // its place among the server's active ones
	heard  atomic.Int64 // the server's era when bytes came last

	buf     []byte // [connBuffer] or, for a long head, [maxHead]; nil while idle
	r, w    int    // what is read and not taken is buf[r:w]
	body    framing
	left    int64 // bytes until the end of the body, or of the chunk
	inBody  bool  // chunked: the chunk's own line end is still to come
	ended   bool  // the body is over
	closing bool  // the server closes the connection after the answer
	failed  error // of a read, which the next is to tell; nil: none

	mu      sync.Mutex
	aborted bool         // by abort
	member  *sock.Member // it is in a crowd, which reads it; nil: not now
}

var connBuffers = sync.Pool{New: func() any { return new([connBuffer]byte) }}

// Reply is an answer's head. Its slices are valid until the body is read.
type Reply struct {
	Status      int
	Lines       []byte // header lines, without the status line
	ContentType []byte
	Length      int64 // of the body; -1: not told
}

// hold gives the connection its buffer, drop takes it.
func (c *conn) hold() {
	if c.buf == nil {
		c.buf = connBuffers.Get().(*[connBuffer]byte)[:]
	}
	c.r, c.w = 0, 0
}

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
	return c.rest(head, body, 0, deadline)
}

// rest writes what is left of a request behind what was sent.
func (c *conn) rest(head, body []byte, sent int, deadline time.Time) error {
	n := min(sent, len(head))
	head, body = head[n:], body[sent-n:]
	// A server that does not read blocks even a small body, where it has left one
	// before unread. The deadline does not outlive the write.
	if err := c.nc.SetWriteDeadline(deadline); err != nil {
		return err
	}
	err := c.write(head, body)
	if err == nil {
		err = c.nc.SetWriteDeadline(time.Time{})
	}
	return err
}

// ask is send, and where nothing has to wait for that, the first read of the answer.
func (c *conn) ask(head, body []byte, deadline time.Time) error {
	if c.raw == nil || len(body) == 0 || len(body) > atOnce {
		return c.send(head, body, deadline)
	}
	c.space()
	sent, err, n, failed := c.raw.Ask(head, body, c.buf[c.w:])
	if sent == 0 && errors.Is(err, os.ErrDeadlineExceeded) { // of reading, before anything left
		return c.send(head, body, deadline)
	}
	if err != nil || sent == len(head)+len(body) {
		if n > 0 {
			c.came(n)
		}
		c.failed = failed
		return err
	}
	return c.rest(head, body, sent, deadline)
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

// fill reads more behind what is there.
func (c *conn) fill() (err error) {
	if err, c.failed = c.failed, nil; err != nil {
		return err
	}
	if c.space(); c.w == len(c.buf) {
		return io.ErrShortBuffer
	}
	n := 0
	if c.raw != nil {
		n, err = c.raw.Read(c.buf[c.w:])
	} else {
		n, err = c.nc.Read(c.buf[c.w:])
	}
	if n > 0 {
		c.came(n)
		return nil
	}
	return err
}

// lending is a connection whose buffer is lent while an answer comes: where nothing
// is left in it, it goes back before each wait.
type lending conn

// Lend implements sock.Lender.
func (c *lending) Lend() []byte {
	(*conn)(c).space()
	return c.buf[c.w:]
}

// Idle implements sock.Lender.
func (c *lending) Idle() {
	if c.r == c.w {
		(*conn)(c).drop()
		c.r, c.w = 0, 0
	}
}

// space makes what room there is behind what is there.
func (c *conn) space() {
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

func (c *conn) came(n int) {
	c.w += n
	c.heard.Store(c.server.era.Load())
}

// more waits for more of the body. Over a plain socket it holds no buffer meanwhile, unless one has
// bytes that were not taken.
func (c *conn) more() error {
	if c.raw == nil || c.failed != nil || c.w > c.r {
		return c.broken(c.fill())
	}
	n, err := c.raw.ReadInto((*lending)(c))
	if n > 0 {
		c.came(n)
	}
	return c.broken(err)
}

// patience is how long reads wait from now on.
func (c *conn) patience(until time.Time) error {
	c.until = until
	return c.nc.SetReadDeadline(until)
}

// broken is what a failed read means within a body; io.EOF: it is the body's end.
func (c *conn) broken(err error) error {
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
		err = io.ErrUnexpectedEOF // io.EOF is a whole body's end
	}
	return fmt.Errorf("%w: %w", ErrBroken, err)
}

// head reads an answer's head; answers that only say to go on are skipped.
// fresh says that not a byte of it had come when it failed.
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
	status, err := digits(line[9:12])
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
		case is(name, "content-type"):
			rep.ContentType = value
		case is(name, "content-length"):
			n, err := digits(value)
			if err != nil || sized && n != c.left {
				return rep, fmt.Errorf("%w: its Content-Length is %q", ErrMalformed, value[:min(len(value), 64)])
			}
			sized = true
			c.body, c.left, rep.Length = length, n, n
		case is(name, "transfer-encoding"):
			if !is(value, "chunked") || coded {
				return rep, fmt.Errorf("%w: its Transfer-Encoding is %q", ErrMalformed, value[:min(len(value), 64)])
			}
			coded = true
		case is(name, "connection"):
			closing = closing || Lists(value, "close")
			keeping = keeping || Lists(value, "keep-alive")
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

// digits returns the number that b is, without a sign or a space. It fails where an int64
// cannot have it.
func digits(b []byte) (n int64, err error) {
	for _, d := range b {
		if d < '0' || d > '9' || n > (math.MaxInt64-9)/10 {
			return 0, strconv.ErrSyntax
		}
		n = n*10 + int64(d-'0')
	}
	if len(b) == 0 {
		return 0, strconv.ErrSyntax
	}
	return n, nil
}

// token reports whether a header's name has only characters that names may have
// (RFC 9110, 5.6.2): no space before the colon, none at the start of a folded line.
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

// CutLine takes the first header line off; a name is empty where there is none.
func CutLine(lines []byte) (name, value, rest []byte) {
	line, rest, _ := bytes.Cut(lines, []byte("\r\n"))
	name, value, _ = bytes.Cut(line, []byte{':'})
	return name, bytes.TrimSpace(value), rest
}

// Lists says whether a comma-separated value, such as Connection's, has the token,
// which is in lower case.
func Lists(value []byte, token string) bool {
	for len(value) > 0 {
		var one []byte
		one, value, _ = bytes.Cut(value, []byte{','})
		if is(bytes.TrimSpace(one), token) {
			return true
		}
	}
	return false
}

// is compares in ASCII without regard to case; want is in lower case.
func is(name []byte, want string) bool {
	if len(name) != len(want) {
		return false
	}
	for i, c := range name {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != want[i] {
			return false
		}
	}
	return true
}

// next is the next piece of the body, as it lies in the buffer until the next
// call; io.EOF behind the last. It waits only where wait says so; without, no
// piece and no error mean that more has to be read.
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
			return nil, c.broken(err)
		}
	}
	return nil, io.EOF
}

// chunk takes the line before the next chunk, or those after the last; false:
// they are not all here yet.
func (c *conn) chunk() (bool, error) {
	b := c.buf[c.r:c.w]
	if c.inBody { // the line end behind the chunk before
		if len(b) < 2 {
			return false, nil
		}
		if b[0] != '\r' || b[1] != '\n' {
			return false, fmt.Errorf("%w: a chunk is longer than it says", ErrBroken)
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

// reusable says whether another request may follow on the connection.
func (c *conn) reusable() bool { return c.ended && !c.closing && c.r == c.w }

// abort ends the connection, and with it whatever waits on it.
func (c *conn) abort() {
	c.mu.Lock()
	c.aborted = true
	m := c.member
	c.mu.Unlock()
	if m != nil {
		m.End(net.ErrClosed) // who reads it has to be through before it is closed
	}
	_ = c.nc.Close()
}

// stays reports whether stay works: a socket has to be below, and the end of the body has to show in
// its bytes.
func (c *conn) stays() bool { return c.raw != nil && c.body != toEnd }

// stay has a crowd read the body while to, which it is written to, lasts. took is called whenever
// more has come, until it returns false. It returns false if the crowd could not take the
// connection.
func (c *conn) stay(w *sock.Crowd, to *sock.Conn, took func() bool) (error, bool) {
	m := sock.NewMember(c.raw, to, (*lending)(c), func(n int) bool {
		c.came(n)
		return took()
	})
	c.mu.Lock()
	c.member = m
	aborted := c.aborted
	c.mu.Unlock()
	err, ok := error(nil), false
	if !aborted {
		err, ok = m.Stay(w, c.until)
	}
	c.mu.Lock()
	c.member = nil
	c.mu.Unlock()
	if !errors.Is(err, sock.ErrLeft) {
		err = c.broken(err)
	}
	return err, ok
}
