// What: the checks of the caller's memory: extents, strides, alignment, devices, overlap.
// Why: a wrong view makes wrong numbers in silence, or on a device an error nobody can recover
//      from.
// Never: dereferences a tensor.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/fail.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/fields.hpp"

namespace talea::mamba3 {
namespace {

constexpr auto data_error = ErrorKind::invalid_data;

struct NamedTensor {
  const char* name;
  const Tensor* tensor;
};

struct Extent {
  uintptr_t first, last;  // the addresses [first, last) a view can touch
  bool crosses(const Extent& other) const { return first < other.last && other.first < last; }
};

Extent extent_of(const Tensor& t) {
  const auto base = reinterpret_cast<uintptr_t>(t.data);
  if (t.elements() == 0) return {base, base};
  int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank; ++i) {
    const int64_t reach = (t.shape[i] - 1) * t.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto bytes = [&](int64_t n) { return static_cast<uintptr_t>(n * size_of(t.dtype)); };
  return {base + bytes(low), base + bytes(high + 1)};
}

// So far that the sum of five, in bytes of the widest dtype, stays within 64 bits.
constexpr int64_t most_elements = INT64_MAX / 64;

void check_view(const char* name, const Tensor& t) {
  if (!t) return;
  require(t.rank >= 0 && t.rank <= max_rank, ErrorKind::usage, "{}: rank = {}: must lie in [0, {}]",
          name, t.rank, max_rank);
  int64_t elements = 1;
  bool empty = false;
  for (int i = 0; i < t.rank; ++i) {
    require(t.shape[i] >= 0, ErrorKind::usage, "{}: shape[{}] = {}: must be >= 0", name, i,
            t.shape[i]);
    require(!__builtin_mul_overflow(elements, std::max<int64_t>(t.shape[i], 1), &elements) &&
                elements <= most_elements,
            ErrorKind::usage, "{}: shape[{}] = {}: the elements overflow 64 bits", name, i,
            t.shape[i]);
    empty = empty || t.shape[i] == 0;
  }
  for (int i = 0; i < t.rank && !empty; ++i) {
    int64_t reach = 0;
    require(!__builtin_mul_overflow(t.shape[i] - 1, t.stride[i], &reach) &&
                reach <= most_elements && reach >= -most_elements,
            ErrorKind::usage, "{}: stride {} of dimension {}: the addresses overflow 64 bits", name,
            t.stride[i], i);
  }
  require(empty || reinterpret_cast<uintptr_t>(t.data) % static_cast<size_t>(size_of(t.dtype)) == 0,
          data_error, "{}: its address is no multiple of the {} bytes of {}", name,
          size_of(t.dtype), name_of(t.dtype));
}

// Strides of an output: positive, and each beyond all that the smaller ones reach.
void check_output_strides(const char* name, const Tensor& t) {
  if (!t || t.elements() == 0) return;
  std::array<int, max_rank> order{};
  int used = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 1) continue;
    require(t.stride[d] > 0, data_error,
            "{}: stride {} of dimension {} in an output; it must be positive", name, t.stride[d],
            d);
    int at = used++;
    for (; at > 0 && t.stride[order[at - 1]] > t.stride[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t reach = 0;
  for (int i = 0; i < used; ++i) {
    const int d = order[i];
    require(t.stride[d] > reach, data_error,
            "{}: stride {} of dimension {}: elements of an output overlap each other", name,
            t.stride[d], d);
    reach += (t.shape[d] - 1) * t.stride[d];
  }
}

template <typename In>
std::vector<NamedTensor> inputs_of(const In& in) {
  std::vector<NamedTensor> list;
  for_inputs(in, [&](const char* name, const Tensor& t) {
    if (t) list.push_back({name, &t});
  });
  return list;
}

std::vector<NamedTensor> outputs_of(const Outputs& out) {
  std::vector<NamedTensor> list;
  for_outputs(out, [&](const char* name, const Tensor& t) {
    if (t) list.push_back({name, &t});
  });
  return list;
}

void check_apart(const std::vector<NamedTensor>& inputs, const std::vector<NamedTensor>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& [name, tensor] = outputs[i];
    check_output_strides(name, *tensor);
    const Extent own = extent_of(*tensor);
    for (const NamedTensor& other : inputs)
      require(!own.crosses(extent_of(*other.tensor)), data_error,
              "{}: its memory overlaps the input {}", name, other.name);
    for (size_t j = i + 1; j < outputs.size(); ++j)
      require(!own.crosses(extent_of(*outputs[j].tensor)), data_error,
              "{}: its memory overlaps the output {}", name, outputs[j].name);
  }
}

}  // namespace

void check_views(const Inputs& in, const Outputs& out) {
  for_inputs(in, check_view);
  for_outputs(out, check_view);
}

void check_devices(const Inputs& in, const Outputs& out) {
  const auto kind = [](const Tensor& t) { return t.device == DeviceKind::cpu ? "cpu" : "cuda"; };
  const auto check = [&](const char* name, const Tensor& t) {
    require(!t || (t.device == in.q.device && t.device_index == in.q.device_index), data_error,
            "{}: lies on another device than q ({} {} against {} {})", name, kind(t),
            t.device_index, kind(in.q), in.q.device_index);
  };
  for_inputs(in, check);
  for_outputs(out, check);
}

void check_overlap(const Inputs& in, const Outputs& out) {
  check_apart(inputs_of(in), outputs_of(out));
}

void check_workspace(const Inputs& in, const Outputs& out, const Workspace& workspace) {
  const auto base = reinterpret_cast<uintptr_t>(workspace.data);
  const Extent room = {base, base + static_cast<uintptr_t>(workspace.bytes)};
  const auto check = [&](const char* name, const Tensor& t) {
    require(!t || !room.crosses(extent_of(t)), data_error, "workspace: its memory overlaps {}",
            name);
  };
  for_inputs(in, check);
  for_outputs(out, check);
}

void check_step_memory(const StepArguments& a) {
  std::vector<NamedTensor> inputs = inputs_of(a.in), outputs;
  if (a.slots) inputs.push_back({"slots", &a.slots});
  if (a.out) outputs.push_back({"out", &a.out});
  if (a.status) outputs.push_back({"status", &a.status});
  for_states(a.state, step_state_names, [&](const char* name, const Tensor& t) {
    if (t) outputs.push_back({name, &t});
  });
  if (a.slots) check_view("slots", a.slots);
  require(
      !a.slots || (a.slots.device == a.in.q.device && a.slots.device_index == a.in.q.device_index),
      data_error, "slots: lies on another device than q");
  check_apart(inputs, outputs);
}

}  // namespace talea::mamba3
