// The tile of a product, see linear.inl: what lies in registers while weights stream by.

constexpr int64_t kBlock = 32;       // outputs a block
constexpr int64_t kParts = kBlock / kTileOutputs;
constexpr int64_t kTurnBytes = 128;  // weights that a tile reads a turn of its loop

// A tile fetches two lines for 128 bytes of weights: `next` and `next` + second, moved by `stride`.
struct Ahead {
  const char* next;
  int64_t stride, second;
};

// Sums of R rows x kTileOutputs outputs. A recursive struct of scalars, not an array: GCC keeps it
// in registers.
template <class P, int R>
struct Sums {
  typename P::Sum left, right;
  Sums<P, R - 1> rest;

  [[gnu::always_inline]] inline void begin(const int32_t* start) {
    left = right = P::start(*start);
    rest.begin(start + 1);
  }
  // One step: `values` holds a word of each row.
  [[gnu::always_inline]] inline void add(const typename P::Weights& w, const int32_t* values) {
    const typename P::Value value = P::value(values);
    left = P::multiply(left, w.left, value);
    right = P::multiply(right, w.right, value);
    rest.add(w, values + 1);
  }
  [[gnu::always_inline]] inline void store(float* sums) const {
    P::store_sums(sums, left);
    P::store_sums(sums + kTileOutputs / 2, right);
    rest.store(sums + kBlock);
  }
};

template <class P>
struct Sums<P, 0> {
  inline void begin(const int32_t*) {}
  inline void add(const typename P::Weights&, const int32_t*) {}
  inline void store(float*) const {}
};

// `values`: the rows' words, [steps][R]; `start` [R]: where the sums start.
template <class P, int R>
static void multiply_tile(const char* weight, int64_t bytes, const int32_t* values,
                          const int32_t* start, Ahead ahead, float* sums) {
  Sums<P, R> tile;
  tile.begin(start);
  const char* const end = weight + bytes;
  do {
    fetch(ahead.next);
    fetch(ahead.next + ahead.second);
    ahead.next += ahead.stride;
#pragma GCC unroll 4
    for (int i = 0; i < kTurnBytes / P::kStepBytes; ++i) {
      tile.add(P::weights(weight), values);
      weight += P::kStepBytes;
      values += R;
    }
  } while (weight != end);
  tile.store(sums);
}

// A product P of plain rows of weights: what linear.inl asks of it. Inputs come in units.
template <class P>
struct Plain {
  static constexpr int kRows = kTileRows;
  static constexpr int64_t kUnitValues = 16;
  // Whether tiles of so few rows leave every second line to the hardware.
  static bool leaves_half(int64_t rows, int64_t) { return rows <= kHalfRows; }
  static constexpr int64_t unit_words() { return 16 / P::kStepValues; }
  static constexpr int64_t unit_bytes() { return unit_words() * P::kStepBytes; }

  template <int R>
  static constexpr auto tile = multiply_tile<P, R>;

  // A unit of a block of weights that begins at row n and input k.
  static void pack_unit(const quasar_weight& weight, int64_t n, int64_t k, char* unit,
                        int64_t part_bytes) {
    const auto* values = static_cast<const typename P::Element*>(weight.values);
    for (int64_t r = 0; r < kBlock; ++r) {
      const int64_t left = n + r < weight.out_features ? weight.in_features - k : 0;
      P::pack_group(left ? values + (n + r) * weight.in_features + k : values,
                    left < 16 ? left : 16, r % kTileOutputs,
                    unit + r / kTileOutputs * part_bytes);
    }
  }
};
