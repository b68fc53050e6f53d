//go:build cgo

package kernels

/*
// ISO C, so that GCC fuses products and sums only where the code requests it. -g1 is enough
// for debugging and halves the compiler's time. Sanitizers make it five times as long at
// -O3.
#cgo !asan CFLAGS: -O3
#cgo asan CFLAGS: -O1
#cgo CFLAGS: -g1 -std=c11 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Wno-psabi
#cgo LDFLAGS: -lm -lpthread
*/
import "C"

import _ "embed"

// Header is kernels.h. Because it is embedded, a change of the shared structs recompiles
// the backend's Go.
//
//go:embed kernels.h
var Header string
