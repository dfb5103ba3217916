// Rotary grouped-query attention over a paged BF16 cache, for 16 lanes of fp32.
//
// For a query row with visible slots s_0 < s_1 < ... < s_{n-1} (logical positions 0..n-1):
//   a_j = scale * (q . k_j)     one accumulator a position, pairs of dimensions ascending (dpbf16)
//   m   = max a_j,  p_j = e^(a_j - m)
//   z   = sum p_j               16 lanes by j mod 16, j ascending, then one fixed tree
//   o_d = (sum p_j v_jd) / z    one accumulator a dimension, j strictly ascending (fp32 fma)
// The visible slots of a tree node are all slots of the context, then its ancestors: they count as
// consecutive logical positions and the others are skipped. Nothing above knows of threads, of
// other rows or of blocks, so chain, tree, chunked prefill and plain decoding give equal bits.
//
// Cache: a block holds for each kv head K, then V.
//   K: block_size / 16 tiles [head_dim / 2][16 positions][2]: one dpbf16 with a broadcast query pair
//      adds two dimensions to 16 positions' scores, and no sum over lanes is ever needed.
//   V: [block_size][head_dim]. 32 values are one register of 16 pairs; the low halves (shifted) are
//      the even dimensions, the high halves (masked) the odd ones: two operations widen 32 values.
// Queries: all heads of a group and all rows of a sequence share K and V, so they are one list of
// query vectors [row][head of the group]. Blocks of up to 6 of them are held in registers.

constexpr int64_t query_block = 6;  // x 4 key tiles, or x 4 registers of 16 dimensions
constexpr int64_t tile_block = 4;
constexpr int64_t lanes = 16;

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

  uint16_t* key_tile(int64_t slot) const {
    const int64_t block = slot / block_size, tile = slot % block_size / lanes;
    return base + table[block] * block_elements + tile * lanes * head_dim;
  }
  uint16_t* value(int64_t slot) const {
    const int64_t block = slot / block_size, row = slot % block_size;
    return base + table[block] * block_elements + (block_size + row) * head_dim;
  }
};

// x [2 * half] fp32, rotated and rounded to BF16.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t half,
                   uint16_t* out) {
  for (int64_t i = 0; i < half; i += lanes) {
    const __mmask16 mask = low_bits(half - i);
    const __m512 low = _mm512_maskz_loadu_ps(mask, x + i);
    const __m512 high = _mm512_maskz_loadu_ps(mask, x + half + i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i);
    const __m512 s = _mm512_maskz_loadu_ps(mask, sin + i);
    const __m512 first = _mm512_sub_ps(_mm512_mul_ps(low, c), _mm512_mul_ps(high, s));
    const __m512 second = _mm512_add_ps(_mm512_mul_ps(high, c), _mm512_mul_ps(low, s));
    _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(first));
    _mm256_mask_storeu_epi16(out + half + i, mask, (__m256i)_mm512_cvtneps_pbh(second));
  }
}

inline void round_values(const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += lanes) {
    const __mmask16 mask = low_bits(count - i);
    const __m512 values = _mm512_maskz_loadu_ps(mask, x + i);
    _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(values));
  }
}

// Rotated key [head_dim] -> column `slot` of its tile.
inline void append_key(const HeadCache& head, int64_t slot, const uint16_t* key) {
  uint16_t* column = head.key_tile(slot) + slot % lanes * 2;
  for (int64_t i = 0; i < head.head_dim / 2; ++i)
    __builtin_memcpy(column + i * lanes * 2, key + 2 * i, 4);
}

// What one call works on, and where things lie in its scratch.
struct Attend {
  const quasar_attention& a;
  const quasar_batch& batch;
  const float* qkv;
  uint16_t* cache;
  float* out;
  uint16_t* queries;  // [kv_heads][rows][group][head_dim] BF16
  float* scores;      // a thread: [tile][score_stride]
  int64_t tile, score_stride;

