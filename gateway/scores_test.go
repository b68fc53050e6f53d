package gateway

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// angleNode is a node whose vector of a text is at so many degrees as its first byte is above "a",
// and as long as the text.
func angleNode(addr string, change func(*nodepb.Vectors)) nodestest.Options {
	o := vectorNode(addr, func(v *nodepb.Vectors) {
		v.Size = 2
		if change != nil {
			change(v)
		}
	})
	o.Vector = func(r *nodepb.Generate) []float32 {
		sin, cos := math.Sincos(float64(r.Prompt[0]-'a') * math.Pi / 180)
		return []float32{float32(len(r.Prompt)) * float32(cos), float32(len(r.Prompt)) * float32(sin)}
	}
	return o
}

func TestScores(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": angleNode("a", nil)})
	degrees := func(list ...float64) []float64 { return list }
	for body, want := range map[string][]float64{
		`{"text_1":"a","text_2":"b"}`:                             degrees(1),
		`{"text_1":"a","text_2":["aaa","c","bb"]}`:                degrees(0, 2, 1),
		`{"text_1":["a","b"],"text_2":["c","c"]}`:                 degrees(2, 1),
		`{"data_1":"a","data_2":["b"],"model":"tiny"}`:            degrees(1),
		`{"queries":["a"],"documents":["d"]}`:                     degrees(3),
		`{"queries":"a","items":"d","priority":3}`:                degrees(3),
		`{"text_1":"a","text_2":"zb","truncate_prompt_tokens":1}`: degrees(1),
	} {
		for _, path := range []string{"/score", "/v1/score"} {
			r := b.post(path, body)
			var a struct {
				ID, Object, Model string
				Created           int64
				Data              []struct {
					Index  int
					Object string
					Score  float64
				}
				Usage struct {
					Prompt int `json:"prompt_tokens"`
				}
			}
			if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.StatusCode != 200 || a.Object != "list" || a.Model != "tiny" || !strings.HasPrefix(a.ID, "score-") || a.Usage.Prompt == 0 || a.Created == 0 {
				t.Fatalf("%s: %d %s: %v", body, r.StatusCode, r.body, err)
			}
			for i, d := range a.Data {
				if d.Index != i || d.Object != "score" || i >= len(want) || math.Abs(d.Score-math.Cos(want[i]*math.Pi/180)) > 1e-6 {
					t.Errorf("%s: %+v, want the cosine of %v degrees", body, a.Data, want)
				}
			}
			if len(a.Data) != len(want) {
				t.Errorf("%s: %d scores, want %d", body, len(a.Data), len(want))
			}
		}
	}
}

func TestRanks(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": angleNode("a", nil)})
	for body, want := range map[string][]int{
		`{"query":"a","documents":["d","b","c"]}`:                {1, 2, 0},
		`{"query":"a","documents":["d","b","c"],"top_n":2}`:      {1, 2},
		`{"query":"a","documents":["d","b","c"],"top_n":9}`:      {1, 2, 0},
		`{"query":"a","documents":["c","bb","c","b"],"top_n":0}`: {1, 3, 0, 2},
		`{"query":"a","documents":"b"}`:                          {0},
	} {
		for _, path := range []string{"/rerank", "/v1/rerank", "/v2/rerank"} {
			r := b.post(path, body)
			var a struct {
				ID, Model string
				Results   []struct {
					Index    int
					Document struct {
						Text       string
						MultiModal any `json:"multi_modal"`
					}
					Score float64 `json:"relevance_score"`
				}
			}
			if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.StatusCode != 200 || a.Model != "tiny" || !strings.HasPrefix(a.ID, "score-") {
				t.Fatalf("%s: %d %s: %v", body, r.StatusCode, r.body, err)
			}
			var got []int
			for i, d := range a.Results {
				got = append(got, d.Index)
				if i > 0 && d.Score > a.Results[i-1].Score || d.Document.Text == "" || d.Document.MultiModal != nil {
					t.Errorf("%s: %+v", body, a.Results)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", body, got, want)
			}
		}
	}
}

func TestScoresRefused(t *testing.T) {
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": angleNode("a", nil)})
	many := strings.Repeat(`"x",`, 2047) + `"x"`
	for name, c := range map[string]struct{ path, body, param, want string }{
		"nothing":       {"/score", `{}`, "text_1", "text_1 and text_2 are required"},
		"one text":      {"/score", `{"text_1":"x"}`, "text_1", "text_1 and text_2 are required"},
		"no element":    {"/score", `{"text_1":"x","text_2":[]}`, "text_2", "must not be empty"},
		"other lengths": {"/score", `{"text_1":["x","y"],"text_2":["x","y","z"]}`, "", "1:1, 1:N or N:N, not 2:3"},
		"twice":         {"/score", `{"text_1":"x","queries":"y","text_2":"z"}`, "queries", "exclude each other"},
		"an image":      {"/score", `{"text_1":"x","text_2":[{"content":[]}]}`, "text_2", "only text is scored"},
		"too many":      {"/score", `{"text_1":"x","text_2":[` + many + `]}`, "", "2049 texts"},
		"more":          {"/score", `{"text_1":"x","text_2":[` + many + `,"x"]}`, "text_2", "at most 2048"},
		"raw":           {"/score", `{"text_1":"x","text_2":"y","use_activation":false}`, "use_activation", "cosine"},
		"no query":      {"/rerank", `{"documents":["x"]}`, "query", "query is required"},
		"no documents":  {"/rerank", `{"query":"x"}`, "documents", "documents is required"},
		"top_n":         {"/rerank", `{"query":"x","documents":["x"],"top_n":-1}`, "top_n", "at least 0"},
		"empty text":    {"/rerank", `{"query":"","documents":["x"]}`, "", "at least one token"},
		"long text":     {"/rerank", `{"query":"x","documents":["` + strings.Repeat("x", 100001) + `"]}`, "", "maximum context length"},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.post(c.path, c.body)
			e := r.parse(t).Error
			if r.StatusCode != 400 || e == nil || !strings.Contains(e.Message, c.want) || (c.param != "") != (e.Param != nil) || e.Param != nil && *e.Param != c.param {
				t.Errorf("%d %.300s", r.StatusCode, r.body)
			}
		})
	}
	// A vector of zeros has no direction.
	zero := angleNode("z", nil)
	zero.Vector = func(*nodepb.Generate) []float32 { return make([]float32, 2) }
	b = newBed(t, Options{}, map[string]nodestest.Options{"z": zero})
	if r := b.post("/score", `{"text_1":"x","text_2":"y"}`); r.StatusCode != 200 || !strings.Contains(r.body, `"score":0}`) {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}

