package openai

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// vLLM's routes around TokensPath: render returns the request of TokensPath that a chat or a
// completion is, derender the answer of a chat or a completion that an answer of TokensPath is.

// Rendered is a request of TokensPath for one prompt of a Request. Its values are those that an
// engine gets, with the model's defaults.
type Rendered struct {
	ID, Model                                  string
	Tokens                                     []int32
	MaxTokens                                  int
	Temperature, TopP, MinP, RepetitionPenalty float32 // RepetitionPenalty 0: none
	TopK                                       int32
	FrequencyPenalty, PresencePenalty          float32
}

// Append appends the body of the request. TokensPath takes it as it is.
func (p *Rendered) Append(dst []byte, r *Request) []byte {
	float := func(name string, f float32) { dst = strconv.AppendFloat(append(dst, name...), float64(f), 'g', -1, 32) }
	flag := func(name string, b bool) { dst = strconv.AppendBool(append(dst, name...), b) }
	list := func(name string, texts []string) {
		dst = appendList(append(dst, name...), texts, func(dst []byte, s *string) []byte { return AppendString(dst, *s) })
	}
	optional := func(name string, n int, given bool) {
		if dst = append(dst, name...); given {
			dst = strconv.AppendInt(dst, int64(n), 10)
		} else {
			dst = append(dst, "null"...)
		}
	}
	dst = AppendString(append(dst, `{"request_id":`...), p.ID)
	dst = appendList(append(dst, `,"token_ids":`...), p.Tokens, appendNumber)
	dst = appendInt(dst, `,"features":null,"sampling_params":{"n":`, r.N)
	float(`,"presence_penalty":`, p.PresencePenalty)
	float(`,"frequency_penalty":`, p.FrequencyPenalty)
	float(`,"repetition_penalty":`, cmp.Or(p.RepetitionPenalty, 1))
	float(`,"temperature":`, p.Temperature)
	float(`,"top_p":`, p.TopP)
	dst = appendInt(dst, `,"top_k":`, int(p.TopK))
	float(`,"min_p":`, p.MinP)
	seed := int64(0)
	if r.Seed != nil {
		seed = *r.Seed
	}
	optional(`,"seed":`, int(seed), r.Seed != nil)
	list(`,"stop":`, r.Stop)
	dst = appendList(append(dst, `,"stop_token_ids":`...), r.StopTokens, appendNumber)
	list(`,"bad_words":`, r.BadWords)
	flag(`,"include_stop_str_in_output":`, r.IncludeStop)
	flag(`,"ignore_eos":`, r.IgnoreEOS)
	dst = appendInt(dst, `,"max_tokens":`, p.MaxTokens)
	dst = appendInt(dst, `,"min_tokens":`, r.MinTokens)
	optional(`,"logprobs":`, r.TopLogprobs, r.Logprobs)
	prompt := 0
	if r.PromptLogprobs != nil {
		prompt = *r.PromptLogprobs
	}
	optional(`,"prompt_logprobs":`, prompt, r.PromptLogprobs != nil)
	flag(`,"skip_special_tokens":`, r.SkipSpecial)
	dst = append(dst, `,"spaces_between_special_tokens":true,"logit_bias":`...)
	dst = r.appendBias(dst)
	dst = appendOptionalIDs(append(dst, `,"allowed_token_ids":`...), r.AllowedTokens)
	dst = appendOptionalIDs(append(dst, `,"logprob_token_ids":`...), r.LogprobTokens)
	dst = r.Grammar.append(append(dst, `,"structured_outputs":`...))
	dst = AppendString(append(dst, `},"model":`...), p.Model)
	flag(`,"stream":`, r.Stream)
	dst = append(dst, `,"stream_options":`...)
	if r.hasOptions {
		flag(`{"include_usage":`, r.IncludeUsage)
		flag(`,"continuous_usage_stats":`, r.ContinuousUsage)
		dst = append(dst, '}')
	} else {
		dst = append(dst, "null"...)
	}
	dst = appendOptional(append(dst, `,"cache_salt":`...), r.CacheSalt)
	return append(appendInt(dst, `,"priority":`, int(r.Priority)), `,"kv_transfer_params":null}`...)
}

