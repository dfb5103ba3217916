// What sampling asks of logits: the largest, the k largest, and the largest under Gumbel noise.
//
// All three read a row once. argmax keeps only a maximum in the main loop (one operation for 16
// logits) and looks for its index in the one 4096-wide span that raised it last. A NaN never wins:
// max returns its second operand when the first is NaN.
//
// Gumbel noise is -log(-log u) with u from Philox4x32-10 (Salmon et al., SC 2011), four tokens a
// counter. 16 counters run side by side: lane (b, e) of vector w holds word w of counter 4 e + b,
// so that a 4 x 4 transpose within each four lanes leaves the words of 64 tokens in order.
// u <= 1 - 2^-24, so no token gains more than 16.64: 64 tokens whose logits all lie further below
// the best score yet are passed over unhashed, which is exact, and is nearly all of a row.

constexpr int64_t row_parts = 64;     // pieces of a row that threads share
constexpr int64_t argmax_span = 4096;
constexpr float largest_gumbel = 16.64f;

struct Scored {
  float score;
  int64_t id;
};

// The better of two: the lower id wins a tie.
inline Scored better(Scored a, Scored b) {
  return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

inline F16 negative_infinity() { return splat(-__builtin_inff()); }

// The largest of x[0..count-1] that is no NaN, or -infinity.
inline float span_max(const float* x, int64_t count) {
  F16 most[4] = {negative_infinity(), negative_infinity(), negative_infinity(),
                 negative_infinity()};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int k = 0; k < 4; ++k) most[k] = max(load(x + i + 16 * k), most[k]);
  for (; i < count; i += 16)
    most[0] = max(load(x + i, count - i, negative_infinity()), most[0]);
  return reduce_max(max(max(most[0], most[1]), max(most[2], most[3])));
}

// First index of `value` in x[0..count-1], or -1.
inline int64_t find(const float* x, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += 16) {
    const Mask found = equal(load(x + i, count - i), splat(value));
    const uint32_t hit = lane_bits(both(leading(count - i), found));
    if (hit) return i + __builtin_ctz(hit);
  }
  return -1;
}

// The largest of a part of a row; id -1 if it holds nothing but NaN.
inline Scored part_argmax(const float* logits, int64_t begin, int64_t end) {
  Scored best{-__builtin_inff(), -1};
  int64_t span = -1;
  for (int64_t i = begin; i < end; i += argmax_span) {
    const float most = span_max(logits + i, end - i < argmax_span ? end - i : argmax_span);
    if (most > best.score) best.score = most, span = i;
  }
  const int64_t from = span < 0 ? begin : span;
  const int64_t found = find(logits + from, end - from, best.score);
  best.id = found < 0 ? -1 : from + found;
  return best;
}

inline int64_t part_begin(int64_t columns, int64_t part) {
  return columns * part / row_parts / 64 * 64;
}
inline int64_t part_end(int64_t columns, int64_t part) {
  return part + 1 == row_parts ? columns : part_begin(columns, part + 1);
}

inline int64_t winner(const Scored* parts) {
  Scored best{-__builtin_inff(), -1};
  for (int64_t p = 0; p < row_parts; ++p)
    if (parts[p].id >= 0) best = best.id < 0 ? parts[p] : better(best, parts[p]);
  return best.id < 0 ? 0 : best.id;
}

void argmax(const float* logits, int64_t rows, int64_t columns, int64_t* out, int32_t threads) {
  constexpr int64_t group = 32;
  Scored best[group * row_parts];
  for (int64_t first = 0; first < rows; first += group) {
    const int64_t count = rows - first < group ? rows - first : group;
    Queue queue;
    parallel(threads, [&](int32_t) {
      queue.each(count * row_parts, [&](int64_t i) {
        const int64_t row = i / row_parts, p = i % row_parts;
        best[i] = part_argmax(logits + (first + row) * columns, part_begin(columns, p),
                              part_end(columns, p));
      });
    });
    for (int64_t row = 0; row < count; ++row) out[first + row] = winner(best + row * row_parts);
  }
}