// Models that score pairs get the two texts as one prompt: by a template with their roles, or one
// behind the other.
func TestScoresOfPairs(t *testing.T) {
	const template = `{% for m in messages %}[{% if m.role == "query" %}Q{% elif m.role == "document" %}D{% endif %}:{{ m.content }}]{% endfor %}`
	for name, c := range map[string]struct {
		change   func(*nodepb.Vectors)
		template string
		kind     nodepb.PoolingKind
		tokens   []int32
		vector   []float32
		prompt   string
		logit    float64
	}{
		"two logits":   {func(v *nodepb.Vectors) { v.ScoreTokens, v.Refused = []int32{'y', 'n'}, "it scores" }, template, nodepb.PoolingKind_POOLING_KIND_LOGITS, []int32{'y', 'n'}, []float32{2.5, 1}, "[Q:ask][D:text]", 1.5},
		"one logit":    {func(v *nodepb.Vectors) { v.ScoreTokens = []int32{'y'} }, template, nodepb.PoolingKind_POOLING_KIND_LOGITS, []int32{'y'}, []float32{-1}, "[Q:ask][D:text]", -1},
		"a classifier": {func(v *nodepb.Vectors) { v.Labels, v.Only, v.Refused = 1, true, "it classifies" }, chatML, nodepb.PoolingKind_POOLING_KIND_SCORES, nil, []float32{3}, "asktext", 3},
	} {
		t.Run(name, func(t *testing.T) {
			o := vectorNode("a", c.change)
			o.Bundle.ChatTemplate = c.template
			o.Vector = func(*nodepb.Generate) []float32 { return c.vector }
			b := newBed(t, Options{}, map[string]nodestest.Options{"a": o})
			for activation, want := range map[string]float64{"": 1 / (1 + math.Exp(-c.logit)), `,"use_activation":true`: 1 / (1 + math.Exp(-c.logit)), `,"use_activation":false`: c.logit} {
				r := b.post("/score", `{"text_1":"ask","text_2":["text","text"]`+activation+`}`)
				var a struct{ Data []struct{ Score float64 } }
				if err := json.Unmarshal([]byte(r.body), &a); err != nil || len(a.Data) != 2 || math.Abs(a.Data[1].Score-want) > 1e-6 {
					t.Errorf("%s: %d %s, want %v: %v", activation, r.StatusCode, r.body, want, err)
				}
			}
			if r := b.post("/rerank", `{"query":"ask","documents":["text"]}`); r.StatusCode != 200 || !strings.Contains(r.body, `"text":"text"`) {
				t.Errorf("%d %s", r.StatusCode, r.body)
			}
			for _, g := range b.nodes["a"].Requests() {
				var prompt []byte
				for _, id := range g.Prompt {
					prompt = append(prompt, byte(id))
				}
				if string(prompt) != c.prompt || g.Pooling.Kind != c.kind || !slices.Equal(g.Pooling.Tokens, c.tokens) {
					t.Fatalf("%q, %v", prompt, g.Pooling)
				}
			}
			if r := b.post("/v1/embeddings", `{"input":"x"}`); c.kind == nodepb.PoolingKind_POOLING_KIND_SCORES && (r.StatusCode != 400 || !strings.Contains(r.body, "gives no vectors: it classifies")) {
				t.Errorf("%d %s", r.StatusCode, r.body)
			}
		})
	}
	b := newBed(t, Options{}, map[string]nodestest.Options{"a": vectorNode("a", func(v *nodepb.Vectors) { v.Labels, v.Only = 3, true })})
	if r := b.post("/score", `{"text_1":"x","text_2":"y"}`); r.StatusCode != 400 || !strings.Contains(r.body, "Score API is only enabled for num_labels == 1") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if r := b.post("/v1/completions", `{"prompt":"x"}`); r.StatusCode != 400 || !strings.Contains(r.body, "use /score or /rerank") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}