  int64_t group() const { return a.heads / a.kv_heads; }
  HeadCache head(int64_t sequence, int64_t kv_head) const {
    return HeadCache(a, cache, batch.block_tables + sequence * batch.table_stride, kv_head);
  }
};

// Phase 1, one row: queries to scratch, key and value to the cache.
inline void append_row(const Attend& t, int64_t sequence, int64_t row) {
  const quasar_attention& a = t.a;
  const int64_t d = a.head_dim, half = d / 2, group = t.group();
  const int64_t slot =
      t.batch.context_lengths[sequence] + row - t.batch.row_offsets[sequence];
  const float* x = t.qkv + row * (a.heads + 2 * a.kv_heads) * d;
  const float* cos = a.cos + t.batch.positions[row] * half;
  const float* sin = a.sin + t.batch.positions[row] * half;
  alignas(64) uint16_t key[1024];
  for (int64_t h = 0; h < a.heads; ++h) {
    const int64_t index = (h / group * t.batch.rows + row) * group + h % group;
    rotate(x + h * d, cos, sin, half, t.queries + index * d);
  }
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    const HeadCache head = t.head(sequence, h);
    rotate(x + (a.heads + h) * d, cos, sin, half, key);
    append_key(head, slot, key);
    round_values(x + (a.heads + a.kv_heads + h) * d, d, head.value(slot));
  }
}

// Scores of Q queries against T tiles of 16 positions.
template <int Q, int T>
inline void score_block(const uint16_t* queries, int64_t head_dim, const uint16_t* const* tiles,
                        float scale, float* scores, int64_t stride) {
  __m512 sum[Q][T];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sum[q][t] = _mm512_setzero_ps();
  for (int64_t i = 0; i < head_dim; i += 2) {
    __m512bh key[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) key[t] = (__m512bh)_mm512_loadu_si512(tiles[t] + i * lanes);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      int32_t pair;
      __builtin_memcpy(&pair, queries + q * head_dim + i, 4);
      const __m512bh query = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sum[q][t] = _mm512_dpbf16_ps(sum[q][t], query, key[t]);
    }
  }
  const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      _mm512_storeu_ps(scores + q * stride + t * lanes, _mm512_mul_ps(sum[q][t], factor));
}

template <int Q>
inline void score_tiles(const uint16_t* queries, int64_t head_dim, const uint16_t* const* tiles,
                        int64_t count, float scale, float* scores, int64_t stride) {
  if (count == tile_block) {
    score_block<Q, tile_block>(queries, head_dim, tiles, scale, scores, stride);
    return;
  }
  for (int64_t t = 0; t < count; ++t)
    score_block<Q, 1>(queries, head_dim, tiles + t, scale, scores + t * lanes, stride);
}

// Softmax weights of one query in place; returns their sum. scores [count], then garbage.
inline float soften(float* scores, int64_t count) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  __m512 largest = lowest;
  for (int64_t j = 0; j < count; j += lanes)
    largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(lowest, low_bits(count - j), scores + j));
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < count; j += lanes) {
    const __m512 score = _mm512_maskz_loadu_ps(low_bits(count - j), scores + j);
    const __m512 weight = _mm512_maskz_mov_ps(low_bits(count - j), exp_ps(_mm512_sub_ps(score, shift)));
    _mm512_storeu_ps(scores + j, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// 32 dimensions of V as even and odd ones.
struct Halves {
  __m512 even, odd;
};
inline Halves widen(const uint16_t* value, __mmask16 mask) {
  const __m512i pairs = _mm512_maskz_loadu_epi32(mask, value);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)))};
}

