// Package gguf reads the files of llama.cpp: metadata by keys, and tensors whose bytes are parts of
// the file. Expand converts a tensor's blocks to float32, bit for bit as the Python package gguf
// does.
//
// Invariant: files that Parse accepts are complete. Every tensor has a type that Expand knows or
// that is a plain number, its bytes match its shape and are inside the file, and no two tensors
// share a byte. Memory is in proportion to the file, whatever its counts are.
//
// The package does not interpret names.
package gguf

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrFormat is returned for a file that violates the format, or that needs what this package lacks.
var ErrFormat = errors.New("gguf: malformed file")

// maxDims bounds a tensor's rank, as the format does.
const maxDims = 4

// File is the content of a parsed file.
type File struct {
	Tensors []Tensor // in the order of their data
	values  map[string]value
}

// Tensor is one named array.
type Tensor struct {
	Name  string
	Type  string // F32, F16, BF16, or a type that BlockOf knows
	Shape []int  // row-major: the last dimension is contiguous
	Data  []byte // a part of the file
}

// Kinds of values, as the format numbers them.
const (
	kindU8 = iota
	kindI8
	kindU16
	kindI16
	kindU32
	kindI32
	kindF32
	kindBool
	kindString
	kindArray
	kindU64
	kindI64
	kindF64
)

// sizes of values, in bytes; strings and arrays have none.
var sizes = [...]int{kindU8: 1, kindI8: 1, kindU16: 2, kindI16: 2, kindU32: 4, kindI32: 4, kindF32: 4, kindBool: 1, kindString: 0, kindArray: 0, kindU64: 8, kindI64: 8, kindF64: 8}

// value is a metadata value: the bytes of a number, a string or all elements of an array.
type value struct {
	kind  uint32 // of the elements, for an array
	array bool
	count int
	data  []byte
}

// reader reads a file from its start, and keeps the first error.
type reader struct {
	data []byte
	at   int
	err  error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: "+format, append([]any{ErrFormat}, args...)...)
	}
}

// take returns the next n bytes.
func (r *reader) take(n uint64, what string) []byte {
	if left := uint64(len(r.data) - r.at); r.err == nil && n > left {
		r.fail("%s of %d bytes at %d, the file has %d more", what, n, r.at, left)
	}
	if r.err != nil {
		return nil
	}
	part := r.data[r.at : r.at+int(n)]
	r.at += int(n)
	return part
}

