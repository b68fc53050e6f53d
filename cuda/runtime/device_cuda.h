// Memory, streams and graphs of a GPU. The statically linked runtime opens libcuda when
// its first function is called.
#pragma once
#include "device.h"

namespace device {

inline int count(std::string &error) {
  int n = 0;
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e == cudaSuccess) return n;
  error = cudaGetErrorString(e);
  return -1;
}

inline bool open(Stream &s, int ordinal) {
  return s.ok(cudaSetDevice(ordinal), "cudaSetDevice") && s.ok(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking), "cudaStreamCreate");
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

inline void upload(Stream &s, void *dst, const void *src, int64_t n) {
  s.ok(cudaMemcpyAsync(dst, src, size_t(n), cudaMemcpyHostToDevice, s.stream), "copy to the device");
}
inline void download(Stream &s, void *dst, const void *src, int64_t n) {
  s.ok(cudaMemcpyAsync(dst, src, size_t(n), cudaMemcpyDeviceToHost, s.stream), "copy from the device");
}
// outside lets f enqueue work on the stream, and returns its error.
template <class F>
void outside(Stream &s, F f) {
  std::string bad = f(static_cast<void *>(s.stream));
  if (!bad.empty() && s.error.empty()) s.error = bad;
}
inline void wait(Stream &s) { s.ok(cudaStreamSynchronize(s.stream), "waiting for the device"); }
inline int poll(Stream &s) {
  cudaError_t e = cudaStreamQuery(s.stream);
  if (e == cudaErrorNotReady) {
    (void)cudaGetLastError();  // the next launch would take it for its own
    return 0;
  }
  return s.ok(e, "the device") ? 1 : -1;
}

inline Graph record(Stream &s, const std::function<void()> &body) {
  if (!s.ok(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal), "recording a graph")) return nullptr;
  body();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  if (!s.ok(cudaStreamEndCapture(s.stream, &graph), "recording a graph")) return nullptr;
  s.ok(cudaGraphInstantiate(&exec, graph, 0), "making a graph");
  cudaGraphDestroy(graph);
  return exec;
}
inline void replay(Stream &s, Graph g) { s.ok(cudaGraphLaunch(g, s.stream), "starting a graph"); }
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
  snprintf(info->name, sizeof info->name, "%s", prop.name);
}

// Event is a position in the stream's work that the host can wait for.
struct Event {
  cudaEvent_t event = nullptr;

  void mark(Stream &s) {
    if (event || s.ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate")) s.ok(cudaEventRecord(event, s.stream), "cudaEventRecord");
  }
  void wait(Stream &s) {
    if (event) s.ok(cudaEventSynchronize(event), "cudaEventSynchronize");
  }
  // follow makes the stream's later work wait for the last mark.
  void follow(Stream &s) {
    if (event) s.ok(cudaStreamWaitEvent(s.stream, event, 0), "cudaStreamWaitEvent");
  }
  void close() {
    if (event) cudaEventDestroy(event);
  }
};

}  // namespace device
