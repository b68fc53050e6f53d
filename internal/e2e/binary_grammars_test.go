//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"
)

// Constrained answers of the whole program: chats, completions and tokens, whole and streamed, several
// choices, the same again from another node, refusals by name; and what processes count of them.
func TestBinaryGrammars(t *testing.T) {
	t.Parallel()
	c := startCluster(t, "--max-grammar-bytes", "64KiB", "--speculative-config", `{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3,"prompt_lookup_min":1}`)
	schema := map[string]any{"type": "object", "properties": map[string]any{
		"animal": map[string]any{"enum": []string{"dragon", "bird", "cat"}}, "age": map[string]any{"type": "integer", "minimum": 0, "maximum": 99},
		"tags": map[string]any{"type": "array", "items": map[string]any{"type": "string", "maxLength": 6}, "maxItems": 2},
	}, "required": []string{"animal", "age", "tags"}, "additionalProperties": false}
	format := map[string]any{"type": "json_schema", "json_schema": map[string]any{"name": "pet", "strict": true, "schema": schema}}
	pet := func(text string) {
		t.Helper()
		var v struct {
			Animal string
			Age    int
			Tags   []string
		}
		d := json.NewDecoder(strings.NewReader(text))
		d.DisallowUnknownFields()
		if err := d.Decode(&v); err != nil || !slices.Contains([]string{"dragon", "bird", "cat"}, v.Animal) || v.Age < 0 || v.Age > 99 || len(v.Tags) > 2 || d.More() {
			t.Errorf("%q is no pet: %+v, %v", text, v, err)
		}
	}
	chat := func(body map[string]any) (texts, reasons []string) {
		t.Helper()
		body["messages"], body["max_tokens"] = []map[string]any{{"role": "user", "content": "A pet, as JSON."}}, 200
		resp, err := c.post("/v1/chat/completions", body)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var a map[string]any
		if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %v (%v)", resp.Status, a, err)
		}
		for _, choice := range a["choices"].([]any) {
			m := choice.(map[string]any)
			texts, reasons = append(texts, m["message"].(map[string]any)["content"].(string)), append(reasons, m["finish_reason"].(string))
		}
		return texts, reasons
	}
	stopped := 0
	for seed := range 3 {
		body := map[string]any{"response_format": format, "n": 3, "seed": seed, "temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.3}
		texts, reasons := chat(body)
		for i, text := range texts {
			if reasons[i] == "stop" {
				pet(text)
				stopped++
			}
		}
		if again, _ := chat(body); len(texts) != 3 || !slices.Equal(again, texts) {
			t.Errorf("%q, and again %q", texts, again)
		}
	}
	if stopped == 0 {
		t.Error("no answer ended")
	}
	for field, want := range map[string]func(string) bool{
		`{"structured_outputs":{"choice":["yes","no"]},"logprobs":2}`:                    func(s string) bool { return s == "yes" || s == "no" },
		`{"guided_regex":"[0-9]{3}-[0-9]{4}"}`:                                           func(s string) bool { return len(s) == 8 && s[3] == '-' },
		`{"structured_outputs":{"grammar":"root ::= \"a\"{5} \"b\""},"ignore_eos":true}`: func(s string) bool { return s == "aaaaab" },
		`{"response_format":{"type":"json_object"},"max_tokens":40}`:                     func(s string) bool { return strings.HasPrefix(s, "{") },
	} {
		body := map[string]any{"prompt": "Once upon a time", "max_tokens": 60, "seed": 5}
		if err := json.Unmarshal([]byte(field), &body); err != nil {
			t.Fatal(err)
		}
		text := c.answers(body)["choices"].([]any)[0].(map[string]any)["text"].(string)
		if !want(text) {
			t.Errorf("%s: %q", field, text)
		}
		body["stream"] = true
		resp, err := c.post("/v1/completions", body)
		if err != nil {
			t.Fatal(err)
		}
		events, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		var streamed strings.Builder
		for _, line := range bytes.Split(events, []byte("\n")) {
			var e struct{ Choices []struct{ Text string } }
			if data, ok := bytes.CutPrefix(line, []byte("data: {")); ok && json.Unmarshal(append([]byte("{"), data...), &e) == nil && len(e.Choices) > 0 {
				streamed.WriteString(e.Choices[0].Text)
			}
		}
		if streamed.String() != text {
			t.Errorf("%s: %q, streamed %q", field, text, streamed.String())
		}
	}
	for body, want := range map[string]string{
		`{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"contains":{"type":"null"},"maxContains":2}}}}`: "contains at #",
		`{"prompt":"a","structured_outputs":{"regex":"(?=a)"}}`:                              "regex",
		`{"prompt":"a","guided_json":{"description":"` + strings.Repeat("a", 70_000) + `"}}`: "--max-grammar-bytes",
		`{"prompt":"a","min_tokens":4,"max_tokens":9,"structured_outputs":{"choice":["x"]}}`: "exclude every token that the grammar allows",
	} {
		var fields map[string]any
		if err := json.Unmarshal([]byte(body), &fields); err != nil {
			t.Fatal(err)
		}
		resp, err := c.post("/v1/completions", fields)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 400 || !strings.Contains(string(text), want) {
			t.Errorf("%.100s: %s %s", body, resp.Status, text)
		}
	}
	d, g := []int{1}, []int{gatewayNode}
	for _, name := range []string{`tandem:grammar_masks_total{source="cached"}`, `tandem:grammar_masks_total{source="computed"}`, "tandem:grammar_steps_total", "tandem:grammars", "tandem:grammar_cache_bytes"} {
		metric, label, _ := strings.Cut(strings.TrimSuffix(name, "}"), "{")
		if n := c.value(d, metric, label); n <= 0 {
			t.Errorf("%s is %g", name, n)
		}
	}
	c.hold("grammars", []want{
		{d, "tandem:grammar_ended_total", "", 1}, {d, "tandem:grammar_waiting", "", 0}, {d, "tandem:grammar_sat_out_total", "", c.value(d, "tandem:grammar_sat_out_total", "")},
		{g, "tandem:gateway_grammars_total", `outcome="compiled"`, 6}, {g, "tandem:gateway_grammars_total", `outcome="invalid"`, 2},
		{g, "tandem:gateway_grammars_total", `outcome="limit"`, 1}, {g, "tandem:gateway_grammars_total", `outcome="known"`, 9},
		{g, "tandem:gateway_grammars_waiting", "", 0},
	})
	if n := c.value(g, "tandem:gateway_grammar_cache_bytes", ""); n < 8*256 {
		t.Errorf("outcomes take %g bytes", n)
	}
}
