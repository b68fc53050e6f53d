package openai

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
)

// Operation is one route in /openapi.json.
type Operation struct {
	Method  string
	Path    string // {name} at its end is the rest of a path
	Summary string
	Body    Endpoint // whose fields are those of the JSON body; 0: no body, Takes or Words
	Takes   string   // schema of another JSON body, by its name in components
	Words   []string // values of a body that is text/plain
	Answer  string   // schema of a JSON answer, by its name in components; empty: plain text
	Events  string   // schema of each event, if the answer may be streamed
	Typed   bool     // events have types, and no [DONE] follows the last one
	Query   string   // name of a required parameter of the query, an identifier; empty: there is none
	Key     bool     // requires an API key, if there are keys
	Fails   string   // schema of errors, by its name in components; empty: Error. Such streams have no [DONE]
	Errors  []int    // statuses other than 200 and those that follow from Body, Key and Path
	Page    bool     // the answer is text/html; else, without Answer, text/plain
}

// errors returns all statuses of the operation other than 200.
func (o *Operation) errors(keys bool) []int {
	all := append([]int(nil), o.Errors...)
	if o.Body != 0 || o.Takes != "" {
		all = append(all, 400, 404, 413, 415)
	}
	if strings.HasSuffix(o.Path, "}") {
		all = append(all, 404)
	}
	if o.Key && keys {
		all = append(all, 401)
	}
	return all
}

// bodies has the names of the schemas of requests.
var bodies = map[Endpoint]string{Chat: "ChatRequest", Completions: "CompletionRequest", Tokenize: "TokenizeRequest", Detokenize: "DetokenizeRequest", Embeddings: "EmbeddingRequest", Pooling: "PoolingRequest", Embed: "EmbedRequest", Scores: "ScoreRequest", Ranks: "RankRequest"}

// Document returns an OpenAPI 3.1 document of the operations and the table of fields. keys reports
// whether API keys are required.
func Document(version string, keys bool, operations []Operation) []byte {
	paths := map[string]schema{}
	for i := range operations {
		o := &operations[i]
		if paths[o.Path] == nil {
			paths[o.Path] = schema{}
		}
		paths[o.Path][strings.ToLower(o.Method)] = o.describe(keys)
	}
	schemas := schema{}
	for name, text := range answers {
		schemas[name] = json.RawMessage(text)
	}
	for name, text := range messagesSchemas {
		schemas[name] = json.RawMessage(text)
	}
	for on, name := range bodies {
		schemas[name] = body(on)
	}
	maps.Copy(schemas, responseSchemas())
	components := schema{"schemas": schemas}
	if keys {
		components["securitySchemes"] = schema{"key": schema{"type": "http", "scheme": "bearer"},
			"x-api-key": schema{"type": "apiKey", "in": "header", "name": "x-api-key"}, "api-key": schema{"type": "apiKey", "in": "header", "name": "api-key"}}
	}
	doc, err := json.MarshalIndent(schema{
		"openapi": "3.1.0",
		"info": schema{"title": "Tandem", "version": version,
			"description": "The OpenAI API as Tandem serves it. A refused field is in the schemas with the values that ask for nothing."},
		"paths":      paths,
		"components": components,
	}, "", " ")
	if err != nil {
		panic(fmt.Sprintf("openai: the document cannot be written: %v", err)) // it is made of constants
	}
	return append(doc, '\n')
}

func ref(name string) schema { return schema{"$ref": "#/components/schemas/" + name} }

