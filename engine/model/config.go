package model

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxDim bounds each number of a config, so that no product of two overflows. maxLayers bounds the
// number of layers, because parsing allocates for each, as maxAllExperts does for experts.
const (
	maxDim    = 1 << 24
	maxLayers = 1 << 12

	maxExperts    = 1 << 10 // of one layer
	maxAllExperts = 1 << 17 // of all layers
)

// Config is the part of config.json that decides what is computed, and the
// tokens that begin and end a text.
type Config struct {
	Architecture string // a key of architectures, such as LlamaForCausalLM

	Vocab        int // rows of the embedding
	Hidden       int
	Layers       int
	Heads        int
	KVHeads      int
	HeadDim      int
	FFN          int // width between the MLP's projections
	Eps          float32
	TieEmbedding bool // the output projection is the embedding
	Rope         RopeConfig
	Window       int    // positions that a token sees, its own included; 0: all
	FullLayers   []bool // layers without the window; nil: none
	MoE          MoEConfig
	Features     Features
	Latent       *latentConfig  // attention over latents; nil: over heads
	Delta        *deltaConfig   // layers that have a state; nil: none
	Gemma4       *gemma4Config  // what only Gemma 4 has
	MXFP4        bool           // experts are stored in four bits
	FP8          *fp8Config     // matrices are stored in floats of 8 bits
	Integers     *integerConfig // matrices are stored in integers of 4 or 8 bits
	Ordered      bool           // the inputs of a group of Integers are not neighbours
	Expand       bool           // integers, also those of GGUF, are expanded as they are loaded

	// Paired reports whether, in the files, the rows of queries and keys that rotate together are
	// neighbours: GGUF has them so for Llama.
	Paired bool

	// Apart reports whether, in the files, each matrix is a tensor of its own, also those that
	// the architecture's folders have in one. Source has it so for GGUF.
	Apart bool

	// Wrapped reports whether the checkpoint is multimodal: the names of the text model's weights
	// then have another prefix.
	Wrapped bool

	// Headless reports whether the checkpoint has no output projection, so that it gives vectors and
	// no tokens. The embedding then takes the projection's place, and the logits mean nothing.
	Headless bool

	stacked      bool              // the experts of a layer share tensors, where the architecture's files may have either
	labels       int               // of the classifier; 0: there is none
	whole        bool              // see Vectors
	dimensions   []int             // likewise
	instructions map[string]string // prefixes of texts; nil: config.json has none

	shard Shard  // whose sizes these are
	parts *parts // nil: they are of the whole model

	MaxPositions int    // tokens the model was made for, prompt and output
	DType        string // the type of the weights by config.json; the files decide
	BOS          int32  // -1: none
	EOS          []int32
}

// Formats are the formats of stored matrices, as vLLM's --quantization names them.
var Formats = []string{"fp8", compressedTensors, "gptq", "gptq_marlin", "awq", "awq_marlin", "mxfp4", "gpt_oss_mxfp4", modelOpt, modelOptFP4}

// compressedTensors is a quant_method.
const compressedTensors = "compressed-tensors"

// StoredIn reports whether format is the one of Formats in which the checkpoint stores its
// matrices.
func (c *Config) StoredIn(format string) bool {
	method := ""
	if c.Integers != nil {
		method = c.Integers.Method
	}
	switch format {
	case "mxfp4", "gpt_oss_mxfp4":
		return c.MXFP4
	case "fp8":
		return c.FP8 != nil
	case compressedTensors:
		return c.FP8 != nil || method == compressedTensors || method == nvFP4
	case "gptq", "gptq_marlin", "awq", "awq_marlin":
		return method != "" && strings.TrimSuffix(format, "_marlin") == method
	case modelOpt:
		return c.FP8 != nil || method == modelOpt
	case modelOptFP4:
		return method == modelOpt
	}
	return false
}

// Format names the format in which the checkpoint stores its matrices, as Formats do where one of
// them is meant; empty: they are plain numbers.
func (c *Config) Format() string {
	switch {
	case c.MXFP4:
		return "mxfp4"
	case c.Integers != nil && c.Integers.Method == nvFP4:
		return compressedTensors
	case c.Integers != nil:
		return c.Integers.Method
	case c.FP8 != nil:
		return "fp8"
	}
	return ""
}

