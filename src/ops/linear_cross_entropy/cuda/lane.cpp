// What: lane cuda: cuBLASLt products over chunks of rows, own kernels between them.
// Why: every option and edge of the contract on any NVIDIA GPU from sm_80; the honest fallback.
// Never: allocates, uses another stream than the caller's, or reads device memory on the host,
// except under TargetCheck::checked: one synchronisation.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/cuda/multiply.hpp"

namespace talea::lce::cuda {
namespace {

class Run {
 public:
  Run(const Call& call, const Plan& plan)
      : c_(call),
        p_(call.problem),
        plan_(plan),
        arena_(call.workspace),
        b_(arena_, p_, plan_, plan_.chunk_rows),
        s_(shape_of(call, plan_, b_)),
        stream_(device::cuda_stream(call.stream)),
        multiply_(call, plan_, b_, stream_),
        chunks_(plan_.chunks) {}

  void operator()() {
    require_device(c_);
    prepare();
    if (p_.options.target_check == TargetCheck::checked) check_data();
    for (int64_t i = 0; i < chunks_; ++i) chunk(i);
    finish();
    if (!c_.result.lane.empty())  // one without a lane is read by nobody
      report(c_, plan_, b_, chunks_, counted_);
  }

 private:
  void prepare() {
    if (plan_.gather_tokens) gather_tokens();
    examine_targets(s_, b_.facts, b_.partials, b_.kind, b_.order, stream_);
    if (p_.has_class_weight) sum_class_weights(s_.class_weights, p_.vocab, b_.facts, stream_);
    if (p_.options.denominator_scope == DenominatorScope::global && c_.batch.size() > 1) {
      if (plan_.gather_tokens) c_.vocab.join(c_.stream);  // one engine at a time
      c_.batch.all_reduce_sum(&b_.facts->valid_weight, 3, DType::f64, c_.stream);
    }
    end_facts({s_.mean, s_.loss_terms, b_.facts, b_.terms}, stream_);
    blank();
    if (p_.has_bias && p_.vocab_local > 0)
      convert_vector(View(c_.in.bias), 0, p_.vocab_local, b_.bias, stream_);
    if (p_.has_class_weight && p_.vocab_local > 0)
      convert_vector(s_.class_weights, p_.vocab_begin, p_.vocab_local, b_.class_weight, stream_);
    multiply_.prepare();
    if (!plan_.gather_tokens) x_ = View(c_.in.hidden);
    if (mutant(Mutant::b3_transposed_as_contiguous)) x_.stride1 = 1;
    if (plan_.gather_tokens) c_.vocab.join(c_.stream);
  }

  void check_data() {
    const BatchFacts f = checked_facts(c_, b_.facts);
    counted_ = true;
    chunks_ = (f.valid + plan_.chunk_rows - 1) / plan_.chunk_rows;
  }

  // What ignored and poisoned tokens show.
  void blank() {
    const bool poison_dx = !plan_.gather_tokens || p_.rank == 0;  // the ranks' rows are summed
    blank_tokens({p_.tokens, s_.rule, b_.kind, s_.out, b_.row_loss, b_.hit,
                  p_.wants_dx ? dx_target() : View(), p_.hidden, poison_dx},
                 stream_);
  }

