//go:build linux

package e2e

import (
	"encoding/json"
	"io"
	"reflect"
	"strings"
	"testing"
)

// Whole answers are the same with guesses and without, whatever is asked of
// them, over processes; and guesses are made and accepted.
func TestBinarySpeculation(t *testing.T) {
	t.Parallel()
	plain := startCluster(t)
	guessing := startCluster(t, "--speculative-config", `{"method":"ngram","num_speculative_tokens":6,"prompt_lookup_max":4,"prompt_lookup_min":1}`)
	small := startCluster(t, "--speculative-config", `{"method":"draft_model","model":"builtin","num_speculative_tokens":4}`)
	tale := strings.Repeat("Once upon a time there was a dragon. ", 8)
	for _, body := range []map[string]any{
		{"prompt": tale, "max_tokens": 60, "temperature": 0, "ignore_eos": true, "logprobs": 3, "return_token_ids": true},
		{"prompt": tale, "max_tokens": 40, "temperature": 0.8, "seed": 3, "n": 3, "logprobs": 0, "top_p": 0.9, "top_k": 40},
		{"prompt": []string{tale, "What is prefill?"}, "max_tokens": 40, "temperature": 0.7, "seed": 4, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 20},
		{"prompt": tale, "max_tokens": 60, "temperature": 0.4, "seed": 5, "stop": []string{"dragon", " the s"}, "min_tokens": 3, "echo": true, "logprobs": 1},
		{"prompt": tale, "max_tokens": 30, "temperature": 0, "logit_bias": map[string]int{"308": 8, "259": 7}, "prompt_logprobs": 2, "ignore_eos": true},
		{"prompt": tale, "max_tokens": 30, "temperature": 0, "allowed_token_ids": []int{301, 302, 303}, "stop_token_ids": []int{999}},
	} {
		want := plain.answers(body)
		for by, c := range map[string]*cluster{"by lookup": guessing, "by a draft model": small} {
			if got := c.answers(body); !reflect.DeepEqual(got, want) {
				t.Errorf("guessed %s, %v:\n got %v\nwant %v", by, body, got, want)
			}
		}
	}
	count := func(name string) int64 { return guessing.metric(1, "vllm:spec_decode_num_"+name+"_total", "") }
	drafts, drafted, accepted := count("drafts"), count("draft_tokens"), count("accepted_tokens")
	if drafts == 0 || accepted == 0 || accepted > drafted || count("accepted_tokens_per_pos") != accepted {
		t.Errorf("%d drafts with %d tokens, %d accepted, by place %d", drafts, drafted, accepted, count("accepted_tokens_per_pos"))
	}
	if n := plain.metric(1, "vllm:spec_decode_num_drafts_total", ""); n != 0 {
		t.Errorf("%d drafts where none was asked for", n)
	}
	t.Logf("note: %d drafts with %d tokens, %d accepted", drafts, drafted, accepted)
	// The draft model is the model itself, which is right but behind an answer's end.
	drafted, accepted = small.metric(1, "vllm:spec_decode_num_draft_tokens_total", ""), small.metric(1, "vllm:spec_decode_num_accepted_tokens_total", "")
	if drafted == 0 || accepted < drafted*9/10 || accepted > drafted {
		t.Errorf("the model accepts %d of its own %d guesses", accepted, drafted)
	}
}

// answers is what a completion brings, but for what tells two answers apart.
func (c *cluster) answers(body map[string]any) map[string]any {
	c.t.Helper()
	resp, err := c.post("/v1/completions", body)
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	var a map[string]any
	if err := json.Unmarshal(text, &a); err != nil || resp.StatusCode != 200 {
		c.t.Fatalf("%s: %s (%v)", resp.Status, text, err)
	}
	delete(a, "id")
	delete(a, "created")
	if u, ok := a["usage"].(map[string]any); ok {
		delete(u, "prompt_tokens_details") // what was cached is no part of the answer
	}
	return a
}
