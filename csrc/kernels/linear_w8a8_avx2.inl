// W8A8 by vpmaddwd (AVX2): codes widened to 16 bits, two products and their sum an instruction.
// Nothing saturates, so its integers are those of the other tiers.
//
// Layout. Steps of 2 inputs: 16 outputs x 2 bytes, which two loads widen to two registers.
// Activations are pairs of 16 bits, ready to be broadcast.
//
// Two multipliers and four adders (Zen 4) would do the 12 vpmaddwd, 12 vpaddd and 2 vpmovsxbw of a
// step of 6 rows in 6.5 cycles. Measured in registers it is 8.0, in the orders tried: additions
// seem to land on the multipliers' ports. That is 89 GMAC/s a core at 3.7 GHz. vpmaddubsw of
// magnitudes by signed values is exact too, but needs as many instructions a product.

struct W8A8 : W8A8Rows<W8A8> {
  using Sum = TileI;
  using Value = __m256i;
  struct Weights {
    __m256i left, right;
  };
  static constexpr int64_t kStepValues = 2, kStepBytes = 32, kSurplus = 0;

  static inline Weights weights(const char* at) {
    const auto* codes = reinterpret_cast<const __m128i*>(at);
    return {_mm256_cvtepi8_epi16(_mm_load_si128(codes)),
            _mm256_cvtepi8_epi16(_mm_load_si128(codes + 1))};
  }
  static inline Value value(const int32_t* at) { return _mm256_set1_epi32(*at); }
  static inline Sum start(int32_t) { return splat_tile(0); }
  static inline Sum multiply(Sum sum, __m256i weight, Value value) {
    sum += (TileI)_mm256_madd_epi16(weight, value);
    keep(sum);
    return sum;
  }
  static inline void store_sums(float* to, Sum sum) { store_tile(to, to_float(sum)); }

  // 16 codes of one output -> their place in 8 steps.
  static inline void pack_group(const int8_t* row, int64_t count, int64_t output, char* steps) {
    for (int64_t k = 0; k < 16; ++k)
      steps[k / 2 * kStepBytes + 2 * output + k % 2] = k < count ? row[k] : 0;
  }
  static inline void store_codes(I32 codes, int32_t* values, int64_t stride) {
    store_half((__m256i)codes.low, values, stride);
    store_half((__m256i)codes.high, values + 4 * stride, stride);
  }

 private:
  // 8 codes of 32 bits -> 4 pairs of 16 bits.
  static inline void store_half(__m256i codes, int32_t* target, int64_t stride) {
    const __m256i pairs = _mm256_blend_epi16(codes, _mm256_srli_epi64(codes, 16), 0x22);
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    const __m256i together = _mm256_permutevar8x32_epi32(pairs, order);
    store_strided(_mm256_castsi256_si128(together), target, stride);
  }
};