func (r *reader) u32(what string) uint32 {
	if b := r.take(4, what); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64(what string) uint64 {
	if b := r.take(8, what); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *reader) str(what string) string { return string(r.take(r.u64(what), what)) }

// Parse reads a file.
func Parse(data []byte) (*File, error) {
	r := &reader{data: data}
	if magic := r.take(4, "magic"); r.err == nil && string(magic) != "GGUF" {
		r.fail("it begins with %q", magic)
	}
	if version := r.u32("version"); r.err == nil && version != 2 && version != 3 {
		r.fail("version %d, supported: 2 and 3", version)
	}
	nTensors, nValues := r.u64("number of tensors"), r.u64("number of values")
	f := &File{values: map[string]value{}}
	for i := uint64(0); i < nValues && r.err == nil; i++ {
		key := r.str("key")
		v := r.value(key)
		if _, twice := f.values[key]; twice {
			r.fail("key %q is there twice", key)
		}
		f.values[key] = v
	}
	entries := r.entries(nTensors)
	if r.err != nil {
		return nil, r.err
	}
	alignment := uint64(32)
	if a, ok := f.Int("general.alignment"); ok {
		if a < 1 || a > 1<<20 || a&(a-1) != 0 {
			return nil, fmt.Errorf("%w: general.alignment is %d", ErrFormat, a)
		}
		alignment = uint64(a)
	}
	start := (uint64(r.at) + alignment - 1) / alignment * alignment
	return f, f.place(entries, data[min(start, uint64(len(data))):], alignment)
}

// value reads the value of a key.
func (r *reader) value(key string) value {
	v := value{kind: r.u32("type of " + key), count: 1}
	if v.kind == kindArray {
		v.array, v.kind = true, r.u32("type of "+key)
		n := r.u64("length of " + key)
		if left := uint64(len(r.data) - r.at); r.err == nil && n > left {
			r.fail("%s has %d elements, the file %d more bytes", key, n, left)
		}
		v.count = int(n)
	}
	if v.kind >= uint32(len(sizes)) || v.kind == kindArray {
		r.fail("%s has type %d", key, v.kind)
	}
	if r.err != nil {
		return v
	}
	from := r.at
	if v.kind == kindString {
		for range v.count {
			r.take(r.u64("string in "+key), "string in "+key)
			if r.err != nil {
				return v
			}
		}
	} else {
		r.take(uint64(v.count)*uint64(sizes[v.kind]), key)
	}
	v.data = r.data[from:r.at]
	return v
}

// entry is a tensor's description.
type entry struct {
	Tensor
	offset, size uint64
}

func (r *reader) entries(n uint64) []entry {
	var entries []entry
	names := map[string]bool{}
	for i := uint64(0); i < n && r.err == nil; i++ {
		e := entry{}
		e.Name = r.str("name of a tensor")
		dims := r.u32("dimensions of " + e.Name)
		if names[e.Name] {
			r.fail("tensor %q is there twice", e.Name)
		}
		if dims < 1 || dims > maxDims {
			r.fail("tensor %q has %d dimensions, between 1 and %d are read", e.Name, dims, maxDims)
		}
		names[e.Name] = true
		elements := uint64(1)
		for range min(dims, maxDims) {
			d := r.u64("dimensions of " + e.Name)
			if r.err == nil && (d < 1 || d > math.MaxInt32 || elements > math.MaxInt64/1024/d) {
				r.fail("tensor %q has a dimension of %d", e.Name, d)
				break
			}
			elements *= d
			e.Shape = append(e.Shape, int(d))
		}
		slices.Reverse(e.Shape)
		kind := r.u32("type of " + e.Name)
		e.offset = r.u64("offset of " + e.Name)
		if r.err != nil {
			break
		}
		t, ok := types[kind]
		if !ok {
			r.fail("tensor %q has type %s; read are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K and MXFP4", e.Name, typeName(kind))
			break
		}
		if row := e.Shape[len(e.Shape)-1]; row%t.Elements != 0 {
			r.fail("tensor %q has rows of %d, which are no multiple of the %d in a block of %s", e.Name, row, t.Elements, t.name)
		}
		e.Type, e.size = t.name, elements/uint64(t.Elements)*uint64(t.Bytes)
		entries = append(entries, e)
	}
	return entries
}

// place gives each tensor its bytes.
func (f *File) place(entries []entry, data []byte, alignment uint64) error {
	slices.SortStableFunc(entries, func(a, b entry) int { return cmp.Compare(a.offset, b.offset) })
	end := uint64(0)
	for _, e := range entries {
		switch {
		case e.offset%alignment != 0:
			return fmt.Errorf("%w: tensor %q begins at %d, which is no multiple of %d", ErrFormat, e.Name, e.offset, alignment)
		case e.offset > uint64(len(data)) || e.size > uint64(len(data))-e.offset:
			return fmt.Errorf("%w: tensor %q has %d bytes at %d, and the file ends at %d", ErrFormat, e.Name, e.size, e.offset, len(data))
		case e.offset < end:
			return fmt.Errorf("%w: tensor %q begins at %d, within the one before it, which ends at %d", ErrFormat, e.Name, e.offset, end)
		}
		end = e.offset + e.size
		e.Data = data[e.offset:end:end]
		f.Tensors = append(f.Tensors, e.Tensor)
	}
	return nil
}

// String returns a string value; false: there is none of this key and type.
func (f *File) String(key string) (string, bool) {
	v, ok := f.values[key]
	if !ok || v.array || v.kind != kindString {
		return "", false
	}
	return string(v.data[8:]), true
}

// Int returns an integer value; false: there is none of this key and type.
func (f *File) Int(key string) (int64, bool) {
	v, ok := f.values[key]
	if !ok || v.array || v.kind == kindF32 || v.kind == kindF64 || v.kind == kindString || v.kind == kindBool {
		return 0, false
	}
	return v.integer(0), true
}

// integer returns element i. Numbers past the range of int64 are its largest one.
func (v *value) integer(i int) int64 {
	b := v.data[i*sizes[v.kind]:]
	switch v.kind {
	case kindU8, kindBool:
		return int64(b[0])
	case kindI8:
		return int64(int8(b[0]))
	case kindU16:
		return int64(binary.LittleEndian.Uint16(b))
	case kindI16:
		return int64(int16(binary.LittleEndian.Uint16(b)))
	case kindU32:
		return int64(binary.LittleEndian.Uint32(b))
	case kindI32:
		return int64(int32(binary.LittleEndian.Uint32(b)))
	case kindU64:
		return int64(min(binary.LittleEndian.Uint64(b), math.MaxInt64))
	}
	return int64(binary.LittleEndian.Uint64(b))
}

// Float returns a number; false: there is none of this key and type.
func (f *File) Float(key string) (float64, bool) {
	v, ok := f.values[key]
	switch {
	case ok && !v.array && v.kind == kindF32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(v.data))), true
	case ok && !v.array && v.kind == kindF64:
		return math.Float64frombits(binary.LittleEndian.Uint64(v.data)), true
	}
	n, ok := f.Int(key)
	return float64(n), ok
}

// Bool returns a boolean; false, false: there is none of this key and type.
func (f *File) Bool(key string) (set, ok bool) {
	v, ok := f.values[key]
	if !ok || v.array || v.kind != kindBool {
		return false, false
	}
	return v.data[0] != 0, true
}

// Has reports whether there is a value of this key.
func (f *File) Has(key string) bool {
	_, ok := f.values[key]
	return ok
}

// Strings returns an array of strings; nil: there is none of this key and type.
func (f *File) Strings(key string) []string {
	v, ok := f.values[key]
	if !ok || !v.array || v.kind != kindString {
		return nil
	}
	out, b := make([]string, v.count), v.data
	for i := range out {
		n := binary.LittleEndian.Uint64(b)
		out[i], b = string(b[8:8+n]), b[8+n:]
	}
	return out
}

// Ints returns an array of integers; nil: there is none of this key and type.
func (f *File) Ints(key string) []int64 {
	v, ok := f.values[key]
	if !ok || !v.array || v.kind == kindString || v.kind == kindF32 || v.kind == kindF64 {
		return nil
	}
	out := make([]int64, v.count)
	for i := range out {
		out[i] = v.integer(i)
	}
	return out
}

// Floats returns an array of float32; nil: there is none of this key and type.
func (f *File) Floats(key string) []float32 {
	v, ok := f.values[key]
	if !ok || !v.array || v.kind != kindF32 {
		return nil
	}
	out := make([]float32, v.count)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(v.data[4*i:]))
	}
	return out
}
