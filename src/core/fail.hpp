// What: one-line throwing of Error with a formatted message.
// Why: checks stay one line each and every message names argument and value.
// Never: logs or prints.
#pragma once

#include <fmt/format.h>

#include "talea/error.hpp"

namespace talea {

template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(kind, fmt::format(text, std::forward<Args>(args)...));
}

template <typename... Args>
void require(bool holds, ErrorKind kind, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) throw Error(kind, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace talea
