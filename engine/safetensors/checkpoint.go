// Package safetensors reads the weights of a checkpoint folder: one
// model.safetensors, or several files under model.safetensors.index.json. Files
// of a directory are mapped, so a tensor costs no memory of its own and nodes of
// one machine share the pages; files of an fs.FS are read.
//
// Invariant: files that Open accepts are complete. Every tensor has a known
// type, its bytes match its shape and are inside the file, and no two tensors
// share a byte.
//
// The package does not convert types and does not interpret names.
package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tandem-serving/tandem/internal/regular"
)

const (
	single = "model.safetensors"
	index  = "model.safetensors.index.json"
)

// maxIndex bounds the index of a sharded checkpoint, as MaxHeader bounds a file.
const maxIndex = MaxHeader

// ErrNoWeights is returned for a folder that has neither of the two file names.
var ErrNoWeights = errors.New("safetensors: no model.safetensors and no model.safetensors.index.json")

// Checkpoint is the open weights of one folder.
type Checkpoint struct {
	tensors map[string]Tensor
	mapped  [][]byte
}

// source is where a checkpoint's files come from.
type source struct {
	open func(name string) (fs.File, error)
	// bytes is a whole file; mapped is whether it must be unmapped.
	bytes func(name string) (data []byte, mapped bool, err error)
}

// OpenDir opens the weights in a directory and maps them.
func OpenDir(dir string) (*Checkpoint, error) {
	return open(source{
		open: regular.Dir(dir).Open,
		bytes: func(name string) ([]byte, bool, error) {
			data, err := mapFile(filepath.Join(dir, name))
			return data, true, err
		},
	})
}

// OpenFile opens the weights of a single file, whatever it is called, and maps it.
func OpenFile(path string) (*Checkpoint, error) { return OpenParsed(path, Parse) }

// OpenParsed is OpenFile for a file of another format, whose tensors parse returns. Their Data are
// parts of the file.
func OpenParsed(path string, parse func(file []byte) ([]Tensor, error)) (*Checkpoint, error) {
	data, err := mapFile(path)
	if err != nil {
		return nil, fmt.Errorf("safetensors: %w", err)
	}
	c := &Checkpoint{tensors: map[string]Tensor{}, mapped: [][]byte{data}}
	tensors, err := parse(data)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), c.Close())
	}
	for _, t := range tensors {
		c.tensors[t.Name] = t
	}
	return c, nil
}

// OpenFS reads the weights in a file system, such as those embedded in a binary.
func OpenFS(fsys fs.FS) (*Checkpoint, error) {
	return open(source{
		open: fsys.Open,
		bytes: func(name string) ([]byte, bool, error) {
			data, err := fs.ReadFile(fsys, name)
			return data, false, err
		},
	})
}

func open(s source) (*Checkpoint, error) {
	c := &Checkpoint{tensors: map[string]Tensor{}}
	err := c.addFile(s, single, nil)
	if errors.Is(err, fs.ErrNotExist) {
		err = c.addIndexed(s)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// addIndexed adds the shards that the index names, and of each the tensors that
// the index lists for it.
func (c *Checkpoint) addIndexed(s source) error {
	text, err := readBounded(s, index)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrNoWeights
	}
	if err != nil {
		return err
	}
	var content struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &content); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrFormat, index, err)
	}
	if len(content.WeightMap) == 0 {
		return fmt.Errorf("%w: %s: no weight_map", ErrFormat, index)
	}
	shards := map[string][]string{} // file -> tensor names
	for _, tensor := range slices.Sorted(maps.Keys(content.WeightMap)) {
		file := content.WeightMap[tensor]
		if !plainName(file) {
			return fmt.Errorf("%w: %s: tensor %q in file %q, which is not a name in this folder", ErrFormat, index, tensor, file)
		}
		shards[file] = append(shards[file], tensor)
	}
	for _, file := range slices.Sorted(maps.Keys(shards)) {
		if err := c.addFile(s, file, shards[file]); err != nil {
			return err
		}
	}
	return nil
}

