"""Test and measure on a machine with a GPU, with the output of `make gpu-tests` in bin/ (or the
archive of `make gpu-pack`):

    python3 cuda/gpu_hour.py [--limit 540] [--only PART,...] [--other DIR] [--rehearse]

Requires only Python 3.10. Results are appended to $OUT/gpu-hour.md (bin/gpu/gpu-hour.md) as soon
as they are known; $OUT also has the output of each process. The parts, the most valuable first:

    tests        kernels and models against the CPU, each test a process, several at once
    sanitizers   the kernels under each tool of compute-sanitizer, all tools at once
    parity       log-probabilities of a 1B model against transformers in float32, by parity.py
    speed        tokens a second next to the prediction of model.md
    attention    what attention reads a second
    push         the part of a KV push that prefill does not hide
    kernels      the time of each kernel, by Nsight Compute
    no-cublaslt  prefill without cuBLASLt
    torch        decoding by PyTorch
    more         other settings and formats, and load over the API
    large        GPT-OSS 120B, 67 GB in memory; only by --only large --each 300

Before them, the GPU and the libraries are listed. A part that needs more time than is left, or a
program that is not installed, is left out. A process that takes --each seconds is killed. The exit
status is 1 if anything failed or there was no time for it.

--other measures speeds with the builds of bin/, DIR and bin/ again, row by row. --rehearse tries
all parts on the CPU with tiny models, and needs the tree and a C++ compiler for the host twin.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import csv
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGAN = time.monotonic()
BATCHED = 2048  # tokens of a step
PARTS = "tests sanitizers parity speed attention push kernels no-cublaslt torch more large".split()

# Prefixes of the tests of engine/backend/cuda that compare a GPU with the CPU.
TESTS = """TestKernels TestModels TestModelBF16 TestStepsAhead TestMasks TestDraws TestMirror TestDirect TestDeterministic
TestAdapters TestLongContexts TestHalves TestInt4 TestDelta TestOverlapBits""".split()
SANITIZERS = "memcheck racecheck synccheck initcheck".split()

# Of each shape of random_model.py: the GB of a checkpoint, and the seconds of a run on an H100.
SHAPES = {"llama-1b": (3, 2), "llama-8b": (17, 6), "llama-8b-fp8": (10, 6), "gpt-oss-20b": (15, 13), "gpt-oss-120b": (67, 60)}

# What is measured of a shape: batch, prompt length, output length, flags. The names are those of model.md.
PROMPT = "Llama 8B, a prompt of 2,000 tokens"
ROWS = {
    "speed": [
        ("Llama 1B, one row", "llama-1b", 1, 16, 128),
        ("Llama 8B, one row", "llama-8b", 1, 16, 64),
        ("Llama 8B, 64 rows of 1,024 positions", "llama-8b", 64, 1024, 64),
        (PROMPT, "llama-8b", 1, 2000, 1),
        ("GPT-OSS 20B, one row", "gpt-oss-20b", 1, 16, 64),
        ("Llama 1B int4, one row", "llama-1b", 1, 16, 128, "--quantization", "int4"),
    ],
    "no-cublaslt": [(PROMPT + ", without cuBLASLt", "llama-8b", 1, 2000, 1, "--cublaslt", "none")],
    "more": [
        ("Llama 8B int4, one row", "llama-8b", 1, 16, 64, "--quantization", "int4"),
        ("Llama 8B int8, one row", "llama-8b", 1, 16, 64, "--quantization", "int8"),
        ("Llama 8B fp8, one row", "llama-8b-fp8", 1, 16, 64),
        ("Llama 8B fp8, a prompt of 2,000 tokens", "llama-8b-fp8", 1, 2000, 1),
        ("Llama 8B int8, 64 rows", "llama-8b", 64, 16, 64, "--quantization", "int8"),
        ("Llama 1B, one row, no graphs", "llama-1b", 1, 16, 128, "--enforce-eager"),
        ("Llama 1B, one row, no step ahead", "llama-1b", 1, 16, 128, "--async-scheduling=false"),
        ("Llama 1B, one row, deterministic", "llama-1b", 1, 16, 128, "--deterministic"),
    ],
    "large": [("GPT-OSS 120B, one row", "gpt-oss-120b", 1, 16, 64)],
}

# What Nsight Compute measures: kernels that it skips and that it counts, prompt length, output length.
KERNELS = [
    ("Llama 1B, kernels", "llama-1b", 700, 330, 16, 8),
    ("Llama 8B, kernels of a prompt", "llama-8b", 0, 1500, 2000, 1),
    ("GPT-OSS 20B, kernels", "gpt-oss-20b", 1000, 700, 16, 6),
]

# Prints the properties of the first GPU, by numbers of the driver's API.
PROPERTIES = """
import ctypes
driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if status := driver.cuInit(0):
    raise SystemExit(f"cuInit returned {status}")
