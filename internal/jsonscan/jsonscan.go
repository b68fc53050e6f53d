// Package jsonscan checks JSON and finds its parts without building a tree, so that a parse needs
// only the memory that its caller keeps.
//
// Skip checks one value and counts the values in it, up to bounds. A Scanner iterates over the
// members of an object or the elements of an array. Past and PastString skip values without
// checking them. The other functions find parts of a value that was checked.
//
// The package does not convert numbers, and does not check that strings are UTF-8.
package jsonscan

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"
)

// MaxDepth is the number of arrays and objects that may enclose each other.
const MaxDepth = 300

// Errors of Skip.
var (
	ErrElements = errors.New("jsonscan: too many elements")
	ErrValues   = errors.New("jsonscan: too many values")
	errEnd      = errors.New("unexpected end")
	errDepth    = fmt.Errorf("its values nest deeper than %d", MaxDepth)
)

// Bounds are the bounds of a value that Skip accepts; 0: any number.
type Bounds struct {
	Elements int // of the value, where it is an array or an object
	Values   int // in the value, at any depth, itself included
}

// Counts are the numbers of values that Skip found.
type Counts struct{ Elements, Values int }

// Skip returns the position behind the value that begins at b[at] or behind white space there, and
// that is within depth arrays and objects. It checks the grammar of RFC 8259, but not that strings
// are UTF-8. Beyond a bound it returns ErrElements or ErrValues.
func Skip(b []byte, at, depth int, most Bounds) (end int, n Counts, err error) {
	k := skipper{b: b, outer: depth, most: most}
	end, err = k.skip(at, depth)
	return end, k.n, err
}

// skipper is one call of Skip.
type skipper struct {
	b     []byte
	outer int // depth of the whole value
	most  Bounds
	n     Counts
}

// skip returns the position behind a value within depth arrays and objects.
func (k *skipper) skip(at, depth int) (int, error) {
	b := k.b
	if at = Space(b, at); at >= len(b) {
		return at, errEnd
	}
	if k.n.Values++; k.most.Values > 0 && k.n.Values > k.most.Values {
		return at, ErrValues
	}
	if depth == k.outer+1 {
		if k.n.Elements++; k.most.Elements > 0 && k.n.Elements > k.most.Elements {
			return at, ErrElements
		}
	}
	switch b[at] {
	case '{', '[':
		return k.skipAll(at, depth)
	case '"':
		return skipString(b, at)
	case 't':
		return skipWord(b, at, "true")
	case 'f':
		return skipWord(b, at, "false")
	case 'n':
		return skipWord(b, at, "null")
	}
	return skipNumber(b, at)
}

// skipAll returns the position behind the array or object at b[at].
func (k *skipper) skipAll(at, depth int) (_ int, err error) {
	if depth >= MaxDepth {
		return at, errDepth
	}
	b, open := k.b, k.b[at]
	if at = Space(b, at+1); at < len(b) && b[at] == open+2 { // '}' or ']'
		return at + 1, nil
	}
	for ; ; at = Space(b, at+1) {
		if open == '{' {
			if at, err = skipKey(b, at); err != nil {
				return at, err
			}
		}
		if at, err = k.skip(at, depth+1); err != nil {
			return at, err
		}
		if at = Space(b, at); at >= len(b) {
			return at, errEnd
		}
		switch b[at] {
		case ',':
		case open + 2:
			return at + 1, nil
		default:
			return at, fmt.Errorf("%q instead of a comma or %q", b[at], open+2)
		}
	}
}

// Valid checks that b is one value and nothing else. The error has the position of a fault.
func Valid(b []byte, most Bounds) (Counts, error) {
	end, n, err := Skip(b, 0, 0, most)
	if err == nil {
		if end = Space(b, end); end < len(b) {
			err = errors.New("there is more after the value")
		}
	}
	return n, at(err, end)
}

// at adds a position to an error of the grammar.
func at(err error, i int) error {
	if err == nil || errors.Is(err, ErrElements) || errors.Is(err, ErrValues) {
		return err
	}
	return fmt.Errorf("at byte %d: %w", i, err)
}

// Space returns the position of the next byte that is not white space.
func Space(b []byte, at int) int {
	for at < len(b) && (b[at] == ' ' || b[at] == '\n' || b[at] == '\t' || b[at] == '\r') {
		at++
	}
	return at
}

// skipKey returns the position behind the name at b[at] and its colon.
func skipKey(b []byte, at int) (int, error) {
	if at >= len(b) {
		return at, errEnd
	}
	if b[at] != '"' {
		return at, fmt.Errorf("%q instead of a member's name", b[at])
	}
	at, err := skipString(b, at)
	if err != nil {
		return at, err
	}
	switch at = Space(b, at); {
	case at >= len(b):
		return at, errEnd
	case b[at] != ':':
		return at, fmt.Errorf("%q instead of a colon", b[at])
	}
	return at + 1, nil
}

