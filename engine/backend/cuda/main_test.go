//go:build cgo && linux

package cuda

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"testing"

	kernels "github.com/tandem-serving/tandem/cuda"
)

// TestMain runs the tests on the host twin, which it builds where it is not there,
// or on the shared object of TANDEM_CUDA_LIBRARY. With TANDEM_CUDA_SANITIZE the twin
// is instrumented; then the tests need -asan.
func TestMain(m *testing.M) {
	libraryPath, blasPath = os.Getenv("TANDEM_CUDA_LIBRARY"), cmp.Or(os.Getenv("TANDEM_CUDA_BLAS"), BLASAuto)
	if libraryPath == "" {
		sanitizers := ""
		modelRounds = 6
		if flag.Parse(); testing.Short() {
			rounds, modelRounds, drawRows, seeds, stepsAhead, determined = 5, 5, 10, 1, 8, 1
		}
		if os.Getenv("TANDEM_CUDA_SANITIZE") != "" {
			sanitizers, rounds, modelRounds, seeds, stepsAhead, longContext = kernels.Sanitizers, 5, 3, 1, 8, 33_000
		}
		if os.Getenv("TANDEM_SOAK") != "" {
			rounds, modelRounds, seeds, stepsAhead = 40, 40, 12, 60
		}
		var err error
		if libraryPath, err = kernels.Twin("../../..", sanitizers); err == nil {
			blasPath, err = kernels.BlasStub("../../..", sanitizers)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if what := os.Getenv("TANDEM_CUDA_MUTANT"); what != "" {
		os.Exit(mutant(what))
	}
	os.Exit(m.Run())
}

// libraryPath is the shared object under test, and blasPath its cuBLASLt: an emulation for the twin.
var libraryPath, blasPath string

// How much the tests run: less in short tests and under sanitizers, which the same kernels pass with
// fewer seeds, more in a soak.
var (
	rounds      = 14        // steps of a comparison of draws or of ranks
	drawRows    = 50        // of a step in which all draw
	seeds       = uint64(2) // of each kernel's case without KV
	stepsAhead  = 18
	modelRounds = 14 // steps of a comparison of models

	determined = 3 // models whose bits are compared

	longContext = 131_072 // positions
)
