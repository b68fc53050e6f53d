package sim

import (
	"bytes"
	"strconv"
)

// usualLine reads a line of JSON that has only the keys of traceLine, and numbers without signs and
// exponents, as traces have them. It writes the block ids over ids. It returns false for other
// lines. It takes a fifth of the time of json.Unmarshal, which else is a twentieth of a
// simulation's.
func usualLine(line []byte, ids []uint64) (l traceLine, ok bool) {
	s := scanner{rest: line}
	for s.take('{'); !s.failed; s.take(',') {
		switch string(s.key()) {
		case "timestamp":
			l.Timestamp = s.fraction()
		case "input_length":
			l.Tokens = int(s.number())
		case "output_length":
			l.Output = int(s.number())
		case "block_tokens":
			l.Block = int(s.number())
		case "hash_ids":
			l.Blocks = s.numbers(ids[:0])
		default:
			return l, false
		}
		if s.next('}') {
			return l, !s.failed && len(s.rest) == 0
		}
	}
	return l, false
}

// scanner reads JSON from the left.
type scanner struct {
	rest   []byte
	failed bool // something else was read than was wanted
}

// next reads a byte, and the spaces around it, if the byte comes next.
func (s *scanner) next(c byte) bool {
	rest := bytes.TrimLeft(s.rest, " ")
	if len(rest) == 0 || rest[0] != c {
		return false
	}
	s.rest = bytes.TrimLeft(rest[1:], " ")
	return true
}

// take is next of a byte that has to come.
func (s *scanner) take(c byte) { s.failed = !s.next(c) || s.failed }

// key reads a key and its colon.
func (s *scanner) key() []byte {
	s.take('"')
	key, rest, found := bytes.Cut(s.rest, []byte{'"'})
	s.rest, s.failed = rest, s.failed || !found
	s.take(':')
	return key
}

// digits reads the digits that come next.
func (s *scanner) digits() []byte {
	n := 0
	for n < len(s.rest) && s.rest[n]-'0' < 10 {
		n++
	}
	digits := s.rest[:n]
	s.rest, s.failed = s.rest[n:], s.failed || n == 0
	return digits
}

// number reads a whole number.
func (s *scanner) number() (n uint64) {
	digits := s.digits()
	if len(digits) > 18 || len(digits) > 1 && digits[0] == '0' { // may be too large; JSON has no leading zeros
		s.failed = true
		return 0
	}
	for _, d := range digits {
		n = 10*n + uint64(d-'0')
	}
	return n
}

// numbers reads a list of whole numbers, which is not empty, and appends it to list.
func (s *scanner) numbers(list []uint64) []uint64 {
	s.take('[')
	for list = append(list, s.number()); s.next(','); {
		list = append(list, s.number())
	}
	s.take(']')
	return list
}

// fraction reads a number with or without a fraction.
func (s *scanner) fraction() float64 {
	text := s.rest
	s.number()
	if len(s.rest) > 0 && s.rest[0] == '.' {
		s.rest = s.rest[1:]
		s.digits()
	}
	f, err := strconv.ParseFloat(string(text[:len(text)-len(s.rest)]), 64)
	s.failed = s.failed || err != nil
	return f
}