for name, number in dict(multiprocessors=16, kHz=13, memory_kHz=36, bus_bits=37, L2_bytes=38).items():
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    print(name, value.value, end=" ")
"""

# Units of Nsight Compute: microseconds and bytes.
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


class Absent(Exception):
    """Something that a measurement needs and that is not installed, which is no failure."""


@contextlib.contextmanager
def serving(binary, device, model, *flags):
    """Runs tandem serve on a free port, which it yields, until the block ends."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(binary), "serve", model, "--port", str(port), "--device", device, *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2).read()
                break
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the server did not come up")
            time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


def kernel_table(path):
    """Returns the kernels of a CSV file of Nsight Compute in Markdown, the longest time first."""
    lines = [line for line in csv.reader(path.read_text().splitlines()) if len(line) > 5]
    start = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
    if start is None:
        raise RuntimeError("ncu measured no kernels")
    head, units = lines[start], lines[start + 1]
    name, spent, read = (head.index(c) for c in ("Kernel Name", "gpu__time_duration.sum", "dram__bytes_read.sum"))
    grid = next((i for i, c in enumerate(head) if c in ("Grid Size", "launch__grid_size")), None)
    totals = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for line in lines[start + 2 :]:
        total = totals[line[name].split("(")[0][:40], line[grid] if grid is not None else ""]
        total[0] += 1
        for i, column in (1, spent), (2, read):
            total[i] += float(line[column].replace(",", "")) * UNITS[units[column]]
    table = "| kernel | grid | launches | us a launch | GB/s | us in all |\n|---|---|---|---|---|---|\n"
    for (kernel, blocks), (n, us, got) in sorted(totals.items(), key=lambda x: -x[1][1])[:38]:
        table += f"| {kernel} | {blocks} | {n} | {us / n:.2f} | {got / us / 1e3 if us else 0:.0f} | {us:.0f} |\n"
    return table


def row_key(name):
    return re.sub(r"[\d,]+ tokens", "tokens", name)


def predictions(gpu):
    """Returns the tokens a second that cuda/model.md predicts for this GPU, by row_key."""
    first, *pages = (ROOT / "cuda" / "model.md").read_text().split("\n## ")
    page, column = first, -1  # of an H200: the last column has all optimizations
    if not re.search(r"\bH200\b", gpu):  # of an H100: the column before what was measured
        page, column = next((p for p in pages if "H100" in gpu and p.startswith("An H100")), ""), 0
    found = {}
    for cells in (line.split("|") for line in page.splitlines()):
        if speeds := [float(c.split()[0]) for c in cells if c.endswith("tok/s ")]:
            found[row_key(cells[1].strip())] = speeds[column]
    return found


