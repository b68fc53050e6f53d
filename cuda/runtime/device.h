// The little that differs between a GPU and its twin below api.h: memory, a
// stream, launches, graphs.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#ifdef TD_TWIN
#include <cstdlib>
#include <cstring>

#include "../simt/simt.h"

struct Stream {
  bool recording = false;
  std::vector<std::function<void()>> recorded;
  std::string error;

  void run(std::function<void()> f) {
    if (recording) recorded.push_back(std::move(f));
    else if (error.empty()) f();
  }
};
using Graph = std::vector<std::function<void()>> *;

template <class... P, class... A>
void launch(Stream &s, int x, int y, int z, int threads, size_t shared, void (*kernel)(P...), const char *name, A... args) {
  if (x < 1 || y < 1 || z < 1) return;
  Stream *to = &s;
  s.run([=] {
    std::string bad = simt::launch({unsigned(x), unsigned(y), unsigned(z)}, threads, shared, [&] { kernel(args...); });
    if (!bad.empty()) to->error = std::string(name) + ": " + bad;
  });
}
#else
#include <cuda_runtime.h>

struct Stream {
  cudaStream_t stream = nullptr;
  std::string error;

  bool ok(cudaError_t e, const char *what) {
    if (e != cudaSuccess && error.empty()) error = std::string(what) + ": " + cudaGetErrorString(e);
    return e == cudaSuccess;
  }
};
using Graph = cudaGraphExec_t;

template <class... P, class... A>
void launch(Stream &s, int x, int y, int z, int threads, size_t shared, void (*kernel)(P...), const char *name, A... args) {
  if (x < 1 || y < 1 || z < 1) return;
  if (shared > 48 << 10 && !s.ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)), name)) return;
  kernel<<<dim3(x, y, z), threads, shared, s.stream>>>(args...);
  s.ok(cudaGetLastError(), name);
}
#endif

#define TD_LAUNCH(stream, x, y, z, threads, shared, kernel, ...) launch(stream, x, y, z, threads, shared, kernel, #kernel, __VA_ARGS__)
