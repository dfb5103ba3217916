// BF16 in the words of the vocabulary. A pair is two values in 32 bits, the even one below.

struct EvenOdd {
  TileF even, odd;
};
inline EvenOdd widen(TileI pairs) {
  return {as_float(shift_left<16>(pairs)), as_float(pairs & splat_tile(int32_t(0xffff0000)))};
}

// Rounded to the nearest BF16, ties to even, as fp32; a NaN stays one.
inline F16 round_bf16(F16 x) {
  const I32 word = as_int(x), odd = shift_right<16>(word) & splat(1);
  const F16 rounded = as_float((word + splat(0x7fff) + odd) & splat(int32_t(0xffff0000)));
  return select(equal(x, x), rounded, splat(__builtin_nanf("")));
}
