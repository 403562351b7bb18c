// What: runs the three products of a chunk through cuBLASLt.
// Why: columns of the tail, panels, tiles and second terms are decided in one place, and the way
// through a call (lane.cpp) reads as its steps.
// Never: allocates or waits.
#include "ops/linear_cross_entropy/cuda/multiply.hpp"

#include <algorithm>

#include "device/common/cuda_check.hpp"

namespace talea::lce::cuda {

void Multiply::prepare() {
  const View weight(c_.in.weight);
  weight_ = static_cast<const char*>(c_.in.weight.data);
  if (plan_.copies_weight) {
    const ChunkRows all{nullptr, nullptr, 0, p_.vocab_local};
    gather_rows(all, weight, p_.hidden, plan_.compute, b_.weight, plan_.x_stride, stream_);
    weight_ = b_.weight;
  }
  if (plan_.tail == 0) return;
  const int64_t row = plan_.x_stride * size_of(plan_.compute);
  const ChunkRows last{nullptr, nullptr, p_.vocab_local - plan_.tail, plan_.tail};
  gather_rows(last, weight, p_.hidden, plan_.compute, b_.tail_weight, plan_.x_stride, stream_);
  device::check(cudaMemsetAsync(b_.tail_weight + plan_.tail * row, 0,
                                static_cast<size_t>((tail_width - plan_.tail) * row), stream_),
                "zero the padding of the tail");
  if (p_.wants_dw)
    device::check(
        cudaMemsetAsync(b_.tail_dw, 0, static_cast<size_t>(tail_width * p_.hidden) * 4, stream_),
        "zero the tail of dw");
}

std::vector<Multiply::Section> Multiply::sections(const Panel& panel) const {
  const int64_t end = panel.begin + panel.columns;
  const int64_t whole = std::min(end, p_.vocab_local - plan_.tail) - panel.begin;
  const int64_t stride =
      plan_.copies_weight ? plan_.x_stride : std::max(p_.weight_row_stride, p_.hidden);
  std::vector<Section> all;
  if (whole > 0)
    all.push_back({panel.begin, whole, false,
                   weight_ + panel.begin * stride * size_of(plan_.compute), stride});
  if (plan_.tail > 0 && end == p_.vocab_local)
    all.push_back({p_.vocab_local - plan_.tail, tail_width, true, b_.tail_weight, plan_.x_stride});
  return all;
}

void Multiply::run(device::Product g, const device::ProductBuffers& x) const {
  g.alignment_a = device::alignment_of(x.a, g.lda, g.in);
  g.alignment_b = device::alignment_of(x.b, g.ldb, g.in);
  g.alignment_c = device::alignment_of(x.c, g.ldc, g.out);
  device::run_product(g, x, stream_);
}

void Multiply::run(const device::Product& g, const void* a, const void* b, void* c, float alpha,
                   float beta) const {
  run(g, {a, b, c, &alpha, &beta, b_.products});
}

void Multiply::logits(const Panel& panel, const void* x, int64_t rows, float* to) const {
  if (!has_products()) {
    device::check(
        cudaMemsetAsync(to, 0, static_cast<size_t>(rows * plan_.logits_stride) * 4, stream_),
        "zero logits");
    return;
  }
  for (const Section& s : sections(panel)) {
    device::Product g = logits_product(p_, plan_, rows, s.columns);
    g.lda = s.weight_stride;
    run(g, s.weight, x, to + s.begin - panel.begin, 1, 0);
  }
}

void Multiply::dx(int64_t rows) const {
  if (!has_products()) {
    device::check(
        cudaMemsetAsync(b_.dx, 0, static_cast<size_t>(rows * plan_.dx_stride) * 4, stream_),
        "zero dx");
    return;
  }
  const int multiprocessors = plan_.two_terms ? 0 : plan_.multiprocessors;
  int64_t row = 0;
  for (const DxPart& part : dx_cut(rows, p_.hidden, multiprocessors).parts) {
    dx_part(row, part);
    row += part.rows;
  }
}

void Multiply::dx_part(int64_t row, const DxPart& part) const {
  float* dx = b_.dx + row * plan_.dx_stride;
  bool first = true;
  for (const Section& s : sections({0, p_.vocab_local, plan_.parts}))
    for (int64_t v = 0; v < s.columns; v += plan_.dx_panel) {
      const int64_t columns = std::min(plan_.dx_panel, s.columns - v);
      device::Product g = dx_product(p_, plan_, part.rows, columns, part.tiles);
      g.lda = s.weight_stride;
      const char* weight = s.weight + v * g.lda * size_of(plan_.compute);
      run(g, weight, dz_at(b_.dz, row, s.begin + v), dx, 1, first ? 0 : 1);
      if (plan_.two_terms) run(g, weight, dz_at(b_.rest, row, s.begin + v), dx, 1, 1);
      first = false;
    }
}

void Multiply::dw(const ChunkRows& rows, int multiprocessors) const {
  const bool main_grad = p_.accumulate_dw && !mutant(Mutant::main_grad_overwritten);
  const bool add = rows.begin > 0 || (plan_.dw_in_place && main_grad);
  const auto scale =
      mutant(Mutant::scale_missing_in_dw) ? 1.0f : static_cast<float>(p_.options.logit_scale);
  if (plan_.scaled_rows) {
    balance_rows(rows, b_.factors, b_.scalars, add, scale, stream_);
    scale_rows(rows, b_.factors, p_.hidden, b_.x, plan_.x_stride, stream_);
  }
  if (plan_.targets_apart)
    keep_back_targets(rows, b_.factors, b_.dz, plan_.logits_stride, b_.shares, stream_);
  const int64_t stride = outside() ? p_.dw_row_stride : p_.hidden;
  char* dw = outside() ? static_cast<char*>(c_.out.dw.data) : reinterpret_cast<char*>(b_.dw);
  for (const Section& s : sections({0, p_.vocab_local, plan_.parts})) {
    device::Product g = dw_product(p_, plan_, rows.rows, s.columns, s.tail ? p_.hidden : stride);
    if (s.tail) g.out = DType::f32;
    g.multiprocessors = multiprocessors;
    void* to = s.tail ? static_cast<void*>(b_.tail_dw) : dw + s.begin * stride * size_of(g.out);
    for (const bool second : {false, true}) {
      if (second && !plan_.two_terms) continue;
      const void* dz = dz_at(second ? b_.rest : b_.dz, 0, s.begin);
      // fp16: {alpha, beta of the first term, beta of the second} lie on the device.
      if (plan_.scaled_rows)
        run(g, {b_.x, dz, to, b_.scalars, b_.scalars + (second ? 2 : 1), b_.products});
      else
        run(g, b_.x, dz, to, scale, add || second ? 1.0f : 0.0f);
    }
  }
}

void Multiply::add_targets_to_dw(const View& x) const {
  if (!plan_.targets_apart) return;
  add_targets({b_.facts, b_.order, x, p_.tokens, p_.hidden,
               static_cast<float>(p_.options.logit_scale), c_.out.dw.data, p_.dw_row_stride},
              b_.shares, stream_);
}

void Multiply::finish_dw(int64_t formed) const {
  const bool accumulate = c_.out.accumulate_dw;
  const auto rows_from = [&](int64_t row) {
    Tensor rows = c_.out.dw;
    rows.data = static_cast<char*>(rows.data) +
                row * rows.stride[0] * static_cast<int64_t>(size_of(p_.dw_dtype));
    return View(rows);
  };
  const int64_t tail = formed > 0 ? plan_.tail : 0, whole = formed - tail;
  if (!outside()) {
    // Padding is written with the last of them.
    store_dw(b_.dw, whole, tail > 0 ? whole : p_.vocab_stored, p_.hidden, accumulate,
             View(c_.out.dw), stream_);
  }
  if (tail > 0) store_dw(b_.tail_dw, tail, tail, p_.hidden, accumulate, rows_from(whole), stream_);
  // The products wrote the logical rows; the others are padding.
  if ((outside() || tail > 0) && !accumulate)
    store_dw(nullptr, 0, p_.vocab_stored - formed, p_.hidden, false, rows_from(formed), stream_);
}

}  // namespace talea::lce::cuda
