#include "moe.cuh"

#include "../runtime/plan.h"

void run_moe(const Run &r, const td_op &o) {
  int rows = o.outputs ? r.outputs : r.tokens;
  if (o.direct) {
    size_t shared = TD_MOE_ROWS * (size_t(route_floats(o)) + 2 * size_t(o.top_k)) * 4;
    if (rows > TD_MOE_ROWS && r.stream.error.empty()) r.stream.error = "a choice of experts for more rows than it supports";
    else if (o.kind == TD_ROUTE) TD_LAUNCH(r.stream, 1, 1, 1, TD_MOE_ROWS * 32, shared, route_few<0>, o, r.step);
    else TD_LAUNCH(r.stream, 1, 1, 1, TD_MOE_ROWS * 32, shared, route_few<1>, o, r.step);
    return;
  }
  switch (o.kind) {
    case TD_ROUTE: TD_LAUNCH(r.stream, rows, 1, 1, kRouteThreads, size_t(route_floats(o)) * 4, route, o, r.step); break;
    case TD_ROUTE_GROUPS: TD_LAUNCH(r.stream, rows, 1, 1, kRouteThreads, size_t(route_floats(o)) * 4, route_groups, o, r.step); break;
    case TD_SPLIT: TD_LAUNCH(r.stream, rows, 1, 1, 256, 0, split, o, r.step); break;
    case TD_JOIN: TD_LAUNCH(r.stream, rows, 1, 1, 256, 0, join, o, r.step); break;
    case TD_GROUP: TD_LAUNCH(r.stream, 1, 1, 1, kGroupThreads, kGroupThreads * 8, group, o, r.step); break;
    case TD_SCATTER: TD_LAUNCH(r.stream, rows, 1, 1, 256, 0, scatter, o, r.step); break;
    default: TD_LAUNCH(r.stream, rows, 1, 1, 256, 0, combine, o, r.step);
  }
}
