#!/bin/bash
# One of three slots of 8 minutes on a machine with a GPU, each complete by itself, with the output
# of `make gpu-tests` in bin/ (or the archive of `make gpu-pack`):
#
#   cuda/gpu-slot.sh 1   parity, memory errors, and where the time of a 1B model's step goes
#   cuda/gpu-slot.sh 2   8B: decode, batches, prefill with and without cuBLASLt, attention, KV push
#   cuda/gpu-slot.sh 3   GPT-OSS-20B, the other sanitizers, PyTorch next to it
#
# The most valuable measurements come first. Results are appended to $OUT/slot-N.md as soon as they
# are known, and the end of the running measurement's output each minute. --rehearse as second
# argument tries the script on the CPU, with tiny models.
set -u
cd "$(dirname "$0")/.." || exit 1
slot=${1:-} rehearse=${2:-}
case $slot in 1 | 2 | 3) ;; *) echo "gpu-slot: which slot, 1, 2 or 3?" >&2 && exit 2 ;; esac
. cuda/gpu-common.sh
root=$PWD out=${OUT:-$PWD/bin/gpu} limit=${LIMIT:-480} status=0
mkdir -p "$out"
report=$out/slot-$slot.md
work=$(mktemp -d "$([ -d /dev/shm ] && echo /dev/shm || echo /tmp)/gpu-slot.XXXXXX")
trap 'rm -rf "$work"' EXIT
device=cuda:0 tiny=
if [ "$rehearse" = --rehearse ]; then device=cpu tiny=tiny-; else export TANDEM_CUDA_LIBRARY=$root/bin/tandem-cuda.so; fi

write() { printf '%s\n' "$*" | tee -a "$report"; }

# step NAME SECONDS PATTERN COMMAND... runs a command for at most SECONDS, or what is left, and
# reports the lines of its output that match PATTERN.
step() {
	local name=$1 seconds=$2 pattern=$3 left=$((limit - SECONDS)) log=$out/$slot-$1.log rc=0 began=$SECONDS pid
	shift 3
	if [ $left -lt 10 ]; then
		write "- **$name**: no time was left"
		status=1
		return
	fi
	[ "$seconds" -lt $left ] || seconds=$left
	timeout --kill-after=5 "$seconds" "$@" >"$log" 2>&1 &
	pid=$!
	while kill -0 $pid 2>/dev/null; do
		sleep 0.2
		[ $(((SECONDS - began) % 60)) -ne 59 ] || { write "- $name, after $((SECONDS - began)) s: $(tail -n 1 "$log" | cut -c1-160)" && sleep 1; }
	done
	wait $pid || rc=$?
	write "- **$name**: status $rc, $((SECONDS - began)) s"
	[ $rc -eq 0 ] || status=1
	{ if [ $rc -ne 0 ]; then grep -aE "$pattern" "$log" || tail -n 5 "$log"; else grep -aE "$pattern" "$log"; fi; } | head -40 | cut -c1-200 | sed 's/^/      /' | tee -a "$report"
}

# model SHAPE writes a checkpoint of random weights to $work/model, the only one at a time.
model() {
	rm -rf "$work/model"
	step "$1" 90 error python3 cuda/random_model.py "$tiny$1" "$work/model"
	cp engine/builtin/model/tokenizer.json "$work/model/" 2>/dev/null
}

# PyTorch brings cuBLASLt to a place where the dynamic linker does not find it.
blas=$(find "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)" /usr/local/cuda*/lib64 -maxdepth 4 -name 'libcublasLt.so.1[23]' 2>/dev/null | head -n 1)

# latency NAME SECONDS FLAGS... reports the seconds of a batch, from its prompts to the last token.
latency() {
	local name=$1 seconds=$2
	shift 2
	step "$name" "$seconds" 'Avg latency|cuBLASLt|graphs captured|on the CPU' bin/tandem bench latency --model "$work/model" --device $device --cublaslt "${blas:-auto}" --disable-detokenize \
		--num-iters 2 --num-iters-warmup 1 --max-num-batched-tokens 2048 "$@"
}

