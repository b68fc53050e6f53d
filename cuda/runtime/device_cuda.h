// Memory, streams and graphs of a GPU. The statically linked runtime opens libcuda when
// its first function is called.
#pragma once
#include <cudaTypedefs.h>

#include <cstring>

#include "device.h"

#ifdef TD_HOST
#include <map>
#include <mutex>
#endif

namespace device {

#ifdef TD_HOST
// Loaded are the kernels of td_images for one capability, by mangled name.
struct Loaded {
  std::vector<cudaLibrary_t> libraries;
  std::map<std::string, cudaKernel_t> kernels;
  bool ptx = false;  // the driver has compiled them
};
inline std::mutex loading;
inline std::map<int, Loaded> loaded;  // by capability, while loading is locked

inline bool load_images(Stream &s, Loaded &to) {
  Loaded made;
  std::vector<const Image *> chosen = best(td_images, s.capability);
  if (chosen.empty()) s.fail(no_code(td_images, s.capability), false);
  for (const Image *i : chosen) {
    cudaLibrary_t library = nullptr;
    if (!s.ok(cudaLibraryLoadData(&library, i->code, nullptr, nullptr, 0, nullptr, nullptr, 0), "loading kernels")) break;
    made.libraries.push_back(library);
    made.ptx |= i->ptx;
    for (const char *name = i->kernels; *name; name += strlen(name) + 1)
      if (!s.ok(cudaLibraryGetKernel(&made.kernels[name], library, name), name)) break;
  }
  if (s.ready()) {
    to = std::move(made);
    return true;
  }
  for (cudaLibrary_t l : made.libraries) (void)cudaLibraryUnload(l);
  return false;
}

// load loads all kernels on the stream's device. Otherwise the driver would load each at its first
// launch, which delays a step and may fail a recording. load returns whether the device runs the
// kernels, and sets ptx if the driver has compiled them.
inline bool load(Stream &s, bool &ptx) {
  std::lock_guard<std::mutex> lock(loading);
  Loaded &all = loaded[s.capability];
  if (all.libraries.empty() && !load_images(s, all)) return false;
  ptx = all.ptx;
  for (auto &[name, kernel] : all.kernels) {
    cudaFuncAttributes attributes;
    if (!s.ok(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel)), name.c_str())) return false;
  }
  return true;
}

const void *find(Stream &s, const char *type, const char *name) {
  static std::map<std::pair<int, const char *>, cudaKernel_t> known;  // by capability and type
  std::lock_guard<std::mutex> lock(loading);
  cudaKernel_t &kernel = known[{s.capability, type}];
  if (!kernel) {
    constexpr size_t kBefore = sizeof("5NamedIXadL") - 1, kAfter = sizeof("EEE") - 1;
    auto &all = loaded[s.capability].kernels;
    if (auto at = all.find(std::string(type + kBefore, strlen(type) - kBefore - kAfter)); at != all.end()) kernel = at->second;
    else s.fail(std::string(name) + ": not among the kernels of the object", false);
  }
  return reinterpret_cast<const void *>(kernel);
}
#else
// load returns whether the device runs the kernels, whose oldest code is of capability 8.0.
inline bool load(Stream &s, bool &) {
  constexpr Image oldest[] = {{"", "", 0, 80, 0, 0}, {}};
  if (s.capability < oldest->capability) s.fail(no_code(oldest, s.capability) + " and later", false);
  return s.ready();
}
#endif

inline int count(std::string &error) {
  int n = 0;
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e == cudaSuccess) return n;
  error = cudaGetErrorString(e);
  if (e == cudaErrorInsufficientDriver)
    error += std::string(": CUDA ") + std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) + " needs driver " + (CUDART_VERSION < 13000 ? "R525" : "R580") + " or newer";
  return -1;
}

