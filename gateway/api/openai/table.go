package openai

import (
	"math"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Class is the treatment of a field.
type Class uint8

// Classes.
const (
	Served   Class = iota // it has the effect that the API documents
	Accepted              // its type is checked; its value has no effect, for the reason in the table
	Refused               // 400 with its name, unless its value asks for nothing
)

// field is a row of the table.
type field struct {
	name  string
	on    Endpoint
	class Class
	value value   // type and range, which are checked for every class
	idle  neutral // Refused: the value that asks for nothing, in addition to null
	why   string  // Accepted: why it has no effect; Refused: the remedy, if there is one; Served: where it is
}

// To serve a Refused field, change its class only: its checked value is already stored in Request.

// table has every field of every endpoint. null always means "not given".
var table = []field{
	{"model", all, Served, text(0, 1024, func(r *Request, s string) { r.Model = s }), never, ""},
	{"messages", Chat | Tokenize, Served, value{schema: messagesSchema, check: setMessages, most: tree}, never, ""},
	{"prompt", Completions, Served, promptsOf(MaxPrompts), never, ""},
	{"input", Embeddings | Pooling, Served, promptsOf(MaxInputs), never, ""},
	{"prompt", Tokenize, Served, value{schema: textSchema(0, math.MaxInt), check: setText}, never, ""},
	{"tokens", Detokenize, Served, tokens(0, MaxIDs, func(r *Request, ids []int32) { r.Prompts = []Prompt{{Tokens: ids}} }), never, ""},

	// Length and end of an answer.
	{"max_tokens", Chat, Served, integer(1, math.MaxInt32, func(r *Request, n int64) { r.MaxTokens = int(n) }), never, ""},
	{"max_tokens", Completions, Served, integer(0, math.MaxInt32, func(r *Request, n int64) { r.MaxTokens = int(n) }), never, ""},
	{"max_completion_tokens", Chat, Served, integer(1, math.MaxInt32, func(r *Request, n int64) { r.maxCompletion = int(n) }), never, ""},
	{"stop", both, Served, value{schema: stopSchema, check: setStop, most: jsonscan.Bounds{Elements: MaxStops}}, never, ""},
	{"stop_token_ids", both, Served, tokens(0, MaxStops, func(r *Request, ids []int32) { r.StopTokens = ids }), never, ""},
	{"ignore_eos", both, Served, boolean(func(r *Request, b bool) { r.IgnoreEOS = b }), never, ""},
	{"include_stop_str_in_output", both, Served, boolean(func(r *Request, b bool) { r.IncludeStop = b }), never, ""},
	{"min_tokens", both, Served, integer(0, math.MaxInt32, func(r *Request, n int64) { r.MinTokens = int(n) }), zero, ""},

	// How tokens are drawn.
	{"n", both, Served, integer(1, MaxN, func(r *Request, n int64) { r.N = int(n) }), never, ""},
	{"seed", both, Served, integer(math.MinInt64, math.MaxInt64, func(r *Request, n int64) { r.Seed = &n }), never, ""},
	{"temperature", both, Served, number(from(0, math.MaxFloat32), func(r *Request, f float32) { r.Temperature = &f }), never, ""},
	{"top_p", both, Served, number(above(0, 1), func(r *Request, f float32) { r.TopP = &f }), never, ""},
	{"top_k", both, Served, integer(-1, math.MaxInt32, func(r *Request, n int64) { k := int32(n); r.TopK = &k }), never, ""},
	{"min_p", both, Served, number(from(0, 1), func(r *Request, f float32) { r.MinP = &f }), zero, ""},
	{"frequency_penalty", both, Served, number(from(-2, 2), func(r *Request, f float32) { r.FrequencyPenalty = f }), zero, ""},
	{"presence_penalty", both, Served, number(from(-2, 2), func(r *Request, f float32) { r.PresencePenalty = f }), zero, ""},
	{"repetition_penalty", both, Served, number(above(0, math.MaxFloat32), func(r *Request, f float32) { r.RepetitionPenalty = &f }), one, ""},
	{"logit_bias", both, Served, value{schema: biasSchema, check: setBias, most: jsonscan.Bounds{Elements: MaxBias}}, emptyObject, ""},
	{"allowed_token_ids", both, Served, tokens(1, MaxAllowed, func(r *Request, ids []int32) { r.AllowedTokens = ids }), never, ""},
	{"bad_words", both, Served, texts(MaxBadWords, func(r *Request, words []string) { r.BadWords = words }), emptyList, ""},
	{"use_beam_search", both, Refused, boolean(func(r *Request, b bool) { r.beamSearch = b }), no, "use n and temperature"},
	{"best_of", Completions, Refused, integer(1, MaxN, nil), one, "use n"},
	{"length_penalty", both, Refused, anyNumber, one, "it belongs to beam search"},
	{"watermarking", both, Refused, boolean(nil), no, ""},
	{"repetition_detection", both, Refused, object, never, ""},

	// Information about tokens.
	{"logprobs", Chat, Served, boolean(func(r *Request, b bool) { r.Logprobs = b }), no, ""},
	{"top_logprobs", Chat, Served, integer(0, MaxLogprobs, func(r *Request, n int64) { r.TopLogprobs = int(n) }), zero, ""},
	{"logprobs", Completions, Served, integer(0, MaxLogprobs, func(r *Request, n int64) { r.Logprobs, r.TopLogprobs = true, int(n) }), never, ""},
	{"prompt_logprobs", both, Served, integer(0, MaxLogprobs, func(r *Request, n int64) { k := int(n); r.PromptLogprobs = &k }), never, ""},
	{"logprob_token_ids", both, Served, tokens(0, MaxNamed, func(r *Request, ids []int32) { r.LogprobTokens = ids }), emptyList, ""},
	{"return_tokens_as_token_ids", both, Served, boolean(func(r *Request, b bool) { r.TokensAsIDs = b }), never, ""},
	{"return_token_ids", both, Served, boolean(func(r *Request, b bool) { r.TokenIDs = b }), never, ""},
	{"return_prompt_text", both, Served, boolean(func(r *Request, b bool) { r.PromptText = b }), never, ""},
	{"return_weight_versions", both, Refused, boolean(nil), no, "system_fingerprint changes with the weights"},
	{"return_token_strs", Tokenize, Served, boolean(func(r *Request, b bool) { r.TokenStrings = b }), never, ""},

	// The form of an answer.
	{"stream", both, Served, boolean(func(r *Request, b bool) { r.Stream = b }), never, ""},
	{"stream_options", both, Served, value{schema: streamSchema, check: setStreamOptions}, never, ""},
	{"stream_interval", both, Served, integer(1, MaxInterval, func(r *Request, n int64) { r.StreamInterval = int(n) }), never, ""},
	{"echo", both, Served, boolean(func(r *Request, b bool) { r.Echo = b }), never, ""},
	{"request_id", prompts &^ Embed, Served, value{schema: idSchema, check: setRequestID}, never, ""},
	{"priority", prompts, Served, integer(math.MinInt32, math.MaxInt32, func(r *Request, n int64) { r.Priority = int32(n) }), never, ""},
	{"cache_salt", prompts &^ Embed, Served, text(1, MaxSalt, func(r *Request, s string) { r.CacheSalt = s }), never, ""},

	// The form of vectors.
	{"dimensions", Embeddings, Served, integer(1, math.MaxInt32, func(r *Request, n int64) { r.Dimensions = int(n) }), never, ""},
	{"encoding_format", Embeddings | Pooling, Served, value{schema: encodingSchema, check: setEncoding}, never, ""},
	{"normalize", Embeddings | Pooling, Served, boolean(func(r *Request, b bool) { r.Normalize = &b }), never, ""},
	{"use_activation", Embeddings | Pooling, Served, boolean(func(r *Request, b bool) { r.Normalize = &b }), never, "as normalize"},
	{"embed_dtype", Embeddings | Pooling, Refused, text(0, 64, nil), oneOf("float32"), "base64 has float32"},
	{"endianness", Embeddings | Pooling, Refused, text(0, 64, nil), oneOf("native", "little"), "base64 is little-endian"},
	{"padding", Embeddings | Pooling, Refused, text(0, 64, nil), oneOf("do_not_pad"), ""},
	{"messages", Embeddings | Pooling, Refused, list, never, "send input"},

	{"dimensions", Pooling, Refused, integer(1, math.MaxInt32, nil), never, "use /v1/embeddings"},
	{"task", Pooling, Refused, text(0, 64, nil), oneOf("embed"), "each input has one vector"},

	// Cohere's form.
	{"texts", Embed, Served, secondTexts, never, ""},
	{"input_type", Embed, Served, text(0, 256, func(r *Request, s string) { r.InputType = s }), never, "a name of the model's prompts"},
	{"output_dimension", Embed, Served, integer(1, math.MaxInt32, func(r *Request, n int64) { r.Dimensions = int(n) }), never, ""},
	{"embedding_types", Embed, Served, value{schema: listSchema(schema{"enum": embeddingTypes}, 0, len(embeddingTypes)), check: setTypes}, never, ""},
	{"truncate", Embed, Served, value{schema: schema{"enum": []string{"NONE", "START", "END"}}, check: setCut}, never, ""},
	{"max_tokens", Embed, Served, integer(1, math.MaxInt32, func(r *Request, n int64) { r.MaxInput = int(n) }), never, ""},
	{"images", Embed, Refused, list, never, "only text is served"},
	{"inputs", Embed, Refused, list, never, "send texts"},

	// Pairs of texts.
	{"text_1", Scores, Served, firstTexts, never, ""},
	{"text_2", Scores, Served, secondTexts, never, ""},
	{"data_1", Scores, Served, firstTexts, never, "as text_1"},
	{"data_2", Scores, Served, secondTexts, never, "as text_2"},
	{"queries", Scores, Served, firstTexts, never, "as text_1"},
	{"documents", Scores, Served, secondTexts, never, "as text_2"},
	{"items", Scores, Served, secondTexts, never, "as text_2"},
	{"query", Ranks, Served, text(0, math.MaxInt, func(r *Request, s string) { r.First = []string{s} }), never, ""},
	{"documents", Ranks, Served, secondTexts, never, ""},
	{"top_n", Ranks, Served, integer(0, math.MaxInt32, func(r *Request, n int64) { r.TopN = int(n) }), never, ""},
	{"use_activation", Scores | Ranks, Served, boolean(func(r *Request, b bool) { r.Normalize = &b }), never, "of models that score pairs: false gives the model's own numbers, not between 0 and 1"},

	// From text to tokens and back.
	{"add_special_tokens", prompts&^Embed | Tokenize, Served, boolean(func(r *Request, b bool) { r.AddSpecialTokens = &b }), never, ""},
	{"skip_special_tokens", both, Served, boolean(func(r *Request, b bool) { r.SkipSpecial = b }), never, ""},
	{"spaces_between_special_tokens", both, Refused, boolean(nil), yes, ""},
	{"truncate_prompt_tokens", prompts &^ Embed, Served, value{schema: truncateSchema, check: setTruncate}, never, ""},
	{"truncation_side", prompts &^ Embed, Served, value{schema: sideSchema, check: setSide}, never, ""},
	{"prompt_embeds", Completions, Refused, anything, never, "send text or token ids"},
	{"suffix", Completions, Refused, text(0, math.MaxInt, nil), emptyText, ""},

	// Chat templates.
	{"add_generation_prompt", Chat | Tokenize, Served, boolean(func(r *Request, b bool) { r.AddGenerationPrompt, r.addGenerationIn = b, true }), never, ""},
	{"continue_final_message", Chat | Tokenize, Served, boolean(func(r *Request, b bool) { r.ContinueFinal = b }), never, ""},
	{"chat_template_kwargs", Chat | Tokenize, Served, value{schema: object.schema, check: setTemplateArgs, most: tree}, never, ""},
	{"chat_template", Chat | Tokenize, Served, text(1, math.MaxInt, func(r *Request, s string) { r.ChatTemplate = s }), never, "on gateways with --trust-request-chat-template; others refuse it"},
	{"documents", Chat | Tokenize, Served, value{schema: documentsSchema, check: setDocuments, most: tree}, never, ""},
	{"reasoning_effort", Chat | Tokenize, Served, value{schema: effortSchema, check: setEffort}, never, ""},
	{"media_io_kwargs", Chat | Tokenize, Refused, object, emptyObject, "only text is served"},
	{"mm_processor_kwargs", Chat | Tokenize, Refused, object, emptyObject, "only text is served"},

	// Tools, reasoning, structure.
	{"tools", Chat | Tokenize, Served, value{schema: toolsSchema, check: setTools, most: tree}, never, ""},
	{"tool_choice", Chat, Served, value{schema: toolChoiceSchema, check: setToolChoice}, never, ""},
	{"functions", Chat, Refused, list, never, ""},
	{"function_call", Chat, Refused, anything, oneOf("none"), ""},
	{"parallel_tool_calls", Chat, Served, boolean(func(r *Request, b bool) { r.Calls.One = !b }), yes, ""},
	{"include_reasoning", Chat, Served, boolean(func(r *Request, b bool) { r.HideReasoning = !b }), never, ""},
	{"thinking_token_budget", Chat, Served, integer(0, math.MaxInt32, func(r *Request, n int64) { r.ThinkingBudget = &n }), never, ""},
	{"thinking_token_budget", Completions, Refused, integer(0, math.MaxInt32, nil), never, "use max_tokens"},
	{"response_format", both, Served, value{schema: formatSchema, check: setFormat, most: schemaBounds}, never, ""},
	{"structured_outputs", both, Served, value{schema: structuredSchema, check: setStructured, most: schemaBounds}, never, ""},
	{"guided_json", both, Served, guided(schemaOrText, schemaBounds, (*Request).setSchema, "guided_json"), never, ""},
	{"guided_regex", both, Served, guided(textSchema(1, 4096), schemaBounds, (*Request).setRegex, "guided_regex"), never, ""},
	{"guided_choice", both, Served, guided(choiceSchema, jsonscan.Bounds{Elements: MaxChoiceValues}, (*Request).setChoice, "guided_choice"), never, ""},
	{"guided_grammar", both, Served, guided(grammarSchema, schemaBounds, (*Request).setGrammar, "guided_grammar"), never, ""},

	// Between servers, and plug-ins.
	{"kv_transfer_params", both, Refused, object, emptyObject, "the fleet moves KV by itself"},
	{"ec_transfer_params", both, Refused, object, emptyObject, ""},
	{"vllm_xargs", both, Refused, object, emptyObject, ""},
	{"session_id", both, Refused, text(0, 1024, nil), never, "requests are routed by their prompt's prefix"},

	// OpenAI's own service.
	{"user", prompts &^ Embed, Accepted, text(0, math.MaxInt, nil), never, "it names the end user and changes no answer"},
	{"safety_identifier", Chat, Accepted, text(0, math.MaxInt, nil), never, "it names the end user and changes no answer"},
	{"prompt_cache_key", Chat, Accepted, text(0, math.MaxInt, nil), never, "prompts are routed by their own prefix"},
	{"metadata", Chat, Accepted, object, never, "it labels stored answers, and none is stored"},
	{"store", Chat, Refused, boolean(nil), no, "answers are not stored"},
	{"service_tier", Chat, Refused, text(0, 64, nil), oneOf("auto", "default"), "use priority"},
	{"modalities", Chat, Refused, list, textOnly, "only text is served"},
	{"audio", Chat, Refused, object, never, "only text is served"},
	{"prediction", Chat, Refused, object, never, ""},
	{"web_search_options", Chat, Refused, object, never, ""},
	{"verbosity", Chat, Refused, text(0, 64, nil), oneOf("medium"), "ask for it in a message"},
}

// rows has the table's rows by endpoint and name.
var rows = func() map[Endpoint]map[string]*field {
	m := map[Endpoint]map[string]*field{}
	for _, on := range endpoints {
		m[on] = map[string]*field{}
		for i := range table {
			if f := &table[i]; f.on&on != 0 {
				m[on][f.name] = f
			}
		}
	}
	return m
}()

// Has reports whether the table has a field of an endpoint.
func Has(on Endpoint, name string) bool { return rows[on][name] != nil }

// take stores a value that is not null in the request.
func (f *field) take(r *Request, v []byte) *Error {
	if fault := f.read(r, v); fault != nil {
		return fault
	}
	if f.class != Refused || f.idle.is(short(v)) {
		return nil
	}
	advice := "leave it out"
	if f.why != "" {
		advice += "; " + f.why
	}
	return BadRequest(f.name, "%s is not supported here (got %s): %s", f.name, quote(v, 80), advice)
}

// read stores a value if its type and range are right, whether the field is served or not.
func (f *field) read(r *Request, v []byte) *Error {
	if f.class != Served && f.value.most != tree {
		v = short(v)
	}
	err := f.value.check(r, v)
	if e, ok := err.(*Error); ok || err == nil {
		return e
	}
	return BadRequest(f.name, "%s: %s", f.name, err)
}
