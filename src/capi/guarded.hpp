// What: the one door between exceptions and C statuses, with the last error text and the log.
// Why: every C function fails the same way; nothing thrown crosses the boundary.
// Never: knows an operator.
#pragma once

#include <string_view>

#include "talea/error.hpp"
#include "talea/talea.h"

namespace talea::capi {

void set_last_error(std::string_view text) noexcept;
void log(int32_t level, std::string_view text) noexcept;
bool anybody_reads_the_log() noexcept;

// The status of the exception in flight; keeps its text. Call only inside a catch.
talea_status status_of_current_exception() noexcept;

template <typename Body>
talea_status guarded(Body&& body) noexcept {
  try {
    body();
    return TALEA_OK;
  } catch (...) {
    return status_of_current_exception();
  }
}

}  // namespace talea::capi
