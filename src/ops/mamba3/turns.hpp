// What: angles as 64-bit integers of 2^-64 turn, which wrap where a turn ends.
// Why: their sums are exact modulo one turn, whatever the length and whoever adds what first.
// Never: holds a NaN; what is not finite is carried beside the turns as a taint.
#pragma once

#include <cmath>
#include <cstdint>

namespace talea::mamba3 {

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

}  // namespace talea::mamba3
