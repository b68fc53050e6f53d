package gateway

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const vectorSize = 4

// vectorNode is a node that gives each prompt the vector {its length, its first token, -2, 0}.
func vectorNode(addr string, change func(*nodepb.Vectors)) nodestest.Options {
	b := bundle()
	b.Vectors = &nodepb.Vectors{Size: vectorSize, Kind: nodepb.PoolingKind_POOLING_KIND_LAST}
	if change != nil {
		change(b.Vectors)
	}
	return nodestest.Options{
		Bundle: b, Hello: &nodepb.Hello{NodeId: addr, Role: "decode", Vectors: rpc.VectorVersion},
		Vector: func(r *nodepb.Generate) []float32 { return rawVector(r.Prompt) },
	}
}

func rawVector(prompt []int32) []float32 {
	return []float32{float32(len(prompt)), float32(prompt[0]), -2, 0}
}

// unit is a vector of length 1.
func unit(v []float32) []float32 {
	sum := 0.0
	for _, f := range v {
		sum += float64(f) * float64(f)
	}
	out := slices.Clone(v)
	for i := range out {
		out[i] = float32(float64(out[i]) / math.Sqrt(sum))
	}
	return out
}

type embeddingList struct {
	ID, Object, Model string
	Created           int64
	Data              []struct {
		Index     int
		Object    string
		Embedding json.RawMessage
	}
	Usage struct {
		Prompt int `json:"prompt_tokens"`
		Total  int `json:"total_tokens"`
	}
}

// vectors are the embeddings of an answer, as lists or in base64.
func (r reply) vectors(t *testing.T) (list embeddingList, all [][]float32) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.body), &list); err != nil || r.StatusCode != 200 {
		t.Fatalf("%d %q: %v", r.StatusCode, r.body, err)
	}
	for i, d := range list.Data {
		var v []float32
		if d.Index != i || d.Object != "embedding" {
			t.Fatalf("%+v", d)
		}
		if d.Embedding[0] == '"' {
			raw, err := base64.StdEncoding.DecodeString(strings.Trim(string(d.Embedding), `"`))
			if err != nil {
				t.Fatal(err)
			}
			v = make([]float32, len(raw)/4)
			if err := binary.Read(bytes.NewReader(raw), binary.LittleEndian, v); err != nil {
				t.Fatal(err)
			}
		} else if err := json.Unmarshal(d.Embedding, &v); err != nil {
			t.Fatal(err)
		}
		all = append(all, v)
	}
	return list, all
}

