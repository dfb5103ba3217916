// W8A8: INT8 weights (one scale a row) times INT8 activations (one scale a token). What all tiers
// share; the product itself is in linear_w8a8_*.inl.
//
// out[m, n] = float(sum_k w[n, k] a[m, k]) * weight_scale[n] * row_scale[m] (+ bias[n]), the sum
// exact in 32 bits. Codes of weights may span -128..127, those of activations -127..127: 65536
// inputs reach 1.07e9 < 2^31 at most. So all tiers give equal bits.

// What a row is multiplied by to become codes; `scale` takes them back.
template <bool kNorm>
static float code_factor(const RowSource<kNorm>& row, int64_t count, float* scale) {
  const float absmax = row.absmax(count);
  *scale = absmax / 127.0f;
  return absmax > 0 ? 127.0f / absmax : 0.0f;
}

// The clamp only matters where 127 / absmax overflowed; the low half of a NaN's code is 0.
[[gnu::always_inline]] inline I32 codes_of(F16 x, float factor) {
  return to_int(min(splat(127.0f), max(splat(-127.0f), x * splat(factor))));
}

// `Product` has store_codes (16 codes to their words) and kSurplus: where a row's sum starts, in
// sums of the row's codes.
template <class Product>
struct W8A8Rows : Plain<Product> {
  using Element = int8_t;

  // Outputs n..n+15.
  static inline F16 scaled(F16 sum, const float* scale, int64_t n, float row_scale) {
    return sum * load(scale + n) * splat(row_scale);
  }

  template <bool kNorm>
  static float factor(const RowSource<kNorm>& row, int64_t count, float* scale) {
    return code_factor(row, count, scale);
  }

  // Codes of the inputs begin..end-1 of row r of a tile, `stride` words a step; returns where their
  // sums start.
  template <bool kNorm>
  static int32_t encode(const RowSource<kNorm>& row, float factor, int64_t begin, int64_t end,
                        int32_t* values, int64_t r, int64_t stride) {
    I32 sum = splat(0);
    each_group(begin, end, [&](int64_t k, int64_t count) {
      const I32 codes = codes_of(row.values(k, count), factor);
      if constexpr (Product::kSurplus != 0) sum = sum + codes;
      Product::store_codes(codes, values + k / Product::kStepValues * stride + r, stride);
    });
    return Product::kSurplus * reduce_add(sum);
  }
};
