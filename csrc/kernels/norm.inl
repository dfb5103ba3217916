// What a linear layer reads: a row as it is, or its RMSNorm.
//
// RMSNorm: (x * r) * weight with r = 1 / sqrt(mean(x^2) + eps). Squares of floats are exact in
// fp64; they are summed there and the mean is rounded to fp32 once, so r does not depend on the
// order of the sum (but for a tie in 10^8 rows). The normalised row is never stored: it is computed
// again in each pass over the row (absmax, codes), which costs two multiplications a value and
// stays in registers. Measured, avx512 on Zen 4: 0.35 cycles a value for the sum of squares, 0.17
// for the absmax, 0.5 for codes or BF16; 8 rows of 896 take 2 us.

// body(k, count) for the values k..k+15 of begin..end-1; count is 16 but for a ragged end.
template <class Body>
[[gnu::always_inline]] inline void each_group(int64_t begin, int64_t end, const Body& body) {
  int64_t k = begin;
  for (; k + 16 <= end; k += 16) body(k, int64_t{16});
  if (k < end) body(k, end - k);
}

static float inverse_rms(const float* x, int64_t count, float eps) {
  Squares squares;
  each_group(0, count, [&](int64_t k, int64_t some) { squares.add(x + k, some); });
  const double mean = squares.total() / static_cast<double>(count);
  return 1.0f / __builtin_sqrtf(static_cast<float>(mean) + eps);
}

template <bool kNorm>
struct RowSource {
  const float* x;
  const float* norm;  // RMSNorm weight
  float inverse;      // 1 / rms

  // Values k..k+15, zeros from `count` on.
  [[gnu::always_inline]] inline F16 values(int64_t k, int64_t count) const {
    const F16 found = load(x + k, count);
    if constexpr (!kNorm) return found;
    return found * splat(inverse) * load(norm + k, count);
  }

  // Compared as integers, magnitudes keep their order and a NaN is above infinity: it is not lost.
  float absmax(int64_t count) const {
    I32 most = splat(0);
    each_group(0, count, [&](int64_t k, int64_t some) {
      most = max(most, as_int(values(k, some)) & splat(0x7fffffff));
    });
    const int32_t bits = reduce_max(most);
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    return magnitude;
  }
};

// x += rmsnorm(y), each [rows, columns].
void norm_add(const float* y, int64_t rows, int64_t columns, const float* norm, float eps,
              float* x, int32_t threads) {
  Queue queue;
  parallel(threads, [&](int32_t) {
    queue.each(rows, [&](int64_t m) {
      const float* from = y + m * columns;
      float* to = x + m * columns;
      const RowSource<true> row{from, norm, inverse_rms(from, columns, eps)};
      each_group(0, columns, [&](int64_t k, int64_t some) {
        store(to + k, load(to + k, some) + row.values(k, some), some);
      });
    });
  });
}
