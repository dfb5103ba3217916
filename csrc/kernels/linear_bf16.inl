// BF16 weights times BF16 activations, summed in fp32 by vdpbf16ps.
//
// Maths. The fp32 input is rounded to nearest even. Each output has one accumulator that takes the
// products of two input values a step, k ascending: the same instructions for any number of rows,
// tile or thread, so a row's bits depend on nothing beside it. The instruction takes denormals for
// zero and rounds to nearest even after each of its two additions.
//
// Layout. Blocks of 32 output rows; in a block, steps of 2 input values: 32 rows x 2 halves = two
// registers, outputs 0-15 and 16-31. Inputs are padded to a multiple of 16 with zeros.
// One instruction makes 32 multiply-adds and one starts every cycle (Zen 4); its 6 cycles of
// latency do not show, as a step's 128 bytes take 14 to 26 cycles to arrive.

struct Bf16 {
  using Element = uint16_t;
  using Sum = __m512;
  static constexpr int64_t kStepValues = 2;

  static inline Sum start(int32_t) { return _mm512_setzero_ps(); }

  static inline Sum multiply(Sum sum, __m512i weight, __m512i values) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)values);
  }

  static inline __m512 as_float(Sum sum) { return sum; }

  static inline __m512 scaled(__m512 sum, const float*, int64_t, float) { return sum; }

  // 16 values of one row -> 8 steps of its place in the block.
  static inline void pack_group(const uint16_t* row, int64_t count, int32_t* packed) {
    const __m256i values = _mm256_maskz_loadu_epi16(low_bits(count), row);
    store_strided(_mm256_castsi256_si128(values), packed, 32);
    store_strided(_mm256_extracti128_si256(values, 1), packed + 4 * 32, 32);
  }

  template <bool kNorm>
  static float factor(const RowSource<kNorm>&, int64_t, float* scale) {
    return *scale = 1.0f;
  }

  // The inputs begin..end-1 as BF16 pairs at `values`, `stride` words a step.
  template <bool kNorm>
  static int32_t encode(const RowSource<kNorm>& row, float, int64_t begin, int64_t end,
                        int32_t* values, int64_t stride) {
    each_group(begin, end, [&](int64_t k, __mmask16 mask) {
      const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(row.load(k, mask));
      int32_t* target = values + k / 2 * stride;
      store_strided(_mm256_castsi256_si128(rounded), target, stride);
      store_strided(_mm256_extracti128_si256(rounded, 1), target + 4 * stride, stride);
    });
    return 0;
  }
};