// `sums` [Q][2][32] += weights [Q][count] x V of slots first .. first + count - 1, 64 dimensions.
template <int Q>
inline void weigh_block(const HeadCache& head, int64_t dimension, const __mmask16* masks,
                        const float* weights, int64_t stride, int64_t count, float* sums) {
  __m512 sum[Q][4];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[q][i] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < count; begin += head.block_size) {
    const int64_t size = count - begin < head.block_size ? count - begin : head.block_size;
    const uint16_t* value = head.value(begin) + dimension;
    for (int64_t j = 0; j < size; ++j, value += head.head_dim) {
      const Halves first = widen(value, masks[0]), second = widen(value + 32, masks[1]);
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const __m512 weight = _mm512_set1_ps(weights[q * stride + begin + j]);
        sum[q][0] = _mm512_fmadd_ps(weight, first.even, sum[q][0]);
        sum[q][1] = _mm512_fmadd_ps(weight, first.odd, sum[q][1]);
        sum[q][2] = _mm512_fmadd_ps(weight, second.even, sum[q][2]);
        sum[q][3] = _mm512_fmadd_ps(weight, second.odd, sum[q][3]);
      }
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(sums + q * 64 + i * 16, sum[q][i]);
}

// One slot more for one query.
inline void weigh_slot(const uint16_t* value, const __mmask16* masks, float weight, float* sums) {
  const __m512 factor = _mm512_set1_ps(weight);
  for (int half = 0; half < 2; ++half) {
    const Halves v = widen(value + 32 * half, masks[half]);
    float* at = sums + 32 * half;
    _mm512_storeu_ps(at, _mm512_fmadd_ps(factor, v.even, _mm512_loadu_ps(at)));
    _mm512_storeu_ps(at + 16, _mm512_fmadd_ps(factor, v.odd, _mm512_loadu_ps(at + 16)));
  }
}

// 32 sums, even then odd dimensions, divided and in order.
inline void store_half(const float* sums, float total, __mmask16 mask, float* out) {
  const __m512 z = _mm512_set1_ps(total);
  const __m512 even = _mm512_div_ps(_mm512_loadu_ps(sums), z);
  const __m512 odd = _mm512_div_ps(_mm512_loadu_ps(sums + 16), z);
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const auto doubled = [](uint32_t bits) -> __mmask16 {  // a bit a pair -> a bit a value
    __mmask16 wide = 0;
    for (int i = 0; i < 8; ++i) wide |= (bits >> i & 1) * (3u << (2 * i));
    return wide;
  };
  _mm512_mask_storeu_ps(out, doubled(mask & 0xff), _mm512_permutex2var_ps(even, low, odd));
  _mm512_mask_storeu_ps(out + 16, doubled(mask >> 8), _mm512_permutex2var_ps(even, high, odd));
}

// Some query vectors of one kv head of one sequence: `first` counts [row][head of the group].
struct QueryTile {
  const Attend& t;
  int64_t sequence, kv_head, first, count;
  HeadCache head;
  int64_t row_offset, context, group;
  bool tree;

  QueryTile(const Attend& t, int64_t sequence, int64_t kv_head, int64_t first, int64_t count)
      : t(t),
        sequence(sequence),
        kv_head(kv_head),
        first(first),
        count(count),
        head(t.head(sequence, kv_head)),
        row_offset(t.batch.row_offsets[sequence]),
        context(t.batch.context_lengths[sequence]),
        group(t.group()),
        tree(t.batch.is_tree[sequence]) {}

  int64_t node(int64_t q) const { return (first + q) / group; }
  // Slots up to the node's own: those a row may see.
  int64_t reach(int64_t q) const { return context + node(q) + 1; }
  // The leading slots that query q and all after it see.
  int64_t shared(int64_t q) const { return tree ? context : reach(q); }
  uint64_t ancestors(int64_t q) const { return t.batch.ancestors[row_offset + node(q)]; }
  const uint16_t* query(int64_t q) const {
    const int64_t base = (kv_head * t.batch.rows + row_offset) * group;
    return t.queries + (base + first + q) * t.a.head_dim;
  }
  float* output(int64_t q) const {
    const int64_t row = row_offset + node(q), h = kv_head * group + (first + q) % group;
    return t.out + (row * t.a.heads + h) * t.a.head_dim;
  }
};

