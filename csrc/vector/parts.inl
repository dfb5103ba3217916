// The vocabulary (see avx512.inl) for CPUs whose registers hold fewer than 16 lanes: vectors are
// halved until a half is one register, and arithmetic is left to the compiler's vectors.
//
// A tier first defines FloatPart and IntPart, GCC vectors of one register, and for them what it
// does with instructions of its own: splat_part, fma, max, min, nearest, to_int, select, exchange,
// lane_bits. And `keep`, which leaves a sum in its register: GCC would first add up the products of
// several steps, and spill.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs lie with the even value below");

template <class T>
struct Two {
  T low, high;
};
template <class T>
inline Two<T> two(T low, T high) {
  return {low, high};
}

template <class Part, int kLanes, bool kOne = kLanes * 4 == sizeof(Part)>
struct Lanewise {
  using Type = Part;
};
template <class Part, int kLanes>
struct Lanewise<Part, kLanes, false> {
  using Type = Two<typename Lanewise<Part, kLanes / 2>::Type>;
};
using F8 = Lanewise<FloatPart, 8>::Type;
using I8 = Lanewise<IntPart, 8>::Type;
using F16 = Two<F8>;
using I32 = Two<I8>;
using Mask = I32;  // lanes of all ones or zeros

template <class V>
constexpr bool is_part = true;
template <class T>
constexpr bool is_part<Two<T>> = false;

// ---- Memory -----------------------------------------------------------------------------------
// Part by part: GCC keeps a struct that is copied whole in memory.

template <class V>
inline V load_as(const void* from) {
  if constexpr (is_part<V>) {
    V x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  } else {
    using Half = decltype(V::low);
    const char* bytes = static_cast<const char*>(from);
    return {load_as<Half>(bytes), load_as<Half>(bytes + sizeof(Half))};
  }
}
template <class V>
inline void store_as(void* to, V x) {
  if constexpr (is_part<V>) {
    __builtin_memcpy(to, &x, sizeof x);
  } else {
    store_as(to, x.low);
    store_as(static_cast<char*>(to) + sizeof x.low, x.high);
  }
}
template <class V, class T>
inline V splat_as(T value) {
  if constexpr (is_part<V>) {
    return splat_part(value);
  } else {
    const auto half = splat_as<decltype(V::low)>(value);
    return {half, half};
  }
}

inline F16 splat(float value) { return splat_as<F16>(value); }
inline I32 splat(int32_t value) { return splat_as<I32>(value); }
inline I32 indices() {
  constexpr int32_t all[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_as<I32>(all);
}

inline F16 load(const float* from) { return load_as<F16>(from); }
inline F16 load(const float* from, int64_t count, F16 behind) {
  if (count >= 16) return load(from);
  float some[16];
  store_as(some, behind);
  __builtin_memcpy(some, from, static_cast<size_t>(count) * 4);
  return load(some);
}
inline F16 load(const float* from, int64_t count) { return load(from, count, splat(0.0f)); }
inline void store(float* to, F16 x) { store_as(to, x); }
inline void store(float* to, F16 x, int64_t count) {
  if (count >= 16) return store(to, x);
  float some[16];
  store(some, x);
  __builtin_memcpy(to, some, static_cast<size_t>(count) * 4);
}
inline void store(int32_t* to, I32 x) { store_as(to, x); }

inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// ---- Arithmetic -------------------------------------------------------------------------------

inline IntPart as_int(FloatPart x) { return (IntPart)x; }
inline FloatPart as_float(IntPart x) { return (FloatPart)x; }
inline FloatPart to_float(IntPart x) { return __builtin_convertvector(x, FloatPart); }
inline IntPart equal(FloatPart a, FloatPart b) { return a == b; }
inline IntPart greater(FloatPart a, FloatPart b) { return a > b; }
inline IntPart at_least(FloatPart a, FloatPart b) { return a >= b; }
inline IntPart greater(IntPart a, IntPart b) { return a > b; }
inline IntPart max(IntPart a, IntPart b) { return a > b ? a : b; }
template <int N>
inline IntPart shift_left(IntPart x) {
  return x << N;
}
template <int N>
inline IntPart shift_signed(IntPart x) {
  return x >> N;
}
template <int N>
inline IntPart shift_right(IntPart x) {
  typedef uint32_t Unsigned __attribute__((vector_size(sizeof(IntPart))));
  return (IntPart)((Unsigned)x >> N);
}

#define QUASAR_LANEWISE_1(name)           \
  template <class T>                      \
  inline auto name(Two<T> x) {            \
    return two(name(x.low), name(x.high)); \
  }
#define QUASAR_LANEWISE_2(name)                            \
  template <class T>                                       \
  inline auto name(Two<T> a, Two<T> b) {                   \
    return two(name(a.low, b.low), name(a.high, b.high));  \
  }
#define QUASAR_OPERATOR(op)                          \
  template <class T>                                 \
  inline Two<T> operator op(Two<T> a, Two<T> b) {    \
    return {a.low op b.low, a.high op b.high};       \
  }
#define QUASAR_SHIFT(name)                                      \
  template <int N, class T>                                     \
  inline Two<T> name(Two<T> x) {                                \
    return {name<N>(x.low), name<N>(x.high)};                   \
  }
QUASAR_OPERATOR(+)
QUASAR_OPERATOR(-)
QUASAR_OPERATOR(*)
QUASAR_OPERATOR(/)
QUASAR_OPERATOR(&)
QUASAR_OPERATOR(|)
QUASAR_OPERATOR(^)
QUASAR_LANEWISE_1(as_int)
QUASAR_LANEWISE_1(as_float)
QUASAR_LANEWISE_1(to_float)
QUASAR_LANEWISE_1(to_int)
QUASAR_LANEWISE_1(nearest)
QUASAR_LANEWISE_2(max)
QUASAR_LANEWISE_2(min)
QUASAR_LANEWISE_2(equal)
QUASAR_LANEWISE_2(greater)
QUASAR_LANEWISE_2(at_least)
QUASAR_SHIFT(shift_left)
QUASAR_SHIFT(shift_right)
QUASAR_SHIFT(shift_signed)
#undef QUASAR_LANEWISE_1
#undef QUASAR_LANEWISE_2
#undef QUASAR_OPERATOR
#undef QUASAR_SHIFT

template <class T>
inline Two<T> operator-(Two<T> x) {
  return {-x.low, -x.high};
}
template <class T>
inline Two<T> fma(Two<T> a, Two<T> b, Two<T> c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
inline F16 fnma(F16 a, F16 b, F16 c) { return fma(-a, b, c); }
inline I32 exclusive_or(I32 a, I32 b, I32 c) { return a ^ b ^ c; }

// x 2^(h + (n - h)) with h = n / 2: the first product is exact, so one rounding is left.
inline F16 times_power(F16 x, F16 n) {
  const I32 power = to_int(n), half = shift_signed<1>(power);
  const auto two_to = [](I32 e) { return as_float(shift_left<23>(e + splat(127))); };
  return x * two_to(half) * two_to(power - half);
}

template <int N, class T>
inline Two<T> exchange(Two<T> x) {
  if constexpr (2 * N * sizeof(float) == sizeof x)
    return {x.high, x.low};
  else
    return {exchange<N>(x.low), exchange<N>(x.high)};
}

template <class T, class Join>
inline T join_lanes(T* lanes, Join join) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] = join(lanes[i], lanes[i + step]);
  return lanes[0];
}
template <class T, class V, class Join>
inline T reduce(V x, Join join) {
  T lanes[16];
  store_as(lanes, x);
  return join_lanes(lanes, join);
}
inline float reduce_max(F16 x) {
  return reduce<float>(x, [](float a, float b) { return a > b ? a : b; });
}
inline float reduce_add(F16 x) {
  return reduce<float>(x, [](float a, float b) { return a + b; });
}
inline int32_t reduce_max(I32 x) {
  return reduce<int32_t>(x, [](int32_t a, int32_t b) { return a > b ? a : b; });
}
inline int32_t reduce_add(I32 x) {
  return reduce<int32_t>(x, [](int32_t a, int32_t b) { return a + b; });
}

