// The differences between a GPU and its twin below api.h: memory, streams, launches,
// graphs.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "images.h"

#ifdef TD_TWIN
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "../simt/simt.h"

namespace device {
// late, unless 0, is a seed that delays a stream's work: the stream executes work some
// time after it was enqueued, when it is queried. It is TANDEM_TWIN_LATE of the
// environment when a device is opened.
inline uint64_t late = 0;
}  // namespace device

struct Stream {
  // Place is a position in a stream's work, which another stream may wait for.
  struct Place {
    Stream *of;
    bool reached;
  };
  struct Told {
    std::function<void()> what;
    std::shared_ptr<Place> after;  // the place to wait for before the work
    std::shared_ptr<Place> place;  // the place to set after the work, also on failure
  };
  bool recording = false;
  std::vector<std::function<void()>> recorded;
  std::deque<Told> told;
  std::string error;    // after which no work runs
  std::string refused;  // the last error of a call that changed nothing

  void run(std::function<void()> f) {
    if (recording) {
      recorded.push_back(std::move(f));
      return;
    }
    told.push_back({std::move(f), nullptr, nullptr});
    if (device::late == 0) drain();
  }
  void mark(std::shared_ptr<Place> p) {
    told.push_back({[] {}, nullptr, std::move(p)});
    if (device::late == 0) drain();
  }
  void follow(std::shared_ptr<Place> p) {
    told.push_back({[] {}, std::move(p), nullptr});
    if (device::late == 0) drain();
  }
  bool blocked() const { return !told.empty() && told.front().after && !told.front().after->reached; }
  // advance executes at most n pieces of work, and stops where it would have to wait.
  void advance(size_t n) {
    for (; n > 0 && !told.empty() && !blocked(); n--) {
      Told t = std::move(told.front());
      told.pop_front();
      if (error.empty()) t.what();
      if (t.place) t.place->reached = true;
    }
  }
  // one executes the next piece of work, or the next of the stream that it waits for.
  void one() {
    if (blocked()) told.front().after->of->one();
    else advance(1);
  }
  void drain() {
    while (!told.empty()) one();
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

// device_call calls a library function that takes a stream.
template <class F>
void device_call(Stream &s, F f) {
  s.run([=] { f(nullptr); });
}
#else
#include <cuda_runtime.h>

struct Stream {
  cudaStream_t stream = nullptr;
  int capability = 0;   // of the device, 90 for 9.0
  std::string error;    // after which no work runs
  std::string refused;  // the last error of a call that changed nothing

  bool ok(cudaError_t e, const char *what) {
    if (e != cudaSuccess && error.empty()) error = std::string(what) + ": " + cudaGetErrorString(e);
    return e == cudaSuccess;
  }
  // may is ok for a call whose failure changes nothing, as of memory: later work runs. It removes
  // the runtime's record of the error, which the next launch would take for its own.
  bool may(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return true;
    refused = std::string(what) + ": " + cudaGetErrorString(e);
    (void)cudaGetLastError();
    return false;
  }
};
using Graph = cudaGraphExec_t;

#ifdef TD_HOST
#include <typeinfo>

// Named has a kernel as its argument, so that its mangled name has the kernel's. The kernel's
// emulation is neither called nor compiled.
template <auto kKernel>
struct Named {};
#endif

namespace device {
#ifdef TD_HOST
extern "C" const Image td_images[];

// find returns a kernel that load has loaded for the stream's device, or null after an error. type
// is as in Kernel.
const void *find(Stream &s, const char *type, const char *name);

// Kernel is a kernel of td_images.
template <class... P>
struct Kernel {
  const char *type;  // the mangled name of Named<kernel>

  const void *of(Stream &s, const char *name) const { return find(s, type, name); }
};

template <auto kKernel, class... P>
Kernel<P...> named_as(void (*)(P...)) { return {typeid(Named<kKernel>).name()}; }
template <auto kKernel>
auto named() { return named_as<kKernel>(static_cast<decltype(kKernel)>(nullptr)); }
#else
// Kernel is a kernel that the compiler has linked.
template <class... P>
struct Kernel {
  void (*function)(P...);

  explicit Kernel(void (*f)(P...)) : function(f) {}
  const void *of(Stream &, const char *) const { return reinterpret_cast<const void *>(function); }
};
#endif
}  // namespace device

template <class F>
void device_call(Stream &s, F f) {
  f(s.stream);
}

template <class... P, class... A>
void launch(Stream &s, int x, int y, int z, int threads, size_t shared, device::Kernel<P...> kernel, const char *name, A... args) {
  if (x < 1 || y < 1 || z < 1) return;
  const void *f = kernel.of(s, name);
  if (!f || (shared > 48 << 10 && !s.ok(cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)), name))) return;
  [&](P... values) {
    void *to[] = {&values...};
    s.ok(cudaLaunchKernel(f, dim3(x, y, z), dim3(threads), to, shared, s.stream), name);
  }(args...);
}
#endif

namespace device {
// resident returns how many blocks of a kernel a multiprocessor runs at once.
#ifdef TD_TWIN
template <class K>
int resident(Stream &, K, const char *, int, size_t) { return 2; }
#else
template <class... P>
int resident(Stream &s, Kernel<P...> kernel, const char *name, int threads, size_t shared) {
  int n = 0;
  const void *f = kernel.of(s, name);
  if (f && shared > 48 << 10) (void)cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  if (f && cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, f, threads, shared) != cudaSuccess) (void)cudaGetLastError();
  return n > 0 ? n : 1;
}
#endif
}  // namespace device

#ifdef TD_TWIN
#define TD_NAMED(kernel) kernel
#elif defined(TD_HOST)
#define TD_NAMED(kernel) device::named<kernel>()
#else
#define TD_NAMED(kernel) device::Kernel(kernel)
#endif
#define TD_LAUNCH(stream, x, y, z, threads, shared, kernel, ...) launch(stream, x, y, z, threads, shared, TD_NAMED(kernel), #kernel, __VA_ARGS__)
#define TD_RESIDENT(stream, kernel, threads, shared) device::resident(stream, TD_NAMED(kernel), #kernel, threads, shared)
