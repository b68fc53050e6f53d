//go:build cgo && amd64

#define KERNEL_ISA 512
#define KERNEL_VNNI 1
#define KERNEL_AMX 1
#define KERNELS tandem_amx
#include "body.h"
