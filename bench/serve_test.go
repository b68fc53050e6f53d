package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// fake is an OpenAI-compatible server of 5 tokens each.
func fake(t *testing.T, check func(path string, body map[string]any)) string {
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body map[string]any
		if r.Method == http.MethodPost {
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil && err != io.EOF {
				t.Errorf("%s: %v", r.URL.Path, err)
			}
			check(r.URL.Path, body)
		}
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprint(w, `{"data":[{"id":"org/fake"}]}`)
		case "/metrics":
			n := asked.Add(1)
			fmt.Fprintf(w, "# HELP x\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.75\nvllm:generation_tokens_total{engine=\"0\"} %d\nprocess_cpu_seconds_total %g 1700000000000\n", 10*n, float64(n)/10)
		case "/tokenize":
			fmt.Fprint(w, `{"tokens":[5,3,9,5]}`)
		case "/v1/completions", "/v1/chat/completions":
			piece := `"text":"a"`
			if r.URL.Path != "/v1/completions" {
				piece = `"delta":{"content":"a"}`
			}
			for range 5 {
				fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,%s}]}\n\n", piece)
				w.(http.Flusher).Flush()
				time.Sleep(2 * time.Millisecond)
			}
			fmt.Fprint(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":30,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n")
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func parse(t *testing.T, args ...string) *Options {
	t.Helper()
	var o Options
	s := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	o.Register(s)
	if err := s.Parse(JoinLists(args)); err != nil {
		t.Fatal(err)
	}
	return &o
}

// A whole run: requests as asked, the printed block, the file.
func TestServe(t *testing.T) {
	dir := t.TempDir()
	var bodies []map[string]any
	var mu = make(chan struct{}, 1)
	url := fake(t, func(path string, body map[string]any) {
		mu <- struct{}{}
		if path == "/v1/completions" {
			bodies = append(bodies, body)
		}
		<-mu
	})
	var out, errOut bytes.Buffer
	res, err := Serve(t.Context(), parse(t, "--base-url", url, "--num-prompts", "20", "--random-input-len", "30", "--output-len", "5", "--request-rate", "200",
		"--ignore-eos", "--temperature", "0", "--goodput", "ttft:1000", "e2el:5000", "--num-warmups", "2", "--ready-check-timeout-sec", "3",
		"--save-result", "--save-detailed", "--result-dir", dir, "--metadata", "run=1", "machine=x", "--extra-body", `{"user":"u"}`), &out, &errOut)
	if err != nil {
		t.Fatal(err)
	}
	if len(bodies) != 23 {
		t.Errorf("%d requests, want 20, 2 and 1", len(bodies))
	}
	for _, b := range bodies {
		prompt, _ := b["prompt"].([]any)
		if len(prompt) != 30 || b["max_tokens"] != 5.0 || b["stream"] != true || b["ignore_eos"] != true || b["temperature"] != 0.0 || b["model"] != "org/fake" || b["user"] != "u" ||
			!slices.Contains([]float64{3, 5, 9}, prompt[0].(float64)) {
			t.Fatalf("body %v", b)
		}
	}
	for _, want := range []string{
		"Starting initial single prompt test run...\nInitial test run completed.\nWarming up with 2 requests...\nWarmup run completed.\nStarting main benchmark run...\n" +
			"Traffic request rate: 200.0\nBurstiness factor: 1.0 (Poisson process)\nMaximum request concurrency: None\n============ Serving Benchmark Result ============\n" +
			"Successful requests:                     20        \n",
		"Total input tokens:                      600       \nTotal generated tokens:                  100       \n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if !strings.Contains(errOut.String(), "This client:") {
		t.Errorf("no self-check in %q", errOut.String())
	}
	if res.Summary.Completed != 20 || res.Summary.Good != 20 {
		t.Errorf("%+v", res.Summary)
	}
	files, err := filepath.Glob(filepath.Join(dir, "openai-200.0qps-fake-*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("files %v, %v", files, err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	var v map[string]any
	if err := json.Unmarshal(data, &v); err != nil || v["machine"] != "x" || len(v["ttfts"].([]any)) != 20 || v["generated_texts"].([]any)[0] != "aaaaa" {
		t.Errorf("%v: %s", err, data)
	}
	out.Reset()
	if err := Compare(files[0], files[0], 0, &out); err != nil || !strings.Contains(out.String(), "Mean TTFT (ms)") {
		t.Errorf("compare: %v\n%s", err, out.String())
	}
}

// A ready check also waits for a server that does not answer, or that has no model yet.
func TestServeReadyCheck(t *testing.T) {
	target, err := url.Parse(fake(t, func(string, map[string]any) {}))
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch asked.Add(1) {
		case 1:
			panic(http.ErrAbortHandler)
		case 2:
			fmt.Fprint(w, `{"data":[]}`)
		default:
			proxy.ServeHTTP(w, r)
		}
	}))
	defer s.Close()
	var out, errOut bytes.Buffer
	res, err := Serve(t.Context(), parse(t, "--base-url", s.URL, "--num-prompts", "2", "--ready-check-timeout-sec", "20"), &out, &errOut)
	if err != nil || res.Summary.Completed != 2 || strings.Count(errOut.String(), "No answer yet, which is repeated for 20 s: EOF") != 1 {
		t.Errorf("%v: %s%s", err, out.String(), errOut.String())
	}
}

func TestServeChat(t *testing.T) {
	url := fake(t, func(path string, body map[string]any) {
		m, _ := body["messages"].([]any)
		if path != "/v1/chat/completions" || len(m) != 1 || len(strings.Fields(m[0].(map[string]any)["content"].(string))) != 12 || body["max_completion_tokens"] != 128.0 {
			t.Errorf("%s: %v", path, body)
		}
	})
	res, err := Serve(t.Context(), parse(t, "--base-url", url, "--backend", "openai-chat", "--num-prompts", "4", "--input-len", "12", "--max-concurrency", "2"), io.Discard, io.Discard)
	if err != nil || res.Summary.Output != 20 || res.Summary.Input != 120 {
		t.Fatalf("%+v, %v", res, err)
	}
	if _, ok := res.Summary.Stats["itl"]; !ok {
		t.Errorf("no gaps between tokens in %+v", res.Summary)
	}
}

func TestServeRefuses(t *testing.T) {
	for args, want := range map[string]error{
		"--backend x":              ErrOption,
		"--goodput tpot":           ErrOption,
		"--percentile-metrics x":   ErrOption,
		"--metric-percentiles 101": ErrOption,
		"--endpoint v1":            ErrOption,
		"--metadata x":             ErrOption,
		"--header x":               ErrOption,
		"--self-timed":             ErrOption,
		"--tokenizer /nowhere":     ErrOption,
		"--random-range-ratio x":   ErrOption,
		"--extra-body [ --model m --tokenizer builtin":                                ErrOption,
		"--base-url http://127.0.0.1:1 --tokenizer builtin --model m --num-prompts 2": ErrFailed,
	} {
		if _, err := Serve(context.Background(), parse(t, append([]string{"--model", "m", "--base-url", "http://127.0.0.1:1"}, strings.Fields(args)...)...), io.Discard, io.Discard); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", args, err, want)
		}
	}
}
