package load

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bounds of the client.
const (
	dialTimeout  = 30 * time.Second
	maxEvent     = 4 << 20  // bytes of one event
	maxErrorBody = 4 << 10  // bytes kept of an error's body
	maxText      = 16 << 20 // bytes kept of an answer's text
	bufferBytes  = 8 << 10  // per direction of decoding and connection
)

// Target is where requests go.
type Target struct {
	URL      string // scheme, host and path
	Chat     bool   // chunks are those of /v1/chat/completions
	Header   http.Header
	Insecure bool // do not verify the server's certificate
	KeepText bool // keep the answers' texts

	Dial func(ctx context.Context) (net.Conn, error) // nil: TCP to the URL's host
}

// Client sends requests over its own HTTP/1.1 connections and reads streams.
type Client struct {
	target Target
	addr   string
	tls    *tls.Config
	head   []byte // of every request, before its own headers
	keys   [][]byte

	mu   sync.Mutex
	idle []*conn
}

// NewClient checks the target.
func NewClient(t Target) (*Client, error) {
	u, err := url.Parse(t.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%w: %q is no URL like http://127.0.0.1:8000", ErrOption, t.URL)
	}
	c := &Client{target: t, addr: u.Host, keys: completionKeys}
	if t.Chat {
		c.keys = chatKeys
	}
	port := "80"
	if u.Scheme == "https" {
		port = "443"
		c.tls = &tls.Config{ServerName: u.Hostname(), InsecureSkipVerify: t.Insecure, MinVersion: tls.VersionTLS12} //nolint:gosec // the user asks for it
	}
	if u.Port() == "" {
		c.addr = net.JoinHostPort(u.Hostname(), port)
	}
	head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\nUser-Agent: tandem-bench\r\n", u.RequestURI(), u.Host)
	for _, k := range slices.Sorted(maps.Keys(t.Header)) {
		v := t.Header.Get(k)
		if k == "" || strings.ContainsAny(k+v, "\r\n") || strings.ContainsAny(k, ": ") {
			return nil, fmt.Errorf("%w: --header %s", ErrOption, k)
		}
		head += k + ": " + v + "\r\n"
	}
	c.head = []byte(head)
	return c, nil
}

// conn is one connection. The time of an event is when its last bytes arrived.
type conn struct {
	net.Conn
	clock *Stamped
	in    *bufio.Reader // of the connection
	lines *bufio.Reader // of a response's body
	long  []byte        // an event that is longer than the buffer
	out   []byte
	used  bool // it has answered before
}

func (c *Client) dial(ctx context.Context) (*conn, error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		k := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		return k, nil
	}
	c.mu.Unlock()
	return c.fresh(ctx)
}

func (c *Client) fresh(ctx context.Context) (*conn, error) {
	dial := c.target.Dial
	if dial == nil {
		d := net.Dialer{Timeout: dialTimeout}
		dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "tcp", c.addr) }
	}
	raw, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	k := &conn{clock: NewStamped(raw)}
	k.Conn = k.clock
	if c.tls != nil {
		k.Conn = tls.Client(k.clock, c.tls)
	}
	k.in, k.lines = bufio.NewReaderSize(k, bufferBytes), bufio.NewReaderSize(nil, bufferBytes)
	return k, nil
}

// Close closes idle connections.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.idle {
		_ = k.Close() // no request uses it
	}
	c.idle = nil
}

// Outcome is the result of a request. Times are since the run's start.
type Outcome struct {
	Scheduled time.Duration // sending time of the arrival process
	Ready     time.Duration // when --max-concurrency admitted it; at least Scheduled
	Sent      time.Duration
	First     time.Duration   // first chunk with text
	Last      time.Duration   // last chunk
	ITL       []time.Duration // gaps between chunks with text
	Late      time.Duration   // longest time between arrival of bytes and their Read; 0 if the kernel reports no arrival times
	Prompt    int             // tokens by the server's count; -1: not reported
	Output    int             // same
	Chunks    int             // chunks with text
	Text      []byte          // JSON string without quotes, if kept
	Err       error
}

// TTFT returns the time from sending to the first text.
func (o *Outcome) TTFT() time.Duration { return o.First - o.Sent }

// Latency returns the time from sending to the last chunk.
func (o *Outcome) Latency() time.Duration { return o.Last - o.Sent }

// Errors of a stream.
var (
	ErrStatus = errors.New("the server refused")
	ErrStream = errors.New("the server reported an error in the stream")
	ErrEmpty  = errors.New("the stream ended without any text")
	ErrCut    = errors.New("the stream broke off")
)

