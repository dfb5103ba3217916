// The bytes of W4A8 by vpdpbusd (AVX-512 VNNI): unsigned codes times signed activations.
//
// A sum starts at what the zero point takes from it, -zero * sum_k a[m, k]. The multipliers are
// busy, so that is not multiplied but looked up: a row holds the products of all 16 zero points,
// and vpermd reads no more than 4 bits of a lane.

constexpr int kInt4Rows = 7;  // 14 registers of group sums and 14 of sums over groups
constexpr int kInt4HalfRows = 3;
constexpr int64_t kTotalWords = 16;
using Int4Value = TileI;

inline Int4Value int4_value(const int32_t* at) { return splat_tile(*at); }
template <int kShift>
inline TileI int4_zeros(TileI words) {
  if constexpr (kShift == 0) return words;
  return shift_right<kShift>(words);
}
inline void store_total(int32_t total, int32_t* at) { store(at, indices() * splat(-total)); }

template <bool kLong>
struct Int4Sum {
  TileI sum;

  inline void start(TileI zeros, const int32_t* totals) {
    sum = (TileI)_mm512_permutexvar_epi32((__m512i)zeros, _mm512_loadu_si512(totals));
  }
  inline void add(TileI codes, Int4Value value) {
    sum = (TileI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)value);
  }
  inline void next_run() {}
  inline TileF finish(TileI, const int32_t*) const { return to_float(sum); }
};

// 16 codes -> 4 words.
inline void store_bytes(I32 codes, int32_t* values, int64_t stride) {
  W8A8::store_codes(codes, values, stride);
}
