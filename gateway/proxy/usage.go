package proxy

import (
	"bytes"
	"cmp"
	"regexp"
	"slices"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// outcome has the reasons for which an answer's choices ended, and the usage if the answer has it.
// Those of chats and completions are found by searching the answer's bytes: events for the member
// with a choice's end, and for usage from then on. Only members are found, because quotes within
// strings are escaped.
type outcome struct {
	stops, lengths, aborts, errors int
	usage                          openai.Usage // Completion 0: unknown
}

func (o *outcome) any() bool { return o.stops+o.lengths+o.aborts+o.errors > 0 }

var (
	finishMember = []byte(`"finish_reason":`)
	usageMember  = []byte(`"usage":`)
)

// messagesPath is the path of Anthropic's Messages API.
const messagesPath = "/v1/messages"

// learn reads whole events, or a whole answer.
func (r *relay) learn(b []byte) {
	switch path := r.path(); {
	case path != messagesPath && path != responsesPath:
		r.outcome.learn(b)
	case !r.events:
		r.outcome.learnObject(b)
	default:
		for line := range bytes.SplitSeq(b, []byte{'\n'}) {
			if data, ok := bytes.CutPrefix(line, []byte("data:")); ok && bytes.Contains(data, usageMember) {
				r.outcome.learnObject(data)
				r.outcome.learnObject(upstream.Member(data, "message"))
				r.outcome.learnObject(upstream.Member(data, "response"))
			}
		}
	}
}

// learnEvents is learn for events that may be parts of ones too large to hold. begun reports that b
// begins inside an event, inside that b ends there.
func (r *relay) learnEvents(b []byte, begun, inside bool) {
	if n := len(b); (begun || inside) && !r.completes() {
		if blank := eventEnd.FindIndex(b); !inside && blank != nil {
			n = blank[1]
		}
		r.learnPart(b[:n], !inside)
		b = b[n:]
	}
	r.learn(b)
}

var eventEnd = regexp.MustCompile(`\n\r?\n`)

// tailBytes is how much of the end of a large answer, or of a large event, is searched for its
// usage.
const tailBytes = 4 << 10

// learnPart reads a part of an answer, or of an event, that is too large to hold. last reports that
// b ends it. Only the end is searched: for the usage, and for why the answer ended.
func (r *relay) learnPart(b []byte, last bool) {
	t := slices.Concat(r.tail, b[max(0, len(b)-tailBytes):])
	if r.tail = t[max(0, len(t)-tailBytes):]; !last {
		return
	}
	t, r.tail = r.tail, nil
	at := bytes.LastIndex(t, usageMember)
	switch path := r.path(); {
	case path != messagesPath && path != responsesPath:
		r.outcome.learn(t)
	case at >= 0 && member(t[at:], `"output_tokens":`) > 0:
		r.outcome.ended(cmp.Or(lastText(t, `"stop_reason":`), lastText(t, `"status":`)))
		r.outcome.learnUsage(t[at:])
	}
}

// lastText returns the text of the last member of that name; empty: it is missing or no string.
func lastText(b []byte, name string) string {
	i := bytes.LastIndex(b, []byte(name))
	if i < 0 {
		return ""
	}
	text, ok := bytes.CutPrefix(bytes.TrimLeft(b[i+len(name):], " "), []byte{'"'})
	if !ok {
		return ""
	}
	text, _, _ = bytes.Cut(text, []byte{'"'})
	return string(text)
}

// learnObject reads a message or a response, or an event of Messages with its end. The number of
// tokens of an answer counts from the end on.
func (o *outcome) learnObject(object []byte) {
	o.ended(cmp.Or(upstream.TextMember(object, "stop_reason"), upstream.TextMember(upstream.Member(object, "delta"), "stop_reason"), upstream.TextMember(object, "status")))
	o.learnUsage(upstream.Member(object, "usage"))
}

// ended counts the end of a message or of a response for a reason.
func (o *outcome) ended(reason string) {
	switch reason {
	case "", "in_progress", "queued":
	case "max_tokens", "model_context_window_exceeded", "incomplete":
		o.lengths++
	case "cancelled":
		o.aborts++
	case "failed":
		o.errors++
	default:
		o.stops++
	}
}

// learnUsage reads the usage of a message or of a response.
func (o *outcome) learnUsage(u []byte) {
	cached := member(u, `"cache_read_input_tokens":`) // which Anthropic's input_tokens leaves out
	if n := member(u, `"input_tokens":`) + cached + member(u, `"cache_creation_input_tokens":`); n > 0 {
		o.usage.Prompt, o.usage.Cached = n, max(cached, member(u, `"cached_tokens":`))
	}
	if n := member(u, `"output_tokens":`); n > 0 && o.any() {
		o.usage.Completion = n
	}
}

// nTokens returns the number of tokens in whole events: one in each that may have one.
func (r *relay) nTokens(b []byte) int {
	if r.path() == messagesPath {
		return bytes.Count(b, []byte("event: content_block_delta"))
	}
	return max(1, bytes.Count(b, []byte("\n\n")))
}

// learn reads whole events of chats or completions, or a whole answer.
func (o *outcome) learn(b []byte) {
	for rest := b; ; {
		i := bytes.Index(rest, finishMember)
		if i < 0 {
			break
		}
		rest = bytes.TrimLeft(rest[i+len(finishMember):], " ")
		if len(rest) == 0 || rest[0] != '"' {
			continue // null: the choice has not ended
		}
		reason, _, _ := bytes.Cut(rest[1:], []byte{'"'})
		switch string(reason) {
		case "length", "max_tokens":
			o.lengths++
		case "abort", "cancelled":
			o.aborts++
		case "error":
			o.errors++
		default: // stop, tool_calls, content_filter and the like
			o.stops++
		}
	}
	if !o.any() {
		return
	}
	if i := bytes.LastIndex(b, usageMember); i >= 0 {
		u := b[i+len(usageMember):]
		if n := member(u, `"completion_tokens":`); n > 0 {
			o.usage = openai.Usage{Prompt: member(u, `"prompt_tokens":`), Completion: n, Cached: member(u, `"cached_tokens":`)}
		}
	}
}

// member returns the number of the first member of that name, or 0.
func member(b []byte, name string) (n int) {
	i := bytes.Index(b, []byte(name))
	if i < 0 {
		return 0
	}
	for _, c := range bytes.TrimLeft(b[i+len(name):], " ") {
		if c < '0' || c > '9' || n > 1<<40 {
			break
		}
		n = 10*n + int(c-'0')
	}
	return n
}

// nOutput returns the number of tokens of the answer. Events of a stream count if the server does
// not report usage.
func (r *relay) nOutput() int {
	if n := r.outcome.usage.Completion; n > 0 {
		return n
	}
	return r.nEvents
}

// finish returns the reason of the last choice's end; empty: unknown.
func (o *outcome) finish() string {
	switch {
	case o.lengths > 0:
		return metrics.ReasonLength
	case o.stops > 0:
		return metrics.ReasonStop
	case o.aborts+o.errors > 0:
		return metrics.ReasonError
	}
	return ""
}

// record counts the request's end.
func (r *relay) record() {
	if r.Cause != "" || r.Status >= 400 {
		if r.Admitted {
			r.CountFinished(r.Broken(), 1)
		}
		return
	}
	o := &r.outcome
	if !o.any() { // embeddings and the like
		o.stops = 1
	}
	r.CountFinished(metrics.ReasonStop, o.stops)
	r.CountFinished(metrics.ReasonLength, o.lengths)
	r.CountFinished(metrics.ReasonAbort, o.aborts)
	r.CountFinished(metrics.ReasonError, o.errors)
	prompt, output := -1, -1
	if n := r.nOutput(); n > 0 {
		output = n
		r.CountOutput(max(0, n-r.nEvents))
	}
	if u := &o.usage; u.Prompt > 0 {
		prompt = u.Prompt
		r.CountPrompt(u.Prompt, u.Cached)
	}
	r.CountAnswer(&r.times, prompt, output)
}
