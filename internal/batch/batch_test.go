package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// bed is a server and the files of a run.
type bed struct {
	*testing.T
	in, out string
	o       Options
	mu      sync.Mutex
	asked   map[string]int // by the text in the body
}

func newBed(t *testing.T, in string, answer http.HandlerFunc) *bed {
	b := &bed{T: t, asked: map[string]int{}}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		b.mu.Lock()
		b.asked[string(body)]++
		b.mu.Unlock()
		w.Header().Set("X-Request-Id", "id-of-the-server")
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	dir := t.TempDir()
	b.in, b.out = filepath.Join(dir, "in"), filepath.Join(dir, "out")
	b.o = Options{URL: s.URL, Client: s.Client(), Concurrency: 4, Patience: time.Minute, Log: slog.New(slog.DiscardHandler)}
	b.write(b.in, in)
	return b
}

// counts returns how often each body was asked for since the last call. The server may still
// process requests of a run that was stopped.
func (b *bed) counts() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	asked := b.asked
	b.asked = map[string]int{}
	return asked
}

// run opens the batch and runs it.
func (b *bed) run(ctx context.Context) (Result, error) {
	all, err := Open(b.in, b.out)
	if err != nil {
		return Result{}, err
	}
	defer all.Close()
	return all.Run(ctx, b.o)
}

func (b *bed) write(path, text string) {
	b.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
}

// outputs returns the lines of the output by custom_id.
func (b *bed) outputs() map[string]output {
	b.Helper()
	text, err := os.ReadFile(b.out)
	if err != nil {
		b.Fatal(err)
	}
	all := map[string]output{}
	for line := range strings.Lines(string(text)) {
		var o output
		if err := json.Unmarshal([]byte(line), &o); err != nil || all[o.CustomID].ID != "" || o.ID == "" {
			b.Fatalf("%q: %v", line, err)
		}
		all[o.CustomID] = o
	}
	return all
}

func line(id, url, body string) string {
	return fmt.Sprintf(`{"custom_id":%q,"method":"POST","url":%q,"body":%s}`+"\n", id, url, body)
}

// Each line gets an answer in vLLM's form, errors included, and nothing is sent that cannot be
// answered in a batch.
func TestFormat(t *testing.T) {
	in := line("a", "/v1/chat/completions", `{"x":"<1>"}`) + "\n" + line("b", "/v1/embeddings", `{"x":2}`) + line("c", "/v1/completions", `{"stream":true}`) + line("d", "v1/completions", `{}`) +
		line("e", "/v1/completions", `[1]`) + `{"custom_id":"f","method":"GET","url":"/v1/models"}` + "\n" + strings.TrimSuffix(line("g", "/tokenize", `{}`), "\n")
	b := newBed(t, in, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/embeddings":
			w.WriteHeader(404)
			fmt.Fprint(w, `{"error":{"message":"no"}}`)
		case "/tokenize":
			fmt.Fprint(w, "plain")
		default:
			fmt.Fprintf(w, "{\"path\":%q,\n \"key\":%q, \"n\":1.0}", r.URL.Path, r.Header.Get("Authorization"))
		}
	})
	b.o.Key = "sk"
	var done, total int64
	b.o.Progress = func(d, t int64) { done, total = d, t }
	r, err := b.run(t.Context())
	if err != nil || r != (Result{Total: 7, Answered: 7, Failed: 6}) || done != 7 || total != 7 {
		t.Errorf("%+v %v, %d of %d", r, err, done, total)
	}
	for id, want := range map[string]string{
		"a": `{"status_code":200,"request_id":"id-of-the-server","body":{"path":"/v1/chat/completions","key":"Bearer sk","n":1.0}} null`,
		"b": `{"status_code":404,"request_id":"id-of-the-server","body":null} {"error":{"message":"no"}}`,
		"c": `{"status_code":400,"request_id":"","body":null} "stream is not possible in a batch: leave it out"`,
		"d": `{"status_code":400,"request_id":"","body":null} "url is \"v1/completions\": a batch may have ` + strings.Join(paths, ", ") + `"`,
		"e": `{"status_code":400,"request_id":"","body":null} "body must be an object"`,
		"f": `{"status_code":400,"request_id":"","body":null} "method is \"GET\": want POST"`,
		"g": `{"status_code":200,"request_id":"id-of-the-server","body":null} "the answer is not JSON: plain"`,
	} {
		o := b.outputs()[id]
		response, _ := json.Marshal(o.Response)
		if got := string(response) + " " + string(o.Error); got != want {
			t.Errorf("%s: %s\nwant %s", id, got, want)
		}
	}
	if len(b.asked) != 3 || b.asked[`{"x":"<1>"}`] != 1 {
		t.Errorf("%v", b.asked)
	}
}