func TestEmbeddings(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": vectorNode("a", nil)})
	abc := []int32{'a', 'b', 'c'}
	for body, want := range map[string][][]float32{
		`{"input":"abc"}`: {unit(rawVector(abc))},
		`{"input":[97,98,99],"model":"tiny","user":"u"}`: {unit(rawVector(abc))},
		`{"input":["abc","z"]}`:                          {unit(rawVector(abc)), unit(rawVector([]int32{'z'}))},
		`{"input":[[97,98,99],[122]]}`:                   {unit(rawVector(abc)), unit(rawVector([]int32{'z'}))},
		`{"input":"abc","encoding_format":"base64"}`:     {unit(rawVector(abc))},
		`{"input":"abc","encoding_format":"float"}`:      {unit(rawVector(abc))},
		`{"input":"abc","dimensions":2}`:                 {unit(rawVector(abc)[:2])},
		`{"input":"abc","dimensions":4,"endianness":"little","embed_dtype":"float32","padding":"do_not_pad"}`: {unit(rawVector(abc))},
		`{"input":"abc","normalize":false}`:                     {rawVector(abc)},
		`{"input":"abc","use_activation":false,"dimensions":3}`: {rawVector(abc)[:3]},
		`{"input":"abc","truncate_prompt_tokens":1}`:            {unit(rawVector([]int32{'c'}))},
	} {
		list, got := b.post("/v1/embeddings", body).vectors(t)
		if !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%s: %v, want %v", body, got, want)
		}
		if list.Object != "list" || list.Model != "tiny" || !strings.HasPrefix(list.ID, "embd-") || list.Created == 0 || list.Usage.Prompt == 0 || list.Usage.Total != list.Usage.Prompt {
			t.Errorf("%s: %+v", body, list)
		}
	}
	for _, r := range b.nodes["a"].Requests() {
		if r.MaxTokens != 0 || r.Pooling.GetKind() != nodepb.PoolingKind_POOLING_KIND_LAST || r.Pooling.Version != rpc.VectorVersion || r.Grammar != nil {
			t.Fatalf("%v", r)
		}
	}
	counted := map[string]bool{}
	for line := range strings.Lines(b.do("GET", "/metrics", "").body) {
		name, _, _ := strings.Cut(line, "{")
		switch {
		case strings.HasPrefix(line, "#") || strings.HasSuffix(line, " 0\n"):
		case name == "vllm:request_success_total" && !strings.Contains(line, `"stop"`) && !strings.Contains(line, `"length"`):
			t.Error(line)
		default:
			counted[name] = true
		}
	}
	for name, want := range map[string]bool{
		"vllm:request_success_total": true, "vllm:e2e_request_latency_seconds_count": true, "vllm:prompt_tokens_total": true,
		"vllm:time_to_first_token_seconds_count": false, "vllm:generation_tokens_total": false, "vllm:request_params_n_count": false,
	} {
		if counted[name] != want {
			t.Errorf("%s counted: %t, want %t", name, counted[name], want)
		}
	}
	// A model with an output projection gives tokens as well.
	if r := b.post("/v1/completions", `{"prompt":"abc"}`); r.StatusCode != 200 {
		t.Error(r.body)
	}
}

func TestEmbeddingsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*nodepb.Vectors)
		body   string
		status int
		param  string
		want   string
	}{
		"no input":         {nil, `{"model":"tiny"}`, 400, "input", "input is required"},
		"empty list":       {nil, `{"input":[]}`, 400, "input", "must not be empty"},
		"an object":        {nil, `{"input":{}}`, 400, "input", "a string, a list of strings, or token ids"},
		"a chat":           {nil, `{"messages":[{"role":"user","content":"x"}]}`, 400, "messages", "send input"},
		"unknown token":    {nil, `{"input":[258]}`, 400, "input", "258"},
		"empty text":       {nil, `{"input":""}`, 400, "input", "at least one token"},
		"format":           {nil, `{"input":"x","encoding_format":"bytes"}`, 400, "encoding_format", `"float" or "base64"`},
		"type":             {nil, `{"input":"x","embed_dtype":"float16"}`, 400, "embed_dtype", "base64 has float32"},
		"big endian":       {nil, `{"input":"x","endianness":"big"}`, 400, "endianness", "little-endian"},
		"no dimensions":    {nil, `{"input":"x","dimensions":0}`, 400, "dimensions", "at least 1"},
		"many dimensions":  {nil, `{"input":"x","dimensions":5}`, 400, "dimensions", "must be at most 4"},
		"whole":            {func(v *nodepb.Vectors) { v.Whole = true }, `{"input":"x","dimensions":2}`, 400, "dimensions", "does not support matryoshka representation"},
		"other dimensions": {func(v *nodepb.Vectors) { v.Dimensions = []uint32{1, 3} }, `{"input":"x","dimensions":2}`, 400, "dimensions", "only supports [1 3] matryoshka dimensions"},
		"other pooling":    {func(v *nodepb.Vectors) { v.Refused = "1_Pooling has cls" }, `{"input":"x"}`, 400, "model", "1_Pooling has cls"},
		"too many":         {nil, `{"input":[` + strings.Repeat(`"x",`, 2048) + `"x"]}`, 400, "input", "at most 2048"},
		"too large":        {func(v *nodepb.Vectors) { v.Size = 1 << 22 }, `{"input":["x","y"]}`, 400, "input", "send fewer inputs"},
		"too long":         {nil, `{"input":"` + strings.Repeat("x", 100001) + `"}`, 400, "input", "maximum context length is 100000 tokens"},
		"another model":    {nil, `{"input":"x","model":"luck"}`, 404, "model", "luck"},
		"not finite":       {func(v *nodepb.Vectors) { v.Size = 3 }, `{"input":"x"}`, 500, "", "not as many as the model has"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Options{}, map[string]nodestest.Options{"a": vectorNode("a", c.change)})
			r := b.post("/v1/embeddings", c.body)
			e := r.parse(t).Error
			if r.StatusCode != c.status || e == nil || !strings.Contains(e.Message, c.want) || (c.param != "") != (e.Param != nil) || e.Param != nil && *e.Param != c.param {
				t.Errorf("%d %s", r.StatusCode, r.body)
			}
		})
	}
}