class Runner:
    """The measurements of one run, and what they share."""

    def __init__(self, args, folder):
        self.args, self.folder, self.tiny = args, pathlib.Path(folder), "tiny-" if args.rehearse else ""
        self.device = "cpu" if args.rehearse else "cuda:0"
        self.out = pathlib.Path(os.environ.get("OUT") or ROOT / "bin" / "gpu")
        self.out.mkdir(parents=True, exist_ok=True)
        self.began = time.strftime("%H%M%S")  # the names of logs begin with it
        self.report = open(self.out / "gpu-hour.md", "a")
        self.lock, self.numbers, self.running = threading.RLock(), itertools.count(1), set()
        self.failed = self.ended = False
        self.blas, self.library, self.predicted, self.made = "auto", "tandem-cuda.so", {}, {}

    def left(self):
        return self.args.limit - (time.monotonic() - BEGAN)

    def write(self, text):
        with self.lock:
            for to in self.report, sys.stdout:
                to.write(text + "\n")
                to.flush()

    def measure(self, name, need, f, form="- **{}**: {}"):
        """Writes what f returns, or why there is nothing. It needs need seconds."""
        if self.ended:
            return False
        began, good = time.monotonic(), False
        try:
            if self.left() < (1 if self.tiny else need):
                raise RuntimeError(f"left out, {self.left():.0f} s are left of about {need}")
            text, good = f(), True
            if form[0] != "|":
                text = f"{time.monotonic() - began:.1f} s, {text}"
        except Absent as e:
            text = f"left out, {e}"
        except Exception as e:  # noqa: BLE001: one measurement's failure is not the next one's
            self.failed, text = True, f"failed: {e}"
            if form[0] == "|":
                text = re.sub(r"[\n|]+ *", " ", text)[:300]
        self.write(form.format(name, text))
        return good

    def at_once(self, n, jobs):
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            list(pool.map(lambda job: self.measure(*job), jobs))

    def run(self, name, command, cwd=ROOT, **env):
        """Returns the output of a command, which must end with status 0."""
        path = self.out / f"{self.began}-{next(self.numbers):03}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
        with open(path, "w") as log, self.lock:
            if self.ended:
                raise RuntimeError("the run ends")
            p = subprocess.Popen([str(c) for c in command], cwd=cwd, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            self.running.add(p)
        seconds = max(min(self.args.each or (300 if self.tiny else 90), self.left()), 0)
        try:
            why = f"status {p.wait(seconds)}"
        except subprocess.TimeoutExpired:
            why = f"killed after {seconds:.0f} s"
            end(p, signal.SIGQUIT)  # programs in Go write their stacks
            time.sleep(0.5)
        end(p, signal.SIGKILL)
        p.wait()
        self.running.discard(p)
        text = path.read_text(errors="replace")
        if why != "status 0":
            lines = [line[:200] for line in text.strip().splitlines()]
            marked = [line for line in lines if re.search(r"--- FAIL|off by|panic|[Ee]rror|hazard", line)]
            raise RuntimeError("\n      ".join(dict.fromkeys([why, *marked[:6], *lines[-4:]])))
        return text

    def test(self, name, *args, before=()):
        """Runs the test program of engine/backend/cuda."""
        return self.run(name, [*before, self.args.bin / "cuda.test", *args], cwd=ROOT / "engine" / "backend" / "cuda")

    def python(self, script, *args, **env):
        """Runs a script that needs PyTorch and transformers."""
        for module in "torch", "transformers":
            if not importlib.util.find_spec(module):
                raise Absent(f"Python has no {module}")
        return self.run(script, [sys.executable, ROOT / "cuda" / script, *args], **env)

    def tool(self, name):
        if not (path := shutil.which(name)):
            raise Absent(f"{name} is not installed")
        return path

    def start_checkpoints(self, pool):
        """Starts to write all checkpoints that the parts need, each by a process."""
        shapes = ["llama-1b"] if {"parity", "torch", "more"} & set(self.args.only) else []
        shapes += [row[1] for part in PARTS if part in self.args.only for row in ROWS.get(part, KERNELS if part == "kernels" else [])]
        room = shutil.disk_usage(self.folder).free / 1e9
        for shape in dict.fromkeys(shapes):
            room -= 0 if self.tiny else SHAPES[shape][0]
            self.made[shape] = pool.submit(self.checkpoint, shape, room)

    def checkpoint(self, shape, room):
        if room < 0:
            raise RuntimeError(f"{shape} needs {-room:.0f} GB more than {self.folder} has")
        self.run(shape, [sys.executable, ROOT / "cuda" / "random_model.py", self.tiny + shape, self.folder / shape])
        shutil.copy(ROOT / "engine" / "builtin" / "model" / "tokenizer.json", self.folder / shape)
        return self.folder / shape

    def model(self, shape):
        return self.made[shape].result()

    def probe(self):
        """Lists what is there, and returns whether the kernels run at all."""
        self.write(f"\n## {time.strftime('%Y-%m-%d')} {self.began}: {' '.join(sys.argv)}\n")
        self.write(f"- {os.uname().sysname} {os.uname().release}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}")

        def commit(folder):
            found, file = json.loads(self.run("version", [folder / "tandem", "version", "--json"]))["commit"], folder / "commit"
            return file.read_text().strip() if found == "unknown" and file.exists() else found

        def gpu():
            query = "--query-gpu=name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.memory,power.limit,mig.mode.current"
            text = self.run("gpu", [self.tool("nvidia-smi"), query, "--format=csv,noheader"]).strip()
            self.predicted = predictions(text)
            return text

        def libraries():
            packages, name = pathlib.Path(sysconfig.get_paths()["purelib"]), "libcublasLt.so.1[23]"
            for path in [*packages.glob("*/lib/" + name), *packages.glob("nvidia/*/lib/" + name), *pathlib.Path("/usr/local").glob("cuda*/lib64/" + name)][:1]:
                self.blas = os.environ["TANDEM_CUDA_BLAS"] = str(path)
            there = [t for t in ("compute-sanitizer", "ncu") if shutil.which(t)] + [m for m in ("torch", "transformers") if importlib.util.find_spec(m)]
            return ", ".join([f"cuBLASLt {self.blas}", *there])

        self.measure("commit", 0, lambda: commit(self.args.bin))
        if self.args.other:
            self.measure("other", 0, lambda: f"{commit(self.args.other)} in {self.args.other}")
        self.measure("GPU", 0, gpu)
        if not self.tiny:
            self.measure("properties", 0, lambda: self.run("properties", [sys.executable, "-c", PROPERTIES]).strip())
        self.measure("libraries", 0, libraries)
        for library in ["the host twin"] if self.tiny else ["tandem-cuda.so", "tandem-cuda-nvcc.so"]:
            self.library = library
            if not self.tiny:
                os.environ["TANDEM_CUDA_LIBRARY"] = str(self.args.bin / library)
            if self.measure("kernels", 0, lambda: self.test("kernels", "-test.run", "^TestKernels$/^norms$") and f"those of {library} run"):
                return True
        return False

    def tests(self):
        names = re.findall(r"^Test\w+$", self.test("list", "-test.list", "^(" + "|".join(TESTS) + ")"), re.M)
        if unknown := [t for t in TESTS if not any(n.startswith(t) for n in names)]:
            raise RuntimeError("no test is named " + ", ".join(unknown))

        names.sort(key=lambda n: [not n.startswith(t) for t in TESTS])  # the longest ones are first in TESTS
        short = ["-test.short"] if self.tiny else []

        def one(name):
            notes = re.findall(r"^ *--- SKIP.*|.*(?:off by|worst|note:).*", self.test(name, "-test.v", *short, "-test.run", f"^{name}$"), re.M)
            return "\n      ".join(["passed", *(n.strip()[:200] for n in notes[:8])])

        self.at_once(min(8, os.cpu_count()), [(n, 15, functools.partial(one, n)) for n in names])

    def sanitizers(self):
        def one(tool):
            text = self.test(tool, "-test.run", "^TestKernels$", before=[self.tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "9"])
            if not (found := re.search(r"\w+ SUMMARY: .*", text)):
                raise RuntimeError("it printed no summary, so that it has checked nothing")
            return found[0]

        self.at_once(len(SANITIZERS), [(tool, 20, functools.partial(one, tool)) for tool in SANITIZERS])

    def parity(self):
        def table():
            text = self.python("parity.py", self.model("llama-1b"), *["--rehearse"] * self.args.rehearse, TANDEM_BIN=str(self.args.bin / "tandem"))
            return "limits by transformers in bfloat16:\n\n" + "".join(line + "\n" for line in text.splitlines() if line[:1] == "|")

        self.measure("parity", 40, table)

    def bench(self, folder, model, *flags):
        """Returns the command that measures the seconds of a batch, from its prompts to the last token."""
        return [folder / "tandem", "bench", "latency", "--model", model, "--device", self.device, "--cublaslt", self.blas,
                "--disable-detokenize", "--max-num-batched-tokens", BATCHED, *flags]

    def speed_of(self, folder, model, batch, inputs, outputs, flags):
        """Returns tokens a second and seconds a step: of a prompt if there is one output, else of a
        full batch that decodes.

        The time to decode is the difference of two lengths. While prompts are computed, BATCHED
        tokens a step, the first sequences decode already. The shorter length exceeds these steps,
        so that both lengths have the same ones.
        """

        def seconds(n):
            command = self.bench(folder, model, "--batch-size", batch, "--max-num-seqs", max(batch, 4), "--input-len", inputs, "--output-len", n,
                                 "--num-iters", 1 if batch > 1 else 2, "--num-iters-warmup", 1, *flags)
            env = {} if self.tiny else {"TANDEM_CUDA_LIBRARY": str(folder / self.library)}
            text = self.run(f"{model.name} {batch} {inputs} {n} {' '.join(flags)}", command, **env)
            return float(re.search(r"^Avg latency: (\S+) seconds", text, re.M)[1])

        if outputs == 1:
            one = seconds(1)
            return inputs / one, one
        short = max(outputs // 4, batch * inputs // BATCHED + 1)
        one, both = seconds(short), seconds(short + outputs)
        if both <= one:
            text = f"{short + outputs} tokens took {both:.4f} s, {short} took {one:.4f}: the machine is not quiet"
            raise (Absent if self.tiny else RuntimeError)(text)
        return batch * outputs / (both - one), (both - one) / outputs

    def rows(self, part):
        """Writes a table of speeds, of both builds in turns if there is another one."""
        concurrent.futures.wait(self.made.values())  # so that nothing else computes
        builds = [self.args.bin, self.args.other, self.args.bin] if self.args.other else [self.args.bin]
        head = ["row", "measured", "a step", "predicted", "of that"] + ["other", "again", "this / other"] * (len(builds) > 1)
        self.write(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")

        def cells(name, shape, batch, inputs, outputs, *flags):
            if self.tiny:
                batch, inputs, outputs = min(batch, 2), min(inputs, 48), min(outputs, 256)
            (speed, seconds), *more = [self.speed_of(b, self.model(shape), batch, inputs, outputs, flags) for b in builds]
            aim = self.predicted.get(row_key(name))
            cells = [f"{speed:,.0f} tok/s", f"{seconds * 1e3:.3f} ms", f"{aim:,.0f} tok/s" if aim else "", f"{speed / aim:.0%}" if aim else ""]
            if more:
                other, again = (m[0] for m in more)
                cells += [f"{other:,.0f} tok/s", f"{again:,.0f} tok/s", f"{(speed + again) / 2 / other:.3f}"]
            return " | ".join(cells)

        for row in ROWS[part]:
            need = SHAPES[row[1]][1] * len(builds) * (1 if row[4] == 1 else 2)
            self.measure(row[0], need, functools.partial(cells, *row), "| {} | {} |")
        self.write("")

    def benchmark(self, name, unit):
        def figure():
            text = self.test(name, "-test.run", "^$", "-test.bench", f"^{name}$", "-test.benchtime", "100ms" if self.tiny else "1s")
            return re.search(r"[-\d.e+]+ " + unit, text)[0]

        self.measure(name, 15, figure)

    def attention(self):
        self.benchmark("BenchmarkDecodeAttention", "GB/s")

    def push(self):
        self.benchmark("BenchmarkPush", "exposed-%")

    def kernels(self):
        def table(name, shape, skip, count, inputs, outputs):
            to = self.out / (re.sub(r"\W+", "-", name) + ".csv")
            ncu = [self.tool("ncu"), "--clock-control", "none", "--target-processes", "all", "--csv", "--page", "raw", "--log-file", to,
                   "--launch-skip", skip, "--launch-count", count, "--metrics", "gpu__time_duration.sum,dram__bytes_read.sum"]
            self.run(name, ncu + self.bench(self.args.bin, self.model(shape), "--enforce-eager", "--batch-size", 1, "--max-num-seqs", 4,
                                            "--num-iters", 1, "--num-iters-warmup", 0, "--input-len", inputs, "--output-len", outputs))
            return "the longest time first:\n\n" + kernel_table(to)

        for row in KERNELS:
            self.measure(row[0], 30, functools.partial(table, *row))

    def torch(self):
        self.measure("Llama 1B, one row, transformers without graphs", 40, lambda: self.python(
            "torch_decode.py", self.model("llama-1b") / "config.json", self.device.split(":")[0]).strip().splitlines()[-1])

    def more(self):
        def load():
            inputs, outputs, n = (16, 8, 8) if self.tiny else (128, 128, 96)
            with serving(self.args.bin / "tandem", self.device, self.model("llama-1b")) as port:
                self.run("load", [self.args.bin / "tandem", "bench", "serve", "--port", port, "--ready-check-timeout-sec", 60, "--skip-tokenizer-init",
                                  "--dataset-name", "random", "--random-input-len", inputs, "--random-output-len", outputs, "--ignore-eos",
                                  "--num-prompts", n, "--num-warmups", 8, "--max-concurrency", 2,
                                  "--save-result", "--result-dir", self.folder, "--result-filename", "load.json"])
            r = json.loads((self.folder / "load.json").read_text())
            return f"{r['output_throughput']:,.0f} tok/s, TTFT {r['mean_ttft_ms']:.1f} ms, ITL {r['mean_itl_ms']:.2f} ms"

        self.measure("Llama 1B, 2 requests at once over the API", 20, load)

    def all(self):
        """Runs the parts and returns the exit status."""
        if not self.probe():
            return 1
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            self.start_checkpoints(pool)
            for part in (p for p in PARTS if p in self.args.only):
                if self.ended:
                    return 1
                try:
                    if part in ROWS:
                        self.rows(part)
                    getattr(self, part, lambda: None)()
                except Exception as e:  # noqa: BLE001
                    self.failed = True
                    self.write(f"- **{part}**: failed: {e}")
        self.write(f"- end after {time.monotonic() - BEGAN:.0f} s, status {int(self.failed)}")
        return int(self.failed)

    def stop(self, *_):
        """Kills all processes, so that all() returns."""
        with self.lock:
            self.ended = True
            for p in list(self.running):
                end(p, signal.SIGKILL)


def end(process, number):
    """Sends a signal to a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=540, help="seconds in all; default: 540")
    parser.add_argument("--each", type=float, help="seconds of a process; default: 90, of --rehearse 300, as it may build the host twin")
    parser.add_argument("--only", type=lambda s: s.split(","), default=PARTS[:-1], help="parts, separated by commas; default: all but large")
    parser.add_argument("--bin", type=lambda s: pathlib.Path(s).resolve(), default=ROOT / "bin", help="folder of the build; default: bin")
    parser.add_argument("--other", type=lambda s: pathlib.Path(s).resolve(), help="folder of another build, to compare speeds with; of --rehearse the same")
    parser.add_argument("--rehearse", action="store_true", help="try all parts on the CPU, with tiny models")
    args = parser.parse_args()
    args.other = args.other or (args.bin if args.rehearse else None)
    if unknown := set(args.only) - set(PARTS):
        parser.error("no part is named " + ", ".join(sorted(unknown)))
    for f in [args.bin / "tandem", args.bin / "cuda.test"] + ([args.other / "tandem"] if args.other else []):
        if not f.exists():
            sys.exit(f"gpu_hour: {f} is missing: run make gpu-tests where there is a network, and carry bin/ here")
    with tempfile.TemporaryDirectory(prefix="gpu-hour.", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        runner = Runner(args, folder)
        signal.signal(signal.SIGTERM, runner.stop)
        signal.signal(signal.SIGINT, runner.stop)
        # Python handles signals in the main thread, which a wait without a timeout may miss.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            status = pool.submit(runner.all)
            while not status.done():
                time.sleep(0.1)
        if runner.ended:
            sys.exit("gpu_hour: ended by a signal")
        return status.result()


if __name__ == "__main__":
    sys.exit(main())
