package safetensors

import (
	"errors"
	"io/fs"
	"testing"
	"testing/fstest"
)

// An index names files and tensors; what it names may not be there, and it may
// name what is outside of the folder.
func FuzzIndex(f *testing.F) {
	shard := file(twoHeader, 28)
	f.Add([]byte(`{"weight_map":{"a":"s.safetensors"}}`), shard)
	f.Add([]byte(`{"weight_map":{"a":"../s.safetensors"}}`), shard)
	f.Add([]byte(`{"weight_map":{"a":"gone.safetensors"}}`), shard)
	f.Add([]byte(`{"weight_map":{"a":7}}`), shard)
	f.Add([]byte(`{"weight_map":`), []byte{})
	f.Fuzz(func(t *testing.T, text, shard []byte) {
		c, err := OpenFS(fstest.MapFS{index: {Data: text}, "s.safetensors": {Data: shard}})
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrNoWeights) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrInvalid) {
				t.Fatalf("err = %v, which is of no kind", err)
			}
			return
		}
		if c.Bytes() < 0 || c.Bytes() > int64(len(shard)) {
			t.Fatalf("%d bytes of tensors in a file of %d", c.Bytes(), len(shard))
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
