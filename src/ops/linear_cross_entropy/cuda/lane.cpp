// What: lane cuda: cuBLASLt products over chunks of rows, own kernels between them.
// Why: every option and edge of the contract on any NVIDIA GPU from sm_80; the honest fallback.
// Never: allocates, uses another stream than the caller's, or reads device memory on the host,
// except under TargetCheck::checked: one synchronisation.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/cuda/plan.hpp"

namespace talea::lce::cuda {
namespace {

Shape shape_of(const Call& call, const Plan& plan, const Buffers& b) {
  const Problem& p = call.problem;
  const Inputs& in = call.in;
  const Outputs& out = call.out;
  Shape s{};
  s.tokens = p.tokens;
  s.hidden = p.hidden;
  s.vocab = p.vocab;
  s.vocab_begin = p.vocab_begin;
  s.vocab_local = p.vocab_local;
  s.vocab_stored = p.vocab_stored;
  s.logits_stride = plan.logits_stride;
  s.parts = plan.parts;
  s.kept = plan.kept;
  s.top_k = p.top_k;
  s.soft_k = p.soft_k;
  s.ignore_index = p.options.ignore_index;
  s.softcap = static_cast<float>(p.options.softcap);
  if (p.options.softcap > 0)
    s.cap_exponent = static_cast<float>(2 * std::numbers::log2e / p.options.softcap);
  s.logit_scale = p.options.logit_scale;
  s.label_smoothing = p.options.label_smoothing;
  s.z_loss = p.options.z_loss;
  s.denominator_value = p.options.denominator_value;
  s.reduction = p.options.reduction;
  s.denominator = p.options.denominator;
  s.on_empty = p.options.on_empty;
  s.soft = p.soft_targets;
  s.has_targets = p.has_targets;
  s.scaled_rows = plan.scaled_rows;
  s.fast_exp = is_16bit(plan.compute);
  s.fast_cap = is_16bit(plan.compute) && p.options.softcap <= 256;
  s.bias = p.has_bias ? b.bias : nullptr;
  s.class_weight = p.has_class_weight ? b.class_weight : nullptr;
  s.targets = View(in.targets);
  s.class_weights = View(in.class_weight);
  s.token_weight = View(in.token_weight);
  s.token_scale = View(in.token_scale);
  s.soft_ids = View(in.soft_target_ids);
  s.soft_probs = View(in.soft_target_probs);
  s.upstream = View(in.upstream);
  s.upstream_lse = View(in.upstream_lse);
  s.upstream_entropy = View(in.upstream_entropy);
  s.loss = View(out.loss);
  s.lse = View(out.lse);
  s.logprob = View(out.target_logprob);
  s.entropy = View(out.entropy);
  s.argmax = View(out.argmax);
  s.accuracy = View(out.accuracy);
  s.topk_values = View(out.topk_values);
  s.topk_ids = View(out.topk_ids);
  s.topk_logprobs = View(out.topk_logprobs);
  return s;
}

// A communicator of more than one rank must speak to device memory.
void require_device(const Communicator& c, const char* name) {
  require(c.size() == 1 || c.device() == DeviceKind::cuda, ErrorKind::usage,
          "{} ranks: engine {} exchanges host memory; device tensors need a device communicator",
          name, c.engine());
}

class Run {
 public:
  explicit Run(const Call& call)
      : c_(call),
        p_(call.problem),
        plan_(plan(call.problem, call.device.sm)),
        arena_(call.workspace),
        b_(arena_, p_, plan_, plan_.chunk_rows),
        s_(shape_of(call, plan_, b_)),
        stream_(device::cuda_stream(call.stream)),
        chunks_(plan_.chunks) {}

  void operator()() {
    require_device(c_.vocab, "vocabulary");
    require_device(c_.batch, "batch");
    prepare();
    if (p_.options.target_check == TargetCheck::checked) check_data();
    for (int64_t i = 0; i < chunks_; ++i) chunk(i);
    finish();
    report();
  }

