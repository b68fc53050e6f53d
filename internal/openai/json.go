package openai

import "github.com/valyala/fastjson"

// appendValue appends a parsed value as JSON. fastjson's own MarshalTo writes Go
// escapes, such as \x7f, which are none of JSON's.
func appendValue(dst []byte, v *fastjson.Value) []byte {
	switch v.Type() {
	case fastjson.TypeString:
		return AppendString(dst, v.GetStringBytes())
	case fastjson.TypeArray:
		dst = append(dst, '[')
		for i, e := range v.GetArray() {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendValue(dst, e)
		}
		return append(dst, ']')
	case fastjson.TypeObject:
		dst = append(dst, '{')
		first := true
		v.GetObject().Visit(func(key []byte, e *fastjson.Value) {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst = appendValue(append(AppendString(dst, key), ':'), e)
		})
		return append(dst, '}')
	}
	return v.MarshalTo(dst) // numbers as they were written, and the three words
}

// stringValue is a JSON string. An Arena's NewString loses control characters in
// the same way.
func stringValue(s string) *fastjson.Value {
	return fastjson.MustParseBytes(AppendString(nil, s))
}
