// W8A8 by vpdpbusd (AVX-512 VNNI).
//
// The instruction multiplies unsigned by signed bytes, so a weight w is stored as w + 128 and the
// surplus 128 sum_k a[m, k] is where the row's sum starts: at its negative. 65536 inputs reach
// 2.1e9 < 2^31 at most, and wrapping is harmless.
//
// Layout. Steps of 4 inputs: 32 outputs x 4 bytes = two registers, outputs 0-15 and 16-31.
// One instruction makes 64 multiply-adds and one starts every cycle: 235 GMAC/s a core at 3.7 GHz.

struct W8A8 : W8A8Rows<W8A8> {
  using Sum = I32;
  using Value = __m512i;
  struct Weights {
    __m512i left, right;
  };
  static constexpr int64_t kStepValues = 4, kStepBytes = 128, kSurplus = -128;

  static inline Weights weights(const char* at) {
    return {_mm512_load_si512(at), _mm512_load_si512(at + 64)};
  }
  static inline Value value(const int32_t* at) { return _mm512_set1_epi32(*at); }
  static inline Sum start(int32_t correction) { return splat(correction); }
  static inline Sum multiply(Sum sum, __m512i weight, Value values) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, weight, values);
  }
  static inline void store_sums(float* to, Sum sum) { store(to, to_float(sum)); }

  // 16 codes of one output -> their place in 4 steps.
  static inline void pack_group(const int8_t* row, int64_t count, int64_t output, char* steps) {
    const __m128i codes = _mm_maskz_loadu_epi8(low_bits(count), row);
    store_strided(_mm_xor_si128(codes, _mm_set1_epi8(-128)), (int32_t*)steps + output, 32);
  }
  static inline void store_codes(I32 codes, int32_t* values, int64_t stride) {
    store_strided(_mm512_cvtepi32_epi8((__m512i)codes), values, stride);
  }
};
