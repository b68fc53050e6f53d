//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write testdata/capture")

// TestBinaryCapture sends the requests of testdata/capture to the program and compares
// what clients and upstream servers get with what the files say. A file is a list of
// lines; -update rewrites those that the program answers with:
//
//	= up FLAGS            start a cluster with the built-in model
//	= gateway FLAGS       start a gateway; UPSTREAM in a flag becomes a scripted server
//	> METHOD PATH BODY    a request; {{a*100}} stands for 100 times a
//	>> NAME: VALUE        header of the request above
//	u STATUS BODY         what a scripted server answers to its next request
//	u stream A | B        server-sent events, then [DONE]
//	u torn A | B          events, then the connection is closed
//	u close               the connection is closed
//	^ ...                 recorded: a request that a scripted server received
//	< ...                 recorded: status, headers and body of the answer
//
// Events of a stream are recorded choice by choice, and those that differ in text and
// tokens only as one: choices interleave by chance, and a client that reads late gets
// several tokens in an event.
func TestBinaryCapture(t *testing.T) {
	binary(t) // not in short tests
	files, err := filepath.Glob("testdata/capture/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no testdata/capture", err)
	}
	n := 0
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c := &capture{t: t}
			got := c.play(string(text))
			n += c.n
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, have := strings.Split(string(text), "\n"), strings.Split(got, "\n")
			for i := range max(len(want), len(have)) {
				if i >= len(want) || i >= len(have) || want[i] != have[i] {
					t.Fatalf("%s:%d differs (-update rewrites it, after you have read the diff)\nrecorded: %s\nnow:      %s\nafter:    %s",
						file, i+1, lineAt(want, i), lineAt(have, i), lastRequest(have, i))
				}
			}
		})
	}
	if !t.Failed() && n < 200 {
		t.Errorf("%d requests were sent, want 200", n)
	}
}

func lineAt(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "nothing"
}

// lastRequest is the request that line i belongs to.
func lastRequest(lines []string, i int) string {
	for i = min(i, len(lines)-1); i > 0 && !strings.HasPrefix(lines[i], "> "); i-- {
	}
	return lines[i]
}

// capture plays one file.
type capture struct {
	t       *testing.T
	n       int // requests sent
	cluster *cluster
	alone   bool // it is a gateway of upstream servers
	client  http.Client
	servers []*scripted

	mu     sync.Mutex
	script []string // lines "u ..." that no server has used
	seen   []string // lines "^ ..." of this request
}

// scripted is an OpenAI-compatible server that answers as the file says.
type scripted struct {
	*httptest.Server
	task string // prefill or decode, of a pair
	c    *capture
}

// play returns the file with what is recorded now.
func (c *capture) play(text string) string {
	var out strings.Builder
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "<") || strings.HasPrefix(l, "^") })
	for i := 0; i < len(lines); i++ {
		fmt.Fprintln(&out, lines[i])
		switch mark, rest, _ := strings.Cut(lines[i], " "); mark {
		case "=":
			c.begin(strings.Fields(rest))
		case ">":
			header := http.Header{}
			c.script, c.seen = nil, nil
			for i+1 < len(lines) && (strings.HasPrefix(lines[i+1], ">> ") || strings.HasPrefix(lines[i+1], "u ")) {
				i++
				fmt.Fprintln(&out, lines[i])
				if line, ok := strings.CutPrefix(lines[i], ">> "); ok {
					name, value, _ := strings.Cut(line, ": ")
					header.Add(name, value)
				} else {
					c.script = append(c.script, lines[i][2:])
				}
			}
			answer := c.send(rest, header)
			c.mu.Lock()
			for _, l := range c.seen {
				fmt.Fprintln(&out, l)
			}
			if len(c.script) > 0 {
				fmt.Fprintln(&out, "^ unused:", len(c.script))
			}
			c.mu.Unlock()
			for l := range strings.Lines(strings.TrimRight(answer, "\n")) {
				fmt.Fprintln(&out, strings.TrimRight("< "+strings.TrimRight(l, "\n"), " "))
			}
		}
	}
	c.end()
	return out.String()
}

