// What: builds plain problems and reproducible numbers.
// Why: most tests start from a plain problem and bend one thing.
// Never: uses a standard distribution, whose values differ between standard libraries.
#include "yardsticks/linear_cross_entropy/case.hpp"

#include <cmath>

namespace talea::testing {

Tensor host_view(const char*, const Array& a) {
  if (!a.present()) return {};
  return a.at(const_cast<std::byte*>(a.block().data()), DeviceKind::cpu);
}

int64_t Case::top_k() const {
  for (const Array* a : {&out.topk_values, &out.topk_ids, &out.topk_logprobs})
    if (a->present()) return a->shape()[1];
  return 0;
}

uint64_t Random::bits() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.283185307179586 * uniform());
}

int64_t Random::below(int64_t bound) {
  return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
}

void fill_normal(Array& a, Random& random, double deviation, double mean) {
  const int64_t rows = a.shape().size() > 0 ? a.shape()[0] : 1;
  const int64_t columns = a.shape().size() > 1 ? a.shape()[1] : 1;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) a.set(i, j, mean + deviation * random.normal());
}

Case plain_case(const Plain& plain) {
  Case c;
  Random random(plain.seed);
  c.in.hidden = Array(plain.dtype, {plain.tokens, plain.hidden});
  c.in.weight = Array(plain.dtype, {plain.vocab, plain.hidden});
  c.in.targets = Array(DType::i64, {plain.tokens});
  fill_normal(c.in.hidden, random, 1.0);
  const double width = static_cast<double>(plain.hidden > 0 ? plain.hidden : 1);
  fill_normal(c.in.weight, random, plain.spread / std::sqrt(width));
  if (plain.bias) {
    c.in.bias = Array(plain.dtype, {plain.vocab});
    fill_normal(c.in.bias, random, 0.5);
  }
  for (int64_t t = 0; t < plain.tokens; ++t)
    c.in.targets.set_integer(t, 0, random.below(plain.vocab));
  want_everything(c);
  return c;
}

void want_everything(Case& c, int64_t top_k) {
  const bool wide = c.in.hidden.dtype() == DType::f64;
  const DType row = wide ? DType::f64 : DType::f32;
  const int64_t n = c.tokens();
  const bool hard = c.in.targets.present(), soft = c.in.soft_target_probs.present();
  CaseOutputs& out = c.out;
  out = {};
  if (hard || soft) {
    out.loss = c.options.reduction == Reduction::none ? Array(row, {n}) : Array(row, {});
  }
  out.lse = Array(row, {n});
  out.entropy = Array(row, {n});
  out.argmax = Array(DType::i64, {n});
  if (hard) {
    out.target_logprob = Array(row, {n});
    out.accuracy = Array(row, {});
  }
  if (top_k > 0) {
    out.topk_values = Array(row, {n, top_k});
    out.topk_ids = Array(DType::i64, {n, top_k});
    out.topk_logprobs = Array(row, {n, top_k});
  }
  if (hard || soft || c.in.upstream_lse.present() || c.in.upstream_entropy.present()) {
    out.dx = Array(c.in.hidden.dtype(), {n, c.hidden()});
    out.dw = Array(c.in.weight.dtype(), {c.vocab_stored(), c.hidden()});
    if (c.in.bias.present()) out.db = Array(c.in.bias.dtype(), {c.vocab_stored()});
  }
}

}  // namespace talea::testing
