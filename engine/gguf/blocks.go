package gguf

import (
	"encoding/binary"
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Block is the layout of a type: so many elements in so many bytes.
type Block struct {
	Elements, Bytes int

	name string
	kind backend.GridKind
	bits int
	read func(to *backend.GridRow, i int, b []byte) // writes block i of a row; nil: plain numbers, MXFP4
}

// types are the types that are read, as the format numbers them.
var types = map[uint32]Block{
	0:  {Elements: 1, Bytes: 4, name: "F32"},
	1:  {Elements: 1, Bytes: 2, name: "F16"},
	2:  {32, 18, "Q4_0", backend.GridPlain, 4, q40},
	3:  {32, 20, "Q4_1", backend.GridOffsets, 4, q41},
	6:  {32, 22, "Q5_0", backend.GridPlain, 5, q50},
	7:  {32, 24, "Q5_1", backend.GridOffsets, 5, q51},
	8:  {32, 34, "Q8_0", backend.GridPlain, 8, q80},
	12: {256, 144, "Q4_K", backend.GridMins, 4, q4k},
	13: {256, 176, "Q5_K", backend.GridMins, 5, q5k},
	14: {256, 210, "Q6_K", backend.GridSigned, 6, q6k},
	39: {Elements: 32, Bytes: mxfp4Bytes, name: MXFP4},
	30: {Elements: 1, Bytes: 2, name: "BF16"},
}

// typeNames are the names of other types, for errors.
var typeNames = map[uint32]string{
	9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
	20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
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
		if b.Elements > 1 {
			m[b.name] = b
		}
	}
	return m
}()

// BlockOf returns the layout of a type that Expand reads, and Grid, except MXFP4.
func BlockOf(name string) (Block, bool) {
	b, ok := blocks[name]
	return b, ok
}

// Grid returns rows of cols elements, a multiple of Elements, as integers with their scales. It
// reads data when a row is read.
func (b Block) Grid(data []byte, cols int) *backend.Grid {
	g := &backend.Grid{Kind: b.kind, Bits: b.bits, Group: 32}
	if b.kind == backend.GridSigned {
		g.Group = 16
	}
	n := cols / b.Elements
	g.Row = func(to *backend.GridRow, row int) {
		for i := range n {
			b.read(to, i, data[(row*n+i)*b.Bytes:][:b.Bytes])
		}
	}
	return g
}

// Expand converts blocks of a type to float32, as many as fill dst.
func (b Block) Expand(dst []float32, data []byte) {
	if b.name == MXFP4 {
		expandMXFP4(dst, data)
		return
	}
	g := b.Grid(data, len(dst))
	row := g.NewRow(len(dst))
	g.Row(row, 0)
	g.Weights(dst, row)
}

// half returns the bits of the float16 at the start of b.
func half(b []byte) uint16 { return binary.LittleEndian.Uint16(b) }

// nibbles writes the low halves of bytes, then the high ones.
func nibbles(codes, b []byte) {
	for i, v := range b {
		codes[i], codes[i+len(b)] = v&15, v>>4
	}
}

// fifth adds the highest bit of each of 32 codes.
func fifth(codes, high []byte) {
	for i := range codes {
		codes[i] |= high[i/8] >> (i % 8) & 1 << 4
	}
}

func q40(to *backend.GridRow, i int, b []byte) {
	to.Scales[i] = half(b)
	nibbles(to.Codes[i*32:], b[2:])
}

func q41(to *backend.GridRow, i int, b []byte) {
	to.Scales[i], to.Mins[i] = half(b), half(b[2:])
	nibbles(to.Codes[i*32:], b[4:])
}

func q50(to *backend.GridRow, i int, b []byte) {
	codes := to.Codes[i*32 : (i+1)*32]
	to.Scales[i] = half(b)
	nibbles(codes, b[6:])
	fifth(codes, b[2:6])
}

func q51(to *backend.GridRow, i int, b []byte) {
	codes := to.Codes[i*32 : (i+1)*32]
	to.Scales[i], to.Mins[i] = half(b), half(b[2:])
	nibbles(codes, b[8:])
	fifth(codes, b[4:8])
}

func q80(to *backend.GridRow, i int, b []byte) {
	to.Scales[i] = half(b)
	for j, q := range b[2:] {
		to.Codes[i*32+j] = q ^ 0x80
	}
}

// scalesAndMins reads the 6 bits of each of 8 scales and minimums.
func scalesAndMins(to *backend.GridRow, block int, s []byte) {
	scales, mins := to.Sub[block*8:(block+1)*8], to.SubMin[block*8:(block+1)*8]
	for i := range 4 {
		scales[i], mins[i] = s[i]&63, s[i+4]&63
		scales[i+4], mins[i+4] = s[i+8]&15|s[i]>>2&48, s[i+8]>>4|s[i+4]>>2&48
	}
}

func q4k(to *backend.GridRow, i int, b []byte) {
	to.Scales[i], to.Mins[i] = half(b), half(b[2:])
	scalesAndMins(to, i, b[4:16])
	for part := range 4 { // 32 low halves, then their high ones
		nibbles(to.Codes[i*256+part*64:], b[16+part*32:][:32])
	}
}

func q5k(to *backend.GridRow, i int, b []byte) {
	to.Scales[i], to.Mins[i] = half(b), half(b[2:])
	scalesAndMins(to, i, b[4:16])
	codes, high := to.Codes[i*256:(i+1)*256], b[16:48]
	for part := range 4 {
		nibbles(codes[part*64:], b[48+part*32:][:32])
	}
	for j := range codes {
		codes[j] |= high[j%32] >> (j / 32) & 1 << 4
	}
}

func q6k(to *backend.GridRow, i int, b []byte) {
	low, high := b[:128], b[128:192]
	to.Scales[i] = half(b[208:])
	copy(to.Sub[i*16:(i+1)*16], b[192:208])
	codes := to.Codes[i*256 : (i+1)*256]
	for j := range codes {
		part := j / 32 // of 8: 4 in each half
		l := low[part/4*64+part%2*32+j%32] >> (part % 4 / 2 * 4) & 15
		h := high[part/4*32+j%32] >> (part % 4 * 2) & 3
		codes[j] = l | h<<4
	}
}
