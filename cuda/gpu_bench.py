"""Print the table of speeds on a GPU, with the output of `make gpu-tests` in bin/:

    python3 cuda/gpu_bench.py            # on a machine with a GPU, under 8 minutes
    python3 cuda/gpu_bench.py --rehearse # anywhere: tiny models on the CPU, to check that each row works

Each row is measured by itself and printed at once; rows with a target of the project come
first. Weights are random, of real shapes, and generated in memory (/dev/shm, if it has
room). A row that does not fit, lacks a dependency or fails states the reason, and the exit
status is 1. After the time limit, the remaining rows are reported as skipped.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
REHEARSE = "--rehearse" in sys.argv
LIMIT = 470  # seconds in all
BATCHED = 2048  # tokens of a step
BEGAN = time.monotonic()
TANDEM = os.environ.get("TANDEM_BIN", str(ROOT / "bin" / "tandem"))
failed = 0


def row(name, value, aim="", note=""):
    print(f"{name:<52} {value:>22}  {aim:<34} {note}", flush=True)


def left():
    return LIMIT - (time.monotonic() - BEGAN)


def measure(name, aim, need, f):
    """Runs f, which returns a row's value and note, if need seconds are left."""
    global failed
    try:
        if left() < need:
            raise RuntimeError(f"no time: {left():.0f} s are left, it takes about {need}")
        value, note = f()
        row(name, value, aim, note)
    except Exception as e:  # noqa: BLE001: one row's failure is not the next one's
        failed = 1
        row(name, "-", aim, str(e).strip().splitlines()[-1][:160])


def device():
    return ["--device", "cpu" if REHEARSE else "cuda:0"]


def latency(model, batch, inputs, outputs, *flags, iterations=2):
    """Seconds of a batch of prompts, from the start to the last token."""
    with tempfile.NamedTemporaryFile(suffix=".json") as to:
        run([TANDEM, "bench", "latency", "--model", model, "--disable-detokenize", *device(), "--batch-size", batch, "--input-len", inputs,
             "--output-len", outputs, "--num-iters", iterations, "--num-iters-warmup", 1, "--max-num-batched-tokens", BATCHED, "--max-num-seqs", max(batch, 1),
             "--output-json", to.name, *flags])
        return json.load(open(to.name))["avg_latency"]


def run(command):
    p = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=max(left(), 5))
    if p.returncode:
        raise RuntimeError(p.stdout.strip() or f"{command[0]} ended with {p.returncode}")
    return p.stdout


