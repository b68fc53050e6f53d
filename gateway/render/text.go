package render

import (
	"strings"

	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// TextOptions say how a choice's tokens become text.
type TextOptions struct {
	Stops       []string // end the text; empty ones are ignored
	IncludeStop bool     // the stop string that ended it stays in the text
	SkipSpecial bool     // special tokens have no text
	MinTokens   int      // tokens whose text is given out unsearched for stops
}

// Text turns one choice's tokens into text, piece by piece, and ends it at a
// stop string. The stop that is complete first ends the text, the longest of
// those that are complete at the same character; so where tokens begin and end
// makes no difference. Text that may be the beginning of a stop string waits.
// A Text belongs to one goroutine.
type Text struct {
	stream  *tokenizer.Stream
	stops   []string
	include bool
	held    string // not given out: a proper beginning of some stop
	free    int    // tokens still to come that no stop ends
	stopped bool
	match   string
}

// NewText returns a Text at the beginning of a choice.
func NewText(t *tokenizer.Tokenizer, o TextOptions) *Text {
	x := &Text{stream: t.NewStream(o.SkipSpecial), include: o.IncludeStop, free: o.MinTokens}
	for _, s := range o.Stops {
		if s != "" {
			x.stops = append(x.stops, s)
		}
	}
	return x
}

// Push takes the next token and returns the text that is certain now. Once it
// has stopped, tokens have no effect and no text.
func (x *Text) Push(id int32) (delta string, stopped bool) {
	if x.stopped {
		return "", true
	}
	if x.free > 0 {
		x.free--
		return x.stream.Next(id), false
	}
	return x.take(x.stream.Next(id), false)
}

// Flush ends the text when no token comes any more and returns what waited.
func (x *Text) Flush() (delta string, stopped bool) {
	if x.stopped {
		return "", true
	}
	return x.take(x.stream.Flush(), true)
}

// Stopped returns the stop string that ended the text; ok is false when none
// has.
func (x *Text) Stopped() (stop string, ok bool) { return x.match, x.stopped }

func (x *Text) take(piece string, last bool) (string, bool) {
	if len(x.stops) == 0 {
		return piece, false
	}
	text := piece
	if x.held != "" {
		text = x.held + piece
	}
	if start, end := x.find(text); end > 0 {
		x.stopped, x.held, x.match = true, "", text[start:end]
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

// find returns the stop in text that ends first, the longest of those; end is 0
// when there is none. Held text holds no whole stop, so what it begins with is
// all that can matter.
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

// beginning returns how many bytes at the end of text begin a stop.
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
