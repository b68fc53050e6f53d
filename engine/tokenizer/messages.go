package tokenizer

import (
	"container/list"
	"hash/maphash"
	"strings"
	"sync"
)

const (
	// DefaultMessageBytes bounds a MessageCache: 64 MiB hold about 8 million
	// tokens of text, the histories of some thousand long chats.
	DefaultMessageBytes = 64 << 20
	// minMessage is the shortest text worth a look-up; the headers of turns
	// are shorter.
	minMessage = 128
	// maxMessageShare of the bound is the most that one message may take.
	maxMessageShare = 8
	// messageOverhead is what an entry takes besides its text and ids.
	messageOverhead = 192
)

// MessageCache encodes as its Tokenizer does, and remembers the tokens of a
// chat's messages, so that the next turn costs its new text alone. It is safe
// for concurrent use.
//
// A chat's text is cut behind the special tokens that end its messages and
// headers. The text up to such a cut and the text behind it are encoded each by
// itself, which is why the ids are those of Encode whatever the chat: see cuts.
// Messages are kept each for itself, not as whole prefixes; a system prompt
// serves all chats, and one edited message costs itself alone. The least
// recently used go first.
type MessageCache struct {
	t       *Tokenizer
	cuts    map[*addedToken]bool
	seed    maphash.Seed
	maxSize int

	mu      sync.Mutex
	entries map[uint64]*list.Element // by hash of the text; the value is a *message
	recent  list.List                // front: used last
	size    int                      // bytes, of all entries
	hits    uint64                   // look-ups that found their message
	misses  uint64
}

// message is immutable once stored.
type message struct {
	hash uint64
	text string
	ids  []int32

	begins bool // a prompt begins with the text
}

func (m *message) size() int { return len(m.text) + 4*len(m.ids) + messageOverhead }

// NewMessageCache returns an empty cache of at most maxBytes; 0 means
// DefaultMessageBytes.
func (t *Tokenizer) NewMessageCache(maxBytes int) *MessageCache {
	if maxBytes == 0 {
		maxBytes = DefaultMessageBytes
	}
	return &MessageCache{t: t, cuts: t.cuts(), seed: maphash.MakeSeed(), maxSize: maxBytes, entries: map[uint64]*list.Element{}}
}

// Stats returns how many look-ups found their message, how many did not, and
// the bytes held.
func (c *MessageCache) Stats() (hits, misses uint64, bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hits, c.misses, c.size
}

// Encode is the Tokenizer's Encode.
func (c *MessageCache) Encode(text string, addSpecial bool) []int32 {
	ids, _ := c.EncodeWithin(text, addSpecial, nil)
	return ids
}

// EncodeWithin is Encode for a caller that counts memory. take is called with bytes
// that are about to be allocated beyond one and a third of the text's: for a long word
// up to 40 times its bytes. When it returns false the encoding ends, and ok is false.
func (c *MessageCache) EncodeWithin(text string, addSpecial bool, take func(bytes int) bool) (ids []int32, ok bool) {
	dst := make([]int32, 0, len(text)/3+8)
	if addSpecial {
		dst = append(dst, c.t.prefix...)
	}
	start, from := 0, 0
	for len(c.cuts) > 0 {
		_, end, token := c.t.raw.next(text, from)
		if token == nil {
			break
		}
		if from = end; c.cuts[token] && end-start >= minMessage {
			if dst, ok = c.appendMessage(dst, text[start:end], start == 0, take); !ok {
				return nil, false
			}
			start = end
		}
	}
	if dst, ok = c.t.appendWithin(dst, text[start:], false, start == 0, take); !ok {
		return nil, false
	}
	if addSpecial {
		dst = append(dst, c.t.suffix...)
	}
	return dst, true
}

// appendMessage appends the tokens of a text that ends with a cut. take and ok are as
// in EncodeWithin. begins is whether the prompt begins with the text.
func (c *MessageCache) appendMessage(dst []int32, text string, begins bool, take func(bytes int) bool) (ids []int32, ok bool) {
	begins = begins && c.t.firstOnly // else the ids are those of the text anywhere
	hash := maphash.String(c.seed, text)
	if begins {
		hash = ^hash
	}
	if m := c.get(hash); m != nil && m.text == text && m.begins == begins {
		return append(dst, m.ids...), true
	}
	n := len(dst)
	if dst, ok = c.t.appendWithin(dst, text, false, begins, take); ok {
		c.put(&message{hash: hash, text: text, begins: begins, ids: dst[n:]})
	}
	return dst, ok
}

// get returns the message of that hash, nil without one.
func (c *MessageCache) get(hash uint64) *message {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[hash]
	if e == nil {
		c.misses++
		return nil
	}
	c.hits++
	c.recent.MoveToFront(e)
	return e.Value.(*message)
}

// put stores a copy of m: text and ids are slices of somebody's request. A
// message of the same hash is replaced.
func (c *MessageCache) put(m *message) {
	if m.size() > c.maxSize/maxMessageShare {
		return
	}
	m = &message{hash: m.hash, text: strings.Clone(m.text), begins: m.begins, ids: append([]int32(nil), m.ids...)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.entries[m.hash]; e != nil {
		c.remove(e)
	}
	c.entries[m.hash] = c.recent.PushFront(m)
	c.size += m.size()
	for c.size > c.maxSize {
		c.remove(c.recent.Back())
	}
}

func (c *MessageCache) remove(e *list.Element) {
	m := c.recent.Remove(e).(*message)
	delete(c.entries, m.hash)
	c.size -= m.size()
}

// cuts returns the added tokens behind which a text may be cut: what comes
// before and behind is then encoded as it would be by itself, because
//   - they are found in the text as it came, before it is normalized, and the
//     text between two is normalized and split by itself;
//   - they are special, so that no text of a user is meant to hold them;
//   - they do not look at or take what is behind them (single_word, rstrip);
//   - no other token holds one, so that whatever comes behind, the scan from
//     the left finds the same tokens before;
//   - they begin with no white space, which a token before might take, and end
//     with no letter, which a single_word token behind would look at.
func (t *Tokenizer) cuts() map[*addedToken]bool {
	cuts := map[*addedToken]bool{}
	if t.raw == nil {
		return cuts
	}
	var tokens []*addedToken
	for _, n := range t.raw.nodes {
		if a := n.token; a != nil {
			tokens = append(tokens, a)
			first, _ := t.chars.at(a.Content, 0)
			last, _ := t.chars.before(a.Content, len(a.Content))
			if a.Special && !a.SingleWord && !a.RStrip && first&space == 0 && last&word == 0 {
				cuts[a] = true
			}
		}
	}
	for _, a := range tokens {
		for i := range len(a.Content) {
			t.raw.each(a.Content, i, func(held *addedToken) {
				if held != a {
					delete(cuts, held)
				}
			})
		}
	}
	return cuts
}
