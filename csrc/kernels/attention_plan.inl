// Who computes what of attention, and the table's functions. Nothing here changes a bit.

// work(sequence, item, thread) for `count(sequence)` items of each sequence. Threads own contiguous
// runs of items, so that from pass to pass a head's cache stays near one core, and then help.
template <class Count, class Work>
inline void share(const Attend& t, int32_t threads, const Count& count, const Work& work) {
  int64_t total = 0;
  for (int64_t s = 0; s < t.batch.sequences; ++s) total += count(s);
  Lanes shares(total, threads);
  parallel(threads, [&](int32_t thread) {
    shares.run(thread, [&](int64_t item) {
      int64_t s = 0;
      for (; item >= count(s); ++s) item -= count(s);
      work(s, item, thread);
    });
  });
}

inline int64_t tiles_of(const Attend& t, int64_t sequence, int64_t tile) {
  return (t.rows_of(sequence) * t.group() + tile - 1) / tile;
}

inline QueryTile tile_of(const Attend& t, int64_t sequence, int64_t kv_head, int64_t first,
                         int64_t most) {
  const int64_t left = t.rows_of(sequence) * t.group() - first;
  return QueryTile(t, sequence, kv_head, first, left < most ? left : most);
}

// Every row's keys and values to the cache, its queries to scratch. Threads take runs of 16 rows: a
// cache line of K holds 16 positions, and two cores must not write it in turns.
inline void append_rows(const Attend& t, int32_t threads) {
  const int64_t rows = t.batch.rows, runs = (rows + lanes - 1) / lanes;
  Lanes shares(runs, threads);
  parallel(runs > 1 ? threads : 1, [&](int32_t thread) {
    shares.run(thread, [&](int64_t run) {
      const int64_t end = run + 1 < runs ? (run + 1) * lanes : rows;
      int64_t sequence = 0;
      for (int64_t row = run * lanes; row < end; ++row) {
        while (row >= t.batch.row_offsets[sequence + 1]) ++sequence;
        append_row(t, sequence, row);
      }
    });
  });
}

// A tile of queries is one item; the longest of a sequence come first.
inline void attend_whole(const Attend& t, int32_t threads) {
  share(
      t, threads, [&](int64_t s) { return t.a.kv_heads * tiles_of(t, s, t.tile); },
      [&](int64_t s, int64_t item, int32_t thread) {
        const int64_t tiles = tiles_of(t, s, t.tile);
        const int64_t first = (tiles - 1 - item % tiles) * t.tile;
        attend_tile(tile_of(t, s, item / tiles, first, t.tile),
                    t.scores + thread * t.tile * t.stride);
      });
}

// Few queries, long contexts: tiles would keep too few threads busy, so scores are shared by runs
// of slots, then values by slices of the dimensions.
struct Split {
  const Attend& t;
  int64_t kv_heads, run;  // slots that are scored together
  bool wide;              // slices may take two halves

  Split(const Attend& t, int64_t span, int32_t threads) : t(t), kv_heads(t.a.kv_heads) {
    const int64_t items = 6 * threads;
    run = round_up((t.batch.sequences * kv_heads * span + items - 1) / items, 64);
    const int64_t blocks = (t.batch.rows * t.group() + kValueQueries - 1) / kValueQueries;
    wide = kv_heads * blocks * ((t.a.head_dim + 2 * half - 1) / (2 * half)) >= 4 * threads;
  }
  // The block from which on slots are seen.
  int64_t start(int64_t s) const {
    return t.start(t.batch.context_lengths[s] + 1) / t.a.block_size * t.a.block_size;
  }
  int64_t runs(int64_t s) const { return (t.reach_of(s) - start(s) + run - 1) / run; }
  // Of a slice, in halves.
  int64_t width(int64_t s) const {
    const int64_t queries = t.rows_of(s) * t.group();
    return wide ? halves_for(queries < kValueQueries ? queries : kValueQueries) : 1;
  }
  int64_t slices(int64_t s) const {
    return (t.a.head_dim + half * width(s) - 1) / (half * width(s));
  }
  int64_t blocks(int64_t s) const { return tiles_of(t, s, kValueQueries); }
  QueryTile block(int64_t s, int64_t item) const {
    const int64_t kv_head = item / blocks(s), first = item % blocks(s) * kValueQueries;
    return tile_of(t, s, kv_head, first, kValueQueries);
  }
  float* scores(const QueryTile& tile) const { return t.scores + tile.index * t.stride; }
  float* totals(const QueryTile& tile) const { return t.totals + tile.index; }

  void score_run(int64_t s, int64_t item) const {
    const QueryTile tile = tile_of(t, s, item / runs(s), 0, INT64_MAX);
    const int64_t begin = start(s) + item % runs(s) * run, reach = t.reach_of(s);
    const int64_t oldest = tile.oldest(0) / lanes * lanes;
    score(tile, begin > oldest ? begin : oldest, begin + run < reach ? begin + run : reach,
          scores(tile));
  }
  void soften_block(int64_t s, int64_t item) const {
    const QueryTile tile = block(s, item);
    soften_queries(tile, 0, tile.count, scores(tile), totals(tile));
  }
  void weigh_slice(int64_t s, int64_t item) const {
    const QueryTile tile = block(s, item / slices(s));
    const Slice slice(t.a.head_dim, item % slices(s) * half * width(s), width(s));
    weigh(tile, 0, tile.count, slice, scores(tile), totals(tile));
  }
};

