// W8A8 in plain C++ on vectors of 8 x 16 bits. Two products of codes, at most 128 * 127 each, fit
// 16 bits together, so they are summed there and widened once: the integers of the other tiers.
//
// Layout. Steps of 2 inputs: 16 outputs x 2 bytes. 8 outputs are the 8 lanes of a register: the low
// bytes belong to the even input, the high ones to the odd one. Even lanes are outputs 0-3, odd
// lanes 4-7, so that sums widen by shifts as well.

struct W8A8 : W8A8Rows<W8A8> {
  typedef int16_t Shorts __attribute__((vector_size(16)));
  using Sum = TileI;
  struct Value {
    Shorts even, odd;
  };
  struct Weights {
    Value left, right;
  };
  static constexpr int64_t kStepValues = 2, kStepBytes = 32, kSurplus = 0;

  static inline Weights weights(const char* at) {
    const auto widen = [at](int64_t offset) -> Value {
      const Shorts bytes = load_as<Shorts>(at + offset);
      return {(bytes << 8) >> 8, bytes >> 8};
    };
    return {widen(0), widen(16)};
  }
  static inline Value value(const int32_t* at) {
    const int16_t even = static_cast<int16_t>(*at), odd = static_cast<int16_t>(*at >> 16);
    return {Shorts{} + even, Shorts{} + odd};
  }
  static inline Sum start(int32_t) { return splat_tile(0); }
  static inline Sum multiply(Sum sum, const Value& weight, const Value& value) {
    const IntPart both = (IntPart)(weight.even * value.even + weight.odd * value.odd);
    sum = {sum.low + ((both << 16) >> 16), sum.high + (both >> 16)};
    keep(sum.low);
    keep(sum.high);
    return sum;
  }
  static inline void store_sums(float* to, Sum sum) { store_tile(to, to_float(sum)); }

  // 16 codes of one output -> their place in 8 steps.
  static inline void pack_group(const int8_t* row, int64_t count, int64_t output, char* steps) {
    const int64_t lane = output / 8 * 8 + output % 4 * 2 + output / 4 % 2;
    for (int64_t k = 0; k < 16; ++k)
      steps[k / 2 * kStepBytes + 2 * lane + k % 2] = k < count ? row[k] : 0;
  }
  static inline void store_codes(I32 codes, int32_t* values, int64_t stride) {
    int32_t word[16];
    store(word, codes);
    for (int64_t k = 0; k < 8; ++k)
      values[k * stride] = (word[2 * k] & 0xffff) | word[2 * k + 1] << 16;
  }
};
