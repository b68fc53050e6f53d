package messages

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// conversation writes the messages of a chat. It collects a message until one of another role
// begins. Collected values are as they are written, in parts of the body.
type conversation struct {
	dst   []byte
	n     int               // messages written
	names map[string][]byte // of tools, by the id of a call

	role     string // of the message that is collected; empty: none is
	thinking [][]byte
	texts    [][]byte
	calls    []block
}

// block has the members of a content block that are read, as they are written; nil: absent.
type block struct {
	kind                                                                string // its type
	typ, text, thinking, id, name, input, useID, content, failed, named []byte
}

func readBlock(v []byte) (b block, ok bool) {
	ok = members(v, func(member string, v []byte) {
		switch member {
		case "type":
			b.typ, b.kind = v, word(v)
		case "text":
			b.text = v
		case "thinking":
			b.thinking = v
		case "id":
			b.id = v
		case "name":
			b.name = v
		case "input":
			b.input = v
		case "tool_use_id":
			b.useID = v
		case "content":
			b.content = v
		case "is_error":
			b.failed = v
		case "tool_name":
			b.named = v
		}
	})
	return b, ok
}

// appendMessages appends the messages. Those with the role system precede the others, because most
// templates take one system message, and only there.
func appendMessages(dst []byte, f *fields) ([]byte, *openai.Error) {
	c := conversation{dst: append(dst, `"messages":[`...), names: map[string][]byte{}}
	if v := f.of["system"]; v != nil {
		if fault := c.system(v, "system", place{"system", 0, -1, -1}); fault != nil {
			return dst, fault
		}
	}
	messages := f.of["messages"]
	if messages[0] != '[' || empty(messages) {
		return dst, openai.BadRequest("messages", "messages must be a list with at least one message, not %s", shown(messages))
	}
	var role string
	var given, content []byte // role and content as they are written
	read := func(i int, e []byte) *openai.Error {
		p := place{"messages", i, -1, -1}
		role, given, content = "", nil, nil
		if !members(e, func(member string, v []byte) {
			switch member {
			case "role":
				role, given = word(v), v
			case "content":
				content = v
			}
		}) {
			return p.fault("", "must be an object, not %s", shown(e))
		}
		if role != "user" && role != "assistant" && role != "system" {
			return p.fault(".role", "must be user, assistant or system, not %s", shown(given))
		}
		if !jsonscan.IsString(content) && !jsonscan.IsList(content) {
			return p.fault(".content", "must be a string or a list of blocks, not %s", shown(content))
		}
		return nil
	}
	fault := elements(messages, func(i int, e []byte) *openai.Error {
		if fault := read(i, e); fault != nil || role != "system" {
			return fault
		}
		return c.system(content, place{"messages", i, -1, -1}.String()+".content", place{"messages", i, 0, -1})
	})
	if fault != nil {
		return dst, fault
	}
	last := -1 // index of the last message that is not of the system
	fault = elements(messages, func(i int, e []byte) *openai.Error {
		if _ = read(i, e); role == "system" { // it was checked before
			return nil
		}
		last = i
		if role == "user" {
			return c.user(i, content)
		}
		return c.assistant(i, content)
	})
	if fault == nil && (c.role == "assistant" && len(c.texts) == 0 || len(c.calls) > 0) {
		fault = place{"messages", last, -1, -1}.fault("", "ends the chat, and an answer can continue only text: a message of the user with the results of tools is missing")
	}
	if fault != nil {
		return dst, fault
	}
	continues := c.role == "assistant"
	c.flush()
	dst = append(c.dst, "],"...)
	if continues { // the answer begins with the last message
		dst = append(dst, `"continue_final_message":true,"add_generation_prompt":false,`...)
	}
	return dst, nil
}

// begin begins a message of a role, unless one is collected.
func (c *conversation) begin(role string) {
	if c.role != role {
		c.flush()
		c.role = role
	}
}

