package main

import (
	"encoding/binary"
	"io"
	"math"

	"github.com/tandem-serving/tandem/bench/checkpoint"
)

// Constants of the GGUF format.
const (
	deviation             = 0.02 // of a weight
	ggufAlign             = 32
	ggufVersion           = 3
	typeF32, typeQ4       = 0, 2
	typeQ50, typeQ8       = 6, 8
	typeQ4K, typeQ6K      = 12, 14
	typeBF16              = 30
	valueU32, valueI32    = 4, 5
	valueF32, valueBool   = 6, 7
	valueText, valueArray = 8, 9
)

// ggufFile is the head of a file of llama.cpp's format, and the tensors whose random weights
// follow.
type ggufFile struct {
	values  []byte // metadata, encoded
	count   int    // of values
	tensors []ggufTensor
}

// ggufTensor is a tensor: its name in the file, its shape, and its type.
type ggufTensor struct {
	name string
	checkpoint.Matrix
	kind uint32
}

// text appends a string.
func text(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// key begins a value.
func (f *ggufFile) key(name string, kind uint32) {
	f.count++
	f.values = binary.LittleEndian.AppendUint32(text(f.values, name), kind)
}

func (f *ggufFile) text(name, value string) {
	f.key(name, valueText)
	f.values = text(f.values, value)
}

func (f *ggufFile) number(name string, value int) {
	f.key(name, valueU32)
	f.values = binary.LittleEndian.AppendUint32(f.values, uint32(value))
}

func (f *ggufFile) float(name string, value float64) {
	f.key(name, valueF32)
	f.values = binary.LittleEndian.AppendUint32(f.values, math.Float32bits(float32(value)))
}

func (f *ggufFile) boolean(name string, value bool) {
	f.key(name, valueBool)
	b := byte(0)
	if value {
		b = 1
	}
	f.values = append(f.values, b)
}

// array begins an array of n elements.
func (f *ggufFile) array(name string, kind uint32, n int) {
	f.key(name, valueArray)
	f.values = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(f.values, kind), uint64(n))
}

func (f *ggufFile) texts(name string, all []string) {
	f.array(name, valueText, len(all))
	for _, s := range all {
		f.values = text(f.values, s)
	}
}

func (f *ggufFile) words(name string, kind uint32, all []uint32) {
	f.array(name, kind, len(all))
	for _, v := range all {
		f.values = binary.LittleEndian.AppendUint32(f.values, v)
	}
}

// add appends a tensor of a type. Vectors are F32.
func (f *ggufFile) add(name string, out, in int, kind uint32) {
	if in == 0 {
		kind = typeF32
	}
	f.tensors = append(f.tensors, ggufTensor{name, checkpoint.Matrix{Out: out, In: in}, kind})
}

// write writes the file.
func (f *ggufFile) write(w io.Writer) error {
	b := append([]byte{}, "GGUF"...)
	b = binary.LittleEndian.AppendUint32(b, ggufVersion)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(f.tensors)))
	b = binary.LittleEndian.AppendUint64(b, uint64(f.count))
	b = append(b, f.values...)
	at := 0
	for i := range f.tensors {
		m := &f.tensors[i]
		b = text(b, m.name)
		dims := []int{m.In, m.Out}
		if m.In == 0 {
			dims = dims[1:]
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(dims)))
		for _, d := range dims {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint32(b, m.kind)
		b = binary.LittleEndian.AppendUint64(b, uint64(at))
		at += (size(&m.Matrix, m.kind) + ggufAlign - 1) / ggufAlign * ggufAlign
	}
	padding := func(n int) []byte { return make([]byte, (ggufAlign-n%ggufAlign)%ggufAlign) }
	if _, err := w.Write(append(b, padding(len(b))...)); err != nil {
		return err
	}
	random := checkpoint.Noise(2)
	for i := range f.tensors {
		m := &f.tensors[i]
		if err := write(w, &m.Matrix, m.kind, &random); err != nil {
			return err
		}
		if _, err := w.Write(padding(size(&m.Matrix, m.kind))); err != nil {
			return err
		}
	}
	return nil
}

// size returns the size of a tensor of a type in bytes.
func size(m *checkpoint.Matrix, t uint32) int {
	n := m.Elements()
	switch t {
	case typeF32:
		return n * 4
	case typeQ8:
		return n / 32 * 34
	case typeQ4:
		return n / 32 * 18
	case typeQ50:
		return n / 32 * 22
	case typeQ4K:
		return n / 256 * 144
	case typeQ6K:
		return n / 256 * 210
	}
	return n * 2
}

// half returns the float16 next to a number that is not negative and below 65,504.
func half(f float64) uint16 {
	if f < 1.0/(1<<14) { // not a normal number
		return uint16(math.RoundToEven(f * (1 << 24)))
	}
	u := math.Float32bits(float32(f))
	return uint16((u>>23-112)<<10 | u>>13&0x3ff)
}

// write writes random weights of a type; a vector is all ones.
func write(w io.Writer, m *checkpoint.Matrix, t uint32, random *checkpoint.Noise) error {
	total := size(m, t)
	buf := make([]byte, 0, total+8)
	scale := func(f float64) { buf = binary.LittleEndian.AppendUint16(buf, half(f)) }
	fill := func(n int) {
		for ; n > 0; n -= 8 {
			buf = binary.LittleEndian.AppendUint64(buf, random.Next())[:len(buf)+min(n, 8)]
		}
	}
	for len(buf) < total {
		switch {
		case m.In == 0 && t == typeF32:
			buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(1))
		case t == typeBF16:
			buf = m.BF16(random)
		case t == typeQ8:
			scale(deviation / 64)
			fill(32)
		case t == typeQ4:
			scale(deviation / 4)
			fill(16)
		case t == typeQ50:
			scale(deviation / 8)
			fill(20)
		case t == typeQ4K: // scales and codes of 6 and 4 bits, whose mean the minimums cancel
			scale(deviation / 200)
			scale(deviation / 200 * 7.5)
			fill(140)
		case t == typeQ6K:
			fill(208)
			scale(deviation / 1300)
		}
	}
	_, err := w.Write(buf)
	return err
}