inline void attend_split(const Split& split, int32_t threads) {
  const Attend& t = split.t;
  share(
      t, threads, [&](int64_t s) { return split.kv_heads * split.runs(s); },
      [&](int64_t s, int64_t item, int32_t) { split.score_run(s, item); });
  share(
      t, threads, [&](int64_t s) { return split.kv_heads * split.blocks(s); },
      [&](int64_t s, int64_t item, int32_t) { split.soften_block(s, item); });
  share(
      t, threads, [&](int64_t s) { return split.kv_heads * split.blocks(s) * split.slices(s); },
      [&](int64_t s, int64_t item, int32_t) { split.weigh_slice(s, item); });
}

// ---- The table's functions ------------------------------------------------------------------

// Who does what in one call: the plan that is estimated to end first. Unit of time: one query
// vector against the `span` of slots that it sees in the longest context; a tile costs 1.5 of them
// besides (loads of K and V), a step that threads share about 2500 cycles, a vector about
// span * head_dim / 8.
struct Plan {
  int32_t threads;
  int64_t tile = query_tile;
  bool split = false;

  Plan(const quasar_attention& a, const quasar_batch& batch, int64_t span, int32_t team)
      : threads(1) {
    const double vector = static_cast<double>(span * a.head_dim) / 8, step = 2500 / vector;
    const int64_t heads = int64_t{a.kv_heads} * batch.sequences;
    const int64_t rows = (batch.rows + batch.sequences - 1) / batch.sequences;
    const int64_t queries = rows * (a.heads / a.kv_heads);
    const double alone = static_cast<double>(heads) * (static_cast<double>(queries) + 1.5);
    if (team < 2 || alone < 2 * step) return;
    threads = team;
    double least = alone / team + 3 * step;
    split = int64_t{batch.rows} * a.heads <= most_split(team);
    if (!split) least = 1e300;
    const int64_t fewest = (queries + query_tile - 1) / query_tile;
    for (int64_t parts = fewest; parts == fewest || heads * parts < 8 * team; ++parts) {
      const int64_t size = (queries + parts - 1) / parts;
      const int64_t turns = (heads * parts + team - 1) / team;
      const double time = static_cast<double>(turns) * (static_cast<double>(size) + 1.5) + step;
      if (time >= least) continue;
      least = time;
      tile = size;
      split = false;
    }
  }

  // Query vectors of a call that may be split: each keeps its own scores.
  static int64_t most_split(int32_t threads) { return 4 * threads * query_tile; }
};

// How a call lies in its scratch: queries, then totals, then scores. Bytes; the stride is in floats
// and off the powers of two, so that neighbouring rows fall into different cache sets.
struct AttendLayout {
  int64_t queries, totals, scores, stride;

  AttendLayout(const quasar_attention& a, int64_t rows, int64_t longest, int32_t threads) {
    const int64_t vectors = rows * a.heads, whole = threads * query_tile;
    const int64_t split = vectors <= Plan::most_split(threads) ? vectors : 0;
    stride = round_up(longest, 64) + 16;
    queries = round_up(vectors * a.head_dim * int64_t{sizeof(Query)}, 64);
    totals = round_up(split * 4, 64);
    scores = (split > whole ? split : whole) * stride * 4;
  }
};

size_t attention_scratch_bytes(const quasar_attention* a, int64_t rows, int64_t context,
                               int32_t threads) {
  const AttendLayout layout(*a, rows, context, threads);
  return static_cast<size_t>(layout.queries + layout.totals + layout.scores);
}

size_t cache_block_bytes(const quasar_attention* a) {
  return static_cast<size_t>(a->kv_heads * head_elements(*a)) * 2;
}

void attend(const quasar_attention* a, const quasar_batch* batch, const float* qkv,
            uint16_t* cache, void* scratch, float* out, int32_t threads) {
  int64_t longest = 0;
  for (int64_t s = 0; s < batch->sequences; ++s) {
    const int64_t rows = batch->row_offsets[s + 1] - batch->row_offsets[s];
    const int64_t reach = batch->context_lengths[s] + rows;
    if (reach > longest) longest = reach;
  }
  const int64_t span = a->window && a->window < longest ? a->window : longest;
  const Plan plan(*a, *batch, span, threads);
  const AttendLayout layout(*a, batch->rows, longest, threads);
  char* queries = static_cast<char*>(scratch);
  char* totals = queries + layout.queries;
  char* scores = totals + layout.totals;
  const Attend t{*a,
                 *batch,
                 qkv,
                 cache,
                 out,
                 reinterpret_cast<Query*>(queries),
                 reinterpret_cast<float*>(scores),
                 reinterpret_cast<float*>(totals),
                 plan.tile,
                 layout.stride};
  append_rows(t, threads);
  if (plan.split)
    attend_split(Split(t, span, threads), threads);
  else
    attend_whole(t, plan.threads);
}

void move_slots(const quasar_attention* a, uint16_t* cache, const int32_t* table,
                const int32_t* source, const int32_t* target, int64_t count) {
  for (int64_t h = 0; h < a->kv_heads; ++h) {
    const HeadCache head(*a, cache, table, h);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = source[i], to = target[i];
      const uint16_t* pair = head.key(from);
      uint16_t* kept = head.key(to);
      for (int64_t d = 0; d < a->head_dim; d += 2, pair += head.key_row(), kept += head.key_row())
        __builtin_memcpy(kept, pair, 4);
      __builtin_memmove(head.value(to), head.value(from), a->head_dim * 2);
    }
  }
}
