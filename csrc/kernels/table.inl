// A tier's table, the one symbol that leaves its file.
#define QUASAR_TABLE(tier)                        \
  extern "C" const quasar_tier quasar_tier_##tier; \
  const quasar_tier quasar_tier_##tier = {        \
      #tier,          packed_bytes,      pack,    \
      linear_scratch_bytes,                       \
      norm_linear,    norm_gated,        linear,  \
      linear_add,     norm_add,                   \
      cache_block_bytes,                          \
      attention_scratch_bytes,                    \
      attend,         move_slots,        argmax,  \
      top_k_scratch_bytes,                        \
      top_k,          gumbel_argmax,              \
      read_bandwidth, multiply_rate,              \
  };