// rawConfig is config.json as it is written. A nil pointer is an absent key.
type rawConfig struct {
	text []byte // all of it

	Architectures []string `json:"architectures"`
	ModelType     string   `json:"model_type"`
	arch          *architecture
	Wrapped       bool                       `json:"-"`
	Headless      bool                       `json:"-"`
	Causal        *bool                      `json:"is_causal"`
	Classifies    bool                       `json:"-"`
	NumLabels     *int                       `json:"num_labels"`
	LabelNames    map[string]json.RawMessage `json:"id2label"`
	Matryoshka    *bool                      `json:"is_matryoshka"`
	Dimensions    []int                      `json:"matryoshka_dimensions"`
	Instructions  map[string]string          `json:"task_instructions"`

	VocabSize        int      `json:"vocab_size"`
	HiddenSize       int      `json:"hidden_size"`
	NumLayers        int      `json:"num_hidden_layers"`
	NumHeads         int      `json:"num_attention_heads"`
	NumKVHeads       *int     `json:"num_key_value_heads"`
	HeadDim          *int     `json:"head_dim"`
	IntermediateSize int      `json:"intermediate_size"`
	RMSNormEps       *float64 `json:"rms_norm_eps"`
	TieWordEmbedding *bool    `json:"tie_word_embeddings"`
	HiddenAct        *string  `json:"hidden_act"`
	MaxPositions     *int     `json:"max_position_embeddings"`

	PartialRotary     *float64 `json:"partial_rotary_factor"`
	OriginalPositions *float64 `json:"original_max_position_embeddings"`

	RopeTheta      *float64                   `json:"rope_theta"`
	RopeScaling    map[string]json.RawMessage `json:"rope_scaling"`
	RopeParameters map[string]json.RawMessage `json:"rope_parameters"`

	AttentionBias *bool           `json:"attention_bias"`
	MLPBias       bool            `json:"mlp_bias"`
	Quantization  json.RawMessage `json:"quantization_config"`

	SlidingWindow    json.RawMessage `json:"sliding_window"`
	UseSlidingWindow bool            `json:"use_sliding_window"`
	MaxWindowLayers  *int            `json:"max_window_layers"`
	LayerTypes       []string        `json:"layer_types"`

	NumExperts    *int     `json:"num_experts"`
	LocalExperts  *int     `json:"num_local_experts"` // num_experts, as transformers saves it since version 5
	TopK          *int     `json:"num_experts_per_tok"`
	MoEFFN        *int     `json:"moe_intermediate_size"`
	NormTopK      *bool    `json:"norm_topk_prob"`
	SparseStep    *int     `json:"decoder_sparse_step"`
	MLPOnlyLayers []int    `json:"mlp_only_layers"`
	SwigluLimit   *float64 `json:"swiglu_limit"`

	DType      string   `json:"dtype"`
	TorchDType string   `json:"torch_dtype"`
	BOS        tokenIDs `json:"bos_token_id"`
	EOS        tokenIDs `json:"eos_token_id"`
}

// tokenIDs is one token id, a list of them, or null.
type tokenIDs []int32

func (t *tokenIDs) UnmarshalJSON(text []byte) error {
	*t = nil
	if bytes.Equal(text, []byte("null")) {
		return nil
	}
	if text[0] == '[' {
		return json.Unmarshal(text, (*[]int32)(t))
	}
	var id int32
	if err := json.Unmarshal(text, &id); err != nil {
		return err
	}
	*t = tokenIDs{id}
	return nil
}

// parseConfig reads config.json; the tokens that end a text come from
// generation_config.json where that has them. Absent keys have transformers'
// defaults.
func parseConfig(text, generation []byte) (Config, error) {
	return parseConfigs(text, generation, nil)
}

