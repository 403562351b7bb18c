// What: the phases of a chunk that run over tiles: logits, gradient factors and dW.
// Why: a tile is multiplied and passed over by one thread while it is hot; tiles are the tasks.
// Never: lets the number of threads decide what a tile is.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.hpp"
#include "core/kernel_mutant.hpp"
#include "core/mutant.hpp"
#include "device/cpu/tile_product.hpp"
#include "ops/linear_cross_entropy/cpu/run.hpp"

namespace talea::lce::cpu {

float Run::class_weight(int64_t v) const {
  return c_.in.class_weight ? static_cast<float>(at(c_.in.class_weight, p_.vocab_begin + v)) : 1.0f;
}

// Valid rows of hidden, once with rows and once with columns as lanes. `row` has room for one.
template <class Kind>
void Run::pack_panel(int64_t panel, float* row) {
  const int64_t d = p_.hidden, hp = plan_.hidden_padded, width = lanes_, depth = Kind::depth(d);
  auto* as_rows = Kind::xt(b_) + panel * depth * width;
  for (int64_t lane = 0; lane < width; ++lane) {
    const int64_t r = panel * width + lane;
    std::fill_n(row, hp, 0.0f);
    if (r < chunk_.rows) {
      const int64_t stride = mutant(Mutant::b3_transposed_as_contiguous) ? 1 : x_.col_stride;
      int64_t first = token(r) * x_.row_stride;
      if (mutant(Mutant::b10_offset_32_bit)) first = static_cast<int32_t>(first);
      load_row(x_.data, x_.dtype, first, stride, d, row);
      if (mutant(Mutant::b15_input_overwritten) && d > 0)
        std::memset(const_cast<void*>(x_.data), 0, static_cast<size_t>(size_of(x_.dtype)));
    }
    for (int64_t i = 0; i < depth; ++i) as_rows[Kind::place(i, lane, width)] = Kind::number(row[i]);
    for (int64_t i = 0; p_.wants_dw && i < hp; i += width) {
      auto* as_columns = Kind::xs(b_) + i * chunk_.padded;
      for (int64_t j = 0; j < width; ++j)
        as_columns[Kind::place(r, j, width)] = Kind::number(row[i + j]);
    }
  }
}

void Run::pack_hidden() {
#pragma omp parallel for num_threads(plan_.threads)
  for (int64_t panel = 0; panel < chunk_.padded / lanes_; ++panel) {
    float* row = Scratch(slice(omp_get_thread_num()), p_, plan_).row;
    plan_.native_bf16 ? pack_panel<PairKind>(panel, row) : pack_panel<WideKind>(panel, row);
  }
}

void Run::load_tile(int64_t tile, const Scratch& s) const {
  const int64_t v0 = tile * tile_columns, n = tile_size(tile);
  if (c_.in.bias) {
    const Tensor& b = c_.in.bias;
    load_row(b.data, b.dtype, v0 * b.stride[0], b.stride[0], n, s.bias);
    if (mutant(Mutant::b11_bias_twice))
      for (int64_t v = 0; v < n; ++v) s.bias[v] *= static_cast<float>(blocks(p_.hidden, 8));
  }
  if (c_.in.class_weight) {
    const Tensor& w = c_.in.class_weight;
    load_row(w.data, w.dtype, (p_.vocab_begin + v0) * w.stride[0], w.stride[0], n, s.class_weight);
  }
}

// Dense soft targets of one panel, laid out like its logits.
void Run::load_soft(int64_t tile, int64_t panel, const Scratch& s) const {
  const Tensor& q = c_.in.soft_target_probs;
  const int64_t v0 = p_.vocab_begin + tile * tile_columns, n = tile_size(tile);
  for (int64_t lane = 0; lane < lanes_; ++lane) {
    const int64_t r = panel * lanes_ + lane;
    if (r < chunk_.rows)
      load_row(q.data, q.dtype, token(r) * q.stride[0] + v0 * q.stride[1], q.stride[1], n, s.row);
    else
      std::fill_n(s.row, n, 0.0f);
    for (int64_t v = 0; v < n; ++v) s.soft[v * lanes_ + lane] = s.row[v];
  }
}

TilePanel Run::tile_panel(int64_t tile, int64_t panel, int32_t* target) const {
  const int64_t v0 = tile * tile_columns, n = tile_size(tile);
  for (int64_t lane = 0; lane < lanes_; ++lane) {
    const int64_t v = b_.factors.local_target[panel * lanes_ + lane] - v0;
    target[lane] = v >= 0 && v < n ? static_cast<int32_t>(v) : -1;
  }
  TilePanel t;
  t.z = logit(panel * lanes_, v0);
  t.columns = n;
  t.target = target;
  t.scale = b_.factors.scale + panel * lanes_;
  t.softcap = static_cast<float>(p_.options.softcap);
  return t;
}

template <class Kind>
void Run::logits_product(int64_t tile, int64_t panel, int64_t panels, const Scratch& s) {
  using Number = typename Kind::Number;
  const Tensor& w = c_.in.weight;
  const int64_t v0 = tile * tile_columns, n = tile_size(tile), d = p_.hidden;
  const bool in_place = weight_in_place(p_, plan_.native_bf16);
  typename Kind::Product t;
  t.b_panel = Kind::depth(d) * lanes_;
  t.c = logit(panel * lanes_, v0);
  t.c_row = lanes_;
  t.c_panel = panel_floats();
  t.rows = n;
  t.panels = panels;
  const int64_t block = Kind::depth_of_block(d);
  int64_t k = 0;
  do {
    const int64_t depth = std::min(block, d - k);
    t.depth = Kind::depth(depth);
    t.b = Kind::xt(b_) + panel * t.b_panel + k * lanes_;
    if (in_place) {
      t.a = static_cast<const Number*>(w.data) + v0 * w.stride[0] + k;
      t.a_stride = w.stride[0];
    } else {
      auto* pack = reinterpret_cast<Number*>(s.pack);
      for (int64_t v = 0; v < n; ++v)
        Kind::load_row(w, (v0 + v) * w.stride[0] + k * w.stride[1], depth, pack + v * t.depth);
      t.a = pack;
      t.a_stride = t.depth;
    }
    t.accumulate = k > 0;
    const int64_t next = k + block;  // of this tile, or the tile that this thread gets next
    t.ahead = next < d ? weight_ahead(v0, n, next, std::min(block, d - next))
                       : weight_ahead(v0 + plan_.threads * tile_columns, tile_columns, 0,
                                      std::min(block, d));
    multiply(t);
    k += block;
  } while (k < d);
}

void Run::logits_tile(int64_t tile, int64_t panel, int64_t panels, float* slice_begin) {
  const Scratch s(slice_begin, p_, plan_);
  const int64_t n = tile_size(tile);
  plan_.native_bf16 ? logits_product<PairKind>(tile, panel, panels, s)
                    : logits_product<WideKind>(tile, panel, panels, s);
  load_tile(tile, s);
  for (int64_t i = panel; i < panel + panels; ++i) {
    int32_t target[max_lanes];
    TilePanel view = tile_panel(tile, i, target);
    if (mutant(Mutant::logits_rounded))
      for (int64_t e = 0; e < n * lanes_; ++e) view.z[e] = bf16_to_float(float_to_bf16(view.z[e]));
    if (c_.in.bias) view.bias = s.bias;
    if (c_.in.class_weight) view.class_weight = s.class_weight;
    if (p_.soft_targets == SoftTargets::dense) {
      load_soft(tile, i, s);
      view.soft = s.soft;
    }
    ForwardPass f;
    f.plain = plain_logits();
    f.wants_shifted = p_.wants_entropy || c_.in.upstream_entropy;
    f.wants_class_sum = p_.options.label_smoothing > 0;
    f.capped = s.capped;
    const int64_t cell = (tile - window_) * plan_.chunk_rows + i * lanes_;
    f.max = b_.partials.max + cell;
    f.others = b_.partials.others + cell;
    f.shifted = b_.partials.shifted + cell;
    if (f.wants_class_sum) f.class_sum = b_.partials.class_sum + cell;
    if (view.soft) {
      f.soft_sum = b_.partials.soft_sum + cell;
      f.soft_mass = b_.partials.soft_mass + cell;
    }
    forward_pass(view, f);
  }
}

bool Run::plain_logits() const {
  return !c_.in.bias && !c_.in.token_scale && p_.options.logit_scale == 1 &&
         p_.options.softcap == 0;
}

// A tile's logits once more, bit for bit, for its gradient.
void Run::logits_again(int64_t tile, const Scratch& s) {
  const int64_t panels = chunk_.padded / lanes_, most = tile_rows / lanes_;
  for (int64_t panel = 0; panel < panels; panel += most) {
    const int64_t some = std::min(most, panels - panel);
    plan_.native_bf16 ? logits_product<PairKind>(tile, panel, some, s)
                      : logits_product<WideKind>(tile, panel, some, s);
  }
  for (int64_t i = 0; i < panels; ++i) {
    int32_t target[max_lanes];
    TilePanel view = tile_panel(tile, i, target);
    if (mutant(Mutant::logits_rounded))
      for (int64_t e = 0; e < view.columns * lanes_; ++e)
        view.z[e] = bf16_to_float(float_to_bf16(view.z[e]));
    if (c_.in.bias) view.bias = s.bias;
    ForwardPass f;
    f.capped = s.capped;
    if (!plain_logits()) logits_pass(view, f);
  }
}

void Run::logits() {
  const int64_t panels = chunk_.padded / lanes_, most = tile_rows / lanes_;
  const int64_t groups = blocks(panels, most);
#pragma omp parallel for schedule(dynamic) num_threads(plan_.threads)
  for (int64_t task = 0; task < (window_end() - window_) * groups; ++task) {
    const int64_t tile = window_ + task / groups, panel = task % groups * most;
    logits_tile(tile, panel, std::min(most, panels - panel), slice(omp_get_thread_num()));
  }
}

// Logits at the listed ids of sparse soft targets in this tile, kept before the gradient pass.
void Run::save_listed(int64_t tile) {
  for (int64_t e = b_.soft_offsets[tile]; e < b_.soft_offsets[tile + 1]; ++e) {
    const int64_t r = b_.soft_order[e] / p_.soft_k, j = b_.soft_order[e] % p_.soft_k;
    b_.soft_logits[e] = *logit(r, index_at(c_.in.soft_target_ids, token(r), j) - p_.vocab_begin);
  }
}

// The gradient at those ids, again and in fp64: p - q may cancel. Ids repeated in a row add up.
void Run::correct_listed(int64_t tile, float* db_lanes) {
  const Inputs& in = c_.in;
  auto id = [&](int64_t e) {
    const int64_t at_row = token(b_.soft_order[e] / p_.soft_k);
    return index_at(in.soft_target_ids, at_row, b_.soft_order[e] % p_.soft_k) - p_.vocab_begin;
  };
  const int64_t begin = b_.soft_offsets[tile], end = b_.soft_offsets[tile + 1];
  for (int64_t e = begin; e < end; ++e) {
    const int64_t r = b_.soft_order[e] / p_.soft_k, v = id(e);
    bool seen = false;  // entries of a row are neighbours
    for (int64_t f = e - 1; !seen && f >= begin && b_.soft_order[f] / p_.soft_k == r; --f)
      seen = id(f) == v;
    if (seen) continue;
    double q = 0;
    for (int64_t f = e; f < end && b_.soft_order[f] / p_.soft_k == r; ++f)
      if (id(f) == v) q += at(in.soft_target_probs, token(r), b_.soft_order[f] % p_.soft_k);
    const Capped z = capped(b_.soft_logits[e], static_cast<float>(p_.options.softcap));
    const double c = class_weight(v), distance = double{z.z} - double{b_.factors.max[r]};
    const RowResult<double>& g = b_.factors.all[r];
    const double sum = b_.factors.sum[r], share = std::exp(distance) / sum;
    double dz = g.prob * share - g.smooth * c - g.soft * c * q;
    if (g.entropy_up != 0 && share != 0)
      dz -= g.entropy_up * share * (distance - b_.factors.entropy_offset[r]);
    const float da = static_cast<float>(dz * z.derivative);
    float* cell = logit(r, v);
    if (db_lanes) {
      const float scale = b_.factors.scale[r];
      db_lanes[(v - tile * tile_columns) * lanes_ + r % lanes_] += da - *cell / scale;
    }
    *cell = da * b_.factors.scale[r];
  }
}

void Run::gradient_tile(int64_t tile, float* slice_begin) {
  const Scratch s(slice_begin, p_, plan_);
  const int64_t n = tile_size(tile);
  load_tile(tile, s);
  if (p_.wants_db) std::fill_n(s.db_lanes, n * lanes_, 0.0f);
  if (plan_.recompute) logits_again(tile, s);
  if (p_.soft_k > 0) save_listed(tile);
  for (int64_t i = 0; i < chunk_.padded / lanes_; ++i) {
    int32_t target[max_lanes];
    TilePanel view = tile_panel(tile, i, target);
    if (c_.in.class_weight) view.class_weight = s.class_weight;
    if (p_.soft_targets == SoftTargets::dense) {
      load_soft(tile, i, s);
      view.soft = s.soft;
    }
    const RowFactors& f = b_.factors;
    const int64_t r = i * lanes_;
    GradientPass g;
    g.wants_smooth = p_.options.label_smoothing > 0;
    g.wants_entropy = c_.in.upstream_entropy.present;
    g.max = f.max + r;
    g.prob = f.prob + r;
    g.prob_low = f.prob_low + r;
    g.target = f.target + r;
    g.smooth = f.smooth + r;
    g.smooth_low = f.smooth_low + r;
    g.soft = f.soft + r;
    g.entropy_weight = f.entropy_weight + r;
    g.entropy_offset = f.entropy_offset + r;
    if (p_.wants_db) g.db_lanes = s.db_lanes;
    if (mutant(KernelMutant::backward_logit_rounded))
      for (int64_t e = 0; e < n * lanes_; ++e) view.z[e] = bf16_to_float(float_to_bf16(view.z[e]));
    gradient_pass(view, g);
    if (mutant(KernelMutant::pass_run_twice)) gradient_pass(view, g);
    if (mutant(Mutant::b4_gradient_in_16_bits))
      for (int64_t e = 0; e < n * lanes_; ++e) view.z[e] = bf16_to_float(float_to_bf16(view.z[e]));
  }
  if (p_.soft_k > 0) correct_listed(tile, p_.wants_db ? s.db_lanes : nullptr);
  for (int64_t r = 0; plan_.native_bf16 && r < chunk_.padded; r += lanes_)
    talea::cpu::narrow_to_twins(logit(r, tile * tile_columns), n, b_.factors.large + r,
                                rest(tile, r));
  for (int64_t v = 0; p_.wants_db && v < n; ++v) {
    double sum = 0;
    for (int64_t lane = 0; lane < lanes_; ++lane) sum += s.db_lanes[v * lanes_ + lane];
    float& db = b_.db[tile * tile_columns + v];
    db = static_cast<float>(chunk_.is_first ? sum : db + sum);
  }
  if (!p_.wants_dw) return;
  if (mutant(Mutant::b19_dw_missing_when_dx_frozen) && !p_.wants_dx) return;
  dw_direct_ ? dw_tile(tile, slice_begin) : dw_tile_through_scratch(tile, slice_begin);
}

// Logits of the tile that this thread probably gets next: panels [share, share + 1) of `shares`.
Ahead Run::logits_ahead(int64_t tile, int64_t share, int64_t shares) const {
  const int64_t next = tile + plan_.threads, panels = chunk_.padded / lanes_;
  if (next >= plan_.tiles || plan_.recompute) return {};
  const int64_t begin = panels * share / shares, end = panels * (share + 1) / shares;
  const auto bytes = static_cast<int64_t>(sizeof(float));
  return {logit(begin * lanes_, next * tile_columns), end - begin, tile_size(next) * lanes_ * bytes,
          panel_floats() * bytes};
}

template <class Kind>
void Run::dw_product(const DwBlock& block) {
  typename Kind::Product t;
  t.form = LeftForm::panel;
  t.a_stride = panel_floats();
  t.b_panel = chunk_.padded * lanes_;
  t.c = block.c;
  t.c_row = block.c_row;
  t.c_panel = lanes_;
  t.rows = tile_size(block.tile);
  t.panels = blocks(block.columns, lanes_);
  if (block.to_the_edge) t.last_columns = block.columns % lanes_;
  t.ahead = block.ahead;
  for (int64_t r = 0; r < chunk_.padded; r += depth_block) {
    t.a = logit(r, block.tile * tile_columns);
    t.b = Kind::xs(b_) + block.column * chunk_.padded + r * lanes_;
    t.depth = std::min(depth_block, chunk_.padded - r);
    t.accumulate = block.add || r > 0;
    multiply(t);
    t.ahead = {};
  }
  if constexpr (Kind::rounds) {
    t.b = Kind::xs(b_) + block.column * chunk_.padded;
    for (int64_t r = 0; r < chunk_.rows; ++r)
      for_rest(block.tile, r,
               [&](int64_t v, float rest) { add_row(t, r, rest, t.c + v * t.c_row); });
  }
}

void Run::dw_tile(int64_t tile, float*) {
  const bool add =
      c_.out.accumulate_dw && !mutant(Mutant::main_grad_overwritten) && !plan_.dw_in_workspace;
  for (int64_t d0 = 0; d0 < p_.hidden; d0 += dw_columns) {
    DwBlock block = {tile, d0, std::min(dw_columns, p_.hidden - d0)};
    block.c = dw_ + tile * tile_columns * dw_stride_ + d0;
    block.c_row = dw_stride_;
    block.to_the_edge = true;
    block.add = add || !chunk_.is_first;
    block.ahead = logits_ahead(tile, d0 / dw_columns, blocks(p_.hidden, dw_columns));
    plan_.native_bf16 ? dw_product<PairKind>(block) : dw_product<WideKind>(block);
  }
  if (!mutant(Mutant::b6_dw_16bit_accumulator)) return;
  for (int64_t v = 0; v < tile_size(tile); ++v)
    for (int64_t i = 0; i < p_.hidden; ++i) {
      float& e = dw_[(tile * tile_columns + v) * dw_stride_ + i];
      e = bf16_to_float(float_to_bf16(e));
    }
}

// dW of any other layout or dtype: the chunk's sum of a few columns at a time, then element by
// element. 16-bit dW comes here only when the chunk is the whole batch.
void Run::dw_tile_through_scratch(int64_t tile, float* slice_begin) {
  const Scratch s(slice_begin, p_, plan_);
  const int64_t v0 = tile * tile_columns;
  const bool add =
      !chunk_.is_first || (c_.out.accumulate_dw && !mutant(Mutant::main_grad_overwritten));
  for (int64_t d0 = 0; d0 < p_.hidden; d0 += dw_columns) {
    const int64_t columns = std::min(dw_columns, p_.hidden - d0);
    DwBlock block = {tile, d0, columns};
    block.c = s.pack;
    block.c_row = round_up(columns, lanes_);
    plan_.native_bf16 ? dw_product<PairKind>(block) : dw_product<WideKind>(block);
    const Tensor& dw = c_.out.dw;
    for (int64_t v = 0; v < tile_size(tile); ++v) {
      float* row = s.pack + v * block.c_row;
      const int64_t first = (v0 + v) * dw.stride[0] + d0 * dw.stride[1];
      if (!add) {
        store_row(row, columns, dw.data, dw.dtype, first, dw.stride[1]);
        continue;
      }
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t e = first + i * dw.stride[1];
        store_element(dw.data, dw.dtype, e, load_element(dw.data, dw.dtype, e) + row[i]);
      }
    }
  }
}

void Run::gradients(int64_t first, int64_t end) {
#pragma omp parallel for schedule(dynamic) num_threads(plan_.threads)
  for (int64_t tile = first; tile < end; ++tile) gradient_tile(tile, slice(omp_get_thread_num()));
}

}  // namespace talea::lce::cpu
