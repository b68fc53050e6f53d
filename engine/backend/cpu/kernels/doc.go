// Package kernels is the C of the CPU backend: the thread pool, and the kernels once for
// each instruction set (body.h, compiled by avx2.c, avx512.c and so on).
//
// It is apart from the backend's Go so that a change there compiles no C. The backend
// calls the functions of kernels.h, which checks nothing: callers have checked bounds.
// Without cgo the package is empty.
package kernels
