package quantize

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// layout is the tensors of a file of safetensors.
type layout struct {
	header []byte
	at     map[string]int64 // offset of a tensor's data in the file
	bytes  int64            // of the file
	half   bool             // scales are float16, else bfloat16
}

// writer writes a file of safetensors. Matrices come in any order.
type writer struct {
	layout
	file *os.File
}

// entry is a tensor in the header of a file.
type entry struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// newLayout returns the layout of a file with the tensors of files, of which those that are
// converted have integers, scales and a shape instead.
func newLayout(files *safetensors.Checkpoint, converted map[string]scaling, half bool) (l layout, err error) {
	l = layout{at: map[string]int64{}, half: half}
	header, end := map[string]any{"__metadata__": map[string]string{"format": "pt"}}, int64(0)
	add := func(name, dtype string, bytes int64, shape ...int) {
		header[name] = entry{dtype, shape, [2]int64{end, end + bytes}}
		l.at[name], end = end, end+bytes
	}
	scales := "BF16"
	if half {
		scales = "F16"
	}
	for _, name := range files.Names() {
		t, _ := files.Tensor(name)
		s, ok := converted[name]
		if !ok {
			add(name, t.DType, int64(len(t.Data)), t.Shape...)
			continue
		}
		module, out, in := strings.TrimSuffix(name, "weight"), t.Shape[0], t.Shape[1]
		add(module+"weight_shape", "I64", 16, 2)
		add(module+"weight_packed", "I32", int64(out)*int64(in*s.bits/8), out, in*s.bits/32)
		add(module+"weight_scale", scales, int64(out)*int64(in/s.group)*2, out, in/s.group)
	}
	if l.header, err = json.Marshal(header); err != nil {
		return l, err
	}
	for len(l.header)%8 != 0 { // data is aligned
		l.header = append(l.header, ' ')
	}
	first := int64(8 + len(l.header))
	for name := range l.at {
		l.at[name] += first
	}
	l.bytes = first + end
	return l, nil
}

// newWriter creates the file of a layout, and copies the tensors that are not converted.
func newWriter(path string, l layout, files *safetensors.Checkpoint, converted map[string]scaling) (w *writer, err error) {
	w = &writer{layout: l}
	if w.file, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644); err != nil {
		return nil, err
	}
	_, err = w.file.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(l.header))), l.header...))
	for _, name := range files.Names() {
		if _, ok := converted[name]; err == nil && !ok {
			t, _ := files.Tensor(name)
			err = w.put(name, t.Data)
			files.Release(t.Data)
		}
	}
	if err != nil {
		return nil, errors.Join(err, w.file.Close())
	}
	return w, nil
}

// room returns an error if the file system of a folder, which need not exist, has fewer than need
// bytes free.
func room(dir string, need int64) error {
	free, ok := freeBytes(dir)
	if ok && need > free {
		return fmt.Errorf("%w: the folder takes %s, and the disk of %s has %s free; free some, or name a folder on another disk",
			ErrOption, memory.Bytes(need), dir, memory.Bytes(free))
	}
	return nil
}

// freeBytes returns the free bytes of the disk of a folder, which need not exist. ok is false if
// they are not known: the writes will show it.
func freeBytes(dir string) (n int64, ok bool) {
	var s unix.Statfs_t
	for {
		err := unix.Statfs(dir, &s)
		if err == nil {
			return int64(min(s.Bavail, 1<<62/uint64(max(s.Bsize, 1)))) * int64(s.Bsize), true
		}
		above := filepath.Dir(dir)
		if !errors.Is(err, fs.ErrNotExist) || above == dir {
			return 0, false
		}
		dir = above
	}
}

func (w *writer) put(name string, data []byte) error {
	_, err := w.file.WriteAt(data, w.at[name])
	return err
}

// matrix writes a matrix as compressed-tensors packs it, and returns the bytes of its integers and
// scales. Each word has neighbouring inputs, the first in the lowest bits.
func (w *writer) matrix(name string, m *matrix) (int64, error) {
	module := strings.TrimSuffix(name, "weight")
	packed := make([]byte, len(m.codes)*m.bits/8)
	for i, c := range m.codes {
		packed[i*m.bits/8] |= byte(int(c)+m.middle()) << (i * m.bits % 8)
	}
	scales := make([]byte, 0, 2*len(m.scales))
	for _, s := range m.scales {
		bits := uint16(math.Float32bits(s) >> 16)
		if w.half {
			bits = halfBits(s)
		}
		scales = binary.LittleEndian.AppendUint16(scales, bits)
	}
	shape := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(m.out)), uint64(m.in))
	err := errors.Join(w.put(module+"weight_shape", shape), w.put(module+"weight_packed", packed), w.put(module+"weight_scale", scales))
	return int64(len(packed) + len(scales)), err
}

// close closes the file. Its data is on the disk if the error is nil.
func (w *writer) close() error { return errors.Join(w.file.Sync(), w.file.Close()) }

// rowsOf returns a function that writes a row of numbers of a type, which has the name that files
// or backends use.
func rowsOf(data []byte, dtype string, in int) func(dst []float32, row int) {
	return func(dst []float32, row int) {
		for i := range dst {
			at := row*in + i
			switch dtype {
			case "F32", backend.F32.String():
				dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*at:]))
			case "F16":
				dst[i] = backend.Half(binary.LittleEndian.Uint16(data[2*at:]))
			default:
				dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[2*at:])) << 16)
			}
		}
	}
}

// expand returns the weights in a type of the backend, F32 or BF16, rounded to it.
func (m *matrix) expand(as backend.DType, on workers) []byte {
	data := make([]byte, len(m.codes)*as.Size())
	on.each(m.out, func(out int) {
		row := make([]float32, m.in)
		m.row(row, out)
		for i, v := range row {
			if at := out*m.in + i; as == backend.F32 {
				binary.LittleEndian.PutUint32(data[4*at:], math.Float32bits(v))
			} else {
				binary.LittleEndian.PutUint16(data[2*at:], uint16(math.Float32bits(roundBFloat(v))>>16))
			}
		}
	})
	return data
}

// roundBFloat rounds to a bfloat16, of two equally near ones to the even one.
func roundBFloat(v float32) float32 {
	b := math.Float32bits(v)
	return math.Float32frombits((b + 0x7fff + b>>16&1) &^ 0xffff)
}

// halfBits returns the float16 next to v, which must not overflow.
func halfBits(v float32) uint16 {
	sign := uint16(math.Float32bits(v) >> 16 & 0x8000)
	v = max(v, -v)
	if v < 1.0/(1<<14) {
		return sign | uint16(math.RoundToEven(float64(v)*(1<<24)))
	}
	b := math.Float32bits(v)
	return sign | uint16((b+0xfff+b>>13&1)>>13-112<<10)
}

// roundHalf rounds a scale to a float16. Scales of weights in float16 do not overflow.
func roundHalf(v float32) float32 { return backend.Half(halfBits(v)) }
