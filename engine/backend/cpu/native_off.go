//go:build !cgo

package cpu

import "github.com/tandem-serving/tandem/engine/backend"

// nativeVariants is empty without cgo: portable Go is all there is.
func nativeVariants() []string { return nil }

func hasAMX() bool { return false }

func newNative(*CPU) (runner, error) { return nil, backend.ErrNoDevice }
