// Package truth checks load testers. Its mock server implements enough of the OpenAI API
// to be loaded, sends tokens at a given pace, and records when each request arrived and
// each token was sent. Compare compares the figures of a load tester with those that
// follow from this record.
//
// A stream's tokens are due at fixed times after its arrival, so that a late token does
// not delay the next one. A stall delays everything that is due while it lasts. Invariant:
// a token's time is recorded immediately before the one system call that sends it, so
// that no client can have received it earlier.
//
// The package generates no meaningful text and uses no internals of any load tester.
package truth

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
)

// Bounds of the mock.
const (
	maxBody    = 64 << 20 // bytes of a request
	maxTokens  = 1 << 20  // of an answer
	chatTokens = 16       // of an answer to a chat without max_tokens
)

// Pace is when tokens are sent. With zero jitter and spread all streams are alike.
type Pace struct {
	First  time.Duration // from arrival to the first token, at least
	Spread time.Duration // the first token comes up to this much later, evenly distributed
	Gap    time.Duration // between two tokens
	Jitter time.Duration // each later token is due up to this much late, evenly distributed

	StallAfter time.Duration // from the first request on
	Stall      time.Duration // time in which nothing is sent
}

// Stream is one request as recorded by the server. Times are since the mock's start.
type Stream struct {
	ID     string          `json:"id"` // X-Request-Id
	Prompt int             `json:"prompt_tokens"`
	Came   time.Duration   `json:"came"`
	Sent   []time.Duration `json:"sent"` // one per token
}

// Mock is the server.
type Mock struct {
	pace  Pace
	start time.Time

	mu      sync.Mutex
	streams []*Stream
	ended   int           // of streams, those whose answers have ended
	first   time.Duration // arrival of the first request
}

// NewMock returns a mock whose times are since start.
func NewMock(p Pace, start time.Time) *Mock { return &Mock{pace: p, start: start} }

// Streams returns the requests so far whose answers have ended, in order of arrival. It
// must not be called while requests run.
func (m *Mock) Streams() []*Stream {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Clone(m.streams)
	slices.SortStableFunc(all, func(a, b *Stream) int { return cmp.Compare(a.Came, b.Came) })
	return all
}

// Clear drops the record. The next request is the first again.
func (m *Mock) Clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.streams, m.ended = nil, 0
}

// Serve answers connections until l is closed.
func (m *Mock) Serve(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		go m.Conn(c)
	}
}

// Conn answers the requests of one connection, one after the other.
func (m *Mock) Conn(c net.Conn) {
	defer c.Close()
	clock := load.NewStamped(c)
	in := bufio.NewReader(clock)
	for {
		if _, err := in.Peek(1); err != nil {
			return // closed, or idle for too long
		}
		came := clock.At().Sub(m.start)
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if err := m.answer(c, r, came); err != nil {
			return
		}
	}
}

// answer reads one request and sends its answer.
func (m *Mock) answer(c net.Conn, r *http.Request, came time.Duration) error {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return err
	}
	switch r.Method + " " + r.URL.Path {
	case "GET /v1/models":
		return plain(c, 200, `{"object":"list","data":[{"id":"mock","object":"model","created":0,"owned_by":"tandem"}]}`)
	case "GET /health":
		return plain(c, 200, `{}`)
	case "GET /truth":
		data, err := json.Marshal(m.Streams())
		if err != nil {
			return err
		}
		return plain(c, 200, string(data))
	case "GET /truth/count":
		m.mu.Lock()
		body := fmt.Sprintf(`{"began":%d,"ended":%d}`, len(m.streams), m.ended)
		m.mu.Unlock()
		return plain(c, 200, body)
	case "GET /truth/start":
		return plain(c, 200, strconv.FormatInt(m.start.UnixNano(), 10))
	case "POST /truth/forget":
		m.Clear()
		return plain(c, 200, `{}`)
	case "POST /tokenize":
		return plain(c, 200, `{"count":3,"max_model_len":1048576,"tokens":[1,2,3]}`)
	case "POST /v1/completions", "POST /v1/chat/completions":
		return m.stream(c, r, body, came)
	}
	return plain(c, 404, `{"error":{"message":"the mock has no such route"}}`)
}

