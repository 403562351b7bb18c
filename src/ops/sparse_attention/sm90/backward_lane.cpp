// What: the backward pass of lane sm90: Delta, then chunks of queries: P, dS and dq; dkv.
// Why: P and dS of a chunk lie in the workspace between the two kernels that need them.
// Never: allocates, or waits but under IndexCheck::checked.
#include "ops/sparse_attention/sm90/backward_lane.hpp"

#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/foreign.hpp"
#include "ops/sparse_attention/sums.cuh"

namespace talea::sparse_attention::sm90 {
namespace {

// 16 bits, and every row on 16-byte words.
bool in_words(const View& v) {
  if (!v.present || !is_16bit(v.dtype) || reinterpret_cast<uintptr_t>(v.data) % 16 != 0)
    return false;
  return (v.stride[0] | v.stride[1] | v.stride[2]) % 8 == 0;
}

class Run {
 public:
  Run(const Call& call, const BackwardConfig& config)
      : call_(call),
        p_(call.problem),
        a_(call.args),
        c_(config),
        stream_(device::cuda_stream(call.stream)),
        arena_(call.workspace),
        b_(lay_out_backward(arena_, p_, c_)) {}

  void run() {
    fill();
    if (b_.counters) cuda::begin_counting(call_, way_.f.tables, b_.counters, stream_);
    begin_dkv();
    rows();
    for (int64_t list = 0; list < c_.lists; list += c_.chunk_lists)
      chunk(list, std::min(c_.chunk_lists, c_.lists - list));
    if (p_.wants_d_sink) form_d_sink(rows_, b_.delta, b_.sink_share, a_.d_sink, stream_);
    if (c_.converts_dkv) cuda::convert(way_.sums, a_.dkv, extent_, stream_);
    if (a_.status) cuda::write_status(b_.counters, way_.f.tables, a_.status, stream_);
  }

 private:
  void fill() {
    Forward& f = way_.f;
    f.tables = cuda::tables_of(p_, a_);
    f.counters = b_.counters;
    f.q = a_.q;
    f.kv = a_.kv;
    f.sink = a_.sink;
    f.lse = a_.saved_lse;
    f.scale = static_cast<float>(p_.scale);
    f.dim = p_.dim;
    f.value_dim = p_.value_dim;
    f.heads = p_.heads;
    f.head_begin = p_.head_begin;
    f.group_heads = p_.total_heads / p_.groups;
    f.head_tiles = c_.head_tiles;
    f.work = c_.lists * c_.head_tiles;
    way_.d_o = a_.d_o;
    way_.d_lse = a_.d_lse;
    way_.dq = a_.dq;
    way_.dq_words = in_words(a_.dq);
    way_.delta = b_.delta;
    way_.sink_share = b_.sink_share;
    way_.weights = b_.weights;
    way_.contributions = b_.contributions;
    way_.key_tiles = c_.key_tiles;
    way_.exponent = c_.exponent;
    way_.grown = std::exp2(c_.exponent);
    way_.wants_dkv = p_.wants_dkv;
    way_.adds = c_.adds;
  }

  void begin_dkv() {
    if (!p_.wants_dkv) return;
    way_.sums = a_.dkv;
    extent_[0] = c_.rows / p_.groups / c_.inner_rows;
    extent_[1] = c_.rows == 0 ? 0 : c_.inner_rows;
    extent_[2] = p_.groups;
    extent_[3] = p_.dim;
    if (c_.converts_dkv) {
      way_.sums.data = b_.dkv;
      way_.sums.dtype = DType::f32;
      way_.sums.stride[3] = 1;
      for (int i = 2; i >= 0; --i) way_.sums.stride[i] = way_.sums.stride[i + 1] * extent_[i + 1];
    }
    if (c_.converts_dkv || !a_.accumulate_dkv) cuda::fill_zero(way_.sums, extent_, stream_);
  }

