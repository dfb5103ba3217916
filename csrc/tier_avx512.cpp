// AVX-512 F, BW, VL, DQ, VNNI and BF16: Cooper Lake, Sapphire Rapids, Zen 4 and later.
#include <immintrin.h>

#define QUASAR_TIER avx512
#define QUASAR_VOCABULARY "vector/avx512.inl"
#define QUASAR_BF16_PRODUCT "kernels/linear_bf16_dot.inl"
#define QUASAR_W8A8_PRODUCT "kernels/linear_w8a8_vnni.inl"
#define QUASAR_W4A8_PRODUCT "kernels/linear_w4a8_vnni.inl"
#include "tier.inl"
