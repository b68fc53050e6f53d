// The functions of api.h and direct.h: a device's memory, its step, and plans.
#include "../direct.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "plan.h"

#ifdef TD_TWIN
#include "../simt/control.h"
#include "device_twin.h"
#else
#include "device_cuda.h"
#endif

namespace {
constexpr int64_t kStaging = 16 << 20;    // bytes of each of two pinned buffers
constexpr int64_t kWorkspace = 64 << 20;  // bytes for parts of products
constexpr int kBlasProducts = 4096;       // bound on the shapes that cuBLASLt is asked for

// carve returns n elements of a block of memory that holds one array after the other.
template <class T>
T *carve(char *base, int64_t &used, int64_t n) {
  T *p = reinterpret_cast<T *>(base + used);
  used += (n * int64_t(sizeof(T)) + 255) / 256 * 256;
  return p;
}
}  // namespace

struct td_device {
  int ordinal = 0;
  td_limits limits{};
  td_info info{};
  Stream stream;
  std::vector<void *> memory, host;
  std::vector<std::unique_ptr<td_plan>> plans;

  td_step steps[2] = {};       // host memory
  Step on_device{};
  char *step_host[2] = {}, *step_device = nullptr;
  char *step_idle = nullptr;   // a step of no rows; host memory
  int32_t *single[2] = {};      // of the steps, host memory; see Step
  int64_t step_bytes = 0;      // copied to the device at the start of a step
  int32_t *tables_device = nullptr, *tables_going[2] = {};  // tables_going: pinned, being copied
  std::vector<int32_t> tables;
  int32_t *drawn = nullptr;
  uint64_t *rules = nullptr, *rules_host[2] = {};
  int groups = 0;

  Stream copies;               // runs concurrently with the steps
  device::Event stepped, landed;
  uint32_t copied = 0, *copied_host = nullptr;
  std::vector<void *> registered;
  bool flushes = false;        // writes of the network need device::flush
  Nccl nccl;

  std::unique_ptr<Blas> blas;
  char *slices = nullptr;      // memory of draws by slices
  int *arrived = nullptr;      // counters of blocks that have ended

  char *staging[2] = {};
  device::Event staged[2];
  float *workspace = nullptr;

  ~td_device() {
    if (!device::use(stream, ordinal)) return;
    nccl.close();
    device::wait(copies);
    device::wait(stream);
    stepped.close();
    landed.close();
    device::close(copies);
    for (void *p : registered) device::unregister(p);
    for (auto &p : plans) device::forget(p->graph);
    if (blas) {
      for (auto &p : blas->products) blaslt::forget(blas->library, p);
      if (blas->handle) blas->library.destroy(blas->handle);
    }
    for (auto &e : staged) e.close();
    for (void *p : memory) device::release(p);
    for (void *p : host) device::unpin(p);
    device::close(stream);
  }

  // use begins a function of api.h.
  bool use() {
    stream.failed = copies.failed = false;
    return device::use(stream, ordinal);
  }

  void *alloc(int64_t n) {
    void *p = device::alloc(stream, n);
    if (p) memory.push_back(p);
    return p;
  }
  char *pinned(int64_t n) {
    void *p = device::pinned(stream, n);
    if (p) host.push_back(p);
    return static_cast<char *>(p);
  }

  // layout assigns a step's arrays their addresses after base, or only counts the bytes. alone is
  // written by td_run.
  int64_t layout(char *base, td_step &s, int32_t *&alone) const {
    int64_t used = 0;
    s.counts = carve<int32_t>(base, used, 5);
    s.ids = carve<int32_t>(base, used, limits.tokens);
    s.positions = carve<int32_t>(base, used, limits.tokens);
    s.row_span = carve<int32_t>(base, used, limits.tokens);
    s.adapters = carve<int32_t>(base, used, limits.tokens);
    s.out_rows = carve<int32_t>(base, used, limits.outputs);
    s.draws = carve<td_draw>(base, used, limits.outputs);
    s.slots = carve<int32_t>(base, used, int64_t(limits.tokens) * (groups > 0 ? groups : 1));
    alone = carve<int32_t>(base, used, 1 + int64_t(limits.tokens));
    return used;
  }

