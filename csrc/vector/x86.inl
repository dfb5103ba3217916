// What the x86 tiers' products share.

// Four 32-bit words, `stride` words apart.
inline void store_strided(__m128i words, int32_t* target, int64_t stride) {
  target[0] = _mm_cvtsi128_si32(words);
  target[stride] = _mm_extract_epi32(words, 1);
  target[2 * stride] = _mm_extract_epi32(words, 2);
  target[3 * stride] = _mm_extract_epi32(words, 3);
}
