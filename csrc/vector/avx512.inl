// The vocabulary that kernels are written in, for AVX-512: 16 lanes in one register. The other
// tiers have the same names (scalar.inl and avx2.inl with parts.inl).
//
// F16, I32: 16 lanes of fp32 or int32; + - * / & | ^ act lane by lane. Mask: 16 times yes or no.
// `count` is how many leading lanes take part, 0 or more: lanes behind are neither read nor written
// and load as 0. max and min return their second operand if one is a NaN. Sums and maxima over the
// lanes have one order, the same in all tiers: lanes 8 apart, then 4, 2 and 1.

#include "x86.inl"

using F16 = __m512;
using I32 = __v16si;  // as __m512i (of 64-bit lanes) GCC 12 would copy and spill every sum
using Mask = __mmask16;

constexpr int kHalfRows = 4;        // up to so many rows a product fetches every second line
constexpr int kTileRows = 14;       // rows of a product's tile: 28 registers of sums,
constexpr int kTileOutputs = 32;    // 2 of weights and 1 of values

// Attention: queries x tiles of positions, and queries x tiles of pairs of V, that are summed at
// once. A widened tile takes two registers, and so does a query.
#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;  // of BF16, in one instruction
constexpr int kKeyQueries = 6, kKeyTiles = 4;
#else
constexpr bool kMultipliesPairs = false;
constexpr int kKeyQueries = 6, kKeyTiles = 2;
#endif
constexpr int kValueQueries = 6, kWideQueries = 6;

// The low `count` of 16 mask bits.
inline Mask low_bits(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<Mask>((1u << count) - 1);
}

// ---- Memory -----------------------------------------------------------------------------------