// begin starts the process that the next requests go to.
func (c *capture) begin(command []string) {
	c.t.Helper()
	c.end()
	c.cluster = newCluster(c.t)
	path := binary(c.t)
	args := []string{command[0], "--port", strconv.Itoa(c.cluster.port)}
	if c.alone = command[0] == "gateway"; !c.alone {
		args = append(args, "--state-dir", c.cluster.state)
	}
	for _, a := range command[1:] {
		task, _ := strings.CutPrefix(args[len(args)-1], "--upstream-")
		for strings.Contains(a, "UPSTREAM") {
			a = strings.Replace(a, "UPSTREAM", c.server(task), 1)
		}
		args = append(args, strings.ReplaceAll(a, "ADMIN", fmt.Sprintf("127.0.0.1:%d", c.cluster.port+3)))
	}
	c.cluster.start(path, args...)
	if c.alone {
		c.cluster.wait(startBound, "the gateway has met all servers", func() bool {
			return strings.Count(c.cluster.body("/debug/nodes"), `"up":true`) == len(c.servers) && strings.Contains(c.cluster.body("/v1/models"), `"m"`)
		})
	} else {
		c.cluster.waitUp()
	}
	c.client = http.Client{Transport: &http.Transport{DisableCompression: true}, Timeout: time.Minute}
}

// end stops it.
func (c *capture) end() {
	if c.cluster == nil {
		return
	}
	c.client.CloseIdleConnections()
	if c.alone { // without a cluster to leave
		c.cluster.signal(syscall.SIGKILL)
	} else {
		c.cluster.signal(syscall.SIGTERM)
	}
	c.cluster.waitGone(stopBound)
	for _, s := range c.servers {
		s.Close()
	}
	c.cluster, c.servers = nil, nil
}

// server starts a scripted server and returns its URL.
func (c *capture) server(task string) string {
	s := &scripted{c: c, task: task}
	s.Server = httptest.NewServer(s)
	c.servers = append(c.servers, s)
	return s.URL
}

// ServeHTTP implements http.Handler.
func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"capture","max_model_len":4096}]}`)
		return
	case r.Method == http.MethodGet && r.URL.Path != "/v1/passed" && !strings.HasPrefix(r.URL.Path, "/v1/responses/"):
		return
	}
	c := s.c
	c.mu.Lock()
	line := "^ " + r.Method + " " + r.URL.RequestURI()
	if s.task == "prefill" || s.task == "decode" {
		line = "^ " + s.task + " " + line[2:]
	}
	c.seen = append(c.seen, line)
	for _, l := range headerLines(r.Header) {
		c.seen = append(c.seen, "^ "+l)
	}
	if len(body) > 0 {
		c.seen = append(c.seen, "^ "+normal(string(body)))
	}
	what := "500 the script has no more lines"
	if len(c.script) > 0 {
		what, c.script = c.script[0], c.script[1:]
	}
	c.mu.Unlock()
	kind, rest, _ := strings.Cut(what, " ")
	switch kind {
	case "close":
		panic(http.ErrAbortHandler)
	case "stream", "torn":
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for event := range strings.SplitSeq(rest, " | ") {
			fmt.Fprintf(w, "data: %s\n\n", event)
			w.(http.Flusher).Flush()
		}
		if kind == "torn" {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	default:
		status, err := strconv.Atoi(kind)
		if err != nil {
			status, rest = 500, "bad script: "+what
		}
		w.Header().Set("Content-Type", "application/json")
		if status == 429 || status == 503 {
			w.Header().Set("Retry-After", "3")
		}
		w.WriteHeader(status)
		fmt.Fprint(w, rest)
	}
}

var repeated = regexp.MustCompile(`\{\{(.*?)\*(\d+)\}\}`)

// send sends a request and returns the answer as it is recorded.
func (c *capture) send(line string, header http.Header) string {
	c.t.Helper()
	method, rest, _ := strings.Cut(line, " ")
	path, body, _ := strings.Cut(rest, " ")
	body = repeated.ReplaceAllStringFunc(body, func(s string) string {
		part := repeated.FindStringSubmatch(s)
		n, _ := strconv.Atoi(part[2])
		return strings.Repeat(part[1], n)
	})
	url := c.cluster.url(path)
	if rest, ok := strings.CutPrefix(path, "ADMIN"); ok {
		path, url = rest, fmt.Sprintf("http://127.0.0.1:%d%s", c.cluster.port+3, rest)
	}
	req, err := http.NewRequestWithContext(c.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(line, err)
	}
	req.Header = header
	req.Header.Set("User-Agent", "capture")
	if body != "" && header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if host := header.Get("Host"); host != "" {
		req.Host = host
		req.Header.Del("Host")
	}
	c.n++
	resp, err := c.client.Do(req)
	if err != nil {
		c.t.Fatal(line, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	var out strings.Builder
	fmt.Fprintln(&out, resp.StatusCode)
	events := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	was := string(text)
	switch {
	case events:
		text = []byte(eventLines(was))
	case strings.HasSuffix(path, "/metrics"):
		text = []byte(metricLines(was))
	case strings.HasPrefix(path, "/debug/") || strings.HasSuffix(path, "/load"):
		text = []byte(shape(text))
	case path == "/docs":
		text = fmt.Appendf(nil, "a page: %v", strings.HasPrefix(was, "<!doctype html>"))
	case path == "/openapi.json":
		text = []byte(strings.ReplaceAll(was, `},"`, "},\n\"")) // lines that a diff can show
	}
	answer := normal(string(text))
	if answer != was {
		resp.Header.Del("Content-Length")
	}
	for _, l := range headerLines(resp.Header) {
		fmt.Fprintln(&out, l)
	}
	out.WriteString(answer)
	if err != nil {
		out.WriteString("\nbroken off")
	}
	return out.String()
}

