// What: the opaque result of the C interface, and what explain says, of any operator.
// Why: strings of the facts live as long as the caller keeps the handle.
// Never: refers to memory of the call, or knows an operator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "talea/call.hpp"
#include "talea/talea.h"

struct talea_result {
  const char* op = "";                // the operator's name: a literal
  std::string json;                   // what ran, in one line
  std::shared_ptr<const void> facts;  // the operator's own, see facts_of()
};

namespace talea::capi {

// Facts: the operator's struct of C facts together with what its strings point to.
template <class Facts>
talea_result* make_result(const char* op, std::string json, std::shared_ptr<const Facts> facts) {
  return new talea_result{op, std::move(json), std::move(facts)};
}

// Null for a null result, and for one of another operator.
template <class Facts>
const Facts* facts_of(const talea_result* result, std::string_view op) {
  return result && result->op == op ? static_cast<const Facts*>(result->facts.get()) : nullptr;
}

// Lists of strings as C sees them; they point into the vectors given.
std::vector<talea_lane_decline> c_declines(const std::vector<LaneDecline>& declined);
std::vector<const char*> c_strings(const std::vector<std::string>& strings);

// Names parted by commas.
std::string comma_list(const std::vector<std::string>& names);

// The answer of an operator's explain function, in a caller's buffer: see talea.h.
struct TextBuffer {
  int32_t format;
  char* data;
  int64_t bytes;
  int64_t* needed;
};
void check_buffer(const TextBuffer& buffer);
void write_choice(const char* op, const LaneChoice& choice, const TextBuffer& buffer);

// To the log: the lanes that declined and the one that ran.
void log_lanes(const char* op, const std::string& lane, const std::vector<LaneDecline>& declined,
               const std::string& cost);

}  // namespace talea::capi