# tests NAME SECONDS ARGUMENTS... runs the tests of the kernels.
tests() {
	local name=$1 seconds=$2
	shift 2
	step "$name" "$seconds" '^ *--- (FAIL|SKIP)|off by|panic|worst|^(ok|PASS|FAIL)|GB/s|exposed|note:' sh -c 'cd engine/backend/cuda && exec "$@"' sh "$root/bin/cuda.test" "$@"
}

# checked TOOL SECONDS runs the kernels' tests under a tool of compute-sanitizer.
checked() {
	command -v compute-sanitizer >/dev/null || { write "- **$1**: compute-sanitizer is not installed" && return; }
	step "$1" "$2" 'ERROR SUMMARY|Invalid|Race|Uninit|^=+ .*hazard' sh -c 'cd engine/backend/cuda && exec "$@"' sh \
		compute-sanitizer --tool "$1" --error-exitcode 9 "$root/bin/cuda.test" -test.run "${3:-TestKernels}"
}

# table NAME SECONDS SKIP COUNT FLAGS... reports the time of each kernel, by Nsight Compute.
table() {
	local name=$1 seconds=$2 skip=$3 count=$4
	shift 4
	command -v ncu >/dev/null || { write "- **$name**: ncu is not installed" && return; }
	step "$name" "$seconds" 'error|ERROR' ncu --clock-control none --target-processes all --launch-skip "$skip" --launch-count "$count" --csv --page raw --log-file "$out/$name.csv" \
		--metrics gpu__time_duration.sum,dram__bytes_read.sum,sm__inst_issued.avg.pct_of_peak_sustained_active \
		bin/tandem bench latency --model "$work/model" --device $device --disable-detokenize --batch-size 1 --num-iters 1 --num-iters-warmup 0 --max-num-batched-tokens 2048 --max-num-seqs 4 --enforce-eager "$@"
	python3 cuda/ncu_table.py "$out/$name.csv" 2>&1 | head -40 | tee -a "$report"
}

for f in bin/cuda.test bin/tandem; do
	[ -e $f ] || { echo "gpu-slot: $f is missing: run make gpu-tests where there is a network, and carry bin/ here" >&2 && exit 1; }
done
write "## Slot $slot"
[ $device = cpu ] || step gpu 10 , nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
[ $status -eq 0 ] || exit 1
if [ $device != cpu ]; then # the object of the other compiler, if this one does not run
	tests object 30 -test.run '^TestKernels$/^norms$'
	if [ $status -ne 0 ] && [ -e bin/tandem-cuda-nvcc.so ]; then
		mv bin/tandem-cuda.so bin/tandem-cuda-nvrtc.so && mv bin/tandem-cuda-nvcc.so bin/tandem-cuda.so && status=0 && write "- bin/tandem-cuda.so is that of make cuda-nvcc from here on"
	fi
fi