 private:
  void prepare() {
    examine_targets(s_, b_.totals, b_.partials, b_.kind, b_.order, stream_);
    if (p_.has_class_weight) examine_class_weights(s_, b_.totals, stream_);
    if (p_.options.denominator_scope == DenominatorScope::global && c_.batch.size() > 1)
      c_.batch.all_reduce_sum(&b_.totals->valid_weight, 3, DType::f64, c_.stream);
    form_terms(s_, b_.totals, b_.terms, stream_);
    write_blank_rows(s_, b_.kind, b_.row_loss, b_.hit, stream_);
    if (p_.has_bias && p_.vocab_local > 0)
      convert_vector(View(c_.in.bias), 0, b_.bias, p_.vocab_local, stream_);
    if (p_.has_class_weight && p_.vocab_local > 0)
      convert_vector(s_.class_weights, p_.vocab_begin, b_.class_weight, p_.vocab_local, stream_);
    weight_ = static_cast<const char*>(c_.in.weight.data);
    if (plan_.copies_weight) {
      const ChunkRows all{nullptr, nullptr, 0, p_.vocab_local};
      gather_rows(all, View(c_.in.weight), p_.hidden, plan_.compute, b_.weight, plan_.x_stride,
                  stream_);
      weight_ = b_.weight;
    }
    x_ = View(c_.in.hidden);
    if (plan_.gather_tokens) gather_tokens();
    if (p_.wants_dx)
      blank_dx(p_.tokens, p_.hidden, b_.kind, !plan_.gather_tokens || p_.rank == 0, dx_target(),
               stream_);
  }

  // The one synchronisation of TargetCheck::checked.
  void check_data() {
    require(!device::capturing(stream_), ErrorKind::usage,
            "target_check = checked: needs a synchronisation, impossible while the stream is "
            "captured");
    Totals t;
    device::check(cudaMemcpyAsync(&t, b_.totals, sizeof(t), cudaMemcpyDeviceToHost, stream_),
                  "reading the target counts");
    device::check(cudaStreamSynchronize(stream_), "target_check = checked");
    const auto data = ErrorKind::invalid_data;
    require(t.first_bad_weight == INT64_MAX, data, "class_weight[{}]: must be finite and >= 0",
            t.first_bad_weight);
    require(t.first_bad_scale == INT64_MAX, data, "token_scale[{}]: must be finite and not 0",
            t.first_bad_scale);
    if (t.first_bad != INT64_MAX && p_.has_targets)
      fail(data, "targets[{}] = {}: outside [0, {}) and not ignore_index {}", t.first_bad,
           t.first_bad_value, p_.vocab, p_.options.ignore_index);
    require(t.first_bad == INT64_MAX, data, "soft_target_ids[{}]: an id outside [0, {})",
            t.first_bad, p_.vocab);
    Result& r = c_.result;
    r.valid_tokens = t.valid;
    r.ignored_tokens = t.ignored;
    r.out_of_range_tokens = t.out_of_range;
    r.targets_in_partition = t.in_partition;
    counted_ = true;
    chunks_ = (t.valid + plan_.chunk_rows - 1) / plan_.chunk_rows;
  }

  // Sequence parallel: the rows of all ranks, dense.
  void gather_tokens() {
    const int64_t rows = p_.tokens / p_.world, bytes = rows * p_.hidden * size_of(plan_.compute);
    char* own = b_.x_all + bytes * p_.rank;
    const ChunkRows all{nullptr, nullptr, 0, rows};
    gather_rows(all, x_, p_.hidden, plan_.compute, own, p_.hidden, stream_);
    c_.vocab.all_gather(own, b_.x_all, bytes, c_.stream);
    x_ = View{};
    x_.data = b_.x_all;
    x_.stride0 = p_.hidden;
    x_.stride1 = 1;
    x_.dtype = plan_.compute;
  }

  View dx_target() const {
    if (!plan_.gather_tokens) return View(c_.out.dx);
    View v;
    v.data = b_.dx_all;
    v.stride0 = p_.hidden;
    v.stride1 = 1;
    return v;
  }

  bool multiplies() const { return p_.vocab_local > 0 && p_.hidden > 0; }

  void product(device::Product g, const device::ProductBuffers& x) {
    g.alignment_a = device::alignment_of(x.a, g.lda, g.in);
    g.alignment_b = device::alignment_of(x.b, g.ldb, g.in);
    g.alignment_c = device::alignment_of(x.c, g.ldc, g.out);
    device::run_product(g, x, stream_);
  }

  void product(const device::Product& g, const void* a, const void* b, void* c, float alpha,
               float beta) {
    product(g, {a, b, c, &alpha, &beta, b_.products});
  }

  void chunk(int64_t i) {
    const int64_t begin = i * plan_.chunk_rows, g = plan_.granule_rows;
    const int64_t left = (p_.tokens - begin + g - 1) / g * g;
    const ChunkRows rows{b_.totals, b_.order, begin, std::min(plan_.chunk_rows, left)};
    gather_rows(rows, x_, p_.hidden, plan_.compute, b_.x, plan_.x_stride, stream_);
    for (const Piece& each : pieces(plan_, rows.rows, buffer_rows(plan_, plan_.chunk_rows)))
      piece(each, {b_.totals, b_.order, begin + each.begin, each.rows});
    if (p_.backward()) gradients(rows, i + 1 == chunks_);
  }