def decode(model, batch, inputs, outputs, *flags):
    """Output tokens per second of a full batch, by the difference of two lengths.

    While prompts are computed, BATCHED tokens a step, the first sequences decode already. The
    shorter length exceeds these steps, so that both lengths have the same ones.
    """
    short = max(outputs // 4, batch * inputs // BATCHED + 1)
    outputs += short
    one, all_ = (latency(model, batch, inputs, n, *flags, iterations=1 if batch > 1 else 2) for n in (short, outputs))
    if all_ <= one:
        raise RuntimeError(f"{outputs} tokens took {all_:.4f} s, {short} took {one:.4f}: the machine is not quiet")
    rate = batch * (outputs - short) / (all_ - one)
    return f"{rate:,.0f} tok/s", f"{(all_ - one) / (outputs - short) * 1e3:.2f} ms a step"


def prefill(model, tokens):
    return f"{tokens / latency(model, 1, tokens, 1):,.0f} tok/s", "first token included"


def ratio(model, outputs, flag):
    with_, without = (latency(model, 1, 16, outputs, *f) for f in ([], [flag]))
    step = (without - with_) / outputs * 1e6
    return f"{without / with_:.2f} x", f"{step:.0f} us a step less than with {flag}"


def kernel_names():
    """The kernels that TD_KERNELS may name."""
    tried = (ROOT / "cuda" / "runtime" / "plan.h").read_text().split("struct Tried {", 1)[1].split("};", 1)[0]
    return re.findall(r"^  bool (\w+) = false;", tried, re.M)


def kernel_rows(model, outputs):
    """What the kernels of TD_KERNELS save together, and each of them of what all have."""
    before = os.environ.get("TD_KERNELS")
    known = {}

    def seconds(names):
        if names not in known:
            os.environ["TD_KERNELS"] = names
            known[names] = latency(model, 1, 16, outputs)
        return known[names]

    def row_of(names):
        without, with_ = seconds(names), seconds("all")
        return f"{without / with_:.2f} x", f"{(without - with_) / outputs * 1e6:.0f} us a step"

    names = kernel_names()
    try:
        measure("Llama-3.2-1B decode, TD_KERNELS=all to none", "", 20, lambda: row_of("none"))
        for name in names:
            measure(f"same, all to all but {name}", "", 10, lambda name=name: row_of(",".join(n for n in names if n != name)))
    finally:
        os.environ.pop("TD_KERNELS", None)
        if before is not None:
            os.environ["TD_KERNELS"] = before


@contextlib.contextmanager
def serving(model, *flags):
    """Runs tandem serve on a free port, which it yields, until the block ends."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen([TANDEM, "serve", model, "--port", str(port), *device(), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_server(port, server)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def load(model, *flags):
    """Equal lengths, 32 at once, warmed, through the API."""
    inputs, outputs, n = (16, 8, 8) if REHEARSE else (128, 128, 96)
    with tempfile.TemporaryDirectory() as to, serving(model, *flags) as port:
        run([TANDEM, "bench", "serve", "--port", port, "--dataset-name", "random", "--random-input-len", inputs, "--random-output-len", outputs, "--ignore-eos",
             "--num-prompts", n, "--num-warmups", 8, "--max-concurrency", 2, "--ready-check-timeout-sec", 60, "--skip-tokenizer-init",
             "--save-result", "--result-dir", to, "--result-filename", "r.json"])
        r = json.load(open(os.path.join(to, "r.json")))
    return f"{r['output_throughput']:,.0f} tok/s", f"TTFT {r['mean_ttft_ms']:.1f} ms, ITL {r['mean_itl_ms']:.2f} ms"


def await_server(port, server):
    until = time.monotonic() + min(60, left())
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2).read()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not come up")


def kernels(name, pattern):
    """A figure of the kernels' own benchmarks."""
    binary = ROOT / "bin" / "cuda.test"
    if not binary.exists():
        raise RuntimeError("bin/cuda.test is missing: run make gpu-tests")
    p = subprocess.run([str(binary), "-test.run", "^$", "-test.bench", name, "-test.benchtime", "1s"], cwd=ROOT / "engine" / "backend" / "cuda", text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=90,
                       env=os.environ | ({} if REHEARSE else {"TANDEM_CUDA_LIBRARY": str(ROOT / "bin" / "tandem-cuda.so")}))
    found = re.search(r"([\d.e+]+) " + pattern, p.stdout)
    if not found:
        raise RuntimeError(p.stdout.strip() or "no figure")
    return f"{float(found[1]):,.1f} {pattern}", ""


def torch(config):
    """PyTorch's own decode of the same shape, where it is installed: eager, batch 1."""
    script = ROOT / "cuda" / "torch_decode.py"
    out = run([sys.executable, script, config, "cpu" if REHEARSE else "cuda"])
    return out.strip().splitlines()[-1], "transformers, eager"


def main():
    if not os.access(TANDEM, os.X_OK) or not (REHEARSE or (ROOT / "bin" / "tandem-cuda.so").exists()):
        sys.exit("gpu-bench: bin/tandem and bin/tandem-cuda.so are missing: run make gpu-tests, and carry bin/ here")
    if not REHEARSE:
        try:
            print("TD_KERNELS=" + os.environ.get("TD_KERNELS", ""), "TD_DRAWS=" + os.environ.get("TD_DRAWS", ""))
            print(run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]).strip())
        except (OSError, RuntimeError) as e:
            sys.exit(f"gpu-bench: no GPU here: nvidia-smi: {e}")
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        rows(folder)
    return failed