// flush writes the message that is collected.
func (c *conversation) flush() {
	if c.role == "" {
		return
	}
	c.open(c.role)
	if len(c.thinking) > 0 {
		c.dst = appendJoined(append(c.dst, `,"reasoning_content":`...), c.thinking)
	}
	c.dst = appendContent(append(c.dst, `,"content":`...), c.texts)
	for i := range c.calls {
		before := `},{"id":`
		if i == 0 {
			before = `,"tool_calls":[{"id":`
		}
		b := &c.calls[i]
		c.dst = append(append(append(c.dst, before...), b.id...), `,"type":"function","function":{"name":`...)
		c.dst = append(append(append(c.dst, b.name...), `,"arguments":`...), b.input...)
		c.dst = append(c.dst, '}')
	}
	if len(c.calls) > 0 {
		c.dst = append(c.dst, "}]"...)
	}
	c.dst = append(c.dst, '}')
	c.role, c.thinking, c.texts, c.calls = "", c.thinking[:0], c.texts[:0], c.calls[:0]
}

// open writes the beginning of a message.
func (c *conversation) open(role string) {
	if c.n++; c.n > 1 {
		c.dst = append(c.dst, ',')
	}
	c.dst = append(append(append(c.dst, `{"role":"`...), role...), '"')
}

// appendContent appends texts as a string, or as parts.
func appendContent(dst []byte, texts [][]byte) []byte {
	switch len(texts) {
	case 0:
		return append(dst, `""`...)
	case 1:
		return append(dst, texts[0]...)
	}
	for i, t := range texts {
		before := byte(',')
		if i == 0 {
			before = '['
		}
		dst = append(append(append(append(dst, before), `{"type":"text","text":`...), t...), '}')
	}
	return append(dst, ']')
}

// appendJoined appends texts as one string, in which line ends separate them.
func appendJoined(dst []byte, texts [][]byte) []byte {
	dst = append(dst, '"')
	for i, t := range texts {
		if i > 0 {
			dst = append(dst, '\\', 'n')
		}
		dst = append(dst, t[1:len(t)-1]...)
	}
	return append(dst, '"')
}

// system collects texts of the system prompt. param names the value; p is the place of its first
// block.
func (c *conversation) system(v []byte, param string, p place) *openai.Error {
	add := func(text []byte) {
		if text = withoutBilling(text); text != nil {
			c.begin("system")
			c.texts = append(c.texts, text)
		}
	}
	switch v[0] {
	case '"':
		add(v)
		return nil
	case '[':
	default:
		return openai.BadRequest(param, "%s must be a string or a list of text blocks, not %s", param, shown(v))
	}
	return elements(v, func(i int, e []byte) *openai.Error {
		if p.block < 0 {
			p.at = i
		} else {
			p.block = i
		}
		b, fault := p.read(e)
		if fault == nil && b.kind != "text" {
			fault = p.unsupported(&b, "a system prompt", "text")
		}
		if fault == nil {
			fault = p.needString(".text", b.text)
		}
		if fault == nil {
			add(b.text)
		}
		return fault
	})
}

// read reads the block at a place.
func (p place) read(v []byte) (block, *openai.Error) {
	b, ok := readBlock(v)
	if !ok {
		return b, p.fault("", "must be an object, not %s", shown(v))
	}
	return b, nil
}

// unsupported returns the error of a block whose type is not served in a message.
func (p place) unsupported(b *block, where, kinds string) *openai.Error {
	return p.fault(".type", "%s is not supported here in %s: send %s", shown(b.typ), where, kinds)
}

// needString returns an error unless a member is a string.
func (p place) needString(member string, v []byte) *openai.Error {
	if jsonscan.IsString(v) {
		return nil
	}
	return p.fault(member, "must be a string, not %s", shown(v))
}

