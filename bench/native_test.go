package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// node is a decode node that makes tokens up, and options that reach it.
func node(t *testing.T, o nodestest.Options, args ...string) (*nodestest.Node, *Options) {
	t.Helper()
	data, err := fs.ReadFile(builtin.FS(), "tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	net := rpc.NewNetwork()
	o.Bundle = &nodepb.Bundle{Model: "m", TokenizerJson: data, VocabSize: 500, EosTokenIds: []int32{499}, MaxModelLen: 4096}
	n, err := nodestest.Start(net, "decode:7102", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Stop)
	p := parse(t, append([]string{"--backend", "tandem", "--base-url", "tandem://decode:7102", "--disable-tqdm"}, args...)...)
	p.nativeDial = net.Dial
	return n, p
}

// A node gets token ids as a gateway would send them, and every token is counted.
func TestNative(t *testing.T) {
	dir := t.TempDir()
	n, o := node(t, nodestest.Options{}, "--num-prompts", "12", "--random-input-len", "30", "--random-output-len", "8", "--ignore-eos", "--temperature", "0.5", "--seed", "7",
		"--max-concurrency", "4", "--prefill-node", "p:7101", "--num-warmups", "2", "--ready-check-timeout-sec", "5", "--save-result", "--save-detailed", "--result-dir", dir, "--result-filename", "r.json")
	var out bytes.Buffer
	res, err := Serve(t.Context(), o, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	s := res.Summary
	if s.Completed != 12 || s.Output != 96 || s.Input != 360 || !strings.Contains(out.String(), "Total generated tokens:                  96 ") {
		t.Errorf("%d completed, %d tokens of %d\n%s", s.Completed, s.Output, s.Input, &out)
	}
	rs := n.Requests()
	if len(rs) != 15 {
		t.Fatalf("%d requests, want 12, 2 and 1", len(rs))
	}
	seeds := map[uint64]bool{}
	for _, r := range rs {
		seeds[r.Sampling.Seed] = true
		if len(r.Prompt) != 30 || r.MaxTokens != 8 || !r.IgnoreEos || r.Sampling.Temperature != 0.5 || r.Attempt != 1 || r.Model != "m" || r.PrefixRoot == 0 ||
			len(r.Prefill) != 1 || r.Prefill[0] != "p:7101" || len(r.EosTokenIds) != 1 {
			t.Errorf("request %v", r)
		}
	}
	if len(seeds) != 12 {
		t.Errorf("%d different seeds in 12 requests", len(seeds))
	}
	data, err := os.ReadFile(filepath.Join(dir, "r.json"))
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Backend string   `json:"backend"`
		Model   string   `json:"model_id"`
		Texts   []string `json:"generated_texts"`
	}
	if err := json.Unmarshal(data, &v); err != nil || v.Backend != "tandem" || v.Model != "m" || len(v.Texts) != 12 || v.Texts[0] == "" {
		t.Errorf("%+v, %v", v, err)
	}
}

// Requests that a node refuses, cuts off or sends out of order fail one by one;
// one that is stopped is cancelled there.
func TestNativeFailures(t *testing.T) {
	run := func(o nodestest.Options) *Result {
		_, p := node(t, o, "--num-prompts", "3", "--random-input-len", "5", "--random-output-len", "6", "--ignore-eos")
		res, _ := Serve(t.Context(), p, io.Discard, io.Discard)
		if res == nil {
			t.Fatal("no result")
		}
		return res
	}
	refused := run(nodestest.Options{Refuse: func(*nodepb.Generate) (nodepb.Code, string) { return nodepb.Code_CODE_OVERLOADED, "full" }})
	disorder := run(nodestest.Options{Garble: func(t rpc.Token) rpc.Token { t.Position++; return t }})
	cut := run(nodestest.Options{CutAfter: 2})
	for _, c := range []struct {
		res  *Result
		want string
	}{{refused, "CODE_OVERLOADED: full"}, {disorder, "out of order"}, {cut, "lost"}} {
		if c.res.Summary.Failed != 3 {
			t.Errorf("%s: %d failed", c.want, c.res.Summary.Failed)
		}
		for _, r := range c.res.Summary.Requests {
			if r.Outcome.Err == nil || !strings.Contains(r.Outcome.Err.Error(), c.want) {
				t.Errorf("%v, want %s", r.Outcome.Err, c.want)
			}
		}
	}
	gate := make(chan struct{})
	n, p := node(t, nodestest.Options{Gate: gate}, "--num-prompts", "2", "--random-input-len", "5")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if err := n.Wait(30*time.Second, func() bool { return n.Running() == 2 }); err != nil {
			t.Error(err)
		}
		cancel()
	}()
	if _, err := Serve(ctx, p, io.Discard, io.Discard); err == nil {
		t.Error("a run that was stopped went well")
	}
}

func TestNativeRefuses(t *testing.T) {
	for _, args := range [][]string{{}, {"--tls-dir", "/nowhere"}, {"--tls-dir", "x", "--logprobs", "3"}, {"--tls-dir", "x", "--endpoint", "/v1"}} {
		if _, err := Serve(t.Context(), parse(t, append([]string{"--backend", "tandem"}, args...)...), io.Discard, io.Discard); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
	if _, err := Serve(t.Context(), parse(t, "--tls-dir", "x"), io.Discard, io.Discard); err == nil {
		t.Error("--tls-dir without the backend is accepted")
	}
}
