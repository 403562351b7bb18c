// What: compare(): every differing field, and the verdicts that got worse.
// Why: items are matched by name, not by position, so that an added case hides nothing.
// Never: takes a missing verdict for a passed one.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "report/report.hpp"

namespace talea::report {
namespace {

using json = nlohmann::json;

std::string text_of(const json* value) {
  if (!value) return "absent";
  return value->dump(-1, ' ', false, json::error_handler_t::replace);
}

void differ(const json& a, const json& b, const json::json_pointer& at,
            std::vector<Difference>& found) {
  if (a == b) return;
  if (a.is_object() && b.is_object()) {
    std::set<std::string> keys;
    for (const json* side : {&a, &b})
      for (const auto& item : side->items()) keys.insert(item.key());
    for (const std::string& key : keys) {
      const auto in_a = a.find(key), in_b = b.find(key);
      if (in_a != a.end() && in_b != b.end()) {
        differ(*in_a, *in_b, at / key, found);
      } else {
        found.push_back({(at / key).to_string(), text_of(in_a == a.end() ? nullptr : &*in_a),
                         text_of(in_b == b.end() ? nullptr : &*in_b)});
      }
    }
    return;
  }
  if (a.is_array() && b.is_array() && a.size() == b.size()) {
    for (size_t i = 0; i < a.size(); ++i) differ(a[i], b[i], at / i, found);
    return;
  }
  found.push_back({at.to_string(), text_of(&a), text_of(&b)});
}

// Name of each judged item -> whether it passed. Items of one name count together.
using Verdicts = std::map<std::string, bool>;

void judge(Verdicts& verdicts, const std::string& name, bool passed) {
  const auto [at, fresh] = verdicts.emplace(name, passed);
  if (!fresh) at->second = at->second && passed;
}

void judge_list(Verdicts& verdicts, const json& list, const std::string& kind,
                std::initializer_list<const char*> names, const char* passed) {
  for (const json& item : list) {
    if (!item.contains(passed)) continue;  // a run that was only timed has no verdict
    std::string name = kind;
    for (const char* part : names)
      if (item.contains(part)) name.append(" ").append(item[part].get<std::string>());
    judge(verdicts, name, item[passed].get<bool>());
  }
}

Verdicts verdicts_of(const json& d) {
  Verdicts verdicts;
  const auto list = [&](const json::json_pointer& at) {
    return d.contains(at) ? d[at] : json::array();
  };
  using P = json::json_pointer;
  judge_list(verdicts, list(P("/gates")), "gate", {"name"}, "passed");
  judge_list(verdicts, list(P("/sentinels")), "sentinel", {"name"}, "passed");
  judge_list(verdicts, list(P("/mutants")), "mutant", {"name"}, "killed");
  judge_list(verdicts, list(P("/errors")), "error of", {"lane", "tensor"}, "passed");
  judge_list(verdicts, list(P("/check/cases")), "case", {"name", "lane"}, "passed");
  judge_list(verdicts, list(P("/bench/runs")), "run", {"case", "name"}, "passed");
  judge_list(verdicts, list(P("/repro/bugs")), "bug", {"id"}, "passed");
  return verdicts;
}

// A result that was a number and no longer is.
void judge_values(const json& a, const json& b, std::vector<std::string>& worse) {
  const json::json_pointer calls("/calls");
  if (!a.contains(calls) || !b.contains(calls)) return;
  const json &in_a = a[calls], &in_b = b[calls];
  for (size_t i = 0; i < std::min(in_a.size(), in_b.size()); ++i)
    for (const auto& item : in_a[i]["values"].items()) {
      const json& values = in_b[i]["values"];
      const auto now = values.find(item.key());
      if (item.value().is_number() && now != values.end() && !now->is_number())
        worse.push_back("value " + item.key() + ": " + item.value().dump() + " -> " + now->dump());
    }
}

}  // namespace

Comparison compare(const Receipt& a, const Receipt& b) {
  const json &da = a.document(), &db = b.document();
  Comparison result;
  differ(da, db, json::json_pointer(), result.differences);
  const std::string before = da["verdict"], after = db["verdict"];
  if ((before == "passed" && after != "passed") || (before != "failed" && after == "failed"))
    result.worse.push_back("verdict: " + before + " -> " + after);
  const Verdicts in_a = verdicts_of(da), in_b = verdicts_of(db);
  for (const auto& [name, passed] : in_b) {
    const auto old = in_a.find(name);
    if (!passed && (old == in_a.end() || old->second))
      result.worse.push_back(name +
                             (old == in_a.end() ? ": new, and failed" : ": passed -> failed"));
  }
  // Two receipts of different kinds, or over different cases, have no verdict to lose there.
  if (da["kind"] == db["kind"])
    for (const auto& [name, passed] : in_a)
      if (passed && !in_b.contains(name)) result.worse.push_back(name + ": passed -> absent");
  judge_values(da, db, result.worse);
  return result;
}

}  // namespace talea::report
