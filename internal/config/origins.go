package config

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Origins are those of web pages. As with vllm serve, a value is a JSON list; a list
// with commas is taken too. It implements pflag.Value.
type Origins []string

// String returns a JSON list; empty without any.
func (o *Origins) String() string {
	if len(*o) == 0 {
		return ""
	}
	text, err := json.Marshal([]string(*o))
	if err != nil {
		panic(err) // strings only
	}
	return string(text)
}

// Type names the value in help texts.
func (o *Origins) Type() string { return jsonType }

// Set replaces the origins.
func (o *Origins) Set(v string) error {
	*o = nil
	if strings.HasPrefix(strings.TrimSpace(v), "[") {
		if err := json.Unmarshal([]byte(v), (*[]string)(o)); err != nil {
			return fmt.Errorf("%s: want a JSON list of origins", v)
		}
		return nil
	}
	for part := range strings.SplitSeq(v, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*o = append(*o, part)
		}
	}
	return nil
}
