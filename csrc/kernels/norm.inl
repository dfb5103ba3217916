// What a linear layer reads: a row as it is, or its RMSNorm.
//
// RMSNorm: (x * r) * weight with r = 1 / sqrt(mean(x^2) + eps). Squares of floats are exact in
// fp64; they are summed there and the mean is rounded to fp32 once, so r does not depend on the
// order of the sum (but for a tie in 10^8 rows). The normalised row is never stored: it is computed
// again in each pass over the row (absmax, codes), which costs two multiplications a value and
// stays in registers. Measured, Zen 4: 0.35 cycles a value for the sum of squares, 0.17 for the
// absmax, 0.5 for codes or BF16; 8 rows of 896 take 2 us.

// The low `count` of 16 mask bits.
static inline __mmask16 low_bits(int64_t count) {
  return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
}

// Four 32-bit words, `stride` words apart.
static inline void store_strided(__m128i words, int32_t* target, int64_t stride) {
  target[0] = _mm_cvtsi128_si32(words);
  target[stride] = _mm_extract_epi32(words, 1);
  target[2 * stride] = _mm_extract_epi32(words, 2);
  target[3 * stride] = _mm_extract_epi32(words, 3);
}

// body(k, mask) for the values k..k+15 of begin..end-1; the mask is constant but for a ragged end.
template <class Body>
[[gnu::always_inline]] static inline void each_group(int64_t begin, int64_t end, const Body& body) {
  int64_t k = begin;
  for (; k + 16 <= end; k += 16) body(k, (__mmask16)0xffff);
  if (k < end) body(k, low_bits(end - k));
}

static float inverse_rms(const float* x, int64_t count, float eps) {
  __m512d low = _mm512_setzero_pd(), high = low;
  each_group(0, count, [&](int64_t k, __mmask16 mask) {
    const __m512d a = _mm512_cvtps_pd(_mm256_maskz_loadu_ps((__mmask8)mask, x + k));
    const __m512d b = _mm512_cvtps_pd(_mm256_maskz_loadu_ps((__mmask8)(mask >> 8), x + k + 8));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  });
  const double mean = _mm512_reduce_add_pd(_mm512_add_pd(low, high)) / (double)count;
  const __m128 shifted = _mm_set_ss((float)mean + eps);
  return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(shifted));
}

template <bool kNorm>
struct RowSource {
  const float* x;
  const float* norm;  // RMSNorm weight
  float inverse;      // 1 / rms

  // Values k..k+15, zeros where the mask is 0.
  inline __m512 load(int64_t k, __mmask16 mask) const {
    const __m512 values = _mm512_maskz_loadu_ps(mask, x + k);
    if constexpr (!kNorm) return values;
    const __m512 scaled = _mm512_mul_ps(values, _mm512_set1_ps(inverse));
    return _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(mask, norm + k));
  }

  // Compared as integers, magnitudes keep their order and a NaN is above infinity: it is not lost.
  float absmax(int64_t count) const {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    each_group(0, count, [&](int64_t k, __mmask16 mask) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(load(k, mask)), magnitude);
      most = _mm512_max_epu32(most, bits);
    });
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epu32(most))));
  }
};
