// AVX2 and FMA: Haswell, Zen and later.
#include <immintrin.h>

#define QUASAR_TIER avx2
#define QUASAR_VOCABULARY "vector/avx2.inl"
#define QUASAR_BF16_PRODUCT "kernels/linear_bf16_widen.inl"
#define QUASAR_W8A8_PRODUCT "kernels/linear_w8a8_avx2.inl"
#define QUASAR_W4A8_PRODUCT "kernels/linear_w4a8_avx2.inl"
#include "tier.inl"
