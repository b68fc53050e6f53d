package gateway

import (
	"encoding/base64"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

func TestPooling(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": vectorNode("a", nil)})
	var a struct {
		ID, Object, Model string
		Created           int64
		Data              []struct {
			Index  int
			Object string
			Data   []float32
		}
		Usage struct {
			Prompt int `json:"prompt_tokens"`
		}
	}
	r := b.post("/pooling", `{"input":["abc","z"],"task":"embed"}`)
	if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.StatusCode != 200 || a.Object != "list" || !strings.HasPrefix(a.ID, "pooling-") || a.Model != "tiny" || a.Created == 0 || a.Usage.Prompt != 4 {
		t.Fatalf("%d %s: %v", r.StatusCode, r.body, err)
	}
	for i, prompt := range [][]int32{{'a', 'b', 'c'}, {'z'}} {
		if d := a.Data[i]; d.Index != i || d.Object != "pooling" || !slices.Equal(d.Data, unit(rawVector(prompt))) {
			t.Errorf("%+v", d)
		}
	}
	if r := b.post("/pooling", `{"input":"abc","encoding_format":"base64","use_activation":false}`); r.StatusCode != 200 || !strings.Contains(r.body, `"data":"AABAQAAAwkIAAADAAAAAAA=="`) {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	for param, body := range map[string]string{
		"task": `{"input":"x","task":"token_embed"}`, "dimensions": `{"input":"x","dimensions":2}`, "input": `{}`,
	} {
		if e := b.post("/pooling", body).parse(t).Error; e == nil || e.Param == nil || *e.Param != param {
			t.Errorf("%s: %+v", body, e)
		}
	}
}

// wideNode gives the vector of eight numbers that grow from the prompt's first token on, every
// second one negative.
func wideNode(change func(*nodepb.Vectors)) nodestest.Options {
	o := vectorNode("a", func(v *nodepb.Vectors) {
		v.Size, v.Prompts = 8, map[string]string{"query": "Q:", "document": ""}
		if change != nil {
			change(v)
		}
	})
	o.Vector = func(r *nodepb.Generate) []float32 { return wideVector(r.Prompt[0]) }
	return o
}

func wideVector(first int32) (v []float32) {
	for i := range 8 {
		v = append(v, float32(first+int32(i))*float32(1-i%2*2))
	}
	return v
}

func TestEmbed(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": wideNode(nil)})
	type typed struct {
		ID         string
		Embeddings map[string]json.RawMessage
		Texts      []string
		Meta       struct {
			Version struct{ Version string } `json:"api_version"`
			Billed  struct {
				Tokens int `json:"input_tokens"`
			} `json:"billed_units"`
		}
		Type string `json:"response_type"`
	}
	embed := func(body string) (a typed) {
		t.Helper()
		r := b.post("/v2/embed", body)
		if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.StatusCode != 200 {
			t.Fatalf("%s: %d %s: %v", body, r.StatusCode, r.body, err)
		}
		return a
	}
	a := embed(`{"model":"tiny","texts":["abc","z"],"embedding_types":["float","base64","binary","ubinary","float"]}`)
	if !strings.HasPrefix(a.ID, "embd-") || !slices.Equal(a.Texts, []string{"abc", "z"}) || a.Meta.Version.Version != "2" || a.Meta.Billed.Tokens != 4 || a.Type != "embeddings_by_type" || len(a.Embeddings) != 4 {
		t.Errorf("%+v", a)
	}
	var floats [][]float32
	var base []string
	if err := json.Unmarshal(a.Embeddings["float"], &floats); err != nil || !slices.EqualFunc(floats, [][]float32{unit(wideVector('a')), unit(wideVector('z'))}, slices.Equal) {
		t.Errorf("%v %v", floats, err)
	}
	if err := json.Unmarshal(a.Embeddings["base64"], &base); err != nil || len(base) != 2 {
		t.Errorf("%v %v", base, err)
	} else if raw, err := base64.StdEncoding.DecodeString(base[1]); err != nil || len(raw) != 32 {
		t.Errorf("%d bytes, %v", len(raw), err)
	}
	if got := string(a.Embeddings["ubinary"]) + string(a.Embeddings["binary"]); got != "[[170],[170]][[42],[42]]" { // 10101010, less 128
		t.Error(got)
	}
	for body, want := range map[string]string{
		`{"texts":["abc"]}`:                                   "abc",
		`{"texts":["abc"],"input_type":"query"}`:              "Q:abc",
		`{"texts":["abc"],"input_type":"document"}`:           "abc",
		`{"texts":["abc"],"max_tokens":2}`:                    "ab",
		`{"texts":["abc"],"max_tokens":2,"truncate":"END"}`:   "ab",
		`{"texts":["abc"],"max_tokens":2,"truncate":"START"}`: "bc",
		`{"texts":["abc"],"max_tokens":3,"truncate":"NONE"}`:  "abc",
		`{"texts":["` + strings.Repeat("x", 100005) + `"]}`:   strings.Repeat("x", 100000),
		`{"texts":["abc"],"truncate":"START","priority":-1}`:  "abc",
	} {
		a := embed(body)
		all := b.nodes["a"].Requests()
		var prompt []byte
		for _, id := range all[len(all)-1].Prompt {
			prompt = append(prompt, byte(id))
		}
		if string(prompt) != want || len(a.Embeddings) != 1 || a.Embeddings["float"] == nil {
			t.Errorf("%.80s: prompt %.80q, want %.80q", body, prompt, want)
		}
	}
	var short struct {
		Embeddings struct{ Float [][]float32 }
	}
	if err := json.Unmarshal([]byte(b.post("/v2/embed", `{"texts":["a"],"output_dimension":2}`).body), &short); err != nil || !reflect.DeepEqual(short.Embeddings.Float, [][]float32{unit(wideVector('a')[:2])}) {
		t.Errorf("%v %v", short, err)
	}
	if length := math.Hypot(float64(short.Embeddings.Float[0][0]), float64(short.Embeddings.Float[0][1])); math.Abs(length-1) > 1e-6 {
		t.Error(length)
	}
}

func TestEmbedRefused(t *testing.T) {
	plain := wideNode(func(v *nodepb.Vectors) { v.Prompts = nil })
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": wideNode(nil)})
	other := newBed(t, Options{}, map[string]nodestest.Options{"a": plain})
	for name, c := range map[string]struct {
		b                 *bed
		body, param, want string
	}{
		"nothing":       {b, `{}`, "texts", "texts is required"},
		"no texts":      {b, `{"texts":[]}`, "texts", "must not be empty"},
		"an image":      {b, `{"texts":["x"],"images":["data:"]}`, "images", "only text"},
		"mixed inputs":  {b, `{"texts":["x"],"inputs":[{"content":[]}]}`, "inputs", "send texts"},
		"kind of texts": {b, `{"texts":["x"],"input_type":"clustering"}`, "input_type", `Unsupported input_type "clustering". Supported values: document, query`},
		"no kinds":      {other, `{"texts":["x"],"input_type":"query"}`, "input_type", "does not define any input_type task instructions"},
		"type":          {b, `{"texts":["x"],"embedding_types":["int8"]}`, "embedding_types", "must be one of float, base64, binary, ubinary"},
		"bits":          {b, `{"texts":["x"],"embedding_types":["binary"],"output_dimension":4}`, "embedding_types", "multiple of 8 for binary embedding types, but got 4"},
		"dimension":     {b, `{"texts":["x"],"output_dimension":9}`, "output_dimension", "must be at most 8"},
		"truncate":      {b, `{"texts":["x"],"truncate":"MIDDLE"}`, "truncate", `"NONE", "START" or "END"`},
		"too long":      {b, `{"texts":["abc"],"truncate":"NONE","max_tokens":2}`, "texts", "Input of 3 tokens exceeds max_tokens=2 with truncate=NONE"},
		"context":       {b, `{"texts":["` + strings.Repeat("x", 100001) + `"],"truncate":"NONE"}`, "texts", "maximum context length"},
	} {
		r := c.b.post("/v2/embed", c.body)
		e := r.parse(t).Error
		if r.StatusCode != 400 || e == nil || !strings.Contains(e.Message, c.want) || e.Param == nil || *e.Param != c.param {
			t.Errorf("%s: %d %.300s", name, r.StatusCode, r.body)
		}
	}
}

// A tokenizer's special tokens behind a text stay where the text's end is cut, because many models'
// vectors are those of their last token.
func TestTruncationKeepsSpecialTokens(t *testing.T) {
	o := wideNode(nil)
	var tokenizer map[string]any
	if err := json.Unmarshal(o.Bundle.TokenizerJson, &tokenizer); err != nil {
		t.Fatal(err)
	}
	tokenizer["post_processor"] = map[string]any{
		"type":           "TemplateProcessing",
		"single":         []any{map[string]any{"Sequence": map[string]any{"id": "A", "type_id": 0}}, map[string]any{"SpecialToken": map[string]any{"id": "<|im_end|>", "type_id": 0}}},
		"pair":           []any{},
		"special_tokens": map[string]any{"<|im_end|>": map[string]any{"id": "<|im_end|>", "ids": []int{eosID}, "tokens": []string{"<|im_end|>"}}},
	}
	var err error
	if o.Bundle.TokenizerJson, err = json.Marshal(tokenizer); err != nil {
		t.Fatal(err)
	}
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": o})
	for body, want := range map[string][]int32{
		`{"texts":["abcd"],"max_tokens":3}`:                    {'a', 'b', eosID},
		`{"texts":["abcd"],"max_tokens":3,"truncate":"START"}`: {'c', 'd', eosID},
		`{"texts":["ab"],"max_tokens":3}`:                      {'a', 'b', eosID},
		`{"texts":["abcd"],"max_tokens":1}`:                    {'a'},
	} {
		if r := b.post("/v2/embed", body); r.StatusCode != 200 {
			t.Fatal(r.body)
		}
		if all := b.nodes["a"].Requests(); !slices.Equal(all[len(all)-1].Prompt, want) {
			t.Errorf("%s: %v, want %v", body, all[len(all)-1].Prompt, want)
		}
	}
}
