package render

import (
	"bytes"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// TextOptions are the options of a choice's text.
type TextOptions struct {
	Stops       []string // stop strings; empty ones are ignored
	IncludeStop bool     // keep the stop string that ended the text
	SkipSpecial bool     // leave out special tokens
	MinTokens   int      // tokens that are not searched for stop strings
}

// Text converts one choice's tokens to text, piece by piece, and ends it at a stop string. The
// first stop string to be complete ends the text; of those that are complete at the same
// character, the longest. So the result does not depend on token boundaries. Text that may be the
// beginning of a stop string is held. A Text belongs to one goroutine.
type Text struct {
	stream  *tokenizer.Stream
	stops   []string
	include bool
	held    string // not returned yet: a proper prefix of a stop string
	free    int    // tokens still to come that are not searched
	match   string // the stop string that ended the text, or empty
}

// NewText returns a Text at the beginning of a choice.
func NewText(t *tokenizer.Tokenizer, o TextOptions) *Text {
	stops := slices.DeleteFunc(slices.Clone(o.Stops), func(s string) bool { return s == "" })
	return &Text{stream: t.NewStream(o.SkipSpecial), stops: stops, include: o.IncludeStop, free: o.MinTokens}
}

// Push adds the next token and returns the text that is now final. After a stop string it ignores
// tokens and returns no text.
func (x *Text) Push(id int32) (delta string, stopped bool) {
	if x.free > 0 {
		x.free--
		return x.stream.Next(id), false
	}
	return x.take(x.stream.Next(id), false)
}

// Decode returns the text that the next token completes. With Rest and Search it replaces Push and
// Flush where only a part of the text is searched for stop strings.
func (x *Text) Decode(id int32) string {
	x.free-- // below 0 once tokens are searched
	return x.stream.Next(id)
}

// Rest returns the rest of an unfinished character after the last token.
func (x *Text) Rest() string { return x.stream.Flush() }

// Search appends to dst what is final of the searched text, to which it adds piece. last ends the
// text. After a stop string it appends nothing.
func (x *Text) Search(dst, piece []byte, last bool) (_ []byte, stopped bool) {
	if x.free >= 0 && !last || x.held == "" && x.match == "" && !x.mayStop(piece) {
		return append(dst, piece...), false
	}
	text, stopped := x.take(string(piece), last)
	return append(dst, text...), stopped
}

// mayStop reports whether the piece has the first byte of a stop string.
func (x *Text) mayStop(piece []byte) bool {
	for _, s := range x.stops {
		if bytes.IndexByte(piece, s[0]) >= 0 {
			return true
		}
	}
	return false
}

// Flush ends the text after the last token and returns the held rest.
func (x *Text) Flush() (delta string, stopped bool) {
	return x.take(x.stream.Flush(), true)
}

// Stopped returns the stop string that ended the text; ok is false if none has.
func (x *Text) Stopped() (stop string, ok bool) { return x.match, x.match != "" }

func (x *Text) take(piece string, last bool) (string, bool) {
	if x.match != "" {
		return "", true
	}
	if len(x.stops) == 0 {
		return piece, false
	}
	text := piece
	if x.held != "" {
		text = x.held + piece
	}
	if start, end := x.find(text); end > 0 {
		x.held, x.match = "", text[start:end]
		if x.include {
			start = end
		}
		return text[:start], true
	}
	keep := 0
	if !last {
		keep = x.beginning(text)
	}
	x.held = text[len(text)-keep:]
	return text[:len(text)-keep], false
}

// find returns the stop string in text that ends first, the longest of those; end is 0 if there is
// none. Held text contains no whole stop string, so that text, which begins with it, is enough.
func (x *Text) find(text string) (start, end int) {
	for _, s := range x.stops {
		i := strings.Index(text, s)
		if i < 0 {
			continue
		}
		if e := i + len(s); end == 0 || e < end || e == end && i < start {
			start, end = i, e
		}
	}
	return start, end
}

// beginning returns the number of bytes at the end of text that begin a stop string.
func (x *Text) beginning(text string) int {
	most := 0
	for _, s := range x.stops {
		for n := min(len(s)-1, len(text)); n > most; n-- {
			if strings.HasSuffix(text, s[:n]) {
				most = n
				break
			}
		}
	}
	return most
}