// A run that was stopped, or cut within a line, continues without asking twice for what is there.
func TestResume(t *testing.T) {
	var in strings.Builder
	const n = 40
	for i := range n {
		in.WriteString(line(fmt.Sprint("r", i), "/v1/completions", fmt.Sprintf(`{"i":%d}`, i)))
	}
	ctx, stop := context.WithCancel(t.Context())
	var answers atomic.Int64
	b := newBed(t, in.String(), func(w http.ResponseWriter, r *http.Request) {
		if answers.Add(1) == 10 {
			stop()
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, `{}`)
	})
	r, err := b.run(ctx)
	if !errors.Is(err, context.Canceled) || r.Answered == 0 || r.Answered >= n {
		t.Fatalf("%+v %v", r, err)
	}
	before := b.outputs()
	if int64(len(before)) != r.Answered {
		t.Errorf("%d lines of %d", len(before), r.Answered)
	}
	text, err := os.ReadFile(b.out)
	if err != nil {
		t.Fatal(err)
	}
	b.write(b.out, string(text)+`{"id":"batch_req_x","custom_id":"r`) // as if killed within a write
	asked := b.counts()
	if r, err = b.run(t.Context()); err != nil || r.Total != n || r.Skipped != int64(len(before)) || r.Answered != n-r.Skipped || len(b.outputs()) != n {
		t.Errorf("%+v %v", r, err)
	}
	again := b.counts()
	for id := range before {
		body := fmt.Sprintf(`{"i":%s}`, strings.TrimPrefix(id, "r"))
		if asked[body] != 1 || again[body] != 0 {
			t.Errorf("%s was asked for %d and %d times", id, asked[body], again[body])
		}
	}
	if r, err = b.run(t.Context()); err != nil || r.Answered != 0 || r.Skipped != n {
		t.Errorf("%+v %v", r, err)
	}
}

// A url that is none, or that changes the server, is the answer of its line by name, and does not
// end the run: requests carry the operator's key.
func TestBadURL(t *testing.T) {
	for _, url := range []string{"/v1/%zz", "/v1/load_lora_adapter", "/admin/drain/d1", "/abort_requests", "/v1/completions?x=1", "/v1/completions/../../admin/drain/d1", "@evil/v1/completions", ""} {
		b := newBed(t, line("a", url, `{}`), func(http.ResponseWriter, *http.Request) { t.Error("a request was sent") })
		b.o.Patience = 0
		if r, err := b.run(t.Context()); err != nil || r.Failed != 1 || b.outputs()["a"].Response.Status != 400 || !strings.Contains(string(b.outputs()["a"].Error), fmt.Sprintf(`\"%s\": a batch may have /v1/chat/completions, `, url)) {
			t.Errorf("%q: %+v %v %s", url, r, err, b.outputs()["a"].Error)
		}
	}
}

