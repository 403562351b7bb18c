// Lane sm90: the order of the kernels of one call.
// Exists to show the whole way through on one page: rows, then per chunk the three products.
// Never allocates, synchronises or leaves the caller's stream.
#include <cuda_runtime.h>

#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/sm90/layout.hpp"
#include "ops/linear_cross_entropy/sm90/products.hpp"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"
#include "ops/linear_cross_entropy/sm90/smoothing.hpp"

namespace talea::lce::sm90 {
namespace {

struct Run {
  const Call& call;
  const Problem& p;
  Config c;
  Buffers b;
  cudaStream_t stream;

  Matrix weight() const {
    return {call.in.weight.data, p.vocab_local, p.hidden, p.weight_row_stride};
  }
  // dW in fp32: the caller's, or the workspace's that is rounded at the end.
  Matrix dw() const {
    if (c.round_dw) return {b.dw, p.vocab_local, p.hidden, p.hidden};
    return {call.out.dw.data, p.vocab_local, p.hidden, call.out.dw.stride[0]};
  }
  Launch launch() const { return {stream, c.blocks}; }
  LogitRule rule() const {
    return {static_cast<float>(p.options.logit_scale), static_cast<float>(p.options.softcap),
            call.in.bias ? call.in.bias.data : nullptr, p.bias_dtype == DType::bf16,
            p.options.softcap > 0 ? static_cast<float>(1 / p.options.softcap) : 0.f};
  }
};

void prepare(const Run& r) {
  const Inputs& in = r.call.in;
  TokenParams t{r.p.tokens,
                r.p.vocab,
                r.p.vocab_begin,
                r.p.vocab_local,
                r.p.options.ignore_index,
                device_vector(in.targets),
                device_vector(in.token_scale),
                r.b.token_target,
                r.b.token_scale};
  prepare_tokens(t, r.stream);
  // Each row's shift: its maximum over the first tile of the vocabulary, in a product of its own.
  LogitsCall first;
  first.x = {in.hidden.data, r.p.tokens, r.p.hidden, r.p.hidden_row_stride};
  first.weight = r.weight();
  first.chunk = {0, static_cast<int>(r.p.tokens), nullptr};
  first.rows.target = r.b.token_target;
  first.rows.scale = r.b.token_scale;
  first.rows.shift = r.b.token_shift;
  first.rule = r.rule();
  first.general = r.c.general;
  first.kind = LogitsCall::Kind::shift;
  logits_product(first, r.launch());

  CompactParams q;
  q.tokens = r.p.tokens, q.vocab = r.p.vocab, q.vocab_begin = r.p.vocab_begin;
  q.vocab_local = r.p.vocab_local, q.ignore_index = r.p.options.ignore_index;
  q.targets = device_vector(in.targets);
  q.class_weight = device_vector(in.class_weight);
  q.token_weight = device_vector(in.token_weight);
  q.token_scale = device_vector(in.token_scale);
  q.token_shift = r.b.token_shift;
  q.denominator =
      r.p.options.reduction == Reduction::mean ? static_cast<int>(r.p.options.denominator) : 3;
  q.denominator_value = r.p.options.denominator_value;
  q.rows = r.b.rows;
  q.row_class_weight = r.b.row_class_weight;
  q.facts = r.b.facts;
  q.sort_keys = r.b.keys;
  compact_rows(q, r.stream);
  if (r.b.keys)
    sort_keys(r.b.keys, r.b.sorted, r.p.tokens, r.b.sort_scratch, r.c.sort_bytes, r.stream);
}

void blank(const Run& r) {
  const Outputs& out = r.call.out;
  const bool per_row = r.p.options.reduction == Reduction::none;
  BlankParams q;
  q.tokens = r.p.tokens, q.vocab = r.p.vocab, q.ignore_index = r.p.options.ignore_index;
  q.hidden = r.p.hidden;
  q.targets = device_vector(r.call.in.targets);
  if (per_row) q.loss = device_vector(out.loss);
  q.lse = device_vector(out.lse);
  q.logprob = device_vector(out.target_logprob);
  q.entropy = device_vector(out.entropy);
  if (out.dx) q.dx = out.dx.data, q.dx_stride = out.dx.stride[0];
  blank_rows(q, r.stream);
}

FinishParams finish_params(const Run& r, int64_t begin, int64_t rows) {
  const Inputs& in = r.call.in;
  const Outputs& out = r.call.out;
  const Options& o = r.p.options;
  FinishParams f;
  f.rows = r.b.rows.from(begin);
  f.row_class_weight = r.b.row_class_weight + begin;
  f.begin = begin, f.chunk_rows = rows, f.facts = r.b.facts;
  f.tile_sums = r.b.tile_sums, f.tile_shifted = r.b.tile_shifted;
  f.tile_sums_stride = r.c.chunk_rows, f.tiles = static_cast<int>(r.c.tiles);
  f.terms.label_smoothing = o.label_smoothing;
  f.terms.z_loss = o.z_loss;
  f.terms.vocab = static_cast<double>(r.p.vocab);
  f.terms.class_weight_sum = static_cast<double>(r.p.vocab);
  f.scale = o.logit_scale, f.softcap = o.softcap;
  f.token_weight = device_vector(in.token_weight);
  f.upstream = device_vector(in.upstream);
  f.upstream_lse = device_vector(in.upstream_lse);
  if (o.reduction == Reduction::none) f.loss = device_vector(out.loss);
  f.lse = device_vector(out.lse);
  f.logprob = device_vector(out.target_logprob);
  f.entropy = device_vector(out.entropy);
  f.row_loss = r.b.row_loss + begin;
  if (r.c.smoothing) {
    f.row_class_sum = r.b.row_class_sum + begin;
    f.row_smooth = r.b.row_smooth + begin;
    f.sums = r.b.bias_sum;
  }
  f.scaled = r.p.wants_dw ? r.b.x : nullptr;
  f.hidden = r.p.hidden;
  f.zeroed = r.b.tickets;
  return f;
}

void logits(const Run& r, const ChunkRows& chunk) {
  LogitsCall q;
  q.x = {r.b.x, r.c.chunk_rows, r.p.hidden, r.p.hidden};
  q.weight = r.weight();
  q.chunk = chunk;
  q.rows = r.b.rows.from(chunk.begin);
  q.tile_sums = r.b.tile_sums, q.tile_shifted = r.b.tile_shifted;
  q.tile_sums_stride = r.c.chunk_rows;
  q.rule = r.rule();
  q.general = r.c.general;
  q.kind = LogitsCall::Kind::sums;
  if (r.b.exp) {
    q.kind = LogitsCall::Kind::store;
    q.exp = {r.b.exp, r.c.chunk_rows, r.p.vocab_local, r.c.exp_stride};
  }
  logits_product(q, r.launch());
  q.repair = true;  // ends at once where every row is within reach of its shift
  logits_product(q, r.launch());
}

void smoothing_of_chunk(const Run& r, const ChunkRows& chunk) {
  RowDotParams d;
  d.x = r.b.x, d.hidden = r.p.hidden, d.capacity = chunk.capacity, d.begin = chunk.begin;
  d.facts = r.b.facts, d.vector = r.b.weight_sum, d.sums = r.b.bias_sum;
  d.scale = r.p.options.logit_scale;
  d.row_scale = r.b.rows.scale ? r.b.rows.scale + chunk.begin : nullptr;
  d.out = r.b.row_class_sum + chunk.begin;
  row_dots(d, r.stream);
}

void gradients(const Run& r, const ChunkRows& chunk, bool first) {
  const Matrix exp{r.b.exp, r.c.chunk_rows, r.p.vocab_local, r.c.exp_stride};
  const RowBuffers rows = r.b.rows.from(chunk.begin);
  if (r.p.wants_dx) {
    DxCall q;
    q.exp = exp, q.weight = r.weight(), q.chunk = chunk, q.rows = rows;
    q.dx = {r.call.out.dx.data, r.p.tokens, r.p.hidden, r.call.out.dx.stride[0]};
    if (r.c.smoothing)
      q.smooth_row = r.b.weight_sum, q.smooth_factor = r.b.row_smooth + chunk.begin;
    dx_product(q, {r.stream, r.c.dx_blocks});
  }
  if (!r.p.wants_dw) return;
  DwCall q;
  q.exp = exp, q.dw = r.dw(), q.chunk = chunk;
  q.x = {r.b.x, r.c.chunk_rows, r.p.hidden, r.p.hidden};
  q.add = !first || (r.p.accumulate_dw && !r.c.round_dw);
  q.beside_dx = r.p.wants_dx;
  q.rounds = r.c.direct_dw, q.sorted = r.b.sorted, q.rows = r.b.rows;
  q.hidden = {r.call.in.hidden.data, r.p.tokens, r.p.hidden, r.p.hidden_row_stride};
  q.early = r.c.dw_early, q.head_start = r.c.dw_head_start, q.tickets = r.b.tickets;
  if (r.c.smoothing) {
    q.smooth_row = r.b.smooth_row;
    q.class_weight = static_cast<const float*>(r.call.in.class_weight.data);
  }
  dw_product(q, r.launch());
}

void chunk(const Run& r, int64_t begin, bool first) {
  const int64_t capacity = std::min(r.c.chunk_rows, r.p.tokens - begin);
  const int* in_use = &r.b.facts->valid;
  const ChunkRows rows{static_cast<int>(begin), static_cast<int>(capacity), in_use};
  gather_rows({r.call.in.hidden.data, r.p.hidden_row_stride, r.p.hidden, r.b.rows.index, r.b.facts,
               begin, r.c.chunk_rows, r.b.x},
              r.stream);
  logits(r, rows);
  if (r.c.smoothing) smoothing_of_chunk(r, rows);
  finish_rows(finish_params(r, begin, capacity), r.stream);
  if (r.c.smoothing && r.p.wants_dw) {
    weighted_rows(
        {r.call.in.hidden.data, r.p.hidden_row_stride, r.p.hidden, r.b.rows.index + begin,
         r.b.facts, begin, capacity, r.b.row_smooth + begin, r.b.weight_parts, r.b.smooth_row},
        r.stream);
  }
  if (r.b.exp) gradients(r, rows, first);
}

void last(const Run& r) {
  const Outputs& out = r.call.out;
  const Options& o = r.p.options;
  if (r.p.wants_dw) {
    const Matrix dw = r.dw();
    if (!r.c.direct_dw)
      scatter_targets(
          {r.b.sorted, r.p.tokens, r.p.hidden, r.b.facts, r.b.rows, r.call.in.hidden.data,
           r.p.hidden_row_stride, static_cast<float*>(dw.data), dw.stride},
          r.stream);
    if (r.c.round_dw)
      round_rows({r.b.dw, r.p.vocab_local, r.p.hidden, out.dw.data, out.dw.stride[0]}, r.stream);
    if (!r.p.accumulate_dw && r.p.vocab_stored > r.p.vocab_local) {
      const int64_t size = size_of(r.p.dw_dtype), pitch = out.dw.stride[0] * size;
      device::check(
          cudaMemset2DAsync(static_cast<char*>(out.dw.data) + r.p.vocab_local * pitch, pitch, 0,
                            r.p.hidden * size, r.p.vocab_stored - r.p.vocab_local, r.stream),
          "zero of the padded rows of dw");
    }
  }
  if (out.loss && o.reduction != Reduction::none)
    reduce_loss({r.b.facts, r.b.row_loss, device_vector(out.loss), static_cast<int>(o.reduction),
                 o.on_empty == OnEmpty::zero, o.denominator == Denominator::given},
                r.stream);
}

void report(const Run& r) {
  Result& said = r.call.result;
  said.logits_home = "registers of the logits product's epilogue (fp32)";
  said.logits_tile_rows = 128, said.logits_tile_columns = kLogitsTile;
  said.logits_tile_bytes = 128 * kLogitsTile * 4;
  said.chunk_rows = r.c.chunk_rows, said.chunks = r.c.chunks;
  said.accumulator_softmax = "fp32 per tile, fp64 over tiles";
  said.accumulator_dx = "fp32, rounded once";
  said.accumulator_dw = r.c.round_dw    ? "fp32 workspace, rounded once"
                        : r.c.direct_dw ? "fp32, rounded once"
                                        : "fp32, added in place";
  said.accumulator_loss = "fp64 in token order";
  said.upstream_handling = "exact vector, applied per row in the same pass";
  said.merges = "partial sums per tile merged in tile order on the device";
  said.denominator = NAN;
}

void run(const Call& call) {
  const device::DeviceGuard guard(call.problem.device_index);
  const Config c = config(call.problem, call.device);
  Arena arena(call.workspace);
  const Run r{call, call.problem, c, lay_out(call.problem, c, arena),
              static_cast<cudaStream_t>(call.stream)};
  prepare(r);
  blank(r);
  if (c.smoothing)
    weight_sums({call.in.weight.data, r.p.weight_row_stride, r.p.vocab_local, r.p.hidden,
                 device_vector(call.in.class_weight), device_vector(call.in.bias), r.b.weight_parts,
                 r.b.weight_sum, r.b.bias_sum},
                r.stream);
  for (int64_t begin = 0; begin < r.p.tokens; begin += c.chunk_rows) chunk(r, begin, begin == 0);
  last(r);
  report(r);
}

int64_t bytes(const Problem& p, const DeviceFacts& device) {
  Arena counting;
  lay_out(p, config(p, device), counting);
  return counting.bytes();
}

std::vector<std::string> details(const Problem& p, const DeviceFacts& device) {
  const Config c = config(p, device);
  return {fmt::format("chunk_rows = {}", c.chunk_rows),
          fmt::format("chunks = {}", c.chunks),
          fmt::format("blocks = {} (pairs sharing the B tile)", c.blocks),
          fmt::format("logits tile = 128 x {} x 64, ping-pong, 5 stages", kLogitsTile),
          "dx tile = 128 x 256 x 64, cooperative, 4 stages",
          "dw tile = 192 x 128 x 64, ping-pong, 5 stages, reduce-add",
          fmt::format("exp buffer = {} bytes", c.chunk_rows * c.exp_stride * 2)};
}

}  // namespace
}  // namespace talea::lce::sm90

namespace talea::lce {

Lane sm90_lane() {
  return {"sm90", "native kernel", sm90::decline, sm90::bytes, sm90::details, sm90::run};
}

}  // namespace talea::lce
