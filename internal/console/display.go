package console

import (
	"errors"
	"io"
	"strings"
)

// display shows one answer as it arrives: at a terminal as Markdown with dimmed reasoning, and
// elsewhere its text alone.
type display struct {
	*Terminal
	answer, thoughts markdown

	pending string // text that may be the start of a tag
	where   place
	tagged  bool // thinkStart was there
	begun   bool // some of the answer was shown
}

// place is where an answer's text is with respect to <think>, in which some models write their
// reasoning.
type place uint8

const (
	atStart place = iota // only space so far
	inThoughts
	inAnswer
)

const (
	thinkStart, thinkEnd = "<think>", "</think>"
	space                = " \t\r\n"
)

func newDisplay(t *Terminal) *display {
	d := &display{Terminal: t}
	if t.Width != nil {
		width := t.Width()
		d.answer = markdown{out: t.Out, width: width, plain: !t.Styled}
		d.thoughts = markdown{out: t.Out, width: width, plain: true, base: styled(t.Styled, dim)}
	}
	return d
}

// show shows a part of the answer.
func (d *display) show(p Delta) error {
	switch {
	case d.JSON:
		return nil
	case d.Width == nil:
		_, err := io.WriteString(d.Out, p.Text)
		return err
	}
	if p.Reasoning != "" {
		if err := d.think(p.Reasoning); err != nil {
			return err
		}
	}
	d.pending += p.Text
	return d.advance(false)
}

// advance shows what is decided of pending; all of it at the end.
func (d *display) advance(end bool) error {
	for {
		text := d.pending
		switch d.where {
		case atStart:
			rest := strings.TrimLeft(text, space)
			switch {
			case strings.HasPrefix(rest, thinkStart):
				d.pending, d.where, d.tagged = rest[len(thinkStart):], inThoughts, true
				continue
			case strings.HasPrefix(thinkStart, rest) && !end:
				return nil
			}
			d.where = inAnswer
		case inThoughts:
			before, after, found := strings.Cut(text, thinkEnd)
			if !found {
				n := len(text)
				for k := min(len(thinkEnd)-1, n); k > 0 && !end; k-- {
					if strings.HasSuffix(text, thinkEnd[:k]) {
						n -= k
						break
					}
				}
				d.pending = text[n:]
				return d.think(text[:n])
			}
			if err := d.think(before); err != nil {
				return err
			}
			d.pending, d.where = after, inAnswer
		default:
			d.pending = ""
			return d.reply(text)
		}
	}
}

// think shows reasoning, without space in front.
func (d *display) think(text string) error {
	if !d.thoughts.used {
		text = strings.TrimLeft(text, space)
	}
	return d.thoughts.write(Visible(text))
}

// reply shows text of the answer. An empty line is between reasoning and the answer.
func (d *display) reply(text string) error {
	if !d.begun && (d.tagged || d.thoughts.used) {
		if text = strings.TrimLeft(text, space); text == "" {
			return nil
		}
		if d.thoughts.used {
			if err := errors.Join(d.thoughts.close(), d.thoughts.separate()); err != nil {
				return err
			}
		}
	}
	d.begun = d.begun || text != ""
	return d.answer.write(Visible(text))
}

// end shows what was held back, and ends the line.
func (d *display) end() error {
	switch {
	case d.JSON:
		return nil
	case d.Width == nil:
		_, err := io.WriteString(d.Out, "\n")
		return err
	}
	err := d.advance(true)
	if !d.begun {
		err = errors.Join(err, d.thoughts.close())
	}
	err = errors.Join(err, d.answer.close())
	_, werr := io.WriteString(d.Out, "\n")
	return errors.Join(err, werr)
}
