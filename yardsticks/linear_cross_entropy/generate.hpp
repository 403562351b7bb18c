// What: a small, printable description of a random problem, and the case it stands for.
// Why: rapidcheck shrinks the description; the printed line alone repeats a failure.
// Never: draws numbers from anywhere but the description's own seed.
#pragma once

#include <iosfwd>

#include "yardsticks/linear_cross_entropy/case.hpp"

namespace talea::testing {

enum class Types { f32, bf16, f16, bf16_f32, f16_f32, f64 };
enum class Regime { normal, confident, negative, distant };
enum class Soft { none, dense, sparse, sparse_with_ignored };
enum class Upstream { absent, contiguous, strided, expanded, reversed };

struct Spec {
  uint64_t seed = 1;
  int tokens = 7, hidden = 5, vocab = 11, padding = 0, top_k = 0;
  Types types = Types::f32;
  View hidden_view = View::contiguous, weight_view = View::contiguous;
  View output_view = View::contiguous;  // contiguous or padded_rows
  int skew = 0;
  Regime regime = Regime::normal;
  Reduction reduction = Reduction::mean;
  Denominator denominator = Denominator::valid;
  bool bias = false, bias_f32 = false, class_weight = false, token_weight = false;
  bool token_scale = false, targets_i32 = false;
  double label_smoothing = 0, z_loss = 0, softcap = 0, logit_scale = 1;
  Soft soft = Soft::none;
  Upstream upstream = Upstream::absent;
  bool upstream_lse = false, upstream_entropy = false;
  int ignored_percent = 0;
  bool ignore_inside = false;  // ignore_index is a legal id
  bool poison = false;         // one target outside the vocabulary, under TargetCheck::poison
  bool wants_dx = true, wants_dw = true, wants_db = true, wants_rows = true;
  bool wide_gradients = false;  // dx, dw, db in fp32
  bool accumulate = false;      // dw, db added into fp32
  int64_t limit_bytes = 1 << 20;
  int threads = 0;
};

std::ostream& operator<<(std::ostream& out, const Spec& spec);

// Elements that a weight has at least: a test that forces the way of large weights sets it, since
// what that way rounds away shows in a gradient of few terms.
inline int64_t least_weight = 0;

Case make_case(const Spec& spec);

}  // namespace talea::testing
