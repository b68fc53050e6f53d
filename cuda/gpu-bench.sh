#!/bin/bash
# Speeds on a GPU, from the root of the tree, with what `make gpu-tests` built in bin/:
# random weights of real shapes, made here, so that nothing is downloaded. One table
# line per run; with and without graphs for the smallest.
set -u
cd "$(dirname "$0")/.." || exit 1
[ -x bin/tandem ] && [ -e bin/tandem-cuda.so ] || { echo "gpu-bench: bin/tandem and bin/tandem-cuda.so are missing: run make gpu-tests, and carry bin/ here" >&2; exit 1; }
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || { echo "gpu-bench: no GPU here" >&2; exit 1; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
for shape in llama-1b llama-8b; do
	python3 cuda/random_model.py "$shape" "$dir/$shape" && cp engine/builtin/model/tokenizer.json "$dir/$shape/" || exit 1
done
run() { # name, model, flags
	name=$1 model=$2
	shift 2
	echo "== $name"
	timeout 110 bin/tandem bench latency --model "$model" --disable-detokenize --device cuda:0 "$@" 2>&1 | tail -n 12
}
run "1B, batch 1, graphs" "$dir/llama-1b" --batch-size 1 --input-len 32 --output-len 128 --num-iters 3 --num-iters-warmup 1
run "1B, batch 1, --enforce-eager" "$dir/llama-1b" --batch-size 1 --input-len 32 --output-len 128 --num-iters 3 --num-iters-warmup 1 --enforce-eager
run "8B, batch 1, graphs" "$dir/llama-8b" --batch-size 1 --input-len 32 --output-len 128 --num-iters 3 --num-iters-warmup 1
run "8B, batch 64 at 1k, graphs" "$dir/llama-8b" --batch-size 64 --input-len 1024 --output-len 64 --num-iters 1 --num-iters-warmup 0
