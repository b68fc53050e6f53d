//go:build cgo && arm64

#define KERNEL_ISA 128
#define KERNELS tandem_neon
#include "body.h"
