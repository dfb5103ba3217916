// The matrix product of all precisions: out = prepare(x) W^T for a few rows (verifying a draft) or
// many (prefill). What differs from tier to tier is the size of a tile (vector/*.inl) and how a
// product P, W8A8, W4A8 or Bf16, takes a step (linear_w8a8_*.inl and so on). P also says how a unit
// of inputs is packed and prepared: 16 of them, or a group of W4A8.
//
// A weight block holds 32 outputs, in one part or two of kTileOutputs; a part holds its units one
// after the other. A tile is up to P::kRows rows x kTileOutputs outputs, two registers of sums a row
// (left and right), two that hold the step's weights and one the broadcast of a row's four bytes.
// For W8A8 and BF16 that is 14 x 32 in avx512, in avx2 6 x 16, where a register has half the lanes
// and there are half as many. Rows are prepared into tiles, [words][rows of the tile], so a step
// reads consecutive words. More rows are split into even tiles that visit the block one after the
// other while it lies in the cache. Every sum sees its inputs in ascending order, one step an
// instruction, whatever the tile: rows cannot influence each other.
//
// Memory. Weights are read once, as fast as DRAM gives them, if enough lines are in flight. The
// core's own prefetcher has room for some 60 but loses a stream at the end of its page, and when
// the results of many rows touch pages of their own; prefetch instructions have room for 20 to 30
// but keep going. So up to kHalfRows rows (4; in avx2, which multiplies slower, 1) fetch every
// second line 4 KiB ahead into L2 and leave the rest to the hardware; up to one tile, a slower
// consumer, fetches every line 6 KiB ahead; with more the first two tiles at a block fetch half of
// the following block each, so that memory and multiplier work at the same time. Threads own
// contiguous runs of blocks: prefetchers like long ones.
//
// Measured, tier avx512, on 2 cores of a Zen 4 server (read 36 GB/s, or 65 when the cores lie
// apart; multiply 472 GMAC/s INT8, 236 BF16), weights from memory: shapes of a 1.5B model; of a
// 0.5B model for BF16 and, at 36 GB/s, from 32 rows on. ms for 10^9 weights (medians), and the
// share of the limit: the larger of bytes / bandwidth and multiply-adds / rate of the same moment:
//     rows              1     2     4     6     8    12    16    32   512
//     W8A8 at 36 GB/s  27.9  27.2  27.4  28.3  29.0  30.7  39.0  78   1230
//               share  1.00  0.94  1.03  0.94  0.94  0.84  0.87  0.86  0.87
//     W8A8 at 65 GB/s  17.4  16.7  19.1  20.7  21.0  30.9  40.4  80
//               share  0.88  0.94  0.84  0.83  0.81  0.82  0.84  0.85
//     BF16 at 36 GB/s  58.4  56.7  58.2  57.7  59.0  60.5  78.3  150  2410
//               share  0.99  1.04  0.97  0.99  0.98  0.92  0.87  0.91  0.89
// The multiply loop itself runs at 0.99 of the multiplier; what is missing at many rows is their
// preparation (5 %) and the results (5 %). The linears of SmolLM2-135M reach 0.92 at 6 rows
// and 36 GB/s, 0.55 to 0.6 at 65. The W8A8 row at 36 GB/s and both figures of 512 rows are older
// than the last change to the preparation of rows; the BF16 one is a single slice, at 65 GB/s.
// For W4A8 see linear_w4a8.inl.
//
// Gated layers. Blocks hold 16 gate rows, then the 16 up rows of the same outputs. For an
// intermediate size I that is no multiple of 16 the caller pads gate and up to G = ceil(I / 16)
// groups of 16 and packs 32 G rows; scale and bias have 32 G entries in that order. out_features
// stays 2 I, and out has I columns.

constexpr int64_t kGroupBytes = 576 << 10;   // rows that visit the blocks together
constexpr int64_t kPrivateBytes = 40 << 10;  // rows up to this size are prepared by each thread
constexpr int kLanes = 256;                  // more threads than that stay idle

// The inputs of a layer come in units: how many words they are in a row, and bytes in a part.
template <class P>
static int64_t units_of(int64_t in_features) {
  return (in_features + P::kUnitValues - 1) / P::kUnitValues;
}
template <class P>
static int64_t words_of(int64_t in_features) {
  return units_of<P>(in_features) * P::unit_words();
}
template <class P>
static int64_t part_bytes_of(int64_t in_features) {
  return units_of<P>(in_features) * P::unit_bytes();
}

