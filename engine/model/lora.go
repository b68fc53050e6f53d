package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/internal/regular"
)

// ErrAdapter wraps refusals of adapters (LoRA).
var ErrAdapter = errors.New("model: bad adapter")

// Adapter is a low-rank adapter as PEFT saves it: adapter_config.json and
// adapter_model.safetensors. For a matrix W of the model it has A and B, and the
// product with W becomes x·Wᵀ + factor·(x·Aᵀ)·Bᵀ.
type Adapter struct {
	Digest uint64 // of all that it computes: equal digests, equal adapters; not 0
	Rank   int    // the largest of its A
	Base   string // base_model_name_or_path: the model that it was trained on
	parts  map[string]*adapterPart
}

// adapterPart is an adapter's pair of matrices for one matrix of the model.
type adapterPart struct {
	rank int
	a, b []float32 // [rank, in], and [out, rank] with the factor
	in   int
	out  int
}

// adapterConfig is adapter_config.json, as far as it decides what is computed.
type adapterConfig struct {
	Type        string   `json:"peft_type"`
	Base        string   `json:"base_model_name_or_path"`
	Rank        int      `json:"r"`
	Alpha       *float64 `json:"lora_alpha"`
	RSLoRA      bool     `json:"use_rslora"`
	DoRA        bool     `json:"use_dora"`
	FanInFanOut bool     `json:"fan_in_fan_out"`
	Bias        string   `json:"bias"`
	LoRABias    bool     `json:"lora_bias"`
	Save        []string `json:"modules_to_save"`

	// Ranks and alphas of the matrices whose names end in a key, instead of r and lora_alpha.
	Ranks  patterns `json:"rank_pattern"`
	Alphas patterns `json:"alpha_pattern"`
}

// otherwise are keys that change the computation in ways that are not supported.
var otherwise = []string{
	"alora_invocation_tokens", "layer_replication", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
	"arrow_config", "kasa_config", "monteclora_config", "velora_config",
}

// maxRank bounds ranks: vLLM's largest is 512.
const maxRank = 512

// OpenAdapter reads an adapter's folder.
func OpenAdapter(dir string) (*Adapter, error) {
	text, err := regular.ReadFile(filepath.Join(dir, "adapter_config.json"), maxAdapterConfig)
	if err != nil && !errors.Is(err, regular.ErrKind) && !errors.Is(err, regular.ErrSize) {
		// The error is the same for every cause, so that clients cannot learn which paths are
		// files, folders or absent.
		return nil, fmt.Errorf("%w: %s has no adapter_config.json that can be read; give the folder that PEFT saved: %w", ErrAdapter, dir, fs.ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrAdapter, err)
	}
	c, err := parseAdapter(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAdapter, dir, err)
	}
	weights, err := safetensors.OpenFile(filepath.Join(dir, "adapter_model.safetensors"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrAdapter, err)
	}
	a := &Adapter{Base: c.Base, parts: map[string]*adapterPart{}}
	if err := errors.Join(a.read(weights, &c), weights.Close()); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrAdapter, dir, err)
	}
	return a, nil
}

// maxAdapterConfig bounds adapter_config.json, in bytes.
const maxAdapterConfig = 1 << 20

// parseAdapter reads adapter_config.json.
func parseAdapter(text []byte) (c adapterConfig, err error) {
	if err := json.Unmarshal(text, &c); err != nil {
		return c, fmt.Errorf("adapter_config.json: %w", err)
	}
	refuse := func(key string, value any, want string) error {
		return fmt.Errorf("adapter_config.json: %s is %v; supported: %s", key, value, want)
	}
	alpha := or(c.Alpha, 8)
	switch {
	case c.Type != "LORA":
		return c, refuse("peft_type", c.Type, "LORA")
	case c.Rank < 1 || c.Rank > maxRank:
		return c, refuse("r", c.Rank, fmt.Sprintf("1 to %d", maxRank))
	case math.IsNaN(alpha) || math.IsInf(alpha, 0):
		return c, refuse("lora_alpha", alpha, "a number")
	case slices.ContainsFunc(c.Ranks, func(p pattern) bool { return !(p.value >= 1 && p.value <= maxRank && p.value == math.Trunc(p.value)) }):
		return c, refuse("rank_pattern", c.Ranks, fmt.Sprintf("ranks of 1 to %d", maxRank))
	case c.DoRA:
		return c, refuse("use_dora", true, "false")
	case c.FanInFanOut:
		return c, refuse("fan_in_fan_out", true, "false")
	case c.Bias != "" && c.Bias != "none" || c.LoRABias:
		return c, refuse("bias", c.Bias, "none")
	case len(c.Save) > 0:
		return c, refuse("modules_to_save", c.Save, "none")
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return c, fmt.Errorf("adapter_config.json: %w", err)
	}
	for _, key := range otherwise {
		if v := string(all[key]); v != "" && v != "null" && v != "false" && v != "[]" && v != "{}" {
			return c, refuse(key, v, "none")
		}
	}
	return c, nil
}

