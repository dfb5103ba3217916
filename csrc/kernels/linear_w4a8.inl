// W4A8: 4-bit weights, (code - zero) * scale with a scale and a zero point for each group of 32, 64
// or 128 inputs, times INT8 activations (one scale a token). What all tiers share; the product of
// bytes is in linear_w4a8_*.inl.
//
// I[m, n, g] = sum_k w[n, k] a[m, k] - zero[n, g] sum_k a[m, k], k in group g: exact, below 2^18.
// out[m, n] = (sum_g float(I[m, n, g]) * scale[n, g]) * row_scale[m] (+ bias[n]), g ascending.
// A scale has 5 significant bits, so its product with I is exact in fp32 and only the additions
// round: fused multiply-adds, or not, give equal bits on all tiers.
//
// Layout. One stream: for each group the scales and zero points of a part's outputs, 16 bits each,
// then the codes, in steps of 4 inputs. A byte holds codes of two outputs, the left side's below
// and the right side's above: a load gives both registers of a step by `& 15` and `>> 4`. A group
// of 32 takes 4.5 bits a weight.
//
// A row's unit is its total over the group, in the form that the product wants it, then the codes.
//
// Measured, passes of a 0.5B model with its head, groups of 32, 128 tokens of context, two cores of
// a Zen 4 server: time of W4A8 / time of W8A8 for
//     rows                  1     2     4     6     8    16    32
//     avx512 at 64 GB/s  0.66  0.69  0.81  1.01  1.16  1.19  1.25
//     avx2 at 58 GB/s    0.70  0.73  0.70  0.71  0.71  0.69  0.68
// 0.56 is the ratio of the bytes. Up to 4 rows memory is the limit, from 6 on the multipliers are:
// they take 16 dot products and 2 multiply-adds a row for 32 x 32 weights. In avx2 16 bits hold the
// sums of a group, so that bytes are multiplied where W8A8 must widen them first.

constexpr int64_t kRunValues = 32;                // inputs whose sums a product may keep narrow
constexpr int64_t kWordBytes = 2 * kTileOutputs;  // scales and zero points of a part's group

// Sums of one group: R rows x kTileOutputs outputs. `zeros`: the zero points' lanes. `totals`: what
// a product keeps of each row's sum over the group, kTotalWords a row.
template <bool kLong, int R>
struct GroupSums {
  Int4Sum<kLong> left, right;
  GroupSums<kLong, R - 1> rest;

  [[gnu::always_inline]] inline void start(TileI words, const int32_t* totals) {
    left.start(int4_zeros<0>(words), totals);
    right.start(int4_zeros<16>(words), totals);
    rest.start(words, totals + kTotalWords);
  }
  [[gnu::always_inline]] inline void add(TileI w_left, TileI w_right, const int32_t* values) {
    const Int4Value value = int4_value(values);
    left.add(w_left, value);
    right.add(w_right, value);
    rest.add(w_left, w_right, values + 1);
  }
  [[gnu::always_inline]] inline void next_run() {
    left.next_run();
    right.next_run();
    rest.next_run();
  }
};

template <bool kLong>
struct GroupSums<kLong, 0> {
  inline void start(TileI, const int32_t*) {}
  inline void add(TileI, TileI, const int32_t*) {}
  inline void next_run() {}
};

// The words of a group: scale << 4 | zero without the scale's sign and its 19 last bits of
// mantissa; the left outputs' below, the right outputs' above.
static inline TileF left_scales(TileI words) {
  return as_float(shift_left<15>(words & splat_tile(0xfff0)));
}
static inline TileF right_scales(TileI words) {
  return as_float(shift_right<1>(words) & splat_tile(0x7ff80000));
}

// Sums over groups.
template <int R>
struct Totals {
  TileF left, right;
  Totals<R - 1> rest;

  [[gnu::always_inline]] inline void begin() {
    left = right = splat_tile(0.0f);
    rest.begin();
  }
  template <bool kLong>
  [[gnu::always_inline]] inline void add(const GroupSums<kLong, R>& group, TileI words,
                                         const int32_t* totals) {
    left = fma(group.left.finish(int4_zeros<0>(words), totals), left_scales(words), left);
    right = fma(group.right.finish(int4_zeros<16>(words), totals), right_scales(words), right);
    rest.add(group.rest, words, totals + kTotalWords);
  }
  [[gnu::always_inline]] inline void store(float* sums) const {
    store_tile(sums, left);
    store_tile(sums + kTileOutputs / 2, right);
    rest.store(sums + kBlock);
  }
};

template <>
struct Totals<0> {
  inline void begin() {}
  template <bool kLong>
  inline void add(const GroupSums<kLong, 0>&, TileI, const int32_t*) {}
  inline void store(float*) const {}
};

