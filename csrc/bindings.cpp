// The Python module quasar._native: pointers are integers, handles keep what does not change from
// call to call, and every operation of a pass releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "quasar_kernels.h"

namespace nb = nanobind;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

struct Weight {
  quasar_weight spec;

  Weight(Address values, Address scale, Address zero, int64_t out_features, int64_t in_features,
         int32_t precision, int32_t group_size)
      : spec{at<const void>(values), at<const float>(scale), at<const uint8_t>(zero),
             out_features,           in_features,            precision,
             group_size} {}
};

struct Linear {
  quasar_linear spec;

  Linear(Address weight, Address scale, Address bias, int64_t out_features, int64_t in_features,
         int32_t precision, int32_t group_size, int32_t gated, int32_t rotation)
      : spec{at<const void>(weight), at<const float>(scale), at<const float>(bias),
             out_features,           in_features,            precision,
             group_size,             gated,                  rotation} {}
};

struct Attention {
  quasar_attention spec;
  int64_t positions;  // rows of the rotary tables

  Attention(int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t block_size, int32_t rotated,
            int32_t window, float scale, float norm_eps, Address cos, Address sin, Address q_norm,
            Address k_norm, int64_t positions)
      : spec{heads,
             kv_heads,
             head_dim,
             block_size,
             rotated,
             window,
             scale,
             norm_eps,
             at<const float>(cos),
             at<const float>(sin),
             at<const float>(q_norm),
             at<const float>(k_norm)},
        positions(positions) {}
};

// The rows of one pass. `owner` keeps the tensors alive whose addresses are held.
struct Batch {
  quasar_batch spec;
  nb::object owner;
  int64_t longest = 0;       // slots filled after this pass, in the longest sequence
  int64_t last_position = 0;

  Batch(nb::object owner, int32_t sequences, int32_t rows, int32_t table_stride, Address positions,
        Address row_offsets, Address context_lengths, Address block_tables, Address ancestors,
        Address is_tree)
      : spec{sequences,
             rows,
             table_stride,
             at<const int32_t>(positions),
             at<const int32_t>(row_offsets),
             at<const int32_t>(context_lengths),
             at<const int32_t>(block_tables),
             at<const uint64_t>(ancestors),
             at<const uint8_t>(is_tree)},
        owner(std::move(owner)) {
    measure();
  }

 private:
  void measure() {
    const int32_t* offsets = spec.row_offsets;
    if (offsets[0] != 0 || offsets[spec.sequences] != spec.rows)
      throw nb::value_error("row_offsets do not cover the rows of the batch");
    for (int32_t s = 0; s < spec.sequences; ++s) {
      const int64_t own = offsets[s + 1] - offsets[s];
      if (own < 0 || spec.context_lengths[s] < 0 || (spec.is_tree[s] && own > 65))
        throw nb::value_error("a sequence has a negative length or a tree of more than 65 rows");
      longest = std::max(longest, spec.context_lengths[s] + own);
    }
    for (int32_t r = 0; r < spec.rows; ++r) {
      if (spec.positions[r] < 0) throw nb::value_error("a position is negative");
      last_position = std::max<int64_t>(last_position, spec.positions[r]);
    }
  }
};

// Working memory that only grows. Kernels find it aligned to a cache line.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  void* reserve(size_t bytes) {
    if (bytes > size_) grow((bytes + bytes / 4 + 4095) / 4096 * 4096);
    return data_;
  }

 private:
  void grow(size_t bytes) {
    std::free(data_);
    size_ = 0;
    data_ = std::aligned_alloc(4096, bytes);
    if (!data_) throw std::bad_alloc();
    size_ = bytes;
  }

  void* data_ = nullptr;
  size_t size_ = 0;
};

// One tier with its working memory. Calls from several Python threads take turns.
class Kernels {
 public:
  Kernels(const std::string& cap, int32_t threads) : threads_(threads) {
    const char* why = nullptr;
    tier_ = quasar_select_tier(cap.c_str(), &why);
    if (!tier_) throw std::runtime_error(why);
    if (threads < 1) throw nb::value_error("threads must be at least 1");
  }

  const char* isa() const { return tier_->name; }

  size_t packed_bytes(const Weight& weight) const { return tier_->packed_bytes(&weight.spec); }

  void pack(const Weight& weight, Address packed) {
    Turn turn(*this);
    tier_->pack(&weight.spec, at<void>(packed), threads_);
  }

  void rotate(Address x, int64_t rows, int64_t columns, int64_t block) {
    Turn turn(*this);
    tier_->rotate(at<float>(x), rows, columns, block, threads_);
  }

  void norm_linear(const Linear& linear, int64_t rows, Address x, Address norm, float eps,
                   Address out) {
    Turn turn(*this);
    tier_->norm_linear(&linear.spec, at<const float>(x), rows, at<const float>(norm), eps,
                       linear_scratch(linear, rows), at<float>(out), threads_);
  }

  void norm_gated(const Linear& linear, int64_t rows, Address x, Address norm, float eps,
                  Address out) {
    Turn turn(*this);
    tier_->norm_gated(&linear.spec, at<const float>(x), rows, at<const float>(norm), eps,
                      linear_scratch(linear, rows), at<float>(out), threads_);
  }

  void linear(const Linear& linear, int64_t rows, Address a, Address out) {
    Turn turn(*this);
    tier_->linear(&linear.spec, at<const float>(a), rows, linear_scratch(linear, rows),
                  at<float>(out), threads_);
  }

  void linear_add(const Linear& linear, int64_t rows, Address a, Address x) {
    Turn turn(*this);
    tier_->linear_add(&linear.spec, at<const float>(a), rows, linear_scratch(linear, rows),
                      at<float>(x), threads_);
  }

