// What: the index loss of lane cuda over chunks of queries.
// Why: rows of a list are gathered, all keys of a dense loss stand once: products are a library's.
// Never: allocates; synchronises only under IndexCheck::checked.
#include "ops/sparse_attention/cuda/loss_run.hpp"

#include <algorithm>
#include <cstddef>

#include "ops/sparse_attention/foreign.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int64_t tile_keys = 4096;  // of a dense product

LossTables tables_of_loss(const Problem& p, const Args& a) {
  LossTables t;
  t.index.base = tables_of(p, a);
  t.index.causal = p.options.causal;
  t.index.key_stride = p.key_stride;
  t.index.begin = a.begin;
  t.index.end = a.end;
  t.index.weights = a.index_weights;
  t.index.q_scale = a.index_q_scale;
  t.index.k_scale = a.index_k_scale;
  t.row_weight = a.row_weight;
  t.coeff = p.coeff;
  t.relu = p.act == Activation::relu;
  t.dense = p.loss_keys == LossKeys::dense;
  t.keys = std::max<int64_t>(p.keys_stored, 1);
  return t;
}

}  // namespace

LossRun::LossRun(const Call& call, const LossPlan& plan)
    : c_(call),
      p_(call.problem),
      a_(call.args),
      plan_(plan),
      arena_(call.workspace),
      b_(lay_out(arena_, call.problem, plan_)),
      t_(tables_of_loss(call.problem, call.args)),
      stream_(device::cuda_stream(call.stream)) {}

// N, and dindex_k at its beginning.
void LossRun::begin() {
  begin_counting(c_, t_.index.base, b_.counters, stream_);
  const bool given = p_.denominator == LossDenominator::given;
  begin_loss(b_.sums, given ? p_.denominator_value : 0, stream_);
  if (!given) count_rows(t_, p_.batch, b_.sums, stream_);
  if (!given && p_.denominator_scope == LossScope::global)
    for (Communicator* group : {&c_.sequence, &c_.batch})
      if (group->size() > 1) {
        require(group->device() == DeviceKind::cuda, ErrorKind::usage,
                "ranks over {}: they exchange host memory, the tensors are a device's",
                group->engine());
        group->all_reduce_sum(&b_.sums->rows, 1, DType::f64, c_.stream);
        c_.result.exchanges.emplace_back("all_reduce_sum of the counted rows, 8 bytes");
      }
  if (!p_.wants_dindex_k) return;
  dk_sums_ = a_.dindex_k;
  const int64_t extent[4] = {p_.batch, p_.keys_stored, 1, p_.index_dim};
  if (plan_.converts_dk)
    dk_sums_ = {b_.dk, DType::f32, {p_.keys_stored * p_.index_dim, p_.index_dim, 0, 1}, true};
  if (plan_.converts_dk || !a_.accumulate_dindex_k) fill_zero(dk_sums_, extent, stream_);
}

void LossRun::end() {
  if (p_.denominator_scope == LossScope::global && c_.sequence.size() > 1) {
    c_.sequence.all_reduce_sum(&b_.sums->total, 1, DType::f64, c_.stream);
    c_.result.exchanges.emplace_back("all_reduce_sum of the loss, 8 bytes");
  }
  if (a_.loss) end_loss(b_.sums, a_.loss, stream_);
  const int64_t extent[4] = {p_.batch, p_.keys_stored, 1, p_.index_dim};
  if (plan_.converts_dk) convert(dk_sums_, a_.dindex_k, extent, stream_);
  if (a_.status) write_status(b_.counters, t_.index.base, a_.status, stream_);
}

// Where the host knows it: the keys that queries before `last` may see, of the causal rule alone.
int64_t LossRun::columns_of(int64_t last) const {
  if (!plan_.dense || !p_.options.causal || p_.has_positions || p_.sequences > 0)
    return plan_.padded;
  const int64_t seen = (p_.options.q_position_base + last) / p_.key_stride;
  return std::clamp<int64_t>((seen + 7) / 8 * 8, 8, plan_.padded);
}

