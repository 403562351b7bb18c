// What: sparse attention with any shapes, strides, dtypes, indices, lengths, pages, packed rows.
// Why: what a caller can say ends in an Error, or in a call that stays within its tensors.
// Never: gives a tensor a byte more than its view reaches: the address sanitizer is the judge.
#include <cstdlib>

#include "bent_tensors.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace {

using namespace talea;
using fuzz::Input;
using fuzz::most_bytes;
namespace sa = talea::sparse_attention;

bool is_dense(const Tensor& t) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; stride *= t.shape[i--])
    if (t.stride[i] != stride || t.shape[i] <= 0 || t.shape[i] > most_bytes) return false;
  return true;
}

// Indices that are mostly in range, some just beyond it, some anything.
void fill_indices(Input& in, const Tensor& t, int64_t keys) {
  if (!in.may_run() || !is_dense(t)) return;
  for (int64_t i = 0; i < t.elements(); ++i) {
    const int64_t value = in.rarely() ? in.of(INT64_MIN, INT64_MAX) : in.of(-2, keys + 1);
    if (t.dtype == DType::i64)
      static_cast<int64_t*>(t.data)[i] = value;
    else if (t.dtype == DType::i32)
      static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(value);
  }
}

void run(Input& in, const sa::CheckedCall& c) {
  sa::Result result;
  const DeviceFacts device;
  const sa::Lane lane = in.maybe() ? sa::cpu_lane() : sa::reference_lane();
  if (lane.decline(c.problem, device)) return;
  const Planned plan = lane.plan(c.problem, device);
  if (plan.workspace_bytes < 0) std::abort();
  if (plan.workspace_bytes > fuzz::Room::most) return;
  const fuzz::Room room(plan.workspace_bytes);
  sa::check_data(c.problem, c.args);
  sa::add_to_status(c.args.status, sa::examine(c.problem, c.args), 0);
  Communicator& self = self_communicator();
  lane.run({c.problem, device, c.args, room.get(), self, self, self, nullptr, result}, plan);
}

struct Sizes {
  int64_t b, s, keys, h, g, k, d, v;
};

void attend(Input& in, const Sizes& n) {
  const DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
  const DType own = types[in.of(0, 3)];
  sa::Options o;
  o.value_dim = n.v;
  o.causal = in.maybe();
  o.q_position_base = in.of(0, 9);
  o.index_space = in.option(sa::IndexSpace::slots);
  o.index_check = in.option(sa::IndexCheck::checked);
  o.kv_storage = in.option(sa::KvStorage::fp8_656);
  const bool packed = o.kv_storage == sa::KvStorage::fp8_656;
  const bool scaled = o.kv_storage == sa::KvStorage::fp8_scaled, paged = in.rarely();
  const int64_t d = packed ? 576 : n.d, v = packed ? 512 : n.v, page = 4;
  if (packed) o.value_dim = v;
  sa::Inputs x;
  x.q = in.tensor(own, {n.b, n.s, n.h, d});
  const DType stored = packed ? DType::u8 : scaled ? DType::f8_e4m3 : own;
  const int64_t columns = packed ? 656 : d;
  x.kv = paged ? in.tensor(stored, {n.keys, page, n.g, columns})
               : in.tensor(stored, {n.b, n.keys, n.g, columns});
  if (scaled) x.kv_scale = in.tensor(DType::f32, {n.b, n.keys});
  x.indices = in.tensor(in.maybe() ? DType::i32 : DType::i64, {n.b, n.s, n.g, n.k});
  fill_indices(in, x.indices, n.keys);
  if (in.maybe()) x.topk_length = in.tensor(DType::i32, {n.b, n.s});
  if (in.maybe()) x.sink = in.tensor(DType::f32, {n.h});
  if (in.maybe()) x.q_positions = in.tensor(DType::i32, {n.b, n.s});
  if (in.rarely()) {
    x.cu_seqlens_q = in.tensor(DType::i32, {3});
    x.cu_seqlens_k = in.tensor(DType::i32, {3});
  }
  if (paged) {
    x.block_table = in.tensor(DType::i32, {n.b, 3});
    x.kv_lengths = in.tensor(DType::i32, {n.b});
    fill_indices(in, x.block_table, n.keys);
  }
  sa::Outputs y;
  y.status = in.tensor(DType::i64, {4});
  const bool backward = in.maybe();
  if (backward) {
    x.d_o = in.tensor(own, {n.b, n.s, n.h, v});
    y.dq = in.tensor(own, {n.b, n.s, n.h, d});
    y.dkv = paged ? in.tensor(DType::f32, {n.keys, page, n.g, d})
                  : in.tensor(DType::f32, {n.b, n.keys, n.g, d});
  } else {
    y.o = in.tensor(own, {n.b, n.s, n.h, v});
    y.lse = in.tensor(DType::f32, {n.b, n.s, n.h});
  }
  const sa::CheckedCall c =
      sa::checked(backward ? sa::Pass::backward : sa::Pass::forward, x, y, o, {});
  if (in.may_run()) run(in, c);
}

