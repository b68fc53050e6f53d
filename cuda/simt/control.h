// What the twin has beside api.h: how the next launches run.
#pragma once
#include "../api.h"

#ifdef __cplusplus
extern "C" {
#endif
// td_twin sets the seed, whether copies land late, and the barrier to leave out.
TD_API void td_twin(uint64_t seed, int deferred, const char *skip);
// td_twin_sites lists the barriers and waits met since then, one a line, and returns
// how many bytes there are.
TD_API int td_twin_sites(char *to, int n);
// td_twin_fault runs a kernel with a fault and writes what was noticed; 0 if there is
// no such kernel.
TD_API int td_twin_fault(int kind, int deferred, char *why, int n);
#ifdef __cplusplus
}
#endif
