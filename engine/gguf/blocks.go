package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Block is the layout of a type: so many elements in so many bytes.
type Block struct {
	Elements, Bytes int

	name   string
	expand func(dst []float32, b []byte) // nil: plain numbers
}

// types are the types that are read, as the format numbers them.
var types = map[uint32]Block{
	0:  {1, 4, "F32", nil},
	1:  {1, 2, "F16", nil},
	2:  {32, 18, "Q4_0", q40},
	3:  {32, 20, "Q4_1", q41},
	6:  {32, 22, "Q5_0", q50},
	7:  {32, 24, "Q5_1", q51},
	8:  {32, 34, "Q8_0", q80},
	12: {256, 144, "Q4_K", q4k},
	13: {256, 176, "Q5_K", q5k},
	14: {256, 210, "Q6_K", q6k},
	30: {1, 2, "BF16", nil},
}

// typeNames are the names of other types, for errors.
var typeNames = map[uint32]string{
	9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
	20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}

func typeName(kind uint32) string {
	if name, ok := typeNames[kind]; ok {
		return name
	}
	return fmt.Sprint(kind)
}

// blocks are the types of more than a number, by name.
var blocks = func() map[string]Block {
	m := map[string]Block{}
	for _, b := range types {
		if b.expand != nil {
			m[b.name] = b
		}
	}
	return m
}()

// BlockOf returns the layout of a type that Expand converts.
func BlockOf(name string) (Block, bool) {
	b, ok := blocks[name]
	return b, ok
}

// Expand converts blocks of a type to float32, as many as fill dst.
func (b Block) Expand(dst []float32, data []byte) {
	for i := range len(dst) / b.Elements {
		b.expand(dst[i*b.Elements:(i+1)*b.Elements], data[i*b.Bytes:(i+1)*b.Bytes])
	}
}

// half returns the float16 at the start of b.
func half(b []byte) float32 {
	h := binary.LittleEndian.Uint16(b)
	sign, exponent, fraction := uint32(h>>15)<<31, uint32(h>>10)&31, uint32(h)&1023
	switch exponent {
	case 0:
		v := float32(fraction) / (1 << 24)
		return math.Float32frombits(math.Float32bits(v) | sign)
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+112)<<23 | fraction<<13)
}

func q40(dst []float32, b []byte) {
	d, q := half(b), b[2:]
	for i := range 16 {
		dst[i], dst[i+16] = d*float32(int(q[i]&15)-8), d*float32(int(q[i]>>4)-8)
	}
}

func q41(dst []float32, b []byte) {
	d, least, q := half(b), half(b[2:]), b[4:]
	for i := range 16 {
		dst[i], dst[i+16] = float32(d*float32(q[i]&15))+least, float32(d*float32(q[i]>>4))+least
	}
}

// fifth returns the highest bit of number i of 32, as 16 or 0.
func fifth(high []byte, i int) byte { return high[i/8] >> (i % 8) & 1 << 4 }

func q50(dst []float32, b []byte) {
	d, high, q := half(b), b[2:6], b[6:]
	for i := range 16 {
		dst[i], dst[i+16] = d*float32(int(q[i]&15|fifth(high, i))-16), d*float32(int(q[i]>>4|fifth(high, i+16))-16)
	}
}

func q51(dst []float32, b []byte) {
	d, least, high, q := half(b), half(b[2:]), b[4:8], b[8:]
	for i := range 16 {
		dst[i] = float32(d*float32(q[i]&15|fifth(high, i))) + least
		dst[i+16] = float32(d*float32(q[i]>>4|fifth(high, i+16))) + least
	}
}

func q80(dst []float32, b []byte) {
	d := half(b)
	for i, q := range b[2:34] {
		dst[i] = d * float32(int8(q))
	}
}

// scaleAndMin returns the 6 bits of the scale and of the minimum of part i of 8.
func scaleAndMin(s []byte, i int) (scale, least float32) {
	if i < 4 {
		return float32(s[i] & 63), float32(s[i+4] & 63)
	}
	return float32(s[i+4]&15 | s[i-4]>>2&48), float32(s[i+4]>>4 | s[i]>>2&48)
}

func q4k(dst []float32, b []byte) {
	d, least, scales, q := half(b), half(b[2:]), b[4:16], b[16:]
	for part := range 8 {
		s, m := scaleAndMin(scales, part)
		s, m = d*s, least*m
		for i := range 32 {
			v := q[part/2*32+i] >> (part % 2 * 4) & 15
			dst[part*32+i] = float32(s*float32(v)) - m // rounded twice: no fused operation
		}
	}
}

func q5k(dst []float32, b []byte) {
	d, least, scales, high, q := half(b), half(b[2:]), b[4:16], b[16:48], b[48:]
	for part := range 8 {
		s, m := scaleAndMin(scales, part)
		s, m = d*s, least*m
		for i := range 32 {
			v := q[part/2*32+i]>>(part%2*4)&15 | high[i]>>part&1<<4
			dst[part*32+i] = float32(s*float32(v)) - m
		}
	}
}

func q6k(dst []float32, b []byte) {
	low, high, scales, d := b[:128], b[128:192], b[192:208], half(b[208:])
	for i := range 256 {
		part := i / 32 // of 8: 4 in each half
		l := low[part/4*64+part%2*32+i%32] >> (part % 4 / 2 * 4) & 15
		h := high[part/4*32+i%32] >> (part % 4 * 2) & 3
		scale := float32(d * float32(int8(scales[i/16])))
		dst[i] = scale * float32(int(l|h<<4)-32)
	}
}
