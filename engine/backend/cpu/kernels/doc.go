// Package kernels is the C code of the CPU backend: the thread pool, and the kernels, once
// for each instruction set (body.h, compiled by avx2.c, avx512.c and so on).
//
// It is a package of its own so that a change of the backend's Go compiles no C. The
// backend calls the functions of kernels.h, which check no bounds: the caller has checked
// them. Without cgo the package is empty.
package kernels
