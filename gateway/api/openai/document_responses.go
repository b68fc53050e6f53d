package openai

import "fmt"

// The schemas of /v1/responses, which package responses serves.

// Extras are fields of chats, beyond those of OpenAI, that requests of other APIs may have, too.
var Extras = []string{
	"allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias",
	"min_p", "min_tokens", "presence_penalty", "priority", "repetition_penalty", "request_id", "seed", "skip_special_tokens", "stop", "stop_token_ids",
	"structured_outputs", "top_k",
}

// MaxLabel bounds fields that an answer repeats, such as user, in characters.
const MaxLabel = 512

// served returns the schema of a field that may be null.
func served(s schema) schema { return described("served", nullable(s)) }

// refused returns the schema of a field of which only these values are accepted, and null.
func refused(remedy string, values ...any) schema {
	return schema{"description": "not supported: " + remedy, "enum": append(values, nil)}
}

// described returns a copy of a schema with a description.
func described(text string, s schema) schema {
	d := schema{"description": text}
	for name, v := range s {
		d[name] = v
	}
	return d
}

func objectSchema(required []string, properties schema) schema {
	return schema{"type": "object", "required": required, "properties": properties}
}

func constSchema(value any) schema { return schema{"const": value} }

var anyText = schema{"type": "string"}

// contentSchema returns the schema of a string, or of a list of parts with text.
func contentSchema(kinds ...any) schema {
	parts := []schema{objectSchema([]string{"type", "text"}, schema{"type": schema{"enum": kinds}, "text": anyText})}
	if kinds[0] == "input_text" {
		parts = append(parts, objectSchema([]string{"type", "refusal"}, schema{"type": constSchema("refusal"), "refusal": anyText}))
	}
	return schema{"anyOf": []schema{anyText, listSchema(schema{"anyOf": parts}, 0, 0)}}
}