// parseConfigs is parseConfig with hf_quant_config.json; nil: the folder has none. It counts where
// config.json has no quantization_config.
func parseConfigs(text, generation, quantization []byte) (Config, error) {
	text, wrapped, err := unwrap(text)
	if err != nil {
		return Config{}, err
	}
	var raw rawConfig
	if err := json.Unmarshal(text, &raw); err != nil {
		return Config{}, fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	raw.text, raw.Wrapped = text, wrapped
	if quantization != nil && (len(raw.Quantization) == 0 || bytes.Equal(raw.Quantization, []byte("null"))) {
		if raw.Quantization, err = fromModelOpt(quantization); err != nil {
			return Config{}, err
		}
	}
	if err := raw.name(); err != nil {
		return Config{}, err
	}
	if err := raw.supported(); err != nil {
		return Config{}, err
	}
	c := Config{
		Architecture: raw.Architectures[0],
		Vocab:        raw.VocabSize,
		Hidden:       raw.HiddenSize,
		Layers:       raw.NumLayers,
		Heads:        raw.NumHeads,
		KVHeads:      or(raw.NumKVHeads, raw.NumHeads),
		FFN:          raw.IntermediateSize,
		Eps:          float32(or(raw.RMSNormEps, 1e-6)),
		TieEmbedding: or(raw.TieWordEmbedding, false),
		MaxPositions: or(raw.MaxPositions, 2048),
		DType:        strings.TrimPrefix(raw.TorchDType, "torch."),
		BOS:          -1,
		EOS:          raw.EOS,
		Wrapped:      raw.Wrapped,
		Headless:     raw.Headless,
	}
	if raw.DType != "" {
		c.DType = raw.DType
	}
	if len(raw.BOS) > 0 {
		c.BOS = raw.BOS[0]
	}
	if c.Heads > 0 {
		c.HeadDim = or(raw.HeadDim, c.Hidden/c.Heads)
	}
	if len(raw.Quantization) > 0 && !bytes.Equal(raw.Quantization, []byte("null")) && raw.Architectures[0] != gptOSSName {
		if err := raw.quantized(&c); err != nil {
			return Config{}, err
		}
	}
	if extra := raw.arch.config; extra != nil {
		if err := extra(&raw, &c); err != nil {
			return Config{}, err
		}
	}
	if c.Rope.Type == "" { // some architectures have read it
		var err error
		if c.Rope, err = raw.rope(&c); err != nil {
			return Config{}, err
		}
	}
	c.TieEmbedding = c.TieEmbedding || raw.Headless
	if err := cmp.Or(raw.matryoshka(&c), raw.classifier(&c)); err != nil {
		return Config{}, err
	}
	if err := c.endTokens(generation); err != nil {
		return Config{}, err
	}
	return c, c.check(raw.HeadDim != nil)
}

func or[T any](p *T, absent T) T {
	if p == nil {
		return absent
	}
	return *p
}

// slidingWindow returns sliding_window: 0 for null, absent where the key is absent.
func (r *rawConfig) slidingWindow(absent int) (int, error) {
	window := absent
	switch {
	case r.SlidingWindow == nil:
	case bytes.Equal(r.SlidingWindow, []byte("null")):
		return 0, nil
	default:
		if err := json.Unmarshal(r.SlidingWindow, &window); err != nil {
			return 0, fmt.Errorf("%w: config.json: sliding_window: %w", ErrConfig, err)
		}
	}
	if window < 1 || window > maxDim/4 {
		return 0, fmt.Errorf("%w: config.json: sliding_window is %d, not between 1 and %d", ErrConfig, window, maxDim/4)
	}
	return window, nil
}

func refuse(key string, value any, want string) error {
	return fmt.Errorf("%w: config.json: %s is %v; supported: %s", ErrUnsupported, key, value, want)
}

// supported refuses settings that this package does not compute.
func (r *rawConfig) supported() error {
	if len(r.Architectures) != 1 {
		return fmt.Errorf("%w: config.json: architectures is %q, one is needed", ErrConfig, r.Architectures)
	}
	if name := r.Architectures[0]; strings.HasSuffix(name, "ForConditionalGeneration") {
		return refuse("architectures", name, "of multimodal models only the text part of "+strings.Join(slices.Sorted(maps.Keys(wrappers)), ", "))
	} else if r.arch == nil {
		return refuse("architectures", name, strings.Join(slices.Sorted(maps.Keys(architectures)), ", "))
	}
	if !or(r.Causal, true) {
		return refuse("is_causal", false, "true, because each token attends to those before it alone")
	}
	oss := r.Architectures[0] == gptOSSName
	if act := or(r.HiddenAct, "silu"); act != "silu" && !r.arch.gelu {
		return refuse("hidden_act", act, "silu")
	}
	if len(r.Quantization) > 0 && !bytes.Equal(r.Quantization, []byte("null")) {
		method := r.quantMethod()
		if method == "mxfp4" && oss || !oss && slices.Contains([]string{"fp8", "compressed-tensors", "gptq", "awq", modelOpt, modelOptFP4}, method) {
			return nil
		}
		return refuse("quantization_config", method, "none, fp8, gptq, awq, modelopt, and compressed-tensors with floats or integers; weights in float32, bfloat16 or float16")
	}
	return nil
}

// quantMethod returns quant_method, or all of quantization_config if it has none.
func (r *rawConfig) quantMethod() string {
	var q struct {
		Method string `json:"quant_method"`
	}
	if json.Unmarshal(r.Quantization, &q) == nil && q.Method != "" {
		return q.Method
	}
	return string(r.Quantization)
}

// check bounds every number and the relations between them.
func (c *Config) check(explicitHeadDim bool) error {
	if c.Layers > maxLayers {
		return fmt.Errorf("%w: config.json: num_hidden_layers is %d, at most %d", ErrConfig, c.Layers, maxLayers)
	}
	for _, n := range []struct {
		key   string
		value int
	}{
		{"vocab_size", c.Vocab}, {"hidden_size", c.Hidden}, {"num_hidden_layers", c.Layers},
		{"num_attention_heads", c.Heads}, {"num_key_value_heads", c.KVHeads}, {"head_dim", c.HeadDim},
		{"intermediate_size", c.FFN}, {"max_position_embeddings", c.MaxPositions},
		{"num_attention_heads times head_dim", c.Heads * c.HeadDim},
	} {
		if n.value < 1 || n.value > maxDim {
			return fmt.Errorf("%w: config.json: %s is %d, not between 1 and %d", ErrConfig, n.key, n.value, maxDim)
		}
	}
	if !explicitHeadDim && c.Hidden%c.Heads != 0 {
		return fmt.Errorf("%w: config.json: hidden_size %d is no multiple of num_attention_heads %d, and there is no head_dim", ErrConfig, c.Hidden, c.Heads)
	}
	if c.Heads%c.KVHeads != 0 {
		return fmt.Errorf("%w: config.json: num_attention_heads %d is no multiple of num_key_value_heads %d", ErrConfig, c.Heads, c.KVHeads)
	}
	if c.HeadDim%2 != 0 {
		return fmt.Errorf("%w: config.json: head_dim %d is odd and cannot be rotated", ErrConfig, c.HeadDim)
	}
	if !(c.Eps > 0 && c.Eps < 1) {
		return fmt.Errorf("%w: config.json: rms_norm_eps is %v", ErrConfig, c.Eps)
	}
	for _, id := range append([]int32{max(c.BOS, 0)}, c.EOS...) {
		if id < 0 || int(id) >= c.Vocab {
			return fmt.Errorf("%w: token id %d is outside the vocabulary of %d", ErrConfig, id, c.Vocab)
		}
	}
	return nil
}

// endTokens sets the end tokens to eos_token_id of generation_config.json, where it has them.
func (c *Config) endTokens(generation []byte) error {
	if generation == nil {
		return nil
	}
	var g struct {
		EOS tokenIDs `json:"eos_token_id"`
	}
	if err := json.Unmarshal(generation, &g); err != nil {
		return fmt.Errorf("%w: generation_config.json: %w", ErrConfig, err)
	}
	if len(g.EOS) > 0 {
		c.EOS = g.EOS
	}
	return nil
}
