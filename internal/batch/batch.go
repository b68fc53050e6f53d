// Package batch sends the requests of a file to a gateway and writes the answers to another file,
// in the format of OpenAI's and vLLM's batches: a JSON object a line.
//
// Answers are written as they arrive, each by one write. A run that was killed continues where it
// ended: it skips the requests whose custom_id is in the output, and removes an incomplete last
// line. The output is locked by flock(2), so that two runs never write it at once.
//
// Invariant: no request is sent whose answer is in the output, and no line is written twice.
//
// The package knows no model and no field of a request.
package batch

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Errors of a run.
var (
	ErrRefused = errors.New("batch: the server refuses this client")
	ErrServer  = errors.New("batch: the server does not answer")
)

const (
	maxLine   = 64 << 20  // bytes of a line of input
	maxAnswer = 256 << 20 // bytes of an answer
	maxPause  = 30 * time.Second
)

// paths are the routes that requests of a batch may have: those that compute an answer and change
// nothing at the server, because the requests carry the operator's key.
var paths = []string{
	"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/inference/v1/generate", "/tokenize", "/detokenize",
	"/v1/embeddings", "/v2/embed", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling",
	"/classify", // of upstreams
}

// Options of a run.
type Options struct {
	URL         string // of a gateway, without a path
	Key         string // bearer token; empty: none
	Client      *http.Client
	Concurrency int // requests at once, at least 1
	// Patience is how long the server may refuse all requests for lack of room, or not answer, until
	// the run ends.
	Patience time.Duration
	Progress func(done, total int64) // requests; nil: none
	Log      *slog.Logger
}

// Result counts the requests of a file.
type Result struct {
	Total    int64
	Skipped  int64 // had an answer before the run
	Answered int64
	Failed   int64 // of the answered ones, those with an error
}

// request is a line of the input.
type request struct {
	ID     string          `json:"custom_id"`
	Method string          `json:"method"`
	URL    string          `json:"url"`
	Body   json.RawMessage `json:"body"`
}

// output is a line of the output.
type output struct {
	ID       string          `json:"id"`
	CustomID string          `json:"custom_id"`
	Response *response       `json:"response"`
	Error    json.RawMessage `json:"error"` // null after status 200
}

type response struct {
	Status    int             `json:"status_code"`
	RequestID string          `json:"request_id"`
	Body      json.RawMessage `json:"body"` // null unless the status is 200
}

// Batch is a file of requests and the file of their answers, which is locked until Close.
type Batch struct {
	in, name string // of the files
	out      *os.File
	ids      map[string]bool // of the requests without an answer
	total    int64           // requests
	cut      int             // line of the output that was incomplete; 0: none
	unlocked error           // why the output has no lock; nil: it has one
}

// run is a run in progress.
type run struct {
	*Batch
	Options

	mu     sync.Mutex // guards what follows, and writes
	broken error      // of a write, after which the output may end with a part of a line
	result Result

	began    time.Time
	answered atomic.Int64 // time.Duration since began at which the server last answered a request
}

