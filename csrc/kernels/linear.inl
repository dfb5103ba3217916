// The matrix product of both precisions: out = prepare(x) W^T for a few rows (verifying a draft) or
// many (prefill), W packed by linear_w8a8.inl or linear_bf16.inl.
//
// A weight block holds 32 outputs and `steps` steps of 128 bytes. A tile is up to 14 rows x 32
// outputs of sums in 28 registers, two more hold the step's weights and one the broadcast of a
// row's four bytes. Rows are prepared into tiles, [steps][rows of the tile] words of 4 bytes, so a
// step reads consecutive words. More than 14 rows are split into even tiles that visit the block
// one after the other while it lies in the cache. Every sum sees its inputs in ascending order,
// one step an instruction, whatever the tile: rows cannot influence each other.
//
// Memory. One tile: prefetch 4 KiB ahead. More tiles: the first two fetch half of the following
// block each, so memory and multiplier work at the same time.
// Threads own contiguous runs of blocks (DRAM likes long streams) and help the others when done.
//
// Gated layers. Blocks hold 16 gate rows, then the 16 up rows of the same outputs. For an
// intermediate size I that is no multiple of 16 the caller pads gate and up to G = ceil(I / 16)
// groups of 16 and packs 32 G rows; scale and bias have 32 G entries in that order. out_features
// stays 2 I, and out has I columns.

constexpr int kTileRows = 14;
constexpr int64_t kBlock = 32;        // outputs a block
constexpr int64_t kStepBytes = 128;   // weights of a block a step
constexpr int64_t kPageRows = 8;      // up to so many rows Ahead::kPage is the better way
constexpr int64_t kFetchBytes = 6144;  // how far ahead a single tile fetches
constexpr int64_t kGroupTiles = 8;    // tiles that a unit of work takes over one block
constexpr int64_t kPrivateBytes = 32 << 10;  // rows up to this size are prepared by each thread
constexpr int kLanes = 64;

template <class P>
static int64_t steps_of(int64_t in_features) {
  return (in_features + 15) / 16 * (16 / P::kStepValues);
}

// ---- Rows, prepared -------------------------------------------------------------------------

struct Rows {
  int32_t* values;  // tile after tile, each [steps][rows of the tile]
  float* scale;     // [rows]
  int32_t* start;   // [rows], where the sums start
  int64_t rows, steps, tiles;

  static size_t bytes(int64_t rows, int64_t steps) {
    return (size_t)(rows * (steps * 4 + 8) + 64);
  }

  Rows(void* memory, int64_t rows, int64_t steps)
      : rows(rows), steps(steps), tiles((rows + kTileRows - 1) / kTileRows) {
    values = (int32_t*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    scale = (float*)(values + rows * steps);
    start = (int32_t*)(scale + rows);
  }

  int64_t first(int64_t tile) const { return rows * tile / tiles; }
  int64_t tile_of(int64_t row) const { return ((row + 1) * tiles - 1) / rows; }
};

// Where the input comes from: x [rows, count], norm [count] or null.
struct Input {
  const float* x;
  const float* norm;
  float eps;
  int64_t rows, count;
};

template <class P>
static void prepare_row(const Input& input, const Rows& rows, int64_t m) {
  const int64_t tile = rows.tile_of(m), first = rows.first(tile);
  const int64_t stride = rows.first(tile + 1) - first;
  const float* x = input.x + m * input.count;
  int32_t* values = rows.values + first * rows.steps + (m - first);
  if (input.norm) {
    const RowSource<true> row(x, input.norm, input.eps, input.count);
    P::prepare(row, values, stride, rows.scale + m, rows.start + m);
  } else {
    const RowSource<false> row(x, nullptr, 0.0f, input.count);
    P::prepare(row, values, stride, rows.scale + m, rows.start + m);
  }
}

// ---- The tile -------------------------------------------------------------------------------

// Sums of R rows x 32 outputs. A recursive struct of scalars, not an array: GCC keeps it in
// registers.
template <class P, int R>
struct Sums {
  typename P::Sum left, right;
  Sums<P, R - 1> rest;

