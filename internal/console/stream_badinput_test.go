package console

import (
	"strings"
	"testing"
)

// Whatever answers at --url is read as a stream of events.
func FuzzReadStream(f *testing.F) {
	f.Add("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n")
	f.Add("data: {\"choices\":[{\"delta\":{\"reasoning\":\"a\"}}],\"usage\":{\"prompt_tokens\":1}}\n\ndata: [DONE]\n\n")
	f.Add("data: {\"error\":{\"message\":\"no\"}}\n\n")
	f.Add("data: {\"choices\":[]}\n")
	f.Add("<html>\n")
	f.Add("data: [DONE]")
	f.Fuzz(func(t *testing.T, text string) {
		var out, thought strings.Builder
		answer, err := readStream(strings.NewReader(text), func(d Delta) error {
			out.WriteString(d.Text)
			thought.WriteString(d.Reasoning)
			return nil
		})
		if err == nil && (out.String() != answer.Text || thought.String() != answer.Reasoning) {
			t.Errorf("the answer %q is not what was shown: %q", answer.Text, out.String())
		}
	})
}
