// The C ABI of Quasar's CPU kernels: raw pointers, sizes, and a thread count. No torch, no STL.
// Row-major fp32 unless said. Semantics are those of src/quasar/kernels/base.py and reference.py.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

enum quasar_precision : int32_t { QUASAR_BF16 = 0, QUASAR_W8A8 = 1, QUASAR_W4A8 = 2 };
enum quasar_activation : int32_t { QUASAR_UNGATED = 0, QUASAR_SILU = 1, QUASAR_GELU_TANH = 2 };

// The rows of a linear layer, to be packed.
struct quasar_weight {
  const void* values;   // [out_features, in_features]: BF16, INT8 codes or 4-bit codes, one a byte
  const float* scale;   // W4A8 alone: [out_features, groups], at most 5 significant bits, and the
  const uint8_t* zero;  // zero points beside them, 0..15
  int64_t out_features, in_features;
  int32_t precision, group_size;  // of W4A8: 32, 64 or 128, which divides in_features
};

// A packed linear layer. `gated`: an activation; blocks of 32 rows then hold 16 gate rows and the 16
// up rows of the same outputs, and out_features counts the rows of both. `rotation`: a block size of
// kernels/rotation.inl, which divides in_features, or 0; of W8A8 and W4A8.
struct quasar_linear {
  const void* weight;   // packed, see kernels/linear_*.inl
  const float* scale;   // W8A8 alone: [out_features padded to 32]
  const float* bias;    // likewise, of any, or null
  int64_t out_features, in_features;
  int32_t precision, group_size, gated, rotation;
};

// Rotary grouped-query attention over a paged BF16 cache.
struct quasar_attention {
  int32_t heads, kv_heads, head_dim, block_size;
  int32_t rotated;  // leading dimensions of a head that are, even
  int32_t window;   // logical positions that a row sees, or 0: all
  float scale, norm_eps;
  const float* cos;  // [positions, rotated / 2]
  const float* sin;
  const float* q_norm;  // [head_dim], and k_norm, or both null
  const float* k_norm;
};

// The rows of one pass: see RaggedBatch in kernels/base.py.
struct quasar_batch {
  int32_t sequences, rows, table_stride;
  const int32_t* positions;
  const int32_t* row_offsets;
  const int32_t* context_lengths;
  const int32_t* block_tables;
  const uint64_t* ancestors;
  const uint8_t* is_tree;
};

// One tier's functions. Every tier fills the whole table.
struct quasar_tier {
  const char* name;

  // linear
  size_t (*packed_bytes)(const quasar_weight*);
  void (*pack)(const quasar_weight*, void* packed, int32_t threads);
  size_t (*linear_scratch_bytes)(const quasar_linear*, int64_t rows);
  void (*norm_linear)(const quasar_linear*, const float* x, int64_t rows, const float* norm,
                      float eps, void* scratch, float* out, int32_t threads);
  void (*norm_gated)(const quasar_linear*, const float* x, int64_t rows, const float* norm,
                     float eps, void* scratch, float* out, int32_t threads);
  void (*linear)(const quasar_linear*, const float* a, int64_t rows, void* scratch, float* out,
                 int32_t threads);
  void (*linear_add)(const quasar_linear*, const float* a, int64_t rows, void* scratch, float* x,
                     int32_t threads);
  void (*rotate)(float* x, int64_t rows, int64_t columns, int64_t block, int32_t threads);
  void (*norm_add)(const float* y, int64_t rows, int64_t columns, const float* norm, float eps,
                   float* x, int32_t threads);

  // attention
  size_t (*cache_block_bytes)(const quasar_attention*);  // K and V of one block, one layer
  // `context`: slots filled after the pass in the longest sequence.
  size_t (*attention_scratch_bytes)(const quasar_attention*, int64_t rows, int64_t context,
                                    int32_t threads);
  void (*attend)(const quasar_attention*, const quasar_batch*, const float* qkv, uint16_t* cache,
                 void* scratch, float* out, int32_t threads);
  void (*move_slots)(const quasar_attention*, uint16_t* cache, const int32_t* table,
                     const int32_t* source, const int32_t* target, int64_t count);

  // logits
  void (*argmax)(const float* logits, int64_t rows, int64_t columns, int64_t* out,
                 int32_t threads);
  size_t (*top_k_scratch_bytes)(int64_t columns, int64_t k);
  void (*top_k)(const float* logits, int64_t columns, int64_t k, void* scratch, float* values,
                int64_t* ids);
  int64_t (*gumbel_argmax)(const float* logits, int64_t columns, float inverse_temperature,
                           float threshold, uint64_t seed, uint32_t sample, uint32_t position,
                           int32_t threads);

  // peaks, for `quasar doctor`: each runs about `seconds` and returns a rate
  double (*read_bandwidth)(const void* data, size_t bytes, double seconds, int32_t threads);
  // GMAC/s of BF16 or W8A8
  double (*multiply_rate)(int32_t precision, double seconds, int32_t threads);
};

// The best tier of this CPU that `cap` (a tier name, or null) allows; null if there is none, with
// the reason in `*why`.
const quasar_tier* quasar_select_tier(const char* cap, const char** why);
}
