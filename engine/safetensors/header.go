package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// MaxHeader bounds the JSON header of a file, in bytes. It is the bound of the
// format's reference implementation: room for most of a million tensors.
const MaxHeader = 100_000_000

// maxDims bounds a tensor's rank. No model in the field has more than five.
const maxDims = 8

// ErrFormat is returned for a file that violates the format.
var ErrFormat = errors.New("safetensors: malformed file")

// ErrPointer is returned for a file that Git LFS has not replaced by its content yet.
var ErrPointer = errors.New("a Git LFS pointer instead of the file; run `git lfs pull` in the model's folder")

// sizes of one element, in bytes, by the name the format gives the type.
var sizes = map[string]int{
	"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
	"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}

// Tensor is one named array of a checkpoint.
type Tensor struct {
	Name  string
	DType string // as the format writes it: "F32", "BF16", …
	Shape []int  // empty for a scalar
	Data  []byte // row-major, little endian; owned by the Checkpoint, read-only
}

// entry is a tensor of the header, its bytes at data[begin:end].
type entry struct {
	name       string
	dtype      string
	shape      []int
	begin, end uint64
}

// Parse reads the tensors of one file, in the order of their data. The Data of
// each is a part of file. The rules are those of the reference implementation:
// unique names, sizes that match, data that fills the file with neither overlap
// nor hole.
func Parse(file []byte) ([]Tensor, error) {
	if len(file) < 8 {
		return nil, fmt.Errorf("%w: %d bytes, no header", ErrFormat, len(file))
	}
	if bytes.HasPrefix(file, []byte("version https://git-lfs")) {
		return nil, ErrPointer
	}
	n := binary.LittleEndian.Uint64(file)
	if n > MaxHeader {
		return nil, fmt.Errorf("%w: a header of %d bytes, at most %d", ErrFormat, n, MaxHeader)
	}
	if n > uint64(len(file)-8) {
		return nil, fmt.Errorf("%w: a header of %d bytes in a file of %d", ErrFormat, n, len(file))
	}
	header, data := file[8:8+n], file[8+n:]
	entries, err := parseHeader(header)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	tensors, err := place(entries, data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	return tensors, nil
}

// parseHeader walks the JSON by tokens: a map would hide a name given twice.
func parseHeader(header []byte) ([]entry, error) {
	if len(header) == 0 || header[0] != '{' {
		return nil, errors.New("the header does not begin with '{'")
	}
	dec := json.NewDecoder(bytes.NewReader(header))
	var entries []entry
	names := map[string]bool{}
	err := object(dec, func(name string) error {
		if names[name] {
			return fmt.Errorf("tensor %q is given twice", name)
		}
		names[name] = true
		if name == "__metadata__" {
			var metadata map[string]string
			return dec.Decode(&metadata)
		}
		e, err := parseEntry(dec, name)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		entries = append(entries, e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if rest := strings.Trim(string(header[dec.InputOffset():]), " "); rest != "" {
		return nil, fmt.Errorf("%d bytes follow the header's object", len(rest))
	}
	return entries, nil
}

func parseEntry(dec *json.Decoder, name string) (entry, error) {
	e := entry{name: name}
	var offsets []uint64
	seen := map[string]bool{}
	err := object(dec, func(field string) error {
		if seen[field] {
			return fmt.Errorf("%q is given twice", field)
		}
		seen[field] = true
		switch field {
		case "dtype":
			return dec.Decode(&e.dtype)
		case "shape":
			return dec.Decode(&e.shape)
		case "data_offsets":
			return dec.Decode(&offsets)
		}
		return fmt.Errorf("unknown field %q", field)
	})
	if err != nil {
		return e, err
	}
	if len(seen) != 3 {
		return e, errors.New("dtype, shape and data_offsets are all needed")
	}
	if len(offsets) != 2 {
		return e, fmt.Errorf("data_offsets has %d numbers, not 2", len(offsets))
	}
	e.begin, e.end = offsets[0], offsets[1]
	return e, nil
}

// object calls field for each key of the next JSON object; field consumes the
// value.
func object(dec *json.Decoder, field func(key string) error) error {
	if t, err := dec.Token(); err != nil {
		return noEOF(err)
	} else if t != json.Delim('{') {
		return fmt.Errorf("%v where an object should begin", t)
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return noEOF(err)
		}
		name, _ := key.(string) // the decoder takes only strings as keys
		if err := field(name); err != nil {
			return noEOF(err)
		}
	}
	_, err := dec.Token()
	return noEOF(err)
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// place checks each tensor against its data and the whole against the file.
func place(entries []entry, data []byte) ([]Tensor, error) {
	slices.SortStableFunc(entries, func(a, b entry) int {
		if a.begin != b.begin {
			return cmp.Compare(a.begin, b.begin)
		}
		return cmp.Compare(a.end, b.end) // empty tensors before the one that follows
	})
	tensors := make([]Tensor, 0, len(entries))
	at := uint64(0)
	for _, e := range entries {
		size, err := e.bytes()
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", e.name, err)
		}
		switch {
		case e.begin > e.end || e.end > uint64(len(data)):
			return nil, fmt.Errorf("tensor %q: data_offsets [%d, %d] in %d bytes of data", e.name, e.begin, e.end, len(data))
		case e.end-e.begin != size:
			return nil, fmt.Errorf("tensor %q: %s %v is %d bytes, data_offsets span %d", e.name, e.dtype, e.shape, size, e.end-e.begin)
		case e.begin < at:
			return nil, fmt.Errorf("tensor %q: its data overlaps the one before, which ends at %d", e.name, at)
		case e.begin > at:
			return nil, fmt.Errorf("tensor %q: a hole in the data from %d to %d", e.name, at, e.begin)
		}
		at = e.end
		tensors = append(tensors, Tensor{Name: e.name, DType: e.dtype, Shape: e.shape, Data: data[e.begin:e.end:e.end]})
	}
	if at != uint64(len(data)) {
		return nil, fmt.Errorf("%d bytes of data belong to no tensor", uint64(len(data))-at)
	}
	return tensors, nil
}

// bytes is the size that type and shape give.
func (e *entry) bytes() (uint64, error) {
	size, ok := sizes[e.dtype]
	if !ok {
		return 0, fmt.Errorf("unknown dtype %q", e.dtype)
	}
	if len(e.shape) > maxDims {
		return 0, fmt.Errorf("%d dimensions, at most %d", len(e.shape), maxDims)
	}
	n := uint64(size)
	for _, d := range e.shape {
		if d < 0 {
			return 0, fmt.Errorf("shape %v", e.shape)
		}
		if d > 0 && n > math.MaxInt64/uint64(d) {
			return 0, fmt.Errorf("shape %v overflows", e.shape)
		}
		n *= uint64(d)
	}
	return n, nil
}
