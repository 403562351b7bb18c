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
#include "talea/call.hpp"
#include "talea/tensor.hpp"

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

// What was measured around one call of any operator; the operator's own facts stand beside it.
struct CallMeasures {
  std::optional<int64_t> seed;
  std::vector<InputFact> inputs;
  int64_t measured_peak_extra_bytes = -1;  // -1: not measured
  std::string measured_by = "not measured";
  std::optional<TimeStats> time;
  std::vector<std::pair<std::string, double>> values;  // "loss", "accuracy"
};

enum class ReceiptKind { loss, check, bench, train, repro, attend, index, scan };
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
  // Appends to "calls": an operator's section, see ops/<operator>/receipt.hpp.
  Receipt& call(nlohmann::json section);
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

// Compact, non-finite numbers as strings, bytes that are no UTF-8 replaced.
std::string one_line(nlohmann::json value);

// Parts that every operator's call section has, under these names: "inputs", "declined" (of
// "boundary"), a count that may be unread (-1: null), "values".
nlohmann::json inputs_json(const std::vector<InputFact>& inputs);
nlohmann::json declined_json(const std::vector<LaneDecline>& declined);
nlohmann::json count_json(int64_t count);
nlohmann::json values_json(const CallMeasures& measures);

// A JSON form of one figure, for sections that hold their own.
nlohmann::json to_json(const ErrorFigure& figure);
nlohmann::json to_json(const TimeStats& time);

// A number of a receipt: the strings of non-finite values too. Error(invalid_data) otherwise.
double number_of(const nlohmann::json& value);

// Every place where the document breaks the schema, one "field: what" each, innermost first;
// empty if there is none.
std::vector<std::string> schema_violations(const nlohmann::json& document);

}  // namespace talea
