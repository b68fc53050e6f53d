//go:build cgo && linux

package cuda

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Memory that a device does not have fails the call for it, and no later one.
func TestNoMemory(t *testing.T) {
	dev := openGPU(t, Options{Limits: backend.Limits{Tokens: 1 << 14, Outputs: 1, Seqs: 1, Blocks: 1}, Eager: true})
	defer dev.Close()
	b := &bench{Backend: dev, rng: rand.New(rand.NewPCG(1, 1)), rows: 3}
	if _, err := dev.Alloc(backend.TokenRows, maxCols); !errors.Is(err, backend.ErrMemory) {
		t.Fatalf("a buffer of %d bytes: %v", 4*maxCols<<14, err)
	}
	x, y := b.input(40, 1), b.output(40)
	step := plainStep(b.rng, 3)
	if err := dev.Replay(backend.Key{Tokens: 3}, step, func() {
		b.inputs[0]()
		b.Columns(y, x, 0)
	}, nil); err != nil {
		t.Error(err)
	}
}
