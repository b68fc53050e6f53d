package tokenizer

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// tiktokenClass is what the code of a tokenizer class has beyond its file of ranks.
type tiktokenClass struct {
	pattern  string                 // the name of an entry of patterns
	reserved int                    // how many ids behind the ranks are special tokens
	name     func(i, id int) string // of those that tokenizer_config.json does not have
	begin    []string               // begin a text
}

// tiktokenClasses are the values of tokenizer_class whose files of ranks are read. transformers
// reads those of fast tokenizers with Llama 3's pattern. Without a class only Llama 3's own file is
// read.
var tiktokenClasses = map[string]tiktokenClass{
	"TikTokenTokenizer": {pattern: "kimi", reserved: 256, name: func(_, id int) string { return fmt.Sprintf("<|reserved_token_%d|>", id) }},
	"ChatGLM4Tokenizer": {pattern: "llama3", begin: []string{"[gMASK]", "<sop>"}},
	"QWenTokenizer": {pattern: "qwen2", reserved: 208, name: func(i, _ int) string {
		if i < 3 {
			return [3]string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"}[i]
		}
		return fmt.Sprintf("<|extra_%d|>", i-3)
	}},
	"":                        {pattern: "llama3"},
	"LlamaTokenizer":          {pattern: "llama3"},
	"LlamaTokenizerFast":      {pattern: "llama3"},
	"PreTrainedTokenizerFast": {pattern: "llama3"},
}

// llama3Ranks is the number of tokens of Llama 3, of which the file of ranks alone is published.
const llama3Ranks = 128000

// llama3 is how Llama 3's own code reads its file.
var llama3 = tiktokenClass{pattern: "llama3", reserved: 256, begin: []string{"<|begin_of_text|>"}, name: func(i, _ int) string {
	named := map[int]string{0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
	before := 0 // of the named ones
	for at, text := range named {
		if at == i {
			return text
		}
		if at < i {
			before++
		}
	}
	return fmt.Sprintf("<|reserved_special_token_%d|>", i-before)
}}

// IsTiktoken reports whether a tokenizer.model is a file of ranks: lines of a token in base64 and
// its rank.
func IsTiktoken(model []byte) bool {
	line, _, _ := bytes.Cut(model[:min(len(model), 2*maxPiece)], []byte("\n"))
	token, rank, ok := bytes.Cut(line, []byte(" "))
	_, err := base64.StdEncoding.AppendDecode(nil, token)
	return ok && err == nil && string(bytes.TrimSpace(rank)) == "0"
}

// FromTiktoken returns the tokenizer.json that is equal to a file of ranks. config is
// tokenizer_config.json, or nil: its class has the pattern and the special tokens. Another class
// gives an error that wraps ErrUnsupported.
func FromTiktoken(model, config []byte) ([]byte, error) {
	var c struct {
		Class string                `json:"tokenizer_class"`
		Added map[string]addedToken `json:"added_tokens_decoder"`
	}
	if config != nil {
		if err := json.Unmarshal(config, &c); err != nil {
			return nil, invalid("tokenizer_config.json: %v", err)
		}
	}
	class, ok := tiktokenClasses[c.Class]
	if !ok {
		return nil, unknownClass(c.Class)
	}
	tokens, err := readRanks(model)
	if err != nil {
		return nil, err
	}
	if class.name == nil && len(c.Added) == 0 && len(tokens) == llama3Ranks {
		class = llama3
	}
	special := map[int32]addedToken{}
	for i := range class.reserved {
		id := int32(len(tokens) + i)
		special[id] = addedToken{ID: id, Content: class.name(i, int(id)), Special: true}
	}
	for key, a := range c.Added {
		id, err := strconv.ParseInt(key, 10, 32)
		if err != nil || id < int64(len(tokens)) || id >= maxTokenID || a.Content == "" {
			return nil, invalid("tokenizer_config.json: added_tokens_decoder has %q as token %q, behind %d ranks", a.Content, key, len(tokens))
		}
		a.ID = int32(id)
		special[a.ID] = a
	}
	if c.Class == "" && len(tokens) != llama3Ranks {
		return nil, unknownClass("")
	}
	var all []addedToken
	for _, id := range slices.Sorted(maps.Keys(special)) {
		all = append(all, special[id])
	}
	i := slices.IndexFunc(patterns, func(p pattern) bool { return p.name == class.pattern })
	return rankedJSON(tokens, 0, all, patterns[i].expr, class.begin...)
}

// unknownClass returns the error of a class whose pattern is not known; empty: there is no class.
func unknownClass(name string) error {
	known := slices.DeleteFunc(slices.Sorted(maps.Keys(tiktokenClasses)), func(name string) bool { return name == "" })
	if name == "" {
		name = "absent from tokenizer_config.json"
	}
	return &UnsupportedError{"tokenizer_class with a file of ranks (read are " + strings.Join(known, ", ") + ")", name}
}

// readRanks returns the tokens of a file of ranks in their order.
func readRanks(model []byte) ([]string, error) {
	lines := bytes.Count(model, []byte("\n")) + 1
	if lines > maxTokenID {
		return nil, invalid("the file of ranks has more than %d lines", maxTokenID)
	}
	tokens, single := make([]string, 0, lines), 0
	for line := range bytes.Lines(model) {
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		text, rank, _ := bytes.Cut(line, []byte(" "))
		token, err := base64.StdEncoding.AppendDecode(nil, text)
		if err != nil || len(token) == 0 || string(rank) != strconv.Itoa(len(tokens)) {
			return nil, invalid("line %d of the file of ranks is %.40q, want a token in base64 and the rank %d", len(tokens)+1, line, len(tokens))
		}
		if len(token) > maxPiece { // merges take the square of it
			return nil, invalid("the token of rank %d has %d bytes, at most %d", len(tokens), len(token), maxPiece)
		}
		if len(token) == 1 {
			single++
		}
		tokens = append(tokens, string(token))
	}
	if single < 256 { // each once, which rankedMerges checks
		return nil, invalid("the file of ranks has %d of the 256 bytes", single)
	}
	return tokens, nil
}