  [[gnu::always_inline]] inline void begin(const int32_t* start) {
    left = right = P::start(*start);
    rest.begin(start + 1);
  }
  // One step: `values` holds four bytes of each row.
  [[gnu::always_inline]] inline void add(__m512i w_left, __m512i w_right, const int32_t* values) {
    const __m512i value = _mm512_set1_epi32(*values);
    left = P::multiply(left, w_left, value);
    right = P::multiply(right, w_right, value);
    rest.add(w_left, w_right, values + 1);
  }
  [[gnu::always_inline]] inline void store(float* sums) const {
    _mm512_store_ps(sums, P::as_float(left));
    _mm512_store_ps(sums + 16, P::as_float(right));
    rest.store(sums + kBlock);
  }
};

template <class P>
struct Sums<P, 0> {
  inline void begin(const int32_t*) {}
  inline void add(__m512i, __m512i, const int32_t*) {}
  inline void store(float*) const {}
};

// What a tile fetches ahead. kPage: the first eight lines of the following page, one every fourth
// step, into L1: the hardware follows a stream by itself, but stops at the end of a page. kLines:
// into L2, two lines a step, at `next` and `next` + second, moved by `stride`.
enum class Ahead { kPage, kLines };

struct Fetch {
  const char* next;
  int64_t stride, second;
};

template <class P, int R, Ahead kAhead>
static void multiply_tile(const char* weight, int64_t steps, const int32_t* values,
                          const int32_t* start, Fetch fetch, float* sums) {
  Sums<P, R> tile;
  tile.begin(start);
  const char* const end = weight + steps * kStepBytes;
  do {
    if constexpr (kAhead == Ahead::kPage) {
      const uintptr_t at = (uintptr_t)weight;
      _mm_prefetch((const char*)((at | 4095) + 1 + ((at & 4095) / 8 & ~(uintptr_t)63)), _MM_HINT_T0);
    } else {
      _mm_prefetch(fetch.next, _MM_HINT_T1);
      _mm_prefetch(fetch.next + fetch.second, _MM_HINT_T1);
      fetch.next += fetch.stride;
    }
    tile.add(_mm512_load_si512(weight), _mm512_load_si512(weight + 64), values);
    weight += kStepBytes;
    values += R;
  } while (weight != end);
  tile.store(sums);
}

template <class P>
using Multiply = void (*)(const char*, int64_t, const int32_t*, const int32_t*, Fetch, float*);

template <class P, Ahead kAhead>
static Multiply<P> multiply_for(int64_t rows) {
  static constexpr Multiply<P> table[kTileRows] = {
      multiply_tile<P, 1, kAhead>,  multiply_tile<P, 2, kAhead>,  multiply_tile<P, 3, kAhead>,
      multiply_tile<P, 4, kAhead>,  multiply_tile<P, 5, kAhead>,  multiply_tile<P, 6, kAhead>,
      multiply_tile<P, 7, kAhead>,  multiply_tile<P, 8, kAhead>,  multiply_tile<P, 9, kAhead>,
      multiply_tile<P, 10, kAhead>, multiply_tile<P, 11, kAhead>, multiply_tile<P, 12, kAhead>,
      multiply_tile<P, 13, kAhead>, multiply_tile<P, 14, kAhead>};
  return table[rows - 1];
}

static Fetch fetch_for(const char* weight, int64_t steps, int64_t tile, int64_t tiles) {
  if (tiles == 1) return {weight + kFetchBytes, kStepBytes, 64};
  if (tile < 2) return {weight + steps * (kStepBytes + 64 * tile), 64, 0};
  return {weight, 0, 0};
}

// ---- What becomes of the sums ---------------------------------------------------------------

enum class Result { kStore, kAdd, kGated };

template <Result kResult>
static void write_row(const quasar_linear& layer, float* out, int64_t m, int64_t block, __m512 left,
                      __m512 right) {
  if constexpr (kResult == Result::kGated) {
    // silu(g) = g / (1 + e^-g); g is held to -88, where silu is -5e-37, as e^-g ends at 3.4e38.
    const int64_t columns = layer.out_features / 2, n = block * (kBlock / 2);
    const __m512 gate = _mm512_max_ps(_mm512_set1_ps(-88.0f), left);
    const __m512 power = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
    const __m512 gated = _mm512_mul_ps(silu, right);
    _mm512_mask_storeu_ps(out + m * columns + n, low_bits(columns - n), gated);
  } else {
    const int64_t columns = layer.out_features, n = block * kBlock;
    float* target = out + m * columns + n;
    const __mmask16 some = low_bits(columns - n);
    const __mmask16 more = columns - n > 16 ? low_bits(columns - n - 16) : 0;
    if constexpr (kResult == Result::kAdd) {
      left = _mm512_add_ps(_mm512_maskz_loadu_ps(some, target), left);
      right = _mm512_add_ps(_mm512_maskz_loadu_ps(more, target + 16), right);
    }
    _mm512_mask_storeu_ps(target, some, left);
    _mm512_mask_storeu_ps(target + 16, more, right);
  }
}

template <class P, Result kResult>
static void finish_tile(const quasar_linear& layer, const Rows& rows, int64_t first, int64_t count,
                        int64_t block, const float* sums, float* out) {
  const float* scale = layer.scale + block * kBlock;
  const float* bias = layer.bias ? layer.bias + block * kBlock : nullptr;
  for (int64_t r = 0; r < count; ++r, sums += kBlock) {
    const float row_scale = rows.scale[first + r];
    __m512 left = P::scaled(_mm512_load_ps(sums), scale, row_scale);
    __m512 right = P::scaled(_mm512_load_ps(sums + 16), scale + 16, row_scale);
    if (bias) {
      left = _mm512_add_ps(left, _mm512_loadu_ps(bias));
      right = _mm512_add_ps(right, _mm512_loadu_ps(bias + 16));
    }
    write_row<kResult>(layer, out, first + r, block, left, right);
  }
}

// ---- Work sharing ---------------------------------------------------------------------------

// Units of work 0..count-1 in contiguous lanes, one a thread. A thread empties its own lane, then
// takes from the others': a slow or disturbed thread delays nobody.
struct Lanes {
  struct alignas(64) Lane {
    int64_t next, end;
  };
  Lane lane[kLanes];
  int lanes;

