package model

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
)

// vectorFolder is testdata/vectors/last with other keys in its config.json and other files.
func vectorFolder(t *testing.T, keys map[string]any, files map[string]string) (*Source, error) {
	t.Helper()
	all := fstest.MapFS{}
	for _, name := range []string{"config.json", "model.safetensors"} {
		data, err := os.ReadFile(filepath.Join("testdata/vectors/last", name))
		if err != nil {
			t.Fatal(err)
		}
		if name == "config.json" {
			var c map[string]any
			if err := json.Unmarshal(data, &c); err != nil {
				t.Fatal(err)
			}
			for k, v := range keys {
				c[k] = v
			}
			if data, err = json.Marshal(c); err != nil {
				t.Fatal(err)
			}
		}
		all[name] = &fstest.MapFile{Data: data}
	}
	for name, text := range files {
		all[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return OpenFS(all, "vectors")
}

const lastModules = `[{"path": "", "type": "sentence_transformers.models.Transformer"}, {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}`

func TestVectorsOfFolders(t *testing.T) {
	modules := func(more, pooling string) map[string]string {
		return map[string]string{"modules.json": lastModules + more + "]", "1_Pooling/config.json": pooling}
	}
	const normalize = `, {"type": "sentence_transformers.models.Normalize"}`
	for name, c := range map[string]struct {
		keys  map[string]any
		files map[string]string
		want  Vectors
		fails error
		says  string // of the error, or of Refused
	}{
		"no modules":           {want: Vectors{Size: 40, Only: true}},
		"last":                 {files: modules(normalize, `{"pooling_mode_lasttoken": true, "pooling_mode_cls_token": false}`), want: Vectors{Size: 40, Only: true}},
		"mean, not normalised": {files: modules("", `{"pooling_mode_mean_tokens": true, "include_prompt": true}`), want: Vectors{Size: 40, Only: true, Mean: true, Raw: true}},
		"later spelling": {
			files: map[string]string{
				"modules.json":    `[{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}, {"path": "p/q", "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}, {"type": "x.Normalize"}]`,
				"p/q/config.json": `{"pooling_mode": "mean"}`,
			},
			want: Vectors{Size: 40, Only: true, Mean: true},
		},
		"tokens too":          {keys: map[string]any{"architectures": []string{"Qwen3ForCausalLM"}}, want: Vectors{Size: 40}},
		"whole":               {keys: map[string]any{"is_matryoshka": false}, want: Vectors{Size: 40, Only: true, Whole: true}},
		"dimensions":          {keys: map[string]any{"matryoshka_dimensions": []int{8, 40}}, want: Vectors{Size: 40, Only: true, Dimensions: []int{8, 40}}},
		"prompts":             {files: map[string]string{"config_sentence_transformers.json": `{"prompts": {"query": "Q:", "document": ""}}`}, want: Vectors{Size: 40, Only: true, Prompts: map[string]string{"query": "Q:", "document": ""}}},
		"own prompts":         {keys: map[string]any{"task_instructions": map[string]string{"a": "b"}}, files: map[string]string{"config_sentence_transformers.json": `{"prompts": {"query": "Q:"}}`}, want: Vectors{Size: 40, Only: true, Prompts: map[string]string{"a": "b"}}},
		"long prompt":         {files: map[string]string{"config_sentence_transformers.json": `{"prompts": {"q": "` + strings.Repeat("x", 4096) + `"}}`}, fails: ErrConfig, says: "has 4096 bytes"},
		"prompts, no list":    {files: map[string]string{"config_sentence_transformers.json": `{"prompts": 1}`}, fails: ErrConfig, says: "config_sentence_transformers.json"},
		"first token":         {files: modules(normalize, `{"pooling_mode_cls_token": true}`), says: `pooling modes ["cls_token"]`},
		"two modes":           {files: modules(normalize, `{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}`), says: `["lasttoken" "mean_tokens"]`},
		"no mode":             {files: modules(normalize, `{}`), says: "pooling modes []"},
		"mean without prompt": {files: modules("", `{"pooling_mode_mean_tokens": true, "include_prompt": false}`), says: "include_prompt false"},
		"another module":      {files: modules(`, {"type": "sentence_transformers.models.Dense"}`, `{"pooling_mode_lasttoken": true}`), says: `"sentence_transformers.models.Dense"`},
		"too many dimensions": {keys: map[string]any{"matryoshka_dimensions": make([]int, 257)}, fails: ErrConfig, says: "has 257 numbers"},
		"dimension":           {keys: map[string]any{"matryoshka_dimensions": []int{41}}, fails: ErrConfig, says: "has 41, not between 1 and hidden_size 40"},
		"no list":             {files: map[string]string{"modules.json": `{}`}, fails: ErrConfig, says: "modules.json"},
		"many":                {files: map[string]string{"modules.json": "[" + strings.Repeat("{},", 16) + "{}]"}, fails: ErrConfig, says: "17 modules"},
		"no config":           {files: map[string]string{"modules.json": lastModules + "]"}, says: "1_Pooling/config.json"},
		"no object":           {files: modules("", "[]"), fails: ErrConfig, says: "1_Pooling/config.json"},
		"scores by logits": {
			files: map[string]string{"modules.json": `[{"type": "a.Transformer"}, {"path": "1_LogitScore", "type": "a.logit_score.LogitScore"}]`, "1_LogitScore/config.json": `{"true_token_id": 7, "false_token_id": 3}`},
			want:  Vectors{Size: 40, Only: true, Raw: true, ScoreTokens: []int32{7, 3}, Refused: "its module LogitScore scores pairs of texts"},
		},
		"scores by one logit": {
			files: map[string]string{"modules.json": `[{"path": "l", "type": "LogitScore"}]`, "l/config.json": `{"true_token_id": 7, "false_token_id": null}`},
			want:  Vectors{Size: 40, Only: true, Raw: true, ScoreTokens: []int32{7}, Refused: "its module LogitScore scores pairs of texts"},
		},
		"scores by nothing":  {files: map[string]string{"modules.json": `[{"path": "l", "type": "LogitScore"}]`, "l/config.json": `{}`}, fails: ErrConfig, says: "no true_token_id"},
		"scores by no token": {files: map[string]string{"modules.json": `[{"path": "l", "type": "LogitScore"}]`, "l/config.json": `{"true_token_id": 96}`}, fails: ErrConfig, says: "96 is outside the vocabulary of 96"},
		"a classifier":       {keys: map[string]any{"architectures": []string{"Qwen3ForSequenceClassification"}, "num_labels": 5}, want: Vectors{Size: 40, Only: true, Labels: 5, Refused: "it has a classifier, which scores pairs of texts"}},
		"names of labels":    {keys: map[string]any{"architectures": []string{"Qwen3ForSequenceClassification"}, "id2label": map[string]any{"0": "A"}}, want: Vectors{Size: 40, Only: true, Labels: 1, Refused: "it has a classifier, which scores pairs of texts"}},
		"labels by default":  {keys: map[string]any{"architectures": []string{"Qwen3ForSequenceClassification"}}, want: Vectors{Size: 40, Only: true, Labels: 2, Refused: "it has a classifier, which scores pairs of texts"}},
		"no labels":          {keys: map[string]any{"architectures": []string{"Qwen3ForSequenceClassification"}, "num_labels": 0}, fails: ErrConfig, says: "num_labels is 0"},
		"another folder":     {files: map[string]string{"modules.json": `[{"path": "../x", "type": "Pooling"}]`}, says: "x/config.json"},
		"sees all":           {keys: map[string]any{"is_causal": false}, fails: ErrUnsupported, says: "is_causal is false"},
		"an encoder":         {keys: map[string]any{"architectures": []string{"BertModel"}}, fails: ErrUnsupported, says: "architectures is BertModel"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := vectorFolder(t, c.keys, c.files)
			var b *Bundle
			if err == nil {
				b, err = s.Bundle()
			}
			switch {
			case err != nil && c.says != "" && strings.Contains(err.Error(), c.says) && (c.fails == nil || errors.Is(err, c.fails)):
			case err != nil || c.fails != nil:
				t.Errorf("%v, want %v %s", err, c.fails, c.says)
			case c.says != "" && !strings.Contains(b.Vectors.Refused, c.says):
				t.Errorf("refused because of %q, want %s", b.Vectors.Refused, c.says)
			case c.says == "" && !reflect.DeepEqual(b.Vectors, c.want):
				t.Errorf("%+v, want %+v", b.Vectors, c.want)
			}
		})
	}
}

// A model that was saved without its output projection has a fingerprint of its own, and does not
// need the projection.
func TestHeadless(t *testing.T) {
	whole, err := vectorFolder(t, map[string]any{"architectures": []string{"Qwen3ForCausalLM"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	part, err := vectorFolder(t, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := whole.Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	b, err := part.Fingerprint()
	if err != nil || a == b {
		t.Errorf("%x and %x, %v", a, b, err)
	}
	if untied := openCheckpoint(t, "vectors/mean"); !untied.Config.Headless || !untied.Config.TieEmbedding || untied.Config.Window != 37 {
		t.Errorf("%+v", untied.Config)
	}
}