  bool lay_step() {
    td_step there{};
    int32_t *alone_there;
    step_bytes = layout(nullptr, there, alone_there);
    int64_t places = int64_t(groups) * limits.seqs * limits.blocks;
    step_device = static_cast<char *>(alloc(step_bytes));
    if (!step_device) return false;
    layout(step_device, there, alone_there);
    if (!(step_idle = pinned(step_bytes))) return false;
    tables.assign(size_t(places), 0);
    if (groups > 0 && !(tables_device = static_cast<int32_t *>(alloc(places * 4)))) return false;
    for (int i = 0; i < 2; i++) {
      step_host[i] = pinned(step_bytes);
      if (!step_host[i]) return false;
      layout(step_host[i], steps[i], single[i]);
      steps[i].tables = tables.data();
      if (groups > 0 && !(tables_going[i] = reinterpret_cast<int32_t *>(pinned(places * 4)))) return false;
    }
    if (!drawn) {
      int64_t each = int64_t(limits.outputs) * 4;
      drawn = static_cast<int32_t *>(alloc(2 * each));
      auto *sampled = reinterpret_cast<int32_t *>(pinned(2 * each));
      auto *done = reinterpret_cast<uint32_t *>(pinned(64));
      copied_host = reinterpret_cast<uint32_t *>(pinned(64));
      on_device.probs = reinterpret_cast<td_probs *>(pinned(2 * int64_t(limits.outputs) * int64_t(sizeof(td_probs))));
      rules = static_cast<uint64_t *>(alloc(int64_t(limits.outputs) * TD_RULE_WORDS * 8));
      for (auto &r : rules_host) r = reinterpret_cast<uint64_t *>(pinned(int64_t(limits.outputs) * TD_RULE_WORDS * 8));
      if (!drawn || !sampled || !done || !copied_host || !on_device.probs || !rules || !rules_host[0] || !rules_host[1]) return false;
      on_device.sampled = sampled;
      on_device.done = done;
    }
    for (int i = 0; i < 2; i++) {
      steps[i].sampled = on_device.sampled + i * limits.outputs;
      steps[i].done = on_device.done;
      steps[i].copied = copied_host;
      steps[i].probs = on_device.probs + i * limits.outputs;
      steps[i].rules = rules_host[i];
    }
    on_device = {there.counts, there.ids, there.positions, there.row_span, there.adapters, there.out_rows, there.slots, tables_device, there.draws,
                 rules, drawn, on_device.sampled, on_device.probs, on_device.done, alone_there, limits.outputs, limits.tokens, limits.seqs, limits.blocks};
    return true;
  }

  // choose requests algorithms from cuBLASLt for a plan's products of that many rows.
  bool choose(const td_plan &p, int tokens, int outputs) {
    Run r{stream, on_device, tokens, outputs, 0, nullptr, 0, nccl, nullptr, false, nullptr, 0, nullptr, -1};
    std::vector<td_op> each;
    for (const td_op &o : p.ops)
      for (int i = 0; i < 3; i++)
        if (td_op one = alone(o, i); one.kind == TD_LINEAR && one.n > 0) each.push_back(one);
    for (const td_op &o : each) {
      int rows = r.rows(o);
      if (!blas_fits(o, rows)) continue;
      if (int64_t need = int64_t(rows) * o.k; need > blas->room) {
        blas->narrowed = static_cast<uint16_t *>(alloc(need * 2));  // earlier plans keep their buffer
        if (!blas->narrowed) return false;
        blas->room = need;
      }
      if (int64_t need = int64_t(o.n) * o.k; o.type != TD_BF16 && need > blas->widest) {
        blas->widened = static_cast<uint16_t *>(alloc(need * 2));
        if (!blas->widened) return false;
        blas->widest = need;
      }
      know(rows, o.n, o.k, 1);
    }
    for (const td_op &o : p.ops)
      if (int rows = r.rows(o); pairs(o) && blas_fits(o, rows)) know(rows, o.n, o.k, 2);
    return true;
  }

  // know requests an algorithm for a shape that is not known.
  void know(int rows, int out, int in, int matrices) {
    for (auto &q : blas->products)
      if (q.rows == rows && q.out == out && q.in == in && q.matrices == matrices) return;
    blas->products.reserve(kBlasProducts);  // plans point to them
    if (int(blas->products.size()) == kBlasProducts) return;
    blaslt::Product made{};
    made.rows = rows;
    made.out = out;
    made.in = in;
    made.matrices = matrices;
    blaslt::make(blas->library, blas->handle, made, size_t(kBlasWorkspace));
    blas->products.push_back(made);
  }

  // halves reports whether cuBLASLt computes all products that read the result of operation i, so
  // that the result may be bf16.
  bool halves(const Run &r, const td_plan &p, int i) const {
    const td_op &o = p.ops[size_t(i)];
    if (!blas) return false;
    for (int j = i + 1; j <= i + o.halves; j++)
      for (int m = 0; m < 3; m++) {
        td_op one = alone(p.ops[size_t(j)], m);
        if (one.kind != TD_LINEAR || one.a != o.dst || one.n == 0) continue;
        if (int rows = r.rows(one); !blas_fits(one, rows) || !blas->find(rows, one.n, one.k)) return false;
      }
    return o.halves > 0;
  }

