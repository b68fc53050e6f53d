package bench

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// A custom dataset's prompts go to /v1/completions as the server's own template has
// them, each rendered once, to chats as messages, and as they are where that is
// asked for.
func TestCustomPromptsAreTemplated(t *testing.T) {
	file := filepath.Join(t.TempDir(), "prompts.jsonl")
	if err := os.WriteFile(file, []byte("{\"prompt\":\"one\"}\n{\"prompt\":\"two\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args     []string
		rendered int
		prompt   string // what a request brings
	}{
		"completions": {nil, 2, "[5 3 9 5]"},
		"as they are": {[]string{"--skip-chat-template"}, 0, "one"},
		"chat":        {[]string{"--backend", "openai-chat"}, 0, "map[content:one role:user]"},
	} {
		var mu sync.Mutex
		rendered, prompts := 0, []string{}
		url := fake(t, func(path string, body map[string]any) {
			mu.Lock()
			defer mu.Unlock()
			switch path {
			case "/tokenize":
				rendered++
				if m := fmt.Sprint(body["messages"]); body["add_generation_prompt"] != true || m != "[map[content:one role:user]]" && m != "[map[content:two role:user]]" {
					t.Errorf("%s: %v was to be rendered", name, body)
				}
			case "/v1/completions":
				prompts = append(prompts, fmt.Sprint(body["prompt"]))
			case "/v1/chat/completions":
				prompts = append(prompts, fmt.Sprint(body["messages"]))
			}
		})
		args := append([]string{"--base-url", url, "--dataset-name", "custom", "--dataset-path", file, "--num-prompts", "6"}, c.args...)
		if _, err := Serve(t.Context(), parse(t, args...), io.Discard, io.Discard); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if all := strings.Join(prompts, " "); rendered != c.rendered || !strings.Contains(all, c.prompt) {
			t.Errorf("%s: %d rendered, prompts %s", name, rendered, all)
		}
	}
}

// A server that has no template is not measured with other prompts.
func TestCustomPromptsThatCannotBeTemplated(t *testing.T) {
	file := filepath.Join(t.TempDir(), "prompts.jsonl")
	if err := os.WriteFile(file, []byte("{\"prompt\":\"one\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, answer := range map[string]string{"no such page": "", "no tokens": `{"tokens":[]}`} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/tokenize" && answer == "" {
				http.NotFound(w, r)
				return
			}
			fmt.Fprint(w, answer)
		}))
		_, err := Serve(t.Context(), parse(t, "--base-url", s.URL, "--model", "m", "--dataset-name", "custom", "--dataset-path", file, "--num-prompts", "1"), io.Discard, io.Discard)
		if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "--skip-chat-template") {
			t.Errorf("%s: %v", name, err)
		}
		s.Close()
	}
}
