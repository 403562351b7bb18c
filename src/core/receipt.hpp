// What: the only writer of receipts: facts in, a document that the schema accepts out.
// Why: one envelope for every subcommand, so that report and compare need to know only one.
// Never: touches a file (io/receipt_file.hpp does) and never drops a number: NaN is written "NaN".
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/provenance.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea {

struct TimeStats {
  double median_ms = 0, p20_ms = 0, p80_ms = 0;
  int64_t n = 0;
};

// The middle and the 20th and 80th percentile; `samples_ms` must not be empty.
TimeStats time_stats(std::vector<double> samples_ms);

// How many calls of `call_ms` make a sample on a device. A short call's time is that of calls
// queued back to back, as a loop makes them: at least 25 ms of them, so that neither the host's
// first step nor the clock of one moment decides. At most 1000.
int calls_per_sample(double call_ms);

// One tensor that was read. sha256: io::tensor_sha256.
struct InputFact {
  std::string name, source;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::string sha256;
};

// One tensor against fp64 truth, beside the eager yardstick.
struct ErrorFigure {
  std::string tensor, lane;
  bool passed = false;
  double abs = 0, rel = 0, rel_l2 = 0, ulp = 0;
  std::vector<int64_t> worst_index;
  double ours = 0, truth = 0;
  double eager_abs = 0, eager_rel_l2 = 0, tolerance = 0;
};

struct ShardFact {
  int rank = 0;
  int64_t begin = 0, end = 0;
};

// One call of linear cross-entropy. Only problem and result must be set.
struct CallFacts {
  LinearCrossEntropyProblem problem;  // its options are the call's options
  LinearCrossEntropyResult result;
  std::string layout = "[N,D]";
  std::optional<int64_t> seed;
  std::vector<InputFact> inputs;
  std::vector<ShardFact> shards;    // empty: this rank's alone
  std::string collective = "none";  // engine of the exchange, e.g. "threads"
  int64_t measured_peak_extra_bytes = -1;
  std::string measured_by = "not measured";
  bool full_logits_measured = false;  // the allocator, not the lane, says so
  std::optional<TimeStats> time;
  std::optional<double> ratio_to_plain_products;
  std::vector<std::pair<std::string, double>> values;  // "loss", "accuracy"
};

enum class ReceiptKind { loss, check, bench, train, repro, attend, index };
enum class Verdict { passed, failed, not_checked };

class Receipt {
 public:
  Receipt(ReceiptKind kind, const Provenance& provenance);
  Receipt(const Receipt&);
  Receipt(Receipt&&) noexcept;
  Receipt& operator=(Receipt) noexcept;
  ~Receipt();

  Receipt& verdict(Verdict verdict);
  Receipt& title(const std::string& text);
  Receipt& call(const CallFacts& facts);      // appends to "calls"
  Receipt& call(nlohmann::json entry);        // of another operator, as the schema has it
  Receipt& error(const ErrorFigure& figure);  // appends to "errors"
  Receipt& note(const std::string& text);     // appends to "notes"
  // Sets a section of the envelope: "check", "bench", "train", "repro", "gates", "mutants",
  // "sentinels". The schema says what each must hold.
  Receipt& section(const std::string& name, nlohmann::json value);

  // The checked document, with end_time = now where it is not set. Error(runtime) naming the field
  // if a section breaks the schema: a mistake of ours, not of the data.
  std::string text() const;
  const nlohmann::json& document() const { return *document_; }

  // Error(invalid_data) naming `file` and the field.
  static Receipt parse(const std::string& file, std::string_view text);

 private:
  Receipt();
  std::unique_ptr<nlohmann::json> document_;
};

// What ran in one call, in one line of JSON: for callers of the C interface, who know the problem.
std::string result_text(const LinearCrossEntropyResult& result);

// A JSON form of one figure, for sections that hold their own.
nlohmann::json to_json(const ErrorFigure& figure);
nlohmann::json to_json(const TimeStats& time);

// A number of a receipt: the strings of non-finite values too. Error(invalid_data) otherwise.
double number_of(const nlohmann::json& value);

// Every place where the document breaks the schema, one "field: what" each, innermost first;
// empty if there is none.
std::vector<std::string> schema_violations(const nlohmann::json& document);

}  // namespace talea
