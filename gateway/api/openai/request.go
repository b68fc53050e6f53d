// Package openai implements the types of the OpenAI API. Requests are parsed and checked by one
// table of fields. Answers and events are appended to buffers.
//
// Each field of the API is a row of the table, with its type, its range and its class: served,
// accepted because any value has the same effect, or refused by name if its value would change the
// answer. Names that are not in the table are collected, so that the caller can log them. The
// OpenAPI document is made from the table, too.
//
// Invariant: no effect that a parsed request asks for is silently left out.
//
// The package does not know models. It leaves prompts as text, counts no tokens, and sets no
// sampling defaults.
package openai

import (
	"bytes"
	"cmp"
	"errors"
	"slices"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Endpoint is a set of API endpoints that take a JSON body, as bits.
type Endpoint uint16

// Endpoints.
const (
	Chat Endpoint = 1 << iota
	Completions
	Tokenize
	Detokenize
	Embeddings
	Pooling // vLLM's form of Embeddings
	Embed   // Cohere's
	Scores  // of pairs of texts
	Ranks   // of documents for a query

	both    = Chat | Completions
	forms   = Embeddings | Pooling | Embed
	vectors = forms | Scores | Ranks
	prompts = both | vectors // whose prompts nodes compute
	all     = prompts | Tokenize | Detokenize
)

var endpoints = [...]Endpoint{Chat, Completions, Tokenize, Detokenize, Embeddings, Pooling, Embed, Scores, Ranks}

// Vectors reports whether nodes answer with the vectors of prompts instead of tokens.
func (e Endpoint) Vectors() bool { return e&vectors != 0 }

// Bounds of one request.
const (
	MaxN         = 128       // choices; each is a request of its own for a decode node
	MaxPrompts   = 256       // prompts in one completions request; times n, at most MaxChoices
	MaxChoices   = 1024      // answers to one request
	MaxInputs    = 2048      // inputs of one embeddings request, as many as OpenAI takes
	MaxStops     = 64        // stop strings or stop tokens; each token is compared with all
	MaxStopChars = 1024      // characters of a stop string; as much text may be held back
	MaxBadWords  = 256       // strings; each token is compared with all
	MaxBias      = 1024      // entries of logit_bias; each is applied to every token
	MaxAllowed   = 1 << 18   // allowed_token_ids: the largest vocabularies
	MaxLogprobs  = 256       // most probable tokens of each token; a gateway may have a lower bound
	MaxNamed     = 128       // logprob_token_ids, which are added to each token
	MaxInterval  = 1024      // stream_interval: tokens whose text is sent together
	MaxSalt      = 1024      // characters of cache_salt
	MaxID        = 256       // bytes of request_id
	MaxIDs       = 1 << 22   // token ids in a prompt, or in the prompts of a request together
	MaxMessages  = 1 << 14   // messages, documents or tools
	MaxValues    = 1 << 17   // JSON values in messages, documents, tools or chat_template_kwargs, at any depth
	maxUnknown   = 16        // names of unknown fields that are kept
	maxTokenID   = 1<<31 - 1 // token ids travel as int32
)

// Prompt is text or, with Tokens not nil, token ids.
type Prompt struct {
	Text   string
	Tokens []int32
}

// Request is a parsed request. Its strings are copies. Messages, MessageParts, TemplateArgs,
// Documents, Tools and Functions may be parts of the body until DropRaw.
type Request struct {
	Endpoint Endpoint
	Model    string // empty: the only model

	Messages            []byte // chat: a JSON array of objects with role; text parts are joined
	MessageParts        []byte // Messages with its parts, for templates that read them; nil: no message has parts
	AddGenerationPrompt bool
	ContinueFinal       bool
	ChatTemplate        string     // instead of the model's; empty: not given
	TemplateArgs        []byte     // JSON object; nil: none
	Documents           []byte     // JSON array for the template; nil: none
	Tools               []byte     // JSON array for the template; nil: none
	Functions           []Function // the tools; their schemas are parts of Tools
	Calls               CallRule
	HideReasoning       bool   // the answer leaves reasoning out
	ReasoningEffort     string // for the template; empty: not given
	Conversations       int    // of the batch that the request is a part of; 0: no batch

	Prompts []Prompt // completions
	Echo    bool     // the answer begins with the prompt or, in a chat, with a last message of the assistant

	AddSpecialTokens *bool // nil: the endpoint's default
	Truncate         int   // tokens that are kept of a prompt; -1: as many as fit, 0: all
	TruncateEnd      bool  // the end of the prompt is removed, not its beginning
	TokenStrings     bool  // tokenize: the answer also has the tokens as text

	N           int
	MaxTokens   int      // of each answer; -1: not given, 0: only the prompt, with Echo
	ClipMax     bool     // MaxTokens beyond the model's context are no error; no field of a body sets it
	MinTokens   int      // of each answer, before it may end
	Temperature *float32 // nil: the model's default, also of the next three
	TopP        *float32
	TopK        *int32
	MinP        *float32
	Seed        *int64
	Stop        []string
	StopTokens  []int32
	IgnoreEOS   bool
	IncludeStop bool // stop strings and stop tokens stay in the text
	SkipSpecial bool
	Priority    int32
	CacheSalt   string
	RequestID   string

	// Changes of logits.
	RepetitionPenalty *float32 // above 0; nil: the model's default
	FrequencyPenalty  float32  // in [-2, 2], also the next
	PresencePenalty   float32
	LogitBias         []Bias   // by ascending token, without duplicates
	AllowedTokens     []int32  // nil: all
	BadWords          []string // not empty

	Grammar        *Grammar // that every answer matches; nil: none
	ThinkingBudget *int64   // tokens of reasoning in an answer; nil: not given

	Logprobs       bool    // of each token of the answers
	TopLogprobs    int     // most probable tokens of each, at most MaxLogprobs
	LogprobTokens  []int32 // further tokens of each
	PromptLogprobs *int    // most probable tokens of each prompt token; nil: not requested

	*VectorOptions // nil unless Endpoint.Vectors()

	TokenIDs    bool // the answer has the ids of prompt and answers
	TokensAsIDs bool // in log-probabilities, tokens are written as token_id:N
	PromptText  bool // the answer has the text that the template rendered

	Stream          bool
	StreamInterval  int // tokens of an event, except the first and the last
	IncludeUsage    bool
	ContinuousUsage bool

	Unknown []string // fields that are not in the table, at most maxUnknown

	maxCompletion   int // max_completion_tokens, which has precedence; -1: not given
	hasOptions      bool
	addGenerationIn bool
	truncationSide  bool
	truncates       bool // truncate is given
	beamSearch      bool
}

// VectorOptions are the fields of requests for vectors, scores and ranks. They are apart because
// the other requests, which are most, need no memory for them.
type VectorOptions struct {
	Dimensions int   // first numbers of each vector that the answer has; 0: all
	Base64     bool  // vectors are little-endian float32 in base64, not lists
	Normalize  *bool // divide vectors by their length, or map scores to 0 to 1; nil: as the model does

	// Of Embed, with its texts in Second.
	InputType string   // whose prefix each text gets; empty: none
	Types     []string // of vectors in the answer; nil: float
	MaxInput  int      // tokens of a text; 0: as many as the context has

	// Of scores and ranks.
	First, Second []string // the texts of pairs, or the query and the documents: First has one, or as many as Second
	TopN          int      // ranks in the answer, the best ones; 0: all
}

// Parse parses a request's JSON body. The error names the field.
func Parse(on Endpoint, body []byte) (*Request, *Error) { return ParseWithin(on, body, nil) }

// DropRaw drops the parts of the body. It is called once the prompt is rendered.
func (r *Request) DropRaw() {
	r.Messages, r.MessageParts, r.TemplateArgs, r.Documents, r.Tools = nil, nil, nil, nil, nil
	r.Functions, r.ChatTemplate = nil, ""
}

// ParseWithin is Parse for a caller that accounts memory. Before any part of the body is stored,
// charge is called with the bytes that the request will need in addition to the body, up to the
// tokens of its prompts. Its error ends the parse. charge may be nil.
func ParseWithin(on Endpoint, body []byte, charge func(bytes int) *Error) (*Request, *Error) {
	r, fault := parse(on, body, charge, true, func(f *field) bool { return true }, (*field).take)
	if fault == nil {
		fault = r.check()
	}
	if fault != nil {
		return nil, fault
	}
	return r, nil
}

// promptFields are the fields on which a prompt's tokens depend. Rows refuse fields with content
// other than text.
var promptFields = []string{
	"messages", "prompt", "cache_salt", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "prompt_embeds", "suffix",
	"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template", "documents", "reasoning_effort",
	"media_io_kwargs", "mm_processor_kwargs", "tools",
}

// ParsePrompt parses the fields on which the prompt's tokens depend, also tools, of a body that
// another server will answer. It leaves the other fields to that server. charge is as in
// ParseWithin.
func ParsePrompt(on Endpoint, body []byte, charge func(bytes int) *Error) (*Request, *Error) {
	r, fault := parse(on, body, charge, false, func(f *field) bool { return slices.Contains(promptFields, f.name) }, func(f *field, r *Request, v []byte) *Error {
		if f.name == "tools" {
			return f.read(r, v)
		}
		return f.take(r, v)
	})
	if fault == nil {
		fault = r.required()
	}
	if fault != nil {
		return nil, fault
	}
	r.AddGenerationPrompt = r.AddGenerationPrompt && !r.ContinueFinal
	return r, nil
}

// member is a member of the body that the table has.
type member struct {
	f     *field
	value []byte // as it is written
	cost  int    // bytes that storing it needs
}

// parse reads a body in two steps. The first checks all of it and finds the wanted members, each
// within its bounds; of equal names the last one counts. The second stores their values in this
// order. unknown reports whether names without a row are collected.
func parse(on Endpoint, body []byte, charge func(int) *Error, unknown bool, wanted func(*field) bool, take func(*field, *Request, []byte) *Error) (*Request, *Error) {
	r := &Request{Endpoint: on, N: 1, MaxTokens: -1, maxCompletion: -1, AddGenerationPrompt: true, SkipSpecial: true, StreamInterval: 1}
	if on.Vectors() {
		r.VectorOptions = &VectorOptions{}
	}
	var room [16]member
	members, extra := room[:0], 0
	fault := Scan(body, func(s *jsonscan.Scanner) *Error {
		f := find(on, s.Name())
		if f == nil && unknown {
			r.unknown(shortName(s.Name()))
		}
		if f == nil || !wanted(f) {
			s.Value(jsonscan.Bounds{})
			return nil
		}
		most := f.value.bounds(f.class, s.Rest())
		v, n := s.Value(most)
		if v == nil {
			return Exceeded(f.name, most, s.Err())
		}
		if i := slices.IndexFunc(members, func(m member) bool { return m.f == f }); i >= 0 {
			extra -= members[i].cost
			members = slices.Delete(members, i, i+1)
		}
		m := member{f, v, f.value.cost(f.class, len(v), n.Values)}
		members, extra = append(members, m), extra+m.cost
		return nil
	})
	if fault == nil && charge != nil {
		fault = charge(extra)
	}
	for i := 0; fault == nil && i < len(members); i++ {
		if m := &members[i]; m.value[0] != 'n' { // null: not given
			fault = take(m.f, r, m.value)
		}
	}
	return r, fault
}

// Scan checks a whole body. It calls f for each member, and f reads the member's value.
func Scan(body []byte, f func(*jsonscan.Scanner) *Error) *Error {
	if !utf8.Valid(body) {
		return BadRequest("", "the body is not valid UTF-8")
	}
	s := jsonscan.Object(body)
	if s.Err() != nil {
		if _, err := jsonscan.Valid(body, jsonscan.Bounds{}); err != nil {
			return notJSON(err)
		}
		return BadRequest("", "the body must be a JSON object, not %s", cmp.Or(kinds[body[jsonscan.Space(body, 0)]], "number"))
	}
	for s.Next() {
		if fault := f(&s); fault != nil {
			return fault
		}
	}
	if err := s.Err(); err != nil {
		return notJSON(err)
	}
	return nil
}

func notJSON(err error) *Error { return BadRequest("", "the body is not valid JSON: %s", err) }

// Exceeded returns the fault of a member whose value could not be read.
func Exceeded(name string, most jsonscan.Bounds, err error) *Error {
	switch {
	case errors.Is(err, jsonscan.ErrElements):
		return BadRequest(name, "%s: has too many elements, at most %d are taken", name, most.Elements)
	case errors.Is(err, jsonscan.ErrValues):
		return BadRequest(name, "%s: has too many values in it, at most %d are taken", name, most.Values)
	}
	return notJSON(err)
}

// longestName is above the length of any name of the table, with each character written as \uXXXX.
const longestName = 256

// find returns the row of a member by its name as it is written, or nil.
func find(on Endpoint, quoted []byte) *field {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return rows[on][string(quoted[1:len(quoted)-1])]
	}
	return rows[on][shortName(quoted)]
}

