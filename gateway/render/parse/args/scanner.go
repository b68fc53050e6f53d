package args

// Scanner follows one JSON value through pieces of text. It finds the value's end by counting
// brackets outside of strings, and checks the grammar of RFC 8259 on the way. Its memory is one
// byte for each open bracket.
type Scanner struct {
	Done bool // the value has ended
	Odd  bool // Feed has stopped before a byte that begins no value, but may begin a marker

	open  []byte // brackets that are open
	want  want
	mode  mode
	isKey bool
	hex   int8 // hexadecimal digits that an escape still needs
	num   int8 // state of a number; 0: none
	lit   string
	bad   bool // the value breaks the grammar
}

type want uint8

const (
	wantValue    want = iota
	wantFirst         // a value or ']'
	wantKey           // a member's name
	wantFirstKey      // a member's name or '}'
	wantColon
	wantNext // a comma or a closing bracket
)

type mode uint8

const (
	between mode = iota
	inString
	inEscape
	inWord // a number, true, false or null
)

// Reset prepares s for another value.
func (s *Scanner) Reset() { *s = Scanner{open: s.open[:0]} }

// OK reports whether the value is complete and valid.
func (s *Scanner) OK() bool { return s.Done && !s.bad }

// Feed takes the next piece of the value and returns the number of its bytes that belong to it. It
// is less than len(b) only if Done or Odd is set. After Odd, the next call takes that byte, too,
// unless the caller clears Odd.
func (s *Scanner) Feed(b []byte) int {
	for i := 0; i < len(b); i++ {
		c := b[i]
		switch s.mode {
		case inString:
			s.inString(c)
		case inEscape:
			s.escape(c)
		case inWord:
			if !delimits(c) && c != '<' {
				s.word(c)
				continue
			}
			s.endWord()
			if s.Done {
				return i
			}
			if s.isOdd(c) {
				return i
			}
			s.structure(c)
		default:
			if s.isOdd(c) {
				return i
			}
			s.structure(c)
		}
		if s.Done {
			return i + 1
		}
	}
	return len(b)
}

// isOdd sets Odd if c may begin a marker behind a value that is not closed. It returns false for
// the byte that set Odd, when that comes again.
func (s *Scanner) isOdd(c byte) bool {
	s.Odd = !s.Odd && (c == '<' || c == '[' && s.want == wantNext)
	return s.Odd
}

// End ends the value after its last byte.
func (s *Scanner) End() {
	if s.mode == inWord {
		s.endWord()
	}
}

func (s *Scanner) inString(c byte) {
	switch {
	case c == '"':
		s.mode = between
		s.closeValue()
	case c == '\\':
		s.mode = inEscape
	case c < ' ':
		s.bad = true
	}
}

func (s *Scanner) escape(c byte) {
	switch {
	case s.hex > 0:
		if s.hex--; unhex(c) < 0 {
			s.bad = true
			if c == '"' { // the string ends here for every parser that continues
				s.hex, s.mode = 0, inString
				s.inString(c)
				return
			}
		}
	case c == 'u':
		s.hex = 4
		return
	default:
		s.bad = s.bad || !escapes(c)
	}
	if s.hex == 0 {
		s.mode = inString
	}
}

func (s *Scanner) structure(c byte) {
	value := s.want == wantValue || s.want == wantFirst
	switch c {
	case ' ', '\n', '\t', '\r':
	case '{', '[':
		s.bad = s.bad || !value
		s.open = append(s.open, c)
		if s.want = wantFirst; c == '{' {
			s.want = wantFirstKey
		}
	case '}', ']':
		n := len(s.open)
		if n == 0 {
			s.bad, s.Done = true, true
			return
		}
		first := wantFirst
		if c == '}' {
			first = wantFirstKey
		}
		s.bad = s.bad || s.open[n-1] != c-2 || s.want != wantNext && s.want != first
		s.open = s.open[:n-1]
		s.isKey = false
		s.closeValue()
	case '"':
		s.isKey = s.want == wantKey || s.want == wantFirstKey
		s.bad = s.bad || !value && !s.isKey
		s.mode = inString
	case ':':
		s.bad = s.bad || s.want != wantColon
		s.want = wantValue
	case ',':
		s.bad = s.bad || s.want != wantNext
		if s.want = wantValue; len(s.open) > 0 && s.open[len(s.open)-1] == '{' {
			s.want = wantKey
		}
	default:
		s.bad = s.bad || !value
		s.isKey, s.num, s.lit, s.mode = false, 0, "", inWord
		switch {
		case c == 't':
			s.lit = "rue"
		case c == 'f':
			s.lit = "alse"
		case c == 'n':
			s.lit = "ull"
		case c == '-':
			s.num = numMinus
		case c == '0':
			s.num = numZero
		case '1' <= c && c <= '9':
			s.num = numInt
		default:
			s.bad = true
		}
	}
}

// closeValue is called behind a value or a member's name.
func (s *Scanner) closeValue() {
	if s.isKey {
		s.isKey, s.want = false, wantColon
		return
	}
	s.want, s.Done = wantNext, len(s.open) == 0
}

// The states of a number, by its last byte.
const (
	numMinus int8 = iota + 1
	numZero
	numInt
	numDot
	numFraction
	numE
	numSign
	numExponent
)

func (s *Scanner) word(c byte) {
	digit := '0' <= c && c <= '9'
	switch {
	case s.lit != "" && c == s.lit[0]:
		s.lit = s.lit[1:]
	case s.num == numMinus && c == '0':
		s.num = numZero
	case digit && (s.num == numMinus || s.num == numInt):
		s.num = numInt
	case c == '.' && (s.num == numZero || s.num == numInt):
		s.num = numDot
	case digit && (s.num == numDot || s.num == numFraction):
		s.num = numFraction
	case (c == 'e' || c == 'E') && (s.num == numZero || s.num == numInt || s.num == numFraction):
		s.num = numE
	case (c == '+' || c == '-') && s.num == numE:
		s.num = numSign
	case digit && s.num >= numE:
		s.num = numExponent
	default:
		s.bad = true
	}
}

func (s *Scanner) endWord() {
	switch s.num {
	case numMinus, numDot, numE, numSign:
		s.bad = true
	}
	s.bad = s.bad || s.lit != ""
	s.mode = between
	s.closeValue()
}

// delimits reports whether c ends a number or a word.
func delimits(c byte) bool {
	switch c {
	case ' ', '\n', '\t', '\r', ',', ':', '{', '}', '[', ']', '"':
		return true
	}
	return false
}

// escapes reports whether c may follow a backslash, other than u.
func escapes(c byte) bool {
	switch c {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return true
	}
	return false
}

// unhex returns the value of a hexadecimal digit, or -1.
func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// AppendEscaped appends text as it is written within a JSON string.
func AppendEscaped(dst, text []byte) []byte {
	const digits = "0123456789abcdef"
	for _, c := range text {
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c >= ' ':
			dst = append(dst, c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		default:
			dst = append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		}
	}
	return dst
}

// AppendQuoted appends text as a JSON string.
func AppendQuoted(dst, text []byte) []byte {
	return append(AppendEscaped(append(dst, '"'), text), '"')
}
