//go:build cgo

#define KERNEL_ISA 0
#define KERNELS tandem_generic
#include "body.h"