// shortName returns a member's name. Of a long name it returns the beginning as it is written.
func shortName(quoted []byte) string {
	if len(quoted) > longestName {
		return Clip(string(quoted[1:longestName]), longestName-8)
	}
	return jsonscan.Text(quoted)
}

func (r *Request) unknown(name string) {
	if len(r.Unknown) < maxUnknown {
		r.Unknown = append(r.Unknown, Clip(name, 64))
	}
}

// check checks combinations of fields.
func (r *Request) check() *Error {
	if r.maxCompletion >= 0 {
		r.MaxTokens = r.maxCompletion
	}
	if fault := cmp.Or(r.required(), r.checkTools()); fault != nil {
		return fault
	}
	switch {
	case r.hasOptions && !r.Stream:
		return BadRequest("stream_options", "stream_options needs stream: true")
	case r.ContinueFinal && r.AddGenerationPrompt && r.addGenerationIn:
		return BadRequest("continue_final_message", "continue_final_message and add_generation_prompt cannot both be true")
	case len(r.Prompts)*r.N > MaxChoices && !r.Endpoint.Vectors():
		return BadRequest("n", "%d prompts with n = %d ask for more than %d answers", len(r.Prompts), r.N, MaxChoices)
	case r.MaxTokens >= 0 && r.MinTokens > r.MaxTokens:
		return BadRequest("min_tokens", "min_tokens is %d, above max_tokens, which is %d", r.MinTokens, r.MaxTokens)
	case r.MaxTokens == 0 && !r.Echo:
		return BadRequest("max_tokens", "max_tokens must be at least 1, not 0, unless echo gives the prompt back")
	case r.MaxTokens == 0 && len(r.LogprobTokens) > 0:
		return BadRequest("logprob_token_ids", "logprob_token_ids needs tokens of an answer, and max_tokens is 0")
	case r.truncationSide && r.Truncate == 0:
		return BadRequest("truncation_side", "truncation_side needs truncate_prompt_tokens")
	case r.TopLogprobs > 0 && !r.Logprobs:
		return BadRequest("top_logprobs", "top_logprobs needs logprobs: true")
	case r.PromptLogprobs != nil && r.Stream:
		return BadRequest("prompt_logprobs", "prompt_logprobs cannot be streamed: leave stream out")
	case len(r.LogprobTokens) > 0 && !r.Logprobs:
		return BadRequest("logprob_token_ids", "logprob_token_ids needs logprobs")
	case len(r.LogprobTokens) > 0 && r.beamSearch:
		return BadRequest("logprob_token_ids", "logprob_token_ids and use_beam_search exclude each other")
	}
	if r.ContinueFinal {
		r.AddGenerationPrompt = false
	}
	if r.Endpoint.Vectors() {
		return r.checkVectors()
	}
	return nil
}

