// What sampling asks of logits: the largest, the k largest, and the largest under Gumbel noise.
//
// All three read a row once. argmax keeps only a maximum in the main loop (one operation for 16
// logits) and looks for its index in the one 4096-wide span that raised it last. A NaN never wins:
// max returns its second operand when the first is NaN.
//
// Gumbel noise is -log(-log u) with u from Philox4x32-10 (Salmon et al., SC 2011), four tokens a
// counter. 16 counters run side by side: lane (b, e) of register w holds word w of counter 4 e + b,
// so that a 4 x 4 transpose within each 128-bit lane leaves the words of 64 tokens in order.
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

inline __m512 negative_infinity() { return _mm512_set1_ps(-__builtin_inff()); }

// The largest of x[0..count-1] that is no NaN, or -infinity.
inline float span_max(const float* x, int64_t count) {
  __m512 most[4] = {negative_infinity(), negative_infinity(), negative_infinity(),
                    negative_infinity()};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int k = 0; k < 4; ++k) most[k] = _mm512_max_ps(_mm512_loadu_ps(x + i + 16 * k), most[k]);
  for (; i < count; i += 16) {
    const __m512 tail =
        _mm512_mask_loadu_ps(negative_infinity(), low_bits(count - i), x + i);
    most[0] = _mm512_max_ps(tail, most[0]);
  }
  return _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
}

// First index of `value` in x[0..count-1], or -1.
inline int64_t find(const float* x, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = low_bits(count - i);
    const __m512 lanes16 = _mm512_maskz_loadu_ps(mask, x + i);
    const __mmask16 hit =
        _mm512_mask_cmp_ps_mask(mask, lanes16, _mm512_set1_ps(value), _CMP_EQ_OQ);
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
    const __mmask16 mask = low_bits(columns - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, logits + i);
    uint32_t join = mask;
    if (!open) join = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(threshold), _CMP_GT_OQ);
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
inline __m512 log_ps(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i exponent =
      _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f3504f3)), 23);
  const __m512 mantissa =
      _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(exponent, 23)));
  const __m512 e = _mm512_cvtepi32_ps(exponent);
  const __m512 r = _mm512_sub_ps(mantissa, _mm512_set1_ps(1.0f));
  __m512 q = _mm512_set1_ps(-0x1.38b57ap-4f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.055b6ap-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(-0x1.0d8542p-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.22da1ep-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(-0x1.547244p-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.99a008p-3f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(-0x1.000226p-2f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.555554p-2f));
  const __m512 square = _mm512_mul_ps(r, r);
  __m512 tail = _mm512_mul_ps(_mm512_mul_ps(square, r), q);
  tail = _mm512_fmadd_ps(e, _mm512_set1_ps(-0x1.05c610p-29f), tail);  // ln 2, low part
  tail = _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), square, tail);
  return _mm512_fmadd_ps(e, _mm512_set1_ps(0x1.62e430p-1f), _mm512_add_ps(r, tail));
}

struct Product {
  __m512i high, low;
};
inline Product multiply_words(__m512i a, uint32_t factor) {
  const __m512i m = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(a, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  return {_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd),
          _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32))};
}

struct Noise {
  uint64_t seed;
  uint32_t sample, position;
};

// Random words of 64 tokens from token `first` (a multiple of 64) on, in order.
inline void random_words(const Noise& noise, int64_t first, __m512i* words) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i c0 = _mm512_add_epi32(order, _mm512_set1_epi32(static_cast<int32_t>(first / 4)));
  __m512i c1 = _mm512_set1_epi32(static_cast<int32_t>(noise.position));
  __m512i c2 = _mm512_set1_epi32(static_cast<int32_t>(noise.sample));
  __m512i c3 = _mm512_setzero_si512();
  uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const Product p = multiply_words(c0, 0xD2511F53u), q = multiply_words(c2, 0xCD9E8D57u);
    const __m512i key0 = _mm512_set1_epi32(static_cast<int32_t>(k0));
    const __m512i key1 = _mm512_set1_epi32(static_cast<int32_t>(k1));
    c0 = _mm512_ternarylogic_epi32(q.high, c1, key0, 0x96);  // three-way exclusive or
    c2 = _mm512_ternarylogic_epi32(p.high, c3, key1, 0x96);
    c1 = q.low;
    c3 = p.low;
  }
  const __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpackhi_epi32(c0, c1);
  const __m512i c = _mm512_unpacklo_epi32(c2, c3), d = _mm512_unpackhi_epi32(c2, c3);
  words[0] = _mm512_unpacklo_epi64(a, c);
  words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d);
  words[3] = _mm512_unpackhi_epi64(b, d);
}

// u = (w >> 9 + 1/2) 2^-23 is exact in fp32.
inline __m512 gumbel(__m512i words) {
  const __m512 count = _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 9));
  const __m512 u = _mm512_mul_ps(_mm512_add_ps(count, _mm512_set1_ps(0.5f)),
                                 _mm512_set1_ps(0x1p-23f));
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return _mm512_xor_ps(log_ps(_mm512_xor_ps(log_ps(u), sign)), sign);
}

// The search for the best noisy score in a row of logits.
struct GumbelSearch {
  const float* logits;
  int64_t columns;
  float inverse_temperature, threshold;
  Noise noise;

  // Scaled logits of 64 tokens; those that are not candidates are left out of `masks`.
  inline float load(int64_t first, __m512* scaled, __mmask16* masks) const {
    __m512 most = negative_infinity();
    for (int i = 0; i < 4; ++i) {
      const int64_t left = columns - first - 16 * i;
      const __mmask16 inside = left > 0 ? low_bits(left) : __mmask16{0};
      const __m512 x = _mm512_maskz_loadu_ps(inside, logits + first + 16 * i);
      masks[i] = _mm512_mask_cmp_ps_mask(inside, x, _mm512_set1_ps(threshold), _CMP_GE_OQ);
      scaled[i] = _mm512_mul_ps(x, _mm512_set1_ps(inverse_temperature));
      most = _mm512_mask_max_ps(most, masks[i], scaled[i], most);
    }
    return _mm512_reduce_max_ps(most);
  }

  // The best of tokens begin..end-1; a group that cannot reach `floor` is passed over.
  Scored best(int64_t begin, int64_t end, float floor) const {
    __m512 best_score = negative_infinity();
    __m512i best_id = _mm512_set1_epi32(-1);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t first = begin; first < end; first += 64) {
      __m512 scaled[4];
      __mmask16 masks[4];
      const float most = load(first, scaled, masks);
      if (!(most + largest_gumbel >= floor)) continue;
      __m512i words[4];
      random_words(noise, first, words);
      for (int i = 0; i < 4; ++i) {
        const __m512 score = _mm512_add_ps(scaled[i], gumbel(words[i]));
        const __m512i ids = _mm512_add_epi32(
            lane, _mm512_set1_epi32(static_cast<int32_t>(first + 16 * i)));
        const __mmask16 wins =
            _mm512_mask_cmp_ps_mask(masks[i], score, best_score, _CMP_GT_OQ);
        best_score = _mm512_mask_mov_ps(best_score, wins, score);
        best_id = _mm512_mask_mov_epi32(best_id, wins, ids);
      }
      const float reached = _mm512_reduce_max_ps(best_score);
      if (reached > floor) floor = reached;
    }
    return pick(best_score, best_id);
  }

  static Scored pick(__m512 scores, __m512i ids) {
    alignas(64) float score[16];
    alignas(64) int32_t id[16];
    _mm512_store_ps(score, scores);
    _mm512_store_si512(id, ids);
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
