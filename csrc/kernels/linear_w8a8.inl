// W8A8: INT8 weights (one scale a row) times INT8 activations (one scale a token).
//
// Maths. out[m, n] = float(sum_k w[n, k] a[m, k]) * weight_scale[n] * row_scale[m] (+ bias[n]), the
// sum exact in 32 bits. vpdpbusd multiplies unsigned by signed bytes, so a weight w is stored as
// w + 128 and the surplus 128 sum_k a[m, k] is where the row's sum starts: at its negative.
// Codes may span -128..127; 65536 inputs reach 2.1e9 < 2^31 at most, and wrapping is harmless.
//
// Layout. Blocks of 32 output rows; in a block, steps of 4 input values: 32 rows x 4 bytes = two
// registers, outputs 0-15 and 16-31. Inputs are padded to a multiple of 16 with code 0.
// One instruction makes 64 multiply-adds and one starts every cycle: 235 GMAC/s a core at 3.7 GHz.

struct W8A8 {
  using Element = int8_t;
  using Sum = __v16si;  // as __m512i (of 64-bit lanes) GCC 12 would copy and spill every sum
  static constexpr int64_t kStepValues = 4;

  static inline Sum start(int32_t correction) { return (Sum)_mm512_set1_epi32(correction); }

  static inline Sum multiply(Sum sum, __m512i weight, __m512i values) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, weight, values);
  }

  static inline __m512 as_float(Sum sum) { return _mm512_cvtepi32_ps((__m512i)sum); }

  // Outputs n..n+15.
  static inline __m512 scaled(__m512 sum, const float* scale, int64_t n, float row_scale) {
    const __m512 by_weight = _mm512_mul_ps(sum, _mm512_loadu_ps(scale + n));
    return _mm512_mul_ps(by_weight, _mm512_set1_ps(row_scale));
  }

  // 16 codes of one row -> 4 steps of its place in the block.
  static inline void pack_group(const int8_t* row, int64_t count, int32_t* packed) {
    const __m128i codes = _mm_maskz_loadu_epi8(low_bits(count), row);
    store_strided(_mm_xor_si128(codes, _mm_set1_epi8(-128)), packed, 32);
  }

  // What a row is multiplied by to become codes; `scale` takes them back.
  template <bool kNorm>
  static float factor(const RowSource<kNorm>& row, int64_t count, float* scale) {
    const float absmax = row.absmax(count);
    *scale = absmax / 127.0f;
    return absmax > 0 ? 127.0f / absmax : 0.0f;
  }

  // Codes of the inputs begin..end-1 at `values`, `stride` words a step; returns minus 128 times
  // their sum.
  template <bool kNorm>
  static int32_t encode(const RowSource<kNorm>& row, float factor, int64_t begin, int64_t end,
                        int32_t* values, int64_t stride) {
    const __m512 limit = _mm512_set1_ps(127.0f);
    __m512i sum = _mm512_setzero_si512();
    each_group(begin, end, [&](int64_t k, __mmask16 mask) {
      // The clamp only matters where 127 / absmax overflowed; a NaN becomes code 0.
      const __m512 x = _mm512_mul_ps(row.load(k, mask), _mm512_set1_ps(factor));
      const __m512 held = _mm512_min_ps(limit, _mm512_max_ps(_mm512_set1_ps(-127.0f), x));
      const __m512i codes = _mm512_cvtps_epi32(held);
      sum = _mm512_add_epi32(sum, codes);
      store_strided(_mm512_cvtepi32_epi8(codes), values + k / 4 * stride, stride);
    });
    return -128 * _mm512_reduce_add_epi32(sum);
  }
};
