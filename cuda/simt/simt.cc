#include "simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
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
  bool waited = false;  // for the previous kernel
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

constexpr char kPrevious[] = "previous kernel";  // what a fiber waits for

}  // namespace

// Block is the state of a block's threads.
struct Block {
  char *stacks = nullptr;
  std::vector<Fiber> fibers{kMaxThreads};
  std::vector<Meeting> meetings{kMaxThreads};
  std::vector<unsigned> open = std::vector<unsigned>(kMaxThreads / kWarp);  // lanes in a meeting, by warp
  unsigned ready[kMaxThreads / kWarp];  // lanes that can run, by warp
  unsigned awake = 0;                   // warps with such lanes
  int threads = 0, arrived = 0, left = 0;  // left: fibers that have not ended
  int turn = 0;                            // see next
  bool hurry = false;
  const char *barrier_file = nullptr;
  int barrier_line = 0;
  Dim grid, place;
  uint64_t number = 0;    // of place
  bool overlaps = false;  // Launch::overlaps
  bool early = false;     // the previous kernel has not run
  std::unique_ptr<char, decltype(&free)> shared{nullptr, &free};
  std::function<void()> kernel;
};

namespace {

struct Machine {
  Config config;
  Known recent[kRecent];  // of known, by line
  std::map<std::pair<const char *, int>, bool> known;  // sites executed, and whether they are skipped
  std::set<std::string> sites;
  Context scheduler;
  Block own;          // the block that runs, unless it was started early
  Block *at = &own;   // the block that runs
  Fiber *now = nullptr;
  std::string error;
  uint64_t random = 1, starts = 0;
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

// next returns the context that runs next: a fiber's of the block, or the scheduler's if none can
// run. In a hurry, one warp runs as far ahead of the others as barriers allow.
Context &next() {
  Machine &k = m();
  Block &b = *k.at;
  if (!b.awake) return k.scheduler;
  int warp = b.hurry ? last(b.awake, b.turn, b.threads / kWarp) : some(b.awake), lane = some(b.ready[warp]);
  if (!(b.ready[warp] &= ~(1u << lane))) b.awake &= ~(1u << warp);
  k.now = &b.fibers[warp * kWarp + lane];
  return k.now->context;
}

// check_waited is not a part of entry, which is never left: a sanitizer's marks around its variables
// would remain.
[[gnu::noinline]] void check_waited() {
  if (m().at->overlaps && !m().now->waited) fail("a thread ended without a wait for the previous kernel");
}

void entry() {
  m().at->kernel();
  check_waited();
  Fiber *f = m().now;
  f->done = true;
  m().at->left--;
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
  Block &b = *m().at;
  if (!lanes) return;
  b.ready[warp] |= lanes;
  b.awake |= 1u << warp;
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

// copy is memcpy. Most copies have one of three sizes, which the compiler copies inline.
inline void copy(void *to, const void *from, int bytes) {
  switch (bytes) {
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    default: memcpy(to, from, bytes);
  }
}

void land(std::vector<Copy> &group) {
  for (const Copy &c : group) {
    copy(c.dst, c.src, c.bytes);
    memset(static_cast<char *>(c.dst) + c.bytes, 0, c.total - c.bytes);
  }
}

std::string describe() {
  int barrier = 0, warp = 0, ended = 0;
  const Block &b = *m().at;
  for (int i = 0; i < b.threads; i++) {
    const Fiber &f = b.fibers[i];
    if (f.done) ended++;
    else if (f.waits && !strcmp(f.waits, "barrier")) barrier++;
    else warp++;
  }
  return "deadlock in block " + std::to_string(b.place.x) + "," + std::to_string(b.place.y) + "," +
         std::to_string(b.place.z) + ": " + std::to_string(barrier) + " threads wait at a barrier (last " +
         name({b.barrier_file ? b.barrier_file : "none", b.barrier_line}) + "), " + std::to_string(warp) +
         " for lanes of their warp, " + std::to_string(ended) + " of " + std::to_string(b.threads) + " have ended";
}

// prepare gives a block the sizes and the kernel of a launch, and returns false without memory.
bool prepare(Block &b, const Launch &l) {
  if (!b.stacks) {
    void *p = mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    b.stacks = static_cast<char *>(p);
  }
  b.grid = l.grid;
  b.threads = l.threads;
  b.overlaps = l.overlaps;
  b.kernel = l.kernel;
  // Exactly the requested bytes, so that a sanitizer detects an access beyond them.
  b.shared.reset(static_cast<char *>(aligned_alloc(128, (l.shared + 127) / 128 * 128 + 128)));
  return b.shared != nullptr;
}

// begin makes the threads of block number ready to run.
void begin(Block &b, uint64_t number, size_t shared, bool early) {
  m().at = &b;
  b.number = number;
  b.place = {unsigned(number % b.grid.x), unsigned(number / b.grid.x % b.grid.y), unsigned(number / b.grid.x / b.grid.y)};
  b.early = early;
  b.arrived = 0;
  b.awake = 0;
  b.left = b.threads;
  memset(b.shared.get(), 0xff, shared);
  std::fill(b.ready, b.ready + kMaxThreads / kWarp, 0);
  std::fill(b.open.begin(), b.open.end(), 0);
  for (int i = 0; i < b.threads; i++) {
    Fiber &f = b.fibers[i];
    f.id = i;
    f.waits = nullptr;
    f.done = f.waited = false;
    f.groups.clear();
    f.open.clear();
    b.meetings[i].mask = 0;
    prepare(f.context, b.stacks + size_t(i) * kStack, entry);
  }
  for (int w = 0; w < b.threads / kWarp; w++) wake(w, ~0u);
}

// advance runs a block's threads until they have ended or, if the block is early, none can run.
void advance(Block &b) {
  Machine &k = m();
  k.at = &b;
  b.turn = int(draw() % (b.threads / kWarp));
  b.hurry = draw() % 2;
  if (b.awake) jump(k.scheduler, next());
  if (k.error.empty() && b.left > 0 && !b.early) k.error = describe();
}

// resume continues an early block after the previous kernel has run.
void resume(Block &b) {
  m().at = &b;
  b.early = false;
  for (int i = 0; i < b.threads; i++)
    if (b.fibers[i].waits == kPrevious) wake(i / kWarp, 1u << i % kWarp);
  advance(b);
}

// Fibers that a fault stopped did not leave their functions, so that a sanitizer's marks around
// their variables remain.
void unmark(Block &b) {
  if (b.stacks) ASAN_UNPOISON_MEMORY_REGION(b.stacks, kStack * kMaxThreads);
}

std::mutex pool;
std::vector<std::unique_ptr<Block>> *const unused = new std::vector<std::unique_ptr<Block>>;  // of early blocks

// take returns a block that goes back to unused.
Early take() {
  std::lock_guard<std::mutex> hold(pool);
  std::unique_ptr<Block> b;
  if (unused->empty()) {
    b = std::make_unique<Block>();
  } else {
    b = std::move(unused->back());
    unused->pop_back();
  }
  return Early(b.release(), [](Block *b) {
    if (b->left > 0) unmark(*b);
    std::lock_guard<std::mutex> hold(pool);
    unused->emplace_back(b);
  });
}

std::mutex refusing;
std::atomic<int> refusals{0};  // calls that are still to fail
int refusals_after = 0;        // calls until then
std::string refused_call;
bool refused_fatal = false;

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

static std::string invalid(const Launch &l) {
  bool ok = l.threads >= 1 && l.threads <= kMaxThreads && l.threads % kWarp == 0;
  return ok ? "" : "a block of " + std::to_string(l.threads) + " threads";
}

Early start(const Launch &l, std::string &bad) {
  std::lock_guard<std::mutex> hold(one);
  Machine &k = m();
  uint64_t total = uint64_t(l.grid.x) * l.grid.y * l.grid.z;
  if (!invalid(l).empty() || total == 0) return nullptr;  // launch reports it
  Early b = take();
  if (!prepare(*b, l)) return nullptr;
  k.error.clear();
  k.random = (k.config.seed + ++k.starts) * 0x9E3779B97F4A7C15ull + 1;
  draw();
  begin(*b, draw() % total, l.shared, true);
  advance(*b);
  bad = k.error;
  return b;
}

std::string launch(const Launch &l, Early early) {
  std::lock_guard<std::mutex> hold(one);
  Machine &k = m();
  if (std::string why = invalid(l); !why.empty()) return why;
  if (!prepare(k.own, l)) return "no memory for stacks";
  k.error.clear();
  k.random = k.config.seed * 0x9E3779B97F4A7C15ull + 1;
  uint64_t total = uint64_t(l.grid.x) * l.grid.y * l.grid.z;
  uint64_t first = total ? draw() % total : 0;
  for (uint64_t i = 0; i < total && k.error.empty(); i++) {
    uint64_t b = (i + first) % total;
    if (early && early->number == b) {
      resume(*early);
      continue;
    }
    begin(k.own, b, l.shared, false);
    advance(k.own);
  }
  k.own.shared.reset();
  if (!k.error.empty()) unmark(k.own);
  return k.error;
}

void refuse(const std::string &call, bool fatal, int after, int calls) {
  std::lock_guard<std::mutex> hold(refusing);
  refused_call = call;
  refused_fatal = fatal;
  refusals_after = after;
  refusals = calls;
}

Refusal refused(const char *call) {
  if (refusals == 0) return Refusal::kNone;
  std::lock_guard<std::mutex> hold(refusing);
  if (refusals == 0 || refused_call != call || refusals_after-- > 0) return Refusal::kNone;
  refusals--;
  return refused_fatal ? Refusal::kFatal : Refusal::kMemory;
}

int thread() { return m().now->id; }
int lane() { return m().now->id % kWarp; }
Dim block() { return m().at->place; }
Dim blocks() { return m().at->grid; }
char *shared() { return m().at->shared.get(); }

void fail(const std::string &why) {
  m().error = why + " (thread " + std::to_string(thread()) + ")";
  jump(m().now->context, m().scheduler);
  abort();
}

void wait_previous(Site at) {
  Block &b = *m().at;
  if (!b.overlaps || skipped(at)) return;
  m().now->waited = true;
  if (b.early) wait(kPrevious);
}

void barrier(Site at) {
  Block &k = *m().at;
  if (skipped(at)) return;
  if (k.arrived == 0) {
    k.barrier_file = at.file;
    k.barrier_line = at.line;
  } else if (k.barrier_line != at.line || strcmp(k.barrier_file, at.file)) {
    fail("threads of one block at different barriers: " + name({k.barrier_file, k.barrier_line}) + " and " + name(at));
  }
  if (++k.arrived < k.threads) return wait("barrier");
  k.arrived = 0;
  int self = m().now->id;
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
  Block &k = *m().at;
  int self = lane(), base = m().now->id - self;
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
  copy(at.in + self * n, mine, n);
  at.to[self] = static_cast<char *>(to);
  at.arrived |= 1u << self;
  if (at.arrived != mask) return wait("warp");
  alignas(16) char out[kWarp * kBytes];
  if (body) body(mask, at.in, out);
  at.mask = 0;
  k.open[base / kWarp] &= ~mask;
  for (int l = 0; l < kWarp; l++)
    if (mask >> l & 1) copy(at.to[l], out + l * size, size);
  wake(base / kWarp, mask & ~(1u << self));
}

void warp_barrier(unsigned mask, Site at) {
  if (skipped(at)) return;
  char none = 0;
  meet(mask, -at.line, &none, 0, &none, 0, nullptr);
}

}  // namespace simt
