#!/bin/bash
# Speeds on a GPU, from the root of the tree, with the output of `make gpu-tests` in bin/:
# the table that cuda/gpu_bench.py prints. --rehearse tries it on the CPU.
cd "$(dirname "$0")/.." || exit 1
command -v python3 >/dev/null || { echo "gpu-bench: it needs python3, which is not here" >&2; exit 1; }
exec python3 cuda/gpu_bench.py "$@"
