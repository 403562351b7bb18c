// What: one problem of the operator as a value: host inputs, options, wanted outputs.
// Why: the oracle, the eager yardstick and every lane start from the same bytes.
// Never: knows a lane or a device.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "talea/linear_cross_entropy.hpp"
#include "yardsticks/array.hpp"

namespace talea::testing {

struct CaseInputs {
  Array hidden, weight, bias, targets, class_weight, token_weight, token_scale, soft_target_ids,
      soft_target_probs, upstream, upstream_lse, upstream_entropy, saved_lse, saved_target_logprob;

  static constexpr std::pair<const char*, Array CaseInputs::*> members[] = {
      {"hidden", &CaseInputs::hidden},
      {"weight", &CaseInputs::weight},
      {"bias", &CaseInputs::bias},
      {"targets", &CaseInputs::targets},
      {"class_weight", &CaseInputs::class_weight},
      {"token_weight", &CaseInputs::token_weight},
      {"token_scale", &CaseInputs::token_scale},
      {"soft_target_ids", &CaseInputs::soft_target_ids},
      {"soft_target_probs", &CaseInputs::soft_target_probs},
      {"upstream", &CaseInputs::upstream},
      {"upstream_lse", &CaseInputs::upstream_lse},
      {"upstream_entropy", &CaseInputs::upstream_entropy},
      {"saved_lse", &CaseInputs::saved_lse},
      {"saved_target_logprob", &CaseInputs::saved_target_logprob}};
};

struct CaseOutputs {
  Array loss, lse, target_logprob, entropy, argmax, accuracy, topk_values, topk_ids, topk_logprobs,
      dx, dw, db;

  static constexpr std::pair<const char*, Array CaseOutputs::*> members[] = {
      {"loss", &CaseOutputs::loss},
      {"lse", &CaseOutputs::lse},
      {"target_logprob", &CaseOutputs::target_logprob},
      {"entropy", &CaseOutputs::entropy},
      {"argmax", &CaseOutputs::argmax},
      {"accuracy", &CaseOutputs::accuracy},
      {"topk_values", &CaseOutputs::topk_values},
      {"topk_ids", &CaseOutputs::topk_ids},
      {"topk_logprobs", &CaseOutputs::topk_logprobs},
      {"dx", &CaseOutputs::dx},
      {"dw", &CaseOutputs::dw},
      {"db", &CaseOutputs::db}};
};

struct Case {
  CaseInputs in;
  CaseOutputs out;  // shapes, dtypes, layout; the content matters only where it is added to
  LinearCrossEntropyOptions options;
  bool accumulate_dw = false;
  bool accumulate_db = false;

  int64_t tokens() const { return in.hidden.shape()[0]; }
  int64_t hidden() const { return in.hidden.shape()[1]; }
  int64_t vocab_stored() const { return in.weight.shape()[0]; }
  int64_t vocab() const { return options.vocab > 0 ? options.vocab : vocab_stored(); }
  bool backward() const { return out.dx.present() || out.dw.present() || out.db.present(); }
  int64_t top_k() const;
};

// The tensors as the call takes them; view(name, array) places one.
template <typename View>
LinearCrossEntropyInputs inputs_of(const CaseInputs& c, View&& view) {
  LinearCrossEntropyInputs in;
  in.hidden = view("hidden", c.hidden);
  in.weight = view("weight", c.weight);
  in.bias = view("bias", c.bias);
  in.targets = view("targets", c.targets);
  in.class_weight = view("class_weight", c.class_weight);
  in.token_weight = view("token_weight", c.token_weight);
  in.token_scale = view("token_scale", c.token_scale);
  in.soft_target_ids = view("soft_target_ids", c.soft_target_ids);
  in.soft_target_probs = view("soft_target_probs", c.soft_target_probs);
  in.upstream = view("upstream", c.upstream);
  in.upstream_lse = view("upstream_lse", c.upstream_lse);
  in.upstream_entropy = view("upstream_entropy", c.upstream_entropy);
  in.saved_lse = view("saved_lse", c.saved_lse);
  in.saved_target_logprob = view("saved_target_logprob", c.saved_target_logprob);
  return in;
}

template <typename View>
LinearCrossEntropyOutputs outputs_of(const Case& c, const CaseOutputs& o, View&& view) {
  LinearCrossEntropyOutputs out;
  out.loss = view("loss", o.loss);
  out.lse = view("lse", o.lse);
  out.target_logprob = view("target_logprob", o.target_logprob);
  out.entropy = view("entropy", o.entropy);
  out.argmax = view("argmax", o.argmax);
  out.accuracy = view("accuracy", o.accuracy);
  out.topk_values = view("topk_values", o.topk_values);
  out.topk_ids = view("topk_ids", o.topk_ids);
  out.topk_logprobs = view("topk_logprobs", o.topk_logprobs);
  out.dx = view("dx", o.dx);
  out.dw = view("dw", o.dw);
  out.db = view("db", o.db);
  out.accumulate_dw = c.accumulate_dw;
  out.accumulate_db = c.accumulate_db;
  return out;
}

// In the block that the array itself holds.
Tensor host_view(const char* name, const Array& a);

// A small problem with hard targets, filled from the seed; every output but top-k is wanted.
struct Plain {
  int64_t tokens = 7, hidden = 5, vocab = 11;
  DType dtype = DType::f32;
  uint64_t seed = 1;
  double spread = 1.0;  // standard deviation of the logits, about
  bool bias = false;
};
Case plain_case(const Plain& plain);

// Adds every output that the inputs allow, with the given dtypes for the gradients.
void want_everything(Case& c, int64_t top_k = 0);

// Standard normal numbers, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
  uint64_t bits();
  double uniform();  // [0, 1)
  double normal();
  int64_t below(int64_t bound);

 private:
  uint64_t state_;
};

void fill_normal(Array& a, Random& random, double deviation, double mean = 0);

}  // namespace talea::testing