  Lanes(int64_t count, int threads) : lanes(threads < kLanes ? threads : kLanes) {
    for (int i = 0; i < lanes; ++i) lane[i] = {count * i / lanes, count * (i + 1) / lanes};
  }

  int64_t begin(int thread) const { return lane[thread % lanes].next; }

  template <class Work>
  void run(int thread, Work work) {
    for (int i = 0; i < lanes; ++i) {
      Lane& own = lane[(thread + i) % lanes];
      for (;;) {
        const int64_t unit = __atomic_fetch_add(&own.next, 1, __ATOMIC_RELAXED);
        if (unit >= own.end) break;
        work(unit);
      }
    }
  }
};

template <class P, Result kResult>
static void multiply_block(const quasar_linear& layer, const Rows& rows, int64_t block,
                           int64_t first_tile, int64_t last_tile, float* out) {
  alignas(64) float sums[kTileRows * kBlock];
  const char* weight = (const char*)layer.weight + block * rows.steps * kStepBytes;
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
    const auto multiply = rows.rows > kPageRows ? multiply_for<P, Ahead::kLines>(count)
                                                : multiply_for<P, Ahead::kPage>(count);
    multiply(weight, rows.steps, rows.values + first * rows.steps, rows.start + first,
             fetch_for(weight, rows.steps, tile, rows.tiles), sums);
    finish_tile<P, kResult>(layer, rows, first, count, block, sums, out);
  }
}

