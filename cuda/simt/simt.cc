#include "simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

namespace simt {
namespace {

constexpr size_t kStack = (96 << 10) + 17 * 64;  // not a multiple of 4096: tops are in all sets of a cache
constexpr int kBytes = 64;  // bound on a lane's input and output of meet

#if defined(__x86_64__)
struct Context {
  void *sp = nullptr;
};
extern "C" void simt_switch(void **save, void *to);
asm(R"(
.text
.p2align 4
.local simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
void jump(Context &from, Context &to) { simt_switch(&from.sp, to.sp); }
void prepare(Context &c, char *stack, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + kStack) & ~uintptr_t(15);
  auto **sp = reinterpret_cast<void **>(top);
  *--sp = nullptr;  // the return address of entry, and the alignment of a call
  *--sp = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  c.sp = sp;
}
#else
struct Context {
  ucontext_t u;
};
void jump(Context &from, Context &to) { swapcontext(&from.u, &to.u); }
void prepare(Context &c, char *stack, void (*entry)()) {
  getcontext(&c.u);
  c.u.uc_stack.ss_sp = stack;
  c.u.uc_stack.ss_size = kStack;
  c.u.uc_link = nullptr;
  makecontext(&c.u, entry, 0);
}
#endif

struct Copy {
  void *dst;
  const void *src;
  int bytes, total;
};

struct Fiber {
  Context context;
  int id = 0;
  const char *waits = nullptr;  // what the fiber waited for last, for error messages
  bool done = false;
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Copy> open;
};

// A meeting of a warp's lanes, identified by the lowest lane of its mask.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  int kind = 0, bytes = 0;
  alignas(16) char in[kWarp * kBytes];
  char *to[kWarp];
};

// Known is a site executed, and whether it is skipped.
struct Known {
  const char *file = nullptr;
  int line = 0;
  bool skip = false;
};
constexpr int kRecent = 64;

struct Machine {
  Config config;
  Known recent[kRecent];  // of known, by line
  std::map<std::pair<const char *, int>, bool> known;  // sites executed, and whether they are skipped
  std::set<std::string> sites;
  char *stacks = nullptr;
  Context scheduler;
  std::vector<Fiber> fibers{kMaxThreads};
  std::vector<Meeting> meetings{kMaxThreads};
  std::vector<unsigned> open = std::vector<unsigned>(kMaxThreads / kWarp);  // lanes in a meeting, by warp
  unsigned ready[kMaxThreads / kWarp];  // lanes that can run, by warp
  unsigned awake = 0;                   // warps with such lanes
  Fiber *now = nullptr;
  int threads = 0, arrived = 0, left = 0;  // left: fibers that have not ended
  int turn = 0;                            // see next
  bool hurry = false;
  const char *barrier_file = nullptr;
  int barrier_line = 0;
  Dim grid, block;
  char *shared = nullptr;
  const std::function<void()> *kernel = nullptr;
  std::string error;
  uint64_t random = 1;
};

Machine *const machine = new Machine;
inline Machine &m() { return *machine; }
std::mutex one;  // serializes launches

uint64_t draw() {
  uint64_t &s = m().random;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return s;
}

// some returns a bit that is set in mask, drawn at random; bits after gaps are more likely.
int some(unsigned mask) {
  int from = int(draw() >> 32 & 31);
  return (__builtin_ctz(mask >> from | mask << (-from & 31)) + from) & 31;
}

// last returns the last warp of awake in the order that starts with turn.
int last(unsigned awake, int turn, int warps) {
  int at = turn;
  do at = (at ? at : warps) - 1;
  while (!(awake >> at & 1));
  return at;
}

// next returns the context that runs next: a fiber's, or the scheduler's if none can run. In a
// hurry, one warp runs as far ahead of the others as barriers allow.
Context &next() {
  Machine &k = m();
  if (!k.awake) return k.scheduler;
  int warp = k.hurry ? last(k.awake, k.turn, k.threads / kWarp) : some(k.awake), lane = some(k.ready[warp]);
  if (!(k.ready[warp] &= ~(1u << lane))) k.awake &= ~(1u << warp);
  k.now = &k.fibers[warp * kWarp + lane];
  return k.now->context;
}

void entry() {
  (*m().kernel)();
  Fiber *f = m().now;
  f->done = true;
  m().left--;
  jump(f->context, next());
  abort();  // an ended fiber is never resumed
}

// wait runs other fibers until one of them makes this fiber ready.
void wait(const char *what) {
  Fiber *f = m().now;
  f->waits = what;
  jump(f->context, next());
}

// wake makes lanes of a warp ready.
void wake(int warp, unsigned lanes) {
  Machine &k = m();
  if (!lanes) return;
  k.ready[warp] |= lanes;
  k.awake |= 1u << warp;
}

std::string name(Site at) {
  const char *slash = strrchr(at.file, '/');
  return std::string(slash ? slash + 1 : at.file) + ":" + std::to_string(at.line);
}

// skipped records a site and reports whether this run skips it.
bool skipped(Site at) {
  Known &recent = m().recent[at.line % kRecent];
  if (recent.file == at.file && recent.line == at.line) return recent.skip;
  auto [seen, first] = m().known.try_emplace({at.file, at.line}, false);
  if (first) {
    m().sites.insert(name(at));
    seen->second = m().config.skip == name(at);
  }
  recent = {at.file, at.line, seen->second};
  return seen->second;
}

void land(std::vector<Copy> &group) {
  for (const Copy &c : group) {
    memcpy(c.dst, c.src, c.bytes);
    memset(static_cast<char *>(c.dst) + c.bytes, 0, c.total - c.bytes);
  }
}

std::string describe() {
  int barrier = 0, warp = 0, ended = 0;
  for (int i = 0; i < m().threads; i++) {
    const Fiber &f = m().fibers[i];
    if (f.done) ended++;
    else if (f.waits && !strcmp(f.waits, "barrier")) barrier++;
    else warp++;
  }
  return "deadlock in block " + std::to_string(m().block.x) + "," + std::to_string(m().block.y) + "," +
         std::to_string(m().block.z) + ": " + std::to_string(barrier) + " threads wait at a barrier (last " +
         name({m().barrier_file ? m().barrier_file : "none", m().barrier_line}) + "), " + std::to_string(warp) +
         " for lanes of their warp, " + std::to_string(ended) + " of " + std::to_string(m().threads) + " have ended";
}

void run_block() {
  Machine &k = m();
  k.arrived = 0;
  k.awake = 0;
  std::fill(k.ready, k.ready + kMaxThreads / kWarp, 0);
  std::fill(k.open.begin(), k.open.end(), 0);
  for (int i = 0; i < k.threads; i++) {
    Fiber &f = k.fibers[i];
    f.id = i;
    f.waits = nullptr;
    f.done = false;
    f.groups.clear();
    f.open.clear();
    k.meetings[i].mask = 0;
    prepare(f.context, k.stacks + size_t(i) * kStack, entry);
  }
  int warps = k.threads / kWarp;
  for (int w = 0; w < warps; w++) wake(w, ~0u);
  k.left = k.threads;
  k.turn = int(draw() % warps);
  k.hurry = draw() % 2;
  jump(k.scheduler, next());
  if (k.error.empty() && k.left > 0) k.error = describe();
}

}  // namespace

