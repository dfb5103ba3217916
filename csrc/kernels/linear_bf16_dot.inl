// BF16 by vdpbf16ps: two inputs a step. The instruction takes denormals for zero and rounds to
// nearest even after each of its two additions.
//
// Layout. Steps of 2 inputs: 32 outputs x 2 values = two registers, outputs 0-15 and 16-31.
// One instruction makes 32 multiply-adds and one starts every cycle (Zen 4); its 6 cycles of
// latency do not show, as a step's 128 bytes take 14 to 26 cycles to arrive.

struct Bf16 : Bf16Rows<Bf16> {
  using Sum = F16;
  using Value = I32;
  struct Weights {
    I32 left, right;
  };
  static constexpr int64_t kStepValues = 2, kStepBytes = 128;

  static inline Weights weights(const char* at) {
    return {(I32)_mm512_load_si512(at), (I32)_mm512_load_si512(at + 64)};
  }
  static inline Value value(const int32_t* at) { return splat(*at); }
  static inline Sum start(int32_t) { return splat(0.0f); }
  static inline Sum multiply(Sum sum, I32 weight, Value values) {
    return add_dot(sum, weight, values);
  }
  static inline void store_sums(float* to, Sum sum) { store(to, sum); }

  // 16 values of one output -> their place in 8 steps.
  static inline void pack_group(const uint16_t* row, int64_t count, int64_t output, char* steps) {
    store_halves(_mm256_maskz_loadu_epi16(low_bits(count), row), (int32_t*)steps + output, 32);
  }
  static inline void store_values(F16 x, int32_t* values, int64_t stride) {
    store_halves(to_bf16(x), values, stride);
  }

 private:
  static inline void store_halves(__m256i pairs, int32_t* target, int64_t stride) {
    store_strided(_mm256_castsi256_si128(pairs), target, stride);
    store_strided(_mm256_extracti128_si256(pairs, 1), target + 4 * stride, stride);
  }
};