// checkVectors checks the texts of pairs, and makes them the prompts.
func (r *Request) checkVectors() *Error {
	switch {
	case len(r.First) > 1 && len(r.First) != len(r.Second):
		return BadRequest("", "Input lengths must be either 1:1, 1:N or N:N, not %d:%d", len(r.First), len(r.Second))
	case len(r.First)+len(r.Second) > MaxInputs:
		return BadRequest("", "there are %d texts, at most %d are scored: send fewer", len(r.First)+len(r.Second), MaxInputs)
	}
	if r.Endpoint == Embed && !r.truncates {
		r.Truncate, r.TruncateEnd = -1, true
	}
	if r.Truncate < 0 && r.MaxInput > 0 {
		r.Truncate = r.MaxInput
	}
	for _, text := range slices.Concat(r.First, r.Second) {
		r.Prompts = append(r.Prompts, Prompt{Text: text})
	}
	return nil
}

// CheckLogprobs refuses a request for more than most of the most probable tokens with each token.
func (r *Request) CheckLogprobs(most int) *Error {
	name, n := "top_logprobs", r.TopLogprobs
	if r.Endpoint == Completions {
		name = "logprobs"
	}
	if n <= most && r.PromptLogprobs != nil {
		name, n = "prompt_logprobs", *r.PromptLogprobs
	}
	if n > most {
		return BadRequest(name, "%s: must be at most %d, not %d: the gateway's --max-logprobs", name, most, n)
	}
	return nil
}