// A prompt may be as long as the context.
func TestEmbeddingsFillTheContext(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": vectorNode("a", nil)})
	for _, body := range []string{
		`{"input":"` + strings.Repeat("x", 100000) + `"}`,
		`{"input":"` + strings.Repeat("x", 100009) + `","truncate_prompt_tokens":-1}`,
	} {
		if list, _ := b.post("/v1/embeddings", body).vectors(t); list.Usage.Prompt != 100000 {
			t.Errorf("%d tokens", list.Usage.Prompt)
		}
	}
}

// A model without an output projection gives no tokens.
func TestEmbeddingsOnly(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": vectorNode("a", func(v *nodepb.Vectors) { v.Only = true })})
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt":"x"}`, "/v1/chat/completions": `{"messages":[{"role":"user","content":"x"}]}`,
		"/v1/responses": `{"input":"x"}`, "/inference/v1/generate": `{"token_ids":[1],"sampling_params":{}}`,
		"/v1/messages": `{"max_tokens":3,"messages":[{"role":"user","content":"x"}]}`,
	} {
		if r := b.post(path, body); r.StatusCode != 400 || !strings.Contains(r.body, "gives vectors and no tokens") {
			t.Errorf("%s: %d %s", path, r.StatusCode, r.body)
		}
	}
	if _, v := b.post("/v1/embeddings", `{"input":"x"}`).vectors(t); len(v) != 1 {
		t.Error(v)
	}
}

// Only nodes that announce this version of vectors get requests for them.
func TestEmbeddingsByVersion(t *testing.T) {
	older := func(version uint32) nodestest.Options {
		o := vectorNode("old", nil)
		o.Hello.Vectors = version
		o.Vector = nil
		return o
	}
	b := newBed(t, Options{}, map[string]nodestest.Options{"old": older(0), "next": older(rpc.VectorVersion + 1), "a": vectorNode("a", nil)})
	for i := range 12 {
		if r := b.post("/v1/embeddings", fmt.Sprintf(`{"input":"text %d"}`, i)); r.StatusCode != 200 {
			t.Fatal(r.body)
		}
	}
	if n, m := len(b.nodes["old"].Requests()), len(b.nodes["next"].Requests()); n+m > 0 {
		t.Errorf("%d and %d requests at nodes of other versions", n, m)
	}
	b = newBed(t, Options{}, map[string]nodestest.Options{"old": older(0)})
	if r := b.post("/v1/embeddings", `{"input":"x"}`); r.StatusCode != 503 || !strings.Contains(r.body, "computes vectors of version 1: upgrade the nodes") || r.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if len(b.nodes["old"].Requests()) > 0 {
		t.Error("the older node got a request")
	}
}

// A model whose bundle came from a node of an older build has vectors once a newer node serves it.
func TestEmbeddingsAfterUpgrade(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"old": {}})
	if r := b.post("/v1/embeddings", `{"input":"x"}`); r.StatusCode != 503 {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	b.node("new", vectorNode("new", nil))
	for _, members := range [][]nodes.Member{{decodeMember("old"), decodeMember("new")}, {decodeMember("new")}} {
		b.g.SetMembers(members)
		b.until(func() bool { return b.post("/v1/embeddings", `{"input":"x"}`).StatusCode == 200 })
		if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 200 {
			t.Errorf("%d %s", r.StatusCode, r.body)
		}
	}
}