// appendBias appends logit_bias as an object, or null.
func (r *Request) appendBias(dst []byte) []byte {
	if r.LogitBias == nil {
		return append(dst, "null"...)
	}
	for i, b := range r.LogitBias {
		dst = strconv.AppendInt(append(dst, `,"`...), int64(b.Token), 10)
		if i == 0 {
			dst[bytes.LastIndexByte(dst, ',')] = '{'
		}
		dst = strconv.AppendFloat(append(dst, `":`...), float64(b.Value), 'g', -1, 32)
	}
	return append(dst, '}')
}

// appendOptionalIDs appends token ids, or null if there are none.
func appendOptionalIDs(dst []byte, ids []int32) []byte {
	if len(ids) == 0 {
		return append(dst, "null"...)
	}
	return appendList(dst, ids, appendNumber)
}

// append appends the grammar as structured_outputs, or null.
func (g *Grammar) append(dst []byte) []byte {
	if g == nil {
		return append(dst, "null"...)
	}
	switch g.Kind {
	case grammar.JSONSchema:
		dst = append(append(dst, `{"json":`...), g.Text...)
	case grammar.JSONObject:
		dst = append(dst, `{"json_object":true`...)
	case grammar.Regex:
		dst = AppendString(append(dst, `{"regex":`...), g.Text)
	case grammar.Choice:
		dst = appendList(append(dst, `{"choice":`...), g.Choices, func(dst []byte, s *string) []byte { return AppendString(dst, *s) })
	case grammar.StructuralTag:
		dst = AppendString(append(dst, `{"structural_tag":`...), g.Text)
	default:
		dst = AppendString(append(dst, `{"grammar":`...), g.Text)
	}
	return append(strconv.AppendBool(append(dst, `,"disable_any_whitespace":`...), g.Compact), '}')
}

// Derender is a request for the answer of a chat, or of completions, that answers of TokensPath
// are.
type Derender struct {
	Model   string         // empty: the only model
	Answers []TokenAnswer  // one for each prompt; a chat has one
	Request []byte         // the chat or the completions that were rendered; nil: not given
	State   *DerenderState // before the event of a stream that Answers has; nil: the answers are whole
}

// DerenderState is what a client sends back with each further event of a stream. There is one for
// each choice.
type DerenderState struct {
	RoleSent bool   `json:"role_sent"`        // of a chat
	Tokens   idList `json:"output_token_ids"` // of the events before
}

// Append appends the state as an object.
func (s *DerenderState) Append(dst []byte) []byte {
	dst = strconv.AppendBool(append(dst, `{"role_sent":`...), s.RoleSent)
	return append(appendList(append(dst, `,"output_token_ids":`...), s.Tokens, appendNumber), '}')
}

// TokenAnswer is an answer of TokensPath.
type TokenAnswer struct {
	ID      string        `json:"request_id"`
	Choices []TokenChoice `json:"choices"`
	Prompt  int           `json:"-"` // tokens; -1: not given
	Usage   *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	} `json:"usage"` // of a stream so far; nil: not given
}

// TokenChoice is a choice of an answer of TokensPath.
type TokenChoice struct {
	Index    int    `json:"index"` // of an event
	Tokens   idList `json:"token_ids"`
	Finish   Finish `json:"-"`
	Logprobs *struct {
		Content []TokenCandidate `json:"content"`
	} `json:"logprobs"`

	Reason *string `json:"finish_reason"`
	Stop   any     `json:"stop_reason"`
}

// idList is a list of token ids, or null.
type idList []int32

// UnmarshalJSON implements json.Unmarshaler.
func (l *idList) UnmarshalJSON(text []byte) (err error) {
	switch text[0] {
	case 'n':
		*l = nil
	case '[':
		*l, err = tokenIDs(text)
	default:
		err = errKind("a list of token ids", text)
	}
	if err != nil {
		err = fmt.Errorf("token ids: %w", err)
	}
	return err
}