few=$([ -n "$tiny" ] && echo 4 || echo 32)
many=$((few * 5))
case $slot in
1)
	tests parity 110 -test.v -test.run "$parity|TestOverlapBits"
	checked memcheck 60 'TestKernels/(attention|moe|place|draws|rules|masks|slices)'
	model llama-1b
	if python3 -c 'import importlib.util as u; exit(not (u.find_spec("torch") and u.find_spec("transformers")))'; then
		step 1b-parity 90 '^[|]|Error|^parity' python3 cuda/parity.py "$work/model" $rehearse
	else
		write "- **1b-parity**: PyTorch or transformers is not installed"
	fi
	for try in "blocks none" "slices none" "slices all" "slices without-pdl"; do
		read -r draws kernels <<<"$try"
		case $kernels in without-*) list=$(without "${kernels#without-}") ;; *) list=$kernels ;; esac
		for n in $few $many; do TD_DRAWS=$draws TD_KERNELS=$list latency "1b-${try/ /-}-$n" 30 --batch-size 1 --max-num-seqs 4 --input-len 16 --output-len "$n"; done
	done
	latency 1b-eager 30 --batch-size 1 --max-num-seqs 4 --input-len 16 --output-len $many --enforce-eager
	table 1b-kernels 60 700 330 --input-len 16 --output-len 8
	TD_DRAWS=blocks TD_KERNELS=none table 1b-none 60 700 330 --input-len 16 --output-len 8
	# Each kernel left out, one at a time, next to 1b-slices-all and the first of these; pdl is above.
	TD_KERNELS=all latency 1b-prompt-all 30 --batch-size 1 --max-num-seqs 4 --input-len $((few * 62)) --output-len 1
	for name in ${names/pdl/}; do TD_KERNELS=$(without $name) latency 1b-without-$name 20 --batch-size 1 --max-num-seqs 4 --input-len 16 --output-len $many; done
	for name in $names; do TD_KERNELS=$(without $name) latency 1b-prompt-without-$name 20 --batch-size 1 --max-num-seqs 4 --input-len $((few * 62)) --output-len 1; done
	if is_name int4; then
		for kernels in all "$(without int4)"; do
			TD_KERNELS=$kernels latency "1b-int4-$([ "$kernels" = all ] && echo all || echo without)" 20 --quantization int4 --batch-size 1 --max-num-seqs 4 --input-len 16 --output-len $many
		done
	fi
	;;
2)
	model llama-8b
	for kernels in all none; do
		for n in $((few / 2)) $((many / 2)); do TD_KERNELS=$kernels latency "8b-$kernels-$n" 40 --batch-size 1 --max-num-seqs 4 --input-len 16 --output-len "$n"; done
		for n in 65 129; do TD_KERNELS=$kernels latency "8b-64-at-1k-$kernels-$n" 60 --batch-size 64 --max-num-seqs 64 --input-len $((few * 32)) --output-len $n; done
		TD_KERNELS=$kernels latency "8b-prefill-$kernels" 30 --batch-size 1 --max-num-seqs 4 --input-len $((few * 62)) --output-len 1
	done
	TD_KERNELS=$(without chunk16) latency 8b-prefill-without-chunk16 30 --batch-size 1 --max-num-seqs 4 --input-len $((few * 62)) --output-len 1
	latency 8b-prefill-own 30 --batch-size 1 --max-num-seqs 4 --input-len $((few * 62)) --output-len 1 --cublaslt none
	for kernels in attention none; do TD_KERNELS=$kernels tests "$kernels" 30 -test.run '^$' -test.bench DecodeAttention -test.benchtime 1s; done
	tests push 30 -test.run '^$' -test.bench Push -test.benchtime 1s
	table 8b-prefill-kernels 100 0 1500 --input-len 2000 --output-len 1
	;;
3)
	model gpt-oss-20b
	for kernels in all none without-moe without-mxfp4; do
		for n in $((few / 2)) $((many / 2)); do
			case $kernels in without-*) list=$(without "${kernels#without-}") ;; *) list=$kernels ;; esac
			TD_KERNELS=$list latency "20b-$kernels-$n" 40 --batch-size 1 --max-num-seqs 1 --input-len 16 --output-len "$n"
		done
	done
	latency 20b-prefill 40 --batch-size 1 --max-num-seqs 1 --input-len $((few * 62)) --output-len 1
	table 20b-kernels 90 1000 700 --input-len 16 --output-len 6
	for tool in racecheck synccheck initcheck; do checked $tool 50; done
	model llama-1b
	step pytorch 60 'tok/s|Error' python3 cuda/torch_decode.py "$work/model/config.json" ${device%%:*}
	;;
esac
write "- end after $SECONDS s, status $status"
exit $status
