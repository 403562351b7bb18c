// What: the checks of the caller's memory: extents, strides, alignment, devices, overlap.
// Why: a wrong view makes wrong numbers in silence, or on a device an error nobody can recover
// from. Never: dereferences a tensor.
#include "ops/linear_cross_entropy/views.hpp"

#include <algorithm>
#include <array>

#include "core/fail.hpp"

namespace talea::lce {
namespace {

constexpr auto data_error = ErrorKind::invalid_data;

std::vector<NamedTensor> input_list(const Inputs& in) {
  return {{"hidden", &in.hidden},
          {"weight", &in.weight},
          {"bias", &in.bias},
          {"targets", &in.targets},
          {"class_weight", &in.class_weight},
          {"token_weight", &in.token_weight},
          {"token_scale", &in.token_scale},
          {"soft_target_ids", &in.soft_target_ids},
          {"soft_target_probs", &in.soft_target_probs},
          {"upstream", &in.upstream},
          {"upstream_lse", &in.upstream_lse},
          {"upstream_entropy", &in.upstream_entropy},
          {"saved_lse", &in.saved_lse},
          {"saved_target_logprob", &in.saved_target_logprob}};
}

std::vector<NamedTensor> output_list(const Outputs& out) {
  return {{"loss", &out.loss},
          {"lse", &out.lse},
          {"target_logprob", &out.target_logprob},
          {"entropy", &out.entropy},
          {"argmax", &out.argmax},
          {"accuracy", &out.accuracy},
          {"topk_values", &out.topk_values},
          {"topk_ids", &out.topk_ids},
          {"topk_logprobs", &out.topk_logprobs},
          {"dx", &out.dx},
          {"dw", &out.dw},
          {"db", &out.db}};
}

template <typename F>
void for_present(const std::vector<NamedTensor>& list, F f) {
  for (const NamedTensor& n : list)
    if (*n.tensor) f(n.name, *n.tensor);
}

// The addresses [first, last) a view can touch.
struct Extent {
  uintptr_t first;
  uintptr_t last;
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

// So far that the sum of four, in bytes of the widest dtype, stays within 64 bits.
constexpr int64_t most_elements = INT64_MAX / 64;

void check_view(const char* name, const Tensor& t) {
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

// Strides of an output: positive, and each beyond all that the smaller ones reach. A layout that
// interleaves its rows some other way without a collision is refused as well.
void check_output_strides(const char* name, const Tensor& t) {
  if (t.elements() == 0) return;
  std::array<int, max_rank> order{};
  int used = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 1) continue;
    require(t.stride[d] > 0, data_error,
            "{}: stride {} of dimension {} in an output; it must be positive", name, t.stride[d],
            d);
    int at = used++;  // behind the smaller strides
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

}  // namespace

void check_views(const Inputs& in, const Outputs& out) {
  for_present(input_list(in), check_view);
  for_present(output_list(out), check_view);
}

void check_devices(const Inputs& in, const Outputs& out) {
  const auto kind = [](const Tensor& t) { return t.device == DeviceKind::cpu ? "cpu" : "cuda"; };
  const auto check = [&](const char* name, const Tensor& t) {
    require(t.device == in.hidden.device && t.device_index == in.hidden.device_index, data_error,
            "{}: lies on another device than hidden ({} {} against {} {})", name, kind(t),
            t.device_index, kind(in.hidden), in.hidden.device_index);
  };
  for_present(input_list(in), check);
  for_present(output_list(out), check);
}

void check_overlap(const Inputs& in, const Outputs& out) {
  const auto inputs = input_list(in), outputs = output_list(out);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!*outputs[i].tensor) continue;
    const char* const name = outputs[i].name;
    check_output_strides(name, *outputs[i].tensor);
    const Extent own = extent_of(*outputs[i].tensor);
    for_present(inputs, [&](const char* other, const Tensor& t) {
      require(!own.crosses(extent_of(t)), data_error, "{}: its memory overlaps the input {}", name,
              other);
    });
    for (size_t j = i + 1; j < outputs.size(); ++j)
      require(!*outputs[j].tensor || !own.crosses(extent_of(*outputs[j].tensor)), data_error,
              "{}: its memory overlaps the output {}", name, outputs[j].name);
  }
}

void check_workspace(const Inputs& in, const Outputs& out, const Workspace& workspace) {
  const auto base = reinterpret_cast<uintptr_t>(workspace.data);
  const Extent room = {base, base + static_cast<uintptr_t>(workspace.bytes)};
  const auto check = [&](const char* name, const Tensor& t) {
    require(!room.crosses(extent_of(t)), data_error, "workspace: its memory overlaps {}", name);
  };
  for_present(input_list(in), check);
  for_present(output_list(out), check);
}

}  // namespace talea::lce
