package tokenizer

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
)

// tekkenSpecial are the special tokens of a tekken.json that has none of its own, by id.
var tekkenSpecial = []string{
	"<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
	"[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
}

// tekkenFile is Mistral's tekken.json: tokens by rank behind the special ones.
type tekkenFile struct {
	Config struct {
		Pattern string `json:"pattern"`
		Vocab   int    `json:"default_vocab_size"`
		Special int    `json:"default_num_special_tokens"`
	} `json:"config"`
	Vocab []struct {
		Rank  int    `json:"rank"`
		Bytes string `json:"token_bytes"` // base64
	} `json:"vocab"`
	Special []struct {
		Rank int    `json:"rank"`
		Text string `json:"token_str"`
	} `json:"special_tokens"`
}

// FromTekken returns the tokenizer.json that is equal to a tekken.json. Special tokens in a text
// become their ids, and <s> begins a text, as in the tokenizer.json files that Mistral publishes.
func FromTekken(data []byte) ([]byte, error) {
	var f tekkenFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, invalid("tekken.json: %v", err)
	}
	n := f.Config.Vocab - f.Config.Special
	if f.Config.Special < 0 || n < 256 || f.Config.Vocab > maxTokenID || n > len(f.Vocab) {
		return nil, invalid("tekken.json: default_vocab_size %d with %d special tokens, the vocabulary has %d", f.Config.Vocab, f.Config.Special, len(f.Vocab))
	}
	special, err := f.special()
	if err != nil {
		return nil, err
	}
	tokens := make([]string, n)
	for i := range n {
		v := f.Vocab[i]
		raw, err := base64.StdEncoding.DecodeString(v.Bytes)
		if err != nil || v.Rank != i || len(raw) == 0 {
			return nil, invalid("tekken.json: token %d has rank %d and bytes %.40q", i, v.Rank, v.Bytes)
		}
		if len(raw) > maxPiece { // merges take the square of it
			return nil, invalid("tekken.json: the token of rank %d has %d bytes, at most %d", i, len(raw), maxPiece)
		}
		tokens[i] = string(raw)
	}
	return rankedJSON(tokens, f.Config.Special, special, f.Config.Pattern, "<s>")
}

// rankedJSON returns the tokenizer.json of tokens in the order of their ranks, whose ids begin at
// first. begin are the special tokens that begin a text; those that special does not have are left
// out.
func rankedJSON(tokens []string, first int, special []addedToken, expr string, begin ...string) ([]byte, error) {
	vocab, merges, err := rankedMerges(tokens, first)
	if err != nil {
		return nil, err
	}
	for _, a := range special {
		if _, twice := vocab[a.Content]; twice {
			return nil, invalid("the special token %q is in the vocabulary, too", a.Content)
		}
		vocab[a.Content] = a.ID
	}
	type object = map[string]any
	file := object{
		"version": "1.0", "added_tokens": special, "normalizer": nil,
		"pre_tokenizer": object{"type": "Sequence", "pretokenizers": []object{
			{"type": "Split", "pattern": object{"Regex": expr}, "behavior": "Isolated", "invert": false},
			{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
		}},
		"decoder": object{"type": "ByteLevel"},
		"model":   object{"type": "BPE", "ignore_merges": true, "vocab": vocab, "merges": merges},
	}
	single, ids := []object{}, object{}
	for _, text := range begin {
		if i := slices.IndexFunc(special, func(a addedToken) bool { return a.Content == text }); i >= 0 {
			single, ids[text] = append(single, object{"SpecialToken": object{"id": text}}), object{"id": text, "ids": []int32{special[i].ID}}
		}
	}
	if len(single) > 0 {
		file["post_processor"] = object{"type": "TemplateProcessing", "single": append(single, object{"Sequence": object{"id": "A"}}), "special_tokens": ids}
	}
	return encode(file)
}

// special returns the special tokens. Ids without a name are <SPECIAL_id>.
func (f *tekkenFile) special() ([]addedToken, error) {
	names := make([]string, f.Config.Special)
	if f.Special == nil {
		copy(names, tekkenSpecial)
	}
	for _, s := range f.Special {
		if s.Rank < 0 || s.Rank >= len(names) {
			return nil, invalid("tekken.json: special token %q has rank %d of %d", s.Text, s.Rank, len(names))
		}
		names[s.Rank] = s.Text
	}
	out := make([]addedToken, len(names))
	for id, name := range names {
		if name == "" {
			name = fmt.Sprintf("<SPECIAL_%d>", id)
		}
		out[id] = addedToken{ID: int32(id), Content: name, Special: true}
	}
	return out, nil
}

// maxMergeBytes bounds the text of the merges that are made of a vocabulary, because it grows with
// the cube of a token's length. Published vocabularies have at most some 600,000 merges of short
// tokens.
const maxMergeBytes = 1 << 26

// rankedMerges returns a byte-level vocabulary and its merges. A token's place is the rank of every
// pair of tokens that it is the concatenation of; ids are places behind the first ones.
func rankedMerges(tokens []string, first int) (vocab map[string]int32, merges [][2]string, err error) {
	ranks := make(map[string]int, len(tokens))
	for i, token := range tokens {
		if _, twice := ranks[token]; twice {
			return nil, nil, invalid("token %q is in the vocabulary twice", token)
		}
		ranks[token] = i
	}
	vocab = make(map[string]int32, len(tokens))
	texts := make([]string, len(tokens))
	for i, token := range tokens {
		texts[i] = ByteLevel(token)
		vocab[texts[i]] = int32(first + i)
	}
	size := 0
	for _, token := range tokens {
		for at := 1; at < len(token); at++ {
			left, okLeft := ranks[token[:at]]
			right, okRight := ranks[token[at:]]
			if !okLeft || !okRight {
				continue
			}
			if size += len(token); size > maxMergeBytes {
				return nil, nil, invalid("the merges of the vocabulary take more than %d bytes", maxMergeBytes)
			}
			merges = append(merges, [2]string{texts[left], texts[right]})
		}
	}
	return vocab, merges, nil
}
