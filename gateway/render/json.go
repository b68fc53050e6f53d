package render

import (
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// maxJSONValues bounds the values in one document, each of which takes some 100 bytes.
const maxJSONValues = 1 << 17

// fromJSON reads a JSON document into the values of templates, with the keys of objects in their
// order. As in Python the last of equal keys wins and keeps the place of the first. The values do
// not refer to data. The error, if any, is a *jinja.Error.
func fromJSON(data []byte) (jinja.Value, error) {
	if _, err := jsonscan.Valid(data, jsonscan.Bounds{Values: maxJSONValues}); err != nil {
		return nil, &jinja.Error{Kind: jinja.ErrInput, Msg: err.Error()}
	}
	v, _ := readValue(data, jsonscan.Space(data, 0))
	return v, nil
}

// readValue returns the value at b[at] and the position after it. b is valid JSON.
func readValue(b []byte, at int) (v jinja.Value, end int) {
	next := func(at int) int { // the position of the next element, or of the closing bracket
		if at = jsonscan.Space(b, at); b[at] == ',' {
			at = jsonscan.Space(b, at+1)
		}
		return at
	}
	switch b[at] {
	case '"':
		end = jsonscan.StringEnd(b, at)
		return jsonscan.Text(b[at:end]), end
	case '[':
		list := jinja.List{}
		for at = jsonscan.Space(b, at+1); b[at] != ']'; at = next(at) {
			v, at = readValue(b, at)
			list = append(list, v)
		}
		return list, at + 1
	case '{':
		d := new(jinja.Dict)
		for at = jsonscan.Space(b, at+1); b[at] != '}'; at = next(at) {
			end = jsonscan.StringEnd(b, at)
			key := jsonscan.Text(b[at:end])
			v, at = readValue(b, jsonscan.Space(b, jsonscan.Space(b, end)+1))
			d.Set(key, v)
		}
		return d, at + 1
	}
	end = jsonscan.PlainEnd(b, at)
	switch text := string(b[at:end]); text {
	case "null":
		return nil, end
	case "true", "false":
		return text == "true", end
	default:
		return number(text), end
	}
}

func number(s string) jinja.Value {
	if strings.ContainsAny(s, ".eE") {
		f, _ := strconv.ParseFloat(s, 64) // infinite where it is out of range
		return f
	}
	if i, err := strconv.ParseInt(s, 10, 64); err == nil {
		return i
	}
	return jinja.BigInt(s)
}
