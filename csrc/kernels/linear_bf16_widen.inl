// BF16 by widening to fp32: one input a step, a fused multiply-add each (without FMA instructions
// a product and a sum).
//
// Layout. Steps of 1 input: a word holds two outputs, the left side's below and the right side's
// above, so that a shift widens one side and a mask the other. Activations are rounded to BF16 but
// lie as fp32, ready to be broadcast. Two multiply-adds start a cycle (Zen 4, 8 lanes each, or one
// of 16): 59 GMAC/s a core at 3.7 GHz.

struct Bf16 : Bf16Rows<Bf16> {
  using Sum = TileF;
  using Value = TileF;
  struct Weights {
    TileF left, right;
  };
  static constexpr int64_t kStepValues = 1, kStepBytes = 2 * kTileOutputs;

  static inline Weights weights(const char* at) {
    const TileI pairs = load_tile(at);
    return {as_float(shift_left<16>(pairs)),
            as_float(pairs & splat_tile(int32_t(0xffff0000)))};
  }
  static inline Value value(const int32_t* at) {
    float value;
    __builtin_memcpy(&value, at, 4);
    return splat_tile(value);
  }
  static inline Sum start(int32_t) { return splat_tile(0.0f); }
  static inline Sum multiply(Sum sum, TileF weight, Value value) {
    return fma(weight, value, sum);
  }
  static inline void store_sums(float* to, Sum sum) { store_tile(to, sum); }

  // 16 values of one output -> their place in 16 steps.
  static inline void pack_group(const uint16_t* row, int64_t count, int64_t output, char* steps) {
    const int64_t side = output / (kTileOutputs / 2), word = output % (kTileOutputs / 2);
    auto* target = reinterpret_cast<uint16_t*>(steps) + 2 * word + side;
    for (int64_t k = 0; k < 16; ++k) target[k * kTileOutputs] = k < count ? row[k] : 0;
  }
  static inline void store_values(F16 x, int32_t* values, int64_t stride) {
    int32_t words[16];
    store(words, as_int(round_bf16(x)));
    for (int64_t k = 0; k < 16; ++k) values[k * stride] = words[k];
  }
};