def model(folder, shape, need):
    """A checkpoint of a shape, the only one at a time: they are large."""
    for old in pathlib.Path(folder).iterdir():
        shutil.rmtree(old)
    free = shutil.disk_usage(folder).free
    if free < need * 1e9:
        raise RuntimeError(f"{shape} needs {need} GB in {folder}, {free / 1e9:.0f} are free")
    to = os.path.join(folder, shape)
    run([sys.executable, ROOT / "cuda" / "random_model.py", "tiny-" + shape if REHEARSE else shape, to])
    shutil.copy(ROOT / "engine" / "builtin" / "model" / "tokenizer.json", to)
    return to


def rows(folder):
    n, long, many = (8, 40, 2) if REHEARSE else (128, 1024, 64)

    def with_model(shape, need, body):
        global failed
        try:
            body(model(folder, shape, need))
        except Exception as e:  # noqa: BLE001
            failed = 1
            row(shape, "-", "", str(e).strip().splitlines()[-1][:160])

    def one_b(m):
        measure("Llama-3.2-1B bf16 decode, batch 1", "700, bar 1,300 tok/s", 20, lambda: decode(m, 1, 16, n))
        measure("same, graphs to --enforce-eager", "3 x", 20, lambda: ratio(m, n, "--enforce-eager"))
        measure("same, host time between steps", "< 20 us, bar 0", 20, lambda: ratio(m, n, "--async-scheduling=false"))
        measure("same, what --deterministic costs", "published", 20, lambda: ratio(m, n, "--deterministic"))
        measure("same, steady load over the API", "437.6 tok/s, 37 ms, 5.1 ms", 40, lambda: load(m))
        measure("same, steady load, --enforce-eager", "", 40, lambda: load(m, "--enforce-eager"))
        measure("same, PyTorch", "", 40, lambda: torch(os.path.join(m, "config.json")))

    def eight_b(m):
        measure("Llama-3.1-8B bf16 decode, batch 1", "170, bar 258 tok/s", 50, lambda: decode(m, 1, 16, n // 2))
        measure(f"same, batch {many} at {long} tokens", "5,200, bar 9,300 tok/s", 60, lambda: decode(m, many, long, n // 2))
        measure("same, prefill of 2k tokens", "24k, bar 38k tok/s", 30, lambda: prefill(m, 64 if REHEARSE else 2000))
        measure("same, prefill without cuBLASLt", "", 30, lambda: prefill_flags(m))
        for bits, bar in (("int8", 485), ("int4", 863)):
            measure(f"same in {bits}, decode, batch 1", f"90 %: {bar} tok/s", 40, lambda bits=bits: decode(m, 1, 16, n // 2, "--quantization", bits))
        measure(f"same in int8, decode, batch {many}", "", 40, lambda: decode(m, many, 16, n // 2, "--quantization", "int8"))

    def eight_b_fp8(m):
        measure("Llama-3.1-8B fp8 decode, batch 1", "90 %: 482 tok/s", 40, lambda: decode(m, 1, 16, n // 2))
        measure("same, prefill of 2k tokens", "", 30, lambda: prefill(m, 64 if REHEARSE else 2000))

    def prefill_flags(m):
        tokens = 64 if REHEARSE else 2000
        return f"{tokens / latency(m, 1, tokens, 1, '--cublaslt', 'none'):,.0f} tok/s", ""

    measure("decode attention, 4k context, batch 16", "60 %, bar 90 % of bandwidth", 30, lambda: kernels("BenchmarkDecodeAttention", "GB/s"))
    measure("KV push that is not hidden", "< 5 % of prefill", 30, lambda: kernels("BenchmarkPush", "exposed-%"))
    with_model("llama-1b", 3, one_b)
    with_model("llama-8b", 17, eight_b)
    with_model("llama-8b-fp8", 10, eight_b_fp8)
    for shape, need, aim in (("gpt-oss-20b", 15, "290, bar 700 tok/s"), ("gpt-oss-120b", 67, "215, bar 520 tok/s")):
        with_model(shape, need, lambda m, shape=shape, aim=aim: measure(f"{shape} MXFP4 decode, batch 1", aim, 40, lambda: decode(m, 1, 16, n // 2)))
    with_model("llama-1b", 3, lambda m: kernel_rows(m, n))


if __name__ == "__main__":
    sys.exit(main())
