// One tier: the kernels upon the vocabulary and the three products that its file names. That file
// alone is compiled with the tier's instructions, so everything here has internal linkage but the
// table at the end: an inline function that the linker merged with another file's would run on CPUs
// that lack them.
#include <time.h>

#include "parallel.h"
#include "quasar_kernels.h"

namespace {

#include QUASAR_VOCABULARY
//
#include "kernels/exp.inl"
#include "kernels/norm.inl"
#include "kernels/rotation.inl"
//
#include "kernels/linear_tile.inl"
//
#include "kernels/linear_bf16.inl"
#include QUASAR_BF16_PRODUCT
//
#include "kernels/linear_w8a8.inl"
#include QUASAR_W8A8_PRODUCT
//
#include QUASAR_W4A8_PRODUCT
#include "kernels/linear_w4a8.inl"
//
#include "kernels/linear.inl"
#include "kernels/peaks.inl"
//
#include "kernels/attention.inl"
#include "kernels/attention_plan.inl"
//
#include "kernels/logits.inl"

}  // namespace

#define QUASAR_JOIN(a, b) a##b
#define QUASAR_TABLE(tier) QUASAR_JOIN(quasar_tier_, tier)
#define QUASAR_QUOTE(tier) #tier
#define QUASAR_NAME(tier) QUASAR_QUOTE(tier)

extern "C" const quasar_tier QUASAR_TABLE(QUASAR_TIER);
const quasar_tier QUASAR_TABLE(QUASAR_TIER) = {
    QUASAR_NAME(QUASAR_TIER),
    packed_bytes,
    pack,
    linear_scratch_bytes,
    norm_linear,
    norm_gated,
    linear,
    linear_add,
    rotate,
    norm_add,
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
