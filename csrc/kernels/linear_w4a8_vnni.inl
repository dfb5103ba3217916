// The bytes of W4A8 by vpdpbusd (AVX-512 VNNI): unsigned codes, signed activations, 32-bit sums
// that start at the zero point's share.

using Int4Value = TileI;
using Int4Total = TileI;  // minus the row's sum over the group, in both halves of each lane
struct Int4Zeros {
  TileI left, right;  // in the half of a lane where the words have them
};

inline Int4Value int4_value(const int32_t* at) { return splat_tile(*at); }
inline Int4Total int4_total(const int32_t* at) { return splat_tile(*at); }
inline int32_t int4_total_word(int32_t total) { return (total & 0xffff) | total << 16; }
inline Int4Zeros int4_zeros(TileI words) {
  return {words & splat_tile(0xf), words & splat_tile(0xf0000)};
}

template <bool kLong>
struct Int4Sum {
  TileI sum;

  inline void start(TileI zero, Int4Total total) {
    sum = (TileI)_mm512_madd_epi16((__m512i)zero, (__m512i)total);
  }
  inline void add(TileI codes, Int4Value value) {
    sum = (TileI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)value);
  }
  inline void next_run() {}
  inline TileF finish(TileI, Int4Total) const { return to_float(sum); }
};

// 16 codes -> 4 words.
inline void store_bytes(I32 codes, int32_t* values, int64_t stride) {
  W8A8::store_codes(codes, values, stride);
}
