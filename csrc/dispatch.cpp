// Which tier runs here: asked once, with the operating system's consent to the registers included.
#include <cstring>

#include "quasar_kernels.h"

// The tables of the tiers that are built; the others' are null.
extern "C" const quasar_tier quasar_tier_scalar, quasar_tier_avx2, quasar_tier_avx512vnni,
    quasar_tier_avx512;

namespace {

#ifdef QUASAR_TIER_AVX2
constexpr const quasar_tier* avx2 = &quasar_tier_avx2;
#else
constexpr const quasar_tier* avx2 = nullptr;
#endif
#ifdef QUASAR_TIER_AVX512VNNI
constexpr const quasar_tier* avx512vnni = &quasar_tier_avx512vnni;
#else
constexpr const quasar_tier* avx512vnni = nullptr;
#endif
#ifdef QUASAR_TIER_AVX512
constexpr const quasar_tier* avx512 = &quasar_tier_avx512;
#else
constexpr const quasar_tier* avx512 = nullptr;
#endif

// A tier needs its feature and those of the tiers below it. The answer: what is missing, or null.
#if defined(__x86_64__)
#define QUASAR_NEEDS(feature) \
  if (!__builtin_cpu_supports(feature)) return "this CPU lacks " feature
#else
#define QUASAR_NEEDS(feature)
#endif

const char* nothing_missing() { return nullptr; }

const char* missing_for_avx2() {
  QUASAR_NEEDS("avx2");
  QUASAR_NEEDS("fma");
  return nullptr;
}

const char* missing_for_avx512vnni() {
  QUASAR_NEEDS("avx512f");
  QUASAR_NEEDS("avx512bw");
  QUASAR_NEEDS("avx512vl");
  QUASAR_NEEDS("avx512dq");
  QUASAR_NEEDS("avx512vnni");
  return missing_for_avx2();
}

const char* missing_for_avx512() {
#ifdef QUASAR_TIER_AVX512  // a compiler that cannot build it may not know the name either
  QUASAR_NEEDS("avx512bf16");
#endif
  return missing_for_avx512vnni();
}

// In rising order, by the names of QUASAR_ISA.
struct Tier {
  const char* name;
  const quasar_tier* table;
  const char* (*missing)();
};
const Tier tiers[] = {
    {"reference", nullptr, nothing_missing},
    {"scalar", &quasar_tier_scalar, nothing_missing},
    {"avx2", avx2, missing_for_avx2},
    {"avx512vnni", avx512vnni, missing_for_avx512vnni},
    {"avx512", avx512, missing_for_avx512},
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
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
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
