// What: the C functions of the linear cross-entropy operator.
// Why: C struct -> C++ value -> operator, and the status back: nothing else happens here.
// Never: computes, chooses or allocates tensor memory.
#include <algorithm>
#include <cstring>

#include "capi/convert.hpp"
#include "capi/guarded.hpp"
#include "capi/result.hpp"
#include "core/fail.hpp"

namespace talea::capi {
namespace {

LinearCrossEntropyProblem problem_of(const Arguments& a) {
  return describe(a.inputs, a.outputs, a.options, a.ranks);
}

void log_result(const LinearCrossEntropyResult& r) {
  for (const LaneDecline& d : r.declined)
    log(TALEA_LOG_DEBUG,
        fmt::format("linear_cross_entropy: lane {} declined: {}", d.lane, d.reason));
  log(TALEA_LOG_INFO, fmt::format("linear_cross_entropy: lane {}, {} workspace bytes, {} chunks",
                                  r.lane, r.workspace_bytes, r.chunks));
}

std::string lane_list() {
  std::string list;
  for (const std::string& name : linear_cross_entropy_lanes())
    list += (list.empty() ? "" : ",") + name;
  return list;
}

}  // namespace
}  // namespace talea::capi

using talea::ErrorKind;
using talea::require;
namespace capi = talea::capi;

extern "C" {

talea_status talea_linear_cross_entropy_options_init(talea_linear_cross_entropy_options* options,
                                                     int64_t struct_bytes) {
  return capi::guarded([&] { capi::write_defaults(options, struct_bytes); });
}

talea_status talea_linear_cross_entropy_workspace_bytes(const talea_linear_cross_entropy_args* args,
                                                        int64_t* bytes) {
  return capi::guarded([&] {
    require(bytes, ErrorKind::usage, "bytes: null pointer");
    *bytes = talea::workspace_bytes(capi::problem_of(capi::convert(args, capi::Purpose::question)));
  });
}

talea_status talea_linear_cross_entropy(const talea_linear_cross_entropy_args* args,
                                        talea_result** result) {
  if (result) *result = nullptr;
  return capi::guarded([&] {
    const capi::Arguments a = capi::convert(args, capi::Purpose::call);
    auto done =
        talea::linear_cross_entropy(a.inputs, a.outputs, a.options, a.workspace, a.ranks, a.stream);
    capi::log_result(done);
    if (result) *result = capi::make_result(std::move(done));
  });
}

talea_status talea_linear_cross_entropy_explain(const talea_linear_cross_entropy_args* args,
                                                int32_t format, char* buffer, int64_t buffer_bytes,
                                                int64_t* needed_bytes) {
  return capi::guarded([&] {
    require(format == TALEA_TEXT || format == TALEA_JSON, ErrorKind::usage,
            "format = {}: must be 0 (text) or 1 (JSON)", format);
    require(buffer_bytes >= 0 && (buffer || buffer_bytes == 0), ErrorKind::usage,
            "buffer: {} bytes at {}", buffer_bytes, buffer ? "an address" : "null");
    const auto choice =
        talea::explain(capi::problem_of(capi::convert(args, capi::Purpose::question)));
    const std::string text =
        format == TALEA_JSON ? capi::explain_json(choice) : capi::explain_text(choice);
    if (needed_bytes) *needed_bytes = static_cast<int64_t>(text.size()) + 1;
    if (buffer_bytes == 0) return;
    const size_t n = std::min(text.size(), static_cast<size_t>(buffer_bytes - 1));
    std::memcpy(buffer, text.data(), n);
    buffer[n] = 0;
  });
}

const char* talea_linear_cross_entropy_lanes(void) {
  static const std::string list = capi::lane_list();
  return list.c_str();
}

}  // extern "C"
