package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// clientTimeout is the longest time of one answer.
const clientTimeout = 20 * time.Second

// ask is the request that a connection repeats.
type ask struct {
	prompt int // bytes
	tokens int // of a stream; 0: no stream
}

// request returns the bytes of connection i's request. Prompts of different connections differ from
// their first words on.
func (a ask) request(addr string, i int) []byte {
	text := fmt.Sprintf("user %d asks: ", i*7919)
	text += strings.Repeat("the quick brown fox jumps over the lazy dog ", a.prompt/44+1)
	body := fmt.Sprintf(`{"model":"mock","messages":[{"role":"user","content":"%s"}],"max_tokens":%d,"stream":%v,"temperature":0}`,
		text[:max(16, a.prompt)], max(1, a.tokens), a.tokens > 0)
	return fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nAccept: */*\r\nUser-Agent: bench\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s",
		addr, apiKey, len(body), body)
}

// client has the connections that are kept busy.
type client struct {
	answers, tokens atomic.Int64
	stop            atomic.Bool
	wg              sync.WaitGroup
	mu              sync.Mutex
	err             error
}

// drive keeps n connections to p busy until end is called. The beginnings of streams are spread
// over their length.
func drive(p *proxy, n int, a ask) *client {
	l := new(client)
	for i := range n {
		l.wg.Go(func() {
			if a.tokens > 0 {
				time.Sleep(time.Duration(i) * time.Duration(a.tokens) * gap / time.Duration(n))
			}
			if err := l.keep(p, i, a); err != nil {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.err = errors.Join(l.err, err)
				l.stop.Store(true)
			}
		})
	}
	return l
}

// end stops the connections after their current answers, and returns their errors.
func (l *client) end() error {
	l.stop.Store(true)
	l.wg.Wait()
	return l.err
}

func (l *client) keep(p *proxy, i int, a ask) error {
	k, err := dial(p)
	if err != nil {
		return err
	}
	defer k.c.Close()
	request := a.request(p.addr, i)
	for !l.stop.Load() {
		if _, _, err := k.exchange(request, a.tokens, &l.tokens); err != nil {
			return err
		}
		l.answers.Add(1)
	}
	return nil
}

// conn is one connection of the client.
type conn struct {
	c   net.Conn
	in  *bufio.Reader
	buf []byte
}

func dial(p *proxy) (*conn, error) {
	c, err := net.DialTimeout("tcp", p.addr, clientTimeout)
	if err != nil {
		return nil, err
	}
	if p.tls != nil {
		c = tls.Client(c, p.tls)
	}
	return &conn{c: c, in: bufio.NewReaderSize(c, 4<<10), buf: make([]byte, 8<<10)}, nil
}

var (
	tokenMark = []byte(`data: {"id"`)
	roleMark  = []byte(`"role":"assistant"`) // in the first event of native streams, which is not a token
	doneMark  = []byte("data: [DONE]")
)

// exchange sends a request and reads its answer, which must be a stream of that many tokens unless
// tokens is 0. first is when the first token arrived.
func (k *conn) exchange(request []byte, tokens int, seen *atomic.Int64) (sent, first time.Time, err error) {
	if err := k.c.SetDeadline(time.Now().Add(clientTimeout)); err != nil {
		return sent, first, err
	}
	sent = time.Now()
	if _, err := k.c.Write(request); err != nil {
		return sent, first, err
	}
	line, length, err := readHead(k.in)
	if err != nil {
		return sent, first, err
	}
	if !strings.HasPrefix(line, "HTTP/1.1 200") {
		rest, _ := k.in.Peek(k.in.Buffered())
		return sent, first, fmt.Errorf("the answer was %q: %s", line, rest[:min(len(rest), 300)])
	}
	if length >= 0 {
		n, err := k.in.Discard(length)
		if err == nil && tokens > 0 {
			err = fmt.Errorf("the answer is no stream, but %d bytes", n)
		}
		return sent, first, err
	}
	got, done, role, carry := 0, false, true, 0
	for body := (unchunk{}); !body.over; {
		n, err := k.in.Read(k.buf[carry:])
		if err == nil {
			n, err = body.strip(k.buf[carry : carry+n])
		}
		if err != nil {
			return sent, first, fmt.Errorf("a stream ended after %d tokens of %d: %w", got, tokens, err)
		}
		b := k.buf[:carry+n]
		if m := bytes.Count(b, tokenMark); m > 0 {
			if role && bytes.Contains(b, roleMark) {
				m--
			}
			role = false
			if m > 0 && got == 0 {
				first = time.Now()
			}
			got += m
			seen.Add(int64(m))
		}
		done = done || bytes.Contains(b, doneMark)
		// Bytes that may be the beginning of a mark are searched again with the following ones.
		carry = copy(k.buf, b[len(b)-min(len(b), len(tokenMark)-1):])
	}
	if tokens > 0 && (got != tokens || !done) {
		return sent, first, fmt.Errorf("a stream had %d tokens of %d, [DONE]: %v", got, tokens, done)
	}
	return sent, first, nil
}

// unchunk removes the chunked framing of a body. Slow proxies change the framing, also within an
// event.
type unchunk struct {
	left   int  // bytes of the current chunk
	size   int  // of the next chunk, as far as its line was read
	inLine bool // the line has begun
	last   bool // the last chunk was read
	over   bool // the body is complete
}

// strip moves the bytes of the body to the front of b and returns their number.
func (u *unchunk) strip(b []byte) (n int, err error) {
	for i := 0; i < len(b); {
		if u.left > 0 {
			m := copy(b[n:], b[i:min(len(b), i+u.left)])
			n, i, u.left = n+m, i+m, u.left-m
			continue
		}
		c := b[i]
		i++
		switch digit := strings.IndexByte("0123456789abcdef", c|0x20); {
		case c == '\r':
		case c == '\n' && u.inLine:
			u.left, u.last = u.size, u.size == 0
			u.size, u.inLine = 0, false
		case c == '\n': // after a chunk, or after the last one
			u.over = u.last
		case digit < 0 || u.size > 1<<24:
			return n, fmt.Errorf("a chunk's length has %q", c)
		default:
			u.size, u.inLine = u.size<<4|digit, true
		}
	}
	return n, nil
}

// firstTokens returns the sorted times in ms from n requests, one after the other, to their first
// tokens.
func firstTokens(ctx context.Context, p *proxy, n int) ([]float64, error) {
	k, err := dial(p)
	if err != nil {
		return nil, err
	}
	defer k.c.Close()
	request, times := ask{prompt: 200, tokens: 1}.request(p.addr, 1), []float64(nil)
	var seen atomic.Int64
	for i := range n + n/10 {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		sent, first, err := k.exchange(request, 1, &seen)
		if err != nil {
			return nil, err
		}
		if i >= n/10 { // the first ones only warm up
			times = append(times, first.Sub(sent).Seconds()*1e3)
		}
	}
	slices.Sort(times)
	return times, nil
}
