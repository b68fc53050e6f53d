//go:build cgo

package kernels

/*
// ISO C, because GCC then leaves products and sums apart unless told to fuse. Lines
// and functions are enough of debugging, and halve the time of the compiler; sanitizers
// make it five times as long at -O3.
#cgo !asan CFLAGS: -O3
#cgo asan CFLAGS: -O1
#cgo CFLAGS: -g1 -std=c11 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Wno-psabi
#cgo LDFLAGS: -lm -lpthread
*/
import "C"

import _ "embed"

// Header is kernels.h. As part of this package it has the backend's Go compiled anew when
// the structs change that both share.
//
//go:embed kernels.h
var Header string
