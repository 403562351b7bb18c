// What: problems of the indexer: selection and its training loss, their truth in fp64, and a run.
// Why: what is selected, and what the loss pulls, is checked against formulas written apart.
// Never: shares code with src.
#pragma once

#include "yardsticks/sparse_attention/run.hpp"

namespace talea::yardsticks::sparse_attention {

struct IndexCase {
  Grid q, q_scale, k, k_scale, weights, begin, end, cu_q, cu_k, positions;
  sa::SelectOptions options;
  int64_t top_k = 0;
  // The loss.
  Grid attention_q, kv, indices, topk_length, row_weight, lse;
  sa::IndexLossOptions loss;

  int64_t batch() const { return q.shape()[0]; }
  int64_t queries() const { return q.shape()[1]; }
  int64_t heads() const { return q.shape()[2]; }
  int64_t dim() const { return q.shape()[3]; }
  int64_t keys() const { return k.shape()[1]; }
};

struct IndexSpec {
  uint64_t seed = 1;
  int64_t batch = 1, queries = 6, keys = 50, heads = 5, dim = 24, top_k = 9;
  DType dtype = DType::f32;  // e4m3: scaled
  bool causal = false, bounds = false, thd = false, positions = false;
  int64_t key_stride = 1;
  sa::Activation act = sa::Activation::relu;
  bool loss = false, dense = false, row_weight = false, given = false, saved_lse = false;
  DType attention_dtype = DType::f32;
  int64_t attention_heads = 3, attention_dim = 16;
};
IndexCase make_index_case(const IndexSpec& s);
std::string describe(const IndexSpec& s);

// Keys [begin, end) of a query, and the score of one of them in fp64.
std::pair<int64_t, int64_t> key_bounds(const IndexCase& c, int64_t b, int64_t s);
double index_score(const IndexCase& c, int64_t b, int64_t s, int64_t j);

struct Selected {
  std::vector<int64_t> indices, length;
  std::vector<double> scores;
  sa::Result result;
  std::string damage;
};
// place: of a device lane.
Selected run_select(const IndexCase& c, const std::string& lane, int threads = 0,
                    Place* place = nullptr);
// Scores against fp64; the selection must be one that these scores allow. narrow_sums: of e4m3,
// which the lane's tensor cores do not add up in fp32: section 4's rule for operands of 16 bits.
std::string judge_selection(const IndexCase& c, const Selected& s, bool narrow_sums = false);

struct LossNumbers {
  double loss = 0;
  std::vector<double> dq, dk, dw;
};
LossNumbers loss_truth(const IndexCase& c);
struct LossOutcome : LossNumbers {
  sa::Result result;
  std::string damage;
};
LossOutcome run_loss(const IndexCase& c, const std::string& lane, int threads = 0,
                     Place* place = nullptr);
std::string judge_loss(const IndexCase& c, const LossNumbers& ours);

}  // namespace talea::yardsticks::sparse_attention
