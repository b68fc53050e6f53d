package nodestest

import "encoding/json"

// Tokenizer is a tokenizer.json whose first 256 tokens are the bytes, id = byte. The merges, pairs
// of printable ASCII texts, have the ids from 256 on, in order, and the special tokens those after
// them.
func Tokenizer(merges [][2]string, special ...string) []byte {
	vocab, extra := map[string]int{}, rune(256)
	for b := range 256 {
		switch {
		case b >= '!' && b <= '~', b >= 0xa1 && b <= 0xac, b >= 0xae:
			vocab[string(rune(b))] = b
		default: // as GPT-2 writes the other bytes
			vocab[string(extra)] = b
			extra++
		}
	}
	rules := make([]string, len(merges))
	for i, m := range merges {
		vocab[m[0]+m[1]] = 256 + i
		rules[i] = m[0] + " " + m[1]
	}
	added := []map[string]any{}
	for i, s := range special {
		id := 256 + len(merges) + i
		added = append(added, map[string]any{"id": id, "content": s, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
		vocab[s] = id
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	out, err := json.Marshal(map[string]any{"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": added, "normalizer": nil,
		"pre_tokenizer": level, "post_processor": nil, "decoder": level,
		"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": rules}})
	if err != nil {
		panic(err) // plain values only
	}
	return out
}