#define QUASAR_FOR_QUERIES(count, call) \
  switch (count) {                      \
    case 1: call(1); break;             \
    case 2: call(2); break;             \
    case 3: call(3); break;             \
    case 4: call(4); break;             \
    case 5: call(5); break;             \
    default: call(6); break;            \
  }

inline int64_t block_of(int64_t left) { return left < query_block ? left : query_block; }

inline void score(const QueryTile& tile, float* scores) {
  const int64_t d = tile.head.head_dim, stride = tile.t.score_stride;
  const int64_t reach = tile.reach(tile.count - 1);
  const uint16_t* keys[tile_block];
  for (int64_t slot = 0; slot < reach; slot += tile_block * lanes) {
    int64_t tiles = (reach - slot + lanes - 1) / lanes;
    if (tiles > tile_block) tiles = tile_block;
    for (int64_t i = 0; i < tiles; ++i) keys[i] = tile.head.key_tile(slot + i * lanes);
    for (int64_t q = 0; q < tile.count; q += query_block) {
      const int64_t queries = block_of(tile.count - q);
      if (tile.reach(q + queries - 1) <= slot) continue;
#define QUASAR_SCORE(n) \
  score_tiles<n>(tile.query(q), d, keys, tiles, tile.t.a.scale, scores + q * stride + slot, stride)
      QUASAR_FOR_QUERIES(queries, QUASAR_SCORE)
#undef QUASAR_SCORE
    }
  }
}

// Visible scores of a tree node moved together, in logical order; returns how many there are.
inline int64_t compact(const QueryTile& tile, int64_t q, float* scores) {
  if (!tile.tree) return tile.reach(q);
  int64_t visible = tile.context;
  for (uint64_t bits = tile.ancestors(q); bits; bits &= bits - 1)
    scores[visible++] = scores[tile.context + __builtin_ctzll(bits)];
  return visible;
}

// The slots of query q behind the `shared` ones of its block.
inline void weigh_own(const QueryTile& tile, int64_t q, int64_t shared, int64_t dimension,
                      const __mmask16* masks, const float* weights, float* sums) {
  if (!tile.tree) {
    for (int64_t j = shared; j < tile.reach(q); ++j)
      weigh_slot(tile.head.value(j) + dimension, masks, weights[j], sums);
    return;
  }
  int64_t j = tile.context;
  for (uint64_t bits = tile.ancestors(q); bits; bits &= bits - 1) {
    const int64_t slot = tile.context + __builtin_ctzll(bits);
    weigh_slot(tile.head.value(slot) + dimension, masks, weights[j++], sums);
  }
}

// Weighted values of `queries` queries from q on, 64 dimensions from `dimension` on.
inline void weigh(const QueryTile& tile, int64_t q, int64_t queries, int64_t dimension,
                  const float* weights, const float* totals) {
  const int64_t stride = tile.t.score_stride, shared = tile.shared(q);
  const int64_t pairs = (tile.head.head_dim - dimension) / 2;
  const __mmask16 masks[2] = {low_bits(pairs), pairs > lanes ? low_bits(pairs - lanes) : __mmask16{0}};
  alignas(64) float sums[query_block * 64];
#define QUASAR_WEIGH(n) weigh_block<n>(tile.head, dimension, masks, weights, stride, shared, sums)
  QUASAR_FOR_QUERIES(queries, QUASAR_WEIGH)
#undef QUASAR_WEIGH
  for (int64_t i = 0; i < queries; ++i) {
    float* own = sums + i * 64;
    weigh_own(tile, q + i, shared, dimension, masks, weights + i * stride, own);
    float* out = tile.output(q + i) + dimension;
    store_half(own, totals[i], masks[0], out);
    store_half(own + 32, totals[i], masks[1], out + 32);
  }
}

inline void attend_tile(const QueryTile& tile, float* scores) {
  const int64_t stride = tile.t.score_stride;
  score(tile, scores);
  for (int64_t q = 0; q < tile.count; q += query_block) {
    const int64_t queries = block_of(tile.count - q);
    float totals[query_block];
    for (int64_t i = 0; i < queries; ++i) {
      float* row = scores + (q + i) * stride;
      totals[i] = soften(row, compact(tile, q + i, row));
    }
    for (int64_t d = 0; d < tile.head.head_dim; d += 64)
      weigh(tile, q, queries, d, scores + q * stride, totals);
  }
}

