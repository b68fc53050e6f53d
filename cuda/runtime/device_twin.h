// Memory, streams and graphs of the host twin. Memory is initialized to NaN. A stream
// executes work at once or, with a seed, late: a part of it at each query.
#pragma once
#include "device.h"

namespace device {

constexpr int64_t kTwinMemory = int64_t(4) << 30;  // the memory that the twin reports

inline int count(std::string &) { return 1; }
inline bool open(Stream &, int, bool) {
  const char *seed = getenv("TANDEM_TWIN_LATE");
  late = seed ? strtoull(seed, nullptr, 10) : 0;
  return true;
}
// load chooses code for the capability of TANDEM_TWIN_CAPABILITY, as a GPU does, which tests set.
inline bool load(Stream &s, bool &ptx) {
  constexpr Image all[] = {{"", "", 0, 80, 0, 0}, {"", "", 0, 80, 0, 1}, {"", "", 0, 89, 0, 0}, {"", "", 0, 90, 1, 0}, {}};
  const char *text = getenv("TANDEM_TWIN_CAPABILITY");
  int capability = text ? atoi(text) : 80;
  std::vector<const Image *> chosen = best(all, capability);
  if (chosen.empty()) s.error = no_code(all, capability);
  else ptx = chosen[0]->ptx;
  return !chosen.empty();
}
inline bool use(Stream &, int) { return true; }
inline void close(Stream &) {}

inline void *alloc(Stream &s, int64_t n) {
  void *p = n < kTwinMemory ? aligned_alloc(256, size_t(n + 255) / 256 * 256) : nullptr;
  if (!p) s.refused = "cudaMalloc: out of memory";
  else if (n < 32 << 20) memset(p, 0xff, size_t(n));  // large blocks are not initialized
  return p;
}
inline void release(void *p) { free(p); }
inline void *pinned(Stream &, int64_t n) { return calloc(1, size_t(n)); }
inline void unpin(void *p) { free(p); }

inline bool enroll(Stream &, void *, int64_t) { return true; }
inline void unregister(void *) {}

// The network's writes are visible at once. Tests let direct and flush fail.
inline bool direct(Stream &s, int, void *, bool &flushes) {
  flushes = true;
  return s.allowed("direct");
}
inline bool flush(Stream &s) { return s.allowed("flush"); }

inline void upload(Stream &s, void *dst, const void *src, int64_t n) {
  if (s.ready() && s.allowed("copy")) s.run([=] { memcpy(dst, src, size_t(n)); });
}
inline void download(Stream &s, void *dst, const void *src, int64_t n) { upload(s, dst, src, n); }
// outside calls f in the stream's order, and returns its error.
template <class F>
void outside(Stream &s, F f) {
  Stream *to = &s;
  if (!s.ready()) return;
  s.run([=] {
    std::string bad = f(nullptr);
    if (!bad.empty() && to->error.empty()) to->error = bad;
  });
}
inline void wait(Stream &s) { s.drain(); }
inline int poll(Stream &s) {
  late = late * 6364136223846793005 + (late != 0);
  s.advance(1 + size_t(late >> 40) % (s.told.size() + 1));
  if (!s.error.empty()) return -1;
  return s.told.empty();
}

// can_overlap is false if TANDEM_TWIN_CAPABILITY is below 9.0.
inline bool can_overlap(Stream &) {
  const char *text = getenv("TANDEM_TWIN_CAPABILITY");
  return !text || atoi(text) >= 90;
}

inline Graph record(Stream &s, const std::function<void()> &body) {
  s.recording = true;
  s.after_kernel = false;
  body();
  s.recording = s.after_kernel = false;
  std::vector<Stream::Recorded> all;
  all.swap(s.recorded);
  return s.ready() && s.allowed("graph") ? new std::vector<Stream::Recorded>(std::move(all)) : nullptr;
}
inline void replay(Stream &s, Graph g) {
  for (size_t i = 0; i < g->size(); i++) {
    const Stream::Recorded *now = &(*g)[i], *next = i + 1 < g->size() ? now + 1 : nullptr;
    s.run([&s, now, next] { s.execute(*now, next); });
  }
}
inline void forget(Graph g) { delete g; }

inline void describe(Stream &, int, td_info *info) {
  info->total = info->free = kTwinMemory;
  info->capability = 80;
  info->processors = 8;
  info->twin = 1;
  snprintf(info->name, sizeof info->name, "host twin");
}

struct Event {
  std::shared_ptr<Stream::Place> place;

  void mark(Stream &s) {
    place = std::make_shared<Stream::Place>(Stream::Place{&s, false});
    s.mark(place);
  }
  void wait(Stream &s) { device::wait(s); }
  void follow(Stream &s) {
    if (place) s.follow(place);
  }
  void close() {}
};

}  // namespace device