// Rows of kv and index_k that `rows` [n, Kp] name, as operands. Scales of index_k come later.
void LossRun::gather(const Chunk& chunk, const int64_t* rows) {
  Gather of;
  of.kv = a_.kv;
  of.scale = a_.kv_scale;
  of.storage = p_.options.kv_storage;
  of.scale_rank = p_.kv_scale_rank;
  of.inner_rows = t_.keys;
  of.dim = p_.dim;
  of.to = plan_.attention;
  gather_rows(of, chunk, rows, b_.keys, stream_);
  Gather index;
  index.kv = a_.index_k;
  index.inner_rows = t_.keys;
  index.dim = p_.index_dim;
  index.to = plan_.index;
  gather_rows(index, chunk, rows, b_.index_keys, stream_);
}

void LossRun::begin_entry(int64_t b) {
  if (!plan_.dense) return;
  name_all(b, p_.keys_stored, plan_.padded, b_.rows, stream_);
  Chunk all;
  all.b = b;
  all.n = 1;
  all.padded = plan_.padded;
  gather(all, b_.rows);
}

void LossRun::compare(const Part& part, const Chunk& chunk, const void* keys, DType type,
                      int64_t dim, const void* rows, int64_t stride, float* to) {
  const int64_t tile = plan_.dense ? tile_keys : plan_.padded;
  for (int64_t first = 0; first < part.columns; first += tile) {
    Batched x;
    x.transpose_a = true;
    // A tile is whole even where the columns end in it: an element's rounding then does not depend
    // on where a chunk ends.
    x.m = std::min(tile, plan_.padded - first);
    x.n = chunk.heads;
    x.k = dim;
    x.lda = x.ldb = dim;
    x.ldc = plan_.padded;
    x.stride_a = plan_.dense ? 0 : plan_.padded * dim;
    x.stride_b = stride;
    x.stride_c = chunk.heads * plan_.padded;
    x.batches = chunk.n;
    x.a = static_cast<const std::byte*>(keys) + first * dim * size_of(type);
    x.b = rows;
    x.c = to + first;
    multiply_apart(x, type, b_.product, stream_);
  }
}

// The sum of the attention's weights over its heads, of all ranks.
void LossRun::teach_part(const Part& part) {
  const Chunk& chunk = part.attention;
  const auto scale = static_cast<float>(p_.scale);
  pack(a_.q, a_.q_scale, chunk, p_.dim, plan_.attention, {b_.q}, stream_);
  compare(part, chunk, b_.keys, plan_.attention, p_.dim, b_.q, chunk.heads * p_.dim, b_.logits);
  normalise(a_.saved_lse, scale, chunk, part.columns, b_.rows, b_.logits, b_.head_sums, stream_);
  teach(scale, chunk, part.columns, b_.rows, b_.logits, b_.head_sums, b_.teacher, stream_);
  if (c_.heads.size() > 1)
    c_.heads.all_reduce_sum(b_.teacher, chunk.n * plan_.padded, DType::f32, c_.stream);
}

void LossRun::form_dz(const Part& part, Factor factor, const View& dw) {
  chain(t_, factor, part.index, part.columns, b_.rows, b_.z, b_.scores, plan_.copies, plan_.index,
        b_.dz, dw, stream_);
}

// dq [n, copies, Hi, di] = dz index_keys
void LossRun::form_dq(const Part& part) {
  Batched x;
  x.m = p_.index_dim;
  x.n = plan_.copies * part.index.heads;
  x.k = part.columns;
  x.canonical_k = plan_.padded;
  x.lda = x.ldc = p_.index_dim;
  x.ldb = plan_.padded;
  x.stride_a = plan_.dense ? 0 : plan_.padded * p_.index_dim;
  x.stride_b = x.n * plan_.padded;
  x.stride_c = x.n * p_.index_dim;
  x.batches = part.index.n;
  x.a = b_.index_keys;
  x.b = b_.dz;
  x.c = b_.dq;
  multiply(x, plan_.index, b_.product, stream_);
  write_dindex_q(b_.dq, part.index, p_.index_dim, plan_.copies, a_.dindex_q, stream_);
}