// Do sends one request and reads its stream to the end. start is the run's start.
func (c *Client) Do(ctx context.Context, start time.Time, body []byte, id string, o *Outcome) {
	o.Prompt, o.Output = -1, -1
	o.Sent = time.Since(start)
	k, err := c.dial(ctx)
	if err != nil {
		o.Err = err
		return
	}
	reusable, err := c.exchange(ctx, k, start, body, id, o)
	if err != nil && k.used && o.Chunks == 0 && (errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || isReset(err)) && ctx.Err() == nil {
		// The server had closed an idle connection, so that this is not an answer.
		_ = k.Close()
		if k, err = c.fresh(ctx); err != nil {
			o.Err = err
			return
		}
		reusable, err = c.exchange(ctx, k, start, body, id, o)
	}
	o.Err = err
	if !reusable {
		_ = k.Close()
		return
	}
	k.used = true
	c.mu.Lock()
	c.idle = append(c.idle, k)
	c.mu.Unlock()
}

func isReset(err error) bool {
	var op *net.OpError
	return errors.As(err, &op)
}

// exchange sends one request and reads its answer.
func (c *Client) exchange(ctx context.Context, k *conn, start time.Time, body []byte, id string, o *Outcome) (reusable bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = k.Close() })
	defer stop()
	k.out = append(k.out[:0], c.head...)
	if id != "" {
		k.out = append(append(append(k.out, "X-Request-Id: "...), id...), "\r\n"...)
	}
	k.out = fmt.Appendf(k.out, "Content-Length: %d\r\n\r\n", len(body))
	k.out = append(k.out, body...)
	o.Sent = time.Since(start) // after dialing, because connecting is not part of the answer
	if _, err := k.Write(k.out); err != nil {
		return false, err
	}
	if cap(k.out) > 64<<10 {
		k.out = nil // long prompts are not kept per connection
	}
	if _, err := k.in.Peek(1); err != nil { // io.EOF, which ReadResponse would call unexpected: nothing was answered
		return false, err
	}
	r, err := http.ReadResponse(k.in, nil)
	if err != nil {
		return false, err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(r.Body, maxErrorBody)) // a part of the text is enough
		return false, fmt.Errorf("%w: %s: %s", ErrStatus, r.Status, bytes.TrimSpace(text))
	}
	k.lines.Reset(r.Body)
	if err := c.events(k, start, o); err != nil {
		return false, err
	}
	return !r.Close, nil
}

// events reads a stream to its end.
func (c *Client) events(k *conn, start time.Time, o *Outcome) error {
	done := false
	for {
		line, err := k.line()
		if err == io.EOF && len(line) == 0 {
			break
		}
		if err != nil && err != io.EOF {
			return fmt.Errorf("%w after %d chunks: %w", ErrCut, o.Chunks, err)
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		o.Late = max(o.Late, k.clock.late)
		if bytes.Equal(data, []byte("[DONE]")) {
			done = true
			continue
		}
		if err := c.addEvent(data, k.clock.at.Sub(start), o); err != nil {
			return err
		}
	}
	switch {
	case o.Chunks == 0 && !(done && o.Output == 0):
		return ErrEmpty
	case o.Chunks == 0:
		o.First = o.Last
	}
	return nil
}

// addEvent records one event.
func (c *Client) addEvent(data []byte, at time.Duration, o *Outcome) error {
	e := parse(data, c.keys)
	if e.failed != nil {
		return fmt.Errorf("%w: %.300s", ErrStream, e.failed)
	}
	if e.prompt >= 0 {
		o.Prompt = e.prompt
	}
	if e.completion >= 0 {
		o.Output = e.completion
	}
	if !e.choices {
		return nil
	}
	if e.text != nil {
		if o.Chunks == 0 {
			o.First = at
		} else {
			o.ITL = append(o.ITL, at-o.Last)
		}
		o.Chunks++
		if c.target.KeepText && len(o.Text)+len(e.text) <= maxText {
			o.Text = append(o.Text, e.text...)
		}
		o.Last = at
		return nil
	}
	if o.Chunks > 0 {
		o.Last = max(o.Last, at)
	}
	return nil
}

// line returns the next line of the body without its end, valid until the next call. At
// the end of the body it returns io.EOF with the last line.
func (k *conn) line() ([]byte, error) {
	k.long = k.long[:0]
	for {
		part, err := k.lines.ReadSlice('\n')
		if len(k.long) == 0 && err != bufio.ErrBufferFull {
			return bytes.TrimRight(part, "\r\n"), err
		}
		if k.long = append(k.long, part...); len(k.long) > maxEvent {
			return nil, fmt.Errorf("an event of more than %d bytes", maxEvent)
		}
		if err != bufio.ErrBufferFull {
			return bytes.TrimRight(k.long, "\r\n"), err
		}
	}
}

// Decoded returns the answer's text.
func (o *Outcome) Decoded() string {
	var s string
	if json.Unmarshal(append(append([]byte{'"'}, o.Text...), '"'), &s) != nil {
		return string(o.Text) // the server's JSON is invalid; return its bytes
	}
	return s
}
