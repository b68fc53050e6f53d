//go:build cgo && amd64

#define KERNEL_ISA 2
#define KERNELS tandem_avx2
#include "body.h"
