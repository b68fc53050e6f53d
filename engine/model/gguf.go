package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/gguf"
	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// A GGUF file is read as the folder that it was converted from: its metadata become config.json,
// tokenizer.json and chat_template.jinja, and its tensors get the names of transformers. Blocks of
// 4 to 8 bits stay integers, or are expanded to float32 as they are loaded.

// ggufArchitecture is how the files of one general.architecture are read.
type ggufArchitecture struct {
	name   string // in architectures
	paired bool   // see Config.Paired
	also   func(*ggufFile, map[string]any) error
}

// ggufArchitectures are the values of general.architecture that are read.
var ggufArchitectures = map[string]ggufArchitecture{
	"llama":    {name: "LlamaForCausalLM", paired: true, also: ggufLlama},
	"qwen2":    {name: "Qwen2ForCausalLM"},
	"qwen3":    {name: "Qwen3ForCausalLM"},
	"qwen3moe": {name: "Qwen3MoeForCausalLM", also: ggufQwen3MoE},
}

// ggufNames are the names of a layer's modules: a file's, and those of the decoder's tags.
var ggufNames = map[string]string{
	"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
	"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
	"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
	"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}

// ggufExperts are modules of all experts of a layer in one tensor.
var ggufExperts = map[string]string{"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

// ggufFile is an open GGUF file.
type ggufFile struct {
	*gguf.File
	arch    string
	tensors map[string]gguf.Tensor
}

// openGGUF opens a GGUF file. The file stays mapped until Close.
func openGGUF(path string) (_ *Source, err error) {
	var file *gguf.File
	c, err := safetensors.OpenParsed(path, func(data []byte) (tensors []safetensors.Tensor, err error) {
		if bytes.HasPrefix(data, []byte("version https://git-lfs")) {
			return nil, safetensors.ErrPointer
		}
		if file, err = gguf.Parse(data); err != nil {
			return nil, err
		}
		for _, t := range file.Tensors {
			tensors = append(tensors, safetensors.Tensor{Name: t.Name, DType: t.Type, Shape: t.Shape, Data: t.Data})
		}
		return tensors, nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	defer func() {
		if err != nil {
			_ = c.Close() // the file's own fault is what matters
		}
	}()
	f := &ggufFile{File: file, tensors: map[string]gguf.Tensor{}}
	for _, t := range file.Tensors {
		f.tensors[t.Name] = t
	}
	a, made, err := f.files()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	name := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	s, err := newSource(made, name, func() (*safetensors.Checkpoint, error) {
		c.Split(f.split(architectures[a.name]))
		return c, nil
	})
	if err != nil {
		return nil, err
	}
	s.Config.Paired, s.blocks, s.close = a.paired, f.types(), c.Close
	return s, nil
}

// types lists the types of blocks in the file.
func (f *ggufFile) types() string {
	names := map[string]bool{}
	for _, t := range f.Tensors {
		if _, ok := gguf.BlockOf(t.Type); ok {
			names[t.Type] = true
		}
	}
	return "GGUF with " + strings.Join(slices.Sorted(maps.Keys(names)), ", ")
}

// files returns the files of the folder, made of the metadata.
func (f *ggufFile) files() (a ggufArchitecture, made memoryFiles, err error) {
	if n, _ := f.Int("split.count"); n > 1 {
		return a, nil, fmt.Errorf("%w: split.count is %d; merge the parts first (llama-gguf-split --merge)", ErrUnsupported, n)
	}
	f.arch, _ = f.String("general.architecture")
	a, ok := ggufArchitectures[f.arch]
	if !ok {
		return a, nil, fmt.Errorf("%w: general.architecture is %q; supported: %s", ErrUnsupported, f.arch, strings.Join(slices.Sorted(maps.Keys(ggufArchitectures)), ", "))
	}
	config, err := f.config(a)
	if err != nil {
		return a, nil, err
	}
	made = memoryFiles{}
	vocabulary, tokens := f.vocabulary()
	if made["tokenizer.json"], err = vocabulary.JSON(); err != nil {
		return a, nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	a.name = config["architectures"].([]string)[0]
	for name, content := range map[string]any{"config.json": config, "tokenizer_config.json": tokens} {
		if made[name], err = json.Marshal(content); err != nil {
			return a, nil, fmt.Errorf("%w: %w", ErrConfig, err) // such as a NaN
		}
	}
	if template, ok := f.String("tokenizer.chat_template"); ok {
		made["chat_template.jinja"] = []byte(template)
	}
	return a, made, nil
}

// config returns the config.json.
func (f *ggufFile) config(a ggufArchitecture) (map[string]any, error) {
	// Weights of float16 are planned as float32, which blocks become, too.
	c := map[string]any{"architectures": []string{a.name}, "torch_dtype": "float16"}
	for key, name := range map[string]string{
		"embedding_length": "hidden_size", "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
		"feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
	} {
		n, ok := f.Int(f.arch + "." + key)
		if !ok {
			return nil, fmt.Errorf("%w: %s.%s is missing, or not one integer", ErrConfig, f.arch, key)
		}
		c[name] = n
	}
	for key, name := range map[string]string{"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"} {
		n, ok := f.Int(f.arch + "." + key)
		if ok {
			c[name] = n
		} else if f.Has(f.arch + "." + key) {
			return nil, fmt.Errorf("%w: %s.%s is not one integer", ErrUnsupported, f.arch, key)
		}
	}
	embedding, ok := f.tensors["token_embd.weight"]
	if !ok || len(embedding.Shape) != 2 {
		return nil, fmt.Errorf("%w: token_embd.weight is missing, or no matrix", ErrWeights)
	}
	_, head := f.tensors["output.weight"]
	c["vocab_size"], c["tie_word_embeddings"] = embedding.Shape[0], !head
	eps, _ := f.Float(f.arch + ".attention.layer_norm_rms_epsilon")
	c["rms_norm_eps"] = eps
	if id := f.token("bos"); id >= 0 {
		c["bos_token_id"] = id
	}
	var ends []int32
	for _, name := range []string{"eos", "eot", "eom"} {
		if id := f.token(name); id >= 0 && !slices.Contains(ends, id) {
			ends = append(ends, id)
		}
	}
	c["eos_token_id"] = ends
	if err := f.rope(c); err != nil || a.also == nil {
		return c, err
	}
	return c, a.also(f, c)
}

// rope sets the keys of the rotation.
func (f *ggufFile) rope(c map[string]any) error {
	if theta, ok := f.Float(f.arch + ".rope.freq_base"); ok {
		c["rope_theta"] = theta
	}
	hidden, heads := c["hidden_size"].(int64), c["num_attention_heads"].(int64)
	dim, ok := c["head_dim"].(int64)
	if !ok && heads > 0 {
		dim = hidden / heads
	}
	for _, key := range []string{"rope.dimension_count", "attention.value_length"} {
		if n, ok := f.Int(f.arch + "." + key); ok && n != dim {
			return fmt.Errorf("%w: %s.%s is %d, in heads of %d; supported: equal sizes", ErrUnsupported, f.arch, key, n, dim)
		}
	}
	kind, _ := f.String(f.arch + ".rope.scaling.type")
	factor, _ := f.Float(f.arch + ".rope.scaling.factor")
	original, _ := f.Float(f.arch + ".rope.scaling.original_context_length")
	switch kind {
	case "", "none":
	case "linear":
		c["rope_scaling"] = map[string]any{"rope_type": kind, "factor": factor}
	case "yarn":
		c["rope_scaling"] = map[string]any{"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
	default:
		return fmt.Errorf("%w: %s.rope.scaling.type is %q; supported: none, linear, yarn", ErrUnsupported, f.arch, kind)
	}
	freqs, ok := f.tensors["rope_freqs.weight"]
	if !ok {
		return nil
	}
	if kind == "linear" || kind == "yarn" || freqs.Type != "F32" || len(freqs.Shape) != 1 {
		return fmt.Errorf("%w: rope_freqs.weight of type %s %v with rope.scaling.type %q; supported: a vector of F32 without scaling", ErrUnsupported, freqs.Type, freqs.Shape, kind)
	}
	factors := make([]float64, freqs.Shape[0])
	for i := range factors {
		factors[i] = float64(number(freqs.Data, i, "F32"))
	}
	// Llama 3.1's stretch: the factor of each wavelength, at all lengths.
	c["rope_scaling"] = map[string]any{
		"rope_type": "longrope", "factor": 1, "attention_factor": 1, "short_factor": factors, "long_factor": factors,
		"original_max_position_embeddings": c["max_position_embeddings"],
	}
	return nil
}

// ggufLlama reads what Mixtral and Mistral have beyond Llama: experts and a window.
func ggufLlama(f *ggufFile, c map[string]any) error {
	if n, ok := f.Int("llama.expert_count"); ok && n > 0 {
		used, _ := f.Int("llama.expert_used_count")
		c["architectures"], c["num_local_experts"], c["num_experts_per_tok"] = []string{"MixtralForCausalLM"}, n, used
	}
	if n, ok := f.Int("llama.attention.sliding_window"); ok && n > 0 {
		c["architectures"], c["sliding_window"] = []string{"MistralForCausalLM"}, n
	}
	return nil
}

func ggufQwen3MoE(f *ggufFile, c map[string]any) error {
	for key, name := range map[string]string{"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"} {
		n, ok := f.Int("qwen3moe." + key)
		if !ok {
			return fmt.Errorf("%w: qwen3moe.%s is missing, or not one integer", ErrConfig, key)
		}
		c[name] = n
	}
	c["norm_topk_prob"] = true
	return nil
}

// token returns the id of a special token; -1: there is none.
func (f *ggufFile) token(name string) int32 {
	if id, ok := f.Int("tokenizer.ggml." + name + "_token_id"); ok && id >= 0 && id <= maxDim {
		return int32(id)
	}
	return -1
}

// vocabulary returns the tokenizer, and the content of tokenizer_config.json.
func (f *ggufFile) vocabulary() (*tokenizer.Vocabulary, map[string]string) {
	v := &tokenizer.Vocabulary{
		Tokens: f.Strings("tokenizer.ggml.tokens"), Scores: f.Floats("tokenizer.ggml.scores"), Kinds: f.Ints("tokenizer.ggml.token_type"),
		Merges: f.Strings("tokenizer.ggml.merges"), BOS: f.token("bos"), EOS: f.token("eos"), Unknown: f.token("unknown"),
	}
	v.Model, _ = f.String("tokenizer.ggml.model")
	v.Pre, _ = f.String("tokenizer.ggml.pre")
	// llama.cpp's defaults
	v.AddBOS = v.Model == "llama" || slices.Contains([]string{"llama-bpe", "llama3", "llama-v3", "tekken"}, v.Pre)
	if add, ok := f.Bool("tokenizer.ggml.add_bos_token"); ok {
		v.AddBOS = add
	}
	v.AddEOS, _ = f.Bool("tokenizer.ggml.add_eos_token")
	if space, ok := f.Bool("tokenizer.ggml.add_space_prefix"); ok {
		v.NoSpace = !space
	}
	tokens := map[string]string{}
	for name, id := range map[string]int32{"bos_token": v.BOS, "eos_token": v.EOS} {
		if id >= 0 && int(id) < len(v.Tokens) {
			tokens[name] = v.Tokens[id]
		}
	}
	return v, tokens
}

// split returns what a file's tensor becomes: a tensor of another name, or one for each expert.
func (f *ggufFile) split(a *architecture) func(safetensors.Tensor) []safetensors.Tensor {
	renamed := func(t safetensors.Tensor, name string) safetensors.Tensor {
		if t.Name = name; a.rename != nil {
			t.Name = a.rename.Replace(name)
		}
		return t
	}
	top := map[string]string{"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
	return func(t safetensors.Tensor) []safetensors.Tensor {
		if t.Name == "rope_freqs.weight" { // in the config
			return nil
		}
		if name, ok := top[t.Name]; ok {
			return []safetensors.Tensor{renamed(t, name)}
		}
		parts := strings.Split(t.Name, ".")
		if len(parts) != 4 || parts[0] != "blk" {
			return []safetensors.Tensor{t} // Load reports it
		}
		layer := "model.layers." + parts[1] + "."
		if name, ok := ggufNames[parts[2]]; ok {
			return []safetensors.Tensor{renamed(t, layer+name+"."+parts[3])}
		}
		module, ok := ggufExperts[parts[2]]
		if !ok || len(t.Shape) != 3 || t.Shape[0] > maxExperts {
			return []safetensors.Tensor{t}
		}
		var experts []safetensors.Tensor
		size := len(t.Data) / t.Shape[0]
		for e := range t.Shape[0] {
			one := renamed(t, layer+"mlp.experts."+strconv.Itoa(e)+"."+module+"."+parts[3])
			one.Shape, one.Data = t.Shape[1:], t.Data[e*size:(e+1)*size]
			experts = append(experts, one)
		}
		return experts
	}
}

// readRows has the tensor read by rows, if its type has blocks, or if its rows are in another
// order than transformers has them in.
func (s *stored) readRows(config *Config) {
	block, blocks := gguf.BlockOf(s.DType)
	paired := config.Paired && (strings.HasSuffix(s.Name, "q_proj.weight") || strings.HasSuffix(s.Name, "k_proj.weight"))
	if !blocks && (!paired || widths[s.DType] == 0) || len(s.Shape) == 0 {
		return
	}
	cols, dtype, data, dim := s.Shape[len(s.Shape)-1], s.DType, s.Data, config.HeadDim
	s.made = backend.F32
	if dtype == "BF16" {
		s.made = backend.BF16
	}
	s.DType = expandedType
	place := func(row int) int { return row }
	if paired {
		place = func(row int) int {
			head, at := row/dim*dim, row%dim
			return head + at%(dim/2)*2 + at/(dim/2)
		}
	}
	if blocks && len(s.Shape) == 2 {
		g := block.Grid(data, cols)
		in := *g
		in.Row = func(to *backend.GridRow, row int) { g.Row(to, place(row)) }
		s.grid = &in
	}
	s.rows = func(dst []float32, row int) {
		row = place(row)
		if blocks {
			size := cols / block.Elements * block.Bytes
			block.Expand(dst, data[row*size:(row+1)*size])
			return
		}
		for i := range dst {
			dst[i] = number(data, row*cols+i, dtype)
		}
	}
}