// plain writes an answer of one piece.
func plain(c net.Conn, status int, body string) error {
	_, err := fmt.Fprintf(c, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, http.StatusText(status), len(body), body)
	return err
}

// question is the part of a request that the mock reads.
type question struct {
	Prompt   json.RawMessage `json:"prompt"`
	Messages json.RawMessage `json:"messages"`
	Stream   bool            `json:"stream"`
	Max      int             `json:"max_tokens"`
	MaxChat  int             `json:"max_completion_tokens"`
}

// promptTokens returns the number of token ids, or of words of text.
func (q *question) promptTokens() int {
	var ids []int32
	if json.Unmarshal(q.Prompt, &ids) == nil {
		return len(ids)
	}
	return len(bytes.Fields(q.Prompt)) + len(bytes.Fields(q.Messages))
}

// event appends an event of a stream as one HTTP chunk.
func event(b []byte, data string) []byte {
	b = strconv.AppendInt(b, int64(len(data)+8), 16)
	return append(append(append(b, "\r\ndata: "...), data...), "\n\n\r\n"...)
}

// Events in vLLM's format.
const (
	completionEvent = `{"id":"cmpl-mock","object":"text_completion","created":1700000000,"model":"mock","choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":null}],"usage":null}`
	chatEvent       = `{"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1700000000,"model":"mock","choices":[{"index":0,"delta":{"content":" tok"},"logprobs":null,"finish_reason":%s,"token_ids":null}]}`
	usageEvent      = `{"id":"mock","object":"%s","created":1700000000,"model":"mock","choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}`
)

// stream sends the tokens.
func (m *Mock) stream(c net.Conn, r *http.Request, body []byte, came time.Duration) error {
	var q question
	if err := json.Unmarshal(body, &q); err != nil || !q.Stream {
		return plain(c, 400, `{"error":{"message":"the mock answers JSON with \"stream\": true only"}}`)
	}
	n := max(q.Max, q.MaxChat)
	if n == 0 && r.URL.Path == "/v1/chat/completions" {
		n = chatTokens
	}
	if n < 1 || n > maxTokens {
		return plain(c, 400, fmt.Sprintf(`{"error":{"message":"max_tokens %d: want 1 to %d"}}`, n, maxTokens))
	}
	s := &Stream{ID: r.Header.Get("X-Request-Id"), Prompt: q.promptTokens(), Came: came, Sent: make([]time.Duration, 0, n)}
	m.mu.Lock()
	if len(m.streams) == 0 {
		m.first = came
	}
	rng := rand.New(rand.NewPCG(uint64(len(m.streams)), 0x7472757468))
	m.streams = append(m.streams, s)
	stallFrom := m.first + m.pace.StallAfter
	m.mu.Unlock()

	object, text := "text_completion", completionEvent
	if r.URL.Path == "/v1/chat/completions" {
		object, text = "chat.completion.chunk", chatEvent
	}
	token := event(nil, fmt.Sprintf(text, "null"))
	out := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
	due := came + m.pace.First + uniform(rng, m.pace.Spread)
	for i := range n {
		late := time.Duration(0)
		if i > 0 {
			due += m.pace.Gap
			late = uniform(rng, m.pace.Jitter)
		}
		time.Sleep(time.Until(m.start.Add(due + late)))
		if now := time.Since(m.start); m.pace.Stall > 0 && now >= stallFrom && now < stallFrom+m.pace.Stall {
			time.Sleep(stallFrom + m.pace.Stall - now)
			due = stallFrom + m.pace.Stall
		}
		if i < n-1 {
			out = append(out, token...)
		} else {
			out = event(out, fmt.Sprintf(text, `"length"`))
		}
		s.Sent = append(s.Sent, time.Since(m.start))
		if _, err := c.Write(out); err != nil {
			return err
		}
		out = out[:0]
	}
	out = event(out, fmt.Sprintf(usageEvent, object, s.Prompt, s.Prompt+n, n))
	out = append(event(out, "[DONE]"), "0\r\n\r\n"...)
	m.mu.Lock()
	m.ended++
	m.mu.Unlock()
	_, err := c.Write(out)
	return err
}

func uniform(rng *rand.Rand, most time.Duration) time.Duration {
	if most <= 0 {
		return 0
	}
	return time.Duration(rng.Int64N(int64(most)))
}
