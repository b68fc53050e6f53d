// Kernels with faults, for tests of the twin itself.
#include <cstdio>

#include "../kernels/ptx.cuh"
#include "control.h"

namespace {

void wrong_mask() {
  if (thread_id() % 32 < 16) shuffle(1.0f, 0, thread_id() % 2 ? 0xffffu : 0x5555u);
}
void without_caller() { shuffle(1.0f, 0, 0xfffeu); }
void ended() {
  if (thread_id() >= 40) return;
  sync();
}
void different() {
  if (thread_id() % 2) sync();
  else
    sync();
}
void diverged() {
  if (thread_id() % 2) warp_sum(1);
  else ballot(true);
}
float landed;
void early() {
  float *to = reinterpret_cast<float *>(shared_memory());
  alignas(16) static const float from[4] = {7, 7, 7, 7};
  if (thread_id() == 0) {
    copy_async(to, from);
    copy_commit();
    landed = to[0];
    copy_wait<0>();
  }
}


// Two kernels, of which the second one may overlap with the first.
int input, output, result;
void first() {
  wait_previous();
  if (thread_id() == 0) output = input;
}
void reads_early() {
  int v = output;
  wait_previous();
  if (thread_id() == 0) result = v;
}
void writes_early() {
  if (thread_id() == 0) input = 0;
  wait_previous();
  if (thread_id() == 0) result = output;
}
void never_waits() {
  if (thread_id() < 40) wait_previous();
}

std::string overlapped(void (*second)()) {
  input = 7;
  output = result = 0;
  std::string bad;
  simt::Launch l = {{1, 1, 1}, 64, 0, second, true};
  simt::Early early = simt::start(l, bad);
  if (bad.empty()) bad = simt::launch({{1, 1, 1}, 64, 0, first});
  if (bad.empty()) bad = simt::launch(l, early);
  return bad;
}

}  // namespace

extern "C" int td_twin_fault(int kind, int deferred, char *why, int n) {
  void (*const kernels[])() = {wrong_mask, without_caller, ended, different, diverged, early, reads_early, writes_early, never_waits};
  if (kind < 0 || kind >= int(sizeof kernels / sizeof *kernels)) return 0;
  simt::configure({1, deferred != 0, ""});
  std::string bad = kind < 6 ? simt::launch({{1, 1, 1}, 64, 64, kernels[kind]}) : overlapped(kernels[kind]);
  if (kind == 5 && bad.empty() && landed != 7) bad = "read before it landed";
  if ((kind == 6 || kind == 7) && bad.empty() && result != 7) bad = "not the result of kernels one after the other";
  snprintf(why, size_t(n), "%s", bad.c_str());
  return 1;
}

extern "C" void td_twin_refuse(const char *call, int fatal, int after, int calls) { simt::refuse(call, fatal != 0, after, calls); }
