// What: what every `talea explain` asks and says: each lane's answer, and the one that would run.
// Why: a lane that cannot keep the limit is a row of the table for every operator, not its end.
// Never: knows an operator; how one lane is asked is the caller's.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "context.hpp"
#include "core/fail.hpp"
#include "talea/call.hpp"

namespace talea::cli {

struct LaneChoices {
  std::vector<std::pair<std::string, LaneChoice>> each;
  LaneChoice chosen;
  std::optional<Error> refused;  // of the choice itself: the command ends with it
};

// `explain` of one lane by its name, or of "auto". `wanted`: the lane that the user named, or auto.
LaneChoices ask_lanes(const std::vector<std::string>& lanes, const std::string& wanted,
                      const std::function<LaneChoice(const std::string&)>& explain);

// `head` leads the JSON (operator, pass); `title` of the flops leads what people read. Sets the
// exit code; a refusal is thrown once all is said.
void print_choices(Context& context, nlohmann::ordered_json head,
                   const std::function<std::string(const std::string& flops)>& title,
                   const LaneChoices& choices);

}  // namespace talea::cli