// `values`: for each group the rows' totals, then their codes, [steps][R].
template <int kSize, int R>
static void multiply_groups(const char* weight, int64_t bytes, const int32_t* values,
                            const int32_t*, Ahead ahead, float* sums) {
  constexpr int64_t kStepBytes = 2 * kTileOutputs, kRunBytes = kRunValues / 4 * kStepBytes;
  Totals<R> tile;
  tile.begin();
  const char* const end = weight + bytes;
  do {
    const char* const words = weight;
    const int32_t* const totals = values;
    GroupSums<(kSize > kRunValues), R> group;
    group.start(load_tile(words), totals);
    fetch(ahead.next);
    ahead.next += ahead.stride * kWordBytes / kTurnBytes;
    weight += kWordBytes;
    values += R * kTotalWords;
    for (int run = 0; run < kSize / kRunValues; ++run) {
      if constexpr (kSize > kRunValues)
        if (run > 0) group.next_run();
#pragma GCC unroll 4
      for (int turn = 0; turn < kRunBytes / kTurnBytes; ++turn) {
        fetch(ahead.next);
        fetch(ahead.next + ahead.second);
        ahead.next += ahead.stride;
#pragma GCC unroll 4
        for (int i = 0; i < kTurnBytes / kStepBytes; ++i) {
          const TileI codes = load_tile(weight), low = splat_tile(0x0f0f0f0f);
          group.add(codes & low, shift_right<4>(codes) & low, values);
          weight += kStepBytes;
          values += R;
        }
      }
    }
    tile.add(group, load_tile(words), totals);
  } while (weight != end);
  tile.store(sums);
}

template <int kSize>
struct W4A8 {
  static constexpr int64_t kUnitValues = kSize;  // a group
  static constexpr int kRows = kInt4Rows;
  // Rows that do not stay in L1 make the hardware's prefetcher lose the weights: 2 rows of 4864
  // inputs took 43 ms for 10^9 weights, 24 with every line fetched.
  static bool leaves_half(int64_t rows, int64_t words) {
    return rows <= kInt4HalfRows && rows * words * 4 <= 16 << 10;
  }
  static constexpr int64_t unit_words() { return kTotalWords + kSize / 4; }
  static constexpr int64_t unit_bytes() { return kWordBytes + kSize * kTileOutputs / 2; }

  template <int R>
  static constexpr auto tile = multiply_groups<kSize, R>;

  static inline F16 scaled(F16 sum, const float*, int64_t, float row_scale) {
    return sum * splat(row_scale);
  }

  template <bool kNorm>
  static float factor(const RowSource<kNorm>& row, int64_t count, float* scale) {
    return code_factor(row, count, scale);
  }

  // Groups of codes at `values`, each behind its total.
  template <bool kNorm>
  static int32_t encode(const RowSource<kNorm>& row, float factor, int64_t begin, int64_t end,
                        int32_t* values, int64_t r, int64_t stride) {
    for (int64_t k = begin; k < end; k += kSize) {
      int32_t* const unit = values + k / kSize * unit_words() * stride;
      int32_t* word = unit + stride * kTotalWords + r;
      I32 sum = splat(0);
      each_group(k, k + kSize, [&](int64_t i, int64_t count) {
        const I32 codes = codes_of(row.values(i, count), factor);
        sum = sum + codes;
        store_bytes(codes, word, stride);
        word += 4 * stride;
      });
      store_total(reduce_add(sum), unit + r * kTotalWords);
    }
    return 0;
  }

  // A group of a block of weights that begins at row n.
  static void pack_unit(const quasar_weight& weight, int64_t n, int64_t k, char* unit,
                        int64_t part_bytes) {
    constexpr int64_t half = kTileOutputs / 2;
    for (int64_t part = 0; part < kParts; ++part, n += kTileOutputs, unit += part_bytes)
      for (int64_t i = 0; i < half; ++i)
        pack_pair(Output(weight, n + i, k), Output(weight, n + half + i, k), i, unit);
  }

 private:
  // What a group of one output is packed of; zeros for a row behind the last.
  struct Output {
    const uint8_t* codes;
    int32_t word;

    Output(const quasar_weight& weight, int64_t row, int64_t k) {
      static const uint8_t zeros[kSize] = {};
      codes = zeros, word = 0;
      if (row >= weight.out_features) return;
      const int64_t group = (row * weight.in_features + k) / kSize;
      codes = static_cast<const uint8_t*>(weight.values) + row * weight.in_features + k;
      int32_t bits;
      __builtin_memcpy(&bits, weight.scale + group, 4);
      word = bits >> 19 << 4 | weight.zero[group];
    }
  };

  // Outputs `i` of the left and of the right side.
  static void pack_pair(const Output& left, const Output& right, int64_t i, char* unit) {
    const int32_t words = left.word | right.word << 16;
    __builtin_memcpy(unit + 4 * i, &words, 4);
    uint8_t both[kSize];
    for (int64_t k = 0; k < kSize; ++k)
      both[k] = static_cast<uint8_t>(left.codes[k] | right.codes[k] << 4);
    for (int64_t k = 0; k < kSize; k += 4)
      __builtin_memcpy(unit + kWordBytes + (k / 4 * kTileOutputs / 2 + i) * 4, both + k, 4);
  }
};
