// Any CPU: what the compiler makes of plain C++ for the target's least member.
#define QUASAR_TIER scalar
#define QUASAR_VOCABULARY "vector/scalar.inl"
#define QUASAR_BF16_PRODUCT "kernels/linear_bf16_widen.inl"
#define QUASAR_W8A8_PRODUCT "kernels/linear_w8a8_scalar.inl"
#define QUASAR_W4A8_PRODUCT "kernels/linear_w4a8_scalar.inl"
#include "tier.inl"