// Open reads the input, creates the output unless it is there, and locks it. Each request needs an
// id of its own, and an output that is there has to be that of a batch: other files are an error
// and stay as they are. The caller closes the Batch.
func Open(in, out string) (*Batch, error) {
	b := &Batch{in: in, name: out, ids: map[string]bool{}}
	err := regular(in, "it is read more than once")
	if err == nil {
		err = b.check()
	}
	if err != nil {
		return nil, fmt.Errorf("--input-file: %w", err)
	}
	if err = regular(out, "a run that continues reads it"); err != nil {
		return nil, fmt.Errorf("--output-file: %w", err)
	}
	if b.out, err = os.OpenFile(out, os.O_RDWR|os.O_CREATE, 0o666); err == nil {
		if err = b.lock(); err == nil {
			err = b.resume()
		}
		if err != nil {
			_ = b.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("--output-file: %w", err)
	}
	return b, nil
}

// regular returns an error with the reason if a path leads to a pipe or a device. Opening the path
// reports what else is wrong with it.
func regular(path, reason string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() && !info.IsDir() {
		return fmt.Errorf("%s is no regular file: %s", path, reason)
	}
	return nil
}

// Close releases the output's lock.
func (b *Batch) Close() error { return b.out.Close() }

// lock locks the output. The kernel releases the lock when the process ends.
func (b *Batch) lock() error {
	err := unix.Flock(int(b.out.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("another run-batch writes %s: wait for its end, or name another file", b.name)
	}
	b.unlocked = err
	return nil
}

// Run answers the requests of the input that have no answer. The result is valid in any case. Run
// is called once.
func (b *Batch) Run(ctx context.Context, o Options) (Result, error) {
	r := &run{Batch: b, Options: o, began: time.Now()}
	if b.cut > 0 {
		r.Log.Warn("the output's last line is incomplete and is removed", "file", b.name, "line", b.cut)
	}
	if b.unlocked != nil {
		r.Log.Warn("the output cannot be locked: no other run may write it", "file", b.name, "error", b.unlocked)
	}
	r.result.Total, r.result.Skipped = b.total, b.total-int64(len(b.ids))
	r.progress()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	requests := make(chan request)
	var wg sync.WaitGroup
	for range max(1, o.Concurrency) {
		wg.Go(func() {
			for q := range requests {
				if err := r.answer(ctx, &q); err != nil {
					cancel(err)
				}
			}
		})
	}
	err := r.read(func(_ int, q *request) error {
		if !b.ids[q.ID] {
			return nil
		}
		select {
		case requests <- *q:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	close(requests)
	wg.Wait()
	return r.result, cmp.Or(context.Cause(ctx), err, r.out.Sync())
}

// read calls f with each line of the input that is not empty, and its number.
func (b *Batch) read(f func(n int, q *request) error) error {
	in, err := os.Open(b.in)
	if err != nil {
		return err
	}
	defer in.Close()
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	n := 0
	for lines.Scan() {
		n++
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		var q request
		if err := json.Unmarshal(line, &q); err != nil {
			return fmt.Errorf("%s line %d: %w", b.in, n, err)
		}
		q.Body = bytes.Clone(q.Body)
		if err := f(n, &q); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s after line %d: %w", b.in, n, err)
	}
	return nil
}

// check checks the lines of the input, and sets their ids and their number.
func (b *Batch) check() error {
	return b.read(func(n int, q *request) error {
		switch {
		case q.ID == "":
			return fmt.Errorf("%s line %d has no custom_id", b.in, n)
		case b.ids[q.ID]:
			return fmt.Errorf("%s line %d has the custom_id %.100q of an earlier line", b.in, n, q.ID)
		}
		b.ids[q.ID] = true
		b.total++
		return nil
	})
}

// lineStart is how each line of the output starts.
const lineStart = `{"id":"` + idStart

// idStart is how the id of each answer starts.
const idStart = "batch_req_"

// resume removes from ids those that are in the output, and positions the output behind its last
// complete line. Files of other content are an error and stay as they are.
func (b *Batch) resume() error {
	in := bufio.NewReader(b.out)
	other := func(n int) error {
		return fmt.Errorf("%s line %d is no answer of a batch: name another file", b.name, n)
	}
	end := int64(0)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			if most := min(len(line), len(lineStart)); string(line[:most]) != lineStart[:most] {
				return other(n)
			}
			if len(line) > 0 {
				b.cut = n
			}
			break
		}
		if err != nil {
			return err
		}
		var o output
		if err := json.Unmarshal(line, &o); err != nil || o.CustomID == "" || o.Response == nil && o.Error == nil { // a request has neither
			return other(n)
		}
		end += int64(len(line))
		delete(b.ids, o.CustomID)
	}
	if err := b.out.Truncate(end); err != nil {
		return err
	}
	_, err := b.out.Seek(end, io.SeekStart)
	return err
}

// answer has a request answered and writes the answer.
func (r *run) answer(ctx context.Context, q *request) error {
	o, err := r.ask(ctx, q)
	if err != nil {
		return err
	}
	o.ID, o.CustomID = idStart+strings.ToLower(rand.Text()), q.ID
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false)
	if err := e.Encode(o); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken == nil {
		_, r.broken = r.out.Write(line.Bytes())
	}
	if r.broken != nil {
		return r.broken
	}
	if r.result.Answered++; o.Error != nil {
		r.result.Failed++
	}
	r.progress()
	return nil
}

func (r *run) progress() {
	if r.Progress != nil {
		r.Progress(r.result.Skipped+r.result.Answered, r.result.Total)
	}
}

// invalid returns the output of a request that is not sent.
func invalid(format string, args ...any) *output {
	text, _ := json.Marshal(fmt.Sprintf(format, args...)) // a string always has a JSON form
	return &output{Response: &response{Status: http.StatusBadRequest}, Error: text}
}

// ask sends a request until it is answered. It waits while the server has no room or does not
// answer, within Patience since the last answer to any request. A request that gets no answer for
// Patience while others do has that as its error.
func (r *run) ask(ctx context.Context, q *request) (*output, error) {
	var options struct{ Stream bool }
	switch {
	case q.Method != http.MethodPost:
		return invalid("method is %.20q: want POST", q.Method), nil
	case !slices.Contains(paths, q.URL):
		return invalid("url is %.100q: a batch may have %s", q.URL, strings.Join(paths, ", ")), nil
	case len(q.Body) == 0 || q.Body[0] != '{':
		return invalid("body must be an object"), nil
	case json.Unmarshal(q.Body, &options) == nil && options.Stream:
		return invalid("stream is not possible in a batch: leave it out"), nil
	}
	unanswered := time.Duration(0) // since began; 0: the last attempt got an answer
	for {
		resp, body, err := r.send(ctx, q)
		var wait time.Duration
		now, answered := time.Since(r.began), time.Duration(r.answered.Load())
		if err == nil {
			unanswered = 0
		} else if unanswered == 0 {
			unanswered = now
		}
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case err != nil && answered > unanswered && now-unanswered > r.Patience:
			text, _ := json.Marshal(fmt.Sprintf("no answer within %v, while other requests had theirs: %v", r.Patience, err)) // a string always has a JSON form
			return &output{Response: &response{Status: http.StatusBadGateway}, Error: text}, nil
		case err != nil:
			wait, err = time.Second, fmt.Errorf("%w: %s: %w", ErrServer, r.URL, err)
		case resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable:
			seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After")) // 0: the server names no time
			wait, err = time.Duration(min(max(1, seconds), int(maxPause/time.Second)))*time.Second, fmt.Errorf("%w: %s: %s: %.300s", ErrServer, r.URL, resp.Status, body)
		case resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden:
			return nil, fmt.Errorf("%w: %s: %.300s; give the key with --api-key", ErrRefused, resp.Status, body)
		default:
			r.answered.Store(int64(now))
			return read(resp, body), nil
		}
		if now-answered > r.Patience {
			return nil, err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// send sends a request once.
func (r *run) send(ctx context.Context, q *request) (*http.Response, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL+q.URL, bytes.NewReader(q.Body))
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if r.Key != "" {
		req.Header.Set("Authorization", "Bearer "+r.Key)
	}
	resp, err := r.Client.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err == nil && len(body) > maxAnswer {
		err = fmt.Errorf("an answer has more than %d bytes", maxAnswer)
	}
	return resp, body, err
}

// read returns the output of an answer.
func read(resp *http.Response, body []byte) *output {
	o := &output{Response: &response{Status: resp.StatusCode, RequestID: resp.Header.Get("X-Request-Id")}}
	if !json.Valid(body) {
		body, _ = json.Marshal(fmt.Sprintf("the answer is not JSON: %.300s", body)) // a string always has a JSON form
		o.Error = body
		return o
	}
	if resp.StatusCode == http.StatusOK {
		o.Response.Body = body
	} else {
		o.Error = body
	}
	return o
}