// open creates a stream. The work of one ahead of others starts first where both could.
inline bool open(Stream &s, int ordinal, bool ahead) {
  int major = 0, minor = 0;
  if (!s.ok(cudaSetDevice(ordinal), "cudaSetDevice") || !s.ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "cudaDeviceGetAttribute") ||
      !s.ok(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "cudaDeviceGetAttribute"))
    return false;
  s.capability = major * 10 + minor;
  int least = 0, greatest = 0;
  if (!s.ok(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange")) return false;
  return s.ok(cudaStreamCreateWithPriority(&s.stream, cudaStreamNonBlocking, ahead ? greatest : least), "cudaStreamCreateWithPriority");
}
// use starts every call, because the current device is a property of the calling thread.
inline bool use(Stream &s, int ordinal) { return s.ok(cudaSetDevice(ordinal), "cudaSetDevice"); }
inline void close(Stream &s) {
  if (s.stream) cudaStreamDestroy(s.stream);
}

inline void *alloc(Stream &s, int64_t n) {
  void *p = nullptr;
  return s.may(cudaMalloc(&p, size_t(n)), "cudaMalloc") ? p : nullptr;
}
inline void release(void *p) { cudaFree(p); }

// Pinned memory has the same address on the device.
inline void *pinned(Stream &s, int64_t n) {
  void *p = nullptr;
  if (!s.may(cudaHostAlloc(&p, size_t(n), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc")) return nullptr;
  memset(p, 0, size_t(n));
  return p;
}
inline void unpin(void *p) { cudaFreeHost(p); }

// enroll registers existing host memory with the device, until unregister.
inline bool enroll(Stream &s, void *p, int64_t n) { return s.may(cudaHostRegister(p, size_t(n), cudaHostRegisterPortable), "cudaHostRegister"); }
inline void unregister(void *p) { cudaHostUnregister(p); }

// direct makes synchronous operations on memory of alloc wait until the memory has changed, which
// GPUDirect RDMA requires. It sets flushes if writes of the network need flush before the device
// reads them. It returns false, and changes nothing, if the driver lacks what is needed.
inline bool direct(Stream &s, int ordinal, void *p, bool &flushes) {
  int ordering = 0, options = 0;
  if (!s.may(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, ordinal), "cudaDevAttrGPUDirectRDMAWritesOrdering") ||
      !s.may(cudaDeviceGetAttribute(&options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, ordinal), "cudaDevAttrGPUDirectRDMAFlushWritesOptions"))
    return false;
  bool ordered = ordering >= cudaGPUDirectRDMAWritesOrderingOwner;
  if (!ordered && !(options & cudaFlushGPUDirectRDMAWritesOptionHost)) {
    s.refused = "the device neither orders writes of the network nor flushes them";
    return false;
  }
  // The runtime has no function for the attribute, and the object does not link the driver.
  void *set = nullptr;
  if (!s.may(cudaGetDriverEntryPointByVersion("cuPointerSetAttribute", &set, 12000, cudaEnableDefault, nullptr), "cudaGetDriverEntryPointByVersion")) return false;
  if (!set) {
    s.refused = "the driver has no cuPointerSetAttribute";
    return false;
  }
  const unsigned on = 1;
  CUresult e = reinterpret_cast<PFN_cuPointerSetAttribute_v6000>(set)(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, reinterpret_cast<CUdeviceptr>(p));
  if (!s.may(cudaError_t(e), "cuPointerSetAttribute(SYNC_MEMOPS)")) return false;  // the runtime's errors have the driver's numbers
  flushes = !ordered;
  return true;
}
// flush waits until the network's writes are visible to the device.
inline bool flush(Stream &s) {
  return s.may(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice, cudaFlushGPUDirectRDMAWritesToOwner), "cudaDeviceFlushGPUDirectRDMAWrites");
}

inline void upload(Stream &s, void *dst, const void *src, int64_t n) {
  s.after_kernel = false;
  if (s.ready()) s.ok(cudaMemcpyAsync(dst, src, size_t(n), cudaMemcpyHostToDevice, s.stream), "copy to the device");
}
inline void download(Stream &s, void *dst, const void *src, int64_t n) {
  s.after_kernel = false;
  if (s.ready()) s.ok(cudaMemcpyAsync(dst, src, size_t(n), cudaMemcpyDeviceToHost, s.stream), "copy from the device");
}
// outside lets f enqueue work on the stream, and returns its error.
template <class F>
void outside(Stream &s, F f) {
  s.after_kernel = false;
  std::string bad = s.ready() ? f(static_cast<void *>(s.stream)) : "";
  if (!bad.empty()) s.fail(bad, false);
}
inline void wait(Stream &s) { s.ok(cudaStreamSynchronize(s.stream), "waiting for the device"); }
inline int poll(Stream &s) {
  if (!s.error.empty()) return -1;
  cudaError_t e = cudaStreamQuery(s.stream);
  if (e == cudaErrorNotReady) {
    (void)cudaGetLastError();  // the next launch would take it for its own
    return 0;
  }
  return s.ok(e, "the device") ? 1 : -1;
}

// can_overlap reports whether kernels of graphs can start before the previous kernel has ended.
inline bool can_overlap(Stream &s) {
  int driver = 0;
  return s.capability >= 90 && cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
}

// record returns the graph of what body starts, or null. Its errors change nothing else.
inline Graph record(Stream &s, const std::function<void()> &body) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  if (!s.may(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal), "recording a graph")) return nullptr;
  s.recording = true;
  s.after_kernel = false;
  body();
  s.ok(cudaStreamEndCapture(s.stream, &graph), "recording a graph");
  // The upload takes the memory that the first start would take.
  if (s.ready() && s.ok(cudaGraphInstantiate(&exec, graph, 0), "making a graph") && !s.ok(cudaGraphUpload(exec, s.stream), "copying a graph")) {
    cudaGraphExecDestroy(exec);
    exec = nullptr;
  }
  s.recording = s.after_kernel = false;
  if (graph) cudaGraphDestroy(graph);
  return exec;
}
inline void replay(Stream &s, Graph g) {
  if (s.ready()) s.ok(cudaGraphLaunch(g, s.stream), "starting a graph");
}
inline void forget(Graph g) {
  if (g) cudaGraphExecDestroy(g);
}

inline void describe(Stream &s, int ordinal, td_info *info) {
  cudaDeviceProp prop;
  size_t free = 0, total = 0;
  if (!s.ok(cudaGetDeviceProperties(&prop, ordinal), "cudaGetDeviceProperties") || !s.ok(cudaMemGetInfo(&free, &total), "cudaMemGetInfo")) return;
  info->total = int64_t(total);
  info->free = int64_t(free);
  info->capability = prop.major * 10 + prop.minor;
  info->processors = prop.multiProcessorCount;
  snprintf(info->name, sizeof info->name, "%.127s", prop.name);
}

// Event is a position in the stream's work that the host can wait for.
struct Event {
  cudaEvent_t event = nullptr;

  void mark(Stream &s) {
    s.after_kernel = false;
    if (event || s.ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate")) s.ok(cudaEventRecord(event, s.stream), "cudaEventRecord");
  }
  void wait(Stream &s) {
    if (event) s.ok(cudaEventSynchronize(event), "cudaEventSynchronize");
  }
  // follow makes the stream's later work wait for the last mark.
  void follow(Stream &s) {
    s.after_kernel = false;
    if (event) s.ok(cudaStreamWaitEvent(s.stream, event, 0), "cudaStreamWaitEvent");
  }
  void close() {
    if (event) cudaEventDestroy(event);
  }
};

}  // namespace device