// ---- Rows, prepared -------------------------------------------------------------------------

struct Rows {
  int32_t* values;  // tile after tile, each [words][rows of the tile]
  float* scale;     // [rows]
  float* inverse;   // [rows], 1 / rms
  float* factor;    // [rows]
  int32_t* start;   // [rows], where the sums start
  int64_t rows, words, part_bytes, tiles;

  static size_t bytes(int64_t rows, int64_t words) {
    return (size_t)(rows * (words + 4) * 4 + 64);
  }

  Rows(void* memory, int64_t rows, int64_t words, int64_t part_bytes, int64_t tile_rows)
      : rows(rows),
        words(words),
        part_bytes(part_bytes),
        tiles((rows + tile_rows - 1) / tile_rows) {
    values = (int32_t*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    scale = (float*)(values + rows * words);
    inverse = scale + rows;
    factor = inverse + rows;
    start = (int32_t*)(factor + rows);
  }

  int64_t first(int64_t tile) const { return rows * tile / tiles; }
  int64_t tile_of(int64_t row) const { return ((row + 1) * tiles - 1) / rows; }
};

// Where the input comes from: x [rows, count], norm [count] or null. With a `block` row m is rotated
// into rotated + m * stride when it is measured.
struct Input {
  const float* x;
  const float* norm;
  float eps;
  int64_t rows, count;
  int64_t block = 0, stride = 0;
  float* rotated = nullptr;
};

static void rotate_row(const Input& input, int64_t m, float* to) {
  const float* x = input.x + m * input.count;
  if (!input.norm)
    return rotate_row(RowSource<false>{x, nullptr, 1.0f}, input.count, input.block, to);
  const float inverse = inverse_rms(x, input.count, input.eps);
  rotate_row(RowSource<true>{x, input.norm, inverse}, input.count, input.block, to);
}

// A row's scale: needs the whole row.
template <class P>
static void measure_row(const Input& input, const Rows& rows, int64_t m) {
  const float* x = input.x + m * input.count;
  rows.start[m] = 0;
  if (input.block) {
    float* const rotated = input.rotated + m * input.stride;
    rotate_row(input, m, rotated);
    const RowSource<false> row{rotated, nullptr, 1.0f};
    rows.factor[m] = P::factor(row, input.count, rows.scale + m);
  } else if (input.norm) {
    rows.inverse[m] = inverse_rms(x, input.count, input.eps);
    const RowSource<true> row{x, input.norm, rows.inverse[m]};
    rows.factor[m] = P::factor(row, input.count, rows.scale + m);
  } else {
    rows.factor[m] = P::factor(RowSource<false>{x, nullptr, 1.0f}, input.count, rows.scale + m);
  }
}

// The inputs begin..end-1 of a measured row.
template <class P>
static void encode_row(const Input& input, const Rows& rows, int64_t m, int64_t begin,
                       int64_t end) {
  const int64_t tile = rows.tile_of(m), first = rows.first(tile);
  const int64_t stride = rows.first(tile + 1) - first;
  const float* x = input.block ? input.rotated + m * input.stride : input.x + m * input.count;
  const float factor = rows.factor[m];
  int32_t* values = rows.values + first * rows.words;
  int32_t start;
  if (input.norm && !input.block)
    start = P::encode(RowSource<true>{x, input.norm, rows.inverse[m]}, factor, begin, end, values,
                      m - first, stride);
  else
    start = P::encode(RowSource<false>{x, nullptr, 1.0f}, factor, begin, end, values, m - first,
                      stride);
  __atomic_fetch_add(rows.start + m, start, __ATOMIC_RELAXED);
}

template <class P>
static void prepare_rows(const Input& input, const Rows& rows, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    measure_row<P>(input, rows, m);
    encode_row<P>(input, rows, m, 0, input.count);
  }
}

// The rows of a tile share cache lines: with many tiles a thread prepares whole ones, with few it
// measures some rows, then encodes one run of inputs of all rows (their sums meet in `start`).
template <class P>
static void prepare_together(const Input& input, const Rows& rows, int threads) {
  Queue tiles, measured, encoded;
  if (rows.tiles >= 4 * threads) {
    parallel(threads, [&](int32_t) {
      tiles.each(rows.tiles, [&](int64_t tile) {
        prepare_rows<P>(input, rows, rows.first(tile), rows.first(tile + 1));
      });
    });
    return;
  }
  parallel(threads, [&](int32_t) {
    measured.each(rows.rows, [&](int64_t m) { measure_row<P>(input, rows, m); });
  });
  const int64_t columns = (input.count / threads / P::kUnitValues + 1) * P::kUnitValues;
  parallel(threads, [&](int32_t) {
    encoded.each((input.count + columns - 1) / columns, [&](int64_t part) {
      const int64_t begin = part * columns;
      const int64_t end = begin + columns < input.count ? begin + columns : input.count;
      for (int64_t m = 0; m < rows.rows; ++m) encode_row<P>(input, rows, m, begin, end);
    });
  });
}