// ordinary returns the number of bytes at the beginning of b that need no escape in a string:
// all but control characters, quotes and backslashes.
func ordinary(b []byte) int {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	i := 0
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		quote, slash := w^('"'*ones), w^('\\'*ones)
		// The top bit is set in each byte that is below 0x20, or that the exclusive or made 0. A borrow
		// changes only bytes behind such a byte.
		if found := ((w-0x20*ones)&^w | (quote-ones)&^quote | (slash-ones)&^slash) & tops; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for ; i < len(b) && b[i] >= 0x20 && b[i] != '"' && b[i] != '\\'; i++ {
	}
	return i
}

// skipString returns the position behind the string that opens at b[at].
func skipString(b []byte, at int) (int, error) {
	for at++; ; {
		at += ordinary(b[at:])
		if at >= len(b) {
			return at, errEnd
		}
		switch b[at] {
		case '"':
			return at + 1, nil
		case '\\':
			if at+1 >= len(b) {
				return len(b), errEnd
			}
			switch b[at+1] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				at += 2
			case 'u':
				if at+6 > len(b) {
					return len(b), errEnd
				}
				if _, ok := hex4(b[at+2:]); !ok {
					return at, fmt.Errorf(`\u without four hexadecimal digits`)
				}
				at += 6
			default:
				return at, fmt.Errorf("invalid escape: %q", b[at+1])
			}
		default:
			return at, fmt.Errorf("control character %q in a string", b[at])
		}
	}
}

// hex4 reads four hexadecimal digits.
func hex4(b []byte) (r rune, ok bool) {
	var v [2]byte
	_, err := hex.Decode(v[:], b[:4])
	return rune(v[0])<<8 | rune(v[1]), err == nil
}

func skipWord(b []byte, at int, word string) (int, error) {
	if len(b)-at < len(word) || string(b[at:at+len(word)]) != word {
		return at, fmt.Errorf("invalid character %q at the beginning of a value", b[at])
	}
	return at + len(word), nil
}

// skipNumber returns the position behind the number at b[at].
func skipNumber(b []byte, at int) (int, error) {
	first := b[at]
	digits := func() bool {
		from := at
		for at < len(b) && '0' <= b[at] && b[at] <= '9' {
			at++
		}
		return at > from
	}
	if first == '-' {
		at++
	}
	if at < len(b) && b[at] == '0' {
		at++
	} else if !digits() {
		if first == '-' {
			return at, errors.New("a minus without a digit")
		}
		return at, fmt.Errorf("invalid character %q at the beginning of a value", first)
	}
	if at < len(b) && b[at] == '.' {
		at++
		if !digits() {
			return at, errors.New("a decimal point without a digit")
		}
	}
	if at < len(b) && (b[at] == 'e' || b[at] == 'E') {
		at++
		if at < len(b) && (b[at] == '+' || b[at] == '-') {
			at++
		}
		if !digits() {
			return at, errors.New("an exponent without a digit")
		}
	}
	return at, nil
}

// StringEnd returns the position behind the string that begins at b[at] and was checked.
func StringEnd(b []byte, at int) int {
	for at++; ; {
		if at += ordinary(b[at:]); b[at] == '"' {
			return at + 1
		}
		at += 2
	}
}

// PlainEnd returns the position behind the number or word at b[at].
func PlainEnd(b []byte, at int) int {
	for at < len(b) {
		switch b[at] {
		case ',', ']', '}', ' ', '\n', '\t', '\r':
			return at
		}
		at++
	}
	return at
}

// PastString returns the position behind the string that opens at b[at], or -1 if it does not end.
// It checks nothing, and runs at the speed of a search for quotes.
func PastString(b []byte, at int) int {
	for at++; ; at++ {
		i := bytes.IndexByte(b[at:], '"')
		if i < 0 {
			return -1
		}
		at += i
		escaped := false
		for k := at - 1; b[k] == '\\'; k-- {
			escaped = !escaped
		}
		if !escaped {
			return at + 1
		}
	}
}

// Past returns the position behind the value that begins at b[at], or -1 if there is none or it
// does not end. It checks nothing but that brackets are balanced.
func Past(b []byte, at int) int {
	switch {
	case at >= len(b):
		return -1
	case b[at] == '"':
		return PastString(b, at)
	case b[at] != '{' && b[at] != '[':
		if end := PlainEnd(b, at); end > at && end < len(b) {
			return end
		}
		return -1
	}
	for depth := 0; at < len(b); at++ {
		switch b[at] {
		case '"':
			if at = PastString(b, at) - 1; at < 0 {
				return -1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return at + 1
			}
		}
	}
	return -1
}

// IsString reports whether a checked value, which may be missing (nil), is a string; IsList and
// IsObject report the same of lists and objects.
func IsString(v []byte) bool { return len(v) > 0 && v[0] == '"' }
func IsList(v []byte) bool   { return len(v) > 0 && v[0] == '[' }
func IsObject(v []byte) bool { return len(v) > 0 && v[0] == '{' }

