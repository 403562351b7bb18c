// What: see lanes.hpp.
// Why: the one place outside the lanes' own folders that asks by name.
// Never: reads a tensor's values.
#include "yardsticks/linear_cross_entropy/lanes.hpp"

#include <algorithm>

namespace talea::testing {
namespace {

LaneInfo info(const std::string& lane) {
  for (const LaneInfo& l : linear_cross_entropy_lane_table())
    if (l.name == lane) return l;
  return {};
}

bool same_layout(const Array& a, const Array& b) {
  const Tensor x = a.at(nullptr, DeviceKind::cpu), y = b.at(nullptr, DeviceKind::cpu);
  return x.dtype == y.dtype && x.data == y.data && a.shape() == b.shape() &&
         a.block().size() == b.block().size() && x.stride == y.stride;
}

// Dense, with the hidden columns filled up to a multiple of 8.
Array filled_up(const Array& a, DType dtype) {
  if (!a.present()) return a;
  const int64_t rows = a.shape()[0], columns = a.shape()[1];
  Array dense(dtype, {rows, (columns + 7) / 8 * 8});
  if (same_layout(a, dense)) return a;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < dense.shape()[1]; ++j) dense.set(i, j, j < columns ? a.get(i, j) : 0);
  return dense;
}

bool fp32_types(const Case& c) {
  return c.in.hidden.dtype() == DType::f32 && c.in.weight.dtype() == DType::f32 && c.tokens() > 0 &&
         c.hidden() > 0;
}

bool tensor_core_types(const Case& c) {
  return is_16bit(c.in.hidden.dtype()) && c.in.weight.dtype() == c.in.hidden.dtype() &&
         c.tokens() > 0 && c.hidden() > 0;
}

}  // namespace

std::vector<std::string> lanes_here() {
  std::vector<std::string> names;
  for (const LaneInfo& l : linear_cross_entropy_lane_table())
    if (l.kind != "not built") names.push_back(l.name);
  return names;
}

std::string host_lane() {
  for (const LaneInfo& l : linear_cross_entropy_lane_table())
    if (l.runs_on == DeviceKind::cpu && !l.by_name) return l.name;
  return {};
}

bool is_device_lane(const std::string& lane) { return info(lane).runs_on == DeviceKind::cuda; }

Place* place_of(const std::string& lane, std::string& why) {
  return is_device_lane(lane) ? cuda_place(why) : &host_place();
}

bool is_yardstick_lane(const std::string& lane) { return info(lane).kind == "unfused comparison"; }

bool is_reference_lane(const std::string& lane) { return info(lane).kind == "reference"; }

Standing standing_of(const std::string& lane, const LinearCrossEntropyResult& result) {
  if (is_yardstick_lane(lane)) return Standing::yardstick;
  const auto said = [&](const char* words) {
    return std::any_of(result.notes.begin(), result.notes.end(), [&](const std::string& note) {
      return note.find(words) != std::string::npos;
    });
  };
  if (said("gradient factors rounded once")) return Standing::one_term;
  return said("gradient factors rounded to bf16, large ones in two terms") ? Standing::small_terms
                                                                           : Standing::product;
}

bool needs_16bit_rows(const std::string& lane) { return lane == "sm90"; }

Case fitted(const std::string& lane, const Case& c) {
  if (!needs_16bit_rows(lane)) return c;
  const bool narrows = fp32_types(c);
  if (!narrows && !tensor_core_types(c)) return c;
  Case f = c;
  for (Array* a : {&f.in.hidden, &f.in.weight})
    *a = filled_up(*a, narrows ? DType::bf16 : a->dtype());
  for (Array* a : {&f.out.dx, &f.out.dw}) *a = filled_up(*a, a->dtype());
  return f;
}

bool may_decline(const std::string& lane, const Case& c) {
  if (is_reference_lane(lane)) return false;
  const bool wide = c.in.hidden.dtype() == DType::f64;
  bool wide_output = false;
  for (const auto& [name, member] : CaseOutputs::members)
    wide_output =
        wide_output || ((c.out.*member).present() && (c.out.*member).dtype() == DType::f64);
  if (!needs_16bit_rows(lane)) return wide || wide_output;
  // Everything of the contract in 16 bits; gradients of the matrices in 16 or 32.
  const bool wide_gradient = (c.out.dx.present() && c.out.dx.dtype() == DType::f64) ||
                             (c.out.dw.present() && c.out.dw.dtype() == DType::f64);
  return !tensor_core_types(c) || wide_gradient;
}

}  // namespace talea::testing
