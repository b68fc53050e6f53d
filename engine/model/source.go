// Package model converts a checkpoint folder in Hugging Face's layout to a forward pass on a
// backend. config.json becomes a Config by the function of its architecture's table entry. One
// decoder computes all architectures by the Features of their Config; Gemma 4 has a network of its
// own. Struct tags bind weights by their names, and Load checks every shape before the first weight
// moves. Step runs the pass, which is recorded once for each bucket of step sizes.
//
// Invariant: every setting of the checkpoint is computed as transformers computes it. A setting, a
// tensor or a type that this package does not support is refused by name and value, never skipped.
//
// The package does not schedule, and does not own KV blocks or tokens: a step comes in complete.
package model

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/internal/regular"
)

// maxFile bounds the files that ReadFile reads whole, in bytes. The largest
// published tokenizer.json has about 30 MB.
const maxFile = 128 << 20

// Errors of loading a checkpoint.
var (
	ErrPointer     = safetensors.ErrPointer
	ErrNoWeights   = safetensors.ErrNoWeights
	ErrSource      = errors.New("model: not a checkpoint folder")
	ErrConfig      = errors.New("model: bad config")
	ErrUnsupported = errors.New("model: not supported")
	ErrWeights     = errors.New("model: weights do not fit the config")
)

// Source is an open checkpoint folder. Its weights are mapped when first used
// and stay readable until Close.
type Source struct {
	// Name is the folder's name, the model's name unless --served-model-name sets another.
	Name   string
	Config Config

	repository string // the folder's name, or that of the model in a Hugging Face cache

	files   fs.FS
	weights func() (*safetensors.Checkpoint, error)
	close   func() error
	blocks  string // the file's types of blocks; empty: none
}

// wantFolder is the remedy for a model in another format.
const wantFolder = "give the model's Hugging Face folder, with config.json and safetensors, or one .gguf file; --quantization int8 or int4 makes it small as it is loaded"

// OpenDir opens a checkpoint folder on disk, or a GGUF file.
func OpenDir(dir string) (*Source, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSource, err)
	}
	if !info.IsDir() && strings.EqualFold(filepath.Ext(dir), ".gguf") {
		return openGGUF(dir)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%w: %s is a file; give the folder that holds config.json", ErrSource, dir)
	}
	name := filepath.Base(dir)
	if abs, err := filepath.Abs(dir); err == nil {
		name = filepath.Base(abs)
	}
	s, err := newSource(regular.Dir(dir), name, func() (*safetensors.Checkpoint, error) { return safetensors.OpenDir(dir) })
	if err == nil {
		s.repository = repositoryOf(dir)
	}
	return s, err
}

// OpenFS opens a checkpoint folder of a file system, such as an embedded one.
func OpenFS(files fs.FS, name string) (*Source, error) {
	return newSource(files, name, func() (*safetensors.Checkpoint, error) { return safetensors.OpenFS(files) })
}

func newSource(files fs.FS, name string, open func() (*safetensors.Checkpoint, error)) (*Source, error) {
	s := &Source{Name: name, files: files, close: func() error { return nil }}
	s.weights = sync.OnceValues(func() (*safetensors.Checkpoint, error) {
		c, err := open()
		if err == nil {
			s.close = c.Close
			c.Rename(s.Config.renamed(c.Names()))
			s.Config.findStacks(c.Names())
		}
		return c, err
	})
	text, err := s.ReadFile("config.json")
	if errors.Is(err, fs.ErrNotExist) {
		if found, _ := fs.Glob(files, "*.gguf"); len(found) > 0 {
			return nil, fmt.Errorf("%w: %s holds %s and no config.json: give the path of this file itself, or %s", ErrUnsupported, name, found[0], wantFolder)
		}
		return nil, fmt.Errorf("%w: %s has no config.json", ErrSource, name)
	}
	if err != nil {
		return nil, err
	}
	generation, err := s.optional("generation_config.json")
	if err != nil {
		return nil, err
	}
	quantization, err := s.optional(modelOptFile)
	if err != nil {
		return nil, err
	}
	s.Config, err = parseConfigs(text, generation, quantization)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

// OpenConfig reads a config.json without weights. path is the file, its folder, or a GGUF file.
func OpenConfig(path string) (Config, error) {
	if strings.EqualFold(filepath.Ext(path), ".gguf") {
		s, err := openGGUF(path)
		if err != nil {
			return Config{}, err
		}
		return s.Config, s.Close()
	}
	folder := ""
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		folder, path = path, filepath.Join(path, "config.json")
	}
	s := &Source{files: regular.Dir(filepath.Dir(path))}
	text, err := s.ReadFile(filepath.Base(path))
	if folder != "" && errors.Is(err, fs.ErrNotExist) {
		return Config{}, fmt.Errorf("%w: the folder has no config.json", ErrSource)
	}
	if err != nil {
		return Config{}, fmt.Errorf("%w: %w", ErrSource, err)
	}
	var quantization []byte
	if folder != "" {
		if quantization, err = s.optional(modelOptFile); err != nil {
			return Config{}, fmt.Errorf("%w: %w", ErrSource, err)
		}
	}
	return parseConfigs(text, nil, quantization)
}

