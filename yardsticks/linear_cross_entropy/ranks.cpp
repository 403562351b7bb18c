// What: see ranks.hpp.
// Why: see ranks.hpp.
// Never: reads what another rank wrote.
#include "yardsticks/linear_cross_entropy/ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "yardsticks/linear_cross_entropy/generate.hpp"
#include "yardsticks/linear_cross_entropy/limit.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

// Rows [first, first + count) of a, then `padding` rows of NaN.
Array rows(const Array& a, int64_t first, int64_t count, int64_t padding = 0) {
  if (!a.present()) return {};
  std::vector<int64_t> shape = a.shape();
  shape[0] = count + padding;
  Array part(a.dtype(), shape);
  const int64_t columns = shape.size() > 1 ? shape[1] : 1;
  for (int64_t i = 0; i < shape[0]; ++i)
    for (int64_t j = 0; j < columns; ++j)
      part.set(i, j, i < count ? a.get(first + i, j) : static_cast<long double>(NAN));
  return part;
}

struct Span {
  int64_t first, count;
};

std::string compare_values(const char* name, const Array& ours, const Array& single, Span span) {
  const int64_t columns = single.shape().size() > 1 ? single.shape()[1] : 1;
  const bool ids = !is_floating(single.dtype());
  long double largest = 0;
  for (int64_t i = 0; i < span.count; ++i)
    for (int64_t j = 0; j < columns && !ids; ++j)
      if (std::isfinite(single.get(span.first + i, j)))
        largest = std::max(largest, std::fabs(single.get(span.first + i, j)));
  for (int64_t i = 0; i < span.count; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      if (ids) {
        if (ours.integer(i, j) != single.integer(span.first + i, j))
          return fmt::format("{}[{}, {}]: {} against {}\n", name, i, j, ours.integer(i, j),
                             single.integer(span.first + i, j));
        continue;
      }
      const long double a = ours.get(i, j), b = single.get(span.first + i, j);
      if ((std::isnan(a) && std::isnan(b)) || a == b) continue;
      if (!(std::fabs(a - b) <= 1e-6L * largest))
        return fmt::format("{}[{}, {}]: {} against {}\n", name, i, j, static_cast<double>(a),
                           static_cast<double>(b));
    }
  return {};
}

std::string compare_gradient(const char* name, const Array& ours, const Array& single, Span span) {
  if (!single.present()) return {};
  const int64_t columns = single.shape().size() > 1 ? single.shape()[1] : 1;
  long double square = 0, error = 0;
  for (int64_t i = 0; i < single.shape()[0]; ++i)
    for (int64_t j = 0; j < columns; ++j)
      if (!std::isnan(single.get(i, j))) square += single.get(i, j) * single.get(i, j);
  for (int64_t i = 0; i < span.count; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const long double a = ours.get(i, j), b = single.get(span.first + i, j);
      if (std::isnan(a) && std::isnan(b)) continue;  // a poisoned row
      error += (a - b) * (a - b);
    }
  // A sum in another order may round the other way, once: half a unit of the output each side.
  const long double limit = single.dtype() == DType::bf16  ? 0x1p-8L
                            : single.dtype() == DType::f16 ? 0x1p-11L
                                                           : 1e-5L;
  if (error == 0 || std::sqrt(error) <= limit * std::sqrt(square)) return {};  // NaN: not <=
  return fmt::format("{}: relative L2 {} against the world of one\n", name,
                     static_cast<double>(std::sqrt(error / square)));
}

std::string compare_padding(const char* name, const Array& ours, int64_t logical) {
  if (!ours.present()) return {};
  const int64_t columns = ours.shape().size() > 1 ? ours.shape()[1] : 1;
  for (int64_t i = logical; i < ours.shape()[0]; ++i)
    for (int64_t j = 0; j < columns; ++j)
      if (!(ours.get(i, j) == 0))
        return fmt::format("{}[{}, {}] = {}: a padded row must be exactly 0\n", name, i, j,
                           static_cast<double>(ours.get(i, j)));
  return {};
}

}  // namespace

const std::vector<std::string> layout_names = {"even",       "ragged", "empty_first",
                                               "empty_last", "padded", "reversed"};

