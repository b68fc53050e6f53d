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

}  // namespace

extern "C" int td_twin_fault(int kind, int deferred, char *why, int n) {
  void (*const kernels[])() = {wrong_mask, without_caller, ended, different, diverged, early};
  if (kind < 0 || kind >= int(sizeof kernels / sizeof *kernels)) return 0;
  simt::configure({1, deferred != 0, ""});
  std::string bad = simt::launch({1, 1, 1}, 64, 64, kernels[kind]);
  if (kind == 5 && bad.empty() && landed != 7) bad = "read before it landed";
  snprintf(why, size_t(n), "%s", bad.c_str());
  return 1;
}