// user collects a message of the user, and writes the results of tools in it.
func (c *conversation) user(i int, content []byte) *openai.Error {
	if content[0] == '"' {
		c.begin("user")
		c.texts = append(c.texts, content)
		return nil
	}
	results := false
	fault := elements(content, func(j int, e []byte) *openai.Error {
		p := place{"messages", i, j, -1}
		b, fault := p.read(e)
		switch {
		case fault != nil:
			return fault
		case b.kind == "tool_result":
			results = true
			return c.result(p, &b)
		case b.kind != "text":
			return p.unsupported(&b, "messages of the user", "text and tool_result")
		}
		return p.needString(".text", b.text)
	})
	if fault != nil {
		return fault
	}
	if !results {
		c.begin("user")
	}
	return elements(content, func(_ int, e []byte) *openai.Error {
		if b, _ := readBlock(e); b.kind == "text" {
			c.begin("user")
			c.texts = append(c.texts, b.text)
		}
		return nil
	})
}

// maxName bounds the name of a tool with its result, in bytes as it is written, because a name is
// repeated for each result.
const maxName = 128 + 2

// result writes the result of a tool. Some templates need the tool's name.
func (c *conversation) result(p place, b *block) *openai.Error {
	if fault := p.needString(".tool_use_id", b.useID); fault != nil {
		return fault
	}
	var texts [][]byte
	switch {
	case b.content == nil:
	case jsonscan.IsString(b.content):
		texts = append(texts, b.content)
	case jsonscan.IsList(b.content):
		if fault := elements(b.content, func(k int, e []byte) *openai.Error {
			p := place{p.list, p.at, p.block, k}
			part, fault := p.read(e)
			switch {
			case fault != nil:
				return fault
			case part.kind == "tool_reference":
				texts = append(texts, part.named)
				return p.needString(".tool_name", part.named)
			case part.kind != "text":
				return p.unsupported(&part, "results of tools", "text")
			}
			texts = append(texts, part.text)
			return p.needString(".text", part.text)
		}); fault != nil {
			return fault
		}
	default:
		return p.fault(".content", "must be a string or a list of blocks, not %s", shown(b.content))
	}
	c.flush()
	c.open("tool")
	c.dst = append(append(c.dst, `,"tool_call_id":`...), b.useID...)
	if name := c.names[string(b.useID)]; name != nil {
		c.dst = append(append(c.dst, `,"name":`...), name...)
	}
	c.dst = append(c.dst, `,"content":`...)
	switch string(b.failed) {
	case "", "false":
		c.dst = appendContent(c.dst, texts)
	case "true":
		c.dst = append(c.dst, `"Error: `...)
		c.dst = append(c.dst, appendJoined(nil, texts)[1:]...)
	default:
		return p.fault(".is_error", "must be true or false, not %s", shown(b.failed))
	}
	c.dst = append(c.dst, '}')
	return nil
}

// assistant collects a message of the assistant. Thinking that is redacted has no text.
func (c *conversation) assistant(i int, content []byte) *openai.Error {
	c.begin("assistant")
	if content[0] == '"' {
		c.texts = append(c.texts, content)
		return nil
	}
	return elements(content, func(j int, e []byte) *openai.Error {
		p := place{"messages", i, j, -1}
		b, fault := p.read(e)
		switch {
		case fault != nil:
			return fault
		case b.kind == "text":
			c.texts = append(c.texts, b.text)
			return p.needString(".text", b.text)
		case b.kind == "thinking":
			c.thinking = append(c.thinking, b.thinking)
			return p.needString(".thinking", b.thinking)
		case b.kind == "redacted_thinking":
			return nil
		case b.kind != "tool_use":
			return p.unsupported(&b, "messages of the assistant", "text, thinking, redacted_thinking and tool_use")
		case !jsonscan.IsObject(b.input):
			return p.fault(".input", "must be an object, not %s", shown(b.input))
		}
		if fault := p.needString(".id", b.id); fault != nil {
			return fault
		}
		if len(b.name) <= maxName {
			c.names[string(b.id)] = b.name
		}
		c.calls = append(c.calls, b)
		return p.needString(".name", b.name)
	})
}
