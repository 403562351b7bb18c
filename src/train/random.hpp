// What: a counter-based generator: every number is a pure function of (seed, purpose, counter).
// Why: data and initial weights replay bit for bit from a seed and a cursor, in any order.
// Never: keeps a state; a checkpoint needs only the counters.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace talea::train {

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  // purpose keeps independent uses of one seed apart.
  Random(uint64_t seed, uint64_t purpose)
      : key_(mix(mix(seed) ^ (purpose * 0xd1342543de82ef95u))) {}

  uint64_t bits(uint64_t counter) const { return mix(key_ ^ mix(counter)); }
  double uniform(uint64_t counter) const {  // [0, 1)
    return static_cast<double>(bits(counter) >> 11) * 0x1p-53;
  }
  int64_t below(uint64_t counter, int64_t n) const {
    return static_cast<int64_t>(uniform(counter) * static_cast<double>(n));
  }
  double normal(uint64_t counter) const {
    const double u = 1.0 - uniform(2 * counter), v = uniform(2 * counter + 1);
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  }

 private:
  uint64_t key_;
};

}  // namespace talea::train
