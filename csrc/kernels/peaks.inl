// What the machine can do, in the same run as what is judged by it: its read bandwidth and its
// multiply rate. Both report the best slice, since a neighbour's load only ever lowers a slice.

static double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// All bytes, or-ed together: four streams of loads, prefetch 4 KiB ahead into L2.
static I32 read_bytes(const char* data, size_t bytes) {
  const auto line = [data](size_t i) { return load_pairs((const uint16_t*)(data + i)); };
  I32 a = splat(0), b = a, c = a, d = a;
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    for (int ahead = 0; ahead < 256; ahead += 64) fetch(data + i + 4096 + ahead);
    a = a | line(i);
    b = b | line(i + 64);
    c = c | line(i + 128);
    d = d | line(i + 192);
  }
  return (a | b) | (c | d);
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
        const I32 seen = read_bytes(part + from, from + kChunk < slice ? kChunk : slice - from);
        asm volatile("" ::"m"(seen));
      });
    });
    const double rate = 1e-9 * (double)slice / (seconds_now() - begin);
    best = rate > best ? rate : best;
  }
  return best;
}

constexpr int kPeakRows = kTileRows < 12 ? kTileRows : 12;

// `rounds` steps of a tile whose sums, weights and values stay in registers.
template <class P>
static void multiply_registers(int64_t rounds) {
  alignas(64) float sums[kPeakRows * kBlock];
  alignas(64) const int32_t zeros[32] = {};
  const int32_t* values = zeros;
  // What `values` points to is unknown: no two products are one, none is the last round's.
  const auto forget = [&] { asm volatile("" : "+r"(values) : "m"(zeros)); };
  forget();
  const typename P::Weights weights = P::weights((const char*)values);
  Sums<P, kPeakRows> tile;
  tile.begin(values);
  for (int64_t i = 0; i < rounds; ++i, forget()) tile.add(weights, values);
  tile.store(sums);
  asm volatile("" ::"m"(sums));
}

template <class P>
static double multiply_rate_of(double seconds, int32_t threads) {
  constexpr int64_t kRounds = 1 << 13;  // a unit of work: some 50 us
  const int64_t units = 24 * threads;
  const double multiplies = (double)kRounds * (double)units * kPeakRows *
                            kTileOutputs * P::kStepValues;
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
