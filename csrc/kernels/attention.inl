// Rotary grouped-query attention over a paged BF16 cache.
//
// For a query row at logical position n - 1, which sees j = max(0, n - window) .. n - 1:
//   a_j = scale * (q . k_j)     one accumulator a position, pairs of dimensions ascending
//   m   = max a_j,  p_j = e^(a_j - m)
//   z   = sum p_j               16 lanes by j mod 16, j ascending, then one fixed tree
//   o_d = (sum p_j v_jd) / z    one accumulator a dimension, j strictly ascending
// The slots behind a tree node are all slots of the context, the root, then its ancestors: they
// count as consecutive logical positions and the others are skipped. Positions are counted from the
// start of the sequence, window or not, and nothing above knows of threads, of other rows or of
// blocks, so chain, tree, chunked prefill and plain decoding give equal bits within a tier.
//
// Cache: a block holds for each kv head K, then V.
//   K: [head_dim / 2][block_size][2]: a broadcast query pair adds two dimensions to a tile of
//      positions' scores, and no sum over lanes is ever needed.
//   V: [block_size][head_dim]. A tile of pairs is a half: its low values (shifted) are the even
//      dimensions, its high values (masked) the odd ones, so two operations widen it.
// Queries: all heads of a group and all rows of a sequence share K and V, so they are one list of
// query vectors [row][head of the group]. Blocks of them are held against some tiles of K or halves
// of V, as many as a tier has registers for sums (12 to 24 of 32, 4 to 12 of 16). They share the
// slots that all of a block see; the few at either end that only some see are added one by one.
//
// Measured, one core of a Zen 4 at 3.66 GHz (one dpbf16 or fma of 16 lanes a cycle), 9 heads of 64
// over 3 kv heads: 6 rows at context 2048 take 224 us, which is what their dpbf16, fma and
// exponentials need; one row takes 55 us, half of it memory. Keys and values are fetched two runs
// ahead into L2: fetching into L1 is held up by its few miss registers (137 us), not fetching
// costs 145 us. In turns, on a busy machine: the same rows with a window of 512 take 0.26 of the
// time; without BF16 instructions they take 1.3 times as long (scores need two fma a pair), with
// AVX2 1.5, with SSE2 alone 4.8.

constexpr int64_t lanes = 16;
constexpr int64_t query_tile = 24;          // query vectors that pass over the cache together
constexpr int64_t keys_ahead = 8 * lanes;   // positions ahead of the scored ones, to fetch
constexpr int64_t side = kTileOutputs / 2;  // lanes of a tile
constexpr int64_t half = 2 * side;          // BF16 values in a tile of pairs

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls f with the constant 1 .. Most that equals `count`.
template <int Most, class F>
inline void with_count(int64_t count, const F& f) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, f);
  f(Constant<Most>());
}

