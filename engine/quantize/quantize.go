// Package quantize converts the matrices of a checkpoint to integers of 4 bits with error feedback,
// and writes a checkpoint in the form of compressed-tensors.
//
// Sequences of tokens run through the model in one step. The moments of a matrix's inputs describe
// how the other weights can make up for the error of one. The matrix is rounded input by input
// (Frantar et al., "GPTQ", 2022; in the form of Babai's nearest plane, from the last input to the
// first, which needs no inverse). The rounded matrix replaces the original one in the step. So
// later matrices are fitted to the inputs that they will have, and to the outputs of the original
// model, which runs next to it (Li et al., "GPTAQ", 2025).
//
// Invariant: the folder that Write makes is complete or absent, and its weights are a function of
// the model, the tokens and the options.
//
// The package does not serve, and converts no matrix of the vocabulary, router, norm or bias.
package quantize

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// ErrOption wraps refusals of options and models.
var ErrOption = errors.New("quantize: not possible")

// Options are the options of Write.
type Options struct {
	Group     int            // inputs that share a scale; it divides the inputs of each matrix
	Wide      *regexp.Regexp // names of matrices that get 8 bits; nil: Sensitive
	Text      string         // runs through the model; empty: the model samples it
	Sequences int            // at most; a short Text has fewer
	Length    int            // tokens of a sequence
	Seed      uint64         // of the text that the model samples
	Threads   int            // 0: GOMAXPROCS

	// Progress is called with the number of matrices converted so far and in total.
	Progress func(done, total int)
}

// Sensitive matches the default matrices of Options.Wide. An error of the values of the first
// layer's attention reaches all layers, and these matrices are small.
var Sensitive = regexp.MustCompile(`layers\.0\.self_attn\.[vo]_proj\.`)

// Defaults of Options.
const (
	Group     = 32
	Sequences = 32
	Length    = 256
)

// maxTokens bounds the tokens of a calibration, which run in one step.
const maxTokens = 1 << 20

// Result describes a folder that was written.
type Result struct {
	Matrices int   // that were converted
	Weights  int64 // their numbers
	Bytes    int64 // of their integers and scales
	Tokens   int   // that ran through the model
}

// Bits returns the bits of a converted weight, with its share of the scales.
func (r Result) Bits() float64 { return 8 * float64(r.Bytes) / float64(max(r.Weights, 1)) }

// Write converts the model of src and writes the folder dir, which must not exist. It writes to
// dir.part first, which a killed process leaves behind.
func Write(ctx context.Context, src *model.Source, dir string, o Options) (r Result, err error) {
	dir = filepath.Clean(dir)
	if _, err := os.Lstat(dir); err == nil {
		return r, fmt.Errorf("%w: %s exists; name a folder that does not exist", ErrOption, dir)
	}
	j := &job{ctx: ctx, src: src, o: o, scales: map[string]scaling{}, converted: map[string]bool{}}
	if j.o.Wide == nil {
		j.o.Wide = Sensitive
	}
	if err := j.check(); err != nil {
		return r, err
	}
	part := dir + ".part"
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return r, err
	}
	if err := os.Mkdir(part, 0o755); errors.Is(err, fs.ErrExist) {
		return r, fmt.Errorf("%w: %s exists: another process writes it, or was killed; remove it if there is none", ErrOption, part)
	} else if err != nil {
		return r, err
	}
	if err := errors.Join(j.run(part), ctx.Err()); err != nil {
		return r, errors.Join(err, os.RemoveAll(part))
	}
	return j.result, os.Rename(part, dir)
}

// job is one call of Write.
type job struct {
	ctx       context.Context
	src       *model.Source
	o         Options
	scales    map[string]scaling // of each matrix
	files     *safetensors.Checkpoint
	matrices  []string // names of tensors, in the order of the model
	out       *writer
	converted map[string]bool
	result    Result
}

