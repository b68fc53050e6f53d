package gateway

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native"
)

// Bounds of a recording.
const (
	// recordIdle is the time after the last call of /admin/record after which a recording ends.
	recordIdle = 30 * time.Second
	// recordBlock is the number of prompt tokens of a hash.
	recordBlock   = 64
	recordRound   = 10 * time.Millisecond // times of arrival are rounded to it
	maxRecorded   = 50_000                // requests between two calls
	maxRecordedID = 4 << 20               // hashes of these, 8 bytes each
	maxSessionID  = 64                    // bytes
)

// recorded is an answered request without anything that names its client or its text.
type recorded struct {
	At     int64    `json:"at_ms"` // of arrival, since the recording's start
	Prompt int      `json:"prompt_tokens"`
	Output int      `json:"output_tokens"`
	Blocks []uint64 `json:"blocks,omitempty"` // a keyed hash for each BlockTokens of the prompt, from the first on
}

// recordings is the answer of /admin/record: what was answered since the last call.
type recordings struct {
	BlockTokens int        `json:"block_tokens"`
	Dropped     int        `json:"dropped"` // since the recording's start
	Requests    []recorded `json:"requests"`
}

// recorder records answered requests while a client of /admin/record reads them.
type recorder struct {
	active atomic.Bool

	mu       sync.Mutex
	session  string
	key      [sha256.Size]byte // of the hashes; it never leaves the process
	began    time.Time
	asked    time.Time // the last call
	blocks   int       // hashes of requests
	dropped  int
	requests []recorded
}

// answered records a request that arrived within the recording.
func (r *recorder) answered(a *native.Answered) {
	if !r.active.Load() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch n := len(a.Prompt.Tokens) / recordBlock; {
	case time.Since(r.asked) > recordIdle:
		r.stop()
		return
	case a.Start.Before(r.began):
		return
	case len(r.requests) >= maxRecorded || r.blocks+n > maxRecordedID:
		r.dropped++
		return
	}
	q := recorded{At: a.Start.Sub(r.began).Round(recordRound).Milliseconds(), Prompt: len(a.Prompt.Tokens), Output: a.Output}
	if each := recordBlock / a.BlockTokens; each > 0 {
		h := hmac.New(sha256.New, r.key[:])
		for i := each - 1; i < len(a.Prompt.Hashes); i += each {
			var in [8]byte
			binary.LittleEndian.PutUint64(in[:], uint64(a.Prompt.Hashes[i]))
			h.Reset()
			h.Write(in[:])
			q.Blocks = append(q.Blocks, binary.LittleEndian.Uint64(h.Sum(nil)))
		}
	}
	r.blocks += len(q.Blocks)
	r.requests = append(r.requests, q)
}

// stop ends the recording.
func (r *recorder) stop() {
	r.active.Store(false)
	r.session, r.requests, r.blocks, r.dropped = "", nil, 0, 0
	clear(r.key[:])
}

// take returns what was recorded since the last call of the session, and starts the recording with
// the first one. It returns false if another session is recording.
func (r *recorder) take(session string, now time.Time) (recordings, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session != "" && now.Sub(r.asked) > recordIdle {
		r.stop()
	}
	if r.session != "" && r.session != session {
		return recordings{}, false
	}
	if r.session == "" {
		r.session, r.began = session, now
		_, _ = rand.Read(r.key[:]) // never fails
		r.active.Store(true)
	}
	r.asked = now
	out := recordings{BlockTokens: recordBlock, Dropped: r.dropped, Requests: r.requests}
	if r.requests == nil {
		out.Requests = []recorded{}
	}
	r.requests, r.blocks = nil, 0
	return out, true
}

// record answers with the requests that were answered since the last call of a recording.
func (g *Gateway) record(ctx *fasthttp.RequestCtx) {
	session := string(ctx.QueryArgs().Peek("session"))
	if session == "" || len(session) > maxSessionID {
		g.fail(ctx, openai.BadRequest("session", "session is %q: send a random text of 1 to %d bytes, the same in all calls of a recording", openai.Clip(session, 50), maxSessionID))
		return
	}
	out, ok := g.recorder.take(session, time.Now())
	if !ok {
		g.fail(ctx, &openai.Error{Status: 409, Type: openai.TypeConflict, Message: "another client records this gateway: end it and wait 30 seconds"})
		return
	}
	g.json(ctx, out)
}