// responseSchemas returns the schemas of /v1/responses by name.
func responseSchemas() schema {
	chat := func(name string) schema { return rows[Chat][name].describe() }
	label := described("accepted without effect: the answer repeats it", nullable(textSchema(0, MaxLabel)))
	function := objectSchema([]string{"type", "name"}, schema{
		"type": constSchema("function"), "name": schema{"type": "string", "pattern": fmt.Sprintf("^[A-Za-z0-9_.-]{1,%d}$", MaxToolName)},
		"description": nullable(anyText), "parameters": nullable(schema{"type": "object"}), "strict": nullable(schema{"type": "boolean"}),
	})
	choice := schema{"anyOf": []schema{{"enum": []any{"none", "auto", "required"}}, objectSchema([]string{"type", "name"}, schema{"type": constSchema("function"), "name": anyText})}}
	jsonFormat := objectSchema([]string{"type", "name", "schema"}, schema{
		"type": constSchema("json_schema"), "name": anyText, "description": nullable(anyText), "strict": nullable(schema{"type": "boolean"}), "schema": schemaValue,
	})
	summaries := schema{"enum": []any{"auto", "concise", "detailed", nil}}
	stateless := "answers are not stored; send the items of earlier answers in input"
	request := schema{
		"model": chat("model"), "input": described("served", schema{"anyOf": []schema{anyText, listSchema(ref("ResponseInputItem"), 1, MaxMessages)}}),
		"instructions": served(anyText),
		"tools":        served(listSchema(function, 0, MaxTools)), "tool_choice": served(choice), "parallel_tool_calls": chat("parallel_tool_calls"),
		"max_tool_calls":    described("accepted without effect: it bounds built-in tools, of which there are none", nullable(schema{"type": "integer", "minimum": 1})),
		"max_output_tokens": chat("max_tokens"), "temperature": chat("temperature"), "top_p": chat("top_p"), "top_logprobs": chat("top_logprobs"),
		"text": served(schema{"type": "object", "properties": schema{
			"format":    nullable(schema{"anyOf": []schema{formatOf("text"), formatOf("json_object"), jsonFormat}}),
			"verbosity": chat("verbosity"),
		}}),
		"reasoning": served(schema{"type": "object", "properties": schema{
			"effort": chat("reasoning_effort"), "summary": summaries, "generate_summary": summaries,
			"context": schema{"enum": []any{"auto", nil}}, "mode": schema{"enum": []any{"standard", nil}},
		}}),
		"truncation": described("served: auto removes the prompt's first tokens if it does not fit", schema{"enum": []any{"disabled", "auto", nil}}),
		"include":    served(listSchema(schema{"enum": []any{"reasoning.encrypted_content", "message.output_text.logprobs"}}, 0, 255)),
		"stream":     chat("stream"), "stream_options": served(schema{"type": "object", "properties": schema{"include_obfuscation": nullable(schema{"type": "boolean"})}}),
		"service_tier": chat("service_tier"),
		"metadata": described("accepted without effect: the answer repeats it", nullable(schema{"type": "object", "maxProperties": 16,
			"propertyNames": schema{"maxLength": 64}, "additionalProperties": textSchema(0, 512)})),
		"user": label, "safety_identifier": label, "prompt_cache_key": label,
		"prompt_cache_retention": described("accepted without effect: blocks are cached while there is room", nullable(textSchema(0, MaxLabel))),
		"prompt_cache_options":   described("accepted without effect", nullable(schema{"type": "object"})),

		"store": refused(stateless, false), "background": refused("set stream to true for long answers", false), "previous_response_id": refused(stateless),
		"conversation": refused(stateless), "prompt": refused("send the prompt's text in instructions and input"), "context_management": refused("shorten input"),
		"moderation": refused("answers are not moderated"),
	}
	for _, name := range Extras {
		request[name] = chat(name)
	}
	orNull := func(s schema) schema { return schema{"anyOf": []schema{s, {"type": "null"}}} }
	status := schema{"enum": []any{"in_progress", "completed", "incomplete"}}
	outputText := objectSchema([]string{"type", "text", "annotations", "logprobs"}, schema{"type": constSchema("output_text"), "text": anyText,
		"annotations": schema{"type": "array", "maxItems": 0}, "logprobs": listSchema(ref("TokenLogprob"), 0, 0)})
	reasoningText := objectSchema([]string{"type", "text"}, schema{"type": constSchema("reasoning_text"), "text": anyText})
	count := schema{"type": "integer", "minimum": 0}
	return schema{
		"ResponseRequest": objectSchema([]string{"input"}, request),
		"ResponseInputItem": schema{"anyOf": []schema{
			objectSchema([]string{"role", "content"}, schema{"type": schema{"enum": []any{"message", nil}}, "role": schema{"enum": []any{"user", "assistant", "system", "developer"}},
				"content": contentSchema("input_text", "output_text", "text")}),
			objectSchema([]string{"type", "call_id", "name", "arguments"}, schema{"type": constSchema("function_call"), "call_id": anyText, "name": anyText, "arguments": anyText}),
			objectSchema([]string{"type", "call_id", "output"}, schema{"type": constSchema("function_call_output"), "call_id": anyText, "output": contentSchema("input_text", "output_text", "text")}),
			objectSchema([]string{"type"}, schema{"type": constSchema("reasoning"), "content": orNull(contentSchema("reasoning_text", "text")),
				"summary": orNull(contentSchema("summary_text", "text")), "encrypted_content": nullable(anyText)}),
		}},
		"ResponseItem": schema{"anyOf": []schema{
			objectSchema([]string{"type", "id", "summary", "content", "encrypted_content", "status"}, schema{"type": constSchema("reasoning"), "id": anyText,
				"summary": schema{"type": "array", "maxItems": 0}, "content": listSchema(reasoningText, 0, 1), "encrypted_content": nullable(anyText), "status": status}),
			objectSchema([]string{"type", "id", "role", "content", "status"}, schema{"type": constSchema("message"), "id": anyText, "role": constSchema("assistant"),
				"content": listSchema(outputText, 0, 1), "status": status}),
			objectSchema([]string{"type", "id", "call_id", "name", "arguments", "status"}, schema{"type": constSchema("function_call"), "id": anyText, "call_id": anyText,
				"name": anyText, "arguments": anyText, "status": status}),
		}},
		"Response": objectSchema([]string{"id", "object", "created_at", "model", "status", "error", "incomplete_details", "output", "usage", "instructions", "metadata",
			"parallel_tool_calls", "temperature", "top_p", "tool_choice", "tools", "text", "reasoning", "max_output_tokens", "truncation", "store", "background"}, schema{
			"id": anyText, "object": constSchema("response"), "created_at": count, "model": anyText, "status": schema{"enum": []any{"in_progress", "completed", "incomplete", "failed"}},
			"error":              orNull(objectSchema([]string{"code", "message"}, schema{"code": anyText, "message": anyText})),
			"incomplete_details": orNull(objectSchema([]string{"reason"}, schema{"reason": constSchema("max_output_tokens")})),
			"output":             listSchema(ref("ResponseItem"), 0, 0),
			"usage": orNull(objectSchema([]string{"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"}, schema{
				"input_tokens": count, "output_tokens": count, "total_tokens": count,
				"input_tokens_details":  objectSchema([]string{"cached_tokens", "cache_write_tokens"}, schema{"cached_tokens": count, "cache_write_tokens": count}),
				"output_tokens_details": objectSchema([]string{"reasoning_tokens"}, schema{"reasoning_tokens": count}),
			})),
			"store": constSchema(false), "background": constSchema(false),
		}),
		"ResponseEvent": objectSchema([]string{"type", "sequence_number"}, schema{
			"type": schema{"enum": []any{"response.created", "response.in_progress", "response.output_item.added", "response.output_item.done", "response.content_part.added",
				"response.content_part.done", "response.output_text.delta", "response.output_text.done", "response.reasoning_text.delta", "response.reasoning_text.done",
				"response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed", "response.incomplete", "response.failed"}},
			"sequence_number": count, "output_index": count, "content_index": count, "item_id": anyText, "delta": anyText, "text": anyText, "arguments": anyText, "name": anyText,
			"obfuscation": anyText, "logprobs": listSchema(ref("TokenLogprob"), 0, 0), "item": ref("ResponseItem"), "response": ref("Response"),
			"part": schema{"anyOf": []schema{outputText, reasoningText}},
		}),
	}
}
