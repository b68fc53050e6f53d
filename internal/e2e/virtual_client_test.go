package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// The clients of the virtual cluster: what they ask, what they must get, and the
// ways in which they behave.

// inquiry is a request whose answer is known.
type inquiry struct {
	path  string
	body  map[string]any // without what changes no answer: stream, cache_salt
	want  []spoken       // by choice
	usage tokenUsage
}

// spoken is what one choice said.
type spoken struct {
	text   string
	probs  map[string][]json.RawMessage // the lists of its logprobs
	finish string                       // with what stopped it
}

// tokenUsage leaves out what a cache had, which chance decides.
type tokenUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
}

// said is a response object or one event of a stream.
type said struct {
	Choices []struct {
		Index    int
		Text     string
		Message  struct{ Content string }
		Delta    struct{ Content string }
		Logprobs map[string][]json.RawMessage
		Finish   string          `json:"finish_reason"`
		Stop     json.RawMessage `json:"stop_reason"`
	}
	Usage *tokenUsage
	Error *struct {
		Message, Type string
		Code          statusCode
	}
}

// words make prompts; some stems come often, so that prefixes are shared.
var words = strings.Fields("the node keeps a block until nothing pins it and tells whoever asked für 世界 \U0001F600 0x2a {} \t naïve")

// inquiries makes n of them; their answers are asked for later.
func inquiries(n int) []*inquiry {
	rng := rand.New(rand.NewPCG(2, 23))
	text := func(most int) string {
		var b strings.Builder
		for range 1 + rng.IntN(most) {
			b.WriteString(words[rng.IntN(len(words))])
			b.WriteByte(' ')
		}
		return b.String()
	}
	stems := []string{text(4), text(8), text(14)}
	var out []*inquiry
	for i := range n {
		prompt := stems[rng.IntN(len(stems))] + text(8)
		b := map[string]any{"max_tokens": 1 + rng.IntN(44), "seed": i}
		q := &inquiry{path: "/v1/completions", body: b}
		if b["prompt"] = prompt; i%2 == 0 {
			q.path = "/v1/chat/completions"
			delete(b, "prompt")
			b["messages"] = []map[string]string{{"role": "system", "content": stems[0]}, {"role": "user", "content": text(8)}}
		}
		if b["temperature"] = 0; rng.IntN(3) > 0 {
			b["temperature"], b["top_p"], b["top_k"] = 0.5+rng.Float64(), 0.8+0.2*rng.Float64(), rng.IntN(40)
		}
		inquiryControls(rng, q)
		out = append(out, q)
	}
	return out
}

// inquiryControls adds what else must hold on every path.
func inquiryControls(rng *rand.Rand, q *inquiry) {
	b := q.body
	if rng.IntN(4) == 0 {
		b["n"] = 2 + rng.IntN(2)
	}
	if rng.IntN(4) == 0 {
		b["repetition_penalty"], b["presence_penalty"], b["min_p"] = 0.7+0.8*rng.Float64(), rng.Float64()*2-1, rng.Float64()*0.1
		b["logit_bias"] = map[string]float64{"97": 3, "300": -4}
	}
	if rng.IntN(4) == 0 {
		b["stop"] = []string{"e", "ab", "zz"}[:1+rng.IntN(3)]
		b["include_stop_str_in_output"] = rng.IntN(2) == 0
	}
	if rng.IntN(4) == 0 {
		b["ignore_eos"] = true
	}
	if rng.IntN(3) == 0 {
		if b["logprobs"] = rng.IntN(4); q.path == "/v1/chat/completions" {
			b["logprobs"], b["top_logprobs"] = true, rng.IntN(4)
		}
	}
}

// asJSON is the request's body; stream and salt change no answer.
func (q *inquiry) asJSON(stream bool, salt string) []byte {
	b := map[string]any{"stream": stream, "cache_salt": salt}
	if stream {
		b["stream_options"] = map[string]bool{"include_usage": true}
	}
	for k, v := range q.body {
		b[k] = v
	}
	out, err := json.Marshal(b)
	if err != nil {
		panic(err) // plain values only
	}
	return out
}