Layout layout(const std::string& name, int64_t vocab, int ranks) {
  Layout all(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    int64_t begin = even_shard_begin(vocab, ranks, r), end = even_shard_begin(vocab, ranks, r + 1);
    if (name == "ragged") {  // quadratic: the first ranks hold almost nothing
      begin = vocab * r * r / (ranks * ranks);
      end = vocab * (r + 1) * (r + 1) / (ranks * ranks);
    } else if (name == "empty_first" && ranks > 1) {
      begin = r == 0 ? 0 : even_shard_begin(vocab, ranks - 1, r - 1);
      end = r == 0 ? 0 : even_shard_begin(vocab, ranks - 1, r);
    } else if (name == "empty_last" && ranks > 1) {
      begin = r == ranks - 1 ? vocab : even_shard_begin(vocab, ranks - 1, r);
      end = r == ranks - 1 ? vocab : even_shard_begin(vocab, ranks - 1, r + 1);
    } else if (name == "reversed") {
      begin = even_shard_begin(vocab, ranks, ranks - 1 - r);
      end = even_shard_begin(vocab, ranks, ranks - r);
    }
    all[r] = {begin, end - begin, 0};
    // Padding may only stand behind the last logical row; a shard of padding alone is legal.
    const bool behind = end == vocab;
    if (name == "padded" && behind) all[r].padding = 3;
  }
  if (name == "padded" && ranks > 1) {  // the last shard holds nothing but padding
    all = layout("empty_last", vocab, ranks);
    all[ranks - 2].padding = 0;
    all[ranks - 1] = {vocab, 0, 5};
  }
  return all;
}

Case shard_case(const Case& whole, const Shard& s, bool sequence_parallel, int rank, int ranks) {
  Case part = whole;
  part.options.vocab = whole.vocab();
  part.in.weight = rows(whole.in.weight, s.begin, s.logical, s.padding);
  part.in.bias = rows(whole.in.bias, s.begin, s.logical, s.padding);
  const auto like = [&](const Array& a) {
    Array own = rows(a, s.begin, s.logical, s.padding);
    for (int64_t i = s.logical; own.present() && i < s.logical + s.padding; ++i)
      for (int64_t j = 0; j < (own.shape().size() > 1 ? own.shape()[1] : 1); ++j) own.set(i, j, 0);
    return own;
  };
  part.out.dw = like(whole.out.dw);
  part.out.db = like(whole.out.db);
  if (!sequence_parallel) return part;
  const int64_t each = whole.tokens() / ranks;
  part.in.hidden = rows(whole.in.hidden, rank * each, each);
  part.out.dx = rows(whole.out.dx, rank * each, each);
  return part;
}

RankRun run_rank(const Case& part, const std::string& lane, const LinearCrossEntropyRanks& ranks) {
  RankRun run;
  run.out = part.out;
  LinearCrossEntropyOptions options = part.options;
  options.lane = lane;
  options.threads = 1;
  const auto in = inputs_of(part.in, host_view);
  const auto out = outputs_of(part, run.out, host_view);
  options = with_kept_limit(in, out, options, ranks);
  const auto problem = describe(in, out, options, ranks);
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(problem)), '\xff');
  run.result = linear_cross_entropy(
      in, out, options, {workspace.data(), static_cast<int64_t>(workspace.size())}, ranks);
  return run;
}

CaseOutputs run_single(const Case& whole, const std::string& lane) {
  return run_rank(whole, lane, {}).out;
}

std::string check_rank(const Case& whole, const CaseOutputs& single, const Layout& layout,
                       bool sequence_parallel, const std::string& lane, Communicator& vocab,
                       Place& place) {
  const int rank = vocab.rank();
  const Shard& shard = layout[rank];
  const Case part = shard_case(whole, shard, sequence_parallel, rank, vocab.size());
  LinearCrossEntropyRanks ranks;
  ranks.vocab = &vocab;
  ranks.vocab_begin = shard.begin;
  ranks.sequence_parallel = sequence_parallel;
  CaseOutputs out;
  std::string wrong;
  if (place.kind() == DeviceKind::cpu) {
    out = run_rank(part, lane, ranks).out;
  } else {
    Outcome ran = run_lane(place, lane, part, ranks);
    out = std::move(ran.out);
    wrong = ran.damage;
  }
  for (const auto& [name, member] : CaseOutputs::members) {
    const Array &ours = out.*member, &truth = single.*member;
    if (!truth.present()) continue;
    const std::string_view n = name;
    if (n == "dx" || n == "dw" || n == "db") continue;
    wrong += compare_values(name, ours, truth, {0, truth.shape().empty() ? 1 : truth.shape()[0]});
  }
  const int64_t each = whole.tokens() / (sequence_parallel ? vocab.size() : 1);
  wrong += compare_gradient("dx", out.dx, single.dx, {sequence_parallel ? rank * each : 0, each});
  wrong += compare_gradient("dw", out.dw, single.dw, {shard.begin, shard.logical});
  wrong += compare_gradient("db", out.db, single.db, {shard.begin, shard.logical});
  wrong += compare_padding("dw", out.dw, shard.logical);
  wrong += compare_padding("db", out.db, shard.logical);
  return wrong.empty() ? "" : fmt::format("rank {} of {}: {}", rank, vocab.size(), wrong);
}