  // Sequence parallel: the rows of all ranks, dense. They travel beside what the targets ask for.
  void gather_tokens() {
    const int64_t rows = p_.tokens / p_.world, bytes = rows * p_.hidden * size_of(plan_.compute);
    char* own = b_.x_all + bytes * p_.rank;
    const ChunkRows all{nullptr, nullptr, 0, rows};
    gather_rows(all, View(c_.in.hidden), p_.hidden, plan_.compute, own, p_.hidden, stream_);
    c_.vocab.begin_all_gather(own, b_.x_all, bytes, c_.stream);
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

  void chunk(int64_t i) {
    const int64_t begin = i * plan_.chunk_rows, g = plan_.granule_rows;
    const int64_t left = (p_.tokens - begin + g - 1) / g * g;
    const ChunkRows rows{b_.facts, b_.order, begin, std::min(plan_.chunk_rows, left)};
    gather_rows(rows, x_, p_.hidden, plan_.compute, b_.x, plan_.x_stride, stream_);
    for (const Piece& each : pieces(plan_, rows.rows, buffer_rows(plan_, plan_.chunk_rows)))
      piece(each, {b_.facts, b_.order, begin + each.begin, each.rows});
    if (p_.backward()) gradients(rows, i + 1 == chunks_);
  }

  // Rows `row` of dz, or of what is laid out like it.
  char* dz_at(char* base, int64_t row) const {
    return base + row * plan_.logits_stride * size_of(plan_.compute);
  }

  void piece(const Piece& at, const ChunkRows& rows) {
    auto* logits = reinterpret_cast<float*>(dz_at(b_.dz, at.source));
    const void* x = b_.x + at.begin * plan_.x_stride * size_of(plan_.compute);
    RowFactors* factors = b_.factors + at.begin;
    for (const Panel& panel : panels(p_, plan_)) {
      multiply_.logits(panel, x, rows.rows, logits);
      reduce_rows(s_, rows, panel, logits, b_.partial_states, b_.partial_best, stream_);
      read_sparse(s_, rows, panel, logits, b_.sparse_logits, b_.partial_states, stream_);
    }
    merge_states(rows, factors);
    if (!p_.backward()) return;
    const Gradient dz{logits, dz_at(b_.dz, at.begin),
                      plan_.two_terms ? dz_at(b_.rest, at.begin) : nullptr, plan_.compute,
                      is_16bit(plan_.compute) ? at.source - at.begin : 0};
    form_gradient(s_, rows, dz, b_.sparse_logits, factors, stream_);
  }

  // Over parts of a row and over ranks; then the rows' outputs and factors.
  void merge_states(const ChunkRows& rows, RowFactors* factors) {
    const bool sparse = p_.soft_targets == SoftTargets::sparse;
    const RowState<double>* states = b_.partial_states;
    const Candidate<float>* best = b_.partial_best;
    int64_t parts = plan_.parts + (sparse ? 1 : 0), best_parts = plan_.parts;
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
    finish_rows(s_, rows, b_.terms, parts, best_parts, states, best, {factors, b_.row_loss, b_.hit},
                stream_);
  }

  void gradients(const ChunkRows& rows, bool last) {
    const Gradient dz{nullptr, b_.dz, plan_.two_terms ? b_.rest : nullptr, plan_.compute, 0};
    if (p_.wants_db && p_.vocab_local > 0)
      add_bias_gradient(s_, rows, dz, b_.factors, b_.db, stream_);
    const bool dx = p_.wants_dx && p_.hidden > 0;
    const bool summed = dx && p_.world > 1 && !plan_.gather_tokens;
    if (dx) multiply_.dx(rows.rows);
    // The sum over the ranks travels while dW is multiplied, where multiprocessors are left to it.
    const bool beside =
        summed && p_.wants_dw && multiply_.has_products() && multiprocessors_beside() > 0;
    if (summed && beside)
      c_.vocab.begin_all_reduce_sum(b_.dx, rows.rows * plan_.dx_stride, DType::f32, c_.stream);
    else if (summed)
      c_.vocab.all_reduce_sum(b_.dx, rows.rows * plan_.dx_stride, DType::f32, c_.stream);
    // So does what follows the sum, where the communicator has a stream for it.
    const Stream behind = beside ? c_.vocab.stream_beside() : nullptr;
    if (behind) store_dx(rows, device::cuda_stream(behind));
    if (dx && !summed) store_dx(rows, stream_);
    if (dx && plan_.gather_tokens && last) scatter_ranks();
    const bool missing = mutant(Mutant::b19_dw_missing_when_dx_frozen) && !p_.wants_dx;
    if (p_.wants_dw && multiply_.has_products() && !missing)
      multiply_.dw(rows, beside || scattered_ ? multiprocessors_left() : 0);
    if (beside) c_.vocab.join(c_.stream);
    if (summed && !behind) store_dx(rows, stream_);
  }

  // 0: sums are not to run beside a product.
  int multiprocessors_beside() const {
    const int taken = c_.vocab.multiprocessors_beside();
    return taken <= c_.device.sm_count / 2 ? taken : 0;
  }
  int multiprocessors_left() const {
    return multiprocessors_beside() > 0 ? c_.device.sm_count - multiprocessors_beside() : 0;
  }

  void store_dx(const ChunkRows& rows, cudaStream_t stream) {
    scatter_dx(rows, b_.factors, b_.dx, plan_.dx_stride, p_.hidden, dx_target(), stream);
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

  void finish() {
    if (mutant(Mutant::workspace_overrun))
      device::check(cudaMemsetAsync(static_cast<char*>(c_.workspace.data) + c_.workspace.bytes, 1,
                                    1, stream_),
                    "a byte too far");
    if (plan_.gather_tokens && p_.wants_dx) {
      if (!scattered_) scatter_ranks();  // no chunk had a row
      if (multiprocessors_beside() > 0) c_.vocab.join(c_.stream);
      copy_matrix(own_dx(), p_.hidden, p_.tokens / p_.world, p_.hidden, View(c_.out.dx), stream_);
    }
    if (p_.wants_dw)
      multiply_.finish_dw(chunks_ > 0 && multiply_.has_products() ? p_.vocab_local : 0);
    if (p_.wants_dw && multiply_.has_products()) multiply_.add_targets_to_dw(x_);
    if (p_.wants_db) {
      const int64_t local = chunks_ > 0 ? p_.vocab_local : 0;
      store_db(b_.db, local, p_.vocab_stored, c_.out.accumulate_db, View(c_.out.db), stream_);
    }
    if (p_.wants_loss || p_.wants_accuracy)
      write_scalars(s_, b_.facts, b_.row_loss, b_.hit, stream_);
  }

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  Arena arena_;
  Buffers b_;
  const Shape s_;
  cudaStream_t stream_;
  Multiply multiply_;
  int64_t chunks_;
  View x_;
  bool counted_ = false, scattered_ = false;
};

void run(const Call& call, const Planned& planned) {
  const device::DeviceGuard current(call.problem.device_index);
  device::refuse_earlier_error(device::cuda_stream(call.stream));
  Run once(call, planned.as<Plan>());
  once();
}

Planned planned(const Problem& p, const DeviceFacts& device) {
  const Plan decided = plan(p, device);
  Planned all = talea::planned(bytes_of(p, decided), product_flops(p), decided);
  all.predicted_ms = predicted_ms(p, decided);
  return all;
}

}  // namespace
}  // namespace talea::lce::cuda

namespace talea::lce {

Lane cuda_lane() {
  return {.name = "cuda",
          .kind = "library composition",
          .runs_on = DeviceKind::cuda,
          .decline = cuda::decline,
          .plan = cuda::planned,
          .details = cuda::details,
          .run = cuda::run};
}

}  // namespace talea::lce
