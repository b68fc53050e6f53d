// The choice of the code of kernels for a device, of the code that an object has.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace device {

// Image is the code of one source's kernels for one generation of GPUs.
struct Image {
  const void *code;     // null: the end of a list, whose sources are one after the other
  const char *kernels;  // their mangled names, each ended by a zero byte, and after the last one an empty name
  int32_t source;       // its number
  int32_t capability;   // 80 for 8.0, whose machine code also runs on 8.6
  int32_t exact;        // 1: it runs on no other capability
  int32_t ptx;          // 1: PTX, which the driver compiles for this capability and later ones
};

inline std::string capability_text(int capability) { return std::to_string(capability / 10) + "." + std::to_string(capability % 10); }

// runs reports whether an image can be loaded on a device.
inline bool runs(const Image &i, int capability) {
  if (i.ptx) return i.capability <= capability;
  return i.capability == capability || (!i.exact && i.capability / 10 == capability / 10 && i.capability < capability);
}

// best returns an image of each source for a device: the machine code of the latest capability, or
// else PTX. It returns none if a source has none.
inline std::vector<const Image *> best(const Image *all, int capability) {
  std::vector<const Image *> chosen;
  while (all->code) {
    const Image *of = nullptr;
    for (int32_t source = all->source; all->code && all->source == source; all++)
      if (runs(*all, capability) && (!of || (of->ptx && !all->ptx) || (of->ptx == all->ptx && of->capability < all->capability))) of = all;
    if (!of) return {};
    chosen.push_back(of);
  }
  return chosen;
}

// no_code returns the error of a device for which best returns none.
inline std::string no_code(const Image *all, int capability) {
  std::string have;
  for (const Image *i = all; i->code && i->source == all->source; i++)
    if (!i->ptx) have += (have.empty() ? "" : ", ") + capability_text(i->capability);
  return "the kernels have no code for compute capability " + capability_text(capability) + ", only for " + have;
}

}  // namespace device
