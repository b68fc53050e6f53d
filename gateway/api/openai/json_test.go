package openai

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// Messages arrive with every character that JSON can hold, and as JSON.
func TestMessagesKeepEveryCharacter(t *testing.T) {
	var all strings.Builder
	for r := rune(0); r < 0x3000; r++ {
		all.WriteRune(r)
	}
	all.WriteString("\u2028\u2029\ufeff\U0001F600\U000E0001")
	want := []map[string]any{{"role": "user", "content": all.String(), all.String()[:40]: []any{1.5, true, nil, map[string]any{"a\x7f": "\x1b"}}}}
	in, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{
		fmt.Sprintf(`{"messages":%s}`, in),
		fmt.Sprintf(`{"messages":[{"role":"user","content":[{"type":"text","text":%s}]}]}`, mustJSON(t, all.String())),
	} {
		r, fault := Parse(Chat, []byte(body))
		if fault != nil {
			t.Fatal(fault)
		}
		var got []map[string]any
		if err := json.Unmarshal(r.Messages, &got); err != nil {
			t.Fatalf("what the template gets is no JSON: %v", err)
		}
		if got[0]["content"] != all.String() {
			a, b := []rune(fmt.Sprint(got[0]["content"])), []rune(all.String())
			for i := range min(len(a), len(b)) {
				if a[i] != b[i] {
					t.Fatalf("the content has changed: character %d is %q, want %q", i, a[i], b[i])
				}
			}
			t.Fatalf("the content has %d characters, want %d", len(a), len(b))
		}
		if strings.Contains(body, "null") && !reflect.DeepEqual(got, want) {
			t.Error("the message has changed")
		}
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