// A second batch on one output is refused until the first one ends, and changes nothing.
func TestLock(t *testing.T) {
	b := newBed(t, line("a", "/score", `{}`), func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	first, err := Open(b.in, b.out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(b.in, b.out); err == nil || !strings.Contains(err.Error(), "another run-batch writes "+b.out) {
		t.Errorf("a second batch has the output: %v", err)
	}
	if r, err := first.Run(t.Context(), b.o); err != nil || r.Answered != 1 {
		t.Errorf("%+v %v", r, err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if r, err := b.run(t.Context()); err != nil || r.Skipped != 1 {
		t.Errorf("%+v %v", r, err)
	}
}

// A request on which the server always closes the connection ends with an error, while others are
// answered.
func TestUnanswered(t *testing.T) {
	b := newBed(t, line("a", "/v1/score", `{}`)+line("b", "/v1/rerank", `{}`), func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/score" {
			panic(http.ErrAbortHandler)
		}
		time.Sleep(200 * time.Millisecond)
		fmt.Fprint(w, `{}`)
	})
	b.o.Patience = 900 * time.Millisecond
	r, err := b.run(t.Context())
	if err != nil || r != (Result{Total: 2, Answered: 2, Failed: 1}) || b.outputs()["a"].Response.Status != 502 || !strings.Contains(string(b.outputs()["a"].Error), "no answer within") {
		t.Errorf("%+v %v %s", r, err, b.outputs()["a"].Error)
	}
}

// Routes of vectors and scores are sent, and routes that change something are not.
func TestRoutes(t *testing.T) {
	in, want := "", map[string]int{"/v1/embeddings": 200, "/v2/embed": 200, "/pooling": 200, "/rerank": 200, "/classify": 200, "/abort_requests": 400, "/v1/load_lora_adapter": 400}
	for path := range want {
		in += line(path, path, `{}`)
	}
	b := newBed(t, in, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	if _, err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for path, o := range b.outputs() {
		if o.Response.Status != want[path] {
			t.Errorf("%s: status %d, want %d", path, o.Response.Status, want[path])
		}
	}
}

// After a write that failed nothing is written, because the output may end with a part of a line.
func TestBrokenOutput(t *testing.T) {
	b := newBed(t, line("a", "/v1/completions", `{}`), func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	out, err := os.Create(b.out)
	if err != nil {
		t.Fatal(err)
	}
	r := &run{Batch: &Batch{out: out}, Options: b.o, broken: io.ErrShortWrite}
	if err := r.answer(t.Context(), &request{ID: "a", Method: "POST", URL: "/v1/completions", Body: json.RawMessage("{}")}); err != io.ErrShortWrite || len(b.outputs()) != 0 {
		t.Errorf("%v, %v", err, b.outputs())
	}
}

// A server without room is asked again; one that refuses the client, or does not answer for long,
// ends the run without a line.
func TestServerRefuses(t *testing.T) {
	var calls atomic.Int64
	b := newBed(t, line("a", "/v1/completions", `{}`), func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 1 {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(429)
			return
		}
		fmt.Fprint(w, `{}`)
	})
	if r, err := b.run(t.Context()); err != nil || r.Failed != 0 || calls.Load() != 2 {
		t.Errorf("%+v %v after %d calls", r, err, calls.Load())
	}
	for status, want := range map[int]error{401: ErrRefused, 503: ErrServer} {
		b := newBed(t, line("a", "/v1/completions", `{}`), func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(status) })
		b.o.Patience = 0
		if _, err := b.run(t.Context()); !errors.Is(err, want) || len(b.outputs()) != 0 {
			t.Errorf("%d: %v", status, err)
		}
	}
}

// A Retry-After beyond what a time.Duration holds is the longest pause, and not none.
func TestLongRetryAfter(t *testing.T) {
	for _, after := range []string{"10000000000", "99999999999999999999"} {
		var calls atomic.Int64
		b := newBed(t, line("a", "/v1/completions", `{}`), func(w http.ResponseWriter, r *http.Request) {
			calls.Add(1)
			w.Header().Set("Retry-After", after)
			w.WriteHeader(429)
		})
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if _, err := b.run(ctx); !errors.Is(err, context.DeadlineExceeded) || calls.Load() != 1 {
			t.Errorf("%s: %v after %d calls", after, err, calls.Load())
		}
		cancel()
	}
}

// Files that are no batch are refused before anything is sent, with the line.
func TestBadFiles(t *testing.T) {
	for in, want := range map[string]string{
		"x\n":                          "line 1: ",
		line("a", "/x", "{}") + "\n{}": "line 3 has no custom_id",
		line("a", "/x", "{}") + line("b", "/x", "{}") + line("a", "/x", "{}"): `line 3 has the custom_id "a" of an earlier line`,
		`{"custom_id":7}`: "line 1: ",
	} {
		b := newBed(t, in, func(http.ResponseWriter, *http.Request) { t.Error("a request was sent") })
		if _, err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", in, err)
		}
	}
	b := newBed(t, line("a", "/x", "{}"), func(http.ResponseWriter, *http.Request) { t.Error("a request was sent") })
	b.write(b.out, "something else\n")
	if _, err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "line 1 is no answer of a batch") {
		t.Error(err)
	}
	if text, _ := os.ReadFile(b.out); string(text) != "something else\n" {
		t.Errorf("the file was changed: %q", text)
	}
	for _, out := range []string{`{"a":`, "notes", line("a", "/x", "{}")} { // the last is the output by mistake
		b.write(b.out, out)
		if _, err := b.run(t.Context()); err == nil {
			t.Errorf("%q: %v", out, err)
		}
		if text, _ := os.ReadFile(b.out); string(text) != out {
			t.Errorf("the file was changed from %q to %q", out, text)
		}
	}
	for out, want := range map[string]error{filepath.Join(b.out, "x"): syscall.ENOTDIR, b.out + "none/x": os.ErrNotExist, t.TempDir(): syscall.EISDIR} {
		if _, err := Open(b.in, out); !errors.Is(err, want) || !strings.HasPrefix(err.Error(), "--output-file: open "+out) {
			t.Errorf("%s: %v", out, err)
		}
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{fifo, "/dev/null"} {
		if _, err := Open(b.in, name); err == nil || !strings.Contains(err.Error(), "--output-file: "+name+" is no regular file: a run") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Open("/dev/null", b.out); err == nil || !strings.Contains(err.Error(), "--input-file: /dev/null is no regular file: it is read") {
		t.Error(err)
	}
	b.in += "none"
	if _, err := b.run(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
