// What: the questions and the table of every `talea explain`.
// Why: one mechanism for all operators.
// Never: throws before the table is printed.
#include "lane_choices.hpp"

#include "table.hpp"

namespace talea::cli {
namespace {

std::string reason_of(const LaneChoice& c) {
  return c.declined.empty() ? "" : c.declined[0].reason;
}

nlohmann::ordered_json json_of(const std::string& name, const LaneChoice& c) {
  nlohmann::ordered_json lane;
  lane["name"] = name;
  lane["accepts"] = !c.lane.empty();
  if (c.lane.empty()) {
    lane["reason"] = reason_of(c);
  } else {
    lane["kind"] = c.lane_kind;
    lane["workspace_bytes"] = c.workspace_bytes;
    lane["flops"] = c.flops;
    lane["details"] = c.details;
  }
  return lane;
}

void print_table(const LaneChoices& choices) {
  Table table({"lane", "takes it", ">workspace", "why, or how"});
  for (const auto& [name, c] : choices.each) {
    std::string how;
    for (const std::string& d : c.details) how += (how.empty() ? "" : "; ") + d;
    if (c.lane.empty())
      table.row({name, "no", "", reason_of(c)});
    else
      table.row({name, name == choices.chosen.lane ? "chosen" : "yes",
                 human_bytes(c.workspace_bytes), c.lane_kind + (how.empty() ? "" : ": " + how)});
  }
  table.print();
  fmt::print("\n");
  const std::string& lane = choices.chosen.lane;
  verdict(!lane.empty(),
          lane.empty() ? "no lane takes this problem" : fmt::format("lane {} would run", lane));
}

}  // namespace

LaneChoices ask_lanes(const std::vector<std::string>& lanes, const std::string& wanted,
                      const std::function<LaneChoice(const std::string&)>& explain) {
  LaneChoices choices;
  const auto ask = [&](const std::string& lane) -> LaneChoice {
    try {
      return explain(lane);
    } catch (const Error& error) {  // a limit that cannot be kept
      choices.refused = error;
      LaneChoice none;
      none.declined.push_back({lane, error.what()});
      return none;
    }
  };
  for (const std::string& name : lanes)
    if (wanted == "auto" || wanted == name) choices.each.emplace_back(name, ask(name));
  choices.refused.reset();
  choices.chosen = ask(wanted);
  if (choices.refused && choices.each.empty()) throw *choices.refused;  // no such lane
  return choices;
}

void print_choices(Context& context, nlohmann::ordered_json head,
                   const std::function<std::string(const std::string&)>& title,
                   const LaneChoices& choices) {
  const LaneChoice& chosen = choices.chosen;
  if (context.machine()) {
    head["lane"] =
        chosen.lane.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(chosen.lane);
    head["lanes"] = nlohmann::ordered_json::array();
    for (const auto& [name, c] : choices.each) head["lanes"].push_back(json_of(name, c));
    fmt::print("{}\n", head.dump(context.jsonl ? -1 : 2));
  } else {
    fmt::print("{}\n\n", title(chosen.lane.empty() ? "-" : human_count(chosen.flops)));
    print_table(choices);
  }
  if (choices.refused) throw *choices.refused;
  context.exit_code = chosen.lane.empty() ? static_cast<int>(ErrorKind::unavailable) : 0;
}

}  // namespace talea::cli
