package model

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/engine/gguf"
	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// llamaCppFile is a file of make_llamacpp.py.
type llamaCppFile struct {
	Base    string // the file from whose head this one's differs; itself: none
	Head    []byte // what is before the tensors, or the differences
	Size    int
	SHA256  string
	Tensors []struct {
		Name, Type string
		Shape      []int
		At         int
	}
	Top [][]int32 // by prompt and position, the token that llama.cpp thinks likeliest
}

type llamaCppGoldens struct {
	Prompts [][]int32
	Scales  [][2]any // the name and type of a tensor, and how many bytes of its K-quants' scales follow
	Files   map[string]llamaCppFile
	Texts   []struct {
		Text string
		IDs  []int32
	}

	scales map[string][]byte
}

// Files of llama.cpp's own tools, of which the test makes the same bytes from the built-in model,
// give at least 97 of 100 of llama.cpp's likeliest tokens, and its ids of texts.
func TestLlamaCpp(t *testing.T) {
	g := readLlamaCpp(t)
	weights, err := safetensors.OpenFS(builtin.FS())
	if err != nil {
		t.Fatal(err)
	}
	defer weights.Close()
	for name := range g.Files {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), name+".gguf")
			if err := os.WriteFile(path, g.file(t, name, weights), 0o600); err != nil {
				t.Fatal(err)
			}
			src, err := OpenDir(path)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			wide := *src
			wide.ExpandIntegers()
			for _, c := range []struct {
				how          string
				src          *Source
				quantization Quantization
			}{{"in float32", &wide, AsStored}, {"as stored", src, AsStored}, {"int8", src, INT8}} {
				m := loadFamily(t, c.src, cpu.Auto, Options{Quantization: c.quantization}, nil)
				same, all := 0, 0
				for i, prompt := range g.Prompts {
					for k, top := range greedyAt(t, m, prompt) {
						if all++; top == g.Files[name].Top[i][k] {
							same++
						}
					}
				}
				t.Logf("%s: %d of %d tokens are llama.cpp's", c.how, same, all)
				if all < 600 || float64(same) < 0.97*float64(all) {
					t.Errorf("%s: only %d of %d tokens are llama.cpp's", c.how, same, all)
				}
			}
			if mean := divergence(t, src, g.Prompts); !(mean <= 0.005) {
				t.Errorf("with weights of 8 bits the probabilities diverge by %.5f", mean)
			}
			b, err := src.Bundle()
			if err != nil {
				t.Fatal(err)
			}
			tok, err := tokenizer.Load(b.TokenizerJSON)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range g.Texts {
				if ids := tok.Encode(c.Text, false); !slices.Equal(ids, c.IDs) {
					t.Errorf("%q: %v, llama.cpp %v", c.Text, ids, c.IDs)
				}
			}
		})
	}
}