void configure(const Config &c) {
  m().config = c;
  m().known.clear();
  for (Known &k : m().recent) k = {};
  m().sites.clear();
}

std::string sites() {
  std::string all;
  for (const std::string &s : m().sites) all += s + "\n";
  return all;
}

std::string launch(Dim grid, int threads, size_t shared, const std::function<void()> &kernel) {
  std::lock_guard<std::mutex> hold(one);
  Machine &k = m();
  if (threads < 1 || threads > kMaxThreads || threads % kWarp != 0) return "a block of " + std::to_string(threads) + " threads";
  if (!k.stacks) {
    void *p = mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return "no memory for stacks";
    k.stacks = static_cast<char *>(p);
  }
  k.grid = grid;
  k.threads = threads;
  k.kernel = &kernel;
  k.error.clear();
  k.random = k.config.seed * 0x9E3779B97F4A7C15ull + 1;
  // Exactly the requested bytes, so that a sanitizer detects an access beyond them.
  std::unique_ptr<char, decltype(&free)> memory(static_cast<char *>(aligned_alloc(128, (shared + 127) / 128 * 128 + 128)), &free);
  k.shared = memory.get();
  uint64_t total = uint64_t(grid.x) * grid.y * grid.z;
  uint64_t first = total ? draw() % total : 0;
  for (uint64_t i = 0; i < total && k.error.empty(); i++) {
    uint64_t b = (i + first) % total;
    k.block = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
    memset(k.shared, 0xff, shared);
    run_block();
  }
  k.shared = nullptr;
  // Fibers that a fault stopped did not leave their functions, so that a sanitizer's marks
  // around their variables remain.
  if (!k.error.empty()) ASAN_UNPOISON_MEMORY_REGION(k.stacks, kStack * kMaxThreads);
  return k.error;
}