// Text returns the text of a checked string, without quotes and escapes. Halves of surrogate pairs
// become U+FFFD.
func Text(quoted []byte) string {
	in := quoted[1 : len(quoted)-1]
	n := ordinary(in)
	if n == len(in) {
		return string(in)
	}
	out := append(make([]byte, 0, len(in)), in[:n]...)
	for in = in[n:]; len(in) > 0; {
		if in[0] != '\\' {
			n := ordinary(in)
			out, in = append(out, in[:n]...), in[n:]
			continue
		}
		c := in[1]
		in = in[2:]
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r, _ := hex4(in)
			in = in[4:]
			if utf16.IsSurrogate(r) {
				pair := rune(utf8.RuneError)
				if len(in) >= 6 && in[0] == '\\' && in[1] == 'u' {
					low, _ := hex4(in[2:])
					if pair = utf16.DecodeRune(r, low); pair != utf8.RuneError {
						in = in[6:]
					}
				}
				r = pair
			}
			out = utf8.AppendRune(out, r)
			continue
		}
		out = append(out, c)
	}
	return unsafe.String(unsafe.SliceData(out), len(out)) // nothing else refers to out
}

// Scanner iterates over the members of an object or the elements of an array. The caller calls Next
// and, each time that it returns true, Value or Unchecked.
type Scanner struct {
	b       []byte
	at      int
	open    byte // '{' or '['
	from    int  // position of the current member or element
	key     []byte
	started bool
	err     error
}

// Object returns a scanner of the object in b. Its Err is set if b does not begin as an object.
func Object(b []byte) Scanner { return newScanner(b, '{') }

// List returns a scanner of the array in b. Its Err is set if b does not begin as an array.
func List(b []byte) Scanner { return newScanner(b, '[') }

func newScanner(b []byte, open byte) Scanner {
	s := Scanner{b: b, at: Space(b, 0), open: open}
	switch {
	case s.at >= len(b):
		s.err = errEnd
	case b[s.at] != open:
		s.err = fmt.Errorf("%q instead of %q", b[s.at], open)
	default:
		s.at++
	}
	return s
}

// Next moves to the next member or element. It returns false at the end, and if the JSON is invalid
// (Err).
func (s *Scanner) Next() bool {
	if s.err != nil {
		return false
	}
	s.at = Space(s.b, s.at)
	switch {
	case s.at >= len(s.b):
		return s.fail(errEnd)
	case s.b[s.at] == s.open+2:
		if s.at = Space(s.b, s.at+1); s.at < len(s.b) {
			return s.fail(errors.New("there is more after the value"))
		}
		return false
	case s.started && s.b[s.at] != ',':
		return s.fail(fmt.Errorf("%q instead of a comma or %q", s.b[s.at], s.open+2))
	case s.started:
		s.at = Space(s.b, s.at+1)
	}
	s.started, s.from = true, s.at
	if s.open == '{' {
		end, err := skipKey(s.b, s.at)
		if err != nil {
			s.at = end
			return s.fail(err)
		}
		s.key = s.b[s.at:StringEnd(s.b, s.at)]
		s.at = end
	}
	s.at = Space(s.b, s.at)
	return true
}

func (s *Scanner) fail(err error) bool {
	s.err = err
	return false
}

// Name returns the current member's name, in quotes and with its escapes.
func (s *Scanner) Name() []byte { return s.key }

// Key returns the current member's name, without quotes and escapes.
func (s *Scanner) Key() []byte {
	if bytes.IndexByte(s.key, '\\') >= 0 {
		return []byte(Text(s.key))
	}
	return s.key[1 : len(s.key)-1]
}

// Rest returns the bytes from the current value on.
func (s *Scanner) Rest() []byte { return s.b[min(s.at, len(s.b)):] }

// Value checks the current value and returns it as it is written, or nil if it is invalid or beyond
// a bound (Err).
func (s *Scanner) Value(most Bounds) ([]byte, Counts) {
	from := s.at
	end, n, err := Skip(s.b, s.at, 1, most)
	s.at = end
	if err != nil {
		s.err = err
		return nil, n
	}
	return s.b[from:end], n
}

// Unchecked returns the current value as it is written, without checking it, or nil if it does not
// end (Err). It is called instead of Value.
func (s *Scanner) Unchecked() []byte {
	from, end := s.at, Past(s.b, s.at)
	if end < 0 {
		s.at, s.err = len(s.b), errEnd
		return nil
	}
	s.at = end
	return s.b[from:end]
}

// Member returns the current member or element as it is written. It is called after Value or
// Unchecked.
func (s *Scanner) Member() []byte { return s.b[s.from:s.at] }

// At returns the position that the scanner has reached.
func (s *Scanner) At() int { return s.at }

// Err returns why the iteration ended, or nil at the end of the JSON.
func (s *Scanner) Err() error { return at(s.err, s.at) }
