"""What the scripts for NIXL and Mooncake share: two processes with the same scattered pages as `tandem bench transfer` moves, timed at the
writer, compared and overwritten at the reader after every round. One JSON object on standard output."""

import json
import multiprocessing
import os
import resource
import sys
import time

import numpy as np

POISON = 0xA5


def cpu():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


class Memory:
    """n pages of page_bytes; the writer's hold a pattern."""

    def __init__(self, n, page_bytes, fill):
        self.n, self.page_bytes = n, page_bytes
        self.pages = np.zeros((n, page_bytes // 8), dtype=np.uint64)
        self.pages[:] = POISON
        if fill:
            self.pages[:] = pattern(np.arange(n), page_bytes)

    def address(self, page=0):
        return self.pages.ctypes.data + int(page) * self.page_bytes

    def bytes(self):
        return self.n * self.page_bytes


def pattern(pages, page_bytes):
    words = page_bytes // 8
    at = pages.astype(np.uint64)[:, None] * np.uint64(words) + np.arange(words, dtype=np.uint64)[None, :]
    return at * np.uint64(0x9E3779B97F4A7C15)


def order(n, seed):
    rng = np.random.default_rng(seed)
    return rng.permutation(n), rng.permutation(n)


def reader(pipe, make, n, page_bytes):
    memory = Memory(n, page_bytes, fill=False)
    side = make(memory, pipe, writer=False)
    pipe.send("ready")
    while True:
        side.wait(pipe)
        what = pipe.recv()
        if what is None:
            side.close()
            pipe.send("closed")
            os._exit(0)  # as below
        kind, seed, count = what
        if kind == "cpu":
            pipe.send(cpu())
            continue
        src, dst = order(n, seed)
        ok = True
        for at in range(0, count, 1024):
            to = min(at + 1024, count)
            ok = ok and bool((memory.pages[dst[at:to]] == pattern(src[at:to], page_bytes)).all())
        memory.pages[dst[:count]] = POISON
        pipe.send(ok)


def writer(pipe, make, n, page_bytes, rounds, small, smalls):
    memory = Memory(n, page_bytes, fill=True)
    side = make(memory, pipe, writer=True)
    if pipe.recv() != "ready":
        raise SystemExit("the reader did not start")

    def ask(*what):
        pipe.send(what)
        return pipe.recv()

    def run(count, times, first_seed):
        took, used = [], 0.0
        for r in range(-1, times):
            src, dst = order(n, first_seed + r)
            job = side.prepare(src[:count], dst[:count])
            before, theirs = cpu(), ask("cpu", 0, 0)
            start = time.perf_counter()
            side.move(job)
            seconds = time.perf_counter() - start
            if r >= 0:
                took.append(seconds)
                used += cpu() - before + ask("cpu", 0, 0) - theirs
            if not ask("compare", first_seed + r, count):
                raise SystemExit("wrong bytes arrived")
            side.done(job)
        took.sort()
        return took, used

    took, used = run(n, rounds, 10)
    gb = n * page_bytes / 1e9
    out = {"gb_per_second": gb / took[len(took) // 2], "cpu_seconds_per_gb": used / gb / rounds}
    if smalls:
        took, _ = run(small, smalls, 1000)
        out["small_p50_ms"], out["small_p90_ms"] = 1e3 * took[smalls // 2], 1e3 * took[smalls * 9 // 10]
    pipe.send(None)
    pipe.recv()
    side.close()
    return out


def main(make):
    n, page_bytes, rounds, small, smalls = (int(a) for a in sys.argv[1:6])
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    other = spawn.Process(target=reader, args=(there, make, n, page_bytes))
    other.start()
    out = writer(here, make, n, page_bytes, rounds, small, smalls)
    other.join(10)
    print("RESULT " + json.dumps(out), flush=True)
    os._exit(0)  # libraries that are unloaded while their threads run do not always survive it