  void norm_add(int64_t rows, int64_t columns, Address y, Address norm, float eps, Address x) {
    Turn turn(*this);
    tier_->norm_add(at<const float>(y), rows, columns, at<const float>(norm), eps, at<float>(x),
                    threads_);
  }

  size_t cache_block_bytes(const Attention& attention) const {
    return tier_->cache_block_bytes(&attention.spec);
  }

  void attend(const Attention& attention, const Batch& batch, Address qkv, Address cache,
              Address out) {
    if (batch.spec.rows == 0) return;
    if (batch.last_position >= attention.positions)
      throw nb::value_error("a position lies beyond the rotary tables");
    if (batch.longest > int64_t{batch.spec.table_stride} * attention.spec.block_size)
      throw nb::value_error("a sequence is longer than its block table");
    Turn turn(*this);
    const size_t bytes = tier_->attention_scratch_bytes(&attention.spec, batch.spec.rows,
                                                        batch.longest, threads_);
    tier_->attend(&attention.spec, &batch.spec, at<const float>(qkv), at<uint16_t>(cache),
                  scratch_.reserve(bytes), at<float>(out), threads_);
  }

  void move_slots(const Attention& attention, Address cache, Address table, Address source,
                  Address target, int64_t count) {
    Turn turn(*this);
    tier_->move_slots(&attention.spec, at<uint16_t>(cache), at<const int32_t>(table),
                      at<const int32_t>(source), at<const int32_t>(target), count);
  }

  nb::list argmax(Address logits, int64_t rows, int64_t columns) {
    std::vector<int64_t> ids(static_cast<size_t>(rows));
    {
      Turn turn(*this);
      tier_->argmax(at<const float>(logits), rows, columns, ids.data(), threads_);
    }
    nb::list list;
    for (int64_t id : ids) list.append(id);
    return list;
  }

  void top_k(Address logits, int64_t columns, int64_t k, Address values, Address ids) {
    Turn turn(*this);
    tier_->top_k(at<const float>(logits), columns, k,
                 scratch_.reserve(tier_->top_k_scratch_bytes(columns, k)), at<float>(values),
                 at<int64_t>(ids));
  }

  int64_t gumbel_argmax(Address logits, int64_t columns, double inverse_temperature,
                        double threshold, uint64_t seed, uint32_t sample, uint32_t position) {
    Turn turn(*this);
    return tier_->gumbel_argmax(at<const float>(logits), columns,
                                static_cast<float>(inverse_temperature),
                                static_cast<float>(threshold), seed, sample, position, threads_);
  }

  double read_bandwidth(Address data, size_t bytes, double seconds) {
    Turn turn(*this);
    return tier_->read_bandwidth(at<const void>(data), bytes, seconds, threads_);
  }

  double multiply_rate(int32_t precision, double seconds) {
    Turn turn(*this);
    return tier_->multiply_rate(precision, seconds, threads_);
  }

 private:
  // The interpreter lock is given up before the mutex is taken: the two cannot wait in a circle.
  struct Turn {
    explicit Turn(Kernels& kernels) : lock(kernels.mutex_) {}
    nb::gil_scoped_release released;
    std::lock_guard<std::mutex> lock;
  };

  void* linear_scratch(const Linear& linear, int64_t rows) {
    return scratch_.reserve(tier_->linear_scratch_bytes(&linear.spec, rows));
  }

  const quasar_tier* tier_ = nullptr;
  int32_t threads_;
  Scratch scratch_;
  std::mutex mutex_;
};

nb::dict precisions() {
  nb::dict numbers;
  numbers["bf16"] = static_cast<int>(QUASAR_BF16);
  numbers["w8a8"] = static_cast<int>(QUASAR_W8A8);
  numbers["w4a8"] = static_cast<int>(QUASAR_W4A8);
  return numbers;
}

nb::dict activations() {
  nb::dict numbers;
  numbers["silu"] = static_cast<int>(QUASAR_SILU);
  numbers["gelu_tanh"] = static_cast<int>(QUASAR_GELU_TANH);
  return numbers;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // objects that outlive the interpreter at exit are no fault
  m.attr("PRECISIONS") = precisions();
  m.attr("ACTIVATIONS") = activations();
  nb::class_<Weight>(m, "Weight")
      .def(nb::init<Address, Address, Address, int64_t, int64_t, int32_t, int32_t>());
  nb::class_<Linear>(m, "Linear")
      .def(nb::init<Address, Address, Address, int64_t, int64_t, int32_t, int32_t, int32_t,
                    int32_t>());
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, float, float, Address,
                    Address, Address, Address, int64_t>());
  nb::class_<Batch>(m, "Batch")
      .def(nb::init<nb::object, int32_t, int32_t, int32_t, Address, Address, Address, Address,
                    Address, Address>());
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<const std::string&, int32_t>())
      .def_prop_ro("isa", &Kernels::isa)
      .def("packed_bytes", &Kernels::packed_bytes)
      .def("pack", &Kernels::pack)
      .def("rotate", &Kernels::rotate)
      .def("norm_linear", &Kernels::norm_linear)
      .def("norm_gated", &Kernels::norm_gated)
      .def("linear", &Kernels::linear)
      .def("linear_add", &Kernels::linear_add)
      .def("norm_add", &Kernels::norm_add)
      .def("cache_block_bytes", &Kernels::cache_block_bytes)
      .def("attend", &Kernels::attend)
      .def("move_slots", &Kernels::move_slots)
      .def("argmax", &Kernels::argmax)
      .def("top_k", &Kernels::top_k)
      .def("gumbel_argmax", &Kernels::gumbel_argmax)
      .def("read_bandwidth", &Kernels::read_bandwidth)
      .def("multiply_rate", &Kernels::multiply_rate);
}
