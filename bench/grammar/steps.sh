#!/bin/sh
# Compares the time per token of 32 streams of Qwen2.5-0.5B's shape with a grammar and without, in
# turns, and prints the ratios. Run it from the repository's root on a machine of its own:
#
#	make build && sh bench/grammar/steps.sh FOLDER
#
# FOLDER gets a model with random weights, 1 GB. RANKS is the file of its tokens, as ranks.mjs writes
# them; without it only 256 of them have bytes. A step computes several tokens of a stream where its
# grammar leaves no choice. Therefore the mean time per output token is compared, and not the time
# between steps. The first turn with the grammar warms the masks.
set -eu
dir=$1 port=${PORT:-18431} rounds=${ROUNDS:-5}
shape=${SHAPE:--vocab 151936 -hidden 896 -ffn 4864 -layers 24 -heads 14 -kv-heads 2 -head-dim 64}
[ -f "$dir/model.safetensors" ] || ${GO:-go} run ./bench/checkpoint/write $shape ${RANKS:+-ranks "$RANKS"} "$dir"
echo '{"eos_token_id": 151935}' > "$dir/generation_config.json" # masks need one
bin/tandem serve "$dir" --port "$port" --max-num-seqs 32 --max-model-len 512 --log-level warning &
server=$!
trap 'kill $server; wait $server || :' EXIT
until curl -sf "http://127.0.0.1:$port/readyz" >/dev/null; do sleep 1; done
cpu() { awk -v hz="$(getconf CLK_TCK)" '{ print ($14 + $15) / hz }' "/proc/$server/stat"; }
turn() { # prints the mean time per output token in milliseconds, and the server's CPU time in seconds
	before=$(cpu)
	tpot=$(bin/tandem bench serve --base-url "http://127.0.0.1:$port" --dataset-name random --random-input-len 16 --random-output-len 192 --num-prompts 32 \
		--max-concurrency 32 --ignore-eos --temperature 1 --seed "$1" --extra-body "$2" 2>/dev/null | sed -n 's/^Mean TPOT (ms): *//p')
	echo "$tpot $before $(cpu)"
}
schema='{"structured_outputs":{"json":{"type":"array","items":{"type":"object","properties":{"name":{"type":"string","maxLength":40},"n":{"type":"integer"}},"required":["name","n"],"additionalProperties":false},"minItems":1000}}}'
turn 0 "$schema" >/dev/null
for i in $(seq "$rounds"); do
	free=$(turn "$i" '{}')
	bound=$(turn "$i" "$schema")
	echo "$free $bound" | awk '{
		printf "free %.1f ms, constrained %.1f ms, ratio %.3f; CPU %.2f s, %.2f s, ratio %.3f\n",
			$1, $4, $4 / $1, $3 - $2, $6 - $5, ($6 - $5) / ($3 - $2)
	}'
done
