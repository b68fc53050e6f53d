"""Compile kernels to PTX for one architecture with NVRTC, without nvcc:

    python3 nvrtc.py LIBNVRTC ARCHITECTURE OUTPUT INCLUDES HEADER... -- KERNEL...

HEADERs define the kernels; KERNELs are instances of templates, as in "gemv<1,1>". The output is PTX
for an ARCHITECTURE as compute_80. The compiler's messages go to stdout. With --version instead of an
architecture, NVRTC's version does.
"""

import ctypes
import pathlib
import sys

# NVRTC has no headers of a C library. What the kernels need of them is built in, but for the types.
TYPES = b"""#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
"""
STANDARD = [b"cstdint", b"cstring", b"cmath", b"stddef.h", b"stdint.h"]


def main():
    nvrtc = ctypes.CDLL(sys.argv[1])
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    if sys.argv[2] == "--version":
        numbers = ctypes.c_int(), ctypes.c_int()
        nvrtc.nvrtcVersion(ctypes.byref(numbers[0]), ctypes.byref(numbers[1]))
        print("NVRTC", *(n.value for n in numbers))
        return
    architecture, output, includes = sys.argv[2:5]
    split = sys.argv.index("--")
    headers, kernels = sys.argv[5:split], sys.argv[split + 1 :]

    def call(name, *args):
        status = getattr(nvrtc, name)(*args)
        if status:
            raise SystemExit(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def get(what):
        size = ctypes.c_size_t()
        call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{what}", program, data)
        return data.raw

    program = ctypes.c_void_p()
    source = "".join(f'#include "{h}"\n' for h in headers)
    strings = ctypes.c_char_p * len(STANDARD)
    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), pathlib.Path(headers[0]).stem.encode(), len(STANDARD), strings(*[TYPES] * len(STANDARD)), strings(*STANDARD))
    for k in kernels:
        call("nvrtcAddNameExpression", program, k.encode())
    # Functions of api.h are declared, too; 1097 is their attribute, which is the host's.
    options = [f"--gpu-architecture={architecture}", "-std=c++17", f"-I{includes}", "--device-as-default-execution-space", "--diag-suppress=1097"]
    strings = ctypes.c_char_p * len(options)
    status = nvrtc.nvrtcCompileProgram(program, len(options), strings(*[o.encode() for o in options]))
    print(get("ProgramLog").rstrip(b"\0").decode())
    if status:
        raise SystemExit(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")
    pathlib.Path(output).write_bytes(get("PTX").rstrip(b"\0"))


main()
