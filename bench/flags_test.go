package bench

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/bench/report"
)

// vllmFlags are the flags of vLLM's bench serve with their defaults. "-" means none, and
// unsupported flags have "x".
const vllmFlags = `backend=openai label=- base-url=- host=127.0.0.1 port=8000 endpoint=/v1/completions header=- insecure=false model=- served-model-name=- tokenizer=-
tokenizer-mode=x skip-tokenizer-init=false trust-remote-code=false seed=0 num-prompts=1000 num-warmups=0 ready-check-timeout-sec=0 max-concurrency=0 request-rate=+Inf
burstiness=1 ramp-up-strategy=- ramp-up-start-rps=0 ramp-up-end-rps=0 probe-request-rate=0 self-timed=false no-self-timed=false request-id-prefix=- disable-tqdm=false profile=false
input-len=0 output-len=0 ignore-eos=false use-beam-search=false logprobs=0 temperature=0 top-p=0 min-p=0 frequency-penalty=0 presence-penalty=0 repetition-penalty=0 top-k=0
lora-modules=- lora-assignment=random extra-body=- chat-template-kwargs=x percentile-metrics=ttft,tpot,itl metric-percentiles=99.000000 goodput=- save-result=false save-detailed=false
append-result=false metadata=- result-dir=- result-filename=- plot-timeline=false timeline-itl-thresholds=25,50 plot-dataset-stats=false
dataset-name=random dataset-path=- no-stream=false no-oversample=false skip-chat-template=false enable-multimodal-chat=x disable-shuffle=false random-input-len=1024
random-output-len=128 random-range-ratio=0.0 random-prefix-len=0 random-batch-size=x no-reranker=x prefix-repetition-prefix-len=256 prefix-repetition-suffix-len=256
prefix-repetition-num-prefixes=10 prefix-repetition-output-len=128 timed-trace-chunk-hash-size=16 timed-trace-sec-multiplier=1 timed-trace-label-timestamp=timestamp
timed-trace-label-input-length=input_length timed-trace-label-output-length=output_length timed-trace-label-hash-ids=hash_ids sharegpt-output-len=0 custom-output-len=256
custom-ensure-client-side-data=x spec-bench-output-len=x spec-bench-category=x speed-bench-dataset-subset=x speed-bench-output-len=x speed-bench-category=x hf-subset=x hf-split=x
hf-name=x hf-output-len=x bfcl-categories=x blazedit-min-distance=x blazedit-max-distance=x asr-max-audio-len-sec=x asr-min-audio-len-sec=x random-mm-base-items-per-request=x
random-mm-num-mm-items-range-ratio=x random-mm-limit-mm-per-prompt=x random-mm-bucket-config=x`

// Every flag of vLLM's is known: with its default, or refused with what to do.
func TestVLLMFlags(t *testing.T) {
	var o Options
	s := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	o.Register(s)
	for _, f := range strings.Fields(vllmFlags) {
		name, want, _ := strings.Cut(f, "=")
		flag := s.Lookup(name)
		if flag == nil {
			t.Errorf("--%s is not known", name)
			continue
		}
		_, refused := flag.Value.(*refusal)
		if refused != (want == "x") {
			t.Errorf("--%s: refused %v", name, refused)
			continue
		}
		if refused {
			if err := s.Set(name, "something"); err == nil || !strings.Contains(err.Error(), ": ") {
				t.Errorf("--%s something: %v", name, err)
			}
			continue
		}
		if want == "-" {
			want = ""
		}
		if got := strings.Trim(flag.DefValue, "[]"); got != want {
			t.Errorf("--%s: default %q, want %q", name, got, want)
		}
	}
	for _, args := range [][]string{{"--tokenizer-mode", "auto"}, {"--random-batch-size=1"}, {"--no-reranker=false"}, {"--trust-remote-code"}, {"--no-stream"}} {
		if err := s.Parse(args); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
	for _, args := range [][]string{{"--backend", "vllm-pooling"}, {"--dataset-name", "hf"}, {"--lora-assignment", "x"}, {"--timeline-itl-thresholds", "50,25"}, {"--random-mix", "1:2"}, {"--random-mix", "1:2:0"}} {
		args = append([]string{"--model", "m", "--tokenizer", "builtin", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1"}, args...)
		if _, err := Serve(t.Context(), parse(t, args...), io.Discard, io.Discard); err == nil || errors.Is(err, ErrFailed) {
			t.Errorf("%v: %v", args[7:], err)
		}
	}
}

// Adapters take turns, beam search is set, the profiler is started and stopped, and the
// plots are next to the JSON.
func TestServeLessUsual(t *testing.T) {
	var seen []string
	mu := make(chan struct{}, 1)
	url := fake(t, func(path string, body map[string]any) {
		mu <- struct{}{}
		defer func() { <-mu }()
		switch path {
		case "/v1/completions":
			if body["use_beam_search"] != true {
				t.Errorf("body %v", body)
			}
			seen = append(seen, body["model"].(string))
		case "/start_profile", "/stop_profile":
			seen = append(seen, path)
		}
	})
	dir := t.TempDir()
	if _, err := Serve(t.Context(), parse(t, "--base-url", url, "--num-prompts", "4", "--max-concurrency", "1", "--random-mix", "1:20:5", "3:40:5", "--use-beam-search", "--profile",
		"--lora-modules", "a", "b", "--lora-assignment", "round-robin", "--plot-timeline", "--plot-dataset-stats", "--result-dir", dir, "--result-filename", "r.json", "--save-result"), io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(seen, " "); got != "/start_profile a b a b /stop_profile" {
		t.Errorf("the server saw %q", got)
	}
	for name, want := range map[string]string{"r.json": "date", "r.timeline.html": "4 of 4 requests", "r.dataset_stats.html": "Prompts</figcaption>"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(string(data), want) {
			t.Errorf("%s: %v: %.300s", name, err, data)
		}
	}
}

// A server's counters of speculative decoding are reported for the run only.
func TestSpec(t *testing.T) {
	read := func(text string) *report.Spec { return readSpec(strings.NewReader(text)) }
	if s := read("vllm:generation_tokens_total 3\n"); s != nil {
		t.Errorf("of nothing: %+v", s)
	}
	before := read("vllm:spec_decode_num_drafts_total{engine=\"0\"} 10\nvllm:spec_decode_num_draft_tokens_total 20\nvllm:spec_decode_num_accepted_tokens_total 5\nvllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"} 5\n")
	after := read("vllm:spec_decode_num_drafts_total{engine=\"0\"} 20\nvllm:spec_decode_num_draft_tokens_total 60\nvllm:spec_decode_num_accepted_tokens_total 25\n" +
		"vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} 13\nvllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"1\"} 12\nvllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"x\"} 1\nvllm:spec_decode_num_accepted_tokens_per_pos_total 1\n")
	s := specDuring(before, after)
	if s == nil || s.Rate() != 50 || s.Length() != 3 || s.PerPosition[0] != 8 || s.PerPosition[1] != 12 {
		t.Errorf("%+v", s)
	}
	if specDuring(after, after) != nil || specDuring(nil, after) != nil {
		t.Error("of no drafts something is told")
	}
}
