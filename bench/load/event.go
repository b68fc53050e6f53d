package load

import "bytes"

// event is the relevant part of one server-sent event, found without parsing its JSON: a
// token costs a few searches for a key, not a tree of values.
//
// The search is sound because every quote inside a JSON string is escaped, so that the
// bytes "key": with both quotes unescaped can only be a key.
type event struct {
	choices    bool   // it has a choice
	text       []byte // raw JSON string without its quotes; nil: none or empty
	failed     []byte // the event is an error
	prompt     int    // usage; -1: not reported
	completion int
}

// Keys of text: the answer's, and those of reasoning before it.
var (
	completionKeys = [][]byte{[]byte(`"text"`)}
	chatKeys       = [][]byte{[]byte(`"content"`), []byte(`"reasoning_content"`), []byte(`"reasoning"`)}

	choicesKey    = []byte(`"choices"`)
	errorKey      = []byte(`"error"`)
	usageKey      = []byte(`"usage"`)
	promptKey     = []byte(`"prompt_tokens"`)
	completionKey = []byte(`"completion_tokens"`)
)

// value returns the bytes from the value of a key on, or nil.
func value(data, key []byte) []byte {
	for {
		i := bytes.Index(data, key)
		if i < 0 {
			return nil
		}
		data = data[i+len(key):]
		if rest := bytes.TrimLeft(data, " \t"); len(rest) > 0 && rest[0] == ':' {
			return bytes.TrimLeft(rest[1:], " \t")
		}
	}
}

// parse reads the data of an event.
func parse(data []byte, keys [][]byte) event {
	e := event{prompt: -1, completion: -1}
	if c := value(data, choicesKey); len(c) > 0 && c[0] == '[' {
		if c = bytes.TrimLeft(c[1:], " \t"); len(c) > 0 && c[0] == '{' {
			e.choices = true
			for _, k := range keys {
				if e.text = text(c, k); e.text != nil {
					break
				}
			}
		}
	} else if c == nil {
		if f := value(data, errorKey); f != nil && !bytes.HasPrefix(f, []byte("null")) {
			e.failed = f
		}
	}
	if u := value(data, usageKey); len(u) > 0 && u[0] == '{' {
		e.prompt, e.completion = number(value(u, promptKey)), number(value(u, completionKey))
	}
	return e
}

// text returns the first non-empty string of that key.
func text(data, key []byte) []byte {
	for {
		v := value(data, key)
		if len(v) == 0 {
			return nil
		}
		data = v
		if v[0] != '"' {
			continue
		}
		if end := closing(v[1:]); end > 0 {
			return v[1 : 1+end]
		}
	}
}

// closing returns the index at which a string ends, or -1.
func closing(s []byte) int {
	for i := 0; i < len(s); {
		j := bytes.IndexByte(s[i:], '"')
		if j < 0 {
			return -1
		}
		at := i + j
		escapes := 0
		for at-escapes > i && s[at-escapes-1] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return at
		}
		i = at + 1
	}
	return -1
}

// number returns the number at the start of data, or -1 if there is none or it is too long.
func number(data []byte) int {
	n, i := 0, 0
	for ; i < len(data) && data[i] >= '0' && data[i] <= '9'; i++ {
		if n = n*10 + int(data[i]-'0'); n > 1<<30 {
			return -1
		}
	}
	if i == 0 {
		return -1
	}
	return n
}
