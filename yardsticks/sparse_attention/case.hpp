// What: one attention problem as a value: host inputs, options, and how the outputs are wanted.
// Why: the oracle, the eager yardstick and every lane start from the same bytes.
// Never: knows a lane.
#pragma once

#include "talea/sparse_attention.hpp"
#include "yardsticks/sparse_attention/grid.hpp"

namespace talea::yardsticks::sparse_attention {

namespace sa = ::talea::sparse_attention;

// All extents in place: q [B, S, H, D], kv [B or pages, rows, G, columns], indices [B, S, G, K].
struct Case {
  Grid q, q_scale, kv, kv_scale, indices, topk_length, sink, cu_q, cu_k, positions, table, lengths;
  Grid d_o, d_lse;
  sa::Options options;
  DType o_dtype = DType::f32, dq_dtype = DType::f32, dkv_dtype = DType::f32;
  bool residual = false;       // o_residual is written, and given to backward
  bool accumulate = false;     // dkv holds numbers already
  bool saved = true;           // backward gets o and lse
  bool without_batch = false;  // B = 1 is left out of every tensor
  bool without_group = false;  // G = 1 is left out
  Lay out_lay = Lay::dense;
  Grid dkv_before;  // with accumulate

  int64_t batch() const { return q.shape()[0]; }
  int64_t queries() const { return q.shape()[1]; }
  int64_t heads() const { return q.shape()[2]; }
  int64_t dim() const { return q.shape()[3]; }
  int64_t value_dim() const { return options.value_dim; }
  int64_t groups() const { return kv.shape()[2]; }
  int64_t slots() const { return indices.shape()[3]; }
  bool backward() const { return static_cast<bool>(d_o) || static_cast<bool>(d_lse); }
  double scale() const;
};

// Standard normal numbers, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
  uint64_t bits();
  double uniform();
  double normal();
  int64_t below(int64_t bound);

 private:
  uint64_t state_;
};
void fill_normal(Grid& g, Random& random, double deviation = 1);

// What a case is drawn from; printed, it repeats the case.
struct Spec {
  uint64_t seed = 1;
  int64_t batch = 1, queries = 5, keys = 37, heads = 3, groups = 1, dim = 24, value_dim = 16;
  int64_t slots = 11;
  DType dtype = DType::f32;  // of q and kv
  sa::KvStorage storage = sa::KvStorage::plain;
  bool scaled_q = false;  // fp8_scaled: q in e4m3 as well
  int scale_rank = 1;     // of kv_scale
  sa::IndexSpace space = sa::IndexSpace::rows;
  bool paged = false, thd = false, causal = false, positions = false;
  bool sink = false, topk_length = false, d_lse = false, residual = false, accumulate = false;
  bool wide_outputs = false, index64 = false, saved = true, duplicates = true, foreign = true;
  sa::Operands operands = sa::Operands::native;
  double scale = 0, spread = 1;  // spread: of q, which peaks the softmax
  Lay lay = Lay::dense, out_lay = Lay::dense;
  bool without_batch = false, without_group = false;
  bool backward = true;
};
Case make_case(const Spec& spec);
std::string describe(const Spec& spec);

// Specs in which every pair of values of every two options occurs, from one seed.
std::vector<Spec> pairwise(uint64_t seed);

}  // namespace talea::yardsticks::sparse_attention
