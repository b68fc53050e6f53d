package openai

import (
	"strings"
	"testing"
)

func BenchmarkParse(b *testing.B) {
	words := strings.Repeat("What is the answer to it? ", 40)
	for name, body := range map[string]string{
		"chat-1KB":   `{"model":"m","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"` + words[:900] + `"}],"temperature":0.7,"max_tokens":100,"stream":true,"stream_options":{"include_usage":true},"stop":["a","b"]}`,
		"chat-100KB": `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat(words, 100) + `"}],"max_tokens":100}`,
		"text-100KB": `{"model":"m","prompt":"` + strings.Repeat(words, 100) + `","max_tokens":100}`,
		"ids-100KB":  `{"model":"m","prompt":[` + strings.Repeat("12345,", 17_000) + `1],"max_tokens":100}`,
	} {
		on := Chat
		if !strings.HasPrefix(name, "chat") {
			on = Completions
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if _, fault := Parse(on, []byte(body)); fault != nil {
					b.Fatal(fault)
				}
			}
		})
	}
}
