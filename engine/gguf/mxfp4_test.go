package gguf

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// everyScale has a block of MXFP4 for each exponent that is a number, with all codes among them.
func everyScale() []byte {
	var data []byte
	for e := range NoExponent {
		data = append(data, byte(e))
		for j := range 16 {
			data = append(data, byte(e*7+j*37))
		}
	}
	return data
}

// Blocks of MXFP4 expand to the bits of the Python package gguf 0.19.0:
//
//	d = numpy.array([[e] + [(e * 7 + j * 37) & 255 for j in range(16)] for e in range(255)], numpy.uint8)
//	hashlib.sha256(gguf.quants.dequantize(d.reshape(1, -1), gguf.GGMLQuantizationType.MXFP4).tobytes())
func TestMXFP4(t *testing.T) {
	const want = "759b76a8818d4c9b1906e7c60d9d9e8b908d3b206975ddec6014b28324a528e1"
	b, ok := BlockOf(MXFP4)
	if !ok || b.Elements != 32 || b.Bytes != 17 {
		t.Fatalf("%+v", b)
	}
	values := make([]float32, NoExponent*32)
	b.Expand(values, everyScale())
	sum := sha256.New()
	_ = binary.Write(sum, binary.LittleEndian, values) // a hash takes every write
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		t.Errorf("the values differ from gguf's: %s", got)
	}
}

// The layout of backends has the same values.
func TestPackMXFP4(t *testing.T) {
	data := everyScale()
	b, _ := BlockOf(MXFP4)
	want := make([]float32, NoExponent*32)
	b.Expand(want, data)
	codes, exponents := make([]byte, NoExponent*16), make([]byte, NoExponent)
	PackMXFP4(codes, exponents, data)
	for i, w := range want {
		code := codes[i/2] >> (4 * (i % 2)) & 15
		got := float32(math.Ldexp(float64(backend.E2M1[code]), int(exponents[i/32])-127))
		if got != w {
			t.Fatalf("element %d is %g, want %g", i, got, w)
		}
	}
}
