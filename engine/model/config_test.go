package model

import (
	"errors"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

const tinyConfig = `{"architectures":["LlamaForCausalLM"],"vocab_size":100,"hidden_size":32,"num_hidden_layers":2,
	"num_attention_heads":4,"intermediate_size":48}`

func TestConfigDefaults(t *testing.T) {
	got, err := parseConfig([]byte(tinyConfig), nil)
	want := Config{
		Architecture: "LlamaForCausalLM", Vocab: 100, Hidden: 32, Layers: 2, Heads: 4, KVHeads: 4, HeadDim: 8, FFN: 48,
		Eps: 1e-6, Rope: RopeConfig{Theta: 10000, Type: "default"}, MaxPositions: 2048, BOS: -1,
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("parseConfig = %+v, %v\nwant %+v", got, err, want)
	}
}

func TestConfigSpellings(t *testing.T) {
	parse := func(keys map[string]any, generation string) Config {
		t.Helper()
		var g []byte
		if generation != "" {
			g = []byte(generation)
		}
		c, err := parseConfig(withKeys(t, []byte(tinyConfig), keys), g)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	scaling := func(more map[string]any) map[string]any {
		m := map[string]any{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
		for k, v := range more {
			m[k] = v
			if v == absent {
				delete(m, k)
			}
		}
		return m
	}
	want := RopeConfig{Theta: 500000, Type: "llama3", Factor: 32, LowFreq: 1, HighFreq: 4, Original: 8192}
	for name, keys := range map[string]map[string]any{
		"rope_scaling":            {"rope_theta": 500000.0, "rope_scaling": scaling(nil)},
		"rope_scaling, type":      {"rope_theta": 500000.0, "rope_scaling": scaling(map[string]any{"rope_type": absent, "type": "llama3"})},
		"rope_scaling, both":      {"rope_theta": 500000.0, "rope_scaling": scaling(map[string]any{"type": "llama3"})},
		"rope_parameters":         {"rope_parameters": scaling(map[string]any{"rope_theta": 500000.0})},
		"rope_parameters, theta":  {"rope_theta": 500000.0, "rope_parameters": scaling(nil)},
		"rope_parameters, twice":  {"rope_theta": 1.5, "rope_scaling": nil, "rope_parameters": scaling(map[string]any{"rope_theta": 500000.0})},
		"whole rotation, spelled": {"rope_theta": 500000.0, "rope_scaling": scaling(map[string]any{"partial_rotary_factor": 1.0})},
	} {
		if got := parse(keys, "").Rope; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	if got := parse(map[string]any{"rope_scaling": nil, "rope_theta": 7000.0}, "").Rope; !reflect.DeepEqual(got, RopeConfig{Theta: 7000, Type: "default"}) {
		t.Errorf("null rope_scaling: %+v", got)
	}
	for name, c := range map[string]struct {
		keys       map[string]any
		generation string
		want       []int32
	}{
		"number":              {map[string]any{"eos_token_id": 7}, "", []int32{7}},
		"list":                {map[string]any{"eos_token_id": []int{7, 9}}, "", []int32{7, 9}},
		"null":                {map[string]any{"eos_token_id": nil}, "", nil},
		"generation wins":     {map[string]any{"eos_token_id": 7}, `{"eos_token_id":[8,9]}`, []int32{8, 9}},
		"generation has none": {map[string]any{"eos_token_id": 7}, `{"temperature":1}`, []int32{7}},
	} {
		if got := parse(c.keys, c.generation).EOS; !slices.Equal(got, c.want) {
			t.Errorf("%s: eos %v, want %v", name, got, c.want)
		}
	}
	if c := parse(map[string]any{"torch_dtype": "torch.bfloat16", "bos_token_id": 3}, ""); c.DType != "bfloat16" || c.BOS != 3 {
		t.Errorf("torch_dtype, bos: %+v", c)
	}
	if c := parse(map[string]any{"head_dim": 6, "num_key_value_heads": 2, "dtype": "float32"}, ""); c.HeadDim != 6 || c.KVHeads != 2 || c.DType != "float32" {
		t.Errorf("head_dim, kv heads: %+v", c)
	}
}

func TestConfigRefuses(t *testing.T) {
	rope := func(more ...any) map[string]any {
		m := map[string]any{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
		for i := 0; i < len(more); i += 2 {
			m[more[i].(string)] = more[i+1]
		}
		return map[string]any{"rope_scaling": m}
	}
	for says, c := range map[string]struct {
		keys map[string]any
		want error
	}{
		`architectures is MambaForCausalLM; supported: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Gemma`:                                             {map[string]any{"architectures": []string{"MambaForCausalLM"}}, ErrUnsupported},
		`architectures is Llama4ForConditionalGeneration; supported: of multimodal models only the text part of Gemma3ForConditionalGeneration, Gemma4`: {map[string]any{"architectures": []string{"Llama4ForConditionalGeneration"}}, ErrUnsupported},
		`Gemma4ForConditionalGeneration without a text_config`:                                                                                          {map[string]any{"architectures": []string{"Gemma4ForConditionalGeneration"}}, ErrConfig},
		`scoring_func is softmax; supported: sigmoid`:                                                                                                   {map[string]any{"architectures": []string{deepseekName}, "scoring_func": "softmax"}, ErrUnsupported},
		`num_experts_per_tok 8 out of the best topk_group 1 of n_group 64`:                                                                              {map[string]any{"architectures": []string{deepseekName}, "topk_group": 1, "n_group": 64}, ErrConfig},
		`n_group 7, of 256 experts`:                                      {map[string]any{"architectures": []string{deepseekName}, "n_group": 7}, ErrConfig},
		`qk_rope_head_dim 5 is odd`:                                      {map[string]any{"architectures": []string{deepseekName}, "qk_rope_head_dim": 5}, ErrConfig},
		`kv_lora_rank is 0`:                                              {map[string]any{"architectures": []string{deepseekName}, "kv_lora_rank": 0}, ErrConfig},
		`architectures is []`:                                            {map[string]any{"architectures": absent}, ErrConfig},
		`hidden_act is gelu; supported: silu`:                            {map[string]any{"hidden_act": "gelu"}, ErrUnsupported},
		`quantization_config is bitsandbytes`:                            {map[string]any{"quantization_config": map[string]any{"quant_method": "bitsandbytes", "bits": 4}}, ErrUnsupported},
		`quantization_config is {"bits":4}`:                              {map[string]any{"quantization_config": map[string]any{"bits": 4}}, ErrUnsupported},
		`rope_type is "ntk"; supported: default, dynamic`:                {rope("rope_type", "ntk"), ErrUnsupported},
		`rope_scaling has "high_freq_factor", which rope_type yarn does`: {rope("rope_type", "yarn"), ErrUnsupported},
		`model_type is mamba; supported: without architectures`:          {map[string]any{"architectures": absent, "model_type": "mamba"}, ErrUnsupported},
		`rope_scaling has "beta_fast"`:                                   {rope("beta_fast", 32), ErrUnsupported},
		`rope_parameters has "full_attention"`:                           {map[string]any{"rope_parameters": map[string]any{"full_attention": map[string]any{}}}, ErrUnsupported},
		`partial_rotary_factor is 0.5`:                                   {rope("partial_rotary_factor", 0.5), ErrUnsupported},
		`high_freq_factor 0.5`:                                           {rope("high_freq_factor", 0.5), ErrConfig},
		`factor 0,`:                                                      {rope("factor", 0), ErrConfig},
		`rope_theta is -1`:                                               {map[string]any{"rope_theta": -1}, ErrConfig},
		`factor: json`:                                                   {rope("factor", "eight"), ErrConfig},
		`vocab_size is 0`:                                                {map[string]any{"vocab_size": absent}, ErrConfig},
		`hidden_size is -32`:                                             {map[string]any{"hidden_size": -32}, ErrConfig},
		`intermediate_size is 1099511627776`:                             {map[string]any{"intermediate_size": 1 << 40}, ErrConfig},
		`num_hidden_layers is 100000, at most`:                           {map[string]any{"num_hidden_layers": 100000}, ErrConfig},
		`head_dim is 0`:                                                  {map[string]any{"head_dim": 0}, ErrConfig},
		`head_dim 7 is odd`:                                              {map[string]any{"head_dim": 7}, ErrConfig},
		`hidden_size 33 is no multiple`:                                  {map[string]any{"hidden_size": 33}, ErrConfig},
		`is no multiple of num_key_value_heads 3`:                        {map[string]any{"num_key_value_heads": 3}, ErrConfig},
		`num_attention_heads is 0`:                                       {map[string]any{"num_attention_heads": 0}, ErrConfig},
		`rms_norm_eps is 0`:                                              {map[string]any{"rms_norm_eps": 0}, ErrConfig},
		`token id 100 is outside the vocabulary`:                         {map[string]any{"eos_token_id": 100}, ErrConfig},
		`token id 1000 is outside the vocabulary`:                        {map[string]any{"bos_token_id": 1000}, ErrConfig},
		`cannot unmarshal string`:                                        {map[string]any{"eos_token_id": "</s>"}, ErrConfig},
		`cannot unmarshal string into Go struct field`:                   {map[string]any{"vocab_size": "many"}, ErrConfig},
	} {
		_, err := parseConfig(withKeys(t, []byte(tinyConfig), c.keys), nil)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want %v with %q", err, c.want, says)
		}
	}
	if _, err := parseConfig([]byte("{"), nil); !errors.Is(err, ErrConfig) {
		t.Errorf("cut: err = %v", err)
	}
	if _, err := parseConfig([]byte(tinyConfig), []byte("[]")); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "generation_config.json") {
		t.Errorf("bad generation config: err = %v", err)
	}
}

// What architectures have beside the common keys, with the defaults that
// transformers gives them.
func TestConfigArchitectures(t *testing.T) {
	parse := func(name string, keys map[string]any) (Config, error) {
		all := map[string]any{"architectures": []string{name}, "num_attention_heads": 32, "hidden_size": 64}
		maps.Copy(all, keys)
		return parseConfig(withKeys(t, []byte(tinyConfig), all), nil)
	}
	moe := MoEConfig{Experts: 128, TopK: 8, FFN: 768, Every: 1}
	for name, c := range map[string]struct {
		architecture string
		keys         map[string]any
		want         func(c *Config) bool
	}{
		"mistral, default": {"MistralForCausalLM", nil, func(c *Config) bool { return c.Window == 4096 && c.KVHeads == 8 && c.HeadDim == 2 }},
		"mistral, null":    {"MistralForCausalLM", map[string]any{"sliding_window": nil}, func(c *Config) bool { return c.Window == 0 }},
		"mistral, window":  {"MistralForCausalLM", map[string]any{"sliding_window": 7}, func(c *Config) bool { return c.Window == 7 }},
		"llama has none":   {"LlamaForCausalLM", map[string]any{"sliding_window": 7}, func(c *Config) bool { return c.Window == 0 }},
		"qwen3":            {"Qwen3ForCausalLM", map[string]any{"sliding_window": 7}, func(c *Config) bool { return c.Window == 0 && c.HeadDim == 128 && c.KVHeads == 32 }},
		"qwen3, windows":   {"Qwen3ForCausalLM", map[string]any{"sliding_window": 7, "use_sliding_window": true, "max_window_layers": 1}, func(c *Config) bool { return c.window(0) == 0 && c.window(1) == 7 }},
		"qwen3, yarn":      {"Qwen3ForCausalLM", map[string]any{"max_position_embeddings": 1000, "rope_scaling": map[string]any{"rope_type": "yarn", "factor": 4.0}}, func(c *Config) bool { return c.MaxPositions == 4000 && c.Rope.Original == 1000 }},
		"linear":           {"LlamaForCausalLM", map[string]any{"rope_scaling": map[string]any{"type": "linear", "factor": 2.0}}, func(c *Config) bool { return c.MaxPositions == 4096 && c.Rope.Type == "linear" }},
		"dynamic":          {"LlamaForCausalLM", map[string]any{"rope_scaling": map[string]any{"type": "dynamic", "factor": 2.0}}, func(c *Config) bool { return c.MaxPositions == 4096 && c.Rope.Stretched && c.Rope.Original == 2048 }},
		"llama, biases": {"LlamaForCausalLM", map[string]any{"attention_bias": true, "mlp_bias": true}, func(c *Config) bool {
			return reflect.DeepEqual(c.Features, Features{QKVBias: true, OutputBias: true, MLPBias: true})
		}},
		"model_type alone":  {"", map[string]any{"architectures": absent, "model_type": "qwen2"}, func(c *Config) bool { return c.Architecture == "Qwen2ForCausalLM" }},
		"qwen3, layers":     {"Qwen3ForCausalLM", map[string]any{"layer_types": []string{"full_attention", "full_attention"}}, func(c *Config) bool { return c.MoE.Experts == 0 }},
		"qwen3-moe":         {"Qwen3MoeForCausalLM", nil, func(c *Config) bool { return reflect.DeepEqual(c.MoE, moe) && c.KVHeads == 4 }},
		"qwen3-moe, new":    {"Qwen3MoeForCausalLM", map[string]any{"num_local_experts": 16}, func(c *Config) bool { return c.MoE.Experts == 16 }},
		"qwen3-moe, both":   {"Qwen3MoeForCausalLM", map[string]any{"num_local_experts": 16, "num_experts": 32}, func(c *Config) bool { return c.MoE.Experts == 32 }},
		"qwen3-moe, sparse": {"Qwen3MoeForCausalLM", map[string]any{"decoder_sparse_step": 2, "mlp_only_layers": []int{3}}, func(c *Config) bool { return !c.MoE.layer(0) && c.MoE.layer(1) && !c.MoE.layer(3) && c.MoE.layer(5) }},
	} {
		if got, err := parse(c.architecture, c.keys); err != nil || !c.want(&got) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for says, c := range map[string]struct {
		architecture string
		keys         map[string]any
		want         error
	}{
		`sliding_window is 0`:                                               {"MistralForCausalLM", map[string]any{"sliding_window": 0}, ErrConfig},
		`sliding_window: json`:                                              {"MistralForCausalLM", map[string]any{"sliding_window": "all"}, ErrConfig},
		`1 layer_types for 2 layers`:                                        {"MistralForCausalLM", map[string]any{"layer_types": []string{"full_attention"}}, ErrConfig},
		`sliding_window is -1, not`:                                         {"Qwen3ForCausalLM", map[string]any{"use_sliding_window": true, "sliding_window": -1}, ErrConfig},
		`linear_conv_kernel_dim is 3; supported: 4`:                         {"Qwen3NextForCausalLM", map[string]any{"linear_conv_kernel_dim": 3}, ErrUnsupported},
		`attn_output_gate is false`:                                         {"Qwen3_5ForCausalLM", map[string]any{"attn_output_gate": false}, ErrUnsupported},
		`attention_bias is true`:                                            {"Qwen3_5MoeForCausalLM", map[string]any{"attention_bias": true}, ErrUnsupported},
		`layer_types is mamba`:                                              {"Qwen3NextForCausalLM", map[string]any{"layer_types": []string{"mamba", "full_attention"}}, ErrUnsupported},
		`linear_attention in every layer`:                                   {"Qwen3_5ForCausalLM", map[string]any{"layer_types": []string{"linear_attention", "linear_attention"}}, ErrUnsupported},
		`linear_attention in every layer; `:                                 {"Qwen3_5ForCausalLM", map[string]any{}, ErrUnsupported},
		`full_attention_interval 0`:                                         {"Qwen3_5ForCausalLM", map[string]any{"full_attention_interval": 0}, ErrConfig},
		`16 linear_num_key_heads of 128 columns, 24 linear_num_value_heads`: {"Qwen3NextForCausalLM", map[string]any{"linear_num_value_heads": 24}, ErrConfig},
		`16 linear_num_key_heads of 513 columns`:                            {"Qwen3NextForCausalLM", map[string]any{"linear_key_head_dim": 513}, ErrConfig},
		`-1 linear_num_key_heads`:                                           {"Qwen3NextForCausalLM", map[string]any{"linear_num_key_heads": -1}, ErrConfig},
		`supported: full_attention`:                                         {"Qwen3MoeForCausalLM", map[string]any{"layer_types": []string{"sliding_attention"}}, ErrUnsupported},
		`yarn with factor 0.5`:                                              {"Qwen3ForCausalLM", map[string]any{"rope_scaling": map[string]any{"rope_type": "yarn", "factor": 0.5}}, ErrConfig},
		`num_experts_per_tok is 9`:                                          {"Qwen3MoeForCausalLM", map[string]any{"num_experts": 8, "num_experts_per_tok": 9}, ErrConfig},
		`num_experts 1000000`:                                               {"Qwen3MoeForCausalLM", map[string]any{"num_experts": 1000000}, ErrConfig},
		`129 layers of 1024 experts, at most 131072 experts in all`:         {"Qwen3MoeForCausalLM", map[string]any{"num_experts": 1024, "num_hidden_layers": 129}, ErrConfig},
		`moe_intermediate_size is 0`:                                        {"Qwen3MoeForCausalLM", map[string]any{"moe_intermediate_size": 0}, ErrConfig},
		`decoder_sparse_step is 0, not`:                                     {"Qwen3MoeForCausalLM", map[string]any{"decoder_sparse_step": 0}, ErrConfig},
		`num_key_value_heads is 0, not bet`:                                 {"Qwen3MoeForCausalLM", map[string]any{"num_key_value_heads": 0}, ErrConfig},
	} {
		if _, err := parse(c.architecture, c.keys); !errors.Is(err, c.want) || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want %v with %q", err, c.want, says)
		}
	}
}

// Scaled frequencies: unchanged where fast, divided where slow, between where
// between, and in order.
func TestLlama3Frequencies(t *testing.T) {
	c := RopeConfig{Theta: 500000, Type: "llama3", Factor: 8, LowFreq: 1, HighFreq: 4, Original: 8192}
	plain := RopeConfig{Theta: 500000, Type: "default"}
	got, want := c.table(128), plain.table(128)
	var kept, mixed, divided int
	for i, f := range got.InvFreq {
		base := float64(want.InvFreq[i])
		if exact := math.Pow(500000, -float64(2*i)/128); math.Abs(base-exact) > 2e-7*exact {
			t.Fatalf("frequency %d is %g, want %g", i, base, exact)
		}
		switch wavelength := 2 * math.Pi / base; {
		case wavelength < 8192/4:
			kept++
			if float64(f) != base {
				t.Errorf("frequency %d changed", i)
			}
		case wavelength > 8192:
			divided++
			if math.Abs(float64(f)-base/8) > 2e-7*base {
				t.Errorf("frequency %d is %g, want %g", i, f, base/8)
			}
		default:
			mixed++
			if float64(f) <= base/8 || float64(f) >= base {
				t.Errorf("frequency %d is %g, outside (%g, %g)", i, f, base/8, base)
			}
		}
		if i > 0 && f >= got.InvFreq[i-1] {
			t.Errorf("frequency %d is not below the one before", i)
		}
	}
	if kept == 0 || mixed == 0 || divided == 0 || got.Scale != 1 {
		t.Errorf("%d kept, %d mixed, %d divided, scale %v", kept, mixed, divided, got.Scale)
	}
}

// No config makes the parser panic, and what it accepts can be planned for.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(tinyConfig), []byte(`{"eos_token_id":[1,2],"top_p":0.9}`))
	f.Add([]byte(`{"architectures":["LlamaForCausalLM"],"rope_parameters":{"rope_type":"llama3","factor":8}}`), []byte(`{}`))
	f.Add([]byte(`{"architectures":["MistralForCausalLM"],"sliding_window":1}`), []byte(`{}`))
	f.Add([]byte(`{"architectures":["Qwen3MoeForCausalLM"],"num_experts":4,"num_experts_per_tok":2,"mlp_only_layers":[-1]}`), []byte(`{}`))
	for name := range architectures {
		f.Add([]byte(`{"architectures":["`+name+`"],"vocab_size":100,"hidden_size":32,"num_hidden_layers":2,"num_attention_heads":4,"intermediate_size":48,"num_local_experts":4,
			"num_experts_per_tok":2,"layer_types":["attention","attention"],"partial_rotary_factor":0.5,"rope_scaling":{"rope_type":"dynamic","factor":2}}`), []byte(`{}`))
	}
	f.Add([]byte(`{"architectures":["Qwen3VLForConditionalGeneration"],"text_config":{"model_type":"qwen3_vl_text"}}`), []byte(`{}`))
	f.Add([]byte(`{"architectures":["X"],"eos_token_id":[],"quantization_config":{}}`), []byte(`null`))
	f.Fuzz(func(t *testing.T, text, generation []byte) {
		c, err := parseConfig(text, generation)
		if err != nil {
			if !errors.Is(err, ErrConfig) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("err = %v", err)
			}
			return
		}
		if c.StepBytes(testLimits) <= 0 || len(c.KVLayers()) == 0 || c.Heads%c.KVHeads != 0 {
			t.Fatalf("accepted %+v", c)
		}
		for _, inv := range c.Rope.table(min(c.HeadDim, 1024)).InvFreq {
			if !(inv >= 0 && inv <= 1) {
				t.Fatalf("accepted %+v with inverse frequency %v", c, inv)
			}
		}
	})
}

func TestOpenRefuses(t *testing.T) {
	if _, err := OpenDir(filepath.Join(t.TempDir(), "none")); !errors.Is(err, ErrSource) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: err = %v", err)
	}
	if _, err := OpenDir("config_test.go"); !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "config.json") {
		t.Errorf("a file: err = %v", err)
	}
	if _, err := OpenDir(t.TempDir()); !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "no config.json") {
		t.Errorf("an empty folder: err = %v", err)
	}
	src := openCheckpoint(t, "mha")
	if src.Name != "mha" {
		t.Errorf("name %q", src.Name)
	}
	if _, err := src.ReadFile("tokenizer.json"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no such file: err = %v", err)
	}
	if _, err := src.ReadFile("../headdim/config.json"); err == nil {
		t.Error("ReadFile left the folder")
	}
	if n, err := src.WeightBytes(AsStored); err != nil || n != 509184 {
		t.Errorf("WeightBytes = %d, %v", n, err)
	}
}

