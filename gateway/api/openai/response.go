package openai

import (
	"strconv"
	"unicode/utf8"
)

// Usage counts a request's tokens.
type Usage struct {
	Prompt     int
	Completion int
	Cached     int // of Prompt, found in a prefix cache
}

// Append appends the usage object.
func (u Usage) Append(dst []byte) []byte {
	dst = appendInt(dst, `{"prompt_tokens":`, u.Prompt)
	dst = appendInt(dst, `,"total_tokens":`, u.Prompt+u.Completion)
	dst = appendInt(dst, `,"completion_tokens":`, u.Completion)
	dst = appendInt(dst, `,"prompt_tokens_details":{"cached_tokens":`, u.Cached)
	return append(dst, "}}"...)
}

// Finish is why a choice ended.
type Finish struct {
	Reason string // "stop", "length"; empty: not yet
	// What stopped it, when that was not the end-of-sequence token: a stop
	// string, or a stop token when Token is at least 0.
	Stop  string
	Token int32
}

// NotFinished is the Finish of a choice that goes on.
var NotFinished = Finish{Token: -1}

func (f Finish) append(dst []byte) []byte {
	if f.Reason == "" {
		return append(dst, `"finish_reason":null`...)
	}
	dst = append(dst, `"finish_reason":"`...)
	dst = append(append(dst, f.Reason...), `","stop_reason":`...)
	switch {
	case f.Stop != "":
		return AppendString(dst, f.Stop)
	case f.Token >= 0:
		return strconv.AppendInt(dst, int64(f.Token), 10)
	}
	return append(dst, "null"...)
}

// Answer builds one request's response or stream events. It is made once per
// request; its methods append and do not allocate beyond the buffer given.
type Answer struct {
	chat   bool
	tokens bool   // without text
	head   string // of a response object, to just before the choices' elements
	event  string // of a stream event, likewise
}

// NewAnswer fixes what all parts of a response share. created is in seconds
// since 1970.
func NewAnswer(on Endpoint, id string, created int64, model, fingerprint string) *Answer {
	object := func(name string) []byte {
		b := AppendString([]byte(`{"id":`), id)
		b = append(append(append(b, `,"object":"`...), name...), `","created":`...)
		b = strconv.AppendInt(b, created, 10)
		b = AppendString(append(b, `,"model":`...), model)
		b = AppendString(append(b, `,"system_fingerprint":`...), fingerprint)
		return append(b, `,"choices":[`...)
	}
	if on == Chat {
		return &Answer{chat: true, head: string(object("chat.completion")), event: "data: " + string(object("chat.completion.chunk"))}
	}
	return &Answer{head: string(object("text_completion")), event: "data: " + string(object("text_completion"))}
}

// AppendRole appends a chat choice's first event; completions have none.
func (a *Answer) AppendRole(dst []byte, index int, p *Told, u *Usage) []byte {
	if !a.chat {
		return dst
	}
	dst = appendInt(append(dst, a.event...), `{"index":`, index)
	dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	return endEvent(p.append(dst), u)
}

// Delta is what a stream event tells of a choice: text, log-probabilities, a
// finish, or several of these.
type Delta struct {
	Index  int
	Text   string
	Probs  []TokenProb
	Tokens []int32 // that the event brings; nil: not asked for
	Prompt *Told   // of a choice's first event; nil: nothing is asked for
	Finish Finish
}

// AppendDelta appends an event. u is nil unless every event carries usage.
func (a *Answer) AppendDelta(dst []byte, d *Delta, u *Usage) []byte {
	if a.tokens {
		return endEvent(append(appendTokenChoice(append(dst, a.event...), d.Index, d.Probs, d.Finish, d.Tokens), ']'), u)
	}
	dst = appendInt(append(dst, a.event...), `{"index":`, d.Index)
	if a.chat {
		dst = append(dst, `,"delta":{`...)
		if d.Text != "" {
			dst = append(AppendString(append(dst, `"content":`...), d.Text), '}')
		} else {
			dst = append(dst, '}')
		}
	} else {
		dst = AppendString(append(dst, `,"text":`...), d.Text)
	}
	dst = d.Finish.append(append(a.appendLogprobs(dst, d.Probs), ','))
	dst = appendIDs(dst, `,"token_ids":`, d.Tokens)
	if !a.chat { // a chat has told it with the role
		dst = d.Prompt.append(dst)
	}
	return endEvent(append(dst, "}]"...), u)
}

// Told is what a client asked to be told of its prompt.
type Told struct {
	Tokens []int32 // its ids; nil: not asked for
	Text   *string // as the template rendered it; nil: not asked for
	Probs  *PromptProbs
	Best   int                // of Probs, at each place
	Decode func(int32) string // a token's text, for Probs
}

// append appends the fields, each after a comma.
func (p *Told) append(dst []byte) []byte {
	if p == nil {
		return dst
	}
	dst = appendIDs(dst, `,"prompt_token_ids":`, p.Tokens)
	if p.Text != nil {
		dst = AppendString(append(dst, `,"prompt_text":`...), *p.Text)
	}
	if p.Probs != nil {
		dst = p.Probs.append(append(dst, `,"prompt_logprobs":`...), p.Best, p.Decode)
	}
	return dst
}