// ---- Tiles ----------------------------------------------------------------------------------

using Multiply = void (*)(const char*, int64_t, const int32_t*, const int32_t*, Ahead, float*);

template <class P, int R = P::kRows>
static Multiply multiply_for(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return multiply_for<P, R - 1>(rows);
  return P::template tile<R>;
}

// What a part of a block fetches; `unit` counts the parts of this block that came before, with this
// tile or others.
template <class P>
static Ahead ahead_of(const char* part, const Rows& rows, const char* block_end, int64_t unit) {
  if (P::leaves_half(rows.rows, rows.words)) return {part + 4096, kTurnBytes, 0};
  if (rows.tiles == 1) return {part + 6144, kTurnBytes, 64};
  if (unit < 2 * kParts) return {block_end + unit * (rows.part_bytes / 2), kTurnBytes / 2, 0};
  return {part, 0, 0};
}

// ---- What becomes of the sums ---------------------------------------------------------------

enum class Result { kStore, kAdd, kSilu, kGeluTanh };

constexpr bool is_gated(Result result) {
  return result == Result::kSilu || result == Result::kGeluTanh;
}

template <bool kAdd>
static inline void write(float* target, int64_t count, F16 values) {
  count = count > 0 ? count : 0;
  if constexpr (kAdd) values = load(target, count) + values;
  store(target, values, count);
}

// g / (1 + e^-z): silu(g) for z = g. And as 1 + tanh(u) = 2 / (1 + e^-2u), it is gelu_tanh(g) for
// z = 2 sqrt(2 / pi) (g + 0.044715 g^3). g is held to where z is about -88 and the result -1e-37:
// e^88 is about the largest power that exp_ps gives.
template <Result kResult>
static inline F16 activation(F16 gate) {
  gate = max(splat(kResult == Result::kSilu ? -88.0f : -10.0f), gate);
  F16 z = gate;
  if constexpr (kResult == Result::kGeluTanh)
    z = gate * fma(gate * gate, splat(0.0713548163f), splat(1.59576912f));
  return gate / (splat(1.0f) + exp_ps(splat(0.0f) - z));
}

template <Result kResult>
static inline void write_row(const quasar_linear& layer, float* out, int64_t m, int64_t block,
                             F16 left, F16 right) {
  if constexpr (is_gated(kResult)) {
    const int64_t columns = layer.out_features / 2, n = block * (kBlock / 2);
    write<false>(out + m * columns + n, columns - n, activation<kResult>(left) * right);
  } else {
    const int64_t columns = layer.out_features, n = block * kBlock;
    write<kResult == Result::kAdd>(out + m * columns + n, columns - n, left);
    write<kResult == Result::kAdd>(out + m * columns + n + 16, columns - n - 16, right);
  }
}

template <class P, Result kResult>
static void finish_tile(const quasar_linear& layer, const Rows& rows, int64_t first, int64_t count,
                        int64_t block, const float* sums, float* out) {
  const int64_t n = block * kBlock;
  for (int64_t r = 0; r < count; ++r, sums += kBlock) {
    const float row_scale = rows.scale[first + r];
    F16 left = P::scaled(load(sums), layer.scale, n, row_scale);
    F16 right = P::scaled(load(sums + 16), layer.scale, n + 16, row_scale);
    if (layer.bias) {
      left = left + load(layer.bias + n);
      right = right + load(layer.bias + n + 16);
    }
    write_row<kResult>(layer, out, first + r, block, left, right);
  }
}

// ---- Work sharing ---------------------------------------------------------------------------

// Units of work 0..count-1 in contiguous lanes, one a thread. A thread that has emptied its lane
// moves the further half of what is left of another's into it: long runs for all (two threads that
// took turns in one run needed three times as long a block), and a disturbed thread delays nobody.
class Lanes {
 public:
  Lanes(int64_t count, int threads) : lanes_(threads < kLanes ? threads : kLanes) {
    for (int i = 0; i < lanes_; ++i)
      lane_[i].range = range(count * i / lanes_, count * (i + 1) / lanes_);
  }

