package model

import (
	"bytes"
	"cmp"
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

// ggufNames are the names of a layer's modules: a file's, and those of the decoder's tags.
var ggufNames = map[string]string{
	"attn_norm": "input_layernorm", "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm", "post_ffw_norm": "post_mlp_layernorm",
	"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
	"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
	"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
	"ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

// ggufExperts are modules of all experts of a layer in one tensor.
var ggufExperts = map[string][]rowsOf{
	"ffn_gate_exps": {{"gate_proj", 0}}, "ffn_up_exps": {{"up_proj", 0}}, "ffn_down_exps": {{"down_proj", 0}},
	"ffn_gate_up_exps": {{"gate_proj", 0}, {"up_proj", 0}},
}

// ggufFile is an open GGUF file.
type ggufFile struct {
	*gguf.File
	arch    string
	tensors map[string]gguf.Tensor
	wrong   error // the first value of another type than is read
}

// Int is File.Int. It keeps an error for a value of another type, which is not absent.
func (f *ggufFile) Int(key string) (int64, bool) {
	n, ok := f.File.Int(key)
	return n, f.typed(key, ok, "an integer")
}

// Float is File.Float, and keeps errors as Int does.
func (f *ggufFile) Float(key string) (float64, bool) {
	n, ok := f.File.Float(key)
	return n, f.typed(key, ok, "a number")
}

// Bool is File.Bool, and keeps errors as Int does.
func (f *ggufFile) Bool(key string) (set, ok bool) {
	set, ok = f.File.Bool(key)
	return set, f.typed(key, ok, "a boolean")
}

// String is File.String, and keeps errors as Int does.
func (f *ggufFile) String(key string) (string, bool) {
	text, ok := f.File.String(key)
	return text, f.typed(key, ok, "a string")
}

// typed returns ok, and keeps an error if it is false although the file has the key.
func (f *ggufFile) typed(key string, ok bool, want string) bool {
	if !ok && f.wrong == nil && f.Has(key) {
		f.wrong = fmt.Errorf("%w: %s is not %s", ErrConfig, key, want)
	}
	return ok
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
		return nil, err // has the path
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
	var s *Source
	s, err = newSource(made, name, func() (*safetensors.Checkpoint, error) {
		c.Split(f.split(&s.Config, a))
		return c, nil
	})
	if err != nil {
		return nil, err
	}
	s.Config.Paired, s.Config.Apart, s.Config.Features.OnePlus = a.paired, true, false
	if s.Config.Latent != nil {
		s.Config.Latent.Split = f.splitLatents()
	}
	s.blocks, s.close = f.types(), c.Close
	return s, nil
}

// types lists the types of integers in the file.
func (f *ggufFile) types() string {
	names := map[string]bool{}
	for _, t := range f.Tensors {
		if _, ok := gguf.BlockOf(t.Type); ok && t.Type != gguf.MXFP4 {
			names[t.Type] = true
		}
	}
	if len(names) == 0 {
		return "GGUF"
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
	template, ok := f.String("tokenizer.chat_template")
	if f.wrong != nil {
		return a, nil, f.wrong
	}
	if made["tokenizer.json"], err = vocabulary.JSON(); err != nil {
		return a, nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	for name, content := range map[string]any{"config.json": config, "tokenizer_config.json": tokens} {
		if made[name], err = json.Marshal(content); err != nil {
			return a, nil, fmt.Errorf("%w: %w", ErrConfig, err) // such as a NaN
		}
	}
	if ok {
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
	if c["num_key_value_heads"] == nil {
		c["num_key_value_heads"] = c["num_attention_heads"]
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
	heads := f.headSizes
	if a.latent {
		heads = f.latentSizes
	}
	if err := cmp.Or(heads(a, c), f.rope(c)); err != nil || a.also == nil {
		return c, err
	}
	return c, a.also(f, c)
}

// headSizes checks that the rows of a head are of one size, and sets how many of them rotate.
func (f *ggufFile) headSizes(a ggufArchitecture, c map[string]any) error {
	hidden, heads := c["hidden_size"].(int64), c["num_attention_heads"].(int64)
	dim, ok := c["head_dim"].(int64)
	if !ok && heads > 0 {
		dim = hidden / heads
	}
	if n, ok := f.Int(f.arch + ".attention.value_length"); ok && n != dim {
		return fmt.Errorf("%w: %s.attention.value_length is %d, in heads of %d; supported: equal sizes", ErrUnsupported, f.arch, n, dim)
	}
	if n, ok := f.Int(f.arch + ".rope.dimension_count"); ok && dim > 0 && n <= dim && architectures[a.name].partial > 0 {
		c["partial_rotary_factor"] = min((float64(n)+0.5)/float64(dim), 1) // rounded down to n columns
	} else if ok && n != dim {
		return fmt.Errorf("%w: %s.rope.dimension_count is %d, in heads of %d; supported: equal sizes", ErrUnsupported, f.arch, n, dim)
	}
	return nil
}

// rope sets the keys of the rotation.
func (f *ggufFile) rope(c map[string]any) error {
	if theta, ok := f.Float(f.arch + ".rope.freq_base"); ok {
		c["rope_theta"] = theta
	}
	kind, _ := f.String(f.arch + ".rope.scaling.type")
	factor, _ := f.Float(f.arch + ".rope.scaling.factor")
	original, _ := f.Float(f.arch + ".rope.scaling.original_context_length")
	switch kind {
	case "", "none":
	case "linear":
		c["rope_scaling"] = map[string]any{"rope_type": kind, "factor": factor}
	case "yarn":
		yarn := map[string]any{"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
		for key, name := range map[string]string{"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"} {
			if n, ok := f.Float(f.arch + ".rope.scaling.yarn_" + key); ok {
				yarn[name] = n
			}
		}
		c["rope_scaling"] = yarn
	case "longrope":
		return f.longrope(c)
	default:
		return fmt.Errorf("%w: %s.rope.scaling.type is %q; supported: none, linear, longrope, yarn", ErrUnsupported, f.arch, kind)
	}
	if f.tensors["rope_factors_long.weight"].Data != nil {
		return f.longrope(c)
	}
	if _, ok := f.tensors["rope_freqs.weight"]; !ok {
		return nil
	}
	if kind == "linear" || kind == "yarn" {
		return fmt.Errorf("%w: rope_freqs.weight with rope.scaling.type %q; supported: without scaling", ErrUnsupported, kind)
	}
	factors, err := f.factors("rope_freqs.weight")
	if err != nil {
		return err
	}
	// Llama 3.1's stretch: the factor of each wavelength, at all lengths.
	c["rope_scaling"] = map[string]any{
		"rope_type": "longrope", "factor": 1, "attention_factor": 1, "short_factor": factors, "long_factor": factors,
		"original_max_position_embeddings": c["max_position_embeddings"],
	}
	return nil
}

// longrope sets the keys of a rotation with factors for short and for long contexts.
func (f *ggufFile) longrope(c map[string]any) error {
	short, err := f.factors("rope_factors_short.weight")
	if err != nil {
		return err
	}
	long, err := f.factors("rope_factors_long.weight")
	if err != nil {
		return err
	}
	rope := map[string]any{"rope_type": "longrope", "short_factor": short, "long_factor": long}
	for key, name := range map[string]string{"attn_factor": "attention_factor", "original_context_length": "original_max_position_embeddings"} {
		if n, ok := f.Float(f.arch + ".rope.scaling." + key); ok {
			rope[name] = n
		}
	}
	c["rope_scaling"] = rope
	return nil
}

// factors returns a vector of F32.
func (f *ggufFile) factors(name string) ([]float64, error) {
	t, ok := f.tensors[name]
	if !ok || t.Type != "F32" || len(t.Shape) != 1 {
		return nil, fmt.Errorf("%w: %s of type %s %v; supported: a vector of F32", ErrUnsupported, name, t.Type, t.Shape)
	}
	factors := make([]float64, t.Shape[0])
	for i := range factors {
		factors[i] = float64(number(t.Data, i, "F32"))
	}
	return factors, nil
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
	f.typed("tokenizer.ggml.tokens", v.Tokens != nil, "an array of strings")
	f.typed("tokenizer.ggml.scores", v.Scores != nil, "an array of float32")
	f.typed("tokenizer.ggml.token_type", v.Kinds != nil, "an array of integers")
	f.typed("tokenizer.ggml.merges", v.Merges != nil, "an array of strings")
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

// split returns what a file's tensor becomes: a tensor of another name, one for each expert, or
// one for each of the matrices that it holds.
func (f *ggufFile) split(c *Config, a ggufArchitecture) func(safetensors.Tensor) []safetensors.Tensor {
	rename := func(name string) string {
		if r := architectures[c.Architecture].rename; r != nil {
			return r.Replace(name)
		}
		return name
	}
	top := map[string]string{"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
	return func(t safetensors.Tensor) []safetensors.Tensor {
		switch t.Name {
		case "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight": // in the config
			return nil
		}
		if name, ok := top[t.Name]; ok {
			t.Name = rename(name)
			return []safetensors.Tensor{t}
		}
		parts := strings.Split(t.Name, ".")
		if n, err := strconv.Atoi(parts[min(1, len(parts)-1)]); parts[0] == "blk" && err == nil && n >= c.Layers && architectures[c.Architecture].extraLayers {
			return nil // guesses the token after next
		}
		if len(parts) != 4 || parts[0] != "blk" {
			return []safetensors.Tensor{t} // Load reports it
		}
		layer, kind, end := "model.layers."+parts[1]+".", parts[2], "."+parts[3]
		if name, ok := ggufExperts[kind]; ok {
			dims := 3
			if end == ".bias" {
				dims = 2
			}
			return eachExpert(t, dims, func(one safetensors.Tensor, expert int) []safetensors.Tensor {
				return cutRows(one, func(module string) string {
					return rename(layer + "mlp.experts." + strconv.Itoa(expert) + "." + module + end)
				}, name...)
			})
		}
		_, gate := f.tensors["blk."+parts[1]+".ffn_gate.weight"]
		name := func(module string) string { return rename(layer + module + end) }
		switch {
		case kind == "attn_qkv":
			q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
			return cutRows(t, name, rowsOf{"self_attn.q_proj", q}, rowsOf{"self_attn.k_proj", kv}, rowsOf{"self_attn.v_proj", kv})
		case kind == "ffn_up" && !gate:
			return cutRows(t, name, rowsOf{"mlp.gate_proj", c.FFN}, rowsOf{"mlp.up_proj", c.FFN})
		case kind == "exp_probs_b":
			t.Name = rename(layer + "mlp.gate.e_score_correction_bias")
		case kind == "attn_sinks":
			t.Name = rename(layer + "self_attn.sinks")
		case a.latent && (kind == "attn_k_b" || kind == "attn_v_b") && len(t.Shape) == 3: // a matrix for each head
			t.Name, t.Shape = name(a.names[kind]), []int{t.Shape[0] * t.Shape[1], t.Shape[2]}
		case a.names[kind] != "":
			t.Name = name(a.names[kind])
		case ggufNames[kind] != "":
			t.Name = name(ggufNames[kind])
		}
		return []safetensors.Tensor{t}
	}
}

// rowsOf is a module that has so many rows of a tensor; 0: an equal share.
type rowsOf struct {
	module string
	rows   int
}

// cutRows returns the modules that a tensor holds, the rows of one behind those of another. A
// tensor of another number of rows is returned as it is, and Load reports it.
func cutRows(t safetensors.Tensor, name func(module string) string, modules ...rowsOf) []safetensors.Tensor {
	if len(t.Shape) == 0 || len(t.Data)%t.Shape[0] != 0 { // a vector in blocks
		return []safetensors.Tensor{t}
	}
	var out []safetensors.Tensor
	size, at := len(t.Data)/t.Shape[0], 0
	for _, m := range modules {
		rows := m.rows
		if rows == 0 {
			rows = t.Shape[0] / len(modules)
		}
		if rows > t.Shape[0]-at {
			return []safetensors.Tensor{t}
		}
		part := t
		part.Name, part.Shape = name(m.module), append([]int{rows}, t.Shape[1:]...)
		part.Data = t.Data[at*size : (at+rows)*size]
		at += rows
		out = append(out, part)
	}
	if at != t.Shape[0] {
		return []safetensors.Tensor{t}
	}
	return out
}

// eachExpert returns what cut makes of each expert's part of a tensor of dims dimensions.
func eachExpert(t safetensors.Tensor, dims int, cut func(one safetensors.Tensor, expert int) []safetensors.Tensor) []safetensors.Tensor {
	if len(t.Shape) != dims || t.Shape[0] > maxExperts || len(t.Data)%t.Shape[0] != 0 {
		return []safetensors.Tensor{t} // Load reports it
	}
	var experts []safetensors.Tensor
	size := len(t.Data) / t.Shape[0]
	for e := range t.Shape[0] {
		one := t
		one.Shape, one.Data = t.Shape[1:], t.Data[e*size:(e+1)*size]
		experts = append(experts, cut(one, e)...)
	}
	return experts
}

// readRows has the tensor read by rows, if its type has blocks, or if its rows are in another
// order than transformers has them in.
func (s *stored) readRows(config *Config) {
	block, blocks := gguf.BlockOf(s.DType)
	paired := config.Paired && (strings.Contains(s.Name, ".q_proj.") || strings.Contains(s.Name, ".k_proj."))
	if !blocks && (!paired || widths[s.DType] == 0) || len(s.Shape) == 0 || blocks && len(s.Shape) != 2 { // match refuses such blocks
		return
	}
	cols, dtype, data, dim := s.Shape[len(s.Shape)-1], s.DType, s.Data, config.HeadDim
	if len(s.Shape) == 1 {
		cols = 1
	}
	s.made = backend.F32
	if dtype == "BF16" || dtype == gguf.MXFP4 { // whose values have three bits
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
	if dtype == gguf.MXFP4 {
		s.micro = &microscaled{data: data, in: cols, place: place}
	} else if blocks {
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
