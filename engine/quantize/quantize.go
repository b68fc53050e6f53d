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
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
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

	// Memory is what a model that samples its text may take, in bytes, so that its matrices stay
	// for all tokens. The calibration may need more, which that model may take, too.
	Memory int64

	// Start, where set, is called once the options are checked, before anything is written.
	Start func(Need)
	// Progress is called with the number of matrices converted so far and in total.
	Progress func(done, total int)
	// Calibrating, where set, is called before the first layer, when the text is there.
	Calibrating func()
	// Layer, where set, is called after each layer, with the number of layers so far and in total.
	Layer func(done, total int)

	streaming streaming // of tests
}

// streaming are other sizes of what is kept in memory.
type streaming struct {
	resident bool  // everything that the calibration loads stays
	budget   int64 // of the model that writes the text; 0: that of the calibration
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

	// Apart are two matrices with different bits that vLLM computes as one, so that it does not load
	// the folder; empty: there are none.
	Apart [2]string
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
	// The largest parts of the heap replace each other, and would take twice their memory.
	defer debug.SetGCPercent(debug.SetGCPercent(20))
	part := dir + ".part"
	need := j.need()
	need.Free, _ = freeBytes(filepath.Dir(dir))
	if err := room(filepath.Dir(dir), need.Disk); err != nil {
		return r, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return r, unwritable(err)
	}
	if err := os.Mkdir(part, 0o755); errors.Is(err, fs.ErrExist) {
		return r, fmt.Errorf("%w: %s exists: another process writes it, or was killed; remove it if there is none", ErrOption, part)
	} else if err != nil {
		return r, unwritable(err)
	}
	if o.Start != nil {
		o.Start(need)
	}
	if err := errors.Join(j.run(part), ctx.Err()); err != nil {
		return r, errors.Join(err, os.RemoveAll(part))
	}
	if err := os.Rename(part, dir); err != nil {
		return r, err
	}
	j.result.Apart = j.apart()
	return j.result, syncFolder(filepath.Dir(dir))
}

// unwritable is the refusal of a folder that cannot be made.
func unwritable(err error) error {
	return fmt.Errorf("%w: the folder cannot be made: %w; name one that you may write", ErrOption, err)
}

// syncFolder has the names of a folder's files on the disk if the error is nil.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// job is one call of Write.
type job struct {
	ctx       context.Context
	src       *model.Source
	o         Options
	scales    map[string]scaling // of each matrix
	files     *safetensors.Checkpoint
	matrices  []string // names of tensors, in the order of the model
	layout    layout
	out       *writer
	converted map[string]bool
	layers    int // that are done
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
	j.layout, err = newLayout(j.files, j.scales, j.src.Config.DType == "float16")
	return err
}

// run writes the files to dir. The weights get their name when they are complete, so that no other
// folder loads.
func (j *job) run(dir string) (err error) {
	if err := j.rest(dir); err != nil {
		return err
	}
	if _, err := model.OpenConfig(filepath.Join(dir, "config.json")); err != nil {
		return fmt.Errorf("%w: %s could not be loaded with integers: %w", ErrOption, j.src.Name, err)
	}
	weights := filepath.Join(dir, "model.safetensors")
	if j.out, err = newWriter(weights+".part", j.layout, j.files, j.scales); err != nil {
		return err
	}
	if err := errors.Join(j.convertAll(), j.out.close()); err != nil {
		return err
	}
	return errors.Join(os.Rename(weights+".part", weights), syncFolder(dir))
}

