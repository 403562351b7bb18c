// What: lane sm90: the way through one call, and what it says about itself.
// Why: it is the lane's door: decline, bytes, details, run.
// Never: allocates, synchronises or leaves the caller's stream.
#include "ops/linear_cross_entropy/sm90/run.hpp"

namespace talea::lce::sm90 {
namespace {

const char* schedule_of(const Config& c) {
  if (c.runs_ahead()) return "chunks of rows, the next chunk's logits beside dW";
  if (!c.by_slices()) return "chunks of rows";
  return c.from_saved() ? "slices of the vocabulary, row states from saved outputs"
                        : "slices of the vocabulary after a pass for the row states";
}

void report(const Run& r) {
  Result& said = r.call.result;
  said.logits_home = r.c.is_wide()
                         ? "fp32 rows of a chunk in the workspace, overwritten by their gradient"
                         : "registers of the logits product's epilogue (fp32)";
  said.logits_tile_rows = r.c.is_wide() ? r.c.chunk_rows : 128;
  said.logits_tile_columns = r.c.is_wide() ? r.p.vocab_local : r.c.tile_columns;
  said.logits_tile_bytes = said.logits_tile_rows * said.logits_tile_columns * 4;
  said.chunk_rows = r.c.chunk_rows, said.chunks = r.c.chunks;
  said.accumulator_softmax = r.c.is_wide() ? "fp32 per thread of a row, fp64 over a row"
                                           : "fp32 per tile, fp64 over tiles";
  said.accumulator_dx = r.c.bf16_sum ? "fp32 on each rank; ranks: rounded to bf16, summed in bf16"
                        : r.exchanged() ? "fp32 on each rank and over the ranks, rounded once"
                                        : "fp32, rounded once";
  said.accumulator_dw =
      r.c.dw == DwOutput::split && r.c.rest_bits == 0 ? "bf16, rounded by each chunk (dw_sum)"
      : r.c.sums_in_codes() ? "16 bits and an exponent for 128 of them, added in fp32, rounded once"
      : r.c.dw == DwOutput::split ? fmt::format(
                                        "bf16 and {} bits beside it, added in fp32, "
                                        "rounded once",
                                        r.c.rest_bits)
      : r.c.dw == DwOutput::workspace ? "fp32 workspace, rounded once"
      : r.c.dw == DwOutput::direct    ? "fp32, rounded once"
                                      : "fp32, added in place";
  said.accumulator_loss = "fp64 in token order";
  said.upstream_handling =
      r.c.from_saved() ? "exact vector, with lse and target_logprob of an earlier call; one pass"
                       : "exact vector, applied per row in the same pass";
  const std::string slices =
      r.c.by_slices() ? fmt::format(", {} words a slice", r.c.slice_words) : "";
  const char* factors = !r.p.backward() ? ""
                        : r.c.two_terms ? "; gradient factors in two 16-bit terms"
                                        : "; gradient factors rounded once";
  said.notes.push_back(
      fmt::format("{}{}{}; predicted {:.4g} ms", schedule_of(r.c), slices, factors, r.c.ms));
  said.merges = r.exchanged() ? "partial sums on the device, ranks by all_gather of the row states"
                              : "partial sums merged in a fixed order on the device";
  if (r.c.by_slices() && !r.c.from_saved())  // the logits twice
    said.flops += 2.0 * static_cast<double>(r.p.tokens) * static_cast<double>(r.p.hidden) *
                  static_cast<double>(r.p.vocab_local);
  said.denominator = NAN;
  if (said.valid_tokens >= 0) return;  // counted under target_check = checked
  said.notes.push_back(fmt::format(
      "token counts stay on the device: int64 valid, ignored, out_of_range, in_partition at "
      "workspace byte {}, readable once the stream has run",
      reinterpret_cast<const char*>(r.b.facts) - static_cast<const char*>(r.call.workspace.data)));
}

void run(const Call& call, const Planned& planned) {
  const device::DeviceGuard guard(call.problem.device_index);
  device::refuse_earlier_error(device::cuda_stream(call.stream));
  require_device(call);
  const auto& c = planned.as<Config>();
  Arena arena(call.workspace);
  const Run r{call, call.problem, c, lay_out(call.problem, c, arena),
              device::cuda_stream(call.stream)};
  prepare(r);
  for (int64_t begin = 0; begin < r.p.tokens; begin += c.chunk_rows)
    run_chunk(r, begin, begin == 0);
  end(r);
  if (c.borrows_dx()) blank(r);
  if (mutant(Mutant::workspace_overrun))
    device::check(cudaMemsetAsync(static_cast<char*>(call.workspace.data) + call.workspace.bytes, 1,
                                  1, r.stream),
                  "a byte too far");
  if (!call.result.lane.empty()) report(r);  // one without a lane is read by nobody
}

Planned plan(const Problem& p, const DeviceFacts& device) {
  const Config c = config(p, device);
  Arena counting;
  lay_out(p, c, counting);
  Planned made = planned(counting.bytes(), product_flops(p), c);
  made.predicted_ms = c.ms;
  made.kept_bytes = rest_bytes(p, device, c);
  return made;
}

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  const auto& c = planned.as<Config>();
  const bool few = c.online && p.tokens <= kFewRows;
  return {fmt::format("schedule = {}", schedule_of(c)),
          fmt::format("chunk_rows = {}", c.chunk_rows),
          fmt::format("chunks = {}", c.chunks),
          fmt::format("slice_words = {}", c.slice_words),
          fmt::format("state_rows = {}", c.state_rows),
          fmt::format("predicted = {:.3g} ms (H200's rates, this memory's)", c.ms),
          fmt::format("dw sum = {}", c.sums_in_codes() ? "16 bits and an exponent for 128"
                                     : c.dw == DwOutput::split
                                         ? fmt::format("bf16 and {} bits", c.rest_bits)
                                     : c.dw == DwOutput::workspace ? "fp32 in the workspace"
                                     : c.dw == DwOutput::direct    ? "in registers"
                                                                   : "fp32, in place"),
          fmt::format("blocks = {} (pairs sharing the B tile)", c.blocks),
          fmt::format("path = {}", c.is_wide()          ? "wide"
                                   : c.is_transformed() ? "folded, then transformed"
                                                        : "folded"),
          fmt::format("logits tile = {} x {} x 64, ping-pong, {} stages", few ? 64 : 128,
                      c.tile_columns, few && c.tile_columns == kLogitsTile ? 6 : 5),
          c.dx_tile == DxTile::tall     ? "dx tile = 192 x 128 x 64, ping-pong, 5 stages"
          : c.dx_tile == DxTile::narrow ? "dx tile = 128 x 128 x 64, ping-pong, 6 stages"
                                        : "dx tile = 128 x 256 x 64, cooperative, 4 stages",
          "dw tile = 192 x 128 x 64, ping-pong, 5 stages, reduce-add",
          fmt::format("buffer = {} bytes of {}", c.chunk_rows * c.exp_stride * 2,
                      c.is_wide()     ? "fp32 logits, then their gradient"
                      : c.by_slices() ? "the logits' gradient"
                                      : "exp(z - shift)")};
}

}  // namespace
}  // namespace talea::lce::sm90

namespace talea::lce {

Lane sm90_lane() {
  return {.name = "sm90",
          .kind = "native kernel",
          .runs_on = DeviceKind::cuda,
          .decline = sm90::decline,
          .plan = sm90::plan,
          .details = sm90::details,
          .run = sm90::run,
          .yields = sm90::yields,
          .keeps_rest = sm90::keeps_dx_rest};
}

}  // namespace talea::lce