// Phase 1: every row's share of the cache and of the queries.
inline void append_rows(const Attend& t, Queue& queue) {
  int64_t sequence = 0;
  queue.each(t.batch.rows, [&](int64_t row) {
    while (row >= t.batch.row_offsets[sequence + 1]) ++sequence;
    append_row(t, sequence, row);
  });
}

// Phase 2: tiles as threads become free; the longest of a sequence come first.
inline void attend_tiles(const Attend& t, Queue& queue, int32_t thread) {
  float* scores = t.scores + thread * t.tile * t.score_stride;
  int64_t item = queue.next(), begin = 0;
  for (int64_t s = 0; s < t.batch.sequences; ++s) {
    const int64_t rows = t.batch.row_offsets[s + 1] - t.batch.row_offsets[s];
    const int64_t queries = rows * t.group(), tiles = (queries + t.tile - 1) / t.tile;
    const int64_t end = begin + tiles * t.a.kv_heads;
    for (; item < end; item = queue.next()) {
      const int64_t kv_head = (item - begin) / tiles, tile = tiles - 1 - (item - begin) % tiles;
      const int64_t first = tile * t.tile;
      const int64_t count = queries - first < t.tile ? queries - first : t.tile;
      attend_tile(QueryTile(t, s, kv_head, first, count), scores);
    }
    begin = end;
  }
}

constexpr int64_t query_tile = 24;

inline int64_t query_bytes(const quasar_attention& a, int64_t rows) {
  return round_up(rows * a.heads * a.head_dim * 2, 64);
}

inline int64_t score_stride_of(int64_t context) { return round_up(context, 64) + 16; }

size_t attention_scratch_bytes(const quasar_attention* a, int64_t rows, int64_t context,
                               int32_t threads) {
  return query_bytes(*a, rows) + threads * query_tile * score_stride_of(context) * 4;
}

size_t cache_block_bytes(const quasar_attention* a) {
  return static_cast<size_t>(a->kv_heads * head_elements(*a)) * 2;
}

void attend(const quasar_attention* a, const quasar_batch* batch, const float* qkv,
            uint16_t* cache, void* scratch, float* out, int32_t threads) {
  int64_t longest = 0;
  for (int64_t s = 0; s < batch->sequences; ++s) {
    const int64_t rows = batch->row_offsets[s + 1] - batch->row_offsets[s];
    const int64_t length = batch->context_lengths[s] + rows;
    if (length > longest) longest = length;
  }
  char* memory = static_cast<char*>(scratch);
  const Attend t{*a,
                 *batch,
                 qkv,
                 cache,
                 out,
                 reinterpret_cast<uint16_t*>(memory),
                 reinterpret_cast<float*>(memory + query_bytes(*a, batch->rows)),
                 query_tile,
                 score_stride_of(longest)};
  Queue rows, tiles;
  parallel(threads, [&](int32_t) { append_rows(t, rows); });
  parallel(threads, [&](int32_t thread) { attend_tiles(t, tiles, thread); });
}

void move_slots(const quasar_attention* a, uint16_t* cache, const int32_t* table,
                const int32_t* source, const int32_t* target, int64_t count) {
  for (int64_t h = 0; h < a->kv_heads; ++h) {
    const HeadCache head(*a, cache, table, h);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = source[i], to = target[i];
      const uint16_t* key = head.key_tile(from) + from % lanes * 2;
      uint16_t* kept = head.key_tile(to) + to % lanes * 2;
      for (int64_t pair = 0; pair < a->head_dim / 2; ++pair)
        __builtin_memcpy(kept + pair * lanes * 2, key + pair * lanes * 2, 4);
      __builtin_memmove(head.value(to), head.value(from), a->head_dim * 2);
    }
  }
}
