#!/bin/sh
# Compares the time per token of 32 streams of Qwen2.5-0.5B's shape with a grammar and without, in
# turns, and prints the ratios. Run it from the repository's root on a machine of its own:
#
#	make build && sh bench/grammar/steps.sh FOLDER
#
# FOLDER gets a model with random weights, 1 GB. Each stream has 192 tokens, of which the first 64 warm
# the masks: the median over all of them is compared.
set -eu
dir=$1 port=${PORT:-18431} rounds=${ROUNDS:-5}
[ -f "$dir/model.safetensors" ] || ${GO:-go} run ./bench/checkpoint/write -vocab 151936 -hidden 896 -ffn 4864 -layers 24 -heads 14 -kv-heads 2 -head-dim 64 "$dir"
echo '{"eos_token_id": 151935}' > "$dir/generation_config.json" # masks need one
bin/tandem serve "$dir" --port "$port" --max-num-seqs 32 --max-model-len 512 --log-level warning &
server=$!
trap 'kill $server' EXIT
until curl -sf "http://127.0.0.1:$port/readyz" >/dev/null; do sleep 1; done
turn() { # prints the median of the times between tokens, in milliseconds
	bin/tandem bench serve --base-url "http://127.0.0.1:$port" --dataset-name random --random-input-len 16 --random-output-len 192 --num-prompts 32 \
		--max-concurrency 32 --ignore-eos --temperature 1 --seed "$1" --extra-body "$2" 2>/dev/null | sed -n 's/^Median ITL (ms): *//p'
}
schema='{"structured_outputs":{"json":{"type":"array","items":{"type":"object","properties":{"name":{"type":"string","maxLength":40},"n":{"type":"integer"}},"required":["name","n"],"additionalProperties":false},"minItems":1000}}}'
for i in $(seq "$rounds"); do
	free=$(turn "$i" '{}')
	bound=$(turn "$i" "$schema")
	echo "$free $bound" | awk '{ printf "free %.1f ms, constrained %.1f ms, ratio %.3f\n", $1, $2, $2 / $1 }'
done
