// NCCL, opened at run time. It sums and gathers the data of a model's ranks, in the
// stream's order, so that graphs include it. Only the functions in use are declared; the
// numbers are those of nccl.h, which guarantees them.
#pragma once
#include <dlfcn.h>

#include <cstring>
#include <string>

struct Nccl {
  static constexpr int kFloat = 7, kSum = 0, kIdBytes = 128;
  struct Id {
    char bytes[kIdBytes];
  };

  int (*unique)(Id *) = nullptr;
  int (*init)(void **, int, Id, int) = nullptr;
  int (*reduce)(const void *, void *, size_t, int, int, void *, void *) = nullptr;
  int (*gather)(const void *, void *, size_t, int, void *, void *) = nullptr;
  int (*abort)(void *) = nullptr;
  const char *(*words)(int) = nullptr;
  void *comm = nullptr;

  // open looks up the functions, and returns an error or an empty string.
  std::string open(const char *path) {
    void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!h) return dlerror();
    auto find = [&](auto &f, const char *name) {
      f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(h, name));
      return f != nullptr;
    };
    if (find(unique, "ncclGetUniqueId") && find(init, "ncclCommInitRank") && find(reduce, "ncclAllReduce") && find(gather, "ncclAllGather") &&
        find(abort, "ncclCommAbort") && find(words, "ncclGetErrorString"))
      return "";
    return std::string(path) + " lacks functions of NCCL";
  }

  // close also aborts operations in progress, because they would wait for a dead rank.
  void close() {
    if (comm) abort(comm);
    comm = nullptr;
  }

  std::string failed(const char *what, int result) const { return result ? std::string(what) + ": " + words(result) : ""; }
};