// of returns the rank of a matrix's adapter and the factor on its product.
func (c *adapterConfig) of(matrix string) (rank int, factor float64) {
	rank = int(c.Ranks.of(matrix, float64(c.Rank)))
	factor = c.Alphas.of(matrix, or(c.Alpha, 8))
	if c.RSLoRA {
		return rank, factor / math.Sqrt(float64(rank))
	}
	return rank, factor / float64(rank)
}

// patterns are PEFT's exceptions by name: regular expressions. The first one that matches an end
// of the name, from a dot on, gives the number.
type patterns []pattern

type pattern struct {
	end   *regexp.Regexp
	value float64
}

// String shows a refusal what was given.
func (p pattern) String() string { return fmt.Sprintf("%v for %v", p.value, p.end) }

// maxPatterns bounds the patterns of an adapter, because each is tried on each matrix.
const maxPatterns = 1 << 12

// UnmarshalJSON keeps the order of an object, which decides.
func (p *patterns) UnmarshalJSON(text []byte) error {
	*p = nil
	d := json.NewDecoder(bytes.NewReader(text))
	if t, err := d.Token(); err != nil || t == nil {
		return err
	} else if t != json.Delim('{') {
		return fmt.Errorf("%v, want numbers by name", t)
	}
	for d.More() {
		key, err := d.Token() // a string: Unmarshal has seen that this is JSON
		if err != nil {
			return err
		}
		var value float64
		if err := d.Decode(&value); err != nil {
			return fmt.Errorf("%q: %w", key, err)
		}
		end, err := regexp.Compile(fmt.Sprintf(`^(?:.*\.)?(?:%v)$`, key))
		if err != nil {
			return fmt.Errorf("%q is no expression that is read here: %w", key, err)
		}
		if len(*p) == maxPatterns {
			return fmt.Errorf("%q is one of more than %d", key, maxPatterns)
		}
		*p = append(*p, pattern{end, value})
	}
	return nil
}

// of returns the number of the first pattern that matches a name, or otherwise.
func (p patterns) of(name string, otherwise float64) float64 {
	for i := range p {
		if p[i].end.MatchString(name) {
			return p[i].value
		}
	}
	return otherwise
}

// adapterTensor splits a tensor's name into the matrix that it adapts and its part, A or B.
var adapterTensor = regexp.MustCompile(`^(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight$`)

// read reads the tensors of an adapter.
func (a *Adapter) read(w *safetensors.Checkpoint, c *adapterConfig) error {
	h := xxhash.New()
	for _, name := range w.Names() {
		t, _ := w.Tensor(name)
		m := adapterTensor.FindStringSubmatch(name)
		if m == nil || len(t.Shape) != 2 {
			return fmt.Errorf("tensor %s %v is no lora_A or lora_B of a matrix", name, t.Shape)
		}
		values, err := floats(&t)
		if err != nil {
			return err
		}
		for i, v := range values {
			if v-v != 0 {
				return fmt.Errorf("tensor %s: number %d is %v: the file is damaged, or training failed", name, i, v)
			}
		}
		rank, factor := c.of(m[1])
		_, _ = fmt.Fprintf(h, "%q %v %b %x\n", name, t.Shape, factor, xxhash.Sum64(t.Data)) // a hash takes every write
		p := a.parts[m[1]+".weight"]
		if p == nil {
			p = &adapterPart{rank: rank}
			a.parts[m[1]+".weight"] = p
		}
		of := 0 // the dimension that is the rank
		if m[2] == "B" {
			of = 1
			for i := range values {
				values[i] = float32(float64(values[i]) * factor)
			}
			p.b, p.out = values, t.Shape[0]
		} else {
			p.a, p.in = values, t.Shape[1]
		}
		if t.Shape[of] != rank {
			return fmt.Errorf("tensor %s %v is of rank %d, adapter_config.json has %d for it", name, t.Shape, t.Shape[of], rank)
		}
		a.Rank = max(a.Rank, rank)
	}
	if len(a.parts) == 0 {
		return errors.New("adapter_model.safetensors has no tensors")
	}
	for name, p := range a.parts {
		if p.a == nil || p.b == nil {
			return fmt.Errorf("%s has %s without %s", strings.TrimSuffix(name, ".weight"), side(p.a != nil), side(p.a == nil))
		}
	}
	a.Digest = max(h.Sum64(), 1)
	return nil
}

