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

inline F16 exp_ps(F16 x) {
  x = max(splat(-104.0f), x);
  x = min(splat(88.722f), x);
  const F16 n = nearest(x * splat(0x1.715476p+0f));
  F16 r = fnma(n, splat(0x1.62e430p-1f), x);
  r = fnma(n, splat(-0x1.05c610p-29f), r);
  F16 q = splat(0x1.6a2434p-10f);
  q = fma(q, r, splat(0x1.1239e2p-7f));
  q = fma(q, r, splat(0x1.5558f2p-5f));
  q = fma(q, r, splat(0x1.555492p-3f));
  q = fma(q, r, splat(0x1.fffffcp-2f));
  const F16 tail = fma(r * r, q, r);
  return times_power(tail + splat(1.0f), n);
}
