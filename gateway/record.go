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
	recordRound   = 10 * time.Millisecond  // times of arrival are rounded to it
	recordedRound = 100 * time.Microsecond // durations are rounded to it
	maxRecorded   = 50_000                 // requests between two calls
	maxRecordedID = 4 << 20                // hashes of these, 8 bytes each
	maxSessionID  = 64                     // bytes
)

// recorded is a choice that has ended, without anything that names its client or its text.
type recorded struct {
	At     int64      `json:"at_ms"` // of arrival, since the recording's start
	Prompt int        `json:"prompt_tokens"`
	Output int        `json:"output_tokens"`
	End    native.End `json:"end"`
	First  int64      `json:"first_us,omitempty"` // from arrival to the first token
	Last   int64      `json:"last_us,omitempty"`  // and to the last one
	Blocks []uint64   `json:"blocks,omitempty"`   // a keyed hash for each BlockTokens of the prompt, from the first on
}

// recordings is the answer of /admin/record: the choices that have ended since the last call.
type recordings struct {
	Began       bool       `json:"began"` // this call has started the recording
	BlockTokens int        `json:"block_tokens"`
	Dropped     int        `json:"dropped"` // since the recording's start
	Requests    []recorded `json:"requests"`
}

// recorder records requests while a client of /admin/record reads them.
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

// ended records a choice whose request arrived within the recording. The hashes are computed
// without the lock, because a long prompt has thousands of them.
func (r *recorder) ended(a *native.Ended) {
	if !r.active.Load() {
		return
	}
	each := 0 // hashes of the prompt in a block of the recording
	if recordBlock%a.BlockTokens == 0 {
		each = recordBlock / a.BlockTokens
	}
	n := 0
	if each > 0 {
		n = len(a.Prompt.Hashes) / each
	}
	r.mu.Lock()
	began, key := r.began, r.key
	ok := r.recording(a.Start) && r.room(n)
	r.mu.Unlock()
	if !ok {
		return
	}
	q := recorded{At: a.Start.Sub(began).Round(recordRound).Milliseconds(), Prompt: len(a.Prompt.Tokens), Output: a.Output, End: a.End}
	if t := &a.Times; !t.First.IsZero() {
		q.First, q.Last = t.First.Sub(a.Start).Round(recordedRound).Microseconds(), t.Last.Sub(a.Start).Round(recordedRound).Microseconds()
	}
	if n > 0 {
		q.Blocks = make([]uint64, n)
		h := hmac.New(sha256.New, key[:])
		for i := range q.Blocks {
			var in [8]byte
			binary.LittleEndian.PutUint64(in[:], uint64(a.Prompt.Hashes[(i+1)*each-1]))
			h.Reset()
			h.Write(in[:])
			q.Blocks[i] = binary.LittleEndian.Uint64(h.Sum(nil))
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if key == r.key && r.recording(a.Start) && r.room(n) {
		r.blocks += n
		r.requests = append(r.requests, q)
	}
}

// recording reports whether a request that arrived at a time belongs to the recording, which it
// ends if no client reads it. r.mu is held.
func (r *recorder) recording(start time.Time) bool {
	if r.session != "" && time.Since(r.asked) > recordIdle {
		r.stop()
	}
	return r.session != "" && !start.Before(r.began)
}

// room reports whether a request with n hashes fits, and counts it as dropped if it does not. r.mu
// is held.
func (r *recorder) room(n int) bool {
	if len(r.requests) < maxRecorded && r.blocks+n <= maxRecordedID {
		return true
	}
	r.dropped++
	return false
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
	first := r.session == ""
	if first {
		r.session, r.began = session, now
		_, _ = rand.Read(r.key[:]) // never fails
		r.active.Store(true)
	}
	r.asked = now
	out := recordings{Began: first, BlockTokens: recordBlock, Dropped: r.dropped, Requests: r.requests}
	if r.requests == nil {
		out.Requests = []recorded{}
	}
	r.requests, r.blocks = nil, 0
	return out, true
}

// record answers with the requests that have ended since the last call of a recording.
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
