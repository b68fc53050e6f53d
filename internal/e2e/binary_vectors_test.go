package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"
)

// A prefill node answers requests for vectors with the bits of a decode node, and alone while the
// decode node drains. A prefill node that is killed during a request loses none of its inputs.
func TestBinaryVectorsOfPrefillNodes(t *testing.T) {
	t.Parallel()
	c := startCluster(t, "--threads", "1")
	r := rand.New(rand.NewPCG(21, 6))
	inputs := func(n, tokens int) (all [][]int32) {
		for range n {
			all = append(all, c.prompt(r, 1+r.IntN(tokens)))
		}
		return all
	}
	ask := func(path, field string, value any, salt string) (data string) {
		t.Helper()
		resp, err := c.post(path, map[string]any{field: value, "cache_salt": salt})
		if err != nil {
			t.Error(err)
			return ""
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		var a struct{ Data json.RawMessage }
		if err = cmp.Or(err, json.Unmarshal(text, &a)); err != nil || resp.StatusCode != 200 || len(a.Data) == 0 {
			t.Errorf("%d %.300s: %v", resp.StatusCode, text, err)
		}
		return string(a.Data)
	}
	drain := func(method, node string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, c.url("/admin/drain/"+node), http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
		c.wait(startBound, "the gateway knows of it", func() bool {
			draining := strings.Contains(c.body("/debug/nodes"), `"draining":true`)
			return draining == (method == http.MethodPost)
		})
	}
	const prefill, decode = 0, 1
	count := func() (vectors, others int64) {
		return c.metric(prefill, "tandem:prefill_jobs_total", `"done"`), c.metric(decode, "vllm:request_success_total", `"stop"`)
	}
	texts, answers := inputs(16, 150), map[string]string{}
	for i, drained := range []string{"decode-0", "prefill-0"} {
		drain(http.MethodPost, drained)
		answers[drained] = ask("/v1/embeddings", "input", texts, fmt.Sprint(i))
		drain(http.MethodDelete, drained)
	}
	if a, b := answers["decode-0"], answers["prefill-0"]; a != b {
		t.Errorf("a prefill node answers\n%.300s\na decode node\n%.300s", a, b)
	}
	if p, d := count(); p != 16 || d != 16 {
		t.Errorf("%d vectors of the prefill node, %d of the decode node, want 16 of each", p, d)
	}
	many, both := inputs(150, 120), make(chan string, 1)
	go func() { both <- ask("/v1/embeddings", "input", many, "both") }()
	c.wait(startBound, "the prefill node has computed some of the inputs", func() bool { p, _ := count(); return p >= 16+8 })
	c.kill("prefill-0")
	var got string
	select {
	case got = <-both:
	case <-time.After(time.Minute):
		t.Fatal("the request does not end")
	}
	if want := ask("/v1/embeddings", "input", many, "alone"); got != want {
		t.Error("the inputs of a killed prefill node have other vectors")
	}
}
