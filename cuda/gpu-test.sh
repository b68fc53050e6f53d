#!/bin/bash
# Parity on a GPU, from the root of the tree, with the output of `make gpu-tests` in bin/:
# kernels and whole models against the CPU backend, then the kernels under
# compute-sanitizer where it is installed. The exit status is 0 only if all pass.
set -u
cd "$(dirname "$0")/.." || exit 1
for f in bin/cuda.test bin/tandem-cuda.so; do
	[ -e "$f" ] || { echo "gpu-test: $f is missing: run make gpu-tests where there is a network, and carry bin/ here" >&2; exit 1; }
done
. cuda/gpu-common.sh
export TANDEM_CUDA_LIBRARY="$PWD/bin/tandem-cuda.so"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || { echo "gpu-test: no GPU here" >&2; exit 1; }
status=0
(cd engine/backend/cuda && timeout 180 ../../../bin/cuda.test -test.v -test.run "$parity") || status=1
if command -v compute-sanitizer >/dev/null; then
	for tool in memcheck racecheck synccheck; do
		echo "compute-sanitizer $tool"
		(cd engine/backend/cuda && timeout 80 compute-sanitizer --tool "$tool" --error-exitcode 9 ../../../bin/cuda.test -test.run 'TestKernels') || status=1
	done
else
	echo "gpu-test: compute-sanitizer is not installed here; kernels ran without it"
fi
exit $status
