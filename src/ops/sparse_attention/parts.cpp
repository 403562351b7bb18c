// What: queries, keys, sequences and ranks of a call, checked and put in their places.
// Why: storage is told by what lies in memory: dtype, layout, scale tensor; nothing is inferred.
// Never: dereferences a tensor.
#include "ops/sparse_attention/parts.hpp"

#include <cmath>

#include "ops/sparse_attention/fields.hpp"

namespace talea::sparse_attention {
namespace {

constexpr auto bad = ErrorKind::invalid_data;
constexpr auto usage = ErrorKind::usage;
using enum DType;

// [.., 584], [.., 528] and [.., 288] bytes are other engines' packed rows.
void check_packed(const Problem& p, const Tensor& kv) {
  const int64_t last = kv.shape[kv.rank - 1];
  require(last == packed_bytes, bad,
          "kv: last extent = {} where kv_storage = fp8_656 needs {} bytes a token{}", last,
          packed_bytes,
          last == 584 || last == 528 || last == 288 ? " (that layout is not in this version)" : "");
  require(p.dim == packed_dim && p.value_dim == packed_value_dim, bad,
          "q: D = {}, value_dim = {}: rows of kv_storage = fp8_656 have D = {}, value_dim = {}",
          p.dim, p.value_dim, packed_dim, packed_value_dim);
  for (int i = 0; i + 1 < kv.rank; ++i)
    require(kv.shape[i] <= 1 || kv.stride[i] % 16 == 0, bad,
            "kv: stride {} of dimension {}: rows of fp8_656 lie on multiples of 16 bytes",
            kv.stride[i], i);
}

void check_storage(const Problem& p, const KeyTensors& t) {
  const Tensor& kv = t.kv;
  const KvStorage storage = p.options.kv_storage;
  if (storage == KvStorage::plain) {
    if (mutant(Mutant::sa19_logical_dtype_believed) && kv.dtype == f8_e4m3) return;
    require(kv.dtype != u8, bad, "kv: dtype uint8 says no layout; kv_storage = plain (fp8_656?)");
    require(kv.dtype != f8_e4m3, bad,
            "kv: dtype {} needs kv_storage = fp8_scaled with a kv_scale, or fp8_656; it is plain",
            name_of(kv.dtype));
    require(kv.dtype == p.q_dtype, bad, "kv: dtype {} where q has {}; both must be the same",
            name_of(kv.dtype), name_of(p.q_dtype));
    require(!t.kv_scale, bad, "kv_scale: given beside kv of dtype {} in kv_storage = plain",
            name_of(kv.dtype));
    return;
  }
  if (storage == KvStorage::fp8_656) {
    require(kv.dtype == u8 || kv.dtype == f8_e4m3, bad,
            "kv: dtype {} where kv_storage = fp8_656 needs uint8 or fp8_e4m3", name_of(kv.dtype));
    require(!t.kv_scale, bad, "kv_scale: rows of kv_storage = fp8_656 hold their own scales");
    require(p.q_dtype != f8_e4m3, bad, "q: dtype fp8_e4m3 with kv_storage = fp8_656");
    check_packed(p, kv);
    return;
  }
  require(kv.dtype == f8_e4m3, bad, "kv: dtype {} where kv_storage = fp8_scaled needs fp8_e4m3",
          name_of(kv.dtype));
  require(t.kv_scale.present, bad, "kv_scale: needed beside kv of dtype fp8_e4m3");
  check_dtype("kv_scale", t.kv_scale, {f32});
}

// The extents of kv that p does not know yet.
void read_keys(Problem& p, const KeyTensors& t) {
  const Tensor& kv = t.kv;
  if (is_paged(p)) {
    require(kv.rank == 3 || kv.rank == 4 || (kv.rank == 2 && !t.block_table), bad,
            "kv: shape {} where [pages, page_rows, groups, columns] is needed", shape_of(kv));
    p.pages = kv.rank == 2 ? 1 : kv.shape[0];
    p.page_rows = kv.rank == 2 ? kv.shape[0] : kv.shape[1];
    p.groups = kv.rank == 4 ? kv.shape[2] : 1;
    p.keys = t.block_table ? p.blocks * p.page_rows : p.pages * p.page_rows;
    p.keys_stored = p.pages * p.page_rows;
    return;
  }
  require(kv.rank >= 2 && kv.rank <= 4, bad,
          "kv: shape {} where [batch, keys, groups, columns] is needed", shape_of(kv));
  const bool batched = kv.rank == 4 || (kv.rank == 3 && t.q_rank == 4);
  p.keys_stored = kv.shape[batched ? 1 : 0];
  p.groups = kv.rank == 4 ? kv.shape[2] : kv.rank == 3 && !batched ? kv.shape[1] : 1;
  p.keys = p.keys_stored;
}

void fit_kv(CheckedCall& r, const KeyTensors& t) {
  const Problem& p = r.problem;
  const int64_t columns = p.options.kv_storage == KvStorage::fp8_656 ? packed_bytes : p.dim;
  const Dim d = {"D", columns}, g = {"G", p.groups, true};
  const bool paged = is_paged(p);
  View& v = r.args.kv;
  if (!paged) {
    v = fit("kv", t.kv, {{"B", p.batch, true}, {"S_kv", p.keys_stored}, g, d});
  } else if (t.kv.rank == 2) {
    v = fit("kv", t.kv, {{"rows", p.page_rows}, d});
    v.stride[3] = v.stride[1], v.stride[1] = v.stride[0], v.stride[0] = 0;
  } else {
    v = fit("kv", t.kv, {{"pages", p.pages}, {"page_rows", p.page_rows}, g, d});
  }
  check_rows("kv", t.kv);
  if (!t.kv_scale) return;
  const int64_t tiles = (p.dim + scale_tile - 1) / scale_tile;
  const Dim outer = {paged ? "pages" : "B", paged ? p.pages : p.batch, !paged || t.kv.rank == 2};
  const Dim rows = {paged ? "page_rows" : "S_kv", paged ? p.page_rows : p.keys_stored};
  View& s = r.args.kv_scale;
  if (t.kv_scale.rank == 0) {
    s = fit("kv_scale", t.kv_scale, {});
  } else {
    s = fit_any("kv_scale", t.kv_scale, {{outer, rows}, {outer, rows, {"ceil(D / 128)", tiles}}});
    r.problem.kv_scale_rank = s.stride[2] != 0 ? 2 : 1;
  }
  r.problem.has_kv_scale = true;
}

}  // namespace

std::vector<NamedTensor> check_memory(const NamedTensor& leader, std::vector<NamedTensor> inputs,
                                      const std::vector<NamedTensor>& outputs) {
  check_views(inputs);
  check_views(outputs);
  if (*leader.tensor) {
    check_devices(leader, inputs);
    check_devices(leader, outputs);
  }
  check_overlap(inputs, outputs);
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return inputs;
}

void check_threads(int threads, int64_t workspace_limit_bytes) {
  require(workspace_limit_bytes >= 0, usage, "workspace_limit = {} bytes: must be >= 0",
          workspace_limit_bytes);
  require(threads >= 0 && threads <= most_threads, usage, "threads = {}: must lie in [0, {}]",
          threads, most_threads);
}

void check_options(const Options& o) {
  check_threads(o.threads, o.workspace_limit_bytes);
  require(o.scale == 0 || std::isnormal(static_cast<float>(o.scale)), usage,
          "scale = {}: must be finite, within fp32; 0 stands for 1 / sqrt(D)", o.scale);
  require(o.q_position_base >= 0 && o.q_position_base <= INT32_MAX, usage,
          "q_position_base = {}: must lie in [0, 2^31)", o.q_position_base);
  for_each_field(option_fields, [&](const auto& f) {
    using Value = std::remove_cvref_t<decltype(o.*f.member)>;
    if constexpr (std::is_enum_v<Value>) {
      const int v = static_cast<int>(o.*f.member), last = last_value<Value>();
      require(v >= 0 && v <= last, usage, "{} = {}: must lie in [0, {}]", f.name, v, last);
    }
  });
}

void set_ranks(Problem& p, const Ranks& ranks) {
  if (ranks.heads) p.heads_world = ranks.heads->size(), p.heads_rank = ranks.heads->rank();
  if (ranks.sequence)
    p.sequence_world = ranks.sequence->size(), p.sequence_rank = ranks.sequence->rank();
  if (ranks.batch) p.batch_world = ranks.batch->size();
  p.head_begin = ranks.head_begin;
  p.row_begin = ranks.gather_kv ? ranks.row_begin : 0;
  p.gather_kv = ranks.gather_kv && p.sequence_world > 1;
  require(ranks.head_begin >= 0, usage, "head_begin = {}: must be >= 0", ranks.head_begin);
  require(ranks.row_begin >= 0, usage, "row_begin = {}: must be >= 0", ranks.row_begin);
  require(ranks.gather_kv || (ranks.row_begin == 0 && ranks.total_kv_rows == 0), usage,
          "row_begin = {}, total_kv_rows = {}: of gather_kv, which is off", ranks.row_begin,
          ranks.total_kv_rows);
}

void check_whole_keys(const Problem& p, const Ranks& ranks) {
  if (!ranks.gather_kv || p.gather_kv) return;
  const int64_t total = ranks.total_kv_rows, rows = p.keys_stored;
  require(ranks.row_begin == 0 && (total == 0 || total == rows), usage,
          "gather_kv: row_begin = {}, total_kv_rows = {} beside {} rows of this rank, and no other "
          "rank in sequence",
          ranks.row_begin, total, rows);
}

void check_spaces(const Problem& p, const Inputs& in) {
  const Options& o = p.options;
  require(in.cu_seqlens_q.present == in.cu_seqlens_k.present, usage,
          "cu_seqlens_q and cu_seqlens_k: give both or neither");
  require(in.block_table.present == in.kv_lengths.present, usage,
          "block_table and kv_lengths: give both or neither");
  if (o.index_space == IndexSpace::slots) {
    require(!o.causal, usage, "causal: positions are unknown with index_space = slots");
    require(!in.cu_seqlens_q, usage, "cu_seqlens_q: not with index_space = slots");
  }
  if (in.block_table) {
    require(o.index_space == IndexSpace::sequence, usage,
            "block_table: needs index_space = sequence");
    require(!in.cu_seqlens_q, usage, "cu_seqlens_q: not with a block_table");
    require(!p.gather_kv, usage, "gather_kv: not with a block_table");
  }
  require(!p.gather_kv || o.index_space != IndexSpace::slots, usage,
          "gather_kv: not with index_space = slots");
}

void fit_query(CheckedCall& r, const QueryTensors& t, const Ranks& ranks) {
  Problem& p = r.problem;
  require(t.q && (t.q.rank == 3 || t.q.rank == 4), bad,
          "q: needed, with shape [batch, queries, heads, columns]{}", but_given(t.q));
  const int f = t.q.rank - 3;
  p.batch = f ? t.q.shape[0] : 1;
  p.queries = t.q.shape[f];
  p.heads = t.q.shape[f + 1];
  p.dim = t.q.shape[f + 2];
  require(p.dim >= 1, bad, "q: D = {}: at least 1 is needed", p.dim);
  p.device = t.q.device;
  p.device_index = t.q.device_index;
  p.q_dtype = t.q.dtype;
  check_dtype("q", t.q, {f32, bf16, f16, f64, f8_e4m3});
  check_rows("q", t.q);
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries}, h = {"H", p.heads};
  r.args.q = fit("q", t.q, {b, s, h, {"D", p.dim}});
  p.q_stride = strides_of(r.args.q);
  require(t.q_scale.present == (t.q.dtype == f8_e4m3), bad, "q_scale: {} beside q of dtype {}",
          t.q_scale ? "given" : "needed", name_of(t.q.dtype));
  if (t.q_scale) {
    check_dtype("q_scale", t.q_scale, {f32});
    r.args.q_scale = t.q_scale.rank == 0 ? fit("q_scale", t.q_scale, {})
                                         : fit_any("q_scale", t.q_scale, {{b, s}, {b, s, h}});
    p.q_scale_rank = t.q_scale.rank == 0 ? 0 : r.args.q_scale.stride[2] ? 2 : 1;
    p.has_q_scale = true;
  }
  p.total_heads = ranks.total_heads > 0 ? ranks.total_heads : p.head_begin + p.heads;
}

