// The functions that only the twin has: how the next launches run.
#pragma once
#include "../api.h"

#ifdef __cplusplus
extern "C" {
#endif
// td_twin sets the seed, whether asynchronous copies complete late, and the barrier to skip.
TD_API void td_twin(uint64_t seed, int deferred, const char *skip);
// td_twin_sites lists the barriers and waits executed since then, one a line, and returns
// the number of bytes.
TD_API int td_twin_sites(char *to, int n);
// td_twin_fault runs a kernel with a fault and writes the error that was detected. It
// returns 0 if there is no such kernel.
TD_API int td_twin_fault(int kind, int deferred, char *why, int n);
// td_twin_refuse makes some calls of the runtime fail, after others: of "graph" the making of
// graphs, of "launch" the starts of kernels, of "copy" copies, of "direct" td_direct, of "flush"
// td_flush. They fail for lack of memory, or with fatal 1 so that no later call can succeed.
TD_API void td_twin_refuse(const char *call, int fatal, int after, int calls);
#ifdef __cplusplus
}
#endif
