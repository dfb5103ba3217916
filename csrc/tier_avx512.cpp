// The avx512 tier: AVX-512 F, BW, VL, DQ, VNNI and BF16. This file alone is compiled with those
// instructions, so everything in it has internal linkage but the table at its end: an inline
// function that the linker merged with another file's would run on CPUs that lack them.
#include <immintrin.h>
#include <time.h>

#include "parallel.h"
#include "quasar_kernels.h"

namespace {

#include "kernels/exp.inl"
#include "kernels/norm.inl"
#include "kernels/linear_bf16.inl"
#include "kernels/linear_w8a8.inl"
#include "kernels/linear.inl"
#include "kernels/peaks.inl"
#include "kernels/attention.inl"
#include "kernels/logits.inl"

}  // namespace

extern "C" const quasar_tier quasar_tier_avx512;
const quasar_tier quasar_tier_avx512 = {
    "avx512",
    packed_bytes,
    pack,
    linear_scratch_bytes,
    norm_linear,
    norm_gated,
    linear_add,
    cache_block_bytes,
    attention_scratch_bytes,
    attend,
    move_slots,
    argmax,
    top_k_scratch_bytes,
    top_k,
    gumbel_argmax,
    read_bandwidth,
    multiply_rate,
};