void fit_keys(CheckedCall& r, const KeyTensors& t, const Ranks& ranks) {
  Problem& p = r.problem;
  require(t.kv.present, bad, "kv: needed, with shape [batch, keys, groups, columns]");
  check_dtype("kv", t.kv, {f32, bf16, f16, f64, f8_e4m3, u8});
  p.kv_dtype = t.kv.dtype;
  if (t.kv.rank >= 1) check_storage(p, t);
  read_keys(p, t);
  if (p.gather_kv) {
    require(ranks.total_kv_rows >= p.row_begin + p.keys_stored, usage,
            "total_kv_rows = {}: this rank alone holds rows [{}, {})", ranks.total_kv_rows,
            p.row_begin, p.row_begin + p.keys_stored);
    p.keys = ranks.total_kv_rows;
  }
  check_whole_keys(p, ranks);
  require(p.groups >= 1, bad, "kv: {} groups: at least 1 is needed", p.groups);
  require(p.heads_world == 1 || p.groups == 1 || ranks.total_heads > 0, usage,
          "total_heads = 0: with {} groups and heads cut over ranks it must be given", p.groups);
  require(p.head_begin + p.heads <= p.total_heads, usage,
          "total_heads = {}: this rank holds heads [{}, {})", p.total_heads, p.head_begin,
          p.head_begin + p.heads);
  if (p.total_heads == 0) p.total_heads = p.groups;
  require(p.total_heads % p.groups == 0, bad, "kv: {} groups do not divide {} heads", p.groups,
          p.total_heads);
  fit_kv(r, t);
  p.kv_stride = strides_of(r.args.kv);
}

void fit_sequences(CheckedCall& r, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
  Problem& p = r.problem;
  if (!cu_seqlens_q) return;
  require(p.batch == 1, bad, "cu_seqlens_q: B = {}: sequences lie behind one another, B is 1",
          p.batch);
  require(cu_seqlens_q.rank == 1 && cu_seqlens_q.shape[0] >= 1, bad,
          "cu_seqlens_q: shape {} where [sequences + 1] is needed", shape_of(cu_seqlens_q));
  p.sequences = cu_seqlens_q.shape[0] - 1;
  require(p.sequences >= 1, bad, "cu_seqlens_q: one extent of 1 holds no sequence");
  const Dim n = {"sequences + 1", p.sequences + 1};
  r.args.cu_seqlens_q = fit("cu_seqlens_q", cu_seqlens_q, {n});
  r.args.cu_seqlens_k = fit("cu_seqlens_k", cu_seqlens_k, {n});
}

}  // namespace talea::sparse_attention