  // Rows `row` of dz, or of what is laid out like it.
  char* dz_at(char* base, int64_t row) const {
    return base + row * plan_.logits_stride * size_of(plan_.compute);
  }

  void piece(const Piece& at, const ChunkRows& rows) {
    auto* logits = reinterpret_cast<float*>(dz_at(b_.dz, at.source));
    multiply_logits(rows, b_.x + at.begin * plan_.x_stride * size_of(plan_.compute), logits);
    RowFactors* factors = b_.factors + at.begin;
    states(rows, logits, factors);
    if (!p_.backward()) return;
    const Gradient dz{logits, dz_at(b_.dz, at.begin),
                      plan_.two_terms ? dz_at(b_.rest, at.begin) : nullptr, plan_.compute,
                      is_16bit(plan_.compute) ? at.source - at.begin : 0};
    form_gradient(s_, rows, dz, b_.sparse_logits, factors, stream_);
  }

  void multiply_logits(const ChunkRows& rows, const void* x, float* logits) {
    if (multiplies())
      product(logits_product(p_, plan_, rows.rows), weight_, x, logits, 1, 0);
    else
      device::check(
          cudaMemsetAsync(logits, 0, static_cast<size_t>(rows.rows * plan_.logits_stride) * 4,
                          stream_),
          "zero logits");
  }

  void states(const ChunkRows& rows, const float* logits, RowFactors* factors) {
    const bool sparse = p_.soft_targets == SoftTargets::sparse;
    const RowState<double>* states = b_.partial_states;
    const Candidate<float>* best = b_.partial_best;
    int64_t parts = plan_.parts + (sparse ? 1 : 0), best_parts = plan_.parts;
    reduce_rows(s_, rows, logits, b_.partial_states, b_.partial_best, stream_);
    read_sparse(s_, rows, logits, b_.sparse_logits, b_.partial_states, stream_);
    if (p_.world > 1) {
      collapse(s_, rows, parts, best_parts, states, best, b_.own_states, b_.own_best, stream_);
      c_.vocab.all_gather(b_.own_states, b_.all_states,
                          rows.rows * static_cast<int64_t>(sizeof(RowState<double>)), c_.stream);
      if (plan_.kept > 0)
        c_.vocab.all_gather(b_.own_best, b_.all_best,
                            rows.rows * plan_.kept * static_cast<int64_t>(sizeof(*b_.own_best)),
                            c_.stream);
      states = b_.all_states;
      best = b_.all_best;
      parts = best_parts = p_.world;
    }
    finish_rows(
        s_, rows, b_.terms, parts, best_parts, states, best,
        {factors, p_.wants_loss ? b_.row_loss : nullptr, p_.wants_accuracy ? b_.hit : nullptr},
        stream_);
  }

  void gradients(const ChunkRows& rows, bool last) {
    const Gradient dz{nullptr, b_.dz, plan_.two_terms ? b_.rest : nullptr, plan_.compute, 0};
    if (p_.wants_db && p_.vocab_local > 0)
      add_bias_gradient(s_, rows, dz, b_.factors, b_.db, stream_);
    const bool dx = p_.wants_dx && p_.hidden > 0;
    const bool summed = dx && p_.world > 1 && !plan_.gather_tokens;
    if (dx && multiplies()) multiply_dx(rows);
    if (dx && !multiplies())
      device::check(
          cudaMemsetAsync(b_.dx, 0, static_cast<size_t>(rows.rows * plan_.dx_stride) * 4, stream_),
          "zero dx");
    // The sum over the ranks travels while dW is multiplied, where multiprocessors are left to it.
    const bool beside = summed && p_.wants_dw && multiplies() && multiprocessors_beside() > 0;
    if (summed && beside)
      c_.vocab.begin_all_reduce_sum(b_.dx, rows.rows * plan_.dx_stride, DType::f32, c_.stream);
    else if (summed)
      c_.vocab.all_reduce_sum(b_.dx, rows.rows * plan_.dx_stride, DType::f32, c_.stream);
    if (dx && !summed) store_dx(rows);
    if (dx && plan_.gather_tokens && last) scatter_ranks();
    if (p_.wants_dw && multiplies())
      weight_gradient(rows, beside || scattered_ ? multiprocessors_left() : 0);
    if (beside) c_.vocab.join(c_.stream);
    if (summed) store_dx(rows);
  }

