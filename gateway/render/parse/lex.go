package parse

// A role is what a marker means in the state that looks for it.
type role uint8

const (
	thinkOpen role = iota
	thinkClose
	tag // belongs to the format, and is dropped
	sectionOpen
	sectionClose
	callOpen
	callClose
	nameOpen // ends what precedes a call's name
	nameEnd
	idOpen // ends a name, and is followed by the call's id
	paramOpen
	paramNameEnd
	valueOpen
	valueClose
	quote
	headerStart
	headerChannel
	headerConstrain
	headerEnd  // the message's text follows
	messageEnd // of gpt-oss: another header follows
)

// mark is a marker in a state's set.
type mark struct {
	text string
	role role
	byID bool // only the token matches, not its spelling by other tokens
}

// set is the markers that one state looks for.
type set struct {
	marks  []mark
	first  [256]bool // bytes that begin a marker which matches by its text
	byText bool      // there is such a marker
}

// find returns the number of bytes at the beginning of b that belong to no marker, and the marker
// that follows them. If m is nil and n < len(b), b[n:] begins a marker and more text has to come;
// this does not happen if last is true. Of several markers at one place the longest matches.
func (s *set) find(b []byte, last bool) (n int, m *mark) {
	if !s.byText {
		return len(b), nil
	}
	for i, c := range b {
		if !s.first[c] {
			continue
		}
		rest, wait := b[i:], false
		for k := range s.marks {
			switch x := &s.marks[k]; {
			case x.byID:
			case len(rest) < len(x.text):
				wait = wait || !last && x.text[:len(rest)] == string(rest)
			case string(rest[:len(x.text)]) == x.text && (m == nil || len(m.text) < len(x.text)):
				m = x
			}
		}
		if wait {
			return i, nil
		}
		if m != nil {
			return i, m
		}
	}
	return len(b), nil
}

// token returns the marker whose text is that of a special token; nil: the state has none.
func (s *set) token(text []byte) *mark {
	for k := range s.marks {
		if s.marks[k].text == string(text) {
			return &s.marks[k]
		}
	}
	return nil
}

// add adds a marker to the set, unless it is empty or the set has it.
func (s *set) add(r role, special func(string) bool, texts ...string) {
	for _, text := range texts {
		if text == "" || s.token([]byte(text)) != nil {
			continue
		}
		m := mark{text: text, role: r, byID: special(text)}
		s.marks = append(s.marks, m)
		if !m.byID {
			s.first[text[0]], s.byText = true, true
		}
	}
}