// At most a bounded number of a request's inputs run at once, and each is answered once, also where
// nodes fail.
func TestEmbeddingsOfManyInputs(t *testing.T) {
	var most, running, failures, lost atomic.Int64
	o := vectorNode("a", nil)
	o.Vector = func(r *nodepb.Generate) []float32 {
		for n := running.Add(1); ; {
			if m := most.Load(); n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		defer running.Add(-1)
		return rawVector(r.Prompt)
	}
	o.Leave = func(r *nodepb.Generate) nodepb.Code {
		if r.Attempt == 1 && r.Prompt[0] == 7 {
			failures.Add(1)
			return nodepb.Code_CODE_INTERNAL
		}
		return 0
	}
	o.Vanish = func(r *nodepb.Generate) bool { return lost.Add(1) == 60 }
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": o, "b": vectorNode("b", nil)})
	const inputs = 300
	var body strings.Builder
	for i := range inputs {
		fmt.Fprintf(&body, ",[%d,%d]", i%200, i/200)
	}
	list, got := b.post("/v1/embeddings", `{"normalize":false,"input":[`+body.String()[1:]+`]}`).vectors(t)
	if len(got) != inputs || list.Usage.Prompt != 2*inputs {
		t.Fatalf("%d vectors, %+v", len(got), list.Usage)
	}
	for i, v := range got {
		if !slices.Equal(v, rawVector([]int32{int32(i % 200), 0})) {
			t.Fatalf("input %d: %v", i, v)
		}
	}
	if n := most.Load(); n > 32 {
		t.Errorf("%d inputs ran at once", n)
	}
	if err := b.g.native.Queue.Check(false); err != nil {
		t.Error(err)
	}
}

// Frames that do not fit the request end it, and the node's other streams go on.
func TestEmbeddingsGarbled(t *testing.T) {
	o := vectorNode("a", nil)
	o.Vector = func(*nodepb.Generate) []float32 { return []float32{1, float32(math.NaN()), 0, 0} }
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": o})
	if r := b.post("/v1/embeddings", `{"input":"x"}`); r.StatusCode != 500 || !strings.Contains(r.body, "not finite") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// A client that goes ends the attempts of its request, and so does an abort.
func TestEmbeddingsAborted(t *testing.T) {
	gate := make(chan struct{})
	o := vectorNode("a", nil)
	o.Gate = gate
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": o})
	n := b.nodes["a"]
	c := b.dial()
	c.send("POST", "/v1/embeddings", `{"input":["x","y"]}`)
	b.until(func() bool { return n.Running() == 2 })
	c.Close()
	b.until(func() bool { return n.Running() == 0 && b.g.InFlight.Load() == 0 })
	c = b.dial()
	c.send("POST", "/v1/embeddings", `{"input":"x","request_id":"vectors-1"}`)
	b.until(func() bool { return n.Running() == 1 })
	if a := b.abort(`{"request_ids":["embd-vectors-1"]}`); a.Aborted != 1 {
		t.Errorf("%+v", a)
	}
	if r := c.receive(); r.StatusCode == 200 {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	c.Close()
	b.until(func() bool { return n.Running() == 0 && b.g.InFlight.Load() == 0 })
	c = b.dial()
	c.send("POST", "/pooling", `{"input":"x","request_id":"vectors-2"}`)
	b.until(func() bool { return n.Running() == 1 })
	if a := b.abort(`{"request_ids":["pooling-vectors-2"]}`); a.Aborted != 1 {
		t.Errorf("%+v", a)
	}
	c.Close()
	b.until(func() bool { return n.Running() == 0 && b.g.InFlight.Load() == 0 })
}