// TokenCandidate is a token with its log-probability. The token is an id or a text.
type TokenCandidate struct {
	ID      *int32           `json:"token_id"`
	Text    string           `json:"token"`
	Bytes   []uint16         `json:"bytes"`
	Logprob float64          `json:"logprob"`
	Top     []TokenCandidate `json:"top_logprobs"`
}

// parsedValue is the memory in bytes of a JSON value that decodeBody keeps, at most.
const parsedValue = 128

// ParseDerender parses a body of a chat's or of the completions' derender route. charge is as in
// ParseWithin.
func ParseDerender(on Endpoint, body []byte, charge func(bytes int) *Error) (*Derender, *Error) {
	var in struct {
		Model        string          `json:"model"`
		Stream       bool            `json:"stream"`
		Chunk        json.RawMessage `json:"generate_chunk"`
		State        json.RawMessage `json:"stream_state"`
		Answer       json.RawMessage `json:"generate_response"`
		Answers      json.RawMessage `json:"generate_responses"`
		Chat         json.RawMessage `json:"chat_request"`
		Completion   json.RawMessage `json:"completion_request"`
		PromptTokens json.RawMessage `json:"prompt_tokens"`
		PromptIDs    json.RawMessage `json:"prompt_token_ids"`
	}
	if fault := decodeBody(body, charge, &in); fault != nil {
		return nil, fault
	}
	d, name, what := &Derender{Model: in.Model, Request: in.Completion}, "generate_responses", "an answer"
	if on == Chat {
		d.Request = in.Chat
	}
	if in.Stream || on == Chat { // one of each instead of a list
		list := func(v json.RawMessage) json.RawMessage {
			if v == nil {
				return nil
			}
			return slices.Concat([]byte{'['}, v, []byte{']'})
		}
		if name = "generate_response"; in.Stream {
			in.Answer, name, what = in.Chunk, "generate_chunk", "an event of a stream"
		}
		in.Answers, in.PromptTokens, in.PromptIDs = list(in.Answer), list(in.PromptTokens), list(in.PromptIDs)
	}
	if in.Stream {
		d.State = new(DerenderState)
		if fault := decode(in.State, "stream_state", d.State); fault != nil {
			return nil, fault
		}
	}
	if in.Answers == nil {
		return nil, BadRequest(name, "%s is required: %s of %s", name, what, TokensPath)
	}
	if string(d.Request) == "null" {
		d.Request = nil
	}
	var counts []*int
	var ids []idList
	if fault := cmp.Or(decode(in.Answers, name, &d.Answers), decode(in.PromptTokens, "prompt_tokens", &counts), decode(in.PromptIDs, "prompt_token_ids", &ids)); fault != nil {
		return nil, fault
	}
	switch n := len(d.Answers); {
	case n == 0 || n > MaxPrompts:
		return nil, BadRequest(name, "%s has %d answers: want 1 to %d", name, n, MaxPrompts)
	case len(counts) > 0 && len(counts) != n:
		return nil, BadRequest("prompt_tokens", "prompt_tokens has %d numbers for %d answers", len(counts), n)
	case len(ids) > 0 && len(ids) != n:
		return nil, BadRequest("prompt_token_ids", "prompt_token_ids has %d lists for %d answers", len(ids), n)
	}
	nChoices := 0
	for i := range d.Answers {
		a := &d.Answers[i]
		if nChoices += len(a.Choices); nChoices > MaxChoices {
			return nil, BadRequest(name, "%s has more than %d choices", name, MaxChoices)
		}
		switch a.Prompt = -1; {
		case len(counts) > 0 && counts[i] != nil:
			if a.Prompt = *counts[i]; a.Prompt < 0 || a.Prompt > math.MaxInt32 {
				return nil, BadRequest("prompt_tokens", "prompt_tokens must be 0 or more, not %d", a.Prompt)
			}
		case len(ids) > 0 && ids[i] != nil:
			a.Prompt = len(ids[i])
		}
		if fault := a.check(name, in.Stream); fault != nil {
			return nil, fault
		}
	}
	return d, nil
}

