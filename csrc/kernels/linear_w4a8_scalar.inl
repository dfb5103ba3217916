// The bytes of W4A8 in plain C++ on vectors of 8 x 16 bits. Two products of a code and an
// activation are at most 2 * 15 * 127 = 3810 together: 8 steps of them fit 16 bits, 32 inputs, so
// only every eighth sum is widened.

typedef int16_t Shorts __attribute__((vector_size(16)));

constexpr int kInt4Rows = kTileRows, kInt4HalfRows = 1;
constexpr int64_t kTotalWords = 1;  // minus the row's sum over the group

struct Int4Value {
  Shorts even, odd;  // inputs 0 and 2, 1 and 3
};
inline Int4Value int4_value(const int32_t* at) {
  const Shorts pairs = (Shorts)splat_part(*at);
  return {(pairs << 8) >> 8, pairs >> 8};
}
template <int kShift>
inline TileI int4_zeros(TileI words) {
  return shift_right<kShift>(words) & splat_tile(0xf);
}
inline void store_total(int32_t total, int32_t* at) { *at = -total; }

template <bool kLong>
struct Int4Sum {
  TileI narrow;  // pairs of 16 bits

  inline void start(TileI, const int32_t*) { narrow = splat_tile(0); }
  inline void add(TileI codes, const Int4Value& value) {
    narrow = {add_pairs(narrow.low, codes.low, value), add_pairs(narrow.high, codes.high, value)};
    keep(narrow.low);
    keep(narrow.high);
  }
  inline TileI widened() const {
    return shift_signed<16>(shift_left<16>(narrow)) + shift_signed<16>(narrow);
  }
  // Integers below 2^24: exact as floats, and quicker to multiply.
  static inline TileF share(TileI zeros, const int32_t* totals) {
    return to_float(zeros) * splat_tile(static_cast<float>(*totals));
  }
  inline TileF finish(TileI zeros, const int32_t* totals) const {
    return to_float(widened()) + share(zeros, totals);
  }

 private:
  static inline IntPart add_pairs(IntPart sum, IntPart codes, const Int4Value& value) {
    const Shorts pairs = (Shorts)codes;  // codes are below 128: both shifts give them unsigned
    const Shorts even = pairs & 0xf, odd = pairs >> 8;
    return (IntPart)((Shorts)sum + (even * value.even + odd * value.odd));
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
    return to_float(wide + widened()) + share(zeros, totals);
  }
};

// 16 codes -> 4 words.
inline void store_bytes(I32 codes, int32_t* values, int64_t stride) {
  int32_t code[16];
  store(code, codes);
  for (int64_t i = 0; i < 4; ++i) {
    uint32_t word = 0;
    for (int64_t k = 4; k-- > 0;)
      word = word << 8 | (static_cast<uint32_t>(code[4 * i + k]) & 0xff);
    values[i * stride] = static_cast<int32_t>(word);
  }
}