// PromptParam returns the field of the prompt in requests of an endpoint.
func PromptParam(on Endpoint) string {
	switch on {
	case Chat:
		return "messages"
	case Embeddings, Pooling:
		return "input"
	case Embed:
		return "texts"
	case Scores, Ranks: // it may be each of two
		return ""
	}
	return "prompt"
}

// required checks that the required fields are present.
func (r *Request) required() *Error {
	hasMessages, hasPrompt := r.Messages != nil, r.Prompts != nil
	switch {
	case r.Endpoint == Chat && !hasMessages:
		return BadRequest("messages", "messages is required: a list of objects with role and content")
	case r.Endpoint == Completions && !hasPrompt:
		return BadRequest("prompt", "prompt is required: a string, a list of strings, or token ids")
	case r.Endpoint&(Embeddings|Pooling) != 0 && !hasPrompt:
		return BadRequest("input", "input is required: a string, a list of strings, or token ids")
	case r.Endpoint == Embed && r.Second == nil:
		return BadRequest("texts", "texts is required: a list of strings")
	case r.Endpoint == Scores && (r.First == nil || r.Second == nil):
		return BadRequest("text_1", "text_1 and text_2 are required, or data_1 and data_2, or queries with documents or items: each a string or a list of strings")
	case r.Endpoint == Ranks && r.First == nil:
		return BadRequest("query", "query is required: a string")
	case r.Endpoint == Ranks && r.Second == nil:
		return BadRequest("documents", "documents is required: a list of strings")
	case r.Endpoint == Tokenize && hasMessages == hasPrompt:
		return BadRequest("prompt", "one of prompt, a string, and messages, a list, is required")
	case r.Endpoint == Detokenize && !hasPrompt:
		return BadRequest("tokens", "tokens is required: a list of token ids")
	}
	return nil
}
