// The vocabulary in plain C++: 4 lanes a register, as every 64-bit CPU has them.

typedef float FloatPart __attribute__((vector_size(16)));
typedef int32_t IntPart __attribute__((vector_size(16)));

constexpr int kHalfRows = 1;  // up to so many rows a product fetches every second line
constexpr int kTileRows = 2;  // rows of a product's tile: 8 of 16 registers for sums

constexpr bool kMultipliesPairs = false;
constexpr int kKeyQueries = 2, kKeyTiles = 1;
constexpr int kValueQueries = 2, kWideQueries = 0;

inline FloatPart splat_part(float value) { return FloatPart{value, value, value, value}; }
inline IntPart splat_part(int32_t value) { return IntPart{value, value, value, value}; }
inline void keep([[maybe_unused]] IntPart& x) {
#if defined(__SSE2__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

inline FloatPart fma(FloatPart a, FloatPart b, FloatPart c) { return a * b + c; }  // rounds twice
inline FloatPart select(IntPart mask, FloatPart yes, FloatPart no) {
  return (FloatPart)((mask & (IntPart)yes) | (~mask & (IntPart)no));
}
inline IntPart select(IntPart mask, IntPart yes, IntPart no) { return (mask & yes) | (~mask & no); }
inline FloatPart max(FloatPart a, FloatPart b) { return select((IntPart)(a > b), a, b); }
inline FloatPart min(FloatPart a, FloatPart b) { return select((IntPart)(a < b), a, b); }
// 1.5 2^23 + x has no room for fractions, and the low bits of its pattern are x.
inline FloatPart nearest(FloatPart x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
inline IntPart to_int(FloatPart x) { return (IntPart)(x + 0x1.8p23f) - 0x4b400000; }
template <int N>
inline FloatPart exchange(FloatPart x) {
  return FloatPart{x[0 ^ N], x[1 ^ N], x[2 ^ N], x[3 ^ N]};
}
inline uint32_t lane_bits(IntPart mask) {
  return (mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8);
}

#include "parts.inl"

struct WordProduct {
  I32 high, low;
};
inline WordProduct multiply_words(I32 a, uint32_t factor) {
  int32_t word[16], high[16], low[16];
  store(word, a);
  for (int i = 0; i < 16; ++i) {
    const uint64_t product = uint64_t{static_cast<uint32_t>(word[i])} * factor;
    high[i] = static_cast<int32_t>(product >> 32);
    low[i] = static_cast<int32_t>(product);
  }
  return {load_as<I32>(high), load_as<I32>(low)};
}

inline void transpose4(I32* rows) {
  int32_t from[4][16], to[4][16];
  for (int i = 0; i < 4; ++i) store(from[i], rows[i]);
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 16; ++lane) to[lane % 4][lane / 4 * 4 + i] = from[i][lane];
  for (int i = 0; i < 4; ++i) rows[i] = load_as<I32>(to[i]);
}
