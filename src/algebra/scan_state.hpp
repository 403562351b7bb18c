// What: what a piece of a scan does to its state, and the one way in which pieces join: exact
// turns,
//       and the affine map h -> a h + T.
// Why: chunks, segments and ranks all hand over by this algebra; turns are 64-bit integers of 2^-64
//      turn, so that their sums are exact modulo one turn, whoever adds what first.
// Never: divides by a decay, or holds a NaN in turns: what is not finite is carried as a taint.
#pragma once

#include <cmath>
#include <cstdint>

namespace talea {

inline constexpr double two_pi = 6.283185307179586476925286766559;

// A finite number of turns, reduced. The rest of the division by one turn is exact.
inline uint64_t to_turns(double turns) {
  if (!std::isfinite(turns)) return 0;
  double rest = turns - std::nearbyint(turns);  // [-1/2, 1/2]
  if (rest >= 0.5) rest -= 1;
  return static_cast<uint64_t>(static_cast<int64_t>(std::nearbyint(std::ldexp(rest, 64))));
}

// 0 where the number is finite, else NaN: added to every value that an angle reaches.
inline double taint_of(double turns) { return std::isfinite(turns) ? 0 : NAN; }

inline double radians_of(uint64_t turns) {  // in (-pi, pi]
  return std::ldexp(static_cast<double>(static_cast<int64_t>(turns)), -64) * two_pi;
}

// In [0, 2 pi) as the fp32 or fp64 number that will be stored; 2 pi itself is 0.
inline double stored_radians(uint64_t turns, bool fp32) {
  const double angle = std::ldexp(static_cast<double>(turns), -64) * two_pi;
  if (!fp32) return angle < two_pi ? angle : 0;
  const float rounded = static_cast<float>(angle);
  return rounded < static_cast<float>(two_pi) ? rounded : 0;
}

// A reset: such a decay is 0, exactly.
inline constexpr double reset_below = -128;

// What of x is left behind a piece of decay a: nothing behind a reset, not 0 * Inf.
constexpr double decayed(double a, double x) { return a == 0 ? 0 : a * x; }

// The state behind a piece that takes nothing to `own` (its T) and decays what came before by `a`.
constexpr double joined(double before, double a, double own) { return decayed(a, before) + own; }

}  // namespace talea
