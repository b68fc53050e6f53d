// The host twin of a GPU. It runs kernels written with kernels/ptx.cuh on the CPU, with one
// fiber per thread of a block, one block after the other.
//
// Fibers run in an order drawn from a seed, or one warp runs ahead as far as it can. Each
// fiber runs until it waits: at a barrier, or at an operation of its warp until all lanes
// of the mask have arrived. Shared memory is initialized to NaN. An asynchronous copy
// completes at once or only when its thread waits for it, depending on the seed. So a
// missing barrier, a wait for too few copies or a wrong mask gives a wrong result or an
// error. An error ends the launch: lanes at different operations, a mask without its
// caller, threads that wait for others that have ended.
//
// It has no clock and no memory model: two threads never run at the same time, and each
// sees the other's writes. Blocks do not run concurrently, so none may wait for another.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace simt {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// The parameters of a run. Sites are positions in the source, "file:line".
struct Config {
  uint64_t seed = 1;
  bool deferred = true;  // copies complete as late as possible; otherwise at once
  std::string skip;      // the site of a barrier or wait to skip
};

struct Site {
  const char *file;
  int line;
};

void configure(const Config &c);
std::string sites();  // of barriers and waits executed since, one a line

// launch runs a grid and returns an error, or an empty string.
std::string launch(Dim grid, int threads, size_t shared, const std::function<void()> &kernel);

// For kernels: properties of the running thread.
int thread();
Dim block();
Dim blocks();
char *shared();
void barrier(Site at);
void copy_async(void *dst, const void *src, int bytes, int total);
void copy_commit();
void copy_wait(int newest, Site at);

// meet waits for every lane of the mask, each with n bytes at mine. Then body, called once,
// computes from them (lane i's at in + i*n) the result of each lane: m bytes at to (lane
// i's at out + i*m). kind distinguishes operations.
using Body = void (*)(unsigned mask, const char *in, char *out);
void meet(unsigned mask, int kind, const void *mine, int n, void *to, int m, Body body);
void warp_barrier(unsigned mask, Site at);
int lane();
[[noreturn]] void fail(const std::string &why);

}  // namespace simt