// Of lists: contributions [n, Kp, di] = dz^T index_q, each then added to its row.
void LossRun::form_dk(const Part& part) {
  if (plan_.dense) return add_dk(part);
  Batched x;
  x.transpose_b = true;
  x.m = p_.index_dim;
  x.n = plan_.padded;
  x.k = plan_.copies * part.index.heads;
  x.lda = x.ldc = p_.index_dim;
  x.ldb = plan_.padded;
  x.stride_a = x.k * p_.index_dim;
  x.stride_b = x.k * plan_.padded;
  x.stride_c = plan_.padded * p_.index_dim;
  x.batches = part.index.n;
  x.a = b_.index_q;
  x.b = b_.dz;
  x.c = b_.contributions;
  multiply(x, plan_.index, b_.product, stream_);
  Scatter to;
  to.sums = dk_sums_;
  to.inner_rows = t_.keys;
  to.dim = p_.index_dim;
  to.all_rows = p_.batch * p_.keys_stored;
  to.atomic = p_.options.dkv_sum == DkvSum::atomic;
  scatter(to, part.index, b_.rows, b_.contributions, b_.sort, stream_);
}

// Of all keys: one product a query, in their order, adds to them.
void LossRun::add_dk(const Part& part) {
  Batched x;
  x.transpose_b = true;
  x.m = p_.index_dim;
  x.n = std::min(part.columns, p_.keys_stored);
  x.canonical_n = p_.keys_stored;
  x.k = plan_.copies * part.index.heads;
  x.lda = p_.index_dim;
  x.ldb = plan_.padded;
  x.ldc = std::max(dk_sums_.stride[1], p_.index_dim);  // of a single key the stride is none
  x.beta = 1;
  x.c = static_cast<float*>(dk_sums_.data) + part.index.b * dk_sums_.stride[0];
  for (int64_t i = 0; i < part.index.n; ++i) {
    const int64_t size = size_of(plan_.index);
    x.a = static_cast<const std::byte*>(b_.index_q) + i * x.k * p_.index_dim * size;
    x.b = static_cast<const std::byte*>(b_.dz) + i * x.k * plan_.padded * size;
    multiply(x, plan_.index, b_.product, stream_);
  }
}

void LossRun::one_part(const Part& part) {
  const Chunk& chunk = part.index;
  if (plan_.dense) {
    find_bounded(t_, chunk, part.columns, b_.rows, stream_);
  } else {
    find_rows(t_.index.base, chunk, t_.keys, b_.rows, b_.counters, stream_);
    gather(chunk, b_.rows);
  }
  teach_part(part);
  pack_index_q(a_.index_q, chunk, p_.index_dim, plan_.copies, plan_.index, b_.index_q, stream_);
  compare(part, chunk, b_.index_keys, plan_.index, p_.index_dim, b_.index_q,
          plan_.copies * chunk.heads * p_.index_dim, b_.z);
  score(t_, chunk, part.columns, b_.rows, b_.z, b_.scores, stream_);
  diverge(t_, chunk, part.columns, b_.rows, b_.teacher, b_.scores, b_.sums, b_.losses, stream_);
  add_losses(b_.losses, chunk.n, b_.sums, stream_);
  if (!a_.dindex_q && !a_.dindex_k && !a_.dindex_weights) return;
  const bool scaled = a_.index_q_scale.present;
  form_dz(part, scaled ? Factor::of_key : Factor::none, a_.dindex_weights);
  if (a_.dindex_q) form_dq(part);
  if (!a_.dindex_k) return;
  if (scaled) form_dz(part, Factor::of_query, {});
  form_dk(part);
}

void LossRun::run() {
  begin();
  for (int64_t b = 0; b < p_.batch; ++b) {
    begin_entry(b);
    for (int64_t s = 0; s < p_.queries; s += plan_.queries) {
      Part part;
      part.index.b = b;
      part.index.s = s;
      part.index.n = std::min(plan_.queries, p_.queries - s);
      part.index.padded = plan_.padded;
      part.attention = part.index;
      part.attention.heads = p_.heads;
      part.index.heads = p_.index_heads;
      part.columns = columns_of(s + part.index.n);
      one_part(part);
    }
  }
  end();
}

}  // namespace talea::sparse_attention::cuda
