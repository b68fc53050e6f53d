package model

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/gguf"
)

// mxfp4Group is the number of inputs that share an exponent.
const mxfp4Group = 32

// microscaled is a matrix in the MXFP4 blocks of GGUF.
type microscaled struct {
	data  []byte
	in    int               // a multiple of mxfp4Group
	place func(row int) int // where a row of transformers is in data
}

// keepsMXFP4 reports whether a backend keeps this part of a matrix in MXFP4. The matrices of the
// vocabulary are expanded, because embeddings are read row by row.
func (s *stored) keepsMXFP4(b *binding) bool {
	return s.micro != nil && b.inner() && b.plus == 0 && b.in().from%mxfp4Group == 0 && b.in().n%mxfp4Group == 0
}

// pack returns some rows and columns in the layout of backend.MXFP4. All processors share the rows.
func (m *microscaled) pack(rows []int, cols part) []byte {
	groups := cols.n / mxfp4Group
	codes := make([]byte, len(rows)*groups*17)
	exponents := codes[len(rows)*groups*16:]
	size, from := m.in/mxfp4Group*17, cols.from/mxfp4Group*17
	var all sync.WaitGroup
	parts := min(runtime.GOMAXPROCS(0), len(rows))
	for p := range parts {
		all.Go(func() {
			for i := len(rows) * p / parts; i < len(rows)*(p+1)/parts; i++ {
				row := m.data[m.place(rows[i])*size:][:size]
				gguf.PackMXFP4(codes[i*groups*16:], exponents[i*groups:(i+1)*groups], row[from:])
			}
		})
	}
	all.Wait()
	return codes
}

// checkExponents returns an error for a matrix in MXFP4 with a group that is not a number. t is
// what is loaded of s.
func (s *stored) checkExponents(t *backend.Tensor) error {
	group, in := -1, 0
	switch {
	case t.DType == backend.MXFP4:
		in = t.Shape[1]
		group = bytes.IndexByte(t.Data[len(t.Data)/17*16:], gguf.NoExponent)
	case s.micro != nil: // expanded
		in = s.micro.in
		for i := 0; i < len(s.micro.data) && group < 0; i += 17 {
			if s.micro.data[i] == gguf.NoExponent {
				group = i / 17
			}
		}
	}
	if group < 0 {
		return nil
	}
	return fmt.Errorf("%w: %s: the exponent of inputs %d and following in row %d is %d, which is not a number: the file is damaged, download it again",
		ErrWeights, t.Name, group*mxfp4Group%in, group*mxfp4Group/in, gguf.NoExponent)
}
