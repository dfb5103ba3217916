// Which tier runs here: asked once, with the operating system's consent to the registers included.
#include <cstring>

#include "quasar_kernels.h"

#ifdef QUASAR_TIER_AVX512
extern "C" const quasar_tier quasar_tier_avx512;
#endif

namespace {

// Tiers in rising order, as the names of QUASAR_ISA. `table` is null where none is built.
struct Tier {
  const char* name;
  const quasar_tier* table;
  const char* (*missing)();  // the CPU feature that is not there, or null
};

[[maybe_unused]] const char* nothing_missing() { return nullptr; }

#ifdef QUASAR_TIER_AVX512
const char* missing_for_avx512() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f")) return "this CPU lacks avx512f";
  if (!__builtin_cpu_supports("avx512bw")) return "this CPU lacks avx512bw";
  if (!__builtin_cpu_supports("avx512vl")) return "this CPU lacks avx512vl";
  if (!__builtin_cpu_supports("avx512dq")) return "this CPU lacks avx512dq";
  if (!__builtin_cpu_supports("avx512vnni")) return "this CPU lacks avx512_vnni";
  if (!__builtin_cpu_supports("avx512bf16")) return "this CPU lacks avx512_bf16";
  return nullptr;
}
#endif

const Tier tiers[] = {
    {"reference", nullptr, nothing_missing},
    {"scalar", nullptr, nothing_missing},
    {"avx2", nullptr, nothing_missing},
#ifdef QUASAR_TIER_AVX512
    {"avx512", &quasar_tier_avx512, missing_for_avx512},
#else
    {"avx512", nullptr, nothing_missing},
#endif
};
constexpr int tier_count = sizeof(tiers) / sizeof(tiers[0]);

int tier_index(const char* cap) {
  if (!cap) return tier_count - 1;
  for (int i = 0; i < tier_count; ++i)
    if (!std::strcmp(cap, tiers[i].name)) return i;
  return -1;
}

}  // namespace

extern "C" const quasar_tier* quasar_select_tier(const char* cap, const char** why) {
  const int highest = tier_index(cap);
  *why = highest < 0 ? "the cap names no tier" : "no native tier is built at or below the cap";
  for (int i = highest; i >= 0; --i) {
    if (!tiers[i].table) continue;
    const char* missing = tiers[i].missing();
    if (!missing) return tiers[i].table;
    *why = missing;
  }
  return nullptr;
}