  void rows() {
    Delta& d = rows_;
    d.d_o = a_.d_o;
    d.o = a_.saved_o;
    d.residual = a_.saved_o_residual;
    d.lse = a_.saved_lse;
    d.sink = a_.sink;
    d.batch = p_.batch;
    d.queries = p_.queries;
    d.heads = p_.heads;
    d.columns = p_.value_dim;
    d.words = in_words(d.d_o) && in_words(d.o) && d.o.dtype == d.d_o.dtype &&
              (!d.residual.present || (in_words(d.residual) && d.residual.dtype == d.d_o.dtype));
    form_delta(d, d.d_o.dtype == DType::f16, b_.delta, b_.sink_share, stream_);
  }

  void chunk(int64_t first, int64_t lists) {
    const bool f16 = p_.q_dtype == DType::f16;
    const auto blocks = [&](int64_t works) {
      return static_cast<unsigned>(std::min<int64_t>(works, c_.sm_count));
    };
    way_.first_list = first;
    way_.last_list = first + lists;
    (f16 ? launch_backward_f16 : launch_backward_bf16)(way_, blocks(lists * c_.head_tiles),
                                                       stream_);
    if (!c_.contributes || p_.heads == 0 || p_.slots == 0 || c_.rows == 0) return;
    (f16 ? launch_sums_f16 : launch_sums_bf16)(way_, blocks(lists * c_.sums.sums * c_.sums.groups),
                                               stream_);
    Segments s;
    s.tables = way_.f.tables;
    s.sums = way_.sums;
    s.rows = c_.rows;
    s.inner_rows = c_.inner_rows;
    s.first_list = first;
    s.lists = lists;
    s.tiles = c_.sums.sums;
    s.dim = p_.dim;
    sort_slots(s, b_.sorted, stream_);
    add_segments(s, b_.sorted, b_.contributions, stream_);
  }

  const Call& call_;
  const Problem& p_;
  const Args& a_;
  const BackwardConfig& c_;
  const cudaStream_t stream_;
  Arena arena_;
  const BackwardBuffers b_;
  Backward way_;
  Delta rows_;
  int64_t extent_[4] = {0, 0, 0, 0};
};

}  // namespace

Planned plan_backward(const Problem& p, const DeviceFacts& d) {
  const device::DeviceGuard guard(p.device_index);
  const BackwardConfig c = backward_config(p, d, sort_bytes);
  Arena counting;
  lay_out_backward(counting, p, c);
  return planned(counting.bytes(), 0, c);
}

std::vector<std::string> backward_details(const Problem& p, const BackwardConfig& c) {
  const BackwardChunks chunks = backward_chunks[width_of(p.dim)];
  std::vector<std::string> said = {
      fmt::format("tile = {} heads x {} keys, one query a block", tile_heads, tile_keys),
      fmt::format("columns of dq = {} + {}", chunks.first * chunk_columns,
                  chunks.second * chunk_columns),
      fmt::format("shared memory = {} bytes: q, d_o, a tile of keys, P and dS",
                  backward_shared_bytes(p.dim))};
  if (!p.wants_dkv) return said;
  if (c.adds) {
    said.emplace_back("dkv: added by the blocks that form dq, in order of arrival");
    return said;
  }
  said.push_back(
      fmt::format("chunk = {} of {} queries: P and dS in the workspace", c.chunk_lists, c.lists));
  said.push_back(fmt::format("dkv: {} heads and {} columns at a time, {} stages",
                             c.sums.head_tiles * tile_heads, c.sums.chunks * chunk_columns,
                             c.sums.stages));
  return said;
}

void run_backward(const Call& call, const BackwardConfig& config) {
  Run(call, config).run();
  const Problem& p = call.problem;
  Result& r = call.result;
  r.scores_home = "registers of a warpgroup, fp32";
  r.scores_tile_rows = tile_heads;
  r.scores_tile_keys = tile_keys;
  r.scores_tile_bytes = 4 * tile_heads * tile_keys;
  r.kv_path = "selected rows copied to shared memory, a tile of keys at a time";
  r.delta_source = p.has_o_residual ? "saved o and its residual" : "saved o";
  r.accumulator_dq = r.accumulator_dkv = "fp32";
  if (!p.wants_dkv) return;
  if (config.contributes) {
    r.dkv_order = "heads of a query, then query, slot";
  } else {
    r.dkv_sum = "atomic";
    r.dkv_order = "order of arrival";
  }
}

}  // namespace talea::sparse_attention::sm90
