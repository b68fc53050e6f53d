// NCCL, opened at run time: what ranks of one model bring is summed and gathered by
// it, in the stream's order, and so recorded into graphs. Only what is called is
// declared; the numbers are those of nccl.h, which promises them.
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

  // open finds the functions, or says what is wrong.
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

  // close ends what runs, too: a rank that is gone is waited for in vain.
  void close() {
    if (comm) abort(comm);
    comm = nullptr;
  }

  std::string failed(const char *what, int result) const { return result ? std::string(what) + ": " + words(result) : ""; }
};
