// The functions of the shared object for device memory that the network reads and writes. They are
// not in api.h, because kernels have no part in them.
#pragma once

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

// td_direct prepares memory of td_alloc for the network. It returns 0 if the driver cannot keep the
// network's accesses in order with the device's; the memory then serves everything else.
TD_API int td_direct(td_device *d, td_address memory);
// td_flush makes what the network has written to memory of td_direct visible to everything started
// later. The caller must know that the writes have ended.
TD_API int td_flush(td_device *d);

#ifdef __cplusplus
}
#endif
