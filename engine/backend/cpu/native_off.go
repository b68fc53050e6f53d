//go:build !cgo

package cpu

import (
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// nativeVariants returns none without cgo: only portable Go is available.
func nativeVariants() []string { return nil }

func hasAMX() bool { return false }

func newNative(*CPU) (runner, error) { return nil, backend.ErrNoDevice }

func newSampler(string) sample.Kernels { return sample.Portable{} }
