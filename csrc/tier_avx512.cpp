// The avx512 tier: AVX-512 F, BW, VL, DQ, VNNI and BF16. This file alone is compiled with those
// instructions, so everything in it has internal linkage but the table at its end: an inline
// function that the linker merged with another file's would run on CPUs that lack them.
#include <immintrin.h>
#include <time.h>

#include "kernels/table.inl"
#include "parallel.h"
#include "quasar_kernels.h"

namespace {

#include "vector/avx512.inl"
#include "vector/x86.inl"
//
#include "kernels/exp.inl"
#include "kernels/norm.inl"
#include "kernels/linear_bf16.inl"
#include "kernels/linear_bf16_dot.inl"
#include "kernels/linear_w8a8.inl"
#include "kernels/linear_w8a8_vnni.inl"
#include "kernels/linear.inl"
#include "kernels/peaks.inl"
#include "kernels/attention.inl"
#include "kernels/logits.inl"

}  // namespace

QUASAR_TABLE(avx512)