// convertAll writes all matrices that are converted.
func (j *job) convertAll() error {
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
	limits := limitsOf(j.src, sequences, j.o.Length)
	all := text.sequences
	if all == nil {
		if all, err = j.sampleAll(text.prefix, limits); err != nil {
			return err
		}
	}
	c, err := newCalibration(j.src, j.tapped(), limits, j.o.Length, j.o.Threads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.back.Close()) }()
	exact, err := newCalibration(j.src, j.tapped(), limits, j.o.Length, j.o.Threads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, exact.back.Close()) }()
	if j.result.Tokens = len(all) * j.o.Length; j.o.Calibrating != nil {
		j.o.Calibrating()
	}
	err = c.fit(exact, all, j.workers(), func(t *backend.Tensor, f *factor) ([]byte, error) {
		j.reach(layerOf(t.Name))
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
	if err == nil {
		j.reach(j.src.Config.Layers)
	}
	return err
}

// reach reports that all layers before one are done.
func (j *job) reach(layer int) {
	for ; j.layers < layer; j.layers++ {
		if j.o.Layer != nil {
			j.o.Layer(j.layers+1, j.src.Config.Layers)
		}
	}
}

// layerOf returns the number of the layer of a tensor; 0: it has none.
func layerOf(name string) int {
	_, rest, _ := strings.Cut(name, ".layers.")
	number, _, _ := strings.Cut(rest, ".")
	n, _ := strconv.Atoi(number)
	return n
}

// joined are the ends of the names of matrices that vLLM computes as one.
var joined = [][]string{{"q_proj.weight", "k_proj.weight", "v_proj.weight"}, {"gate_proj.weight", "up_proj.weight"}, {"w1.weight", "w3.weight"}}

// apart returns two matrices that vLLM computes as one, and that have different bits. Those of all
// experts of a layer are such, too.
func (j *job) apart() (pair [2]string) {
	first := map[string]string{} // of those that are computed as one
	for _, m := range j.matrices {
		one := m
		for _, ends := range joined {
			for _, end := range ends {
				if module, ok := strings.CutSuffix(m, "."+end); ok {
					one = module + "." + ends[0]
				}
			}
		}
		if module, _, ok := strings.Cut(m, ".experts."); ok {
			one = module + ".experts"
		}
		if other, ok := first[one]; !ok {
			first[one] = m
		} else if j.scales[other].bits != j.scales[m].bits {
			return [2]string{other, m}
		}
	}
	return pair
}

// tapped returns a backend of a calibration.
func (j *job) tapped() *tapped {
	return &tapped{files: j.files, want: j.scales, resident: j.o.streaming.resident}
}

// sampleAll has the model write the sequences of a calibration with these limits. Matrices stay in
// Options.Memory, or in what the calibration will need anyway. Others are read for each token.
func (j *job) sampleAll(prefix []int32, limits backend.Limits) (all [][]int32, err error) {
	room, each := cmp.Or(j.o.streaming.budget, max(j.o.Memory, j.need().Memory-process)-j.head()), j.kvBytes()
	draw := rand.New(rand.NewPCG(j.o.Seed, 0))
	for first := 0; first < limits.Seqs; {
		n := int(min(int64(limits.Seqs-first), max(1, room/2/each)))
		back := j.tapped()
		back.logits, back.budget = true, room-int64(n)*each
		c, err := newCalibration(j.src, back, backend.Limits{Tokens: n * max(1, len(prefix)), Seqs: n, Outputs: n}, j.o.Length, j.o.Threads)
		if err != nil {
			return nil, err
		}
		some, err := c.sampleText(j.ctx, prefix, j.o.Seed, first, draw)
		if err := errors.Join(err, back.Close()); err != nil {
			return nil, err
		}
		all, first = append(all, some...), first+n
	}
	return all, nil
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
	j.files.Release(t.Data)
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

// others returns the names of the files that are copied, and their bytes. Of folders, such as those
// that modules.json names, it is config.json.
func (j *job) others() (names []string, bytes int64, err error) {
	entries, err := fs.ReadDir(j.src.Files(), ".")
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() {
			name += "/config.json"
		}
		if !slices.Contains(copied, filepath.Ext(name)) || strings.HasSuffix(name, ".safetensors.index.json") {
			continue
		}
		info, err := fs.Stat(j.src.Files(), name)
		if e.IsDir() && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, 0, err
		}
		names, bytes = append(names, name), bytes+info.Size()
	}
	return names, bytes, err
}

// rest writes config.json with the description of the integers, and copies the other files.
func (j *job) rest(dir string) error {
	names, _, err := j.others()
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := j.src.ReadFile(name)
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