// headerLines are the headers in order, without what differs from run to run.
func headerLines(h http.Header) (lines []string) {
	for name, values := range h {
		for _, v := range values {
			if name != "Date" {
				lines = append(lines, name+": "+normal(v))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// What differs between runs or machines, and what is recorded for it.
var varying = []struct {
	from *regexp.Regexp
	to   string
}{
	{regexp.MustCompile(`\b00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]\b`), "TRACE"},
	{regexp.MustCompile(`\b[0-9a-f]{32}\b`), "ID"},
	{regexp.MustCompile(`"created":[1-9]\d{9}\b`), `"created":NOW`},
	{regexp.MustCompile(`"created_at":[1-9]\d{9}\b`), `"created_at":NOW`},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "127.0.0.1:PORT"},
	{regexp.MustCompile(`"system_fingerprint":"[^"]*"`), `"system_fingerprint":"PRINT"`},
	{regexp.MustCompile(`-?\d+\.\d{4,}(e-?\d+)?`), "REAL"},
	{regexp.MustCompile(`-?\d+e-\d+`), "REAL"},
	{regexp.MustCompile(`"version":( ?)"[^"]*"`), `"version":${1}"VERSION"`},
}

func normal(text string) string {
	for _, v := range varying {
		text = v.from.ReplaceAllString(text, v.to)
	}
	return text
}

// metricLines are the families of an exposition, without those of Go and its process.
func metricLines(text string) string {
	var lines []string
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); strings.HasPrefix(l, "# ") && !strings.Contains(l, " go_") && !strings.Contains(l, " process_") {
			lines = append(lines, l)
		}
	}
	return strings.Join(lines, "\n")
}

// shape is JSON with its keys and the types of its values only. Elements of a list
// and entries of a map from names that vary are recorded once.
func shape(text []byte) string {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		return string(text)
	}
	var walk func(v any) any
	walk = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for k, e := range v {
				v[k] = walk(e)
			}
			return v
		case []any:
			if len(v) > 1 {
				v = v[:1]
			}
			for i, e := range v {
				v[i] = walk(e)
			}
			return v
		case nil:
			return nil
		default:
			return fmt.Sprintf("%T", v)
		}
	}
	if o, ok := v.(map[string]any); ok && o["error"] != nil {
		return string(text)
	}
	out, err := json.Marshal(walk(v))
	if err != nil {
		return err.Error()
	}
	return string(out)
}

// sequenceNumber counts events, of which those that are put together are one.
var sequenceNumber = regexp.MustCompile(`"sequence_number":\d+`)

var eventChoice = regexp.MustCompile(`"choices":\[\{"index":(\d+)`)

