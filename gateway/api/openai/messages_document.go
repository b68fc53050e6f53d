package openai

// The schemas of Anthropic's Messages API, as package messages serves it.

const (
	textBlockSchema = `{"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}`
	textOrBlocks    = `"anyOf": [{"type": "string"}, {"type": "array", "items": ` + textBlockSchema + `}]`

	// Of the blocks of a request, those of the user come first.
	blockSchemas = textBlockSchema + `,
	{"type": "object", "required": ["type", "tool_use_id"], "properties": {"type": {"const": "tool_result"}, "tool_use_id": {"type": "string"}, "content": {` + textOrBlocks + `}, "is_error": {"type": ["boolean", "null"]}}},
	{"type": "object", "required": ["type", "thinking"], "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}}},
	{"type": "object", "required": ["type"], "properties": {"type": {"const": "redacted_thinking"}}},
	{"type": "object", "required": ["type", "id", "name", "input"], "properties": {"type": {"const": "tool_use"}, "id": {"type": "string"}, "name": {"type": "string"}, "input": {"type": "object"}}}`

	// Fields that both routes take: those of the prompt.
	promptFieldSchemas = `
	"model": {"type": ["string", "null"], "maxLength": 1024},
	"messages": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role", "content"], "properties": {
		"role": {"enum": ["user", "assistant", "system"]}, "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [` + blockSchemas + `]}}]}}},
		"description": "text, tool_use, tool_result, thinking and redacted_thinking are served; images, documents and blocks of servers' tools are refused by name"},
	"system": {"anyOf": [{"type": "null"}, {"type": "string"}, {"type": "array", "items": ` + textBlockSchema + `}]},
	"tools": {"type": ["array", "null"], "maxItems": 1024, "items": {"type": "object", "required": ["name", "input_schema"], "properties": {
		"name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}, "description": {"type": ["string", "null"]}, "input_schema": {"type": "object"}, "type": {"enum": ["custom", null]}}},
		"description": "the client runs tools: those that a server would run are refused by name"},
	"tool_choice": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["auto", "none", "any"]}, "disable_parallel_tool_use": {"type": ["boolean", "null"]}}},
		{"type": "object", "required": ["type", "name"], "properties": {"type": {"const": "tool"}, "name": {"type": "string"}, "disable_parallel_tool_use": {"type": ["boolean", "null"]}}}]},
	"thinking": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["adaptive", "disabled"]}}},
		{"type": "object", "required": ["type", "budget_tokens"], "properties": {"type": {"const": "enabled"}, "budget_tokens": {"type": "integer", "minimum": 1}}}],
		"description": "for templates that know enable_thinking or reasoning_effort; a budget becomes an effort"},
	"output_config": {"type": ["object", "null"], "properties": {"effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", null]}, "format": ` + outputFormatSchema + `}},
	"output_format": ` + outputFormatSchema + `,
	"cache_control": {"description": "accepted without effect: every prompt is cached"},
	"context_management": {"description": "accepted without effect: the client keeps its history"},
	"inference_geo": {"description": "accepted without effect: there is one place"},
	"speed": {"description": "accepted without effect: there is one speed"},
	"diagnostics": {"description": "accepted without effect: the usage has the cached tokens"},
	"container": {"type": "null", "description": "not supported: the client runs tools"},
	"mcp_servers": {"type": ["array", "null"], "maxItems": 0, "description": "not supported: the client runs tools"},
	"service_tier": {"enum": ["auto", "standard_only", null], "description": "accepted without effect: there is one tier"},
	"metadata": {"type": ["object", "null"], "properties": {"user_id": {"type": ["string", "null"]}}}`

	outputFormatSchema = `{"anyOf": [{"type": "null"}, {"type": "object", "required": ["type", "schema"], "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}}}]}`

	samplingFieldSchemas = `,
	"stop_sequences": {"type": ["array", "null"], "maxItems": 64, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
	"stream": {"type": ["boolean", "null"]},
	"temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 3.4028234663852886e+38},
	"top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
	"top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": 2147483647}`

	messageUsage = `{"type": "object", "required": ["input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"], "properties": {
	"input_tokens": {"type": "integer", "minimum": 0, "description": "those that no cache had"}, "output_tokens": {"type": "integer", "minimum": 0},
	"cache_read_input_tokens": {"type": "integer", "minimum": 0}, "cache_creation_input_tokens": {"const": 0},
	"output_tokens_details": {"type": "object", "required": ["thinking_tokens"], "properties": {"thinking_tokens": {"type": "integer", "minimum": 0}}}}}`
	stopSchemas = `"stop_reason": {"enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use", null]}, "stop_sequence": {"type": ["string", "null"]}`
	deltaEvents = `{"type": "object", "required": ["type", "index", "delta"], "properties": {"type": {"const": "content_block_delta"}, "index": {"type": "integer", "minimum": 0}, "delta": {"anyOf": [
		{"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text_delta"}, "text": {"type": "string"}}},
		{"type": "object", "required": ["type", "thinking"], "properties": {"type": {"const": "thinking_delta"}, "thinking": {"type": "string"}}},
		{"type": "object", "required": ["type", "signature"], "properties": {"type": {"const": "signature_delta"}, "signature": {"type": "string"}}},
		{"type": "object", "required": ["type", "partial_json"], "properties": {"type": {"const": "input_json_delta"}, "partial_json": {"type": "string"}}}]}}}`
)

