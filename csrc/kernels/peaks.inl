// What the machine can do, in the same run as what is judged by it: its read bandwidth and its
// multiply rate. Both report the best slice, since a neighbour's load only ever lowers a slice.

static double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// A plain sum over the bytes: four streams of loads, prefetch 4 KiB ahead into L2.
static __m512i read_bytes(const char* data, size_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    for (int line = 0; line < 256; line += 64) _mm_prefetch(data + i + 4096 + line, _MM_HINT_T1);
    a = _mm512_or_si512(a, _mm512_loadu_si512(data + i));
    b = _mm512_or_si512(b, _mm512_loadu_si512(data + i + 64));
    c = _mm512_or_si512(c, _mm512_loadu_si512(data + i + 128));
    d = _mm512_or_si512(d, _mm512_loadu_si512(data + i + 192));
  }
  return _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
}

// 10^9 bytes a second. `bytes` should exceed the last cache several times; 256 MiB a
// slice, so that it is a rate which lasts.
static double read_bandwidth(const void* data, size_t bytes, double seconds, int32_t threads) {
  constexpr size_t kChunk = 1 << 20, kSlice = 256 << 20;
  const size_t slice = bytes < kSlice ? bytes : kSlice, slices = bytes / slice;
  const double end = seconds_now() + seconds;
  double best = 0;
  for (size_t s = 0; best == 0 || seconds_now() < end; s = (s + 1) % slices) {
    const char* part = (const char*)data + s * slice;
    Lanes lanes((int64_t)((slice + kChunk - 1) / kChunk), threads);
    const double begin = seconds_now();
    parallel(threads, [&](int32_t thread) {
      lanes.run(thread, [&](int64_t chunk) {
        const size_t from = (size_t)chunk * kChunk;
        const __m512i seen = read_bytes(part + from, from + kChunk < slice ? kChunk : slice - from);
        asm volatile("" ::"v"(seen));
      });
    });
    const double rate = 1e-9 * (double)slice / (seconds_now() - begin);
    best = rate > best ? rate : best;
  }
  return best;
}

// `rounds` rounds of 24 independent sums in registers.
template <class P>
static void multiply_registers(int64_t rounds) {
  alignas(64) float sums[12 * kBlock];
  const int32_t zeros[24] = {};
  const int32_t* values = zeros;
  __m512i left = _mm512_setzero_si512(), right = left;
  asm volatile("" : "+r"(values), "+v"(left), "+v"(right));  // unknown: no two products are one
  Sums<P, 12> tile;
  tile.begin(values);
  for (int64_t i = 0; i < rounds; ++i) tile.add(left, right, values + 12);
  tile.store(sums);
  asm volatile("" ::"m"(sums));
}

template <class P>
static double multiply_rate_of(double seconds, int32_t threads) {
  constexpr int64_t kRounds = 1 << 13;  // a unit of work: some 50 us
  const int64_t units = 24 * threads;
  const double multiplies = (double)kRounds * units * 24 * 16 * P::kStepValues;
  const double end = seconds_now() + seconds;
  double best = 0;
  while (best == 0 || seconds_now() < end) {
    const double begin = seconds_now();
    Queue queue;
    parallel(threads, [&](int32_t) {
      queue.each(units, [](int64_t) { multiply_registers<P>(kRounds); });
    });
    const double rate = 1e-9 * multiplies / (seconds_now() - begin);
    best = rate > best ? rate : best;
  }
  return best;
}

// 10^9 multiply-adds a second over all threads.
static double multiply_rate(int32_t precision, double seconds, int32_t threads) {
  return precision == QUASAR_W8A8 ? multiply_rate_of<W8A8>(seconds, threads)
                                  : multiply_rate_of<Bf16>(seconds, threads);
}
