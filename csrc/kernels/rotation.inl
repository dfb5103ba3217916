// Block Hadamard rotation of a row before it is rounded to INT8 (QuaRot, arXiv 2404.00456).
//
// y = x H for every block of B inputs, H = B^-1/2 times Sylvester's matrix of +1 and -1: an outlier
// spreads over its block, so the largest value and with it the step of the codes shrink. The weight
// holds W H, and (x H)(W H)^T = x W^T. B is a power of two from 16 on that divides the row.
//
// log2(B) stages of sums and differences of values 2^s apart, s ascending, after a multiplication by
// B^-1/2: one order in all tiers, so all give equal bits. Four stages stay within a register of 16
// lanes, where x[i ^ 2^s] is exchanged and half of the lanes change their sign.
//
// Measured, one thread, a row of 4,864 in blocks of 256: 0.75 us in avx512, 0.97 in avx2, 1.7 in
// plain C++. A W8A8 product of 896 x 4,864 takes up to 5 % longer with it, at 1, 6 and 16 rows.

template <int N>
struct Butterfly {
  F16 signs;  // -1 in lanes whose index has the bit N

  Butterfly() {
    constexpr int shift = N == 1 ? 31 : N == 2 ? 30 : N == 4 ? 29 : 28;
    signs = as_float(as_int(splat(1.0f)) | shift_left<shift>(indices() & splat(N)));
  }
  [[gnu::always_inline]] inline F16 operator()(F16 x) const {
    return fma(x, signs, exchange<N>(x));
  }
};

// Row m of [rows, count] -> `to`, rotated.
template <bool kNorm>
static void rotate_row(const RowSource<kNorm>& row, int64_t count, int64_t block, float* to) {
  const Butterfly<1> one;
  const Butterfly<2> two;
  const Butterfly<4> four;
  const Butterfly<8> eight;
  const F16 factor = splat(1.0f / __builtin_sqrtf(static_cast<float>(block)));
  for (int64_t begin = 0; begin < count; begin += block) {
    const int64_t end = begin + block;
    for (int64_t k = begin; k < end; k += 16)
      store(to + k, eight(four(two(one(row.values(k, 16) * factor)))));
    for (int64_t half = 16; half < block; half *= 2)
      for (int64_t low = begin; low < end; low += 2 * half)
        for (int64_t k = low; k < low + half; k += 16) {
          const F16 a = load(to + k), b = load(to + k + half);
          store(to + k, a + b);
          store(to + k + half, a - b);
        }
  }
}