struct Squares {
  double sums[16] = {};

  inline void add(const float* from, int64_t count) {
    float x[16];
    store(x, load(from, count));
    for (int i = 0; i < 16; ++i) sums[i] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  inline double total() {
    return join_lanes(sums, [](double a, double b) { return a + b; });
  }
};

// ---- Masks ------------------------------------------------------------------------------------

inline Mask leading(int64_t count) {
  return greater(splat(static_cast<int32_t>(count < 16 ? count : 16)), indices());
}
inline Mask both(Mask a, Mask b) { return a & b; }
template <class M, class T>
inline Two<T> select(Two<M> mask, Two<T> yes, Two<T> no) {
  return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
}
template <class M>
inline uint32_t lane_bits(Two<M> mask) {
  return lane_bits(mask.low) | lane_bits(mask.high) << sizeof(M) / 4;
}

// ---- One side of a product's tile: 8 outputs ---------------------------------------------------

constexpr int kTileOutputs = 16;
using TileF = F8;
using TileI = I8;

inline TileI load_tile(const void* from) { return load_as<TileI>(from); }
inline TileI load_tile(const void* from, int64_t count) {
  if (count >= 8) return load_tile(from);
  int32_t some[8] = {};
  __builtin_memcpy(some, from, static_cast<size_t>(count) * 4);
  return load_tile(some);
}
inline void store_tile(float* to, TileF x) { store_as(to, x); }
inline TileF splat_tile(float value) { return splat_as<TileF>(value); }
inline TileI splat_tile(int32_t value) { return splat_as<TileI>(value); }
inline void store_interleaved(float* to, TileF even, TileF odd, int64_t count) {
  float evens[8], odds[8];
  store_tile(evens, even);
  store_tile(odds, odd);
  for (int64_t i = 0; i < count && i < 8; ++i) to[2 * i] = evens[i], to[2 * i + 1] = odds[i];
}

// ---- BF16 -------------------------------------------------------------------------------------

inline I32 load_pairs(const uint16_t* from) { return load_as<I32>(from); }

#include "bf16.inl"

inline void store_bf16(uint16_t* to, F16 x, int64_t count = 16) {
  int32_t words[16];
  uint16_t values[16];
  store(words, shift_right<16>(as_int(round_bf16(x))));
  for (int i = 0; i < 16; ++i) values[i] = static_cast<uint16_t>(words[i]);
  if (count >= 16)
    __builtin_memcpy(to, values, sizeof values);
  else
    __builtin_memcpy(to, values, static_cast<size_t>(count) * 2);
}