  // slice allocates the memory for a plan's draws by slices. All plans draw from the same logits.
  bool slice(const td_plan &p) {
    for (const td_op &o : p.ops) {
      if (slices || o.kind != TD_SAMPLE) continue;
      int64_t zeros;
      slices = static_cast<char *>(alloc(slices_bytes(limits.outputs, o.n, zeros)));
      std::vector<char> zero(static_cast<size_t>(zeros));
      if (!slices || !td_upload(this, reinterpret_cast<td_address>(slices), zero.data(), zeros)) return false;
    }
    return true;
  }

  // run enqueues operations [from, to) of a plan over as many rows. alone is Run::alone.
  void run(td_plan *p, int from, int to, int tokens, int outputs, int alone) {
    Run r{stream, on_device, tokens, outputs, info.processors, workspace, kWorkspace, nccl, blas.get(), limits.one_order != 0, slices, limits.draws, arrived, alone};
    for (int i = from; i < to; i++) {
      const td_op &o = p->ops[size_t(i)];
      if (o.dst == r.narrowed || o.more[0].dst == r.narrowed || o.more[1].dst == r.narrowed || (o.b == r.narrowed && o.kind == TD_LINEAR)) r.narrowed = 0;
      if (o.a == r.narrowed && (o.kind == TD_PLACE || (o.kind == TD_NORM && o.b))) r.narrowed = 0;
      r.halves = halves(r, *p, i);
      run_op(r, o);
    }
  }

  // round returns how many rows of at most all are launched for n of them. cuBLASLt then has few
  // shapes to choose algorithms for.
  static int round(int n, int all) {
    int to = n <= 8 ? 1 : n <= 64 ? 8 : 64;
    return std::min((n + to - 1) / to * to, all);
  }

  // list writes the rows of a step that attend_tiles does not process.
  void list(int which) {
    const td_step &s = steps[which];
    int32_t *rows = single[which], n = 0;
    for (int32_t row = 0; row < s.counts[0]; row++)
      if (!(s.row_span[row] & TD_IN_CHUNK)) rows[1 + n++] = row;
    rows[0] = n;
  }
};

void run_ranks(const Run &r, const td_op &o) {
  const Nccl *n = &r.nccl;
  size_t count = size_t(r.rows(o)) * size_t(o.n);
  void *dst = at<void>(o.dst), *a = at<void>(o.a);
  bool sum = o.kind == TD_ALL_REDUCE;
  if (count == 0) return;
  device::outside(r.stream, [=](void *stream) {
    if (!n->comm) return std::string("a rank that has left meets nobody");
    if (sum) return n->failed("ncclAllReduce", n->reduce(dst, dst, count, Nccl::kFloat, Nccl::kSum, n->comm, stream));
    return n->failed("ncclAllGather", n->gather(a, dst, count, Nccl::kFloat, n->comm, stream));
  });
}