// Calls f with the largest of the constants 1, 2, 4 .. Most that `count` reaches.
template <int Most, class F>
inline void with_power(int64_t count, const F& f) {
  if constexpr (Most > 1)
    if (count < Most) return with_power<Most / 2>(count, f);
  f(Constant<Most>());
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline int64_t head_elements(const quasar_attention& a) {
  return int64_t{2} * a.block_size * a.head_dim;
}

// One kv head of one sequence in the cache.
struct HeadCache {
  uint16_t* base;
  const int32_t* table;
  int64_t block_elements, block_size, head_dim;

  HeadCache(const quasar_attention& a, uint16_t* cache, const int32_t* table, int64_t kv_head)
      : base(cache + kv_head * head_elements(a)),
        table(table),
        block_elements(a.kv_heads * head_elements(a)),
        block_size(a.block_size),
        head_dim(a.head_dim) {}

  // First pair of the key of a slot; the next pair lies one row further.
  uint16_t* key(int64_t slot) const {
    const int64_t block = slot / block_size;
    return base + table[block] * block_elements + slot % block_size * 2;
  }
  int64_t key_row() const { return block_size * 2; }
  uint16_t* value(int64_t slot) const {
    const int64_t block = slot / block_size, row = slot % block_size;
    return base + table[block] * block_elements + (block_size + row) * head_dim;
  }
};

// How queries meet keys where one instruction multiplies pairs of BF16 values: as they are.
template <bool kPairs>
struct ProductsOf {
  using Query = uint16_t;
  static inline TileI keys(TileI pairs) { return pairs; }
  static inline TileI factor(const uint16_t* query) {
    int32_t pair;
    __builtin_memcpy(&pair, query, 4);
    return splat_tile(pair);
  }
  template <class Sum>  // or tiers without the instruction would have to know its name
  static inline Sum add(Sum sum, TileI query, TileI keys) {
    return add_dot(sum, query, keys);
  }
};
// Elsewhere: keys are widened as they come, queries are kept in fp32. The even dimension first.
template <>
struct ProductsOf<false> {
  using Query = float;
  static inline EvenOdd keys(TileI pairs) { return widen(pairs); }
  static inline EvenOdd factor(const float* query) {
    return {splat_tile(query[0]), splat_tile(query[1])};
  }
  static inline TileF add(TileF sum, EvenOdd query, EvenOdd keys) {
    return fma(query.odd, keys.odd, fma(query.even, keys.even, sum));
  }
};
using Products = ProductsOf<kMultipliesPairs>;
using Query = Products::Query;

inline void store_rounded(uint16_t* to, F16 x, int64_t count) { store_bf16(to, x, count); }
inline void store_rounded(float* to, F16 x, int64_t count) { store(to, round_bf16(x), count); }

// x [head_dim] fp32, perhaps normed, the leading 2 * pairs dimensions rotated, rounded to BF16.
template <bool kNorm, class Value>
inline void place(const RowSource<kNorm>& x, int64_t head_dim, const float* cos, const float* sin,
                  int64_t pairs, Value* out) {
  each_group(0, pairs, [&](int64_t i, int64_t count) {
    const F16 low = x.values(i, count), high = x.values(pairs + i, count);
    const F16 c = load(cos + i, count), s = load(sin + i, count);
    store_rounded(out + i, low * c - high * s, count);
    store_rounded(out + pairs + i, high * c + low * s, count);
  });
  each_group(2 * pairs, head_dim, [&](int64_t i, int64_t count) {
    store_rounded(out + i, x.values(i, count), count);
  });
}

// Rotated key [head_dim] -> the cache.
inline void append_key(const HeadCache& head, int64_t slot, const uint16_t* key) {
  uint16_t* pair = head.key(slot);
  for (int64_t i = 0; i < head.head_dim; i += 2, pair += head.key_row())
    __builtin_memcpy(pair, key + i, 4);
}

// What one call works on, and where things lie in its scratch.
struct Attend {
  const quasar_attention& a;
  const quasar_batch& batch;
  const float* qkv;
  uint16_t* cache;
  float* out;
  Query* queries;  // [kv_heads][rows][group][head_dim], BF16 values
  float* scores;      // whole: a thread has [tile][stride]; split: every query has [stride]
  float* totals;      // split: [kv_heads][rows][group]
  int64_t tile, stride;

  int64_t group() const { return a.heads / a.kv_heads; }
  int64_t rows_of(int64_t sequence) const {
    return batch.row_offsets[sequence + 1] - batch.row_offsets[sequence];
  }
  int64_t reach_of(int64_t sequence) const {
    return batch.context_lengths[sequence] + rows_of(sequence);
  }
  // First of the logical positions that a row sees whose last is end - 1.
  int64_t start(int64_t end) const { return a.window && end > a.window ? end - a.window : 0; }
  // First query vector of a sequence and kv head.
  int64_t query_index(int64_t sequence, int64_t kv_head) const {
    return (kv_head * batch.rows + batch.row_offsets[sequence]) * group();
  }
  HeadCache head(int64_t sequence, int64_t kv_head) const {
    return HeadCache(a, cache, batch.block_tables + sequence * batch.table_stride, kv_head);
  }
};

// One row: queries to scratch, key and value to the cache.
inline void append_row(const Attend& t, int64_t sequence, int64_t row) {
  const quasar_attention& a = t.a;
  const int64_t d = a.head_dim, pairs = a.rotated / 2, group = t.group();
  const int64_t slot =
      t.batch.context_lengths[sequence] + row - t.batch.row_offsets[sequence];
  const float* x = t.qkv + row * (a.heads + 2 * a.kv_heads) * d;
  const float* cos = a.cos + t.batch.positions[row] * pairs;
  const float* sin = a.sin + t.batch.positions[row] * pairs;
  const auto place_head = [&](const float* head, const float* norm, auto* out) {
    if (norm)
      place(RowSource<true>{head, norm, inverse_rms(head, d, a.norm_eps)}, d, cos, sin, pairs, out);
    else
      place(RowSource<false>{head, nullptr, 1.0f}, d, cos, sin, pairs, out);
  };
  alignas(64) uint16_t key[1024];
  for (int64_t h = 0; h < a.heads; ++h) {
    const int64_t index = (h / group * t.batch.rows + row) * group + h % group;
    place_head(x + h * d, a.q_norm, t.queries + index * d);
  }
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    const HeadCache head = t.head(sequence, h);
    place_head(x + (a.heads + h) * d, a.k_norm, key);
    append_key(head, slot, key);
    const RowSource<false> value{x + (a.heads + a.kv_heads + h) * d, nullptr, 1.0f};
    place(value, d, nullptr, nullptr, 0, head.value(slot));
  }
}

