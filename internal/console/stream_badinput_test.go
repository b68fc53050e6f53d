package console

import (
	"bytes"
	"strings"
	"testing"
)

// Whatever answers at --url is read as a stream of events.
func FuzzReadStream(f *testing.F) {
	f.Add("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n")
	f.Add("data: {\"error\":{\"message\":\"no\"}}\n\n")
	f.Add("data: {\"choices\":[]}\n")
	f.Add("<html>\n")
	f.Add("data: [DONE]")
	f.Fuzz(func(t *testing.T, text string) {
		var out bytes.Buffer
		answer, err := readStream(strings.NewReader(text), &out)
		if err == nil && !strings.Contains(out.String(), answer.Text) {
			t.Errorf("the answer %q is not what was shown: %q", answer.Text, &out)
		}
	})
}