// gather adds an event's, or a whole response's, choices to what was said before.
func gather(all []spoken, s *said) []spoken {
	for _, c := range s.Choices {
		for len(all) <= c.Index {
			all = append(all, spoken{probs: map[string][]json.RawMessage{}})
		}
		a := &all[c.Index]
		a.text += c.Text + c.Message.Content + c.Delta.Content
		for name, list := range c.Logprobs {
			a.probs[name] = append(a.probs[name], list...)
		}
		if c.Finish != "" {
			a.finish = c.Finish + string(c.Stop)
		}
	}
	return all
}

// differs says how got is not what was wanted; part allows it to end anywhere.
func (q *inquiry) differs(got []spoken, part bool) error {
	if len(got) > len(q.want) || len(got) < len(q.want) && !part {
		return fmt.Errorf("%d choices, want %d", len(got), len(q.want))
	}
	for i := range got {
		g, w := &got[i], &q.want[i]
		whole := !part || g.finish != ""
		if !strings.HasPrefix(w.text, g.text) || whole && g.text != w.text {
			return fmt.Errorf("choice %d says %q, want %q", i, g.text, w.text)
		}
		if whole && g.finish != w.finish {
			return fmt.Errorf("choice %d ends with %q, want %q", i, g.finish, w.finish)
		}
		for name, list := range w.probs {
			n := len(g.probs[name])
			if n > len(list) || whole && n != len(list) || !slices.EqualFunc(g.probs[name], list[:n], func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
				return fmt.Errorf("choice %d has %s %s, want %s", i, name, g.probs[name], list)
			}
		}
	}
	return nil
}

// manner is how a client behaves.
type manner int

const (
	patient  manner = iota
	leaves          // closes its connection at some moment
	slowly          // reads, and perhaps sends, in small pieces
	frozen          // stops reading for longer than it is given
	nonsense        // asks what cannot be answered
	hangsUp         // closes its connection after some byte of the answer
	stalls          // stops reading once, for less time than it is given
)

// anyManner has two of three clients patient.
func anyManner(rng *rand.Rand) manner { return manner(max(0, rng.IntN(17)-11)) }

// reading is a client's connection, which it may read slowly.
type reading struct {
	net.Conn
	rng   *rand.Rand
	how   manner
	after int // bytes read before it freezes or hangs up
	left  atomic.Bool
}

func (r *reading) Read(p []byte) (int, error) {
	switch {
	case r.how == slowly:
		p = p[:min(len(p), 100+r.rng.IntN(900))]
		time.Sleep(time.Duration(r.rng.IntN(12)) * time.Millisecond)
	case r.how == frozen:
		p = p[:min(len(p), 200)]
		if r.after -= len(p); r.after < 0 {
			time.Sleep(slowClientTimeout + time.Second)
			r.how = patient
		}
	case r.how == stalls:
		if p = p[:min(len(p), 200)]; r.after < len(p) {
			time.Sleep(slowClientTimeout / 2)
			r.how = patient
		} else {
			r.after -= len(p)
		}
	}
	n, err := r.Conn.Read(p)
	if r.how == hangsUp {
		if r.after -= n; r.after < 0 {
			r.leave()
		}
	}
	return n, err
}

// leave closes the connection.
func (r *reading) leave() {
	r.left.Store(true)
	r.Conn.Close()
}

// visit is one request of one client.
type visit struct {
	*virtual
	id     string // of the request, in the gateway's log
	q      *inquiry
	stream bool
	conn   *reading
	began  time.Time
}

// client asks one to three inquiries over one connection.
func (v *virtual) client(rng *rand.Rand) {
	time.Sleep(time.Duration(rng.IntN(30_000)) * time.Microsecond)
	nc, err := v.door.Dial(v.t.Context(), "gateway")
	if err != nil {
		if !v.closing.Load() {
			v.errorf("a client cannot connect: %v", err)
		}
		v.saw("no gateway")
		return
	}
	defer nc.Close()
	conn := &reading{Conn: nc, rng: rng}
	r := bufio.NewReader(conn)
	for range 1 + rng.IntN(3) {
		a := &visit{virtual: v, id: fmt.Sprintf("r%d", v.requests.Add(1)), q: v.inquiries[rng.IntN(len(v.inquiries))], stream: rng.IntN(3) > 0, conn: conn, began: time.Now()}
		conn.how = v.behave(rng)
		conn.after = 100 + rng.IntN(800)
		if conn.how == leaves {
			away := time.AfterFunc(time.Duration(rng.IntN(40_000))*time.Microsecond, conn.leave)
			defer away.Stop()
		}
		v.saw("requests")
		if end := a.ask(rng, r); end != "" {
			v.saw(end)
			return // with the connection
		}
		if took := time.Since(a.began); conn.how == patient && !a.frozen() && took > v.timeout+time.Second {
			v.errorf("a request took %v, its timeout is %v", took, v.timeout)
		}
	}
}

