// AVX-512 F, BW, VL, DQ and VNNI without BF16: Cascade Lake, Ice Lake, Tiger Lake, Rocket Lake.
#include <immintrin.h>

#define QUASAR_TIER avx512vnni
#define QUASAR_VOCABULARY "vector/avx512.inl"
#define QUASAR_BF16_PRODUCT "kernels/linear_bf16_widen.inl"
#define QUASAR_W8A8_PRODUCT "kernels/linear_w8a8_vnni.inl"
#define QUASAR_W4A8_PRODUCT "kernels/linear_w4a8_vnni.inl"
#include "tier.inl"