// check refuses what cannot be converted.
func (j *job) check() (err error) {
	if j.o.Group < 1 || j.o.Group%8 != 0 || j.o.Sequences < 1 || j.o.Length < 2 || j.o.Length > j.src.Config.MaxPositions || j.o.Sequences > maxTokens/j.o.Length {
		return fmt.Errorf("%w: groups of %d, %d sequences of %d tokens; want a multiple of 8, at most %d tokens in a sequence and %d in all",
			ErrOption, j.o.Group, j.o.Sequences, j.o.Length, j.src.Config.MaxPositions, maxTokens)
	}
	if c := &j.src.Config; j.src.Integers() != "" || c.FP8 != nil || c.MXFP4 {
		return fmt.Errorf("%w: the weights of %s are integers or floats of 8 or 4 bits already; give the model in float32, float16 or bfloat16", ErrOption, j.src.Name)
	}
	if j.src.Config.Wrapped {
		return fmt.Errorf("%w: %s is a text model within a larger one; give a folder with the text model alone", ErrOption, j.src.Name)
	}
	if j.files, err = j.src.Checkpoint(); err != nil {
		return err
	}
	for _, m := range j.src.Matrices() {
		t, ok := j.files.Tensor(m)
		if !ok {
			return fmt.Errorf("%w: %s has no tensor %s", ErrOption, j.src.Name, m)
		}
		if slices.Contains(j.matrices, m) { // other rows of the same tensor
			continue
		}
		if len(t.Shape) != 2 || t.Shape[1]%j.o.Group != 0 {
			remedy := "give a --group-size that divides them"
			if len(t.Shape) != 2 || t.Shape[1]%8 != 0 {
				remedy = "the model cannot be converted, because no multiple of 8 divides them"
			}
			return fmt.Errorf("%w: %s is %v: its inputs are no multiple of groups of %d; %s", ErrOption, m, t.Shape, j.o.Group, remedy)
		}
		j.matrices = append(j.matrices, m)
		s := scaling{4, j.o.Group, roundBFloat}
		if j.o.Wide.MatchString(m) {
			s.bits = 8
		}
		if j.src.Config.DType == "float16" {
			s.round = roundHalf
		}
		j.scales[m] = s
	}
	if len(j.matrices) == 0 {
		return fmt.Errorf("%w: %s has no matrices that are tensors of their own", ErrOption, j.src.Name)
	}
	return nil
}