// ReadFile returns the content of a file in the folder. The error of an absent file is an
// fs.ErrNotExist.
func (s *Source) ReadFile(name string) ([]byte, error) {
	f, err := s.files.Open(name)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if bytes.HasPrefix(data, []byte("version https://git-lfs")) {
		return nil, fmt.Errorf("model: %s is %w", name, safetensors.ErrPointer)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%w: %s has more than %d bytes", ErrSource, name, maxFile)
	}
	return data, nil
}

// optional is ReadFile for a file that may be absent: the content is then nil.
func (s *Source) optional(name string) ([]byte, error) {
	data, err := s.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

// WeightBytes returns the memory of the weights: the size of all tensors of the folder, unless
// they are converted to another type.
func (s *Source) WeightBytes(q Quantization) (int64, error) {
	c, err := s.weights()
	switch {
	case err != nil || q != AsStored && !s.Config.fourBits(q) && s.blocks == "":
		return s.Config.WeightBytes(q), err
	case s.Config.FP8 != nil || s.Config.Integers != nil || s.blocks != "":
		return s.Config.weightBytes(q, func(name string, _ bool) stored {
			found, _ := find(c, name, &s.Config) // Load reports its faults
			return found
		}), nil
	case s.Config.DType == "float16":
		return s.Config.WeightBytes(q), nil
	}
	return c.Bytes(), nil
}

// RankBytes returns the memory of a rank's weights: WeightBytes for one rank, else the rank's part
// of each matrix in the type that it has in the folder.
func (s *Source) RankBytes(q Quantization, of Shard) (int64, error) {
	if of.Ranks <= 1 {
		return s.WeightBytes(q)
	}
	local, err := of.Of(&s.Config)
	if err != nil {
		return 0, err
	}
	c, err := s.weights()
	if err != nil {
		return local.WeightBytes(q), err
	}
	return local.weightBytes(q, func(name string, _ bool) stored {
		found, _ := find(c, name, &s.Config) // Load reports its faults
		return found
	}), nil
}

// Checkpoint returns the folder's tensors. They stay readable until Close.
func (s *Source) Checkpoint() (*safetensors.Checkpoint, error) { return s.weights() }

// Files returns the folder.
func (s *Source) Files() fs.FS { return s.files }

// Integers describes the integers in which matrices are stored; empty: there are none.
func (s *Source) Integers() string {
	if q := s.Config.Integers; q != nil {
		return fmt.Sprintf("%s with %d bits", q.Method, q.Bits)
	}
	return s.blocks
}

// KeepsIntegers reports whether matrices stay as integers with a quantization. Those that a backend
// cannot keep are expanded.
func (s *Source) KeepsIntegers(q Quantization) bool {
	c, err := s.weights()
	if err != nil || s.Integers() == "" {
		return false
	}
	for _, b := range s.Config.network().weights() {
		if found, _ := find(c, b.name, &s.Config); found.grid != nil && b.plus == 0 && (q == AsStored || q.of(&b) != q.converted(&s.Config, &found, &b)) {
			return true
		}
	}
	return false
}

// ExpandIntegers has matrices of integers expanded as they are loaded, for backends without their
// products, and for products in float32.
func (s *Source) ExpandIntegers() { s.Config.Expand = true }

// ExpandFP8 has weights in FP8 converted to bfloat16 as they are loaded, for backends without FP8
// products.
func (s *Source) ExpandFP8() {
	if s.Config.FP8 != nil {
		s.Config.FP8.Wide = true
	}
}

// SetContext sets the length of the longest sequence that is served, which decides the frequencies
// of some rotations. The default is Config.MaxPositions. SetContext precedes Load and Fingerprint.
func (s *Source) SetContext(positions int) { s.Config.Rope.setContext(positions) }

// Close unmaps the weights. A backend with Options.Mapped must be closed before.
func (s *Source) Close() error { return s.close() }

// memoryFiles are files in memory, by their names.
type memoryFiles map[string][]byte

// Open returns a file. The error of an absent file is an fs.ErrNotExist.
func (m memoryFiles) Open(name string) (fs.File, error) {
	data, ok := m[name]
	if !ok {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return memoryFile{bytes.NewReader(data)}, nil
}

// memoryFile is an open file of memoryFiles. It is only read.
type memoryFile struct{ *bytes.Reader }

func (memoryFile) Close() error               { return nil }
func (memoryFile) Stat() (fs.FileInfo, error) { return nil, errors.ErrUnsupported }