// Some keys of a block, and keys to fetch meanwhile.
struct KeyRun {
  const uint16_t* keys;
  const uint16_t* after;
  int64_t row;  // elements from a pair of dimensions to the next
};

// Scores of Q queries against T tiles of positions.
template <int Q, int T>
inline void score_block(const Query* queries, int64_t head_dim, const KeyRun& run, float scale,
                        float* scores, int64_t stride) {
  TileF sum[Q][T];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sum[q][t] = splat_tile(0.0f);
  const uint16_t *keys = run.keys, *after = run.after;
  for (int64_t i = 0; i < head_dim; i += 2, keys += run.row, after += run.row) {
    decltype(Products::keys(TileI())) key[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      key[t] = Products::keys(load_tile(keys + t * half));
      fetch(after + t * half);
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const auto factor = Products::factor(queries + q * head_dim + i);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sum[q][t] = Products::add(sum[q][t], factor, key[t]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      store_tile(scores + q * stride + t * side, sum[q][t] * splat_tile(scale));
}

// Softmax weights of the positions begin .. end - 1 of one query in place; returns their sum. Whole
// registers are worked on: what lies in them besides counts as -infinity, whose weight is 0.
inline float soften(float* scores, int64_t begin, int64_t end) {
  const F16 lowest = splat(-__builtin_inff());
  float *first = scores + begin / lanes * lanes, *last = scores + (end - 1) / lanes * lanes;
  if (begin % lanes) store(first, select(leading(begin % lanes), lowest, load(first)));
  store(last, load(last, (end - 1) % lanes + 1, lowest));
  F16 largest = lowest;
  for (const float* at = first; at <= last; at += lanes) largest = max(largest, load(at));
  const F16 shift = splat(reduce_max(largest));
  F16 sum = splat(0.0f);
  for (float* at = first; at <= last; at += lanes) {
    const F16 weight = exp_ps(load(at) - shift);
    store(at, weight);
    sum = sum + weight;
  }
  return reduce_add(sum);
}

// A run of slots.
struct Range {
  int64_t begin, end;
};

// Halves of V that `queries` are multiplied with at once.
constexpr int64_t halves_for(int64_t queries) { return queries <= kWideQueries ? 2 : 1; }

// Some dimensions of V: one half or two, the last perhaps not full.
struct Slice {
  int64_t dimension, pairs, halves;

  Slice(int64_t head_dim, int64_t dimension, int64_t most)
      : dimension(dimension),
        pairs((head_dim - dimension) / 2),
        halves(pairs > side && most > 1 ? 2 : 1) {}
  bool full() const { return pairs >= halves * side; }
  int64_t pairs_of(int64_t h) const { return pairs - h * side; }
};

// `sums` [Q][H][even, odd][side] += weights [Q][slot] x V of the slots of a range, in a slice of H.
template <int Q, int H, bool kFull>
inline void weigh_block(const HeadCache& head, const Slice& slice, const float* weights,
                        int64_t stride, Range slots, float* sums) {
  EvenOdd sum[Q][H];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      const float* at = sums + (q * H + h) * half;
      sum[q][h] = {as_float(load_tile(at)), as_float(load_tile(at + side))};
    }
  for (int64_t begin = slots.begin, size; begin < slots.end; begin += size) {
    const int64_t in_block = head.block_size - begin % head.block_size, left = slots.end - begin;
    size = in_block < left ? in_block : left;
    const uint16_t* value = head.value(begin) + slice.dimension;
    const int64_t next = 2 * size < left ? begin + 2 * size : begin;
    const uint16_t* after = head.value(next) + slice.dimension;
    for (int64_t j = 0; j < size; ++j, value += head.head_dim, after += head.head_dim) {
      EvenOdd v[H];
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        const uint16_t* at = value + h * half;
        v[h] = widen(kFull ? load_tile(at) : load_tile(at, slice.pairs_of(h)));
        fetch(after + h * half);
      }
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const TileF weight = splat_tile(weights[q * stride + begin + j]);
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) {
          sum[q][h].even = fma(weight, v[h].even, sum[q][h].even);
          sum[q][h].odd = fma(weight, v[h].odd, sum[q][h].odd);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      float* at = sums + (q * H + h) * half;
      store_tile(at, sum[q][h].even);
      store_tile(at + side, sum[q][h].odd);
    }
}

// One slot more for one query.
inline void weigh_slot(const uint16_t* value, const Slice& slice, float weight, float* sums) {
  const TileF factor = splat_tile(weight);
  for (int64_t h = 0; h < slice.halves; ++h) {
    const EvenOdd v = widen(load_tile(value + h * half, slice.pairs_of(h)));
    float* at = sums + h * half;
    store_tile(at, fma(factor, v.even, as_float(load_tile(at))));
    store_tile(at + side, fma(factor, v.odd, as_float(load_tile(at + side))));
  }
}

// The sums of a half or less, divided and in order.
inline void store_half(const float* sums, float total, int64_t pairs, float* out) {
  const TileF z = splat_tile(total);
  const TileF even = as_float(load_tile(sums)) / z, odd = as_float(load_tile(sums + side)) / z;
  store_interleaved(out, even, odd, pairs);
}

// Some query vectors of one kv head of one sequence: `first` counts [row][head of the group].
struct QueryTile {
  const Attend& t;
  int64_t kv_head, first, count;
  HeadCache head;
  int64_t row_offset, context, group, index;
  bool tree;

  QueryTile(const Attend& t, int64_t sequence, int64_t kv_head, int64_t first, int64_t count)
      : t(t),
        kv_head(kv_head),
        first(first),
        count(count),
        head(t.head(sequence, kv_head)),
        row_offset(t.batch.row_offsets[sequence]),
        context(t.batch.context_lengths[sequence]),
        group(t.group()),
        index(t.query_index(sequence, kv_head) + first),
        tree(t.batch.is_tree[sequence]) {}

  int64_t node(int64_t q) const { return (first + q) / group; }
  // Slots up to the node's own: those a row may see.
  int64_t reach(int64_t q) const { return context + node(q) + 1; }
  // The logical positions that query q sees. Those up to the root's are slots.
  Range seen(int64_t q) const {
    const int64_t end = tree ? context + 1 + __builtin_popcountll(ancestors(q)) : reach(q);
    return {t.start(end), end};
  }
  // No query from q on sees a slot before this one.
  int64_t oldest(int64_t q) const { return t.start(tree ? context + 1 : reach(q)); }
  // The slots that the queries q .. q + count - 1 all see, but for ancestors.
  Range shared(int64_t q, int64_t count) const {
    const int64_t end = tree ? context + 1 : reach(q);
    int64_t begin = 0;
    for (int64_t i = q; t.a.window && i < q + count; ++i)
      if (seen(i).begin > begin) begin = seen(i).begin;
    return {begin < end ? begin : end, end};
  }
  uint64_t ancestors(int64_t q) const { return t.batch.ancestors[row_offset + node(q)]; }
  const Query* query(int64_t q) const { return t.queries + (index + q) * t.a.head_dim; }
  float* output(int64_t q) const {
    const int64_t row = row_offset + node(q), h = kv_head * group + (first + q) % group;
    return t.out + (row * t.a.heads + h) * t.a.head_dim;
  }
};

// Size of the next of the even blocks, of up to `most`, that `left` queries make.
inline int64_t block_of(int64_t left, int64_t most) {
  const int64_t blocks = (left + most - 1) / most;
  return (left + blocks - 1) / blocks;
}

// Scores of a tile against the slots begin .. end - 1 (begin a multiple of 16).
inline void score(const QueryTile& tile, int64_t begin, int64_t end, float* scores) {
  const HeadCache& head = tile.head;
  const int64_t stride = tile.t.stride, last = tile.reach(tile.count - 1);
  for (int64_t slot = begin, size; slot < end; slot += size) {
    const int64_t in_block = head.block_size - slot % head.block_size;
    const int64_t left = in_block < end - slot ? in_block : round_up(end - slot, lanes);
    const int64_t next = slot + keys_ahead;
    const KeyRun run{head.key(slot), head.key(next < last ? next : slot), head.key_row()};
    with_power<kKeyTiles>(left / side, [&](auto t) {
      size = t.value * side;
      for (int64_t q = 0, queries; q < tile.count; q += queries) {
        queries = block_of(tile.count - q, kKeyQueries);
        if (tile.reach(q + queries - 1) <= slot || tile.oldest(q) >= slot + size) continue;
        with_count<kKeyQueries>(queries, [&](auto n) {
          score_block<n.value, t.value>(tile.query(q), head.head_dim, run, tile.t.a.scale,
                                        scores + q * stride + slot, stride);
        });
      }
    });
  }
}

// The scores of a tree node's ancestors moved to their logical positions.
inline void compact(const QueryTile& tile, int64_t q, float* scores) {
  const float* below = scores + tile.context + 1;  // the root
  int64_t position = tile.context + 1;
  for (uint64_t bits = tile.ancestors(q); bits; bits &= bits - 1)
    scores[position++] = below[__builtin_ctzll(bits)];
}

// Scores of the queries q .. q + count - 1 become weights.
inline void soften_queries(const QueryTile& tile, int64_t q, int64_t count, float* scores,
                           float* totals) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = scores + i * tile.t.stride;
    if (tile.tree) compact(tile, q + i, row);
    const Range seen = tile.seen(q + i);
    totals[i] = soften(row, seen.begin, seen.end);
  }
}

