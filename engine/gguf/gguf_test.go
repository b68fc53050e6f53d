package gguf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"strings"
	"testing"
)

// builder writes a file.
type builder struct{ bytes.Buffer }

func (b *builder) add(values ...any) *builder {
	for _, v := range values {
		if s, ok := v.(string); ok {
			b.add(uint64(len(s)))
			b.WriteString(s)
			continue
		}
		_ = binary.Write(b, binary.LittleEndian, v) // a buffer takes every write
	}
	return b
}

// head begins a file.
func head(tensors, values uint64) *builder {
	b := &builder{}
	b.WriteString("GGUF")
	return b.add(uint32(3), tensors, values)
}

// one is a file with a value of each kind and two tensors.
func one() []byte {
	b := head(2, 6)
	b.add("text", uint32(kindString), "yes", "count", uint32(kindU16), uint16(7), "share", uint32(kindF32), float32(0.5), "on", uint32(kindBool), uint8(1))
	b.add("list", uint32(kindArray), uint32(kindString), uint64(2), "a", "bc", "ids", uint32(kindArray), uint32(kindI32), uint64(2), int32(-1), int32(5))
	b.add("w", uint32(2), uint64(32), uint64(2), uint32(8), uint64(0)) // [2, 32] Q8_0
	b.add("v", uint32(1), uint64(3), uint32(0), uint64(96))            // [3] F32
	b.Write(make([]byte, -b.Len()&31+96+12))
	return b.Bytes()
}

func TestParse(t *testing.T) {
	f, err := Parse(one())
	if err != nil {
		t.Fatal(err)
	}
	text, _ := f.String("text")
	n, _ := f.Int("count")
	share, _ := f.Float("share")
	on, _ := f.Bool("on")
	if list, ids := f.Strings("list"), f.Ints("ids"); text != "yes" || n != 7 || share != 0.5 || !on || list[1] != "bc" || ids[0] != -1 || ids[1] != 5 {
		t.Errorf("%q %d %v %v %q %v", text, n, share, on, list, ids)
	}
	if _, ok := f.Int("text"); ok || f.Strings("ids") != nil || f.Ints("list") != nil || f.Floats("ids") != nil || f.Has("none") {
		t.Error("values of another type are returned")
	}
	if w, v := f.Tensors[0], f.Tensors[1]; w.Shape[0] != 2 || w.Shape[1] != 32 || len(w.Data) != 68 || w.Type != "Q8_0" || len(v.Data) != 12 {
		t.Errorf("%+v", f.Tensors)
	}
}

// Hostile files are refused by the name and the value of what is wrong, in memory of the file's
// size, and every file that is cut short is refused.
func TestParseRefuses(t *testing.T) {
	whole := one()
	for n := range whole {
		if _, err := Parse(whole[:n]); !errors.Is(err, ErrFormat) {
			t.Fatalf("%d of %d bytes: %v", n, len(whole), err)
		}
	}
	tensor := func(name string, values ...any) []byte {
		b := head(1, 0).add(name).add(values...)
		b.Write(make([]byte, 1024))
		return b.Bytes()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for what, c := range map[string]struct {
		file []byte
		says string
	}{
		"another magic":      {[]byte("GGML\x01\x00\x00\x00"), `it begins with "GGML"`},
		"version 1":          {append([]byte("GGUF"), 1, 0, 0, 0, 0, 0, 0, 0), "version 1"},
		"many values":        {head(0, math.MaxUint64).Bytes(), "key of 8 bytes at 24"},
		"many tensors":       {head(math.MaxUint64, 0).Bytes(), "name of a tensor of 8 bytes"},
		"a long key":         {head(0, 1).add(uint64(1 << 60)).Bytes(), "key of 1152921504606846976 bytes"},
		"a long string":      {head(0, 1).add("k", uint32(kindString), uint64(1<<60)).Bytes(), "string in k of 1152921504606846976 bytes"},
		"a long array":       {head(0, 1).add("k", uint32(kindArray), uint32(kindU64), uint64(1<<61)).Bytes(), "k has 2305843009213693952 elements"},
		"an array of arrays": {head(0, 1).add("k", uint32(kindArray), uint32(kindArray), uint64(0)).Bytes(), "k has type 9"},
		"a new type":         {head(0, 1).add("k", uint32(99)).Bytes(), "k has type 99"},
		"a key twice":        {head(0, 2).add("k", uint32(kindU8), uint8(0), "k", uint32(kindU8), uint8(0)).Bytes(), `key "k" is there twice`},
		"alignment":          {append(head(0, 1).add("general.alignment", uint32(kindU32), uint32(3)).Bytes(), 0), "general.alignment is 3"},
		"no dimensions":      {tensor("w", uint32(0)), `tensor "w" has 0 dimensions`},
		"many dimensions":    {tensor("w", uint32(math.MaxUint32)), `tensor "w" has 4294967295 dimensions`},
		"absurd dimension":   {tensor("w", uint32(2), uint64(1<<40), uint64(1)), `tensor "w" has a dimension of 1099511627776`},
		"overflow":           {tensor("w", uint32(4), uint64(1<<30), uint64(1<<30), uint64(1<<30), uint64(1)), `tensor "w" has a dimension of 1073741824`},
		"dimension 0":        {tensor("w", uint32(1), uint64(0)), `tensor "w" has a dimension of 0`},
		"another type":       {tensor("w", uint32(1), uint64(32), uint32(10), uint64(0)), `tensor "w" has type Q2_K; read are`},
		"an unknown type":    {tensor("w", uint32(1), uint64(32), uint32(1000), uint64(0)), `tensor "w" has type 1000`},
		"half a block":       {tensor("w", uint32(1), uint64(48), uint32(8), uint64(0)), `tensor "w" has rows of 48, which are no multiple of the 32 in a block of Q8_0`},
		"offset":             {tensor("w", uint32(1), uint64(32), uint32(0), uint64(math.MaxUint64-31)), `tensor "w" has 128 bytes at 18446744073709551584, and the file ends at `},
		"odd offset":         {tensor("w", uint32(1), uint64(32), uint32(0), uint64(1)), "begins at 1, which is no multiple of 32"},
		"a name twice":       {head(2, 0).add("w", uint32(1), uint64(1), uint32(0), uint64(0), "w", uint32(1), uint64(1), uint32(0), uint64(32)).Bytes(), `tensor "w" is there twice`},
		"shared bytes": {append(head(2, 0).add("w", uint32(1), uint64(32), uint32(0), uint64(0), "x", uint32(1), uint64(1), uint32(0), uint64(0)).Bytes(), make([]byte, 512)...),
			`begins at 0, within the one before it`},
	} {
		if _, err := Parse(c.file); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: err = %v, want %q", what, err, c.says)
		}
	}
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 1<<20 {
		t.Errorf("small files took %d bytes", used)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(one())
	f.Fuzz(func(t *testing.T, file []byte) {
		parsed, err := Parse(file)
		if err != nil {
			return
		}
		for key := range parsed.values {
			_, _ = parsed.String(key)
			_, _ = parsed.Float(key)
			_, _ = parsed.Bool(key)
			_, _, _ = parsed.Strings(key), parsed.Ints(key), parsed.Floats(key)
		}
		for _, x := range parsed.Tensors {
			if b, ok := BlockOf(x.Type); ok {
				b.Expand(make([]float32, b.Elements), x.Data)
			}
		}
	})
}
