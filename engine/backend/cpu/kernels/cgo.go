//go:build cgo

package kernels

/*
// ISO C, because GCC then leaves products and sums apart unless told to fuse.
#cgo CFLAGS: -O3 -std=c11 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Wno-psabi
#cgo LDFLAGS: -lm -lpthread
*/
import "C"

import _ "embed"

// Header is kernels.h. As part of this package it has the backend's Go compiled anew when
// the structs change that both share.
//
//go:embed kernels.h
var Header string