// Adds values of query q one position at a time.
struct Weigher {
  const QueryTile& tile;
  int64_t q;
  const Slice& slice;
  const float* weights;
  float* sums;

  void add(int64_t slot, int64_t position) const {
    const uint16_t* value = tile.head.value(slot) + slice.dimension;
    weigh_slot(value, slice, weights[position], sums);
  }
  // What it sees before the slots that its block shares.
  void before(Range shared) const {
    for (int64_t j = tile.seen(q).begin; j < shared.begin; ++j) add(j, j);
  }
  // And behind them.
  void after(Range shared) const {
    const Range seen = tile.seen(q);
    if (tile.tree) return add_ancestors(seen.begin);
    const int64_t begin = seen.begin > shared.end ? seen.begin : shared.end;
    for (int64_t j = begin; j < seen.end; ++j) add(j, j);
  }
  void add_ancestors(int64_t oldest) const {
    const int64_t below = tile.context + 1;  // the root
    int64_t position = below;
    for (uint64_t bits = tile.ancestors(q); bits; bits &= bits - 1, ++position)
      if (position >= oldest) add(below + __builtin_ctzll(bits), position);
  }
};

// The output of `count` queries from q on, in a slice of the dimensions.
inline void weigh(const QueryTile& tile, int64_t q, int64_t count, const Slice& slice,
                  const float* weights, const float* totals) {
  const int64_t stride = tile.t.stride, width = half * slice.halves;
  const Range shared = tile.shared(q, count);
  alignas(64) float sums[kValueQueries * 2 * half];
  __builtin_memset(sums, 0, count * width * sizeof(float));
  const auto weigher = [&](int64_t i) {
    return Weigher{tile, q + i, slice, weights + i * stride, sums + i * width};
  };
  for (int64_t i = 0; tile.t.a.window && i < count; ++i) weigher(i).before(shared);
  with_count<kValueQueries>(count, [&](auto n) {
    with_count<halves_for(n.value)>(slice.halves, [&](auto h) {
      const auto block = slice.full() ? weigh_block<n.value, h.value, true>
                                      : weigh_block<n.value, h.value, false>;
      block(tile.head, slice, weights, stride, shared, sums);
    });
  });
  for (int64_t i = 0; i < count; ++i) {
    weigher(i).after(shared);
    float* out = tile.output(q + i) + slice.dimension;
    for (int64_t h = 0; h < slice.halves; ++h)
      store_half(sums + i * width + h * half, totals[i], slice.pairs_of(h), out + h * half);
  }
}

inline void attend_tile(const QueryTile& tile, float* scores) {
  const int64_t stride = tile.t.stride, d = tile.head.head_dim;
  score(tile, tile.oldest(0) / lanes * lanes, tile.reach(tile.count - 1), scores);
  for (int64_t q = 0, count; q < tile.count; q += count) {
    count = block_of(tile.count - q, kValueQueries);
    float totals[kValueQueries];
    soften_queries(tile, q, count, scores + q * stride, totals);
    const int64_t halves = halves_for(count);
    for (int64_t dimension = 0; dimension < d; dimension += halves * half)
      weigh(tile, q, count, Slice(d, dimension, halves), scores + q * stride, totals);
  }
}
