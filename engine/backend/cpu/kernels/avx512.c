//go:build cgo && amd64

#define KERNEL_ISA 512
#define KERNELS tandem_avx512
#include "body.h"
