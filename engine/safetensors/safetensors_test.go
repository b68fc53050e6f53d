package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// file is a file with this header and n bytes of data, 0, 1, 2, …
func file(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	for i := range n {
		b = append(b, byte(i))
	}
	return b
}

const (
	twoHeader = `{"__metadata__":{"format":"pt"},` +
		`"b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]},` +
		`"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}   `
	cHeader = `{"c":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}`
)

func TestParse(t *testing.T) {
	got, err := Parse(file(twoHeader, 28))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Name != "a" || got[1].Name != "b" {
		t.Fatalf("Parse = %+v, want a then b", got)
	}
	a, b := got[0], got[1]
	if a.DType != "F32" || !slices.Equal(a.Shape, []int{2, 3}) || len(a.Data) != 24 || a.Data[0] != 0 {
		t.Errorf("a = %+v", a)
	}
	if b.DType != "BF16" || !slices.Equal(b.Shape, []int{2}) || !bytes.Equal(b.Data, []byte{24, 25, 26, 27}) {
		t.Errorf("b = %+v", b)
	}
	if cap(a.Data) != 24 {
		t.Errorf("appending to a tensor would reach the next one")
	}
	if got, err := Parse(file("{}", 0)); err != nil || len(got) != 0 {
		t.Errorf("no tensors: %v, %v", got, err)
	}
}