// A logit's bits in an order of unsigned integers that descends with its value; NaN comes last.
inline uint32_t descending(float logit) {
  if (logit != logit) return 0xffffffffu;
  const float unsigned_zero = logit + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &unsigned_zero, 4);
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

struct Candidate {
  uint32_t order, id;
};

// Stable radix sort by `order`, ascending: four passes of 8 bits leave the result in `a`.
inline void sort_candidates(Candidate* a, Candidate* b, int64_t count) {
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t starts[257] = {};
    for (int64_t i = 0; i < count; ++i) ++starts[(a[i].order >> shift & 255) + 1];
    for (int digit = 0; digit < 256; ++digit) starts[digit + 1] += starts[digit];
    for (int64_t i = 0; i < count; ++i) b[starts[a[i].order >> shift & 255]++] = a[i];
    Candidate* swapped = a;
    a = b;
    b = swapped;
  }
}

inline int64_t candidate_room(int64_t columns, int64_t k) {
  return (2 * k + 1024 < columns ? 2 * k + 1024 : columns) + 16;
}

size_t top_k_scratch_bytes(int64_t columns, int64_t k) {
  return 2 * candidate_room(columns, k) * sizeof(Candidate);
}

// Candidates are gathered until there is no room, then sorted and cut to k; from then on only a
// logit above the k-th joins (an equal one comes later and loses the tie).
void top_k(const float* logits, int64_t columns, int64_t k, void* scratch, float* values,
           int64_t* ids) {
  const int64_t room = candidate_room(columns, k);
  Candidate* kept = static_cast<Candidate*>(scratch);
  Candidate* other = kept + room;
  int64_t count = 0;
  bool open = true;  // everything joins
  float threshold = 0.0f;
  for (int64_t i = 0; i < columns; i += 16) {
    const F16 x = load(logits + i, columns - i, negative_infinity());
    uint32_t join = lane_bits(open ? leading(columns - i) : greater(x, splat(threshold)));
    for (; join; join &= join - 1) {
      const uint32_t id = static_cast<uint32_t>(i) + __builtin_ctz(join);
      kept[count++] = {descending(logits[id]), id};
    }
    if (count + 16 <= room) continue;
    sort_candidates(kept, other, count);
    count = count < k ? count : k;
    threshold = logits[kept[count - 1].id];
    open = count < k || threshold != threshold;
  }
  sort_candidates(kept, other, count);
  for (int64_t i = 0; i < k; ++i) {
    ids[i] = kept[i].id;
    values[i] = logits[kept[i].id];
  }
}

// ln x for normal x > 0: x = 2^e m with m in [1/sqrt 2, sqrt 2), ln m = r - r^2/2 + r^3 q(r) with
// r = m - 1 and q of degree 7 fitted for the least relative error (5.8e-9). Good to the last bits
// around 1, where both logarithms of the Gumbel noise have to be.
inline F16 log_ps(F16 x) {
  const I32 bits = as_int(x);
  const I32 exponent = shift_signed<23>(bits - splat(0x3f3504f3));
  const F16 r = as_float(bits - shift_left<23>(exponent)) - splat(1.0f);
  const F16 e = to_float(exponent);
  F16 q = splat(-0x1.38b57ap-4f);
  q = fma(q, r, splat(0x1.055b6ap-3f));
  q = fma(q, r, splat(-0x1.0d8542p-3f));
  q = fma(q, r, splat(0x1.22da1ep-3f));
  q = fma(q, r, splat(-0x1.547244p-3f));
  q = fma(q, r, splat(0x1.99a008p-3f));
  q = fma(q, r, splat(-0x1.000226p-2f));
  q = fma(q, r, splat(0x1.555554p-2f));
  const F16 square = r * r;
  F16 tail = square * r * q;
  tail = fma(e, splat(-0x1.05c610p-29f), tail);  // ln 2, low part
  tail = fnma(splat(0.5f), square, tail);
  return fma(e, splat(0x1.62e430p-1f), r + tail);
}

struct Noise {
  uint64_t seed;
  uint32_t sample, position;
};