// single asks one inquiry over a connection of its own.
func (v *virtual) single(q *inquiry, how manner) {
	nc, err := v.door.Dial(v.t.Context(), "gateway")
	v.must(err)
	defer nc.Close()
	rng := rand.New(rand.NewPCG(v.seed, 41))
	conn := &reading{Conn: nc, rng: rng, how: how, after: 600}
	a := &visit{virtual: v, id: fmt.Sprintf("r%d", v.requests.Add(1)), q: q, stream: true, conn: conn, began: time.Now()}
	v.saw("requests")
	if end := a.ask(rng, bufio.NewReader(conn)); end != "" {
		v.saw(end)
	}
}

// ask sends the request and holds the answer against what it must be. It returns
// how the connection ended, or nothing where it can be used again.
func (a *visit) ask(rng *rand.Rand, r *bufio.Reader) string {
	body := a.q.asJSON(a.stream, fmt.Sprint("salt", rng.IntN(3)))
	if a.conn.how == nonsense {
		body = [][]byte{[]byte(`{"prompt":`), []byte(`{"prompt":"x","messages":[],"temperature":"warm"}`), []byte(`{"prompt":"` + strings.Repeat("ab", 1000) + `","messages":7}`),
			[]byte("{\"prompt\":\"\xff\"}")}[rng.IntN(4)]
	}
	request := fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: t\r\nX-Request-Id: %s\r\nContent-Length: %d\r\n\r\n%s", a.q.path, a.id, len(body), body)
	for len(request) > 0 {
		n := len(request)
		if a.conn.how == slowly {
			n = min(n, 1+rng.IntN(200))
			time.Sleep(time.Duration(rng.IntN(4)) * time.Millisecond)
		}
		if _, err := a.conn.Write(request[:n]); err != nil {
			return a.gone(err)
		}
		request = request[n:]
	}
	resp, err := http.ReadResponse(r, &http.Request{Method: "POST"})
	if err != nil {
		return a.gone(err)
	}
	text, err := io.ReadAll(resp.Body)
	if a.conn.left.Load() {
		a.saw("left while it was answered")
	}
	if err != nil && (!a.stream || resp.StatusCode != http.StatusOK) {
		return a.gone(err)
	}
	if resp.StatusCode != http.StatusOK {
		a.refused(resp, text)
		return ""
	}
	if a.conn.how == nonsense {
		a.errorf("nonsense was answered: %s", text)
	}
	if a.stream {
		return a.streamed(text, err)
	}
	var s said
	if err := json.Unmarshal(text, &s); err != nil {
		a.errorf("%s: %v", text, err)
		return "broken"
	}
	a.whole(gather(nil, &s), s.Usage)
	return ""
}

// whole takes a complete answer.
func (a *visit) whole(got []spoken, u *tokenUsage) {
	if err := a.q.differs(got, false); err != nil {
		a.errorf("%s %s: %v", a.q.path, a.q.asJSON(a.stream, ""), err)
	}
	if u == nil || *u != a.q.usage {
		a.errorf("%s: usage %+v, want %+v", a.q.asJSON(a.stream, ""), u, a.q.usage)
	}
	a.saw(map[bool]string{false: "whole answers", true: "whole streams"}[a.stream])
	if a.conn.how == slowly {
		a.saw("slow clients served")
	}
}