func TestBundle(t *testing.T) {
	open := func(files map[string]string) (*Bundle, error) {
		t.Helper()
		m := fstest.MapFS{"config.json": {Data: []byte(tinyConfig)}}
		for name, text := range files {
			m[name] = &fstest.MapFile{Data: []byte(text)}
		}
		src, err := OpenFS(m, "tiny")
		if err != nil {
			t.Fatal(err)
		}
		return src.Bundle()
	}
	temperature, topP, topK := float32(0.6), float32(0.9), int32(20)
	for name, c := range map[string]struct {
		files map[string]string
		want  Bundle
	}{
		"nothing": {nil, Bundle{}},
		"strings": {map[string]string{
			"tokenizer.json":         `{"model":{}}`,
			"tokenizer_config.json":  `{"chat_template":"T","bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false}}`,
			"generation_config.json": `{"temperature":0.6,"top_p":0.9,"top_k":20,"eos_token_id":[5,6]}`,
		}, Bundle{TokenizerJSON: []byte(`{"model":{}}`), ChatTemplate: "T", BosToken: "<s>", EosToken: "</s>", EOSTokenIDs: []int32{5, 6},
			Defaults: Defaults{Temperature: &temperature, TopP: &topP, TopK: &topK}}},
		"named templates": {map[string]string{
			"tokenizer_config.json": `{"chat_template":[{"name":"tool_use","template":"A"},{"name":"default","template":"B"}],"bos_token":null}`,
		}, Bundle{ChatTemplate: "B"}},
		"a file wins": {map[string]string{
			"tokenizer_config.json":   `{"chat_template":"T","eos_token":"a"}`,
			"chat_template.jinja":     "J",
			"special_tokens_map.json": `{"eos_token":"b","bos_token":{"content":"c"}}`,
		}, Bundle{ChatTemplate: "J", EosToken: "a", BosToken: "c"}},
	} {
		got, err := open(c.files)
		c.want.ModelName, c.want.MaxModelLen, c.want.VocabSize, c.want.Vectors = "tiny", 2048, 100, Vectors{Size: 32}
		if err != nil || !reflect.DeepEqual(*got, c.want) {
			t.Errorf("%s: %+v, %v\nwant %+v", name, got, err, c.want)
		}
	}
	for says, files := range map[string]map[string]string{
		`without one called "default"`: {"tokenizer_config.json": `{"chat_template":[{"name":"tool_use","template":"A"}]}`},
		"tokenizer_config.json":        {"tokenizer_config.json": `{"chat_template":7}`},
		"temperature is -1":            {"generation_config.json": `{"temperature":-1}`},
		"top_p is 1.5":                 {"generation_config.json": `{"top_p":1.5}`},
		"top_k is -2":                  {"generation_config.json": `{"top_k":-2}`},
	} {
		if _, err := open(files); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want ErrConfig with %q", err, says)
		}
	}
	folder := fstest.MapFS{"tokenizer_config.json": {Data: []byte(`{"chat_template":"T","bos_token":"<s>"}`)}}
	if _, err := ReadTokenizer(folder); !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "tokenizer.json") {
		t.Errorf("no tokenizer: err = %v, want ErrSource", err)
	}
	folder["tokenizer.json"] = &fstest.MapFile{Data: []byte(`{}`)}
	if b, err := ReadTokenizer(folder); err != nil || !reflect.DeepEqual(*b, Bundle{TokenizerJSON: []byte(`{}`), ChatTemplate: "T", BosToken: "<s>"}) {
		t.Errorf("a tokenizer alone: %+v, %v", b, err)
	}
}

// The parts of all states are bounded, because planning takes time in proportion to their square. A
// published model has as many as its attention layers allow.
func TestStateParts(t *testing.T) {
	for _, c := range []struct{ layers, interval, heads, parts int }{{48, 4, 16, 8}, {maxLayers, 2, 512, 2}, {maxLayers, maxLayers, 512, 1}} {
		d := &deltaConfig{KeyHeads: c.heads}
		for i := range c.layers {
			d.Layers = append(d.Layers, (i+1)%c.interval != 0)
		}
		if got := d.parts(); got != c.parts {
			t.Errorf("%d layers, of which each %dth has attention: %d parts, want %d", c.layers, c.interval, got, c.parts)
		}
	}
}