  // 0: sums are not to run beside a product.
  int multiprocessors_beside() const {
    const int taken = c_.vocab.multiprocessors_beside();
    return taken <= c_.device.sm_count / 2 ? taken : 0;
  }
  int multiprocessors_left() const {
    return multiprocessors_beside() > 0 ? c_.device.sm_count - multiprocessors_beside() : 0;
  }

  void store_dx(const ChunkRows& rows) {
    scatter_dx(rows, b_.factors, b_.dx, plan_.dx_stride, p_.hidden, dx_target(), stream_);
  }

  // Sequence parallel: each rank is to have the sum of its own tokens' dX.
  void scatter_ranks() {
    const int64_t rows = p_.tokens / p_.world;
    const int64_t count = rows * p_.hidden;
    if (multiprocessors_beside() > 0)
      c_.vocab.begin_reduce_scatter_sum(b_.dx_all, own_dx(), count, DType::f32, c_.stream);
    else
      c_.vocab.reduce_scatter_sum(b_.dx_all, own_dx(), count, DType::f32, c_.stream);
    scattered_ = true;
  }
  float* own_dx() const { return b_.dx_all + p_.tokens * p_.hidden; }

  void multiply_dx(const ChunkRows& rows) {
    const int sms =
        plan_.choose_tiles && !plan_.two_terms && is_16bit(plan_.compute) ? c_.device.sm_count : 0;
    const int64_t first = dx_first_rows(rows.rows, p_.hidden, sms);
    multiply_dx(0, first, device::Product::Tiles::library);
    if (first < rows.rows) multiply_dx(first, rows.rows - first, device::Product::Tiles::narrow);
  }

  void multiply_dx(int64_t row, int64_t rows, device::Product::Tiles tiles) {
    const int64_t bytes = size_of(plan_.compute);
    float* dx = b_.dx + row * plan_.dx_stride;
    for (int64_t v = 0; v < p_.vocab_local; v += plan_.dx_panel) {
      const int64_t columns = std::min(plan_.dx_panel, p_.vocab_local - v);
      device::Product g = dx_product(p_, plan_, rows, columns);
      g.tiles = tiles;
      if (tiles == device::Product::Tiles::narrow) g.canonical_n = narrow_rows;
      const char* weight = weight_ + v * g.lda * bytes;
      product(g, weight, dz_at(b_.dz, row) + v * bytes, dx, 1, v > 0 ? 1 : 0);
      if (plan_.two_terms) product(g, weight, b_.rest, dx, 1, 1);
    }
  }

  // multiprocessors: what the products may take; 0: all.
  void weight_gradient(const ChunkRows& rows, int multiprocessors) {
    const bool outside = plan_.dw_in_place || plan_.dw_direct;
    void* dw = outside ? c_.out.dw.data : b_.dw;
    const int64_t stride = outside ? p_.dw_row_stride : p_.hidden;
    const bool add = rows.begin > 0 || (plan_.dw_in_place && p_.accumulate_dw);
    const auto scale = static_cast<float>(p_.options.logit_scale);
    if (plan_.scaled_rows) {
      balance_rows(rows, b_.factors, b_.scalars, add, scale, stream_);
      scale_rows(rows, b_.factors, p_.hidden, b_.x, plan_.x_stride, stream_);
    }
    for (const bool second : {false, true}) {
      if (second && !plan_.two_terms) return;
      device::Product g = dw_product(p_, plan_, rows.rows, stride);
      g.multiprocessors = multiprocessors;
      const void* dz = second ? b_.rest : b_.dz;
      // fp16: {alpha, beta of the first term, beta of the second} lie on the device.
      if (plan_.scaled_rows)
        product(g, {b_.x, dz, dw, b_.scalars, b_.scalars + (second ? 2 : 1), b_.products});
      else
        product(g, b_.x, dz, dw, scale, add || second ? 1.0f : 0.0f);
    }
  }

  void finish() {
    if (plan_.gather_tokens && p_.wants_dx) {
      if (!scattered_) scatter_ranks();  // no chunk had a row
      if (multiprocessors_beside() > 0) c_.vocab.join(c_.stream);
      copy_matrix(own_dx(), p_.hidden, p_.tokens / p_.world, p_.hidden, View(c_.out.dx), stream_);
    }
    if (p_.wants_dw) finish_dw();
    if (p_.wants_db) {
      const int64_t local = chunks_ > 0 ? p_.vocab_local : 0;
      store_db(b_.db, local, p_.vocab_stored, c_.out.accumulate_db, View(c_.out.db), stream_);
    }
    if (p_.wants_loss || p_.wants_accuracy)
      write_scalars(s_, b_.totals, b_.terms, p_.wants_loss ? b_.row_loss : nullptr,
                    p_.wants_accuracy ? b_.hit : nullptr, stream_);
  }