func readLlamaCpp(t *testing.T) *llamaCppGoldens {
	t.Helper()
	f, err := os.Open("testdata/llamacpp.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	text, rest, _ := bytes.Cut(all, []byte("\n"))
	g := &llamaCppGoldens{scales: map[string][]byte{}}
	if err := json.Unmarshal(text, g); err != nil || len(g.Files) != 7 {
		t.Fatalf("%d files, %v", len(g.Files), err)
	}
	for _, part := range g.Scales {
		n := int(part[1].(float64))
		g.scales[part[0].(string)], rest = rest[:n], rest[n:]
	}
	return g
}

// greedyAt returns the likeliest token behind each token of a prompt.
func greedyAt(t *testing.T, m *Model, prompt []int32) (tokens []int32) {
	t.Helper()
	s := newSequenceWithin(m, familyLimits, prompt, 1)
	for s.done < len(prompt) {
		n := min(familyLimits.Outputs, len(prompt)-s.done)
		logits, _ := s.step(t, n, span(s.done, n))
		for _, l := range logits {
			tokens = append(tokens, int32(slices.Index(l, slices.Max(l))))
		}
	}
	return tokens
}

// file makes the bytes of a file of the built-in model.
func (g *llamaCppGoldens) file(t *testing.T, name string, weights *safetensors.Checkpoint) []byte {
	t.Helper()
	f := g.Files[name]
	data := make([]byte, f.Size)
	copy(data, f.Head)
	if name != f.Base {
		for i, b := range g.Files[f.Base].Head {
			data[i] ^= b
		}
	}
	hf := strings.NewReplacer("blk.", "model.layers.", "token_embd.", "model.embed_tokens.", "output_norm.", "model.norm.",
		"attn_norm.", "input_layernorm.", "ffn_norm.", "post_attention_layernorm.", "attn_q.", "self_attn.q_proj.", "attn_k.", "self_attn.k_proj.",
		"attn_v.", "self_attn.v_proj.", "attn_output.", "self_attn.o_proj.", "ffn_gate.", "mlp.gate_proj.", "ffn_up.", "mlp.up_proj.", "ffn_down.", "mlp.down_proj.")
	for _, to := range f.Tensors {
		from, ok := weights.Tensor(hf.Replace(to.Name))
		if !ok || !slices.Equal(from.Shape, to.Shape) {
			t.Fatalf("%s: %v for %v", to.Name, from.Shape, to.Shape)
		}
		values, err := floats(&from)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(to.Name, "attn_q.") || strings.Contains(to.Name, "attn_k.") {
			values = paired(values, to.Shape[1], 64)
		}
		copy(data[to.At:], blocksOf(t, values, to.Type, g.scales[to.Name+" "+to.Type]))
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != f.SHA256 {
		t.Fatal("the file is not llama.cpp's")
	}
	return data
}

// paired returns the rows of heads in an order in which those that rotate together are neighbours.
func paired(values []float32, cols, dim int) []float32 {
	out := make([]float32, 0, len(values))
	for row := range len(values) / cols {
		head, at := row/dim*dim, row%dim
		row = head + at%2*dim/2 + at/2
		out = append(out, values[row*cols:(row+1)*cols]...)
	}
	return out
}

// blocksOf returns numbers in the blocks that llama.cpp makes of them. The scales of K-quants are
// those that it searched for.
func blocksOf(t *testing.T, values []float32, kind string, scales []byte) []byte {
	t.Helper()
	var out []byte
	switch kind {
	case "F32":
		return bytesOf(values)
	case "F16", "BF16":
		for _, v := range values {
			bits := uint16(math.Float32bits(v) >> 16)
			if kind == "F16" {
				bits = halfBits(v)
			}
			out = binary.LittleEndian.AppendUint16(out, bits)
		}
		return out
	}
	block, ok := gguf.BlockOf(kind)
	if !ok {
		t.Fatal(kind)
	}
	for x := range slices.Chunk(values, block.Elements) {
		b := make([]byte, block.Bytes)
		switch kind {
		case "Q4_0":
			makeQ40(b, x)
		case "Q8_0":
			makeQ80(b, x)
		case "Q6_K":
			copy(b[192:], scales[:18])
			scales = scales[18:]
			makeQ6K(b, x)
		default:
			copy(b, scales[:16])
			scales = scales[16:]
			makeQ45K(b, x, kind == "Q5_K")
		}
		out = append(out, b...)
	}
	return out
}

// halfBits returns the float16 nearest to v, which is no larger than its largest number.
func halfBits(v float32) uint16 {
	rounded := math.Float32bits(roundHalf(v))
	sign, exponent, fraction := uint16(rounded>>16)&0x8000, int(rounded>>23&255)-112, rounded&0x7fffff
	switch {
	case rounded<<1 == 0:
		return sign
	case exponent < 1:
		return sign | uint16((fraction|0x800000)>>(14-exponent))
	}
	return sign | uint16(exponent)<<10 | uint16(fraction>>13)
}

func makeQ40(b []byte, x []float32) {
	var largest float32
	for _, v := range x {
		if float32(math.Abs(float64(v))) > float32(math.Abs(float64(largest))) {
			largest = v
		}
	}
	d := largest / -8
	id := float32(0)
	if d != 0 {
		id = 1 / d
	}
	binary.LittleEndian.PutUint16(b, halfBits(d))
	code := func(v float32) byte { return byte(min(15, int(float32(v*id)+8.5))) }
	for i := range 16 {
		b[2+i] = code(x[i]) | code(x[i+16])<<4
	}
}

func makeQ80(b []byte, x []float32) {
	var most float64
	for _, v := range x {
		most = max(most, math.Abs(float64(v)))
	}
	d := float32(most) / 127
	id := float32(0)
	if d != 0 {
		id = 1 / d
	}
	binary.LittleEndian.PutUint16(b, halfBits(d))
	for i, v := range x {
		b[2+i] = byte(int8(math.Round(float64(v * id))))
	}
}

// nearest returns the integer nearest to v within bounds, the even one of two.
func nearest(v float32, least, most int) int {
	return min(max(int(math.RoundToEven(float64(v))), least), most)
}

// makeQ45K fills in the codes of Q4_K or Q5_K behind scales, least values and their packed parts.
func makeQ45K(b []byte, x []float32, fifth bool) {
	d, least, s := backend.Half(binary.LittleEndian.Uint16(b)), backend.Half(binary.LittleEndian.Uint16(b[2:])), b[4:16]
	high, low, most := []byte(nil), b[16:], 15
	if fifth {
		high, low, most = b[16:48], b[48:], 31
	}
	for part := range 8 {
		scale, min := s[part%4]&63, s[part%4+4]&63
		if part >= 4 {
			scale, min = s[part+4]&15|s[part-4]>>2&48, s[part+4]>>4|s[part]>>2&48
		}
		step := d * float32(scale)
		if step == 0 {
			continue
		}
		for i := range 32 {
			code := nearest((x[part*32+i]+float32(least*float32(min)))/step, 0, most)
			low[part/2*32+i] |= byte(code&15) << (part % 2 * 4)
			if fifth {
				high[i] |= byte(code>>4) << part
			}
		}
	}
}

// makeQ6K fills in the codes of Q6_K before its scales.
func makeQ6K(b []byte, x []float32) {
	d := backend.Half(binary.LittleEndian.Uint16(b[208:]))
	for i, v := range x {
		code := 32
		if step := d * float32(int8(b[192+i/16])); step != 0 {
			code += nearest(v/step, -32, 31)
		}
		part := i / 32
		b[part/4*64+part%2*32+i%32] |= byte(code&15) << (part % 4 / 2 * 4)
		b[128+part/4*32+i%32] |= byte(code>>4) << (part % 4 * 2)
	}
}
