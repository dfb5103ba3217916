// The vocabulary of AVX2 and FMA: 8 lanes a register.

#include "x86.inl"

typedef float FloatPart __attribute__((vector_size(32)));
typedef int32_t IntPart __attribute__((vector_size(32)));

constexpr int kHalfRows = 1;  // up to so many rows a product fetches every second line
constexpr int kTileRows = 6;  // rows of a product's tile: 12 registers of sums, 2 of weights

// Attention, as in avx512.inl.
constexpr bool kMultipliesPairs = false;
constexpr int kKeyQueries = 4, kKeyTiles = 2;
constexpr int kValueQueries = 6, kWideQueries = 2;

inline FloatPart splat_part(float value) { return _mm256_set1_ps(value); }
inline IntPart splat_part(int32_t value) { return (IntPart)_mm256_set1_epi32(value); }
inline void keep(IntPart& x) { asm("" : "+x"(x)); }

inline FloatPart fma(FloatPart a, FloatPart b, FloatPart c) { return _mm256_fmadd_ps(a, b, c); }
inline FloatPart max(FloatPart a, FloatPart b) { return _mm256_max_ps(a, b); }
inline FloatPart min(FloatPart a, FloatPart b) { return _mm256_min_ps(a, b); }
inline FloatPart nearest(FloatPart x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline IntPart to_int(FloatPart x) { return (IntPart)_mm256_cvtps_epi32(x); }
inline FloatPart select(IntPart mask, FloatPart yes, FloatPart no) {
  return _mm256_blendv_ps(no, yes, (FloatPart)mask);
}
inline IntPart select(IntPart mask, IntPart yes, IntPart no) {
  return (IntPart)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
}
template <int N>
inline FloatPart exchange(FloatPart x) {
  if constexpr (N == 4) return _mm256_permute2f128_ps(x, x, 1);
  return _mm256_permute_ps(x, N == 2 ? 0x4e : 0xb1);
}
inline uint32_t lane_bits(IntPart mask) {
  return static_cast<uint32_t>(_mm256_movemask_ps((FloatPart)mask));
}

#include "parts.inl"

struct WordProduct {
  I32 high, low;
};
inline WordProduct multiply_words(I32 a, uint32_t factor) {
  const __m256i m = _mm256_set1_epi64x(factor);
  const auto half = [m](IntPart x, IntPart* high, IntPart* low) {
    const __m256i even = _mm256_mul_epu32((__m256i)x, m);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), m);
    *high = (IntPart)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *low = (IntPart)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  };
  WordProduct product;
  half(a.low, &product.high.low, &product.low.low);
  half(a.high, &product.high.high, &product.low.high);
  return product;
}

inline void transpose4(I32* rows) {
  const auto half = [rows](IntPart I32::*part) {
    const auto row = [rows, part](int i) { return (__m256i)(rows[i].*part); };
    const __m256i a = _mm256_unpacklo_epi32(row(0), row(1));
    const __m256i b = _mm256_unpackhi_epi32(row(0), row(1));
    const __m256i c = _mm256_unpacklo_epi32(row(2), row(3));
    const __m256i d = _mm256_unpackhi_epi32(row(2), row(3));
    rows[0].*part = (IntPart)_mm256_unpacklo_epi64(a, c);
    rows[1].*part = (IntPart)_mm256_unpackhi_epi64(a, c);
    rows[2].*part = (IntPart)_mm256_unpacklo_epi64(b, d);
    rows[3].*part = (IntPart)_mm256_unpackhi_epi64(b, d);
  };
  half(&I32::low);
  half(&I32::high);
}
