// What: the measured peak memory of a piece of work, in a child process of its own.
// Why: MEMORY_SAVE_VERIFIED must come from a measurement; a child starts from a clean peak.
// Never: estimates.
#pragma once

#include <functional>

namespace talea::repro {

struct Peak {
  bool finished = false;  // false: the child ran out of its limit or failed
  double bytes = 0;       // peak resident bytes above those at the child's start
};

// limit_bytes > 0: a hard limit on the child's address space above what it has at its start.
Peak measure_peak(const std::function<void()>& work, double limit_bytes = 0);

}  // namespace talea::repro
