// What: packed rows, the index mask, and the check of a status: what runs beside the passes.
// Why: frameworks and dense lanes need them under the same rule of what is valid.
// Never: reads a status of a device without waiting for its stream.
#include <bit>
#include <cmath>

#include "ops/sparse_attention/beside.hpp"
#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/parts.hpp"

namespace talea::sparse_attention {
namespace {

constexpr auto bad = ErrorKind::invalid_data;

// 2^ceil(log2(max(amax / 448, 1e-4))), by exponent bits.
float power_of_two_scale(float amax) {
  const float least = std::max(amax / 448.0f, 1e-4f);
  if (!std::isfinite(least)) return least;
  const uint32_t bits = std::bit_cast<uint32_t>(least);
  return std::bit_cast<float>((bits + 0x7fffffu) & 0x7f800000u);
}

void pack_row(const Tensor& kv, int64_t from, unsigned char* to) {
  const auto element = [&](int64_t c) {
    return static_cast<float>(load_element(kv.data, kv.dtype, from + c * kv.stride[kv.rank - 1]));
  };
  for (int64_t tile = 0; tile < packed_value_dim / scale_tile; ++tile) {
    float amax = 0;
    for (int64_t c = 0; c < scale_tile; ++c) {
      const float x = std::abs(element(tile * scale_tile + c));
      amax = x > amax || std::isnan(x) ? x : amax;
    }
    const float scale = std::isfinite(amax) ? power_of_two_scale(amax) : 1.0f;
    std::memcpy(to + packed_scales + 4 * tile, &scale, 4);
    for (int64_t c = tile * scale_tile; c < (tile + 1) * scale_tile; ++c)
      to[c] = float_to_e4m3(element(c) / scale);
  }
  for (int64_t c = packed_value_dim; c < packed_dim; ++c) {
    const uint16_t bits = float_to_bf16(element(c));
    std::memcpy(to + packed_rope + 2 * (c - packed_value_dim), &bits, 2);
  }
}

// Position of row i of the outer extents.
int64_t row_at(const Tensor& t, int64_t i) {
  int64_t at = 0;
  for (int d = t.rank - 2; d >= 0; --d) {
    at += i % t.shape[d] * t.stride[d];
    i /= t.shape[d];
  }
  return at;
}

}  // namespace

void pack_rows(const Tensor& kv, const Tensor& rows, Stream stream) {
  check_memory({"kv", &kv}, {{"kv", &kv}}, {{"rows", &rows}});
  require(kv.present && kv.rank >= 1 && kv.shape[kv.rank - 1] == packed_dim, bad,
          "kv: shape {} where [.., {}] is needed", shape_of(kv), packed_dim);
  require(rows.present && rows.rank == kv.rank && rows.shape[rows.rank - 1] == packed_bytes, bad,
          "rows: shape {} where [.., {}] is needed", shape_of(rows), packed_bytes);
  int64_t n = 1;
  for (int i = 0; i + 1 < kv.rank; ++i) {
    require(kv.shape[i] == rows.shape[i], bad, "rows: shape {} beside kv of {}", shape_of(rows),
            shape_of(kv));
    n *= kv.shape[i];
  }
  check_dtype("kv", kv, {DType::f32, DType::bf16, DType::f16});
  check_dtype("rows", rows, {DType::u8, DType::f8_e4m3});
  check_rows("rows", rows);
  if (kv.device == DeviceKind::cuda) return pack_rows_on_device(kv, rows, stream);
  for (int64_t i = 0; i < n; ++i)
    pack_row(kv, row_at(kv, i), static_cast<unsigned char*>(rows.data) + row_at(rows, i));
}

void index_mask(const Inputs& in, const Tensor& mask, const Options& options, Stream stream) {
  check_options(options);
  CheckedCall r;
  Problem& p = r.problem;
  p.options = options;
  require(mask.present && (mask.rank == 2 || mask.rank == 3), bad,
          "mask: needed, with shape [batch, queries, keys]{}", but_given(mask));
  check_dtype("mask", mask, {DType::f32});
  check_memory({"mask", &mask},
               {{"indices", &in.indices},
                {"topk_length", &in.topk_length},
                {"cu_seqlens_q", &in.cu_seqlens_q},
                {"cu_seqlens_k", &in.cu_seqlens_k},
                {"q_positions", &in.q_positions}},
               {{"mask", &mask}});
  const int f = mask.rank - 2;
  p.batch = f ? mask.shape[0] : 1;
  p.queries = mask.shape[f];
  p.keys = p.keys_stored = mask.shape[f + 1];
  p.total_heads = 1;
  require(!in.block_table && options.index_space != IndexSpace::slots, ErrorKind::usage,
          "block_table, index_space = slots: a mask has one column for each row of kv");
  require(options.index_check != IndexCheck::report, ErrorKind::usage,
          "index_check = report: counts into a status, and a mask has none");
  require(options.index_check == IndexCheck::ignore || mask.device == DeviceKind::cpu,
          ErrorKind::unavailable,
          "index_check = checked: of a mask in device memory: not in this version");
  check_dtype("indices", in.indices, {DType::i32, DType::i64});
  check_dtype("topk_length", in.topk_length, {DType::i32});
  check_dtype("cu_seqlens_q", in.cu_seqlens_q, {DType::i32});
  check_dtype("cu_seqlens_k", in.cu_seqlens_k, {DType::i32});
  check_dtype("q_positions", in.q_positions, {DType::i32});
  require(in.indices && in.indices.rank >= 1, bad,
          "indices: needed, with shape [batch, queries, slots]");
  p.slots = in.indices.shape[in.indices.rank - 1];
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries};
  const View to = fit("mask", mask, {b, s, {"S_kv", p.keys}});
  r.args.indices = fit("indices", in.indices, {b, s, {"G", 1, true}, {"K", p.slots}});
  if (in.topk_length)
    r.args.topk_length = mask.rank == 3 && in.topk_length.rank == 1
                             ? fit("topk_length", in.topk_length, {{"B", p.batch}})
                             : fit("topk_length", in.topk_length, {b, s});
  require(in.cu_seqlens_q.present == in.cu_seqlens_k.present, ErrorKind::usage,
          "cu_seqlens_q and cu_seqlens_k: give both or neither");
  fit_sequences(r, in.cu_seqlens_q, in.cu_seqlens_k);
  r.args.q_positions = fit("q_positions", in.q_positions, {b, s});
  if (mask.device == DeviceKind::cuda) {
    p.device_index = mask.device_index;
    return index_mask_on_device(p, r.args, to, stream);
  }
  check_data(p, r.args);
  const std::string refused = refused_indices(p, examine(p, r.args));
  require(refused.empty(), bad, "{}", refused);
  const KeyRule rule = key_rule(p);
  for (int64_t i = 0; i < p.batch * p.queries; ++i) {
    const int64_t entry = i / p.queries, row = i % p.queries;
    const QueryRule query = query_rule(p, r.args, entry, row);
    for (int64_t k = 0; k < query.slots; ++k) {
      const KeyRow key = find_key(rule, query, k, r.args.indices.integer(entry, row, 0, k));
      if (key.kind == SlotKind::valid) to.put(0, entry, row, key.inner);
      if (key.kind != SlotKind::valid && mutant(Mutant::sa10_mask_marks_column_zero))
        to.put(0, entry, row, 0);
    }
  }
}

void require_clean(const Tensor& status, Stream stream) {
  check_memory({"status", &status}, {{"status", &status}}, {});
  const View v = fit("status", status, {{"4", 4}});
  require(v.present, bad, "status: needed, with shape [4]");
  check_dtype("status", status, {DType::i64});
  std::array<int64_t, 4> found{};
  if (status.device == DeviceKind::cuda)
    found = read_status(v, status.device_index, stream);
  else
    for (int64_t i = 0; i < 4; ++i) found[static_cast<size_t>(i)] = v.integer(i);
  require(found[0] == 0, bad,
          "indices: {} foreign, outside their index space; the first at flat slot {} with value {}",
          found[0], found[1], found[2]);
}

}  // namespace talea::sparse_attention
