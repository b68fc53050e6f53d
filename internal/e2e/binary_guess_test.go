//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// Whole answers are the same with guesses and without, whatever is asked of
// them, over processes; and guesses are made and accepted.
func TestBinarySpeculation(t *testing.T) {
	t.Parallel()
	plain := startCluster(t)
	guessing := newCluster(t)
	guessing.port, guessing.nPrefill = freePorts(t, 5), 2
	path := binary(t)
	// How blocks travel is no matter of guesses: here they do as no other cluster's.
	guessing.start("env", "TANDEM_KV_TRANSPORT=rdma", "TANDEM_FABRIC_PROVIDER=tcp", path, "up", "--port", strconv.Itoa(guessing.port), "--state-dir", guessing.state, "--prefill", "2", "--decode", "2",
		"--min-remote-prefill-tokens", "0", "--speculative-config", `{"method":"ngram","num_speculative_tokens":6,"prompt_lookup_max":4,"prompt_lookup_min":1}`)
	guessing.waitUp()
	small := startCluster(t, "--speculative-config", `{"method":"draft_model","model":"builtin","num_speculative_tokens":4}`)
	tale := strings.Repeat("Once upon a time there was a dragon. ", 8)
	guessing.guesses(tale)
	guessing.beside()
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
	count := func(name string) float64 {
		return guessing.value(decodeNodes, "vllm:spec_decode_num_"+name+"_total", "")
	}
	drafts, drafted, accepted := count("drafts"), count("draft_tokens"), count("accepted_tokens")
	if drafts == 0 || accepted == 0 || accepted > drafted || count("accepted_tokens_per_pos") != accepted {
		t.Errorf("%g drafts with %g tokens, %g accepted, by place %g", drafts, drafted, accepted, count("accepted_tokens_per_pos"))
	}
	if n := plain.metric(1, "vllm:spec_decode_num_drafts_total", ""); n != 0 {
		t.Errorf("%d drafts where none was asked for", n)
	}
	t.Logf("note: %g drafts with %g tokens, %g accepted", drafts, drafted, accepted)
	// The draft model is the model itself, which is right but behind an answer's end.
	told := func(name string) int64 { return small.metric(1, "vllm:spec_decode_num_"+name+"_total", "") }
	if drafted, accepted := told("draft_tokens"), told("accepted_tokens"); drafted == 0 || accepted < drafted*9/10 || accepted > drafted {
		t.Errorf("the model accepts %d of its own %d guesses", accepted, drafted)
	}
}

// guesses holds what nodes say of guesses against their steps. Requests run one at a
// time: so a step has one token and its guesses, or what is left of a prompt, and what
// it gives is one token and those guesses that stayed.
func (c *cluster) guesses(tale string) {
	c.t.Helper()
	c.seen = map[string]bool{}
	d := decodeNodes
	perBlock, pages := float64(blockBytes(c.t)), 0.0 // bytes
	for i := range 4 {
		body := map[string]any{"prompt": strings.Repeat("x", i+1) + tale, "max_tokens": 60, "temperature": 0, "ignore_eos": true}
		if i%2 == 1 {
			body["logit_bias"] = map[string]int{"308": 100} // an answer of one token again and again is guessed right
		}
		elsewhere := c.value(d, "tandem:decode_prefills_total", `"remote"`)
		prompt := c.answers(body)["usage"].(map[string]any)["prompt_tokens"].(float64)
		if c.value(d, "tandem:decode_prefills_total", `"remote"`) > elsewhere {
			pages += math.Ceil((prompt-1)/16) * perBlock
		}
	}
	const generated = 4 * 60
	c.hold("all of them", []want{{d, "vllm:generation_tokens_total", "", generated}, {d, "tandem:decode_prefills_total", "", 4}, {d, "vllm:num_requests_running", "", 0}})
	steps := c.value(d, "tandem:engine_steps_total", "")
	tokens := c.value(d, "vllm:iteration_tokens_total_sum", "") - c.value(d, "tandem:prefill_tokens_computed_total", "")
	plain := c.value(d, "vllm:iteration_tokens_total_bucket", `le="1"`) + c.value(d, "tandem:decode_prefills_total", `"local"`)
	if steps >= generated || plain >= steps {
		c.t.Errorf("%g steps, %g without guesses, gave %d tokens: nothing was guessed", steps, plain, generated)
	}
	c.hold("guesses", []want{
		{d, "vllm:spec_decode_num_drafts_total", "", steps - plain},
		{d, "vllm:spec_decode_num_draft_tokens_total", "", tokens - (steps - 4)},
		{d, "vllm:spec_decode_num_accepted_tokens_total", "", generated - steps},
		{d, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "", generated - steps},
	})
	alerts, zero, now := new(liveAlerts), map[string]float64{}, map[string]float64{}
	for i, role := range []string{"prefill", "prefill", "decode", "decode"} {
		addSamples(c.t, now, fmt.Sprintf("%s-%d", role, i%2), role, c.scrape(i))
	}
	alerts.shows(c.t, zero, now, "Speculation: drafts accepted", 0, (generated-steps)/(tokens-(steps-4)))
	if fabric.Built {
		alerts.shows(c.t, zero, now, "KV transfer: through shared memory", 1, 1)
		c.hold("pages by RDMA", []want{
			{d, "tandem:kv_transfer_rdma_bytes_total", `"in"`, pages},
			{d, "tandem:kv_transfer_bytes_total", `"in"`, pages},
			{prefillNodes, "tandem:kv_transfer_rdma_bytes_total", `"out"`, pages},
			{prefillNodes, "tandem:kv_transfer_bytes_total", `"out"`, pages},
		})
	}
	alerts.run(c.t)
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