func TestParseRefuses(t *testing.T) {
	one := func(fields string) []byte { return file(`{"a":{`+fields+`}}`, 8) }
	huge := file("{}", 0)
	binary.LittleEndian.PutUint64(huge, 1<<40)
	long := file("{}", 0)
	binary.LittleEndian.PutUint64(long, 3)
	for _, c := range []struct {
		name string
		file []byte
		says string
	}{
		{"empty", nil, "no header"},
		{"short", []byte{1, 2, 3}, "no header"},
		{"huge header", huge, "at most"},
		{"header past the end", long, "in a file of 10"},
		{"not an object", file("[]", 0), "begin with"},
		{"cut", file(`{"a":{"dtype":"F32"`, 0), "EOF"},
		{"no JSON", file("{]", 0), "invalid"},
		{"text behind", file("{} x", 0), "follow"},
		{"second object", file("{}{}", 0), "follow"},
		{"name twice", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, 8), `"a" is given twice`},
		{"field twice", one(`"dtype":"F32","dtype":"U8","shape":[8],"data_offsets":[0,8]`), `"dtype" is given twice`},
		{"unknown field", one(`"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1`), `unknown field "more"`},
		{"no shape", one(`"dtype":"F32","data_offsets":[0,8]`), "all needed"},
		{"upper case field", one(`"DTYPE":"F32","shape":[2],"data_offsets":[0,8]`), "unknown field"},
		{"unknown dtype", one(`"dtype":"F12","shape":[2],"data_offsets":[0,8]`), `unknown dtype "F12"`},
		{"wrong dtype", one(`"dtype":"BF16","shape":[2],"data_offsets":[0,8]`), "is 4 bytes, data_offsets span 8"},
		{"negative shape", one(`"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]`), "shape [-2 -1]"},
		{"fractional shape", one(`"dtype":"F32","shape":[2.5],"data_offsets":[0,8]`), "2.5"},
		{"overflow", one(`"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]`), "overflows"},
		{"zero hides no overflow", one(`"dtype":"F32","shape":[9223372036854775807,2,0],"data_offsets":[0,0]`), "overflows"},
		{"many dimensions", one(`"dtype":"U8","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,8]`), "9 dimensions"},
		{"backwards", one(`"dtype":"F32","shape":[2],"data_offsets":[8,0]`), "data_offsets [8, 0]"},
		{"out of range", one(`"dtype":"F32","shape":[4],"data_offsets":[0,16]`), "in 8 bytes"},
		{"one offset", one(`"dtype":"F32","shape":[2],"data_offsets":[0]`), "not 2"},
		{"negative offset", one(`"dtype":"F32","shape":[2],"data_offsets":[-8,0]`), "-8"},
		{"overlap", file(`{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, 8), "overlaps"},
		{"hole", file(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, 8), "hole"},
		{"data over", one(`"dtype":"F32","shape":[1],"data_offsets":[0,4]`), "belong to no tensor"},
		{"metadata of numbers", file(`{"__metadata__":{"a":1}}`, 0), "number"},
	} {
		got, err := Parse(c.file)
		if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: Parse = %v, %v; want an ErrFormat with %q", c.name, got, err, c.says)
		}
	}
}

// write puts the files in a directory and in an fs.FS, to open both ways.
func both(t *testing.T, files map[string][]byte, check func(t *testing.T, c *Checkpoint, err error)) {
	t.Helper()
	dir, memory := t.TempDir(), fstest.MapFS{}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
		memory[name] = &fstest.MapFile{Data: data}
	}
	t.Run("dir", func(t *testing.T) { c, err := OpenDir(dir); check(t, c, err) })
	t.Run("fs", func(t *testing.T) { c, err := OpenFS(memory); check(t, c, err) })
}

func TestOpen(t *testing.T) {
	sharded := []byte(`{"metadata":{"total_size":32},"weight_map":{"a":"x-1.safetensors","b":"x-1.safetensors","c":"x-2.safetensors"}}`)
	for name, files := range map[string]map[string][]byte{
		"single":  {single: file(strings.Replace(twoHeader, `}}   `, `},"c":{"dtype":"F32","shape":[],"data_offsets":[28,32]}}`, 1), 32)},
		"sharded": {index: sharded, "x-1.safetensors": file(twoHeader, 28), "x-2.safetensors": file(cHeader, 4)},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, files, func(t *testing.T, c *Checkpoint, err error) {
				if err != nil {
					t.Fatal(err)
				}
				if got := c.Names(); !slices.Equal(got, []string{"a", "b", "c"}) {
					t.Errorf("Names = %v", got)
				}
				if a, ok := c.Tensor("a"); !ok || len(a.Data) != 24 || a.Data[23] != 23 {
					t.Errorf("a = %+v, %v", a, ok)
				}
				if _, ok := c.Tensor("d"); ok {
					t.Error("there is no d")
				}
				if c.Bytes() != 32 {
					t.Errorf("Bytes = %d", c.Bytes())
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	shard := file(cHeader, 4)
	for name, c := range map[string]struct {
		files map[string][]byte
		want  error
		says  string
	}{
		"nothing":             {nil, ErrNoWeights, "no model.safetensors"},
		"broken":              {map[string][]byte{single: []byte("123456789")}, ErrFormat, single},
		"index is no JSON":    {map[string][]byte{index: []byte("{")}, ErrFormat, index},
		"index without map":   {map[string][]byte{index: []byte("{}")}, ErrFormat, "weight_map"},
		"shard missing":       {map[string][]byte{index: []byte(`{"weight_map":{"c":"s"}}`)}, os.ErrNotExist, "s"},
		"tensor missing":      {map[string][]byte{index: []byte(`{"weight_map":{"c":"s","d":"s"}}`), "s": shard}, ErrFormat, `"d"`},
		"shard outside":       {map[string][]byte{index: []byte(`{"weight_map":{"c":"../s"}}`), "s": shard}, ErrFormat, `"../s"`},
		"shard absolute":      {map[string][]byte{index: []byte(`{"weight_map":{"c":"/etc/passwd"}}`)}, ErrFormat, "passwd"},
		"shard is the folder": {map[string][]byte{index: []byte(`{"weight_map":{"c":"."}}`)}, ErrFormat, `"."`},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, c.files, func(t *testing.T, _ *Checkpoint, err error) {
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("err = %v, want %v with %q", err, c.want, c.says)
				}
			})
		})
	}
}

// Pages of a tensor that are released have the same numbers when they are read again, also next to
// other tensors, and memory that is no file's stays.
func TestRelease(t *testing.T) {
	dir := t.TempDir()
	content := file(`{"a":{"dtype":"U8","shape":[9000],"data_offsets":[0,9000]},"b":{"dtype":"U8","shape":[9000],"data_offsets":[9000,18000]}}`, 18000)
	for i := range 18000 {
		content[len(content)-18000+i] = byte(i % 251)
	}
	if err := os.WriteFile(filepath.Join(dir, single), content, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	a, _ := c.Tensor("a")
	b, _ := c.Tensor("b")
	own := slices.Clone(b.Data)
	for _, part := range [][]byte{a.Data, b.Data, b.Data[5:6], own, nil} {
		c.Release(part)
		if got := slices.Concat(a.Data, b.Data); !bytes.Equal(got, content[len(content)-18000:]) || !bytes.Equal(own, b.Data) {
			t.Fatalf("after %d bytes were released the numbers differ", len(part))
		}
	}
}

// Whatever Parse accepts satisfies the package's invariant.
func FuzzParse(f *testing.F) {
	f.Add(file(twoHeader, 28))
	f.Add(file(cHeader, 4))
	f.Add(file("{}", 0))
	f.Add(file(`{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[4,2],"data_offsets":[0,8]}}`, 8))
	f.Add(file(`{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, 8))
	f.Fuzz(func(t *testing.T, data []byte) {
		tensors, err := Parse(data)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("err = %v, not an ErrFormat", err)
			}
			return
		}
		names, total := map[string]bool{}, 0
		for _, x := range tensors {
			n := sizes[x.DType]
			for _, d := range x.Shape {
				n *= d
			}
			if n != len(x.Data) || names[x.Name] {
				t.Fatalf("accepted %q %s %v with %d bytes (name seen: %v)", x.Name, x.DType, x.Shape, len(x.Data), names[x.Name])
			}
			names[x.Name] = true
			total += n
		}
		if header := int(binary.LittleEndian.Uint64(data)); 8+header+total != len(data) {
			t.Fatalf("%d header and %d data bytes in a file of %d", header, total, len(data))
		}
	})
}