  template <class Work>
  void run(int thread, Work work) {
    if (thread >= lanes_) return;
    do {
      for (int64_t unit; (unit = pop(thread)) >= 0;) work(unit);
    } while (steal(thread));
  }

 private:
  struct alignas(64) Lane {
    uint64_t range;  // next unit in the high half, end in the low one
  };
  Lane lane_[kLanes];
  int lanes_;

  static uint64_t range(uint64_t next, uint64_t end) { return next << 32 | end; }

  int64_t pop(int lane) {
    uint64_t seen = __atomic_load_n(&lane_[lane].range, __ATOMIC_RELAXED);
    while (seen >> 32 < (uint32_t)seen)
      if (exchange(lane, &seen, seen + range(1, 0))) return (int64_t)(seen >> 32);
    return -1;
  }

  bool steal(int own) {
    for (int i = 1; i < lanes_; ++i) {
      const int lane = (own + i) % lanes_;
      uint64_t seen = __atomic_load_n(&lane_[lane].range, __ATOMIC_RELAXED);
      while (seen >> 32 < (uint32_t)seen) {
        const uint64_t next = seen >> 32, end = (uint32_t)seen, middle = next + (end - next) / 2;
        if (!exchange(lane, &seen, range(next, middle))) continue;
        __atomic_store_n(&lane_[own].range, range(middle, end), __ATOMIC_RELAXED);
        return true;
      }
    }
    return false;
  }

  bool exchange(int lane, uint64_t* seen, uint64_t wanted) {
    return __atomic_compare_exchange_n(&lane_[lane].range, seen, wanted, true, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }
};

// Tiles that meet all blocks before the next tiles do: so many that they stay in L2.
static int64_t group_tiles(const Rows& rows, int64_t tile_rows) {
  const int64_t fitting = kGroupBytes / (tile_rows * rows.words * 4);
  return fitting < 2 ? 2 : fitting;
}

template <class P, Result kResult>
static void multiply_block(const quasar_linear& layer, const Rows& rows, int64_t block,
                           int64_t first_tile, int64_t last_tile, float* out) {
  alignas(64) float sums[P::kRows * kBlock];
  const char* const begin = (const char*)layer.weight + block * kParts * rows.part_bytes;
  const char* const end = begin + kParts * rows.part_bytes;
  int64_t unit = 0;
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
    const Multiply multiply = multiply_for<P>(count);
    for (int64_t part = 0; part < kParts; ++part, ++unit) {
      const char* weight = begin + part * rows.part_bytes;
      multiply(weight, rows.part_bytes, rows.values + first * rows.words, rows.start + first,
               ahead_of<P>(weight, rows, end, unit), sums + part * kTileOutputs);
    }
    finish_tile<P, kResult>(layer, rows, first, count, block, sums, out);
  }
}

template <class P, Result kResult>
static void run_linear(const quasar_linear& layer, const Input& input, void* scratch, float* out,
                       int threads) {
  if (input.rows == 0) return;
  const int64_t words = words_of<P>(input.count);
  const int64_t outputs = is_gated(kResult) ? kBlock / 2 : kBlock;
  const int64_t columns = is_gated(kResult) ? layer.out_features / 2 : layer.out_features;
  const int64_t blocks = (columns + outputs - 1) / outputs;
  const int64_t row_bytes = input.block ? input.count * 4 : 0;
  const bool shared = Rows::bytes(input.rows, words) > kPrivateBytes || row_bytes > kPrivateBytes;
  const int64_t part_bytes = part_bytes_of<P>(input.count);
  const Rows common(scratch, input.rows, words, part_bytes, P::kRows);
  const int64_t group = group_tiles(common, P::kRows), groups = (common.tiles + group - 1) / group;
  Lanes lanes(blocks * groups, threads);
  if (shared) prepare_together<P>(input, common, threads);
  parallel(threads, [&](int32_t thread) {
    alignas(64) char memory[kPrivateBytes];
    const Rows rows = shared ? common : Rows(memory, input.rows, words, part_bytes, P::kRows);
    if (!shared) {
      // A thread rotates all rows for itself: fetching them from another's cache takes longer.
      alignas(64) char row[kPrivateBytes];
      Input own = input;
      own.rotated = (float*)row;
      own.stride = 0;
      prepare_rows<P>(own, rows, 0, rows.rows);
    }
    lanes.run(thread, [&](int64_t unit) {
      const int64_t first = unit / blocks * group;
      const int64_t last = first + group < rows.tiles ? first + group : rows.tiles;
      multiply_block<P, kResult>(layer, rows, unit % blocks, first, last, out);
    });
  });
}

