//go:build cgo && amd64

#define KERNEL_ISA 2
#define KERNEL_VNNI 1
#define KERNELS tandem_avxvnni
#include "body.h"