int thread() { return m().now->id; }
int lane() { return m().now->id % kWarp; }
Dim block() { return m().block; }
Dim blocks() { return m().grid; }
char *shared() { return m().shared; }

void fail(const std::string &why) {
  m().error = why + " (thread " + std::to_string(thread()) + ")";
  jump(m().now->context, m().scheduler);
  abort();
}

void barrier(Site at) {
  Machine &k = m();
  if (skipped(at)) return;
  if (k.arrived == 0) {
    k.barrier_file = at.file;
    k.barrier_line = at.line;
  } else if (k.barrier_line != at.line || strcmp(k.barrier_file, at.file)) {
    fail("threads of one block at different barriers: " + name({k.barrier_file, k.barrier_line}) + " and " + name(at));
  }
  if (++k.arrived < k.threads) return wait("barrier");
  k.arrived = 0;
  int self = k.now->id;
  for (int w = 0; w < k.threads / kWarp; w++) wake(w, w == self / kWarp ? ~(1u << self % kWarp) : ~0u);
}

void copy_async(void *dst, const void *src, int bytes, int total) {
  Copy c{dst, src, bytes, total};
  if (m().config.deferred) {
    m().now->open.push_back(c);
  } else {
    std::vector<Copy> one_copy{c};
    land(one_copy);
  }
}

void copy_commit() {
  Fiber *f = m().now;
  f->groups.push_back(std::move(f->open));
  f->open.clear();
}

void copy_wait(int newest, Site at) {
  if (skipped(at)) return;
  Fiber *f = m().now;
  while (int(f->groups.size()) > newest) {
    land(f->groups.front());
    f->groups.erase(f->groups.begin());
  }
}

void meet(unsigned mask, int kind, const void *mine, int n, void *to, int size, Body body) {
  Machine &k = m();
  int self = lane(), base = k.now->id - self;
  if (n > kBytes || size > kBytes) fail("a meeting of too many bytes");
  if (!(mask >> self & 1)) fail("a mask without its caller: " + std::to_string(mask));
  Meeting &at = k.meetings[base + __builtin_ctz(mask)];
  if (k.open[base / kWarp] & mask & ~at.mask) fail("lanes of one warp at operations with different masks, one of them " + std::to_string(mask));
  if (!at.mask) {
    at.mask = mask;
    at.arrived = 0;
    at.kind = kind;
    at.bytes = n;
    k.open[base / kWarp] |= mask;
  }
  if (at.mask != mask || at.kind != kind || at.bytes != n) fail("lanes of one warp at different operations or with different masks");
  memcpy(at.in + self * n, mine, n);
  at.to[self] = static_cast<char *>(to);
  at.arrived |= 1u << self;
  if (at.arrived != mask) return wait("warp");
  alignas(16) char out[kWarp * kBytes];
  if (body) body(mask, at.in, out);
  at.mask = 0;
  k.open[base / kWarp] &= ~mask;
  for (int l = 0; l < kWarp; l++)
    if (mask >> l & 1) memcpy(at.to[l], out + l * size, size);
  wake(base / kWarp, mask & ~(1u << self));
}

void warp_barrier(unsigned mask, Site at) {
  if (skipped(at)) return;
  char none = 0;
  meet(mask, -at.line, &none, 0, &none, 0, nullptr);
}

}  // namespace simt
