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
// A launch may overlap with the previous kernel. Then one of its blocks, drawn at random, runs
// until its threads wait for that kernel, before any block of that kernel runs. So a read or a
// write that comes too early changes results. A thread that ends without that wait is an error.
//
// It has no clock and no memory model: two threads never run at the same time, and each sees the
// other's writes. Blocks of a kernel do not run concurrently, so none may wait for another.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
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

struct Launch {
  Dim grid;
  int threads;    // of a block
  size_t shared;  // bytes of shared memory
  std::function<void()> kernel;
  bool overlaps = false;  // blocks may start before the previous kernel has ended
};

// Early is a started block of a launch.
struct Block;
using Early = std::shared_ptr<Block>;

// start runs a block of a launch until its threads wait for the previous kernel. bad is the
// error, if there is one.
Early start(const Launch &l, std::string &bad);
// launch runs a grid, of which early may have been started, and returns an error, or an empty
// string.
std::string launch(const Launch &l, Early early = nullptr);

// refuse makes some calls of that name fail, after others: as for lack of memory or, if fatal,
// for good.
void refuse(const std::string &call, bool fatal, int after, int calls);
enum class Refusal { kNone, kMemory, kFatal };
Refusal refused(const char *call);

// For kernels: properties of the running thread.
int thread();
Dim block();
Dim blocks();
char *shared();
void barrier(Site at);
void wait_previous(Site at);
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
