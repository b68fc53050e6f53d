package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Decode returns the text of ids. Bytes that are no UTF-8 become U+FFFD, one
// for each longest beginning of a character, as in the reference. Ids outside
// the vocabulary add nothing.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	if t.fallback != nil {
		return t.decodeFallback(ids, skipSpecial)
	}
	n := 0
	for _, id := range ids {
		n += len(t.shown(id, skipSpecial))
	}
	raw := make([]byte, 0, n)
	for _, id := range ids {
		raw = append(raw, t.shown(id, skipSpecial)...)
	}
	return lossy(raw)
}

// shown returns the bytes by which id enters decoded text.
func (t *Tokenizer) shown(id int32, skipSpecial bool) string {
	if !t.has(id) || skipSpecial && t.special[id] {
		return ""
	}
	return t.bytes.at(id)
}

// decodeFallback is Decode for a vocabulary of characters. As in the reference,
// neighbouring byte tokens that are no UTF-8 as a whole are one U+FFFD each.
func (t *Tokenizer) decodeFallback(ids []int32, skipSpecial bool) string {
	out := make([]byte, 0, 8*len(ids))
	run := 0 // length of the run of byte tokens that out ends with
	bare := t.fallback.bareFirst
	for _, id := range ids {
		if !t.has(id) || skipSpecial && t.special[id] {
			continue
		}
		if bare {
			out, bare = append(out, t.fallback.bare(id)...), false
			continue
		}
		if t.fallback.isByte[id] {
			run++
		} else {
			out, run = closeRun(out, run), 0
		}
		out = append(out, t.bytes.at(id)...)
	}
	text, _ := t.fallback.trim(string(closeRun(out, run)), t.fallback.stripMax)
	return text
}

// bare returns the text of a token without its marks of spaces.
func (f *fallback) bare(id int32) string { return strings.ReplaceAll(f.written.at(id), f.old, "") }

func closeRun(out []byte, run int) []byte {
	if utf8.Valid(out[len(out)-run:]) {
		return out
	}
	out = out[:len(out)-run]
	for range run {
		out = utf8.AppendRune(out, utf8.RuneError)
	}
	return out
}

// trim takes at most n leading bytes off text, and returns how many more may go
// where text was no more than that.
func (f *fallback) trim(text string, n int) (string, int) {
	for text != "" {
		if n == 0 || text[0] != f.strip {
			return text, 0
		}
		text, n = text[1:], n-1
	}
	return text, n
}

// Stream decodes the tokens of one output as they come. It never gives half a
// character: an unfinished one, at most three bytes, waits for the next token.
// A Stream belongs to one goroutine.
type Stream struct {
	t           *Tokenizer
	skipSpecial bool
	pending     []byte // the beginning of a character; its capacity is reused
	strip       int    // leading bytes that may still go
	bare        bool   // the next token loses its marks of spaces
}

// NewStream returns a Stream at the beginning of an output.
func (t *Tokenizer) NewStream(skipSpecial bool) *Stream {
	s := &Stream{t: t, skipSpecial: skipSpecial}
	if t.fallback != nil {
		s.strip, s.bare = t.fallback.stripMax, t.fallback.bareFirst
	}
	return s
}

// Next returns the text that id completes, which may be empty. All pieces and
// Flush, joined, equal Decode of all ids, except for a run of byte tokens that is
// not UTF-8 as a whole: Decode then replaces the whole characters in it, which a
// Stream has returned already. Next does not allocate for a token of whole
// characters, the common case.
func (s *Stream) Next(id int32) string {
	piece := s.t.shown(id, s.skipSpecial)
	if s.t.fallback != nil {
		return s.nextFallback(id, piece)
	}
	if len(s.pending) == 0 && utf8.ValidString(piece) {
		return piece
	}
	s.pending = append(s.pending, piece...)
	whole := len(s.pending) - unfinished(s.pending)
	text := lossy(s.pending[:whole])
	s.pending = append(s.pending[:0], s.pending[whole:]...)
	return text
}

func (s *Stream) nextFallback(id int32, piece string) string {
	switch {
	case piece == "" && (!s.t.has(id) || s.skipSpecial && s.t.special[id]):
		return ""
	case s.bare:
		s.bare = false
		return s.t.fallback.bare(id)
	case s.t.fallback.isByte[id]:
		s.pending = append(s.pending, piece...)
		piece = s.wholeCharacters()
	case len(s.pending) > 0:
		piece = string(closeRun(s.pending, len(s.pending))) + piece
		s.pending = s.pending[:0]
	}
	if s.strip > 0 {
		piece, s.strip = s.t.fallback.trim(piece, s.strip)
	}
	return piece
}

// wholeCharacters removes the characters from pending that the next byte cannot change, and
// returns them.
func (s *Stream) wholeCharacters() string {
	done := 0
	var out []byte
	for done < len(s.pending) && utf8.FullRune(s.pending[done:]) {
		r, width := utf8.DecodeRune(s.pending[done:])
		out = utf8.AppendRune(out, r)
		done += width
	}
	s.pending = append(s.pending[:0], s.pending[done:]...)
	return string(out)
}

// Flush ends the output: what is left of an unfinished character is U+FFFD.
func (s *Stream) Flush() string {
	var text string
	if s.t.fallback != nil {
		text = string(closeRun(s.pending, len(s.pending)))
	} else {
		text = lossy(s.pending)
	}
	s.pending = s.pending[:0]
	return text
}

// unfinished returns how many bytes at the end of b begin a character without
// finishing it.
func unfinished(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// lossy returns b as text, with U+FFFD for each maximal part that is no UTF-8.
func lossy(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var out strings.Builder
	out.Grow(len(b) + utf8.UTFMax)
	for i := 0; i < len(b); {
		r, width := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && width == 1 {
			for i+width < len(b) && !utf8.FullRune(b[i:i+width+1]) {
				width++
			}
		}
		out.WriteRune(r)
		i += width
	}
	return out.String()
}