// eventLines are the events of a stream, one a line, those of a choice after those of
// the one before, and those that differ in text and tokens only put together.
func eventLines(text string) string {
	events := strings.Split(strings.TrimSuffix(text, "\n\n"), "\n\n")
	slices.SortStableFunc(events, func(a, b string) int { return choiceOf(a) - choiceOf(b) })
	var lines []string
	var last *value // the event that the last line is; nil: it is something else
	for _, event := range events {
		name, data, ok := strings.Cut(event, "data: ")
		v := parseValue(sequenceNumber.ReplaceAllString(data, `"sequence_number":0`))
		if !ok || v == nil {
			lines, last = append(lines, event), nil
			continue
		}
		if last != nil && last.join(v) {
			lines[len(lines)-1] = name + "data: " + last.String()
			continue
		}
		lines, last = append(lines, name+"data: "+v.String()), v
	}
	return strings.Join(lines, "\n")
}

// choiceOf is the index of an event's choice; events without one come last.
func choiceOf(event string) int {
	m := eventChoice.FindStringSubmatch(event)
	if m == nil {
		return 1000
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// value is JSON that keeps the order of its keys.
type value struct {
	open   byte     // '{' or '['; 0: a scalar
	keys   []string // of an object
	parts  []*value // of an object or a list
	scalar string   // as it is written
}

// parseValue returns nil for what is no JSON.
func parseValue(text string) *value {
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	v, err := readValue(d)
	if err != nil || d.More() {
		return nil
	}
	return v
}

func readValue(d *json.Decoder) (*value, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	open, ok := token.(json.Delim)
	if !ok {
		var text bytes.Buffer
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		if err := e.Encode(token); err != nil {
			return nil, err
		}
		return &value{scalar: strings.TrimSpace(text.String())}, nil
	}
	v := &value{open: byte(open)}
	for d.More() {
		if open == '{' {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			v.keys = append(v.keys, key.(string))
		}
		part, err := readValue(d)
		if err != nil {
			return nil, err
		}
		v.parts = append(v.parts, part)
	}
	_, err = d.Token()
	return v, err
}

// String is the JSON.
func (v *value) String() string {
	if v.open == 0 {
		return v.scalar
	}
	parts := make([]string, len(v.parts))
	for i, p := range v.parts {
		if parts[i] = p.String(); v.open == '{' {
			parts[i] = strconv.Quote(v.keys[i]) + ":" + parts[i]
		}
	}
	return string(v.open) + strings.Join(parts, ",") + string(v.open+2) // the ASCII of both closing marks
}

// join adds an event that differs in text and tokens only, and else changes nothing.
func (v *value) join(w *value) bool {
	if !v.like(w, "") {
		return false
	}
	v.add(w, "")
	return true
}

// grows reports whether a field holds a part of the answer.
func grows(key string) bool {
	switch key {
	case "content", "text", "delta", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset":
		return true
	}
	return false
}

// like reports whether two events are alike but for what grows.
func (v *value) like(w *value, key string) bool {
	switch {
	case v.open != w.open:
		return false
	case grows(key) && (v.open == '[' || v.open == 0 && strings.HasPrefix(v.scalar, `"`) && strings.HasPrefix(w.scalar, `"`)):
		return true
	case v.open == 0:
		return v.scalar == w.scalar
	case !slices.Equal(v.keys, w.keys) || len(v.parts) != len(w.parts):
		return false
	}
	for i := range v.parts {
		if !v.parts[i].like(w.parts[i], v.key(i, key)) {
			return false
		}
	}
	return true
}

// add is the second half of join.
func (v *value) add(w *value, key string) {
	switch {
	case grows(key) && v.open == '[':
		v.parts = append(v.parts, w.parts...)
	case grows(key) && v.open == 0:
		v.scalar = strings.TrimSuffix(v.scalar, `"`) + strings.TrimPrefix(w.scalar, `"`)
	default:
		for i := range v.parts {
			v.parts[i].add(w.parts[i], v.key(i, key))
		}
	}
}

// key is the name of part i: its own, or that of the list that it is in.
func (v *value) key(i int, key string) string {
	if v.open == '{' {
		return v.keys[i]
	}
	return ""
}
