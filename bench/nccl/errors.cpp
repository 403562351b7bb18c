// What: see errors.hpp.
// Why: see errors.hpp.
// Never: passes what is not a number.
#include "bench/nccl/errors.hpp"

#include <cmath>
#include <cstring>

#include "core/fail.hpp"
#include "core/half.hpp"

namespace talea::bench {
namespace {

constexpr double kGradientBound = 0x1p-8, kLossBound = 1e-6;  // gradients: one rounding of bf16

template <typename At>
double relative_l2(int64_t count, At at) {
  double error = 0, square = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto [ours, truth] = at(i);
    error += (ours - truth) * (ours - truth);
    square += truth * truth;
  }
  return std::sqrt(error / square);
}

}  // namespace

Outcome download(DeviceSession& device, const Tensor& loss, const Tensor& dx, const Tensor& dw) {
  Outcome k;
  float scalar = 0;
  device.download(&scalar, loss.data, 4);
  k.loss = scalar;
  k.dx.resize(static_cast<size_t>(dx.elements()));
  device.download(k.dx.data(), dx.data, dx.elements() * 2);
  k.dw.resize(static_cast<size_t>(dw.elements()));
  device.download(k.dw.data(), dw.data, dw.elements() * 4);
  return k;
}

bool same_bits(const Outcome& a, const Outcome& b, const World& world) {
  const bool same = std::memcmp(&a.loss, &b.loss, sizeof a.loss) == 0 &&
                    std::memcmp(a.dx.data(), b.dx.data(), a.dx.size() * 2) == 0 &&
                    std::memcmp(a.dw.data(), b.dw.data(), a.dw.size() * 4) == 0;
  return world.largest(same ? 0 : 1) == 0;
}

nlohmann::json compare(const Outcome& ours, const Outcome& truth, const World& world) {
  using Pair = std::pair<double, double>;
  require(ours.dx.size() == truth.dx.size() && ours.dw.size() == truth.dw.size(),
          ErrorKind::check_failed, "compare: dX of {} and {} elements, dW of {} and {}",
          ours.dx.size(), truth.dx.size(), ours.dw.size(), truth.dw.size());
  const double own_dx = relative_l2(static_cast<int64_t>(truth.dx.size()), [&](int64_t i) {
    return Pair(load_element(ours.dx.data(), DType::bf16, i),
                load_element(truth.dx.data(), DType::bf16, i));
  });
  const double own_dw = relative_l2(static_cast<int64_t>(truth.dw.size()), [&](int64_t i) {
    return Pair(ours.dw[static_cast<size_t>(i)], truth.dw[static_cast<size_t>(i)]);
  });
  const double own_loss = std::abs(ours.loss - truth.loss) / std::abs(truth.loss);
  const bool own_right =
      own_loss <= kLossBound && own_dx <= kGradientBound && own_dw <= kGradientBound;
  return {{"loss_relative", world.largest(own_loss)},
          {"dx_relative_l2", world.largest(own_dx)},
          {"dw_relative_l2", world.largest(own_dw)},
          {"against", "the world of one of the same lane, worst rank"},
          {"bound_loss", kLossBound},
          {"bound_gradients", kGradientBound},
          {"passed", world.largest(own_right ? 0 : 1) == 0}};
}

}  // namespace talea::bench