// check checks the values of an answer or of an event, and sets why its choices ended.
func (a *TokenAnswer) check(name string, event bool) *Error {
	least, most := 1, MaxN
	if event { // the last one has the usage alone
		least, most = 0, 1
	}
	if n := len(a.Choices); n < least || n > most {
		return BadRequest(name, "%s has an answer with %d choices: want %d to %d", name, n, least, most)
	}
	if u := a.Usage; event && u != nil && (u.Prompt < 0 || u.Completion < 0 || u.Prompt > math.MaxInt32 || u.Completion > math.MaxInt32) {
		return BadRequest(name, "%s.usage has a number of tokens out of range", name)
	}
	for i := range a.Choices {
		c := &a.Choices[i]
		at := fmt.Sprintf("%s.choices[%d]", name, i)
		if c.Finish = (Finish{Reason: "stop", Token: -1}); event {
			c.Finish.Reason = ""
		}
		if c.Reason != nil {
			c.Finish.Reason = *c.Reason
		}
		if event && (c.Index < 0 || c.Index >= MaxChoices) {
			return BadRequest(name, "%s.index is %d: want 0 to %d", at, c.Index, MaxChoices-1)
		}
		if r := c.Finish.Reason; r != "stop" && r != "length" && (!event || c.Reason != nil) {
			return BadRequest(name, "%s.finish_reason is %q: want stop or length, of an answer that is complete", at, Clip(r, 40))
		}
		switch stop := c.Stop.(type) {
		case string:
			c.Finish.Stop = stop
		case float64:
			if stop >= 0 && stop <= maxTokenID && stop == math.Trunc(stop) {
				c.Finish.Token = int32(stop)
			}
		}
		if c.Logprobs != nil {
			if fault := checkCandidates(c.Logprobs.Content, at+".logprobs.content"); fault != nil {
				return fault
			}
		}
	}
	return nil
}

// checkCandidates checks the values of tokens and of their alternatives, which answers have in
// other types.
func checkCandidates(list []TokenCandidate, name string) *Error {
	for i := range list {
		c := &list[i]
		if math.Abs(c.Logprob) > math.MaxFloat32 {
			return BadRequest(name, "%s has the logprob %v, which is out of range", name, c.Logprob)
		}
		for _, b := range c.Bytes {
			if b > math.MaxUint8 {
				return BadRequest(name, "%s has the byte %d: want 0 to 255", name, b)
			}
		}
		if fault := checkCandidates(c.Top, name); fault != nil {
			return fault
		}
	}
	return nil
}

// decodeBody decodes a body after charging for its values.
func decodeBody(body []byte, charge func(bytes int) *Error, v any) *Error {
	if !utf8.Valid(body) {
		return BadRequest("", "the body is not valid UTF-8")
	}
	n, err := jsonscan.Valid(body, jsonscan.Bounds{})
	if err != nil {
		return notJSON(err)
	}
	if first := body[jsonscan.Space(body, 0)]; first != '{' {
		return BadRequest("", "the body must be a JSON object, not %s", cmp.Or(kinds[first], "number"))
	}
	if fault := charge(len(body) + parsedValue*n.Values); fault != nil {
		return fault
	}
	return decode(body, "", v)
}

// decode decodes checked JSON that may be missing. The error names the member in it, or name.
func decode(text []byte, name string, v any) *Error {
	if text == nil {
		return nil
	}
	err := json.Unmarshal(text, v)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong):
		if wrong.Field != "" && name != "" {
			name += "."
		}
		name += wrong.Field
		return BadRequest(name, "%s must be %s, not %s", cmp.Or(name, "the body"), kindName(wrong.Type), Clip(wrong.Value, 80))
	}
	return BadRequest(name, "%s: %s", cmp.Or(name, "the body"), Clip(err.Error(), 200))
}

// kindName returns JSON's name of a type.
func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list"
	case reflect.Struct:
		return "an object"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	}
	return "a number of its range"
}
