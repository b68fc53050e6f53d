package openai

import (
	"cmp"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Other routes of vLLM.

// InvocationPath returns the path that serves a body of InvocationsPath, by its members: that of
// chats or of completions; empty: none of them.
func InvocationPath(body []byte) (path string) {
	for s := jsonscan.Object(body); s.Next(); {
		name := s.Name()
		s.Value(jsonscan.Bounds{})
		switch shortName(name) {
		case "messages":
			return "/v1/chat/completions"
		case "prompt":
			path = "/v1/completions"
		}
	}
	return path
}

// NoInvocation returns the error of a body of InvocationsPath for which InvocationPath has no path.
func NoInvocation(body []byte) *Error {
	fault := Scan(body, func(s *jsonscan.Scanner) *Error {
		s.Name()
		s.Value(jsonscan.Bounds{})
		return nil
	})
	return cmp.Or(fault, BadRequest("", "the body has neither messages, as a chat has, nor prompt, as a completion has"))
}

// ParseBatch parses a body of BatchPath: a chat whose messages are a list of conversations. It
// returns the request of each, which have all other fields in common. charge is as in ParseWithin.
func ParseBatch(body []byte, charge func(bytes int) *Error) ([]*Request, *Error) {
	if fault := charge(len(body)); fault != nil {
		return nil, fault
	}
	var list []byte
	shared := append(make([]byte, 0, len(body)), '{')
	fault := Scan(body, func(s *jsonscan.Scanner) *Error {
		name := s.Name()
		v, _ := s.Value(jsonscan.Bounds{})
		switch {
		case v == nil: // invalid: scan reports it
		case shortName(name) == "messages":
			list = v
		default:
			shared = append(append(append(append(shared, name...), ':'), v...), ',')
		}
		return nil
	})
	if fault != nil {
		return nil, fault
	}
	if list == nil || list[0] != '[' || list[jsonscan.Space(list, 1)] != '[' {
		return nil, BadRequest("messages", "messages must be a list of conversations, each a list of messages, with at least one")
	}
	var all []*Request
	err := elements(list, func(i int, conversation []byte) error {
		if i >= MaxPrompts {
			return BadRequest("messages", "messages has more than %d conversations", MaxPrompts)
		}
		one := append([]byte(`{"messages":`), conversation...)
		if i == 0 { // the shared fields are parsed once
			one = append(append(shared, one[1:]...), '}')
		} else {
			one = append(one, '}')
		}
		r, fault := ParseWithin(Chat, one, charge)
		if fault != nil {
			return fault.InConversation(i)
		}
		if i > 0 {
			shared := *all[0]
			shared.Messages, shared.MessageParts = r.Messages, r.MessageParts
			r = &shared
		}
		all = append(all, r)
		return nil
	})
	if err != nil {
		return nil, asError(err)
	}
	for _, r := range all {
		r.Conversations = len(all)
	}
	return all, all[0].checkBatch()
}

// InConversation sets the index of the conversation in the error of a batch, if the error is about
// messages, and returns the error.
func (e *Error) InConversation(i int) *Error {
	const list = "messages"
	if rest, is := strings.CutPrefix(e.Param, list); is {
		at := list + "[" + strconv.Itoa(i) + "]"
		e.Param = at + rest
		if rest, is = strings.CutPrefix(e.Message, list); is {
			e.Message = at + rest
		} else {
			e.Message = at + ": " + e.Message
		}
	}
	return e
}

// checkBatch refuses the fields that a batch's answer has no place for, as vLLM does.
func (r *Request) checkBatch() *Error {
	refuse := func(name string) *Error {
		return BadRequest(name, "%s is not supported in a batch: leave it out, or send the conversations to /v1/chat/completions", name)
	}
	switch {
	case r.Stream:
		return refuse("stream")
	case r.Functions != nil && !r.Calls.None:
		return refuse("tools")
	case r.N > 1:
		return refuse("n")
	case r.PromptLogprobs != nil:
		return refuse("prompt_logprobs")
	case r.PromptText:
		return refuse("return_prompt_text")
	}
	return nil
}

// asError returns the fault in the error of a walk through a value.
func asError(err error) *Error {
	var fault *Error
	if errors.As(err, &fault) {
		return fault
	}
	return notJSON(err)
}

// MaxAborts bounds the ids in one body of AbortPath.
const MaxAborts = 4096

// answerIDs are the prefixes of a request's id in the ids of its answers.
var answerIDs = []string{"chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "pooling-", "score-"}

// ParseAbort returns the ids in a body of AbortPath, also without the prefixes that answers add.
// Without ids, all requests are meant. charge is as in ParseWithin.
func ParseAbort(body []byte, charge func(bytes int) *Error) (ids map[string]bool, fault *Error) {
	var in struct {
		IDs []*string `json:"request_ids"`
	}
	if fault := decodeBody(body, charge, &in); fault != nil {
		return nil, fault
	}
	if len(in.IDs) > MaxAborts {
		return nil, BadRequest("request_ids", "request_ids has %d ids: want at most %d", len(in.IDs), MaxAborts)
	}
	ids = map[string]bool{}
	for i, id := range in.IDs {
		if id == nil {
			return nil, BadRequest("request_ids", "request_ids[%d] must be a string, not null", i)
		}
		ids[*id] = true
		for _, prefix := range answerIDs {
			if bare, ok := strings.CutPrefix(*id, prefix); ok {
				ids[bare] = true
			}
		}
	}
	return ids, nil
}

// AppendAborted appends the answer of AbortPath.
func AppendAborted(dst []byte, ids []string) []byte {
	slices.Sort(ids)
	dst = appendInt(dst, `{"status":"aborted","aborted":`, len(ids))
	return append(appendList(append(dst, `,"request_ids":`...), ids, func(dst []byte, s *string) []byte { return AppendString(dst, *s) }), '}')
}

// TokenizerInfo is the answer of TokenizerInfoPath, with the members of a tokenizer_config.json.
type TokenizerInfo struct {
	Class    string                `json:"tokenizer_class"`
	MaxLen   int                   `json:"model_max_length"`
	Bos      *string               `json:"bos_token"`
	Eos      *string               `json:"eos_token"`
	Added    map[string]AddedToken `json:"added_tokens_decoder"`
	Template *string               `json:"chat_template"`
}

// AddedToken is a token of a tokenizer.json that is matched before its model runs.
type AddedToken struct {
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// SetAdded sets the added tokens from a tokenizer.json.
func (i *TokenizerInfo) SetAdded(tokenizerJSON []byte) error {
	var list []struct {
		ID int
		AddedToken
	}
	if text := lastMember(tokenizerJSON, "added_tokens"); text != nil {
		if err := json.Unmarshal(text, &list); err != nil {
			return err
		}
	}
	i.Added = map[string]AddedToken{}
	for _, t := range list {
		i.Added[strconv.Itoa(t.ID)] = t.AddedToken
	}
	return nil
}
