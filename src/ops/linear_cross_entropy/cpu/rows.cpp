// What: the phases of a chunk that run over rows: merging partial states, ranks, loss, factors.
// Why: what a row needs from finish.hpp is worked out once, in fp64.
// Never: reads hidden or weight.
#include <algorithm>
#include <cmath>

#include "core/half.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/linear_cross_entropy/cpu/run.hpp"

namespace talea::lce::cpu {

// Scale and target of the chunk's rows; padding rows weigh nothing.
void Run::row_terms() {
  for (int64_t r = 0; r < chunk_.padded; ++r) {
    b_.factors.local_target[r] = -1;
    b_.factors.scale[r] = 0;
    if (r >= chunk_.rows) continue;
    const int64_t t = token(r);
    double scale = p_.options.logit_scale;
    if (c_.in.token_scale) scale *= at(c_.in.token_scale, t);
    b_.factors.scale[r] = static_cast<float>(scale);
    if (!p_.has_targets) continue;
    const int64_t v = index_at(c_.in.targets, t) - p_.vocab_begin;
    if (v >= 0 && v < plan_.columns)
      b_.factors.local_target[r] = v;
    else if (mutant(Mutant::b8_sentinel_matches_padding))
      b_.factors.local_target[r] = plan_.columns - 1;
  }
  if (p_.soft_k > 0) sort_sparse();
}

// Entries (row, slot) of the chunk's sparse soft targets, by tile, in rising order within a tile.
void Run::sort_sparse() {
  const int64_t entries = chunk_.rows * p_.soft_k;
  auto tile_of = [&](int64_t e) -> int64_t {
    const int64_t v =
        index_at(c_.in.soft_target_ids, token(e / p_.soft_k), e % p_.soft_k) - p_.vocab_begin;
    return v >= 0 && v < plan_.columns ? v / tile_columns : -1;
  };
  std::fill_n(b_.soft_offsets, plan_.tiles + 1, 0);
  for (int64_t e = 0; e < entries; ++e)
    if (const int64_t tile = tile_of(e); tile >= 0) ++b_.soft_offsets[tile + 1];
  for (int64_t i = 0; i < plan_.tiles; ++i) b_.soft_offsets[i + 1] += b_.soft_offsets[i];
  for (int64_t e = 0; e < entries; ++e)
    if (const int64_t tile = tile_of(e); tile >= 0)
      b_.soft_order[b_.soft_offsets[tile]++] = static_cast<int32_t>(e);
  for (int64_t i = plan_.tiles; i > 0; --i) b_.soft_offsets[i] = b_.soft_offsets[i - 1];
  b_.soft_offsets[0] = 0;
}

void Run::reduce_row(int64_t r) {
  const Partials& part = b_.partials;
  const int64_t y = b_.factors.local_target[r];
  const auto cap = static_cast<float>(p_.options.softcap);
  RowState<double> s;
  if (window_ > 0) s = b_.states[r];
  for (int64_t tile = window_; tile < window_end(); ++tile) {
    const int64_t cell = (tile - window_) * plan_.chunk_rows + r;
    RowState<double> piece;
    piece.max = part.max[cell];
    piece.others = part.others[cell];
    if (p_.wants_entropy || c_.in.upstream_entropy) piece.shifted = part.shifted[cell];
    if (p_.options.label_smoothing > 0) piece.class_sum = part.class_sum[cell];
    if (p_.soft_targets == SoftTargets::dense) {
      piece.soft_sum = part.soft_sum[cell];
      piece.soft_mass = part.soft_mass[cell];
    }
    s = merge(s, piece);
  }
  if (y >= window_ * tile_columns && y < window_end() * tile_columns) {
    s.target = capped(*logit(r, y), cap).z;
    s.has_target = 1;
  }
  for (int64_t j = 0; j < p_.soft_k; ++j) {  // a sparse row says nothing of ids it does not list
    const int64_t v = index_at(c_.in.soft_target_ids, token(r), j) - p_.vocab_begin;
    const double q = at(c_.in.soft_target_probs, token(r), j);
    if (v < 0 || v >= plan_.columns || q == 0) continue;
    const double mass = double{class_weight(v)} * q;
    s.soft_sum += mass * double{capped(*logit(r, v), cap).z};
    s.soft_mass += mass;
  }
  b_.states[r] = s;
}

void Run::reduce_rows() {
#pragma omp parallel for num_threads(plan_.threads)
  for (int64_t r = 0; r < chunk_.rows; ++r) reduce_row(r);
  if (k_ > 0) rank_rows();
}

// The k best of every row, with global ids.
void Run::rank_rows() {
#pragma omp parallel for num_threads(plan_.threads)
  for (int64_t panel = 0; panel < chunk_.padded / lanes_; ++panel) {
    const int64_t r0 = panel * lanes_;
    const int64_t first = window_ * tile_columns;
    const int64_t columns = std::min(window_end() * tile_columns, plan_.columns) - first;
    top_k(logit(r0, first), columns, static_cast<float>(p_.options.softcap), k_,
          b_.best_found + r0 * k_);
    for (int64_t i = r0 * k_; i < (r0 + lanes_) * k_; ++i) {
      const Best& found = b_.best_found[i];
      const bool none = found.id == INT64_MAX;
      const Candidate<double> best = {found.value,
                                      none ? found.id : found.id + first + p_.vocab_begin};
      if (window_ == 0)
        b_.best[i] = best;
      else if (!none)
        offer(b_.best + i / k_ * k_, k_, best);
    }
  }
}

void Run::exchange() {
  const int64_t rows = chunk_.padded;
  c_.vocab.all_gather(b_.states, b_.all_states,
                      rows * static_cast<int64_t>(sizeof(RowState<double>)), nullptr);
  if (k_ > 0)
    c_.vocab.all_gather(b_.best, b_.all_best,
                        rows * k_ * static_cast<int64_t>(sizeof(Candidate<double>)), nullptr);
  for (int64_t r = 0; r < chunk_.rows; ++r) {
    b_.states[r] = b_.all_states[r];
    clear_candidates(b_.best + r * k_, k_);
    for (int w = 0; w < p_.world; ++w) {
      if (w > 0) b_.states[r] = merge(b_.states[r], b_.all_states[w * rows + r]);
      for (int64_t j = 0; j < k_; ++j)
        offer(b_.best + r * k_, k_, b_.all_best[(w * rows + r) * k_ + j]);
    }
  }
}

// Outputs and gradient factors of a row; returns its loss.
double Run::finish_row_of_chunk(int64_t r) {
  const int64_t t = token(r);
  const RowState<double>& state = b_.states[r];
  const RowSummary<double> row = summarise(state);
  RowTerms<double> own;
  own.soft = p_.soft_targets != SoftTargets::none;
  if (p_.has_targets && c_.in.class_weight)
    own.class_weight = at(c_.in.class_weight, index_at(c_.in.targets, t));
  if (c_.in.token_weight) own.token_weight = at(c_.in.token_weight, t);
  own.upstream = upstream_at(c_.in, t);
  if (mutant(Mutant::b18_second_backward)) {
    static double previous = 1;
    own.upstream *= previous;
    previous = upstream_at(c_.in, t);
  }
  if (c_.in.upstream_lse) own.upstream_lse = at(c_.in.upstream_lse, t);
  if (c_.in.upstream_entropy) own.upstream_entropy = at(c_.in.upstream_entropy, t);
  if (!p_.has_targets && !own.soft) own.upstream = 0;  // no loss, so no gradient of it
  const RowResult<double> g = finish_row(state, row, terms_, own);
  write_row(p_, c_.out, t,
            {g.loss, row.lse, row.logp_target, row.entropy, k_ ? b_.best + r * k_ : nullptr});
  const RowFactors& f = b_.factors;
  f.max[r] = static_cast<float>(state.max);
  const double prob = g.prob / row.sum;
  f.prob[r] = static_cast<float>(prob);
  f.prob_low[r] = static_cast<float>(prob - f.prob[r]);
  f.target[r] = static_cast<float>(g.target);
  f.smooth[r] = static_cast<float>(g.smooth);
  f.smooth_low[r] = static_cast<float>(g.smooth - f.smooth[r]);
  f.all[r] = g;
  f.sum[r] = row.sum;
  f.soft[r] = static_cast<float>(g.soft);
  f.entropy_weight[r] = static_cast<float>(g.entropy_up / row.sum);
  f.entropy_offset[r] = static_cast<float>(row.mean_distance);
  // A 64th of the row's factors, sizes added up: no more than 64 of them are larger.
  const double sizes = std::abs(g.target) + std::abs(g.prob) * row.others_share +
                       std::abs(g.smooth) * facts_.class_weight_sum +
                       std::abs(g.soft) * state.soft_mass + std::abs(g.entropy_up);
  f.large[r] = static_cast<float>(sizes * std::abs(f.scale[r]) / 64);
  if (mutant(Mutant::scale_missing_in_dw)) f.scale[r] = 1;
  return g.loss;
}

void Run::finish_rows() {
#pragma omp parallel for num_threads(plan_.threads)
  for (int64_t r = 0; r < chunk_.rows; ++r) b_.loss[r] = finish_row_of_chunk(r);
  const RowFactors& f = b_.factors;
  for (float* a : {f.max, f.prob, f.prob_low, f.target, f.smooth, f.smooth_low, f.soft,
                   f.entropy_weight, f.entropy_offset, f.large})
    std::fill(a + chunk_.rows, a + chunk_.padded, 0.0f);
  if (mutant(Mutant::b17_unordered_sum)) {
    float sum = 0;
#pragma omp parallel for reduction(+ : sum) num_threads(plan_.threads)
    for (int64_t r = 0; r < chunk_.rows; ++r) sum += static_cast<float>(b_.loss[r]);
    loss_sum_ += sum;
  } else {
    for (int64_t r = 0; r < chunk_.rows; ++r) loss_sum_ += b_.loss[r];
  }
  if (k_ == 0 || !p_.has_targets) return;
  for (int64_t r = 0; r < chunk_.rows; ++r) {
    const bool ranked = !std::isnan(summarise(b_.states[r]).lse);
    if (ranked && b_.best[r * k_].id == index_at(c_.in.targets, token(r))) ++hits_;
  }
}

// The chunk's dX: summed over the vocabulary ranks, rounded once.
void Run::store_dx() {
  const int64_t d = p_.hidden, stride = plan_.hidden_padded;
  const bool sequence = p_.sequence_parallel && p_.world > 1;
  if (p_.world > 1 && !sequence)
    c_.vocab.all_reduce_sum(b_.dx, chunk_.padded * stride, DType::f32, nullptr);
  const Tensor& out = c_.out.dx;
#pragma omp parallel for num_threads(plan_.threads)
  for (int64_t r = 0; r < chunk_.rows; ++r) {
    const float* from = b_.dx + r * stride;
    if (sequence)
      std::copy_n(from, d, b_.dx_all + token(r) * d);
    else
      talea::cpu::store_row(from, d, out.data, out.dtype, token(r) * out.stride[0], out.stride[1]);
  }
}

}  // namespace talea::lce::cpu
