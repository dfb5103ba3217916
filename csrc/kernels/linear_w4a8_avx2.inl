// The bytes of W4A8 by vpmaddubsw (AVX2): two products of an unsigned code and an activation, at
// most 2 * 15 * 127 = 3810 together, in 16 bits. 8 steps fit there, 32 inputs, so only every eighth
// sum is widened.

using Int4Value = __m256i;
using Int4Total = __m256i;  // minus the row's sum over the group, in both halves of each lane
struct Int4Zeros {
  TileI left, right;  // in the half of a lane where the words have them
};

inline Int4Value int4_value(const int32_t* at) { return _mm256_set1_epi32(*at); }
inline Int4Total int4_total(const int32_t* at) { return _mm256_set1_epi32(*at); }
inline int32_t int4_total_word(int32_t total) { return (total & 0xffff) | total << 16; }
inline Int4Zeros int4_zeros(TileI words) {
  return {words & splat_tile(0xf), words & splat_tile(0xf0000)};
}

template <bool kLong>
struct Int4Sum {
  TileI narrow;  // pairs of 16 bits

  inline void start(TileI, Int4Total) { narrow = splat_tile(0); }
  inline void add(TileI codes, Int4Value value) {
    narrow = (TileI)_mm256_add_epi16((__m256i)narrow,
                                     _mm256_maddubs_epi16((__m256i)codes, value));
    keep(narrow);
  }
  inline TileI widened() const {
    return (TileI)_mm256_madd_epi16((__m256i)narrow, _mm256_set1_epi16(1));
  }
  inline TileF finish(TileI zero, Int4Total total) const {
    return to_float(widened() + (TileI)_mm256_madd_epi16((__m256i)zero, total));
  }
};

template <>
struct Int4Sum<true> : Int4Sum<false> {
  TileI wide;

  inline void start(TileI zero, Int4Total total) {
    Int4Sum<false>::start(zero, total);
    wide = splat_tile(0);
  }
  inline void next_run() {
    wide = wide + widened();
    narrow = splat_tile(0);
  }
  inline TileF finish(TileI zero, Int4Total total) const {
    return to_float(wide + widened() + (TileI)_mm256_madd_epi16((__m256i)zero, total));
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