// rowsOf returns the rows of B that a binding loads of its tensor.
func (p *adapterPart) rowsOf(b *binding) []float32 {
	if b.rows == nil {
		return p.b[b.parts[0].from*p.rank : (b.parts[0].from+b.parts[0].n)*p.rank]
	}
	out := make([]float32, 0, len(b.rows)*p.rank)
	for _, row := range b.rows {
		out = append(out, p.b[row*p.rank:(row+1)*p.rank]...)
	}
	return out
}

// side names one of the two matrices of a part.
func side(a bool) string {
	if a {
		return "lora_A"
	}
	return "lora_B"
}

// floats returns a tensor's values.
func floats(t *safetensors.Tensor) ([]float32, error) {
	switch t.DType {
	case "F32":
		out := make([]float32, len(t.Data)/4)
		for i := range out {
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
		}
		return out, nil
	case "BF16":
		out := make([]float32, len(t.Data)/2)
		for i := range out {
			out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(t.Data[2*i:])) << 16)
		}
		return out, nil
	case "F16":
		out := make([]float32, len(t.Data)/2)
		for i := range out {
			out[i] = backend.Half(binary.LittleEndian.Uint16(t.Data[2*i:]))
		}
		return out, nil
	}
	return nil, fmt.Errorf("tensor %s: dtype %s; supported: F32, BF16, F16", t.Name, t.DType)
}

// adaptable reports whether adapters may have a part for a matrix. They may for projections of
// attention and of dense MLPs, not for experts, embeddings and the output projection.
func adaptable(b *binding) bool {
	return len(b.shape) == 2 && strings.HasPrefix(b.name, "model.layers.") && strings.HasSuffix(b.name, "_proj.weight") && !strings.Contains(b.name, ".experts.")
}

// AdapterBytes returns the memory of places for adapters of a rank.
func (c *Config) AdapterBytes(places, rank int) (n int64) {
	for _, b := range c.network().weights() {
		if adaptable(&b) {
			n += int64(places) * backend.AdapterBytes(rank, b.parts[0].n, b.shape[1])
		}
	}
	return n
}

// Adapters allocates places for adapters of at most the given rank, and returns their bytes. It
// may be called once, before the first step.
func (m *Model) Adapters(places, rank int) (bytes int64, err error) {
	if places < 1 || rank < 1 || rank > maxRank {
		return 0, fmt.Errorf("%w: %d adapters of rank %d, want at least 1, of rank 1 to %d", ErrAdapter, places, rank, maxRank)
	}
	to, ok := m.backend.(backend.Adapters)
	if !ok {
		return 0, fmt.Errorf("%w: %s has no adapters", ErrUnsupported, m.backend.Variant())
	}
	m.adapt = map[string][]*binding{}
	var targets []backend.Weight
	for _, b := range m.net.weights() {
		if adaptable(&b) {
			m.adapt[b.name] = append(m.adapt[b.name], &b)
			targets = append(targets, *b.target)
		}
	}
	return m.config.AdapterBytes(places, rank), to.AllocAdapters(places, rank, targets)
}

// LoadAdapter loads an adapter into a place, from 1 on, and replaces the one there. Like Step it
// belongs to the backend's goroutine. An adapter that does not fit is refused, and the place is
// unchanged.
func (m *Model) LoadAdapter(place int, a *Adapter) error {
	var parts []backend.AdapterPart
	for name, p := range a.parts {
		name, ok := m.config.weightName(name)
		targets := m.adapt[name]
		if !ok || targets == nil {
			return fmt.Errorf("%w: it adapts %s; adapters of %s may adapt attention and dense MLP projections", ErrAdapter, strings.TrimSuffix(name, ".weight"), m.config.Architecture)
		}
		if shape := targets[0].shape; p.out != shape[0] || p.in != shape[1] {
			return fmt.Errorf("%w: %s is [%d, %d] in the model, [%d, %d] in the adapter", ErrAdapter, name, shape[0], shape[1], p.out, p.in)
		}
		for _, b := range targets {
			parts = append(parts, backend.AdapterPart{Target: *b.target, Rank: p.rank, A: p.a, B: p.rowsOf(b)})
		}
	}
	if err := m.backend.(backend.Adapters).LoadAdapter(place, parts); err != nil {
		return fmt.Errorf("%w: %w", ErrAdapter, err)
	}
	return nil
}