inline F16 splat(float value) { return _mm512_set1_ps(value); }
inline I32 splat(int32_t value) { return (I32)_mm512_set1_epi32(value); }
inline I32 indices() {
  return (I32)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline F16 load(const float* from) { return _mm512_loadu_ps(from); }
inline F16 load(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(low_bits(count), from);
}
inline F16 load(const float* from, int64_t count, F16 behind) {
  return _mm512_mask_loadu_ps(behind, low_bits(count), from);
}
inline void store(float* to, F16 x) { _mm512_storeu_ps(to, x); }
inline void store(float* to, F16 x, int64_t count) {
  _mm512_mask_storeu_ps(to, low_bits(count), x);
}
inline void store(int32_t* to, I32 x) { _mm512_storeu_si512(to, (__m512i)x); }

// Into the second cache level.
inline void fetch(const void* line) { _mm_prefetch(line, _MM_HINT_T1); }

// ---- Arithmetic -------------------------------------------------------------------------------

inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline F16 fnma(F16 a, F16 b, F16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
// To the nearest integer, ties to even; |x| < 2^22. A NaN stays one.
inline F16 nearest(F16 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x 2^n for integers n, rounded once; x in [1/2, 2].
inline F16 times_power(F16 x, F16 n) { return _mm512_scalef_ps(x, n); }

inline I32 as_int(F16 x) { return (I32)x; }
inline F16 as_float(I32 x) { return (F16)x; }
inline F16 to_float(I32 x) { return _mm512_cvtepi32_ps((__m512i)x); }
// As `nearest`. The low 16 bits of a NaN are 0.
inline I32 to_int(F16 x) { return (I32)_mm512_cvtps_epi32(x); }
template <int N>
inline I32 shift_left(I32 x) {
  return (I32)_mm512_slli_epi32((__m512i)x, N);
}
template <int N>
inline I32 shift_right(I32 x) {  // zeros come in
  return (I32)_mm512_srli_epi32((__m512i)x, N);
}
template <int N>
inline I32 shift_signed(I32 x) {  // the sign comes in
  return (I32)_mm512_srai_epi32((__m512i)x, N);
}
inline I32 exclusive_or(I32 a, I32 b, I32 c) {
  return (I32)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
inline I32 max(I32 a, I32 b) { return (I32)_mm512_max_epi32((__m512i)a, (__m512i)b); }

// Lane i gets lane i ^ N.
template <int N>
inline F16 exchange(F16 x) {
  if constexpr (N >= 4) return _mm512_shuffle_f32x4(x, x, N == 8 ? 0x4e : 0xb1);
  return _mm512_permute_ps(x, N == 2 ? 0x4e : 0xb1);
}

inline float reduce_max(F16 x) { return _mm512_reduce_max_ps(x); }
inline int32_t reduce_max(I32 x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline float reduce_add(F16 x) { return _mm512_reduce_add_ps(x); }
inline int32_t reduce_add(I32 x) { return _mm512_reduce_add_epi32((__m512i)x); }

// The sum of squares in fp64, where squares of floats are exact.
struct Squares {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();

  inline void add(const float* from, int64_t count) {
    const __mmask16 mask = low_bits(count);
    const __mmask8 upper = static_cast<__mmask8>(mask >> 8);
    const __m512d a = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(static_cast<__mmask8>(mask), from));
    const __m512d b = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(upper, from + 8));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  }
  inline double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

// ---- Masks ------------------------------------------------------------------------------------

inline Mask leading(int64_t count) { return low_bits(count); }
inline Mask equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask greater(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask at_least(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline uint32_t lane_bits(Mask mask) { return mask; }  // bit i for lane i
inline F16 select(Mask mask, F16 yes, F16 no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline I32 select(Mask mask, I32 yes, I32 no) {
  return (I32)_mm512_mask_mov_epi32((__m512i)no, mask, (__m512i)yes);
}

// ---- Words ------------------------------------------------------------------------------------

struct WordProduct {
  I32 high, low;
};
// 64-bit products of unsigned lanes and a factor.
inline WordProduct multiply_words(I32 a, uint32_t factor) {
  const __m512i words = (__m512i)a, m = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(words, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), m);
  return {(I32)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd),
          (I32)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32))};
}

// Lane 4 g + j of rows[i] becomes lane 4 g + i of rows[j].
inline void transpose4(I32* rows) {
  const __m512i r0 = (__m512i)rows[0], r1 = (__m512i)rows[1], r2 = (__m512i)rows[2],
                r3 = (__m512i)rows[3];
  const __m512i a = _mm512_unpacklo_epi32(r0, r1), b = _mm512_unpackhi_epi32(r0, r1);
  const __m512i c = _mm512_unpacklo_epi32(r2, r3), d = _mm512_unpackhi_epi32(r2, r3);
  rows[0] = (I32)_mm512_unpacklo_epi64(a, c);
  rows[1] = (I32)_mm512_unpackhi_epi64(a, c);
  rows[2] = (I32)_mm512_unpacklo_epi64(b, d);
  rows[3] = (I32)_mm512_unpackhi_epi64(b, d);
}

// ---- One side of a product's tile: 16 outputs --------------------------------------------------

using TileF = F16;
using TileI = I32;

inline TileI load_tile(const void* from) { return (I32)_mm512_loadu_si512(from); }
inline TileI load_tile(const void* from, int64_t count) {
  return (I32)_mm512_maskz_loadu_epi32(low_bits(count), from);
}
inline void store_tile(float* to, TileF x) { store(to, x); }
inline TileF splat_tile(float value) { return splat(value); }
inline TileI splat_tile(int32_t value) { return splat(value); }
// even[0], odd[0], even[1] ...: `count` of each.
inline void store_interleaved(float* to, TileF even, TileF odd, int64_t count) {
  const I32 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const I32 high = low + splat(8);
  store(to, _mm512_permutex2var_ps(even, (__m512i)low, odd), 2 * count);
  if (count > 8)
    store(to + 16, _mm512_permutex2var_ps(even, (__m512i)high, odd), 2 * count - 16);
}

// ---- BF16 -------------------------------------------------------------------------------------

inline I32 load_pairs(const uint16_t* from) { return (I32)_mm512_loadu_si512(from); }

#include "bf16.inl"

#ifdef __AVX512BF16__
inline __m256i to_bf16(F16 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// sum + the products of the values of a pair.
inline F16 add_dot(F16 sum, I32 a, I32 b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#else
inline __m256i to_bf16(F16 x) {
  return _mm512_cvtepi32_epi16((__m512i)shift_right<16>(as_int(round_bf16(x))));
}
#endif

// 16 values, rounded to nearest even.
inline void store_bf16(uint16_t* to, F16 x) { _mm256_storeu_si256((__m256i*)to, to_bf16(x)); }
inline void store_bf16(uint16_t* to, F16 x, int64_t count) {
  _mm256_mask_storeu_epi16(to, low_bits(count), to_bf16(x));
}
