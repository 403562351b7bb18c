// What: the elementwise rule, the relative L2 and bitwise equality.
// Why: see compare.hpp; every comparison is of the form !(error <= bound).
// Never: calls a lane.
#include "yardsticks/linear_cross_entropy/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "yardsticks/linear_cross_entropy/eager.hpp"

namespace talea::testing {
namespace {

int64_t columns_of(const Array& a) { return a.shape().size() > 1 ? a.shape()[1] : 1; }

Real element(const Array& a, int64_t k) {
  const int64_t columns = columns_of(a);
  return a.get(k / columns, k % columns);
}

Real square(Real x) { return x * x; }

// The sum of the squared errors of the finite elements.
Real error_square(const std::vector<Real>& values, const std::vector<Real>& truth) {
  Real sum = 0;
  for (size_t k = 0; k < truth.size(); ++k)
    if (std::isfinite(truth[k])) sum += square(values[k] - truth[k]);
  return sum;
}

Real norm_square(const std::vector<Real>& truth) {
  Real sum = 0;
  for (const Real x : truth) sum += std::isfinite(x) ? x * x : Real(0);
  return sum;
}

// The last rounding of ours and of eager's are two draws: each error is spread evenly over the
// step s, so its square has mean s^2/3 and variance 4 s^4/45. Five deviations of the difference of
// the two sums, and never more than every element rounded the worst way. In a tensor of thousands
// luck has averaged out, and none is granted, unless most of its size is that of few: dW of one
// token is all but the row of its target. `effective` counts elements by their share.
constexpr size_t lucky_elements = 4096;
constexpr Real lucky_effective = 1024;

Real luck_of_rounding(DType dtype, const std::vector<Real>& truth) {
  Real most = 0, variance = 0;
  for (const Real x : truth) {
    if (!std::isfinite(x)) continue;
    const Real s = square(half_step(dtype, x));
    most += s;
    variance += 2 * 4 * s * s / 45;
  }
  const Real effective = variance > 0 ? square(most) / (variance * 45 / 8) : Real(0);
  if (truth.size() >= lucky_elements && effective >= lucky_effective) return 0;
  return std::min(most, 5 * std::sqrt(variance));
}

// NaN against NaN, an infinity against the same infinity, finite against finite.
bool same_kind(Real ours, Real truth) {
  if (std::isnan(truth)) return std::isnan(ours);
  if (std::isinf(truth)) return ours == truth;
  return std::isfinite(ours);
}

std::string compare_l2(const std::string& name, const Array& ours, const std::vector<Real>& values,
                       const std::vector<Real>& held,
                       const std::vector<const std::vector<Real>*>& eager, const Rule& rule) {
  Real yard = 0, floor = 0;
  for (const auto* other : eager) {
    const Real sum = error_square(*other, held);
    if (std::isfinite(sum)) yard = std::max(yard, sum);
  }
  for (size_t k = 0; rule.floor && k < held.size(); ++k)
    if (std::isfinite(held[k])) floor += square(rule.unit * (*rule.floor)[k]);
  const Real own = std::sqrt(error_square(values, held));
  const Real luck = luck_of_rounding(ours.dtype(), held) + rule.luck;
  const Real bound = std::sqrt(yard + luck) + std::sqrt(floor);
  if (own <= rule.l2_times * bound) return "";
  const Real norm = std::sqrt(norm_square(held));
  return fmt::format("{}: relative L2 {:.4g}, eager {:.4g}, bound {:.4g}\n", name,
                     double(own / norm), double(std::sqrt(yard) / norm), double(bound / norm));
}

}  // namespace

Yardsticks yardsticks(const Case& c) { return {oracle(c), {eager(c, false), eager(c, true)}}; }

Real half_step(DType dtype, Real x) {
  if (!is_16bit(dtype) || x == 0) return 0;
  const bool bf16 = dtype == DType::bf16;
  // The exponent field of a double: of what underflows in it the least is asked anyway.
  const auto field = int(std::bit_cast<uint64_t>(std::fabs(double(x))) >> 52) - 1023;
  const int exponent = std::max(field, bf16 ? -126 : -14) - (bf16 ? 8 : 11);
  return std::bit_cast<double>(uint64_t(exponent + 1023) << 52);
}

std::string compare(const std::string& name, const Array& ours, const std::vector<Real>& truth,
                    const std::vector<const std::vector<Real>*>& eager, const Rule& rule) {
  const auto count = static_cast<int64_t>(truth.size());
  if (ours.elements() != count)
    return fmt::format("{}: {} elements, truth {}\n", name, ours.elements(), count);
  // What the output's dtype cannot hold is an infinity in the truth as well.
  std::vector<Real> held(truth), values(truth), eager_error(truth.size(), 0);
  Real magnitude = rule.floor_magnitude, worst_eager = 0;
  for (int64_t k = 0; k < count; ++k) {
    const auto i = static_cast<size_t>(k);
    values[i] = element(ours, k);
    const bool large = !(std::fabs(truth[i]) < 6e4L);  // fp16 ends at 65504
    if (large && std::isinf(rounded(ours.dtype(), truth[i])))
      held[i] = rounded(ours.dtype(), truth[i]);
    if (!std::isfinite(held[i])) continue;
    magnitude = std::max(magnitude, std::fabs(held[i]));
    for (const auto* other : eager) {
      const Real error = std::fabs((*other)[i] - held[i]);
      if (std::isfinite(error)) eager_error[i] = std::max(eager_error[i], error);
    }
    worst_eager = std::max(worst_eager, eager_error[i]);
  }
  const bool blind = compare_mutant == CompareMutant::nan_passes;
  for (int64_t k = 0; k < count; ++k) {
    const auto i = static_cast<size_t>(k);
    if (!same_kind(values[i], held[i]) && !(blind && std::isnan(values[i])))
      return fmt::format("{}[{}] = {}, truth {}\n", name, k, double(values[i]), double(held[i]));
    if (!std::isfinite(held[i])) continue;
    const Real error = std::fabs(values[i] - held[i]);
    // A right sum, rounded once to the output's 16 bits, passes where eager arithmetic overflowed.
    Real eager_allows = rule.worst_times > 0 ? rule.worst_times * worst_eager : eager_error[i];
    if (rule.worst_times > 0 && !(error <= eager_allows))
      eager_allows = std::max(eager_allows, half_step(ours.dtype(), held[i]));
    const Real section7 = rule.e * magnitude + eager_allows;
    Real floor = rule.floor ? floor_share * rule.unit * (*rule.floor)[i] : Real(0);
    // Where the roundings of the logits themselves are more than e of the magnitude.
    if (rule.walk)
      floor = std::max(floor, floor_share * rule.unit * (*rule.walk)[i] - rule.e * magnitude);
    if (compare_mutant == CompareMutant::wide_floor) floor *= 1.5L;
    Real bound = section7 + floor;
    if (compare_mutant == CompareMutant::tolerance_cannot_fail) bound = 50 * magnitude;
    bool fails = blind ? error > bound : !(error <= bound);
    if (fails && rule.terms) {
      bound = std::max(
          bound, rule.e * magnitude + half_step(ours.dtype(), held[i]) + rule.terms(k) + floor);
      fails = !(error <= bound);
    }
    if (fails)
      return fmt::format(
          "{}[{}] = {:.9g}, truth {:.9g}: error {:.3g} > bound {:.3g} ({:.3g} of it for "
          "cancellation), magnitude {:.3g}\n",
          name, k, double(values[i]), double(held[i]), double(error), double(bound), double(floor),
          double(magnitude));
    if (rule.worst_use && floor > 0)
      *rule.worst_use = std::max(*rule.worst_use, (error - section7) / floor);
  }
  if (rule.l2_times > 0 && compare_mutant != CompareMutant::luck_of_one)
    return compare_l2(name, ours, values, held, eager, rule);
  return "";
}

std::string same_bits(const std::string& name, const Array& a, const Array& b) {
  if (a.present() != b.present() || a.dtype() != b.dtype() || a.shape() != b.shape())
    return name + ": not the same kind of tensor\n";
  for (int64_t k = 0; a.present() && k < a.elements(); ++k) {
    if (is_floating(a.dtype())) {
      const Real x = element(a, k), y = element(b, k);
      const bool same =
          (std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y));
      if (!same)
        return fmt::format("{}[{}]: {:.17g} and {:.17g} differ\n", name, k, double(x), double(y));
    } else if (a.integer(k / columns_of(a), k % columns_of(a)) !=
               b.integer(k / columns_of(b), k % columns_of(b))) {
      return fmt::format("{}[{}]: ids differ\n", name, k);
    }
  }
  return "";
}

std::string same_bits(const CaseOutputs& a, const CaseOutputs& b) {
  std::string complaints;
  for (const auto& [name, member] : CaseOutputs::members)
    complaints += same_bits(name, a.*member, b.*member);
  return complaints;
}

Real relative_l2(const Array& ours, const std::vector<Real>& truth) {
  std::vector<Real> values(truth);
  for (size_t k = 0; k < truth.size(); ++k) values[k] = element(ours, static_cast<int64_t>(k));
  const Real norm = norm_square(truth), error = error_square(values, truth);
  return std::sqrt(norm > 0 ? error / norm : error);
}

}  // namespace talea::testing
