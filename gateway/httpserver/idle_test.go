package httpserver

import "testing"

// The end of a head is found however its bytes are cut, and not before its first line.
func TestHeadEnds(t *testing.T) {
	for _, c := range []struct {
		text string
		ends bool
	}{
		{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", true}, {"GET / HTTP/1.1\nHost: x\n\n", true}, {"\r\n\r\nGET / HTTP/1.1\r\n\r\n", true},
		{"\r\n\r\n\r\n", false}, {"GET / HTTP/1.1\r\nHost: x\r\n", false}, {"GET / HTTP/1.1\r\nHost: x\r\n\r", false}, {"", false},
	} {
		for first := range len(c.text) + 1 {
			for second := first; second <= len(c.text); second++ {
				var s idleState
				ends := false
				for _, part := range []string{c.text[:first], c.text[first:second], c.text[second:]} {
					ends = s.headEnds([]byte(part)) || ends
				}
				if ends != c.ends {
					t.Fatalf("%q cut at %d and %d: ends %v", c.text, first, second, ends)
				}
			}
		}
	}
}
