// What: one made-up receipt of each kind.
// Why: the tests need every section of the page; the numbers mean nothing.
// Never: shown as a result.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "ops/linear_cross_entropy/fields.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "report/report.hpp"
#include "support/told.hpp"

namespace talea::testing {

inline ErrorFigure sample_error(const char* tensor, const char* lane, double abs, double eager) {
  ErrorFigure e;
  e.tensor = tensor;
  e.lane = lane;
  e.passed = abs <= eager;
  e.abs = abs;
  e.rel = abs * 2;
  e.rel_l2 = abs / 3;
  e.ulp = 2;
  e.worst_index = {3, 14};
  e.ours = 0.125 + abs;
  e.truth = 0.125;
  e.eager_abs = eager;
  e.eager_rel_l2 = eager / 3;
  e.tolerance = eager + 1e-6;
  return e;
}

inline Receipt sample_loss(const Provenance& p) {
  auto call = told<lce::CallFacts>(lce::fact_fields);
  call.problem.tokens = 1024;
  call.problem.hidden = 768;
  call.problem.vocab = call.problem.vocab_local = call.problem.vocab_stored = 32000;
  call.problem.has_targets = call.problem.wants_loss = call.problem.wants_dx = true;
  call.result.lane = "cpu";
  call.result.lane_kind = "library composition";
  call.result.declined = {{"sm90", "not built: configure with -DTALEA_CUDA=ON"},
                          {"cuda", "no CUDA device"}};
  call.result.logits_home = "per-chunk buffer in the caller's workspace";
  call.result.logits_tile_rows = 128;
  call.result.logits_tile_columns = 32000;
  call.result.logits_tile_bytes = 16384000;
  call.result.workspace_bytes = 17 << 20;
  call.result.valid_tokens = 1000;
  call.result.ignored_tokens = 24;
  call.result.denominator = 1000;
  call.inputs = {{"hidden", "x.npy", DType::f32, {1024, 768}, std::string(64, 'a')}};
  call.time = TimeStats{181.5, 179.25, 190, 7};
  call.values = {{"loss", 10.3768}};
  call.measured_peak_extra_bytes = 18 << 20;
  call.measured_by = "allocator hook";
  Receipt r(ReceiptKind::loss, p);
  r.call(lce::call_json(call))
      .verdict(Verdict::passed)
      .title("Sample loss")
      .note("Made up for a test.");
  r.error(sample_error("dx", "cpu", 2e-8, 9e-8)).error(sample_error("dw", "cpu", 3e-7, 6e-7));
  return r;
}

inline Receipt sample_check(const Provenance& p) {
  nlohmann::json cases;
  for (int i = 0; i < 12; ++i)
    for (const char* lane : {"cpu", "unfused"}) {
      const bool fails = i == 7 && lane[0] == 'u';
      const double eager = std::pow(10.0, -8 + i * 0.3);
      nlohmann::json c = {
          {"name", "case " + std::to_string(i)}, {"lane", lane}, {"passed", !fails}};
      ErrorFigure e = sample_error("dx", lane, fails ? eager * 30 : eager / (2 + i % 3), eager);
      e.passed = !fails;
      c["errors"] = nlohmann::json::array({to_json(e)});
      if (fails) c["reproducer"] = "talea check --case 'case 7' --lane unfused --seed 7";
      cases.push_back(c);
    }
  Receipt r(ReceiptKind::check, p);
  r.section("check", {{"preset", "quick"},
                      {"lanes", {"cpu", "unfused"}},
                      {"passed", 23},
                      {"failed", 1},
                      {"cases", cases}});
  return std::move(r.verdict(Verdict::failed).title("Sample check"));
}

inline Receipt sample_bench(const Provenance& p) {
  nlohmann::json runs;
  const std::tuple<const char*, const char*, double, double> figures[] = {
      {"cpu, 64 MiB", "cpu", 1.14, 64},
      {"cpu, 16 MiB", "cpu", 1.22, 16},
      {"unfused", "unfused", 1.35, 375},
      {"eager", "", 1.32, 375},
      {"chunked", "", 1.28, 216}};
  for (const char* shape : {"N 1024, D 768, V 32000, fp32", "N 2048, D 1024, V 50257, fp32"})
    for (const auto& [name, lane, ratio, mib] : figures)
      runs.push_back({{"name", name},
                      {"lane", lane},
                      {"case", shape},
                      {"ratio", ratio},
                      {"time", to_json(TimeStats{ratio * 160, ratio * 157, ratio * 171, 9})},
                      {"extra_bytes", static_cast<int64_t>(mib * 1048576)}});
  Receipt r(ReceiptKind::bench, p);
  r.section("bench", {{"limit", "the three plain products of the same process"}, {"runs", runs}});
  return std::move(r.title("Sample bench"));
}

inline Receipt sample_train(const Provenance& p) {
  nlohmann::json curves;
  for (const char* name : {"cpu", "reference"}) {
    nlohmann::json steps, values;
    for (int i = 0; i < 850; ++i) {
      steps.push_back(i);
      values.push_back(i == 300 ? NAN : 1.9 + 3.6 * std::exp(-i / 90.0) + 0.05 * std::sin(i * 1.7));
    }
    curves.push_back({{"name", name}, {"y_label", "loss"}, {"steps", steps}, {"values", values}});
  }
  Receipt r(ReceiptKind::train, p);
  r.section(
      "train",
      {{"curves", curves}, {"tokens", 131072}, {"optimizer", {{"name", "adamw"}, {"lr", 1e-3}}}});
  r.section("gates",
            {{{"name", "loss_parity"},
              {"passed", true},
              {"value", 3e-7},
              {"limit", 1e-5},
              {"text", "largest relative difference of the loss of any step"}},
             {{"name", "gradient_parity"}, {"passed", true}, {"value", 2e-6}, {"limit", 1e-4}}});
  r.section("mutants", {{{"name", "b5_subtract_one"},
                         {"text", "p - 1 by subtraction"},
                         {"killed", true},
                         {"killed_by", nlohmann::json::array({"gradient_parity"})}},
                        {{"name", "b20_local_mean"},
                         {"killed", true},
                         {"killed_by", {"loss_parity", "gradient_parity"}}}});
  nlohmann::json sentinel = {
      {"name", "nan_in_loss"}, {"passed", true}, {"text", "a NaN loss fails every gate"}};
  // A list of one in braces means a copy to clang and an array to gcc: say array.
  r.section("sentinels", nlohmann::json::array({sentinel}));
  return std::move(r.verdict(Verdict::passed).title("Sample train"));
}

inline Receipt sample_repro(const Provenance& p) {
  Receipt r(ReceiptKind::repro, p);
  nlohmann::json bug = {{"id", "B5"},
                        {"title", "p - 1 read back from bf16"},
                        {"passed", true},
                        {"markers", {"BUG_REPRODUCED", "FIX_VALIDATED"}}};
  bug["broken"]["relative_error"] = 1.0;
  bug["ours"]["relative_error"] = 2e-6;
  r.section("repro", {{"bugs", nlohmann::json::array({bug})}, {"museum", "docs/museum.md"}});
  return std::move(r.verdict(Verdict::passed).title("Sample repro"));
}

inline std::vector<report::NamedReceipt> sample_receipts() {
  const Provenance p = gather_provenance({"talea", "sample"}, {{"OMP_NUM_THREADS", "2"}});
  return {{"loss.json", sample_loss(p)},
          {"check.json", sample_check(p)},
          {"bench.json", sample_bench(p)},
          {"train.json", sample_train(p)},
          {"repro.json", sample_repro(p)}};
}

}  // namespace talea::testing
