// Placeholder until linear_w8a8.inl and linear_bf16.inl are merged: correct, row-major, slow.
inline int64_t padded32(int64_t n) { return (n + 31) / 32 * 32; }
size_t packed_bytes(int32_t precision, int64_t n, int64_t k) {
  return padded32(n) * k * (precision == QUASAR_BF16 ? 2 : 1);
}
void pack(int32_t precision, const void* weight, int64_t n, int64_t k, void* packed, int32_t) {
  __builtin_memset(packed, 0, packed_bytes(precision, n, k));
  __builtin_memcpy(packed, weight, n * k * (precision == QUASAR_BF16 ? 2 : 1));
}
size_t linear_scratch_bytes(int64_t rows, int64_t k) { return rows * (4 * k + 8); }
inline float bf16_value(uint16_t v) {
  const uint32_t bits = uint32_t{v} << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
inline float rounded(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  bits += 0x7fff + (bits >> 16 & 1);
  return bf16_value(bits >> 16);
}
inline void prepare(const quasar_linear* l, const float* x, const float* norm, float eps,
                    int64_t row, void* scratch) {
  const int64_t k = l->in_features;
  float* buffer = static_cast<float*>(scratch) + row * (k + 2);
  float factor = 1.0f;
  if (norm) {
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += double(x[i]) * x[i];
    factor = 1.0f / __builtin_sqrtf(float(sum / double(k)) + eps);
  }
  float absmax = 0;
  for (int64_t i = 0; i < k; ++i) {
    buffer[i] = norm ? x[i] * factor * norm[i] : x[i];
    if (__builtin_fabsf(buffer[i]) > absmax) absmax = __builtin_fabsf(buffer[i]);
  }
  const float inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
  buffer[k] = absmax / 127.0f;
  for (int64_t i = 0; i < k; ++i) {
    if (l->precision == QUASAR_BF16) buffer[i] = rounded(buffer[i]);
    else reinterpret_cast<int32_t*>(buffer)[i] = (int32_t)__builtin_rintf(buffer[i] * inverse);
  }
}
inline float product(const quasar_linear* l, int64_t row, int64_t n, const void* scratch) {
  const int64_t k = l->in_features;
  const float* a = static_cast<const float*>(scratch) + row * (k + 2);
  float out;
  if (l->precision == QUASAR_BF16) {
    const uint16_t* w = static_cast<const uint16_t*>(l->weight) + n * k;
    __m512 sums = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i < k; i += 16) {
      const __mmask16 m = k - i >= 16 ? 0xffff : (1u << (k - i)) - 1;
      const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, w + i));
      sums = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
                             _mm512_maskz_loadu_ps(m, a + i), sums);
    }
    out = _mm512_reduce_add_ps(sums);
  } else {
    const int8_t* w = static_cast<const int8_t*>(l->weight) + n * k;
    const int32_t* codes = reinterpret_cast<const int32_t*>(a);
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += codes[i] * w[i];
    out = float(sum) * l->scale[n] * a[k];
  }
  return l->bias ? out + l->bias[n] : out;
}
template <class Store>
void multiply(const quasar_linear* l, const float* x, int64_t rows, const float* norm, float eps,
              void* scratch, int64_t outputs, int32_t threads, const Store& store) {
  parallel(threads, [&](int32_t thread, int32_t team) {
    const Part mine = part_of(rows, thread, team), outs = part_of(outputs, thread, team);
    for (int64_t r = mine.begin; r < mine.end; ++r)
      prepare(l, x + r * l->in_features, norm, eps, r, scratch);
    barrier(team);
    for (int64_t n = outs.begin; n < outs.end; ++n)
      for (int64_t r = 0; r < rows; ++r) store(r, n);
  });
}
void norm_linear(const quasar_linear* l, const float* x, int64_t rows, const float* norm, float eps,
                 void* scratch, float* out, int32_t threads) {
  multiply(l, x, rows, norm, eps, scratch, l->out_features, threads, [&](int64_t r, int64_t n) {
    out[r * l->out_features + n] = product(l, r, n, scratch);
  });
}
void norm_gated(const quasar_linear* l, const float* x, int64_t rows, const float* norm, float eps,
                void* scratch, float* out, int32_t threads) {
  const int64_t size = l->out_features / 2;
  multiply(l, x, rows, norm, eps, scratch, size, threads, [&](int64_t r, int64_t n) {
    const int64_t at = n / 16 * 32 + n % 16;
    const float gate = product(l, r, at, scratch), up = product(l, r, at + 16, scratch);
    out[r * size + n] =
        gate / (1.0f + _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(-gate)))) * up;
  });
}
void linear_add(const quasar_linear* l, const float* a, int64_t rows, void* scratch, float* x,
                int32_t threads) {
  multiply(l, a, rows, nullptr, 0, scratch, l->out_features, threads, [&](int64_t r, int64_t n) {
    x[r * l->out_features + n] += product(l, r, n, scratch);
  });
}
double read_bandwidth(const void*, size_t, double, int32_t) { return 1.0; }
double multiply_rate(int32_t, double, int32_t) { return 1.0; }
