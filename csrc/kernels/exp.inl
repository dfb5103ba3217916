// e^x for 16 floats, shared by the SiLU of the gated product and the softmax of attention.
//
// e^x = 2^n e^r with n = round(x / ln 2) and r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2]. ln 2 is split
// into high + low, so r is good to the last bit. e^r is 1 + r + r^2 q(r), q of degree 4, fitted for
// the least relative error (3.1e-9, 1/20 of a rounding). Measured against fp64 over the floats of
// [-87.3, 88.7]: at most 1.01 ulp.
//
// The argument is held to [-104, 88.722], so the result is never infinite: e^x is 3.4e38 for large
// x and exactly 0 below -104, -infinity included (results under 1.2e-38 are denormal). A NaN stays
// a NaN.

static inline __m512 exp_ps(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // max and min return their second operand for NaN
  x = _mm512_min_ps(_mm512_set1_ps(88.722f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e430p-1f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-0x1.05c610p-29f), r);
  __m512 q = _mm512_set1_ps(0x1.6a2434p-10f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.1239e2p-7f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.5558f2p-5f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.555492p-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.fffffcp-2f));
  const __m512 tail = _mm512_fmadd_ps(_mm512_mul_ps(r, r), q, r);
  return _mm512_scalef_ps(_mm512_add_ps(tail, _mm512_set1_ps(1.0f)), n);
}
