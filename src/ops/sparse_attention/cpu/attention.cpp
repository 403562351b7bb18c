// What: tiles of gathered rows and the forward pass of lane cpu.
// Why: keys x heads in one product, an online softmax whose lanes are heads, one sum of values.
// Never: copies a row that lies in fp32, or touches one that no valid slot names.
#include "ops/sparse_attention/cpu/attention.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/sparse_attention/mutants.hpp"

namespace talea::sparse_attention::cpu {
namespace {

float* numbers(const ThreadBuffers& w, int64_t padded, int64_t which) {
  return w.heads + which * padded;
}

}  // namespace

Attention::Attention(const Call& c, const Plan& plan)
    : p_(c.problem), a_(c.args), plan_(plan), rule_(key_rule(c.problem)) {
  Workspace room = c.workspace;
  if (mutant(Mutant::sa12_workspace_kept)) {
    static Workspace kept;
    if (kept.bytes >= room.bytes) room = kept;
    kept = room;
  }
  Arena arena(room);
  layout_ = lay_out(p_, plan_, arena);
}

Cursor Attention::start(int64_t b, int64_t s, int64_t g) const {
  Cursor at;
  at.b = b, at.s = s, at.g = g;
  at.heads = heads_of(p_, g);
  at.query = query_rule(p_, a_, b, s);
  return at;
}

int64_t Attention::padded(const Cursor& at) const {
  const int64_t lanes = talea::cpu::lanes();
  return (at.count() + lanes - 1) / lanes * lanes;
}

void load_key_row(const Problem& p, const Args& a, const KeyRow& row, int64_t g, float* to) {
  const int64_t first = a.kv.at(row.outer, row.inner, g);
  if (p.options.kv_storage == KvStorage::plain) {
    talea::cpu::load_row(a.kv.data, a.kv.dtype, first, 1, p.dim, to);
    return;
  }
  const char* bytes = a.kv.address(first);
  if (p.options.kv_storage == KvStorage::fp8_scaled) {
    for (int64_t c = 0; c < p.dim; c += scale_tile) {
      double scale = tile_scale(
          a.kv_scale.get(row.outer, row.inner, p.kv_scale_rank == 2 ? c / scale_tile : 0));
      if (mutant(Mutant::sa20_scale_of_the_value_alone) && c + scale_tile > p.value_dim) scale = 1;
      talea::cpu::load_e4m3(bytes + c, std::min(scale_tile, p.dim - c), static_cast<float>(scale),
                            to + c);
    }
    return;
  }
  float scale[packed_value_dim / scale_tile];
  std::memcpy(scale, bytes + packed_scales, sizeof scale);
  for (int64_t t = 0; t < packed_value_dim / scale_tile; ++t)
    talea::cpu::load_e4m3(bytes + t * scale_tile, scale_tile,
                          static_cast<float>(tile_scale(static_cast<double>(scale[t]))),
                          to + t * scale_tile);
  talea::cpu::load_row(bytes + packed_rope, DType::bf16, 0, 1, packed_dim - packed_value_dim,
                       to + packed_value_dim);
}

int64_t Attention::next_tile(Cursor& at, const float** to, int64_t* rows, float* widened) const {
  int64_t n = 0;
  for (; at.slot < at.query.slots && n < plan_.tile; ++at.slot) {
    const int64_t index = a_.indices.integer(at.b, list_of(at.s), at.g, at.slot);
    const KeyRow row = find_key(rule_, at.query, at.slot, index);
    if (row.kind != SlotKind::valid) continue;
    if (plan_.in_place) {
      to[n] = static_cast<const float*>(a_.kv.data) + a_.kv.at(row.outer, row.inner, at.g);
    } else {
      to[n] = widened + n * p_.dim;
      load_key_row(p_, a_, row, at.g, widened + n * p_.dim);
    }
    if (rows) rows[n] = row.outer * plan_.inner + row.inner;
    ++n;
  }
  if (mutant(Mutant::sa6_tail_keeps_a_key) && n > 0 && n % 8 != 0 && n < plan_.tile) {
    to[n] = to[n - 1];
    if (rows) rows[n] = rows[n - 1];
    ++n;
  }
  return n;
}

void Attention::head_rows(const View& v, const Cursor& at, int64_t columns, float* room,
                          const float** to) const {
  for (int64_t i = 0; i < at.count(); ++i) {
    const bool stray = mutant(Mutant::sa8_heads_without_bound) && i % 2 == 0 && i + 1 == at.count();
    const int64_t h = stray ? at.heads.first : at.heads.first + i, first = v.at(at.b, at.s, h);
    if (v.dtype == DType::f32) {
      to[i] = static_cast<const float*>(v.data) + first;
      continue;
    }
    float* row = room + i * columns;
    to[i] = row;
    if (v.dtype != DType::f8_e4m3) {
      talea::cpu::load_row(v.data, v.dtype, first, 1, columns, row);
    } else {
      const auto scale = static_cast<float>(a_.q_scale.get(at.b, at.s, h));
      talea::cpu::load_e4m3(v.address(first), columns, scale, row);
    }
  }
}

void Attention::product(const float* const* keys, int64_t n, int64_t wide, const float* panels,
                        int64_t depth, float* to, const float* const* next, int64_t next_n) const {
  const int64_t lanes = talea::cpu::lanes();
  talea::cpu::GatherProduct t;
  t.a = keys;
  t.b = panels;
  t.b_panel = depth * lanes;
  t.c = to;
  t.panels = wide / lanes;
  t.c_row = wide;
  t.rows = n;
  t.depth = depth;
  t.next = next;
  t.next_rows = next_n;
  talea::cpu::multiply(t);
}

int64_t Attention::forward_query(Cursor at, const ThreadBuffers& w) const {
  const int64_t heads = at.count(), wide = padded(at);
  const float** tile = w.pointers;
  const float** ahead = tile + plan_.tile;
  const float** rows = ahead + plan_.tile;  // of heads
  head_rows(a_.q, at, p_.dim, w.rows, rows);
  talea::cpu::transpose_to_panels(rows, heads, p_.dim, w.q, p_.dim * talea::cpu::lanes());
  float *max = numbers(w, wide, 0), *sum = numbers(w, wide, 1), *factor = numbers(w, wide, 2);
  std::fill_n(max, wide, mutant(Mutant::sa32_max_starts_at_a_number) ? -1e30f : -INFINITY);
  std::fill_n(sum, wide, 0.0f);
  const float** weights = rows;
  for (int64_t i = 0; i < heads; ++i) {
    weights[i] = w.scores + i;
    w.targets[i] = w.o + i * p_.value_dim;
  }
  int64_t valid = 0;
  int64_t n = next_tile(at, tile, nullptr, w.rows);
  while (n > 0) {
    int64_t more = plan_.in_place ? next_tile(at, ahead, nullptr, nullptr) : 0;
    product(tile, n, wide, w.q, p_.dim, w.scores, ahead, more);
    const bool changed =
        softmax_tile({w.scores, n, wide, static_cast<float>(p_.scale)}, max, sum, factor);
    for (int64_t i = 0; changed && valid > 0 && i < heads; ++i)
      if (factor[i] != 1) scale_row(w.targets[i], p_.value_dim, factor[i]);
    talea::cpu::WeightedRows v;
    v.w = weights;
    v.w_step = wide;
    v.b = tile;
    v.c = w.targets;
    v.rows = heads;
    v.depth = n;
    v.columns = p_.value_dim;
    v.accumulate = valid > 0;
    talea::cpu::multiply(v);
    valid += n;
    if (!plan_.in_place)
      more = next_tile(at, tile, nullptr, w.rows);
    else
      std::swap(tile, ahead);
    n = more;
  }
  finish_heads(at, valid, w);
  return valid;
}

// Normalises o; sum becomes lse, and stands where the factor stood.
void Attention::finish_heads(const Cursor& at, int64_t valid, const ThreadBuffers& w) const {
  const int64_t wide = padded(at);
  float *max = numbers(w, wide, 0), *sum = numbers(w, wide, 1);
  std::copy_n(sum, at.count(), numbers(w, wide, 2));
  for (int64_t i = 0; i < at.count(); ++i) {
    float* o = w.o + i * p_.value_dim;
    const double sink = a_.sink ? a_.sink.get(at.heads.first + i) : -INFINITY;
    if (valid == 0 || (max[i] == -INFINITY && sink > -INFINITY)) {
      std::fill_n(o, p_.value_dim, 0.0f);
      sum[i] = valid == 0 ? INFINITY : -INFINITY;
      if (mutant(Mutant::sa4_empty_row_divides)) sum[i] = o[0] = NAN;
      continue;
    }
    if (max[i] == -INFINITY) {
      std::fill_n(o, p_.value_dim, NAN);
      sum[i] = NAN;
      continue;
    }
    const double most = static_cast<double>(max[i]);
    double total = static_cast<double>(sum[i]);
    if (mutant(Mutant::sa33_absent_slot_has_logit_zero) && valid < p_.slots)
      total += std::exp(-most);
    if (mutant(Mutant::sa23_sink_overflows) && sink > 2.3e38) total = NAN;
    scale_row(o, p_.value_dim, static_cast<float>(1 / (total + std::exp(sink - most))));
    sum[i] = static_cast<float>(most + std::log(total));
    if (mutant(Mutant::sa21_lse_in_base_two)) sum[i] *= 1.442695f;
  }
}

void Attention::write_heads(const Cursor& at, const ThreadBuffers& w) const {
  const int64_t wide = padded(at);
  for (int64_t i = 0; i < at.count(); ++i) {
    const int64_t h = at.heads.first + i;
    const float* o = w.o + i * p_.value_dim;
    if (a_.o)
      talea::cpu::store_row(o, p_.value_dim, a_.o.data, a_.o.dtype, a_.o.at(at.b, at.s, h), 1);
    for (int64_t c = 0; a_.o_residual && c < p_.value_dim; ++c)
      a_.o_residual.put(static_cast<double>(o[c]) - a_.o.get(at.b, at.s, h, c), at.b, at.s, h, c);
    if (a_.row_max) a_.row_max.put(static_cast<double>(numbers(w, wide, 0)[i]), at.b, at.s, h);
    if (a_.lse) a_.lse.put(static_cast<double>(numbers(w, wide, 1)[i]), at.b, at.s, h);
  }
}

void Attention::forward() {
  int64_t rows = p_.batch * p_.queries;
  if (mutant(Mutant::sa29_grid_limit)) rows = std::min<int64_t>(rows, 65535);
#pragma omp parallel for schedule(static, 1) num_threads(plan_.threads)
  for (int64_t row = 0; row < rows; ++row) {
    const ThreadBuffers& w = layout_.threads[omp_get_thread_num()];
    for (int64_t g = 0; g < p_.groups; ++g) {
      const Cursor at = start(row / p_.queries, row % p_.queries, g);
      if (at.count() == 0) continue;
      forward_query(at, w);
      write_heads(at, w);
    }
  }
}

}  // namespace talea::sparse_attention::cpu