var messagesSchemas = map[string]string{
	"MessagesRequest": `{"type": "object", "required": ["messages", "max_tokens"], "properties": {` + promptFieldSchemas + samplingFieldSchemas + `,
	"max_tokens": {"type": "integer", "minimum": 1, "maximum": 2147483647}}}`,
	"CountTokensRequest": `{"type": "object", "required": ["messages"], "properties": {` + promptFieldSchemas + `}}`,
	"Message": `{"type": "object", "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"], "properties": {
	"id": {"type": "string", "minLength": 1}, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": {"type": "string"}, ` + stopSchemas + `,
	"content": {"type": "array", "items": {"$ref": "#/components/schemas/MessageBlock"}}, "usage": ` + messageUsage + `}}`,
	"MessageBlock": `{"anyOf": [` + textBlockSchema + `,
	{"type": "object", "required": ["type", "thinking", "signature"], "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}, "signature": {"type": "string"}}},
	{"type": "object", "required": ["type", "id", "name", "input"], "properties": {"type": {"const": "tool_use"}, "id": {"type": "string"}, "name": {"type": "string"}, "input": {"type": "object"}}}]}`,
	"MessageEvent": `{"anyOf": [{"type": "object", "required": ["type", "message"], "properties": {"type": {"const": "message_start"}, "message": {"$ref": "#/components/schemas/Message"}}},
	{"type": "object", "required": ["type", "index", "content_block"], "properties": {"type": {"const": "content_block_start"}, "index": {"type": "integer", "minimum": 0}, "content_block": {"$ref": "#/components/schemas/MessageBlock"}}},
	` + deltaEvents + `,
	{"type": "object", "required": ["type", "index"], "properties": {"type": {"const": "content_block_stop"}, "index": {"type": "integer", "minimum": 0}}},
	{"type": "object", "required": ["type", "delta", "usage"], "properties": {"type": {"const": "message_delta"}, "delta": {"type": "object", "required": ["stop_reason", "stop_sequence"], "properties": {` + stopSchemas + `}}, "usage": ` + messageUsage + `}},
	{"type": "object", "required": ["type"], "properties": {"type": {"enum": ["ping", "message_stop"]}}}]}`,
	"TokenCount": `{"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer", "minimum": 0}}}`,
	"MessagesError": `{"type": "object", "required": ["type", "error", "request_id"], "properties": {"type": {"const": "error"}, "request_id": {"type": "string"},
	"error": {"type": "object", "required": ["type", "message"], "properties": {"type": {"type": "string", "minLength": 1}, "message": {"type": "string", "minLength": 1}}}}}`,
}