extern "C" {

int td_version(void) { return TD_VERSION; }

int td_count(char *error, int n) {
  std::string why;
  int count = device::count(why);
  if (count < 0) snprintf(error, size_t(n), "%s", why.c_str());
  return count;
}

td_device *td_open(int ordinal, td_limits limits, char *error, int n) {
  auto *d = new (std::nothrow) td_device;
  if (!d) return nullptr;
  d->ordinal = ordinal;
  d->limits = limits;
  bool ok = device::use(d->stream, ordinal) && device::open(d->stream, ordinal, false) && device::open(d->copies, ordinal, true);
  bool ptx = false;
  ok = ok && device::load(d->stream, ptx);
  d->info.ptx = ptx;
  if (ok) device::describe(d->stream, ordinal, &d->info);
  d->info.overlap = d->stream.overlap = ok && device::can_overlap(d->stream) && kernels_wait(d->stream);
  ok = ok && d->stream.ready() && d->lay_step();
  if (ok) {
    d->workspace = static_cast<float *>(d->alloc(kWorkspace));
    for (auto &s : d->staging) s = d->pinned(kStaging);
    std::vector<char> zeros(sizeof(int) * kArrivals);
    d->arrived = static_cast<int *>(d->alloc(int64_t(zeros.size())));
    ok = d->workspace && d->staging[0] && d->staging[1] && d->arrived && td_upload(d, reinterpret_cast<td_address>(d->arrived), zeros.data(), int64_t(zeros.size()));
  }
  if (ok) return d;
  snprintf(error, size_t(n), "%s", td_error(d));
  delete d;
  return nullptr;
}

int64_t td_blas(td_device *d, const char *path, char *error, int n) {
  auto b = std::make_unique<Blas>();
  std::string why = b->library.open(path);
  if (why.empty() && b->library.version() < 120000) why = "version " + std::to_string(b->library.version()) + " is older than 12.0";
  if (why.empty() && (!d->use() || b->library.create(&b->handle))) why = "cublasLtCreate failed";
  if (why.empty() && !(b->workspace = static_cast<char *>(d->alloc(kBlasWorkspace)))) why = "no memory for its workspace";
  if (!why.empty()) {
    snprintf(error, size_t(n), "%s", why.c_str());
    return 0;
  }
  d->blas = std::move(b);
  return int64_t(d->blas->library.version());
}

void td_close(td_device *d) { delete d; }
const char *td_error(td_device *d) {
  for (const Calls *c : {static_cast<Calls *>(&d->stream), static_cast<Calls *>(&d->copies)})
    if (!c->error.empty()) return c->error.c_str();
  return (d->copies.failed ? d->copies : d->stream).refused.c_str();
}

void td_describe(td_device *d, td_info *info) {
  if (d->use()) device::describe(d->stream, d->ordinal, &d->info);
  *info = d->info;
}

td_address td_alloc(td_device *d, int64_t bytes) {
  if (!d->use()) return 0;
  return reinterpret_cast<td_address>(d->alloc(bytes));
}

void *td_host(td_device *d, void *memory, int64_t bytes) {
  if (!d->use()) return nullptr;
  if (!memory) return d->pinned(bytes);
  if (!device::enroll(d->stream, memory, bytes)) return nullptr;
  d->registered.push_back(memory);
  return memory;
}

int td_upload(td_device *d, td_address dst, const void *src, int64_t bytes) {
  if (!d->use()) return 0;
  // One buffer is filled while the other is being copied.
  for (int64_t at = 0, i = 0; at < bytes; at += kStaging, i ^= 1) {
    int64_t n = std::min(kStaging, bytes - at);
    d->staged[i].wait(d->stream);
    memcpy(d->staging[i], static_cast<const char *>(src) + at, size_t(n));
    device::upload(d->stream, reinterpret_cast<char *>(dst) + at, d->staging[i], n);
    d->staged[i].mark(d->stream);
  }
  if (!d->stream.ready()) device::wait(d->stream);  // a buffer may still be read
  return d->stream.ready();
}

int td_download(td_device *d, void *dst, td_address src, int64_t bytes) {
  if (!d->use()) return 0;
  for (int64_t at = 0; at < bytes; at += kStaging) {
    int64_t n = std::min(kStaging, bytes - at);
    device::wait(d->stream);  // also for uploads that still read the buffer
    device::download(d->stream, d->staging[0], reinterpret_cast<char *>(src) + at, n);
    device::wait(d->stream);
    if (!d->stream.ready()) return 0;
    memcpy(static_cast<char *>(dst) + at, d->staging[0], size_t(n));
  }
  return d->stream.ready();
}

int td_groups(td_device *d, int groups, td_step *steps) {
  if (!d->use()) return 0;
  if (groups != d->groups) {
    d->groups = groups;
    if (!d->lay_step()) return 0;
  }
  steps[0] = d->steps[0];
  steps[1] = d->steps[1];
  return 1;
}

int td_tables(td_device *d, int which, int group, int seq, int from, int n) {
  if (!d->use()) return 0;
  int64_t at = (int64_t(group) * d->limits.seqs + seq) * d->limits.blocks + from;
  int32_t *going = d->tables_going[which] + at;
  memcpy(going, d->tables.data() + at, size_t(n) * 4);
  device::upload(d->stream, d->tables_device + at, going, int64_t(n) * 4);
  return d->stream.ready();
}

td_plan *td_record(td_device *d, const td_op *ops, int n, int tokens, int outputs, int graph) {
  if (!d->use()) return nullptr;
  auto p = std::make_unique<td_plan>();
  p->ops.assign(ops, ops + n);
  p->tokens = tokens;
  p->outputs = outputs;
  if (d->blas && !d->choose(*p, tokens, outputs)) return nullptr;
  if (!d->slice(*p)) return nullptr;
  auto all = [&] { d->run(p.get(), 0, n, tokens, outputs, -1); };
  if (graph) {
    // Kernels and libraries are loaded when they are first called, which a recording may not survive.
    device::upload(d->stream, d->step_device, d->step_idle, d->step_bytes);
    all();
    p->graph = device::record(d->stream, [&] {
      all();
      run_finish(d->stream, d->on_device);
    });
  }
  if (!d->stream.ready() || (graph && !p->graph)) {
    device::forget(p->graph);
    return nullptr;
  }
  d->plans.push_back(std::move(p));
  return d->plans.back().get();
}

int td_run(td_device *d, td_plan *p, int which, int from, int to) {
  if (!d->use()) return 0;
  if (from == 0) {
    d->list(which);
    device::upload(d->stream, d->step_device, d->step_host[which], d->step_bytes);
  }
  if (int64_t words = d->steps[which].counts[4]; from == 0 && words > 0) device::upload(d->stream, d->rules, d->rules_host[which], words * 8);
  if (p->graph) {
    device::replay(d->stream, p->graph);
    return d->stream.ready();
  }
  int tokens = d->round(d->steps[which].counts[0], p->tokens), outputs = d->round(d->steps[which].counts[1], p->outputs);
  if (from == 0 && d->blas && !d->choose(*p, tokens, outputs)) return 0;
  d->run(p, from, to, tokens, outputs, d->single[which][0]);
  if (to == int(p->ops.size())) run_finish(d->stream, d->on_device);
  return d->stream.ready();
}

int td_copy(td_device *d, const td_piece *pieces, int n, int to_device) {
  if (!d->use()) return 0;
  if (!to_device) {
    d->stepped.mark(d->stream);
    d->stepped.follow(d->copies);
    if (!d->stream.ready()) return 0;
  }
  for (int i = 0; i < n; i++) {
    auto *there = reinterpret_cast<void *>(pieces[i].device), *here = reinterpret_cast<void *>(pieces[i].host);
    if (to_device) device::upload(d->copies, there, here, pieces[i].bytes);
    else device::download(d->copies, here, there, pieces[i].bytes);
  }
  if (to_device) d->landed.mark(d->copies);
  run_write_host(d->copies, d->copied_host, d->copied + 1);
  if (!d->stream.ready() || !d->copies.ready()) return 0;
  d->copied++;
  return 1;
}

int td_follow(td_device *d) {
  if (!d->use()) return 0;
  d->landed.follow(d->stream);
  return d->stream.ready();
}

int td_digest(td_device *d, const td_piece *pieces, int n) {
  if (!d->use()) return 0;
  for (int i = 0; i < n; i++)
    if (pieces[i].bytes % 4) return 0;
  d->stepped.mark(d->stream);
  d->stepped.follow(d->copies);
  run_digest(d->copies, pieces, n);
  return d->stream.ready() && d->copies.ready();
}

int td_direct(td_device *d, td_address memory) {
  return d->use() && device::direct(d->stream, d->ordinal, reinterpret_cast<void *>(memory), d->flushes);
}

int td_flush(td_device *d) { return d->use() && (!d->flushes || device::flush(d->stream)); }

int td_nccl_id(const char *nccl, char *id, char *error, int n) {
  Nccl lib;
  Nccl::Id name;
  std::string bad = lib.open(nccl);
  if (bad.empty()) bad = lib.failed("ncclGetUniqueId", lib.unique(&name));
  snprintf(error, size_t(n), "%s", bad.c_str());
  if (bad.empty()) memcpy(id, name.bytes, sizeof name.bytes);
  return bad.empty();
}

int td_ranks(td_device *d, const char *nccl, const char *id, int rank, int ranks) {
  if (!d->use()) return 0;
  Nccl::Id name;
  memcpy(name.bytes, id, sizeof name.bytes);
  std::string bad = d->nccl.open(nccl);
  if (bad.empty()) bad = d->nccl.failed("ncclCommInitRank", d->nccl.init(&d->nccl.comm, ranks, name, rank));
  if (!bad.empty()) d->stream.error = bad;
  return bad.empty();
}

void td_leave(td_device *d) { d->nccl.close(); }

int td_poll(td_device *d) {
  if (!d->use()) return -1;
  int steps = device::poll(d->stream), copies = device::poll(d->copies);
  return steps < 0 || copies < 0 ? -1 : steps && copies;
}

int td_wait(td_device *d) {
  if (d->use()) {
    device::wait(d->stream);
    device::wait(d->copies);
  }
  return d->stream.ready() && d->copies.ready();
}

#ifdef TD_TWIN
void td_twin(uint64_t seed, int deferred, const char *skip) { simt::configure({seed, deferred != 0, skip}); }

int td_twin_sites(char *to, int n) {
  std::string all = simt::sites();
  snprintf(to, size_t(n), "%s", all.c_str());
  return int(all.size());
}
#endif
}