// streamed takes a stream that ended with err.
func (a *visit) streamed(text []byte, err error) string {
	var got []spoken
	var last said
	done := false
	for _, event := range strings.SplitAfter(string(text), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if event == "" || !strings.HasSuffix(event, "\n\n") && err != nil {
			continue // cut in its middle
		}
		if strings.HasPrefix(event, ":") {
			continue // a comment, of --sse-keep-alive
		}
		if !ok || done || last.Error != nil {
			a.errorf("event %q in %q", event, text)
			return "broken"
		}
		if data == "[DONE]\n\n" {
			done = true
			continue
		}
		last = said{}
		if err := json.Unmarshal([]byte(data), &last); err != nil {
			a.errorf("event %q: %v", event, err)
			return "broken"
		}
		got = gather(got, &last)
	}
	switch {
	case done && err == nil:
		a.whole(got, last.Usage)
		return ""
	case err == nil:
		a.errorf("%s: a stream that is not whole ends cleanly: %q", a.q.asJSON(true, ""), text)
		return "broken"
	}
	if err := a.q.differs(got, true); err != nil {
		a.errorf("%s, cut: %v", a.q.asJSON(true, ""), err)
	}
	if last.Error == nil {
		return a.gone(err)
	}
	a.allowed(int(last.Error.Code), last.Error.Message, len(got) > 0)
	return fmt.Sprint("cut streams with code ", last.Error.Code)
}

// refused takes an answer that is an error.
func (a *visit) refused(resp *http.Response, text []byte) {
	var s said
	if err := json.Unmarshal(text, &s); err != nil || s.Error == nil || s.Error.Message == "" || s.Error.Type == "" || int(s.Error.Code) != resp.StatusCode {
		a.errorf("status %d with %q: %v", resp.StatusCode, text, err)
		return
	}
	if resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") == "" {
		a.errorf("%q has no Retry-After", text)
	}
	a.saw(fmt.Sprint("refused with ", resp.StatusCode))
	a.allowed(resp.StatusCode, s.Error.Message, !a.stream)
}

// allowed says whether a request may end with the code, its answer perhaps begun.
func (a *visit) allowed(code int, says string, begun bool) {
	why := ""
	switch code {
	case 499: // which a client can read in the moment in which it closes
		if !a.conn.left.Load() {
			why = "it is still there"
		}
	case http.StatusBadRequest:
		if a.conn.how != nonsense {
			why = "it makes sense"
		}
	case http.StatusGatewayTimeout:
		if took := time.Since(a.began); took < a.timeout-5*time.Millisecond && a.conn.how != slowly {
			why = fmt.Sprintf("it took %v of %v", took, a.timeout)
		}
	case http.StatusInternalServerError:
		if a.stepFaults == 0 {
			why = "no step fails"
		}
	case http.StatusServiceUnavailable:
		if a.gentle && !a.closing.Load() && (streamsSurvive || !begun) {
			why = "a node of each role lives"
		}
	default:
		why = "nobody should"
	}
	if why != "" {
		a.errorf("%s: %s %s ended with %d after %v, begun %t, %q: %s", a.id, a.q.path, a.q.asJSON(a.stream, ""), code, time.Since(a.began), begun, says, why)
	}
}

// gone is for connections that end without a word.
func (a *visit) gone(err error) string {
	switch {
	case a.conn.left.Load():
		return "left"
	case a.closing.Load():
		return "gateway gone"
	case a.frozen():
		return "frozen clients cut"
	}
	a.errorf("%s: the connection ended: %v", a.q.asJSON(a.stream, ""), err)
	return "broken"
}

// frozen says that the client had stopped reading.
func (a *visit) frozen() bool { return a.conn.after < 0 || a.conn.how == frozen }

// learn asks each inquiry of a calm cluster.
func (v *virtual) learn(t *testing.T) {
	for i, q := range v.inquiries {
		nc, err := v.door.Dial(t.Context(), "gateway")
		if err != nil {
			t.Fatal(err)
		}
		body := q.asJSON(false, fmt.Sprint("alone", i))
		if _, err := fmt.Fprintf(nc, "POST %s HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", q.path, len(body), body); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(nc), &http.Request{Method: "POST"})
		if err != nil {
			t.Fatal(err)
		}
		var s said
		err = errors.Join(json.NewDecoder(resp.Body).Decode(&s), nc.Close())
		if err != nil || resp.StatusCode != http.StatusOK || len(s.Choices) == 0 || s.Usage == nil {
			t.Fatalf("%s: status %d, %+v, %v", body, resp.StatusCode, s.Error, err)
		}
		q.want, q.usage = gather(nil, &s), *s.Usage
	}
}

// statusCode is the code of an error: its status, or the name of an error whose status is 400.
type statusCode int

// UnmarshalJSON implements json.Unmarshaler.
func (c *statusCode) UnmarshalJSON(b []byte) error {
	if string(b) == `"context_length_exceeded"` {
		*c = 400
		return nil
	}
	return json.Unmarshal(b, (*int)(c))
}