template <class P, Result kResult>
static void run_linear(const quasar_linear& layer, const Input& input, void* scratch, float* out,
                       int threads) {
  if (input.rows == 0) return;
  const int64_t steps = steps_of<P>(input.count);
  const int64_t outputs = kResult == Result::kGated ? kBlock / 2 : kBlock;
  const int64_t columns = kResult == Result::kGated ? layer.out_features / 2 : layer.out_features;
  const int64_t blocks = (columns + outputs - 1) / outputs;
  const bool shared = Rows::bytes(input.rows, steps) > kPrivateBytes;
  const Rows common(scratch, input.rows, steps);
  const int64_t groups = (common.tiles + kGroupTiles - 1) / kGroupTiles;
  Lanes lanes(blocks * groups, threads);
  if (shared) {
    Queue queue;
    parallel(threads, [&](int32_t) {
      queue.each(input.rows, [&](int64_t m) { prepare_row<P>(input, common, m); });
    });
  }
  parallel(threads, [&](int32_t thread) {
    alignas(64) char memory[kPrivateBytes];
    const Rows rows = shared ? common : Rows(memory, input.rows, steps);
    if (!shared)
      for (int64_t m = 0; m < input.rows; ++m) prepare_row<P>(input, rows, m);
    lanes.run(thread, [&](int64_t unit) {
      const int64_t first = unit % groups * kGroupTiles;
      const int64_t last = first + kGroupTiles < rows.tiles ? first + kGroupTiles : rows.tiles;
      multiply_block<P, kResult>(layer, rows, unit / groups, first, last, out);
    });
  });
}

template <Result kResult>
static void run_linear(const quasar_linear* layer, const Input& input, void* scratch, float* out,
                       int threads) {
  if (layer->precision == QUASAR_W8A8)
    run_linear<W8A8, kResult>(*layer, input, scratch, out, threads);
  else
    run_linear<Bf16, kResult>(*layer, input, scratch, out, threads);
}

// ---- The table's functions ------------------------------------------------------------------

static size_t packed_bytes(int32_t precision, int64_t out_features, int64_t in_features) {
  const int64_t steps =
      precision == QUASAR_W8A8 ? steps_of<W8A8>(in_features) : steps_of<Bf16>(in_features);
  return (size_t)((out_features + kBlock - 1) / kBlock * steps * kStepBytes);
}

template <class P>
static void pack_block(const typename P::Element* weight, int64_t rows, int64_t in_features,
                       int32_t* packed) {
  for (int64_t k = 0; k < in_features; k += 16) {
    for (int64_t r = 0; r < kBlock; ++r) {
      const int64_t count = r < rows ? in_features - k : 0;
      P::pack_group(count ? weight + r * in_features + k : weight, count, packed + r);
    }
    packed += 16 / P::kStepValues * kBlock;
  }
}

template <class P>
static void pack_as(const void* weight, int64_t out_features, int64_t in_features, void* packed,
                    int threads) {
  const int64_t words = steps_of<P>(in_features) * kBlock;
  const auto* source = (const typename P::Element*)weight;
  Lanes lanes((out_features + kBlock - 1) / kBlock, threads);
  parallel(threads, [&](int32_t thread) {
    lanes.run(thread, [&](int64_t block) {
      const int64_t n = block * kBlock;
      pack_block<P>(source + n * in_features, out_features - n, in_features,
                    (int32_t*)packed + block * words);
    });
  });
}

static void pack(int32_t precision, const void* weight, int64_t out_features, int64_t in_features,
                 void* packed, int32_t threads) {
  if (precision == QUASAR_W8A8)
    pack_as<W8A8>(weight, out_features, in_features, packed, threads);
  else
    pack_as<Bf16>(weight, out_features, in_features, packed, threads);
}

static size_t linear_scratch_bytes(int64_t rows, int64_t in_features) {
  return Rows::bytes(rows, steps_of<Bf16>(in_features));  // the larger of the two
}

static void norm_linear(const quasar_linear* layer, const float* x, int64_t rows, const float* norm,
                        float eps, void* scratch, float* out, int32_t threads) {
  const Input input{x, norm, eps, rows, layer->in_features};
  run_linear<Result::kStore>(layer, input, scratch, out, threads);
}

static void norm_gated(const quasar_linear* layer, const float* x, int64_t rows, const float* norm,
                       float eps, void* scratch, float* out, int32_t threads) {
  const Input input{x, norm, eps, rows, layer->in_features};
  run_linear<Result::kGated>(layer, input, scratch, out, threads);
}

static void linear_add(const quasar_linear* layer, const float* a, int64_t rows, void* scratch,
                       float* x, int32_t threads) {
  const Input input{a, nullptr, 0.0f, rows, layer->in_features};
  run_linear<Result::kAdd>(layer, input, scratch, x, threads);
}