  void finish_dw() {
    const bool outside = plan_.dw_in_place || plan_.dw_direct;
    const int64_t formed = chunks_ > 0 && multiplies() ? p_.vocab_local : 0;
    if (!outside)
      return store_dw(b_.dw, formed, p_.vocab_stored, p_.hidden, c_.out.accumulate_dw,
                      View(c_.out.dw), stream_);
    if (c_.out.accumulate_dw) return;
    // The products wrote the logical rows; the others are padding.
    Tensor padding = c_.out.dw;
    padding.data =
        static_cast<char*>(padding.data) + formed * p_.dw_row_stride * size_of(p_.dw_dtype);
    store_dw(nullptr, 0, p_.vocab_stored - formed, p_.hidden, false, View(padding), stream_);
  }

  void report() {
    Result& r = c_.result;
    r.logits_home = "fp32 rows of a piece of a chunk in the workspace, overwritten by later rows";
    r.logits_tile_rows = pieces(plan_, plan_.chunk_rows, 0).front().rows;
    r.logits_tile_columns = p_.vocab_local;
    r.logits_tile_bytes = r.logits_tile_rows * plan_.logits_stride * 4;
    r.full_logits_tensor = false;
    r.chunk_rows = plan_.chunk_rows;
    r.chunks = chunks_;
    r.accumulator_softmax = "fp32 within a part of a row, fp64 between parts";
    r.accumulator_dx = r.accumulator_dw = "fp32";
    r.accumulator_loss = "fp64, fixed order";
    r.upstream_handling = "applied to each row where its gradient is formed";
    r.merges = "parts of a row (on the device)";
    if (p_.world > 1)
      r.merges += fmt::format(", ranks (all_gather of row states, {})", c_.vocab.engine());
    r.denominator = NAN;
    if (plan_.copies_weight)
      r.notes.push_back(fmt::format(
          "weight: strides {}, {} suit no product; a dense copy was made in the workspace",
          p_.weight_row_stride, p_.weight_col_stride));
    if (counted_) return;
    const auto offset =
        reinterpret_cast<const char*>(b_.totals) - static_cast<const char*>(c_.workspace.data);
    r.notes.push_back(fmt::format(
        "token counts stay on the device: int64 valid, ignored, out_of_range, in_partition at "
        "workspace byte {}, readable once the stream has run",
        offset));
    r.notes.push_back(
        "ignored rows are set aside, but the products of the chunks they leave empty still run: "
        "their number is not known to the host (target_check = checked skips them)");
  }

  const Call& c_;
  const Problem& p_;
  const Plan plan_;
  Arena arena_;
  Buffers b_;
  const Shape s_;
  cudaStream_t stream_;
  int64_t chunks_;
  const char* weight_ = nullptr;
  View x_;
  bool counted_ = false, scattered_ = false;
};

void run(const Call& call) {
  const device::DeviceGuard current(call.problem.device_index);
  device::refuse_earlier_error(device::cuda_stream(call.stream));
  Run once(call);
  once();
}

std::vector<std::string> details(const Problem& p, const DeviceFacts& device) {
  const Plan r = plan(p, device.sm);
  return {fmt::format("products = cuBLASLt {}, {} operands, fp32 accumulation, inner dimension "
                      "whole",
                      device::cublaslt_version(), name_of(r.compute)),
          fmt::format("chunk_rows = {}", r.chunk_rows), fmt::format("chunks = {}", r.chunks),
          fmt::format("chunk_buffer_bytes = {}",
                      buffer_rows(r, r.chunk_rows) * r.logits_stride * size_of(r.compute)),
          fmt::format("dw = {}", !p.wants_dw     ? "not wanted"
                                 : r.dw_in_place ? "added by the products into the caller's fp32"
                                 : r.dw_direct   ? "one product, rounded once"
                                                 : "summed in fp32 in the workspace, stored once")};
}

}  // namespace
}  // namespace talea::lce::cuda

namespace talea::lce {

Lane cuda_lane() {
  return {
      "cuda",        "library composition",
      cuda::decline, [](const Problem& p, const DeviceFacts&) { return cuda::workspace_bytes(p); },
      cuda::details, cuda::run};
}

}  // namespace talea::lce
