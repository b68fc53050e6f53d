package grammar

import (
	"fmt"
	"slices"
	"strconv"
)

// thinking bounds the tokens of reasoning in an output: behind the last of them only the marker of
// its end is allowed, as soon as the grammar has it there.
type thinking struct {
	begin, end string // markers, tokens of the vocabulary
	tokens     int32
	open       bool // the output begins within reasoning
}

// readThinking returns the bound that a structural tag has in its member thinking, nil if it has
// none, and whether its format is anything: all tokens, until the output ends.
func readThinking(text []byte, limits *Limits) (bound *thinking, free bool, err error) {
	root, err := readJSON(text, 4*limits.Depth)
	if err != nil {
		return nil, false, err
	}
	kind := root.get("format").get("type")
	free = kind != nil && kind.text == formatAnything
	v := root.get("thinking")
	if v == nil {
		return nil, free, nil
	}
	number(root, nil, "")
	t := &tagCompiler{}
	bound = &thinking{open: isTrue(v.get("open"))}
	if bound.begin, err = t.text(v, "begin"); err == nil {
		bound.end, err = t.text(v, "end")
	}
	if err != nil {
		return nil, false, err
	}
	n := v.get("tokens")
	if n == nil || n.kind != '0' {
		return nil, false, tagError(v, "tokens must be a number")
	}
	tokens, err := strconv.ParseInt(n.text, 10, 32)
	if err != nil || tokens < 0 {
		return nil, false, tagError(v, "tokens must be a count, not %s", clip(n.text))
	}
	bound.tokens = int32(tokens)
	return bound, free, nil
}

// formatAnything is the type of a structural tag's format that allows every token.
const formatAnything = "anything"

// bounded is a thinking with the ids of its markers.
type bounded struct {
	begin, end int32
	tokens     int32
	open       bool
}

// resolve returns the bound with the ids of a vocabulary.
func (t *thinking) resolve(v *Vocabulary) (*bounded, error) {
	if t == nil || v == nil {
		return nil, nil
	}
	b := &bounded{begin: -1, tokens: t.tokens, open: t.open}
	if id, ok := v.special[t.begin]; ok {
		b.begin = id
	}
	var ok bool
	if b.end, ok = v.special[t.end]; !ok || int(b.end) >= 64*v.words {
		return nil, &Error{Keyword: "token", Reason: fmt.Sprintf("the vocabulary has no special token %q", clip(t.end))}
	}
	return b, nil
}

// note follows the reasoning over an accepted token.
func (m *Matcher) note(token int32) {
	t := m.a.thinking
	switch {
	case t == nil:
	case token == t.end:
		m.inside = false
	case m.inside:
		m.spent++
	case token == t.begin:
		m.inside = true
	}
}

// forced returns the only token that may follow because reasoning has had all of its tokens; -1:
// there is none. k is the mask of the grammar, nil for all tokens.
func (m *Matcher) forced(k *mask) int32 {
	t := m.a.thinking
	if t == nil || !m.inside || m.spent < t.tokens || k != nil && !k.names(t.end) {
		return -1
	}
	return t.end
}

// names reports whether a token that the grammar names is in the mask.
func (m *mask) names(id int32) bool {
	if m.bits != nil {
		return m.bits[id>>6]>>(id&63)&1 != 0
	}
	return slices.Contains(m.ids, id)
}

// write writes the mask of m, given that of the grammar, and returns the only token in it; -1:
// there are several.
func (m *Matcher) write(k *mask, dst []uint64) (certain int32) {
	v := m.a.vocab
	if id := m.forced(k); id >= 0 {
		clear(dst)
		set(dst, id)
		return id
	}
	if k != nil {
		k.write(v, dst)
		if k.count == 1 {
			return k.first
		}
		return -1
	}
	clear(dst)
	for i := range v.size / 64 {
		dst[i] = ^uint64(0)
	}
	if rest := v.size % 64; rest > 0 {
		dst[v.size/64] = 1<<rest - 1
	}
	for _, id := range v.eos {
		set(dst, id)
	}
	return -1
}