func (o *Operation) describe(keys bool) schema {
	plain := schema{"text/plain": schema{"schema": schema{"type": "string"}}}
	failure := ref(cmp.Or(o.Fails, "Error"))
	failed := schema{"application/json": schema{"schema": failure}}
	good, bad := plain, plain
	if o.Page {
		good = schema{"text/html": schema{"schema": schema{"type": "string"}}}
	}
	if o.Answer != "" {
		good = schema{"application/json": schema{"schema": ref(o.Answer)}}
		bad = failed
	}
	if o.Takes != "" || o.Words != nil {
		bad = failed
	}
	switch {
	case o.Typed:
		good["text/event-stream"] = schema{"schema": schema{ // of one event
			"description": "With stream. Events are named by their type. The last one has the whole answer, or its error.",
			"type":        "object",
			"required":    []string{"event", "data"},
			"properties":  schema{"event": anyText, "data": schema{"type": "string", "contentMediaType": "application/json", "contentSchema": ref(o.Events)}},
		}}
	case o.Events != "":
		data := schema{"type": "string", "contentMediaType": "application/json", "contentSchema": schema{"anyOf": []schema{ref(o.Events), failure}}}
		about := "With stream. A broken one ends in an error."
		if o.Fails == "" {
			data = schema{"anyOf": []schema{{"const": "[DONE]"}, data}}
			about = "With stream. A whole stream ends in [DONE], a broken one in an Error."
		}
		good["text/event-stream"] = schema{"schema": schema{ // of one event
			"description": about,
			"type":        "object",
			"required":    []string{"data"},
			"properties":  schema{"data": data},
		}}
	}
	responses := schema{"200": schema{"description": "OK", "content": good}}
	for _, status := range o.errors(keys) {
		content := bad
		if status == http.StatusUnauthorized || status == http.StatusForbidden { // the same for all operations
			content = failed
		}
		responses[strconv.Itoa(status)] = schema{"description": http.StatusText(status), "content": content}
	}
	op := schema{"summary": o.Summary, "responses": responses}
	takes := o.Takes
	if o.Body != 0 {
		takes = bodies[o.Body]
	}
	if takes != "" {
		op["requestBody"] = schema{"required": true, "content": schema{"application/json": schema{"schema": ref(takes)}}}
	}
	if o.Words != nil {
		op["requestBody"] = schema{"required": true, "content": schema{"text/plain": schema{"schema": schema{"type": "string", "enum": o.Words}}}}
	}
	if _, name, ok := strings.Cut(strings.TrimSuffix(o.Path, "}"), "{"); ok {
		op["parameters"] = []schema{{"name": name, "in": "path", "required": true, "schema": schema{"type": "string"}}}
	}
	if o.Query != "" {
		op["parameters"] = []schema{{"name": o.Query, "in": "query", "required": true, "schema": schema{"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}}}
	}
	if o.Key && keys {
		op["security"] = []schema{{"key": []string{}}, {"x-api-key": []string{}}, {"api-key": []string{}}}
	}
	return op
}

// body returns the schema of an endpoint's requests, from the table's rows.
func body(on Endpoint) schema {
	properties := schema{}
	for name, f := range rows[on] {
		properties[name] = f.describe()
	}
	var prompts []schema
	for _, name := range []string{"prompt", "messages", "tokens", "input", "texts"} {
		if f := rows[on][name]; f != nil && f.class == Served {
			prompts = append(prompts, schema{"required": []string{name}, "properties": schema{name: f.value.schema}})
		}
	}
	pair := func(a, b string) {
		prompts = append(prompts, schema{"required": []string{a, b}, "properties": schema{a: rows[on][a].value.schema, b: rows[on][b].value.schema}})
	}
	switch on {
	case Scores:
		for _, names := range scorePairs {
			pair(names[0], names[1])
		}
	case Ranks:
		pair("query", "documents")
	}
	which := "allOf"
	if len(prompts) > 1 {
		which = "oneOf"
	}
	return schema{"type": "object", "properties": properties, which: prompts}
}

func (f *field) describe() schema {
	s, word := nullable(f.value.schema), "served"
	if f.why != "" {
		word += ": " + f.why
	}
	switch f.class {
	case Accepted:
		word = "accepted without effect: " + f.why
	case Refused:
		word = "not supported"
		if f.why != "" {
			word += ": " + f.why
		}
		s = schema{"type": "null"}
		if f.idle.schema != nil {
			s = schema{"anyOf": []schema{f.idle.schema, {"type": "null"}}}
		}
	}
	described := schema{"description": word}
	maps.Copy(described, s)
	return described
}

const usageSchema = `{"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"], "properties": {
	"completion_tokens_details": {"type": "object", "required": ["reasoning_tokens"], "properties": {"reasoning_tokens": {"type": "integer", "minimum": 0}}},
	"prompt_tokens": {"type": "integer", "minimum": 0}, "completion_tokens": {"type": "integer", "minimum": 0}, "total_tokens": {"type": "integer", "minimum": 0},
	"prompt_tokens_details": {"type": "object", "required": ["cached_tokens"], "properties": {"cached_tokens": {"type": "integer", "minimum": 0}}}}}`

const (
	chatLogprobs = `{"type": ["object", "null"], "required": ["content"], "properties": {"content": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}}`
	textLogprobs = `{"type": ["object", "null"], "required": ["text_offset", "token_logprobs", "tokens", "top_logprobs"], "properties": {
	"text_offset": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
	"tokens": {"type": "array", "items": {"type": "string"}}, "top_logprobs": {"type": "array", "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}}}}}`
	tokenLogprob = `{"type": "object", "required": ["token", "logprob", "bytes"], "properties": {"token": {"type": "string"}, "logprob": {"type": "number"},
	"bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}, "top_logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}}}}`
)

// promptSchemas are the members about the prompt: of a chat's answer, and of each choice otherwise.
const promptSchemas = `"prompt_token_ids": ` + orNullIDs + `, "prompt_text": {"type": ["string", "null"]}, "prompt_logprobs": {"anyOf": [{"type": "null"}, {"$ref": "#/components/schemas/PromptLogprobs"}]}`

const orNullIDs = `{"anyOf": [{"type": "null"}, {"$ref": "#/components/schemas/TokenIDs"}]}`

const finishSchema = `"token_ids": ` + orNullIDs + `, ` + promptSchemas + `, ` + `"finish_reason": {"enum": ["stop", "length", "tool_calls", "abort", null]}, "stop_reason": {"type": ["string", "integer", "null"]}`

// Members of a message that are there only where a parser split them off.
const (
	parsedSchema = `"reasoning": {"type": ["string", "null"]}, "reasoning_content": {"type": "string"}`
	callSchema   = `"id": {"type": "string", "minLength": 1}, "type": {"const": "function"}`
)

// generated returns the schema of an answer, or of an event.
func generated(object, usage, logprobs, choice string) string {
	return `{"type": "object", "required": ["id", "object", "created", "model", "system_fingerprint", "choices"` + usage + `], "properties": {
	"id": {"type": "string", "minLength": 1}, "object": {"const": "` + object + `"}, "created": {"type": "integer", "minimum": 0},
	"model": {"type": "string"}, "system_fingerprint": {"type": "string"}, "service_tier": {"type": "null"}, "kv_transfer_params": {"type": "null"}, "usage": {"$ref": "#/components/schemas/Usage"}, ` + promptSchemas + `,
	"choices": {"type": "array", "items": {"type": "object", "required": ["index", "logprobs", "finish_reason", ` + choice + `, "logprobs": ` + logprobs + `, ` + finishSchema + `}}}}}`
}

// tokensSchema returns the schema of an answer of TokensPath, or of an event.
func tokensSchema(required string) string {
	return `{"type": "object", "required": ["request_id", "choices"` + required + `], "properties": {"request_id": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"},
	"prompt_logprobs": {"anyOf": [{"type": "null"}, {"$ref": "#/components/schemas/PromptLogprobs"}]},
	"choices": {"type": "array", "items": {"type": "object", "required": ["index", "logprobs", "finish_reason", "token_ids"], "properties": {"index": {"type": "integer", "minimum": 0},
		"logprobs": ` + chatLogprobs + `, "token_ids": {"$ref": "#/components/schemas/TokenIDs"}, ` + finishSchema + `}}}}}`
}

// renderedSchema describes a request of TokensPath that a prompt was rendered to.
const renderedSchema = `{"type": "object", "required": ["request_id", "token_ids", "sampling_params", "model", "stream", "cache_salt", "priority"], "properties": {"request_id": {"type": "string"},
	"token_ids": {"$ref": "#/components/schemas/TokenIDs"}, "sampling_params": {"type": "object"}, "model": {"type": "string"}, "stream": {"type": "boolean"},
	"cache_salt": {"type": ["string", "null"]}, "priority": {"type": "integer"}}}`

// tokensAnswerSchema describes an answer of TokensPath that is derendered.
const tokensAnswerSchema = `{"type": "object", "required": ["choices"], "properties": {"request_id": {"type": "string"}, "choices": {"type": "array", "minItems": 1, "maxItems": 128, "items": {"type": "object",
	"properties": {"token_ids": ` + orNullIDs + `, "finish_reason": {"enum": ["stop", "length", null]}, "stop_reason": {"type": ["string", "integer", "null"]}, "logprobs": {"type": ["object", "null"]}}}}}}`

// eventSchema describes an event of a stream of TokensPath that is derendered.
const eventSchema = `{"type": "object", "required": ["choices"], "properties": {"request_id": {"type": "string"}, "choices": {"type": "array", "maxItems": 1, "items": {"type": "object",
	"properties": {"index": {"type": "integer", "minimum": 0, "maximum": 1023}, "token_ids": ` + orNullIDs + `, "finish_reason": {"enum": ["stop", "length", null]}, "stop_reason": {"type": ["string", "integer", "null"]}, "logprobs": {"type": ["object", "null"]}}}},
	"usage": {"type": ["object", "null"], "properties": {"prompt_tokens": {"type": "integer", "minimum": 0, "maximum": 2147483647}, "completion_tokens": {"type": "integer", "minimum": 0, "maximum": 2147483647}}}}}`

const (
	tokenCountSchema = `{"type": ["integer", "null"], "minimum": 0, "maximum": 2147483647}`
	stateSchema      = `{"type": "object", "properties": {"role_sent": {"type": "boolean"}, "output_token_ids": ` + orNullIDs + `}}`
)

// derenderSchema returns the schema of a body of a derender route: of answers, or of an event.
func derenderSchema(name, answers, request, counts, ids string) string {
	body := func(name, answers, counts, ids, stream string) string {
		return `{"type": "object", "required": ["` + name + `"` + stream + `, "` + name + `": ` + answers + `,
	"model": {"type": ["string", "null"]}, "prompt_tokens": ` + counts + `, "prompt_token_ids": ` + ids + `, "` + request + `": {"type": ["object", "null"], "description": "the request that was rendered"}}}`
	}
	return `{"oneOf": [` + body(name, answers, counts, ids, `], "properties": {"stream": {"const": false}`) + `, ` +
		body("generate_chunk", eventSchema, tokenCountSchema, orNullIDs, `, "stream"], "properties": {"stream": {"const": true}, "stream_state": {"anyOf": [{"type": "null"}, `+stateSchema+`]}`) + `]}`
}

// derenderedSchema returns the schema of an answer of a derender route: a whole one, or an event
// with the state that the client sends with the next one.
func derenderedSchema(whole, event string) string {
	return `{"anyOf": [{"$ref": "#/components/schemas/` + whole + `"}, {"type": "object", "required": ["chunk", "stream_state"], "properties": {
	"chunk": {"$ref": "#/components/schemas/` + event + `"}, "stream_state": ` + stateSchema + `}}]}`
}

// answers has the schemas of answers, and of bodies that are not in the table of fields.
var answers = map[string]string{
	"LoadAdapter": `{"type": "object", "required": ["lora_name", "lora_path"], "properties": {"lora_name": {"type": "string", "minLength": 1},
		"lora_path": {"type": "string", "minLength": 1}, "load_inplace": {"type": ["boolean", "null"]}}}`,
	"TokensRequest": `{"type": "object", "required": ["token_ids"], "properties": {"request_id": {"type": ["string", "null"], "pattern": "^[!-~]{1,256}$"}, "model": {"type": ["string", "null"]},
		"token_ids": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}}, "stream": {"type": ["boolean", "null"]},
		"sampling_params": {"type": ["object", "null"], "description": "the sampling fields of a completion, such as max_tokens, temperature, n, logprobs and stop"},
		"stream_options": {"type": ["object", "null"]}, "cache_salt": {"type": ["string", "null"], "minLength": 1, "maxLength": 1024}, "priority": {"type": ["integer", "null"], "minimum": -2147483648, "maximum": 2147483647}}}`,
	"Tokens":        tokensSchema(`, "prompt_logprobs", "usage"`),
	"TokensChunk":   tokensSchema(``),
	"UnloadAdapter": `{"type": "object", "required": ["lora_name"], "properties": {"lora_name": {"type": "string", "minLength": 1}}}`,
	"Usage":         usageSchema,
	"TokenLogprob":  tokenLogprob,
	"Targets": `{"type": "array", "items": {"type": "object", "required": ["targets", "labels"], "properties": {
		"targets": {"type": "array", "items": {"type": "string"}}, "labels": {"type": "object", "additionalProperties": {"type": "string"}}}}}`,
	"TokenIDs": `{"type": "array", "items": {"type": "integer", "minimum": 0}}`,
	"PromptLogprobs": `{"type": "array", "items": {"type": ["object", "null"], "additionalProperties": {"type": "object", "required": ["logprob", "rank", "decoded_token"], "properties": {
		"logprob": {"type": "number"}, "rank": {"type": "integer", "minimum": 1}, "decoded_token": {"type": "string"}}}}}`,
	"Error": `{"type": "object", "required": ["error"], "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
		"message": {"type": "string", "minLength": 1}, "type": {"type": "string", "minLength": 1}, "param": {"type": ["string", "null"]}, "code": {"type": ["integer", "string"]}}}}}`,
	"ChatCompletion": generated("chat.completion", `, "usage"`, chatLogprobs, `"message"], "properties": {"index": {"type": "integer", "minimum": 0},
		"message": {"type": "object", "required": ["role", "content"], "properties": {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, `+parsedSchema+`,
		"refusal": {"type": "null"}, "annotations": {"type": "null"}, "audio": {"type": "null"}, "function_call": {"type": "null"},
			"tool_calls": {"type": "array", "items": {"type": "object", "required": ["id", "type", "function"], "properties": {`+callSchema+`,
				"function": {"type": "object", "required": ["name", "arguments"], "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}}}}}}}}`),
	"ChatChunk": generated("chat.completion.chunk", ``, chatLogprobs, `"delta"], "properties": {"index": {"type": "integer", "minimum": 0},
		"delta": {"type": "object", "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}, `+parsedSchema+`,
			"tool_calls": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", "function"], "properties": {"index": {"type": "integer", "minimum": 0}, `+callSchema+`,
				"function": {"type": "object", "required": ["arguments"], "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}}}}}}}}`),
	"Completion":      generated("text_completion", `, "usage"`, textLogprobs, `"text"], "properties": {"index": {"type": "integer", "minimum": 0}, "text": {"type": "string"}`),
	"CompletionChunk": generated("text_completion", ``, textLogprobs, `"text"], "properties": {"index": {"type": "integer", "minimum": 0}, "text": {"type": "string"}`),
	"ScoreList": `{"type": "object", "required": ["id", "object", "created", "model", "data", "usage"], "properties": {"id": {"type": "string", "minLength": 1}, "object": {"const": "list"},
		"created": {"type": "integer", "minimum": 0}, "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"}, "data": {"type": "array", "items": {"type": "object",
		"required": ["index", "object", "score"], "properties": {"index": {"type": "integer", "minimum": 0}, "object": {"const": "score"}, "score": {"type": "number"}}}}}}`,
	"RankList": `{"type": "object", "required": ["id", "model", "usage", "results"], "properties": {"id": {"type": "string", "minLength": 1}, "model": {"type": "string"},
		"usage": {"$ref": "#/components/schemas/Usage"}, "results": {"type": "array", "items": {"type": "object", "required": ["index", "document", "relevance_score"], "properties": {
		"index": {"type": "integer", "minimum": 0}, "relevance_score": {"type": "number"}, "document": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}, "multi_modal": {"type": "null"}}}}}}}}`,
	"PoolingList": `{"type": "object", "required": ["id", "object", "created", "model", "data", "usage"], "properties": {"id": {"type": "string", "minLength": 1}, "object": {"const": "list"},
		"created": {"type": "integer", "minimum": 0}, "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"}, "data": {"type": "array", "items": {"type": "object",
		"required": ["index", "object", "data"], "properties": {"index": {"type": "integer", "minimum": 0}, "object": {"const": "pooling"},
		"data": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "contentEncoding": "base64"}]}}}}}}`,
	"EmbedByType": `{"type": "object", "required": ["id", "embeddings", "texts", "meta", "response_type"], "properties": {"id": {"type": "string", "minLength": 1},
		"embeddings": {"type": "object", "properties": {"float": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}, "base64": {"type": "array", "items": {"type": "string"}},
			"binary": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": -128, "maximum": 127}}}, "ubinary": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}}}},
		"texts": {"type": "array", "items": {"type": "string"}}, "meta": {"type": "object"}, "response_type": {"const": "embeddings_by_type"}}}`,
	"EmbeddingList": `{"type": "object", "required": ["id", "object", "created", "model", "data", "usage"], "properties": {"id": {"type": "string", "minLength": 1}, "object": {"const": "list"},
		"created": {"type": "integer", "minimum": 0}, "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"}, "data": {"type": "array", "items": {"type": "object",
		"required": ["index", "object", "embedding"], "properties": {"index": {"type": "integer", "minimum": 0}, "object": {"const": "embedding"},
		"embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "contentEncoding": "base64"}]}}}}}}`,
	"Model": `{"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len"], "properties": {"id": {"type": "string"}, "object": {"const": "model"},
		"created": {"type": "integer"}, "owned_by": {"type": "string"}, "root": {"type": "string"}, "parent": {"type": ["string", "null"]}, "max_model_len": {"type": "integer", "minimum": 0}}}`,
	"Models": `{"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"},
		"data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}}`,
	"Tokenized": `{"type": "object", "required": ["count", "max_model_len", "tokens", "token_strs"], "properties": {"count": {"type": "integer", "minimum": 0},
		"max_model_len": {"type": "integer", "minimum": 0}, "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
		"token_strs": {"type": ["array", "null"], "items": {"type": "string"}}}}`,
	"Detokenized": `{"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}`,
	"ChatBatch": `{"type": "object", "required": ["messages"], "description": "the fields of a chat, except stream, tools, n, prompt_logprobs and return_prompt_text",
		"properties": {"messages": {"type": "array", "minItems": 1, "maxItems": 256, "items": {"$ref": "#/components/schemas/ChatRequest/properties/messages"}}}}`,
	"Invocation":           `{"type": "object", "anyOf": [{"required": ["messages"]}, {"required": ["prompt"]}], "description": "a request for a chat or a completion"}`,
	"Abort":                `{"type": "object", "properties": {"request_ids": {"type": ["array", "null"], "maxItems": 4096, "items": {"type": "string"}, "description": "null or empty: all"}}}`,
	"Aborted":              `{"type": "object", "required": ["status", "aborted", "request_ids"], "properties": {"status": {"const": "aborted"}, "aborted": {"type": "integer", "minimum": 0}, "request_ids": {"type": "array", "items": {"type": "string"}}}}`,
	"Rendered":             renderedSchema,
	"RenderedList":         `{"type": "array", "items": ` + renderedSchema + `}`,
	"DerenderChat":         derenderSchema("generate_response", tokensAnswerSchema, "chat_request", tokenCountSchema, orNullIDs),
	"DerenderedChat":       derenderedSchema("ChatCompletion", "ChatChunk"),
	"DerenderedCompletion": derenderedSchema("Completion", "CompletionChunk"),
	"DerenderCompletion": derenderSchema("generate_responses", `{"type": "array", "minItems": 1, "maxItems": 256, "items": `+tokensAnswerSchema+`}`, "completion_request",
		`{"type": ["array", "null"], "items": {"type": ["integer", "null"], "minimum": 0, "maximum": 2147483647}}`, `{"type": ["array", "null"], "items": `+orNullIDs+`}`),
	"Version": `{"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}}}`,
	"Load":    `{"type": "object", "required": ["server_load"], "properties": {"server_load": {"type": "integer", "minimum": 0}}}`,
	"Object":  `{"type": "object"}`,
}