// Random words of 64 tokens from token `first` (a multiple of 64) on, in order.
inline void random_words(const Noise& noise, int64_t first, I32* words) {
  const auto all = [](uint32_t word) { return splat(static_cast<int32_t>(word)); };
  const I32 order = shift_left<2>(indices() & splat(3)) + shift_right<2>(indices());
  I32 c0 = order + all(static_cast<uint32_t>(first / 4)), c1 = all(noise.position);
  I32 c2 = all(noise.sample), c3 = splat(0);
  uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const WordProduct p = multiply_words(c0, 0xD2511F53u), q = multiply_words(c2, 0xCD9E8D57u);
    c0 = exclusive_or(q.high, c1, all(k0));
    c2 = exclusive_or(p.high, c3, all(k1));
    c1 = q.low;
    c3 = p.low;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
  transpose4(words);
}

// u = (w >> 9 + 1/2) 2^-23 is exact in fp32.
inline F16 gumbel(I32 words) {
  const F16 u = (to_float(shift_right<9>(words)) + splat(0.5f)) * splat(0x1p-23f);
  return -log_ps(-log_ps(u));
}

// The search for the best noisy score in a row of logits.
struct GumbelSearch {
  const float* logits;
  int64_t columns;
  float inverse_temperature, threshold;
  Noise noise;

  // Scaled logits of 64 tokens; those that are not candidates are left out of `masks`.
  inline float scale(int64_t first, F16* scaled, Mask* masks) const {
    F16 most = negative_infinity();
    for (int i = 0; i < 4; ++i) {
      const int64_t left = columns - first - 16 * i;
      const int64_t inside = left > 0 ? left : 0;
      const F16 x = load(logits + first + 16 * i, inside);
      masks[i] = both(leading(inside), at_least(x, splat(threshold)));
      scaled[i] = x * splat(inverse_temperature);
      most = select(masks[i], max(scaled[i], most), most);
    }
    return reduce_max(most);
  }

  // The best of tokens begin..end-1; a group that cannot reach `floor` is passed over.
  Scored best(int64_t begin, int64_t end, float floor) const {
    F16 best_score = negative_infinity();
    I32 best_id = splat(-1);
    for (int64_t first = begin; first < end; first += 64) {
      F16 scaled[4];
      Mask masks[4];
      const float most = scale(first, scaled, masks);
      if (!(most + largest_gumbel >= floor)) continue;
      I32 words[4];
      random_words(noise, first, words);
      for (int i = 0; i < 4; ++i) {
        const F16 score = scaled[i] + gumbel(words[i]);
        const I32 ids = indices() + splat(static_cast<int32_t>(first + 16 * i));
        const Mask wins = both(masks[i], greater(score, best_score));
        best_score = select(wins, score, best_score);
        best_id = select(wins, ids, best_id);
      }
      const float reached = reduce_max(best_score);
      if (reached > floor) floor = reached;
    }
    return pick(best_score, best_id);
  }

  static Scored pick(F16 scores, I32 ids) {
    float score[16];
    int32_t id[16];
    store(score, scores);
    store(id, ids);
    Scored found{-__builtin_inff(), -1};
    for (int i = 0; i < 16; ++i)
      if (id[i] >= 0) found = found.id < 0 ? Scored{score[i], id[i]}
                                           : better(found, Scored{score[i], id[i]});
    return found;
  }
};

// The score of the likeliest token's group is a floor from the start: found first, it lets nearly
// everything else be passed over.
int64_t gumbel_argmax(const float* logits, int64_t columns, float inverse_temperature,
                      float threshold, uint64_t seed, uint32_t sample, uint32_t position,
                      int32_t threads) {
  const GumbelSearch search{
      logits, columns, inverse_temperature, threshold, {seed, sample, position}};
  int64_t likeliest = 0;
  argmax(logits, 1, columns, &likeliest, threads);
  const int64_t group = likeliest / 64 * 64;
  const Scored floor = search.best(group, group + 1, -__builtin_inff());
  Scored parts[row_parts];
  Queue queue;
  parallel(threads, [&](int32_t) {
    queue.each(row_parts, [&](int64_t p) {
      parts[p] = search.best(part_begin(columns, p), part_end(columns, p), floor.score);
    });
  });
  return winner(parts);
}