void index(Input& in, const Sizes& n) {
  sa::SelectInputs x;
  const DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3};
  const DType own = types[in.of(0, 3)];
  x.index_q = in.tensor(own, {n.b, n.s, n.h, n.d});
  x.index_k = in.tensor(own, {n.b, n.keys, n.d});
  if (own == DType::f8_e4m3) x.index_q_scale = in.tensor(DType::f32, {n.b, n.s, n.h});
  if (own == DType::f8_e4m3) x.index_k_scale = in.tensor(DType::f32, {n.b, n.keys});
  x.index_weights = in.tensor(DType::f32, {n.b, n.s, n.h});
  if (in.maybe()) x.begin = in.tensor(DType::i32, {n.b, n.s});
  if (in.maybe()) x.end = in.tensor(DType::i32, {n.b, n.s});
  sa::SelectOutputs y;
  y.indices = in.tensor(DType::i32, {n.b, n.s, n.k});
  y.topk_length = in.tensor(DType::i32, {n.b, n.s});
  y.scores = in.tensor(DType::f32, {n.b, n.s, n.k});
  sa::SelectOptions o;
  o.causal = in.maybe();
  o.key_stride = in.of(0, 3);
  o.q_position_base = in.of(-1, INT32_MAX);
  const sa::CheckedCall c = sa::checked(x, y, o, {});
  if (in.may_run()) run(in, c);
}

void index_loss(Input& in, const Sizes& n) {
  sa::IndexLossInputs x;
  x.index_q = in.tensor(DType::f32, {n.b, n.s, n.h, n.d});
  x.index_k = in.tensor(DType::f32, {n.b, n.keys, n.d});
  x.index_weights = in.tensor(DType::f32, {n.b, n.s, n.h});
  x.q = in.tensor(DType::f32, {n.b, n.s, n.g, n.d});
  x.kv = in.tensor(DType::f32, {n.b, n.keys, n.d});
  sa::IndexLossOptions o;
  o.keys = in.option(sa::LossKeys::dense);
  if (o.keys == sa::LossKeys::sparse) {
    x.indices = in.tensor(in.maybe() ? DType::i32 : DType::i64, {n.b, n.s, n.k});
    fill_indices(in, x.indices, n.keys);
    if (in.maybe()) x.topk_length = in.tensor(DType::i32, {n.b, n.s});
  } else {
    if (in.maybe()) x.begin = in.tensor(DType::i32, {n.b, n.s});
    if (in.maybe()) x.end = in.tensor(DType::i32, {n.b, n.s});
  }
  if (in.maybe()) x.lse = in.tensor(DType::f32, {n.b, n.s, n.g});
  if (in.maybe()) x.row_weight = in.tensor(DType::f32, {n.b, n.s});
  sa::IndexLossOutputs y;
  if (in.maybe()) y.loss = in.tensor(DType::f32, {});
  if (in.maybe()) y.dindex_q = in.tensor(DType::f32, {n.b, n.s, n.h, n.d});
  if (in.maybe()) y.dindex_k = in.tensor(DType::f32, {n.b, n.keys, n.d});
  if (in.maybe()) y.dindex_weights = in.tensor(DType::f32, {n.b, n.s, n.h});
  o.causal = in.maybe();
  o.denominator = in.option(sa::LossDenominator::given);
  o.denominator_value = static_cast<double>(in.of(-1, 4));
  const sa::CheckedCall c = sa::checked(x, y, o, {});
  if (in.may_run()) run(in, c);
}

void mask_and_rows(Input& in, const Sizes& n) {
  sa::Inputs x;
  x.indices = in.tensor(DType::i64, {n.b, n.s, n.k});
  fill_indices(in, x.indices, n.keys);
  const Tensor mask = in.tensor(DType::f32, {n.b, n.s, n.keys});
  const Tensor kv = in.tensor(DType::bf16, {n.keys, 576});
  const Tensor rows = in.tensor(DType::u8, {n.keys, 656});
  if (!in.may_run()) return;
  sa::pack_rows(kv, rows);
  sa::index_mask(x, mask, {});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Sizes n = {in.of(0, 2), in.of(0, 3), in.of(0, 6), in.of(0, 4),
                   in.of(1, 2), in.of(0, 7), in.of(0, 5), in.of(0, 5)};
  const auto kind = in.of(0, 6);
  try {
    switch (kind) {
      case 0:
        index(in, n);
        break;
      case 1:
        mask_and_rows(in, n);
        break;
      case 2:
        index_loss(in, n);
        break;
      default:
        attend(in, n);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::runtime) std::abort();
  }
  return 0;
}