// work(a value of the product's type).
template <class Work>
static auto with_product(int32_t precision, int32_t group_size, const Work& work) {
  if (precision == QUASAR_BF16) return work(Bf16());
  if (precision == QUASAR_W8A8) return work(W8A8());
  if (group_size == 32) return work(W4A8<32>());
  if (group_size == 64) return work(W4A8<64>());
  return work(W4A8<128>());
}

template <Result kResult>
static void run_linear(const quasar_linear* layer, Input input, void* scratch, float* out,
                       int threads) {
  if (layer->rotation) {
    input.block = layer->rotation;
    input.stride = input.count;
    input.rotated = static_cast<float*>(scratch);
    scratch = input.rotated + input.rows * input.count;
  }
  with_product(layer->precision, layer->group_size, [&](auto product) {
    run_linear<decltype(product), kResult>(*layer, input, scratch, out, threads);
  });
}

// ---- The table's functions ------------------------------------------------------------------

static int64_t blocks_of(const quasar_weight& weight) {
  return (weight.out_features + kBlock - 1) / kBlock;
}

static size_t packed_bytes(const quasar_weight* weight) {
  return with_product(weight->precision, weight->group_size, [&](auto product) {
    const int64_t part_bytes = part_bytes_of<decltype(product)>(weight->in_features);
    return (size_t)(blocks_of(*weight) * kParts * part_bytes);
  });
}

template <class P>
static void pack_as(const quasar_weight& weight, char* packed, int threads) {
  const int64_t part_bytes = part_bytes_of<P>(weight.in_features);
  Lanes lanes(blocks_of(weight), threads);
  parallel(threads, [&](int32_t thread) {
    lanes.run(thread, [&](int64_t block) {
      char* unit = packed + block * kParts * part_bytes;
      for (int64_t k = 0; k < weight.in_features; k += P::kUnitValues, unit += P::unit_bytes())
        P::pack_unit(weight, block * kBlock, k, unit, part_bytes);
    });
  });
}

static void pack(const quasar_weight* weight, void* packed, int32_t threads) {
  with_product(weight->precision, weight->group_size, [&](auto product) {
    pack_as<decltype(product)>(*weight, (char*)packed, threads);
  });
}

static void rotate(float* x, int64_t rows, int64_t columns, int64_t block, int32_t threads) {
  const Input input{x, nullptr, 0.0f, rows, columns, block};
  Queue queue;
  parallel(threads, [&](int32_t) {
    queue.each(rows, [&](int64_t m) { rotate_row(input, m, x + m * columns); });
  });
}

static size_t linear_scratch_bytes(const quasar_linear* layer, int64_t rows) {
  const size_t rotated = layer->rotation ? static_cast<size_t>(rows * layer->in_features * 4) : 0;
  return rotated + with_product(layer->precision, layer->group_size, [&](auto product) {
           return Rows::bytes(rows, words_of<decltype(product)>(layer->in_features));
         });
}

static void norm_linear(const quasar_linear* layer, const float* x, int64_t rows, const float* norm,
                        float eps, void* scratch, float* out, int32_t threads) {
  const Input input{x, norm, eps, rows, layer->in_features};
  run_linear<Result::kStore>(layer, input, scratch, out, threads);
}

static void norm_gated(const quasar_linear* layer, const float* x, int64_t rows, const float* norm,
                       float eps, void* scratch, float* out, int32_t threads) {
  const Input input{x, norm, eps, rows, layer->in_features};
  if (layer->gated == QUASAR_SILU)
    run_linear<Result::kSilu>(layer, input, scratch, out, threads);
  else
    run_linear<Result::kGeluTanh>(layer, input, scratch, out, threads);
}

static void linear(const quasar_linear* layer, const float* a, int64_t rows, void* scratch,
                   float* out, int32_t threads) {
  const Input input{a, nullptr, 0.0f, rows, layer->in_features};
  run_linear<Result::kStore>(layer, input, scratch, out, threads);
}

static void linear_add(const quasar_linear* layer, const float* a, int64_t rows, void* scratch,
                       float* x, int32_t threads) {
  const Input input{a, nullptr, 0.0f, rows, layer->in_features};
  run_linear<Result::kAdd>(layer, input, scratch, x, threads);
}