// run writes the files to dir.
func (j *job) run(dir string) (err error) {
	if err := j.rest(dir); err != nil {
		return err
	}
	if _, err := model.OpenConfig(filepath.Join(dir, "config.json")); err != nil {
		return fmt.Errorf("%w: %s could not be loaded with integers: %w", ErrOption, j.src.Name, err)
	}
	if j.out, err = newWriter(filepath.Join(dir, "model.safetensors"), j.files, j.scales, j.src.Config.DType == "float16"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.out.close()) }()
	if err := j.calibrate(); err != nil {
		return err
	}
	for _, m := range j.matrices { // those whose inputs the backend does not show
		if !j.converted[m] {
			if _, err := j.convert(m, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// calibrate runs the tokens through the model, and converts matrices on the way.
func (j *job) calibrate() (err error) {
	text, err := j.tokens()
	if err != nil {
		return err
	}
	sequences := j.o.Sequences
	if text.sequences != nil {
		sequences = len(text.sequences)
	}
	c, err := newCalibration(j.src, j.scales, sequences, j.o.Length, j.o.Threads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.back.Close()) }()
	exact, err := newCalibration(j.src, j.scales, sequences, j.o.Length, j.o.Threads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, exact.back.Close()) }()
	all := text.sequences
	if all == nil {
		if all, err = c.sampleText(j.ctx, text.prefix, j.o.Seed); err != nil {
			return err
		}
	}
	j.result.Tokens = len(all) * j.o.Length
	return c.run(exact, all, j.workers(), func(t *backend.Tensor, f *factor) ([]byte, error) {
		var m *matrix
		if !j.converted[t.Name] {
			if m, err = j.convert(t.Name, f); err != nil {
				return nil, err
			}
		}
		// The rows that were loaded may be a part of the tensor's, or in another order.
		if file, _ := j.files.Tensor(t.Name); m == nil || !same(file.Data, t.Data) {
			m = round(t.Shape[0], t.Shape[1], rowsOf(t.Data, t.DType.String(), t.Shape[1]), j.scales[t.Name], f, j.workers())
		}
		return m.expand(t.DType, j.workers()), nil
	})
}

func (j *job) workers() workers { return workers{j.ctx, j.o.Threads} }

// same reports whether two slices are the same memory.
func same(a, b []byte) bool { return len(a) == len(b) && unsafe.SliceData(a) == unsafe.SliceData(b) }

// convert rounds a tensor of the files and writes it.
func (j *job) convert(name string, f *factor) (*matrix, error) {
	if err := j.ctx.Err(); err != nil {
		return nil, err
	}
	t, _ := j.files.Tensor(name)
	m := round(t.Shape[0], t.Shape[1], rowsOf(t.Data, t.DType, t.Shape[1]), j.scales[name], f, j.workers())
	if err := j.ctx.Err(); err != nil {
		return nil, err
	}
	if m.infinite.Load() {
		return nil, fmt.Errorf("%w: %s has weights that are NaN or infinite; the file is damaged, or the model is", ErrOption, name)
	}
	n, err := j.out.matrix(name, m)
	if err != nil {
		return nil, err
	}
	j.converted[name] = true
	j.result.Matrices++
	j.result.Weights += int64(m.out) * int64(m.in)
	j.result.Bytes += n
	if j.o.Progress != nil {
		j.o.Progress(j.result.Matrices, len(j.matrices))
	}
	return m, nil
}

// text is what runs through the model: sequences, or what the model continues.
type text struct {
	sequences [][]int32
	prefix    []int32
}

// tokens returns the sequences of Options.Text. Without a text it returns the tokens that each
// prompt begins with.
func (j *job) tokens() (t text, err error) {
	b, err := j.src.Bundle()
	if err != nil {
		return t, err
	}
	if b.TokenizerJSON == nil {
		if j.o.Text != "" {
			return t, fmt.Errorf("%w: %s has no tokenizer for the calibration text; leave the text out", ErrOption, j.src.Name)
		}
		return t, nil
	}
	tok, err := tokenizer.Load(b.TokenizerJSON)
	if err != nil {
		return t, err
	}
	t.prefix = tok.Encode("", true)
	each := j.o.Length - len(t.prefix)
	if each < 1 {
		return t, fmt.Errorf("%w: sequences of %d tokens, of which a prompt begins with %d", ErrOption, j.o.Length, len(t.prefix))
	}
	if j.o.Text == "" {
		return t, nil
	}
	ids := tok.Encode(j.o.Text, false)
	for len(ids) >= each && len(t.sequences) < j.o.Sequences {
		t.sequences = append(t.sequences, slices.Concat(t.prefix, ids[:each]))
		ids = ids[each:]
	}
	if len(t.sequences) == 0 {
		return t, fmt.Errorf("%w: the calibration text has %d tokens, fewer than a sequence of %d", ErrOption, len(ids), each)
	}
	return t, nil
}

// copied are the ends of the names of files that are copied.
var copied = []string{".json", ".jinja", ".model", ".txt", ".tiktoken"}

// rest writes config.json with the description of the integers, and copies the other files. Of
// folders, such as those that modules.json names, it copies config.json.
func (j *job) rest(dir string) error {
	entries, err := fs.ReadDir(j.src.Files(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() {
			name += "/config.json"
		}
		if !slices.Contains(copied, filepath.Ext(name)) || strings.HasSuffix(name, ".safetensors.index.json") {
			continue
		}
		data, err := j.src.ReadFile(name)
		if e.IsDir() && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && name == "config.json" {
			data, err = j.config(data)
		}
		if err == nil {
			err = save(filepath.Join(dir, filepath.FromSlash(name)), data)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// save writes a file, and its folder. The data is on the disk if the error is nil.
func save(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

// config adds quantization_config, in the form of compressed-tensors, to a config.json.
func (j *job) config(text []byte) ([]byte, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(text, &keys); err != nil {
		return nil, err
	}
	groups := map[string]any{}
	for i, bits := range []int{4, 8} {
		targets := []string{"Linear"}
		if bits == 8 {
			if targets = j.wide(); len(targets) == 0 {
				continue
			}
		}
		groups[fmt.Sprintf("group_%d", i)] = map[string]any{
			"targets": targets, "input_activations": nil, "output_activations": nil, "format": "pack-quantized",
			"weights": map[string]any{
				"num_bits": bits, "type": "int", "symmetric": true, "strategy": "group", "group_size": j.o.Group, "dynamic": false,
			},
		}
	}
	q, err := json.Marshal(map[string]any{
		"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
		"ignore": j.kept(), "config_groups": groups,
	})
	if err != nil {
		return nil, err
	}
	keys["quantization_config"] = q
	return json.MarshalIndent(keys, "", "  ")
}

// kept returns the modules with matrices that are not converted, and lm_head, which the files may
// leave out.
func (j *job) kept() []string {
	kept := []string{"lm_head"}
	for _, name := range j.files.Names() {
		t, _ := j.files.Tensor(name)
		if module, ok := strings.CutSuffix(name, ".weight"); ok && len(t.Shape) == 2 && j.scales[name].bits == 0 && module != "lm_head" {
			kept = append(kept, module)
		}
	}
	return kept
}

// wide returns patterns of the modules with 8 bits.
func (j *job) wide() (modules []string) {
	for _, m := range j.matrices {
		if j.scales[m].bits == 8 {
			modules = append(modules, "re:.*"+regexp.QuoteMeta(strings.TrimSuffix(m, ".weight"))+"$")
		}
	}
	return modules
}