// addFile adds the named tensors of a file, or all where names is nil.
func (c *Checkpoint) addFile(s source, file string, names []string) error {
	data, mapped, err := s.bytes(file)
	if err != nil {
		return fmt.Errorf("safetensors: %w", err)
	}
	if mapped {
		c.mapped = append(c.mapped, data)
	}
	tensors, err := Parse(data)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	wanted := map[string]bool{}
	for _, name := range names {
		wanted[name] = true
	}
	for _, t := range tensors {
		if names == nil || wanted[t.Name] {
			c.tensors[t.Name] = t
			delete(wanted, t.Name)
		}
	}
	for _, name := range names {
		if wanted[name] {
			return fmt.Errorf("%w: %s: tensor %q is in the index, not in the file", ErrFormat, file, name)
		}
	}
	return nil
}

// Tensor is the tensor of this name.
func (c *Checkpoint) Tensor(name string) (Tensor, bool) {
	t, ok := c.tensors[name]
	return t, ok
}

// Names are the names of all tensors, sorted.
func (c *Checkpoint) Names() []string {
	return slices.Sorted(maps.Keys(c.tensors))
}

// Rename renames tensors, and removes those for which to returns false.
func (c *Checkpoint) Rename(to func(name string) (string, bool)) {
	renamed := make(map[string]Tensor, len(c.tensors))
	for name, t := range c.tensors {
		if name, ok := to(name); ok {
			t.Name = name
			renamed[name] = t
		}
	}
	c.tensors = renamed
}

// Split replaces each tensor by those that into returns for it. The second one of a name gets
// another name, so that none is lost.
func (c *Checkpoint) Split(into func(Tensor) []Tensor) {
	parts := make(map[string]Tensor, len(c.tensors))
	for _, t := range c.tensors {
		for _, part := range into(t) {
			if _, twice := parts[part.Name]; twice {
				part.Name += " of " + t.Name
			}
			parts[part.Name] = part
		}
	}
	c.tensors = parts
}

// Bytes is the size of all tensors.
func (c *Checkpoint) Bytes() int64 {
	n := int64(0)
	for _, t := range c.tensors {
		n += int64(len(t.Data))
	}
	return n
}

// Release takes the pages of a part of a mapped file out of the process's memory. They stay in the
// system's cache, and return when they are read.
func (c *Checkpoint) Release(part []byte) {
	if len(part) == 0 {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	for _, file := range c.mapped {
		first := uintptr(unsafe.Pointer(unsafe.SliceData(file)))
		if at < first || at >= first+uintptr(len(file)) {
			continue
		}
		from := int(at-first) &^ (os.Getpagesize() - 1)
		_ = unix.Madvise(file[from:int(at-first)+len(part)], unix.MADV_DONTNEED)
	}
}

// Close unmaps the files. No tensor's Data may be used after it.
func (c *Checkpoint) Close() error {
	var errs []error
	for _, data := range c.mapped {
		errs = append(errs, unix.Munmap(data))
	}
	c.mapped, c.tensors = nil, nil
	return errors.Join(errs...)
}

// mapFile maps a file for reading. The file must not be cut short while it is
// mapped: the kernel answers a read past its end with SIGBUS.
func mapFile(path string) ([]byte, error) {
	f, err := regular.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() < 8 {
		return nil, fmt.Errorf("%w: %s: %d bytes, want at least 8", ErrFormat, path, info.Size())
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, &fs.PathError{Op: "mmap", Path: path, Err: err}
	}
	return data, nil
}

func readBounded(s source, name string) ([]byte, error) {
	f, err := s.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxIndex+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxIndex {
		return nil, fmt.Errorf("%w: %s: more than %d bytes", ErrFormat, name, maxIndex)
	}
	return data, nil
}

// plainName reports whether a shard's name stays in its folder.
func plainName(name string) bool {
	return name != "" && fs.ValidPath(name) && !strings.ContainsAny(name, `/\`) && name != "."
}
