// BF16 weights times BF16 activations, summed in fp32. What all tiers share; the product itself is
// in linear_bf16_*.inl.
//
// The fp32 input is rounded to nearest even. Each output has one accumulator that takes the
// products k ascending: the same instructions for any number of rows, tile or thread, so a row's
// bits depend on nothing beside it.

template <class Product>
struct Bf16Rows : Plain<Product> {
  using Element = uint16_t;

  static inline F16 scaled(F16 sum, const float*, int64_t, float) { return sum; }

  template <bool kNorm>
  static float factor(const RowSource<kNorm>&, int64_t, float* scale) {
    return *scale = 1.0f;
  }

  // The inputs begin..end-1 of row r of a tile, `stride` words a step.
  template <bool kNorm>
  static int32_t encode(const RowSource<kNorm>& row, float, int64_t begin, int64_t end,
                        int32_t* values, int64_t r, int64_t stride) {
    each_group(begin, end, [&](int64_t k, int64_t count) {
      Product::store_values(row.values(k, count),
                            values + k / Product::kStepValues * stride + r, stride);
    });
    return 0;
  }
};
