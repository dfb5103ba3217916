// The bytes of W4A8 by vpmaddubsw (AVX2): two products of an unsigned code and an activation, at
// most 2 * 15 * 127 = 3810 together, in 16 bits. 8 steps fit there, 32 inputs, so only every eighth
// sum is widened.

constexpr int kInt4Rows = kTileRows, kInt4HalfRows = 1;
constexpr int64_t kTotalWords = 1;  // minus the row's sum over the group
using Int4Value = __m256i;

inline Int4Value int4_value(const int32_t* at) { return _mm256_set1_epi32(*at); }
template <int kShift>
inline TileI int4_zeros(TileI words) {
  return shift_right<kShift>(words) & splat_tile(0xf);
}
inline void store_total(int32_t total, int32_t* at) { *at = -total & 0xffff; }

template <bool kLong>
struct Int4Sum {
  TileI narrow;  // pairs of 16 bits

  inline void start(TileI, const int32_t*) { narrow = splat_tile(0); }
  inline void add(TileI codes, Int4Value value) {
    narrow = (TileI)_mm256_add_epi16((__m256i)narrow,
                                     _mm256_maddubs_epi16((__m256i)codes, value));
    keep(narrow);
  }
  inline TileI widened() const {
    return (TileI)_mm256_madd_epi16((__m256i)narrow, _mm256_set1_epi16(1));
  }
  static inline TileI share(TileI zeros, const int32_t* totals) {
    return (TileI)_mm256_madd_epi16((__m256i)zeros, _mm256_set1_epi32(*totals));
  }
  inline TileF finish(TileI zeros, const int32_t* totals) const {
    return to_float(widened() + share(zeros, totals));
  }
};

template <>
struct Int4Sum<true> : Int4Sum<false> {
  TileI wide;

  inline void start(TileI zeros, const int32_t* totals) {
    Int4Sum<false>::start(zeros, totals);
    wide = splat_tile(0);
  }
  inline void next_run() {
    wide = wide + widened();
    narrow = splat_tile(0);
  }
  inline TileF finish(TileI zeros, const int32_t* totals) const {
    return to_float(wide + widened() + share(zeros, totals));
  }
};

// 16 codes -> 4 words.
inline void store_bytes(I32 codes, int32_t* values, int64_t stride) {
  const __m256i pairs = _mm256_packs_epi32((__m256i)codes.low, (__m256i)codes.high);
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  store_strided(bytes, values, stride);
}
