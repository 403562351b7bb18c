// What: receipts are written as the schema says, read back, and refused when they are not.
// Why: report and compare trust what passes here.
// Never: compares against a stored file; the document is built and mutated here.
#include "core/receipt.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

#include "io/receipt_file.hpp"
#include "ops/linear_cross_entropy/fields.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/receipt.hpp"
#include "ops/sparse_attention/fields.hpp"
#include "ops/sparse_attention/receipt.hpp"
#include "support/expect_error.hpp"
#include "support/temp_dir.hpp"
#include "support/told.hpp"

namespace talea {
namespace {

using json = nlohmann::json;
using testing::expect_error;
using testing::TempDir;
using testing::told;

lce::CallFacts some_call() {
  auto facts = told<lce::CallFacts>(lce::fact_fields);
  facts.problem.tokens = 4;
  facts.problem.hidden = 3;
  facts.problem.vocab = facts.problem.vocab_local = 5;
  facts.problem.vocab_stored = 8;
  facts.problem.has_targets = facts.problem.wants_loss = facts.problem.wants_dx = true;
  facts.result.lane = "reference";
  facts.result.lane_kind = "reference";
  facts.result.declined = {{"sm90", "not built"}};
  facts.result.denominator = NAN;
  facts.result.valid_tokens = 4;
  facts.inputs = {{"hidden", "x.npy", DType::f32, {4, 3}, std::string(64, 'a')}};
  facts.time = TimeStats{1.5, 1.25, 2, 7};
  facts.values = {{"loss", INFINITY}};
  return facts;
}

Receipt some_receipt() {
  Receipt receipt(ReceiptKind::loss,
                  gather_provenance({"talea", "loss"}, {{"OMP_NUM_THREADS", "2"}}));
  ErrorFigure figure;
  figure.tensor = "dx";
  figure.lane = "cpu";
  figure.passed = true;
  figure.worst_index = {1, 2};
  figure.rel = -INFINITY;
  receipt.call(lce::call_json(some_call()))
      .error(figure)
      .verdict(Verdict::passed)
      .note("a note")
      .title("a title");
  return receipt;
}

TEST(Receipt, SurvivesTheWayToAFileAndBack) {
  const TempDir dir;
  io::write_receipt(dir.file("r.json"), some_receipt());
  const Receipt back = io::read_receipt(dir.file("r.json"));
  const json& d = back.document();
  EXPECT_EQ(d["kind"], "loss");
  EXPECT_EQ(d["verdict"], "passed");
  EXPECT_EQ(d["calls"][0]["reductions"]["denominator"]["value"], "NaN");
  EXPECT_EQ(d["calls"][0]["values"]["loss"], "Infinity");
  EXPECT_EQ(d["errors"][0]["rel"], "-Infinity");
  EXPECT_EQ(d["calls"][0]["boundary"]["declined"][0]["reason"], "not built");
  EXPECT_EQ(d["calls"][0]["reductions"]["shards"][0]["end"], 5);
  EXPECT_EQ(d["calls"][0]["reductions"]["ignored_tokens"], nullptr);
  EXPECT_EQ(d["provenance"]["environment"]["OMP_NUM_THREADS"], "2");
  EXPECT_EQ(back.text(), testing::slurp(dir.file("r.json")));  // end_time stays
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(Receipt, KeepsEveryDigitAndEvery64BitInteger) {
  Receipt receipt = some_receipt();
  lce::CallFacts facts = some_call();
  facts.seed = INT64_MIN;
  facts.problem.options.ignore_index = INT64_MIN;
  facts.problem.tokens = INT64_MAX;
  facts.values = {{"loss", 0.1}, {"small", 4.9e-324}};
  receipt.call(lce::call_json(facts));
  const Receipt back = Receipt::parse("r.json", receipt.text());
  const json& call = back.document()["calls"][1];
  EXPECT_EQ(call["seed"].get<int64_t>(), INT64_MIN);
  EXPECT_EQ(call["options"]["ignore_index"].get<int64_t>(), INT64_MIN);
  EXPECT_EQ(call["problem"]["tokens"].get<int64_t>(), INT64_MAX);
  EXPECT_EQ(call["values"]["loss"].get<double>(), 0.1);
  EXPECT_EQ(call["values"]["small"].get<double>(), 4.9e-324);
}

TEST(Receipt, ProvenanceNamesBuildAndMachine) {
  const json p = some_receipt().document()["provenance"];
  for (const char* field : {"version", "git_revision", "start_time"})
    EXPECT_FALSE(p[field].get<std::string>().empty()) << field;
  EXPECT_FALSE(p["host"]["cpu"].get<std::string>().empty());
  EXPECT_FALSE(p["build"]["compiler"].get<std::string>().empty());
  const std::string start = p["start_time"];
  EXPECT_EQ(start.size(), std::string("2026-01-01T00:00:00.000Z").size());
  EXPECT_EQ(start.back(), 'Z');
}

TEST(Receipt, SectionsOfEveryKindAreAcceptedAndNeeded) {
  const Provenance p = gather_provenance({"talea"}, {});
  const json time = to_json(TimeStats{1, 1, 1, 3});
  const std::vector<std::tuple<ReceiptKind, const char*, json>> kinds = {
      {ReceiptKind::check,
       "check",
       {{"preset", "quick"},
        {"passed", 1},
        {"failed", 0},
        {"cases", {{{"name", "a"}, {"lane", "cpu"}, {"passed", true}}}}}},
      {ReceiptKind::bench,
       "bench",
       {{"limit", "plain products"},
        {"runs", {{{"name", "cpu"}, {"case", "1x2x3"}, {"time", time}, {"ratio", 1.2}}}}}},
      {ReceiptKind::train,
       "train",
       {{"curves", {{{"name", "cpu"}, {"steps", {1, 2}}, {"values", {3.0, NAN}}}}}}},
      {ReceiptKind::repro,
       "repro",
       {{"bugs",
         {{{"id", "B1"}, {"title", "t"}, {"markers", {"BUG_REPRODUCED"}}, {"passed", true}}}}}},
  };
  for (const auto& [kind, name, value] : kinds) {
    Receipt receipt(kind, p);
    expect_error(ErrorKind::runtime, {name}, [&] { receipt.text(); });
    receipt.section(name, value);
    receipt.section("gates", {{{"name", "loss"}, {"passed", true}, {"value", 1e-7}}});
    receipt.section("mutants", {{{"name", "b5"}, {"killed", true}, {"killed_by", {"loss"}}}});
    receipt.section("sentinels", {{{"name", "nan"}, {"passed", true}}});
    EXPECT_NO_THROW(Receipt::parse("r.json", receipt.text())) << name;
  }
  Receipt receipt(ReceiptKind::train, p);
  receipt.section("train", {{"curves", "none"}});
  expect_error(ErrorKind::runtime, {"curves"}, [&] { receipt.text(); });
  Receipt stray(ReceiptKind::train, p);
  stray.section("train", {{"curves", json::array()}}).section("mine", 1);
  expect_error(ErrorKind::runtime, {"mine"}, [&] { stray.text(); });
}

// Every member of the document, in turn: removed, then replaced by something of another type.
void mutate_each(const json& whole, const json::json_pointer& at, std::vector<json>& mutated) {
  const json& value = whole[at];
  if (value.is_object())
    for (const auto& item : value.items()) mutate_each(whole, at / item.key(), mutated);
  if (value.is_array())
    for (size_t i = 0; i < value.size(); ++i) mutate_each(whole, at / i, mutated);
  if (at.empty()) return;
  json changed = whole;
  changed[at] = json{{"unexpected", json::array({1, 2})}};
  mutated.push_back(changed);
}

TEST(Receipt, TheSchemaRejectsEveryMemberOfAWrongType) {
  const json whole = json::parse(some_receipt().text());
  std::vector<json> mutated;
  mutate_each(whole, json::json_pointer(), mutated);
  EXPECT_GT(mutated.size(), 100u);
  for (const json& document : mutated)
    expect_error(ErrorKind::invalid_data, {"r.json"},
                 [&] { Receipt::parse("r.json", document.dump()); });
}

// The names of a problem and of its inputs are the caller's; what the call says is never empty.
TEST(Receipt, TheSchemaRejectsEveryEmptyFact) {
  auto select = told<sparse_attention::CallFacts>(sparse_attention::fact_fields), attend = select;
  select.problem.pass = select.result.pass = sparse_attention::Pass::select;
  const json calls[] = {lce::call_json(some_call()), sparse_attention::call_json(attend),
                        sparse_attention::call_json(select),
                        mamba3::call_json(told<mamba3::CallFacts>(mamba3::fact_fields))};
  for (const json& call : calls) {
    Receipt whole(ReceiptKind::loss, gather_provenance({"talea"}, {}));
    whole.call(call);
    EXPECT_NO_THROW(whole.text()) << call["operator"];
    int facts = 0;
    const json flat = call.flatten();
    for (const auto& item : flat.items()) {
      const std::string& place = item.key();
      if (!item.value().is_string() || place.starts_with("/problem") ||
          place.starts_with("/options") || place.starts_with("/inputs"))
        continue;
      json changed = call;
      changed[json::json_pointer(place)] = "";
      Receipt receipt(ReceiptKind::loss, gather_provenance({"talea"}, {}));
      receipt.call(changed);
      expect_error(ErrorKind::runtime, {"receipt"}, [&] { receipt.text(); });
      ++facts;
    }
    EXPECT_GT(facts, 14) << call["operator"];
  }
}

TEST(Receipt, AnEmptyFactOfAnOlderReceiptWasNotRequested) {
  json older = json::parse(some_receipt().text());
  older["calls"][0]["accumulators"]["dx"] = "";
  const Receipt read = Receipt::parse("r.json", older.dump());
  EXPECT_EQ(read.document()["calls"][0]["accumulators"]["dx"], "not requested");
}

TEST(Receipt, TheSchemaRejectsEachMissingMember) {
  const json whole = json::parse(some_receipt().text());
  for (const char* place :
       {"", "/provenance", "/provenance/build", "/provenance/host", "/calls/0", "/calls/0/problem",
        "/calls/0/options", "/calls/0/boundary", "/calls/0/logits", "/calls/0/accumulators",
        "/calls/0/reductions", "/calls/0/consumers", "/calls/0/penalties", "/calls/0/cost",
        "/errors/0"}) {
    const json::json_pointer at(place);
    for (const auto& item : whole[at].items()) {
      const std::string key = item.key();
      if (*place == '\0' && (key == "errors" || key == "notes" || key == "title")) continue;
      // Receipts from before these four were told stay readable.
      const std::string told = std::string(place) + "/" + key;
      if (told == "/provenance/library" || told == "/calls/0/problem/accumulate_db" ||
          told == "/calls/0/options/dw_sum" || told == "/calls/0/cost/products")
        continue;
      json changed = whole;
      changed[at].erase(key);
      expect_error(ErrorKind::invalid_data, {"r.json", key.c_str()},
                   [&] { Receipt::parse("r.json", changed.dump()); });
    }
    json changed = whole;
    changed[at]["unheard_of"] = 1;
    expect_error(ErrorKind::invalid_data, {"r.json", "unheard_of"},
                 [&] { Receipt::parse("r.json", changed.dump()); });
  }
}

TEST(Receipt, HostileTextNamesTheFile) {
  const std::string good = some_receipt().text();
  const std::string cases[] = {
      "",
      "null",
      "[]",
      "{}",
      "{\"a\":",
      good + "x",
      good.substr(0, good.size() / 2),
      good + std::string(1, '\0'),
      std::string(100000, '['),
      "{\"kind\":\"loss\"," + good.substr(1),
      "\xff\xfe{}",
      "{\"schema_version\": 1e999}",
  };
  for (const std::string& text : cases)
    expect_error(ErrorKind::invalid_data, {"r.json"}, [&] { Receipt::parse("r.json", text); });
  json newer = json::parse(good);
  newer["schema_version"] = 2;
  expect_error(ErrorKind::invalid_data, {"r.json", "schema_version"},
               [&] { Receipt::parse("r.json", newer.dump()); });
  newer["schema_version"] = 1.5;
  expect_error(ErrorKind::invalid_data, {"schema_version"},
               [&] { Receipt::parse("r.json", newer.dump()); });
}

TEST(Receipt, ArgumentsOfAnyBytesDoNotPreventAReceipt) {
  Receipt receipt(ReceiptKind::loss, gather_provenance({"talea", "\xff\xfe.npy"}, {}));
  receipt.call(lce::call_json(some_call()));
  EXPECT_NO_THROW(Receipt::parse("r.json", receipt.text()));
}

TEST(Receipt, AResultAloneIsOneLineAndKeepsNaN) {
  LinearCrossEntropyResult result = some_call().result;
  result.denominator = std::nan("");
  result.notes = {"two\nlines", "\xff"};
  const std::string text = lce::result_text(result);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const json j = json::parse(text);
  EXPECT_EQ(j["denominator"], "NaN");
  EXPECT_EQ(j["lane"], result.lane);
  EXPECT_EQ(j["notes"][0], "two\nlines");
}

TEST(Receipt, TimeStatsInterpolate) {
  const TimeStats t = time_stats({5, 1, 3, 2, 4});
  EXPECT_EQ(t.median_ms, 3);
  EXPECT_DOUBLE_EQ(t.p20_ms, 1.8);
  EXPECT_DOUBLE_EQ(t.p80_ms, 4.2);
  EXPECT_EQ(t.n, 5);
  EXPECT_EQ(time_stats({2}).p80_ms, 2);
  expect_error(ErrorKind::usage, {"samples"}, [] { time_stats({}); });
}

TEST(Receipt, SamplesOfShortCallsHoldSeveral) {
  for (const double ms : {25.0, 25.5, 40.0, 1e6}) EXPECT_EQ(calls_per_sample(ms), 1) << ms;
  EXPECT_EQ(calls_per_sample(24.9), 2);
  EXPECT_EQ(calls_per_sample(5.0), 5);
  EXPECT_EQ(calls_per_sample(0.25), 100);
  for (const double ms : {0.3, 1.7, 4.9, 12.5})  // long enough, and not by more than a call
    EXPECT_TRUE(calls_per_sample(ms) * ms >= 25 && (calls_per_sample(ms) - 1) * ms < 25) << ms;
  for (const double ms : {0.0, 1e-9, 0.025}) EXPECT_EQ(calls_per_sample(ms), 1000) << ms;
  for (const double ms : {-1.0, double(NAN)})
    expect_error(ErrorKind::usage, {"call_ms"}, [&] { calls_per_sample(ms); });
}

}  // namespace
}  // namespace talea
