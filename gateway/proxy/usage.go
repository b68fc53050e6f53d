package proxy

import (
	"bytes"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// outcome is what an answer told of its end: how often for which reason, and what
// was used, where it says so. It is read off the answer's bytes: of events only for
// the member that tells of a choice's end is looked, and from then on for usage.
// Within JSON's strings quotes are escaped, so that only members are met.
type outcome struct {
	stops, lengths, aborts, errors int
	usage                          openai.Usage // Completion 0: not told
}

func (o *outcome) over() bool { return o.stops+o.lengths+o.aborts+o.errors > 0 }

var (
	finishMember = []byte(`"finish_reason":`)
	usageMember  = []byte(`"usage":`)
)

// learn looks at whole events, or a whole answer.
func (o *outcome) learn(b []byte) {
	for rest := b; ; {
		i := bytes.Index(rest, finishMember)
		if i < 0 {
			break
		}
		rest = bytes.TrimLeft(rest[i+len(finishMember):], " ")
		if len(rest) == 0 || rest[0] != '"' {
			continue // null: it goes on
		}
		reason, _, _ := bytes.Cut(rest[1:], []byte{'"'})
		switch string(reason) {
		case "length", "max_tokens":
			o.lengths++
		case "abort", "cancelled":
			o.aborts++
		case "error":
			o.errors++
		default: // stop, tool_calls, content_filter and the like: it ended by itself
			o.stops++
		}
	}
	if !o.over() {
		return
	}
	if i := bytes.LastIndex(b, usageMember); i >= 0 {
		u := b[i+len(usageMember):]
		if n := member(u, `"completion_tokens":`); n > 0 {
			o.usage = openai.Usage{Prompt: member(u, `"prompt_tokens":`), Completion: n, Cached: member(u, `"cached_tokens":`)}
		}
	}
}

// member is the number of the first member of that name; 0: there is none.
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

// nOutput is how many tokens the answer has, as far as is known: an event of a
// stream is taken for one where its server does not say.
func (r *relay) nOutput() int {
	if n := r.told.usage.Completion; n > 0 {
		return n
	}
	return r.nEvents
}

// finish is why the last choice ended; empty: none is known to have.
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
	o := &r.told
	if !o.over() { // embeddings and the like
		o.stops = 1
	}
	r.CountFinished(metrics.ReasonStop, o.stops)
	r.CountFinished(metrics.ReasonLength, o.lengths)
	r.CountFinished(metrics.ReasonAbort, o.aborts)
	r.CountFinished(metrics.ReasonError, o.errors)
	m, prompt, output := &r.S.Meters, -1, -1
	if n := r.nOutput(); n > 0 {
		output = n
		m.Tokens.Add(float64(max(0, n-r.nEvents)))
	}
	if u := &o.usage; u.Prompt > 0 {
		prompt = u.Prompt
		m.Prompt.Add(float64(u.Prompt))
		m.Cached.Add(float64(u.Cached))
	}
	r.CountAnswer(&r.times, prompt, output)
}
