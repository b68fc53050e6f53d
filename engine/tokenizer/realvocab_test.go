package tokenizer

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/tiktoken-go/tokenizer/codec"
)

// realTokenizers are the families of published models, each over a vocabulary
// of OpenAI's that was really trained: 50,256, 100,256 and 199,998 tokens. The
// byte fallback has the characters of the 100,256.
var realTokenizers = []struct {
	name  string
	build func(t testing.TB) []byte
}{
	{"gpt2", func(t testing.TB) []byte {
		return byteLevelJSON(t, "r50k_base", "", false, []string{"<|endoftext|>"})
	}},
	{"llama3", func(t testing.TB) []byte {
		return byteLevelJSON(t, "cl100k_base", patternOf(t, "llama3"), true, []string{"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"})
	}},
	{"qwen2", func(t testing.TB) []byte {
		return byteLevelJSON(t, "cl100k_base", patternOf(t, "qwen2"), false, []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"})
	}},
	{"o200k", func(t testing.TB) []byte {
		return byteLevelJSON(t, "o200k_base", patternOf(t, "o200k"), false, []string{"<|startoftext|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>"})
	}},
	{"tekken", func(t testing.TB) []byte {
		return byteLevelJSON(t, "cl100k_base", patternOf(t, "tekken"), true, []string{"<s>", "</s>", "[INST]", "[/INST]"})
	}},
	{"gemma", func(t testing.TB) []byte { return fallbackJSON(t, false) }},
	{"llama2", func(t testing.TB) []byte { return fallbackJSON(t, true) }},
}

func patternOf(t testing.TB, name string) string {
	for _, p := range patterns {
		if p.name == name {
			return p.expr
		}
	}
	t.Fatalf("no pattern is called %q", name)
	return ""
}

var realFiles sync.Map // name → func() []byte

// realFile is the tokenizer.json of that name; it is built once.
func realFile(t testing.TB, name string) []byte {
	for _, r := range realTokenizers {
		if r.name == name {
			once, _ := realFiles.LoadOrStore(name, sync.OnceValue(func() []byte { return r.build(t) }))
			return once.(func() []byte)()
		}
	}
	t.Fatalf("no tokenizer is called %q", name)
	return nil
}

func realTokenizer(t testing.TB, name string) *Tokenizer {
	tok, err := Load(realFile(t, name))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return tok
}

// published are the vocabularies of that package, with how many tokens each has
// before its special ones.
var published = map[string]struct {
	open   func() *codec.Codec
	tokens uint
}{
	"r50k_base":   {codec.NewR50kBase, 50256},
	"cl100k_base": {codec.NewCl100kBase, 100256},
	"o200k_base":  {codec.NewO200kBase, 199998},
}

// ranks are the tokens of a published vocabulary in the order of their ids.
func ranks(t testing.TB, name string) []string {
	p := published[name]
	c := p.open()
	tokens := make([]string, p.tokens)
	for id := range tokens {
		text, err := c.Decode([]uint{uint(id)})
		if err != nil || text == "" {
			t.Fatalf("%s: token %d is %q (%v)", name, id, text, err)
		}
		tokens[id] = text
	}
	return tokens
}

// mergesOf finds the merges behind the tokens, which are in order of rank: a
// token is made of the two that the merges before it leave of its text. What
// they leave in more pieces is returned by index: no merge makes it.
func mergesOf(symbols map[string]int32, split func(string) []string, tokens []string) (merges [][2]string, orphans map[int]bool) {
	orphans = map[int]bool{}
	type pair struct{ left, right string }
	rank := map[pair]int{}
	for i, token := range tokens {
		parts := split(token)
		if len(parts) == 1 {
			if _, ok := symbols[token]; !ok {
				orphans[i] = true
			}
			continue
		}
		for len(parts) > 2 {
			best, at := len(tokens), -1
			for k := range len(parts) - 1 {
				if r, ok := rank[pair{parts[k], parts[k+1]}]; ok && r < best {
					best, at = r, k
				}
			}
			if at < 0 {
				break
			}
			parts[at] += parts[at+1]
			parts = slices.Delete(parts, at+1, at+2)
		}
		p := pair{parts[0], parts[1]}
		if _, twice := rank[p]; twice || len(parts) > 2 {
			orphans[i] = true
			continue
		}
		rank[p] = i
		merges = append(merges, [2]string{p.left, p.right})
	}
	return merges, orphans
}

type object = map[string]any

func special(id int, content string) object {
	return object{"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
}

// addedTokens are the special ones and four with the other settings, in order.
func addedTokens(first int, names []string) (added []object, ids map[string]int) {
	ids = map[string]int{}
	more := map[string]object{
		"<mask>":  {"lstrip": true, "special": true},
		"<tool>":  {"rstrip": true, "special": false},
		"zqsolo":  {"single_word": true, "special": false},
		"née\t\t": {"normalized": true, "special": false},
	}
	for i, name := range append(slices.Clone(names), slices.Sorted(maps.Keys(more))...) {
		token := special(first+i, name)
		maps.Copy(token, more[name])
		added = append(added, token)
		ids[name] = first + i
	}
	return added, ids
}

// byteLevelJSON makes a tokenizer.json; without a pattern it is GPT-2's.
func byteLevelJSON(t testing.TB, name, pattern string, ignoreMerges bool, specials []string) []byte {
	alphabet := func(s string) string {
		var b strings.Builder
		for i := range len(s) {
			b.WriteRune(byteAlphabet[s[i]])
		}
		return b.String()
	}
	vocab := map[string]int32{}
	var tokens []string
	for id, raw := range ranks(t, name) {
		tokens = append(tokens, alphabet(raw))
		vocab[tokens[id]] = int32(id)
	}
	merges, orphans := mergesOf(vocab, func(s string) []string { return strings.Split(s, "") }, tokens)
	if len(orphans) > 0 {
		t.Fatalf("%s: %d tokens come from no merge", name, len(orphans))
	}
	added, ids := addedTokens(len(tokens), specials)
	pre := object{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pattern == ""}
	post := object{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}
	if pattern != "" {
		pre = object{"type": "Sequence", "pretokenizers": []object{
			{"type": "Split", "pattern": object{"Regex": pattern}, "behavior": "Isolated", "invert": false}, pre}}
	}
	if ignoreMerges {
		post = withFirst(specials[0], ids[specials[0]])
	}
	var normalizer any
	if strings.Contains(pattern, `\p{N}| `) && !ignoreMerges {
		normalizer = object{"type": "NFC"}
	}
	return marshal(t, object{
		"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post,
		"decoder": object{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
		"model": object{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": "", "end_of_word_suffix": "",
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": ignoreMerges, "vocab": vocab, "merges": merges},
	})
}

func withFirst(token string, id int) object {
	return object{"type": "TemplateProcessing",
		"single":         []object{{"SpecialToken": object{"id": token, "type_id": 0}}, {"Sequence": object{"id": "A", "type_id": 0}}},
		"pair":           []object{{"Sequence": object{"id": "A", "type_id": 0}}, {"Sequence": object{"id": "B", "type_id": 1}}},
		"special_tokens": object{token: object{"id": token, "ids": []int{id}, "tokens": []string{token}}}}
}

// fallbackJSON makes a vocabulary of characters with byte tokens, as Gemma's is,
// or as Llama 2's with a space before every text.
func fallbackJSON(t testing.TB, spaceFirst bool) []byte {
	vocab := map[string]int32{"<unk>": 0}
	add := func(token string) {
		if _, ok := vocab[token]; !ok {
			vocab[token] = int32(len(vocab))
		}
	}
	for b := range 256 {
		add(byteToken(b))
	}
	var tokens []string
	for _, raw := range ranks(t, "cl100k_base") {
		// Of the characters, some have no token: they fall back to bytes.
		if s := strings.ReplaceAll(raw, " ", "▁"); utf8.ValidString(s) && !strings.ContainsAny(s, "\n\tжü") {
			tokens = append(tokens, s)
			for _, r := range s {
				add(string(r))
			}
		}
	}
	tokens = append(tokens, "▁▁▁▁▁▁▁")
	merges, orphans := mergesOf(vocab, func(s string) []string { return strings.Split(s, "") }, tokens)
	for i, token := range tokens {
		if !orphans[i] {
			add(token)
		}
	}
	added, ids := addedTokens(len(vocab), []string{"<bos>", "<start_of_turn>", "<end_of_turn>"})
	replace := object{"type": "Replace", "pattern": object{"String": " "}, "content": "▁"}
	decoders := []object{{"type": "Replace", "pattern": object{"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}}
	var normalizer, pre any = replace, object{"type": "Split", "pattern": object{"String": " "}, "behavior": "MergedWithPrevious", "invert": false}
	if spaceFirst {
		normalizer, pre = object{"type": "Sequence", "normalizers": []object{{"type": "Prepend", "prepend": "▁"}, replace}}, nil
		decoders = append(decoders, object{"type": "Strip", "content": " ", "start": 1, "stop": 0})
	}
	return marshal(t, object{
		"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": withFirst("<bos>", ids["<bos>"]),
		"decoder": object{"type": "Sequence", "decoders": decoders},
		"model": object{"type": "BPE", "dropout": nil, "unk_token": "<unk>", "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges},
	})
}

func marshal(t testing.TB, v any) []byte {
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
