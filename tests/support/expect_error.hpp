// What: asserts that a call throws talea::Error of a kind, with words in its message.
// Why: an error that does not name file and field is a defect as much as a missing one.
// Never: accepts another exception type.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "talea/error.hpp"

namespace talea::testing {

template <typename Call>
void expect_error(ErrorKind kind, std::initializer_list<const char*> words, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    for (const char* word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is missing in: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error was thrown";
}

}  // namespace talea::testing
