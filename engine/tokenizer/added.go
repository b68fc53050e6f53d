package tokenizer

import (
	"slices"
	"strings"
)

// addedToken is a token that is cut out of the text before anything else.
type addedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"` // takes the white space to its left
	RStrip     bool   `json:"rstrip"` // takes the white space to its right
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// matcher finds added tokens in a text: the leftmost, and of those the longest.
// It is a byte trie.
type matcher struct {
	first [256]bool // bytes that some token begins with
	only  int       // the only such byte, or -1
	nodes []trieNode
}

type trieNode struct {
	edges []trieEdge  // sorted by byte
	token *addedToken // that ends here, or nil
}

type trieEdge struct {
	b    byte
	node int32
}

// newMatcher returns a matcher for tokens, whose texts are given by text; nil
// when there are none.
func newMatcher(tokens []*addedToken, text func(*addedToken) string) *matcher {
	m := &matcher{nodes: make([]trieNode, 1), only: -1}
	for _, token := range tokens {
		if s := text(token); s != "" {
			m.add(s, token)
		}
	}
	distinct := 0
	for b, in := range m.first {
		if in {
			distinct++
			m.only = b
		}
	}
	if distinct == 0 {
		return nil
	}
	if distinct > 1 {
		m.only = -1
	}
	return m
}

func (m *matcher) add(s string, token *addedToken) {
	m.first[s[0]] = true
	at := int32(0)
	for i := range len(s) {
		edges := m.nodes[at].edges
		k, found := slices.BinarySearchFunc(edges, s[i], func(e trieEdge, b byte) int { return int(e.b) - int(b) })
		if found {
			at = edges[k].node
			continue
		}
		m.nodes = append(m.nodes, trieNode{})
		fresh := int32(len(m.nodes) - 1)
		m.nodes[at].edges = slices.Insert(edges, k, trieEdge{s[i], fresh})
		at = fresh
	}
	if m.nodes[at].token == nil {
		m.nodes[at].token = token
	}
}

// next returns the first match in s at or after i; token is nil without one.
func (m *matcher) next(s string, i int) (start, end int, token *addedToken) {
	for ; i < len(s); i++ {
		if m.only >= 0 {
			k := strings.IndexByte(s[i:], byte(m.only))
			if k < 0 {
				break
			}
			i += k
		} else if !m.first[s[i]] {
			continue
		}
		if end, token := m.longest(s, i); token != nil {
			return i, end, token
		}
	}
	return len(s), len(s), nil
}

func (m *matcher) longest(s string, i int) (end int, token *addedToken) {
	at := int32(0)
	for ; i < len(s); i++ {
		if at = m.step(at, s[i]); at < 0 {
			break
		}
		if t := m.nodes[at].token; t != nil {
			end, token = i+1, t
		}
	}
	return end, token
}

// each calls see for every token that s holds at i.
func (m *matcher) each(s string, i int, see func(*addedToken)) {
	for at := int32(0); i < len(s); i++ {
		if at = m.step(at, s[i]); at < 0 {
			break
		}
		if t := m.nodes[at].token; t != nil {
			see(t)
		}
	}
}

// step returns the node that b leads to, or -1.
func (m *matcher) step(at int32, b byte) int32 {
	edges := m.nodes[at].edges
	lo, hi := 0, len(edges)
	for lo < hi {
		if mid := (lo + hi) / 2; edges[mid].b < b {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == len(edges) || edges[lo].b != b {
		return -1
	}
	return edges[lo].node
}

// split cuts s at m's tokens and calls gap for the text between them and match
// for each token, in order. As in the reference, a token refused by single_word
// still uses up its text, and white space taken by rstrip is searched for
// further tokens.
func (m *matcher) split(t *charTable, s string, gap func(string), match func(*addedToken)) {
	done := 0
	if m != nil {
		for from := 0; ; {
			start, end, token := m.next(s, from)
			if token == nil {
				break
			}
			from = end
			if token.SingleWord && !isWord(t, s, start, end) {
				continue
			}
			if token.LStrip {
				for start > done {
					c, width := t.before(s, start)
					if c&space == 0 || start-width < done {
						break
					}
					start -= width
				}
			}
			if token.RStrip {
				end = t.run(s, end, space)
			}
			if done < start {
				gap(s[done:start])
			}
			match(token)
			done = end
		}
	}
	if done < len(s) {
		gap(s[done:])
	}
}

func isWord(t *charTable, s string, start, end int) bool {
	if start > 0 {
		if c, _ := t.before(s, start); c&word != 0 {
			return false
		}
	}
	if end < len(s) {
		if c, _ := t.at(s, end); c&word != 0 {
			return false
		}
	}
	return true
}