// appendIDs appends a field with token ids, unless they are nil.
func appendIDs(dst []byte, name string, ids []int32) []byte {
	if ids == nil {
		return dst
	}
	dst = append(append(dst, name...), '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	return append(dst, ']')
}

// AppendUsage appends the event of stream_options.include_usage.
func (a *Answer) AppendUsage(dst []byte, u Usage) []byte {
	return endEvent(append(append(dst, a.event...), ']'), &u)
}

// Done is the last event of a stream that ended well.
const Done = "data: [DONE]\n\n"

func endEvent(dst []byte, u *Usage) []byte {
	if u != nil {
		dst = u.Append(append(dst, `,"usage":`...))
	}
	return append(dst, "}\n\n"...)
}

// Choice is one finished answer.
type Choice struct {
	Text   []byte
	Probs  []TokenProb // nil: not asked for
	Tokens []int32     // nil: not asked for
	Prompt *Told       // nil: nothing is asked for
	Finish Finish
}

// AppendResponse appends the whole response object.
func (a *Answer) AppendResponse(dst []byte, choices []Choice, u Usage) []byte {
	if a.tokens {
		return a.appendTokens(dst, choices, u)
	}
	dst = append(dst, a.head...)
	for i, c := range choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendInt(dst, `{"index":`, i)
		if a.chat {
			dst = append(dst, `,"message":{"role":"assistant","content":`...)
			dst = append(AppendString(dst, c.Text), '}')
		} else {
			dst = AppendString(append(dst, `,"text":`...), c.Text)
		}
		dst = appendIDs(c.Finish.append(append(a.appendLogprobs(dst, c.Probs), ',')), `,"token_ids":`, c.Tokens)
		if !a.chat {
			dst = c.Prompt.append(dst)
		}
		dst = append(dst, '}')
	}
	dst = u.Append(append(dst, `],"usage":`...))
	if a.chat && len(choices) > 0 {
		dst = choices[0].Prompt.append(dst)
	}
	return append(dst, '}')
}

// Model is an entry of /v1/models.
type Model struct {
	ID          string
	Created     int64  // seconds since 1970
	MaxModelLen int    // tokens of prompt and answer together
	Parent      string // of an adapter: the model that it is for; empty: none
}

// Append appends the model object.
func (m Model) Append(dst []byte) []byte {
	dst = AppendString(append(dst, `{"id":`...), m.ID)
	dst = strconv.AppendInt(append(dst, `,"object":"model","created":`...), m.Created, 10)
	dst = AppendString(append(dst, `,"owned_by":"tandem","root":`...), m.ID)
	if dst = append(dst, `,"parent":`...); m.Parent != "" {
		dst = AppendString(dst, m.Parent)
	} else {
		dst = append(dst, "null"...)
	}
	dst = appendInt(dst, `,"max_model_len":`, m.MaxModelLen)
	return append(dst, '}')
}

// AppendModels appends the list object.
func AppendModels(dst []byte, models []Model) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	for i, m := range models {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = m.Append(dst)
	}
	return append(dst, "]}"...)
}

func appendInt(dst []byte, before string, n int) []byte {
	return strconv.AppendInt(append(dst, before...), int64(n), 10)
}

const hex = "0123456789abcdef"

// plain marks the bytes that stand for themselves in a JSON string.
var plain = func() (t [256]bool) {
	for c := ' '; c < utf8.RuneSelf; c++ {
		t[c] = c != '"' && c != '\\' && c != 0x7f
	}
	return t
}()

// AppendString appends s as a JSON string. What is not UTF-8 becomes U+FFFD.
func AppendString[T string | []byte](dst []byte, s T) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if plain[c] {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			// At most four bytes, so that the conversion stays on the stack.
			r, size := utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
			if r != utf8.RuneError || size != 1 {
				i += size
				continue
			}
		}
		dst = append(dst, s[start:i]...)
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c < utf8.RuneSelf:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			dst = append(dst, "\uFFFD"...)
		}
		i++
		start = i
	}
	return append(append(dst, s[start:]...), '"')
}

// AppendTokenized appends the answer of /tokenize. strs is nil when the tokens'
// texts were not asked for.
func AppendTokenized(dst []byte, tokens []int32, strs []string, maxModelLen int) []byte {
	dst = appendInt(dst, `{"count":`, len(tokens))
	dst = appendInt(dst, `,"max_model_len":`, maxModelLen)
	if tokens == nil {
		tokens = []int32{}
	}
	dst = append(appendIDs(dst, `,"tokens":`, tokens), `,"token_strs":`...)
	if strs == nil {
		return append(dst, "null}"...)
	}
	dst = append(dst, '[')
	for i, s := range strs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendString(dst, s)
	}
	return append(dst, "]}"...)
}

// AppendDetokenized appends the answer of /detokenize.
func AppendDetokenized(dst []byte, text string) []byte {
	return append(AppendString(append(dst, `{"prompt":`...), text), '}')
}