std::string run_world(const Case& whole, const Layout& layout, bool sequence_parallel,
                      const std::string& lane) {
  const CaseOutputs single = run_single(whole, lane);
  std::vector<std::string> wrong(layout.size());
  run_thread_ranks(static_cast<int>(layout.size()), 20, [&](Communicator& c) {
    wrong[static_cast<size_t>(c.rank())] =
        check_rank(whole, single, layout, sequence_parallel, lane, c);
  });
  std::string all;
  for (const std::string& w : wrong) all += w;
  return all;
}

namespace {

void add_cases(Types types, const char* type_name, std::vector<std::pair<std::string, Case>>& all) {
  Spec plain;
  plain.tokens = 24;  // divides by 1, 2, 3, 4 and 8
  plain.hidden = 9;
  plain.vocab = 37;
  plain.bias = true;
  plain.types = types;
  const auto add = [&](const char* name, auto bend) {
    Spec s = plain;
    s.seed = all.size() + 1;
    bend(s);
    all.emplace_back(std::string(type_name) + ", " + name, make_case(s));
  };
  add("mean", [](Spec&) {});
  add("sum", [](Spec& s) { s.reduction = Reduction::sum; });
  add("none with upstream vector", [](Spec& s) {
    s.reduction = Reduction::none;
    s.upstream = Upstream::strided;
  });
  add("label smoothing and class weights", [](Spec& s) {
    s.label_smoothing = 0.1;
    s.class_weight = true;
  });
  add("z-loss, softcap and scale", [](Spec& s) {
    s.z_loss = 0.01;
    s.softcap = 5;
    s.logit_scale = 1.5;
    s.token_scale = true;
  });
  add("weighted denominator", [](Spec& s) {
    s.token_weight = s.class_weight = true;
    s.denominator = Denominator::weighted;
  });
  add("entropy and lse upstream", [](Spec& s) { s.upstream_lse = s.upstream_entropy = true; });
  add("top-k", [](Spec& s) { s.top_k = 7; });
  add("dense soft targets", [](Spec& s) {
    s.soft = Soft::dense;
    s.label_smoothing = 0.05;
  });
  add("sparse soft targets", [](Spec& s) { s.soft = Soft::sparse_with_ignored; });
  add("ignored rows, ignore_index inside", [](Spec& s) {
    s.ignored_percent = 40;
    s.ignore_inside = true;
  });
  add("all ignored", [](Spec& s) { s.ignored_percent = 100; });
  add("poisoned row", [](Spec& s) { s.poison = true; });
  add("confident rows", [](Spec& s) { s.regime = Regime::confident; });
  add("distant rows", [](Spec& s) { s.regime = Regime::distant; });
  add("dx only", [](Spec& s) { s.wants_dw = s.wants_db = false; });
  add("dw only", [](Spec& s) { s.wants_dx = false; });
  add("small workspace", [](Spec& s) { s.limit_bytes = 1; });
  add("added into fp32 gradients", [](Spec& s) { s.accumulate = s.wide_gradients = true; });
  // Buffers of what is not wanted have no bytes: nothing may be written there.
  add("loss and gradients alone, ignored rows", [](Spec& s) {
    s.ignored_percent = 40;
    s.wants_rows = false;
  });
  add("loss alone, ignored rows", [](Spec& s) {
    s.ignored_percent = 40;
    s.wants_rows = s.wants_dx = s.wants_dw = s.wants_db = false;
  });
}

}  // namespace

std::vector<std::pair<std::string, Case>> rank_matrix() {
  std::vector<std::pair<std::string, Case>> all;
  add_cases(Types::f32, "fp32", all);
  add_cases(Types::bf16, "bf16", all);
  add_cases(Types::f16, "fp16", all);
  add_cases(Types::bf16_f32, "bf16 with fp32 weights", all);
  return all;
}

}  // namespace talea::testing
