package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Hangul syllables compose and decompose by arithmetic (Unicode, section 3.12).
const (
	hangulS, hangulL, hangulV, hangulT = 0xAC00, 0x1100, 0x1161, 0x11A7
	countL, countV, countT             = 19, 21, 28
	countN                             = countV * countT
	countS                             = countL * countN
)

// nfc returns s in normal form C. Text without composing characters, nearly all
// text, is returned as it is. A segment starts at a character that neither
// changes nor joins the one before it, so only segments that hold a composing
// character are taken apart.
func (t *charTable) nfc(s string) string {
	prev, i := t.nextComposing(s, 0)
	if i == len(s) {
		return s
	}
	var out strings.Builder
	out.Grow(len(s) + 8)
	var buf []rune
	done := 0 // s[:done] is in out
	for i < len(s) {
		end := t.run(s, i, composing)
		out.WriteString(s[done:prev])
		buf = t.composeSegment(buf[:0], s[prev:end], &out)
		done = end
		prev, i = t.nextComposing(s, end)
	}
	out.WriteString(s[done:])
	return out.String()
}

// nextComposing returns the start i of the first composing character from start
// on, len(s) if there is none, and the start of the character before it, start
// if there is none.
func (t *charTable) nextComposing(s string, start int) (prev, i int) {
	prev, i = start, start
	for i < len(s) {
		c, width := t.at(s, i)
		if c&composing != 0 {
			break
		}
		prev = i
		i += width
	}
	return prev, i
}

// composeSegment writes segment's normal form to out; buf is scratch space. A
// byte that is no UTF-8 ends what can combine and passes through.
func (t *charTable) composeSegment(buf []rune, segment string, out *strings.Builder) []rune {
	for i := 0; i < len(segment); {
		r, width := utf8.DecodeRuneInString(segment[i:])
		if r == utf8.RuneError && width == 1 {
			t.flush(buf, out)
			buf = buf[:0]
			out.WriteByte(segment[i])
		} else {
			buf = t.appendDecomposed(buf, r)
		}
		i += width
	}
	t.flush(buf, out)
	return buf
}

func (t *charTable) flush(rs []rune, out *strings.Builder) {
	t.order(rs)
	for _, r := range t.recompose(rs) {
		out.WriteRune(r)
	}
}

func (t *charTable) appendDecomposed(dst []rune, r rune) []rune {
	if r >= hangulS && r < hangulS+countS {
		i := r - hangulS
		dst = append(dst, hangulL+i/countN, hangulV+i%countN/countT)
		if i%countT != 0 {
			dst = append(dst, hangulT+i%countT)
		}
		return dst
	}
	if parts, ok := t.decompose[r]; ok {
		return append(dst, parts...)
	}
	return append(dst, r)
}

// order sorts each run of marks by combining class, keeping equal ones in place.
func (t *charTable) order(rs []rune) {
	for lo := 0; lo < len(rs); {
		if t.ccc[rs[lo]] == 0 {
			lo++
			continue
		}
		hi := lo
		for hi < len(rs) && t.ccc[rs[hi]] != 0 {
			hi++
		}
		sortMarks(rs[lo:hi], t.ccc)
		lo = hi
	}
}

// sortMarks is a stable counting sort: a hostile run of marks may be as long as
// the text, and there are at most 256 classes.
func sortMarks(rs []rune, ccc map[rune]uint8) {
	if len(rs) < 2 {
		return
	}
	var start [257]int
	for _, r := range rs {
		start[int(ccc[r])+1]++
	}
	for i := 1; i < len(start); i++ {
		start[i] += start[i-1]
	}
	sorted := make([]rune, len(rs))
	for _, r := range rs {
		c := ccc[r]
		sorted[start[c]] = r
		start[c]++
	}
	copy(rs, sorted)
}

// recompose joins each starter with the marks that follow it, in place.
func (t *charTable) recompose(rs []rune) []rune {
	out := rs[:0]
	starter := -1 // index in out of the last starter, -1 before the first
	last := 0     // combining class of the last rune kept after it
	for _, r := range rs {
		c := int(t.ccc[r])
		if starter >= 0 && (starter == len(out)-1 || last < c) {
			if joined, ok := t.pair(out[starter], r); ok {
				out[starter] = joined
				continue
			}
		}
		if c == 0 {
			starter = len(out)
		}
		last = c
		out = append(out, r)
	}
	return out
}

func (t *charTable) pair(a, b rune) (rune, bool) {
	if a >= hangulL && a < hangulL+countL && b >= hangulV && b < hangulV+countV {
		return hangulS + ((a-hangulL)*countV+b-hangulV)*countT, true
	}
	if a >= hangulS && a < hangulS+countS && (a-hangulS)%countT == 0 && b > hangulT && b < hangulT+countT {
		return a + b - hangulT, true
	}
	r, ok := t.compose[[2]rune{a, b}]
	return r, ok
}
