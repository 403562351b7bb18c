// What: talea_tensor as Tensor.
// Why: dtype, device, rank and reserved are checked once, at the door.
// Never: touches tensor memory.
#include "capi/tensor.hpp"

#include <cstdlib>

namespace talea::capi {

static_assert(TALEA_MAX_RANK == max_rank);

namespace {

// More bytes than the view reaches to either side. What reaches further is refused as a view.
uintptr_t room_of(const Tensor& t) {
  constexpr int64_t most = int64_t{1} << 56;
  int64_t bytes = int64_t{1} << 20;
  for (int i = 0; i < t.rank; ++i) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(t.shape[i], t.stride[i], &reach) || reach > most || reach < -most)
      reach = most;
    bytes += std::abs(reach) * 8;
  }
  return static_cast<uintptr_t>(bytes) & ~uintptr_t{63};
}

}  // namespace

void* MadeUpAddresses::or_made_up(void* given, const Tensor& like) {
  if (!wanted_ || given) return given;
  const uintptr_t room = room_of(like);
  void* made_up = reinterpret_cast<void*>(next_ + room);  // strides may be negative
  next_ += 2 * room;
  return made_up;
}

Tensor tensor(const char* name, const talea_tensor& from, MadeUpAddresses& addresses) {
  constexpr auto usage = ErrorKind::usage;
  Tensor t;
  if (!from.present) return t;
  const auto within = [&](const char* field, int32_t value, int32_t last) {
    require(value >= 0 && value <= last, usage, "{}: {} = {}: must lie in [0, {}]", name, field,
            value, last);
  };
  within("dtype", from.dtype, TALEA_U8);
  within("device", from.device, TALEA_CUDA);
  t.dtype = static_cast<DType>(from.dtype);
  t.device = static_cast<DeviceKind>(from.device);
  require(from.rank >= 0 && from.rank <= max_rank, usage, "{}: rank = {}: must lie in [0, {}]",
          name, from.rank, max_rank);
  require(from.reserved == 0, usage, "{}: reserved = {}: must be 0", name, from.reserved);
  for (int i = 0; i < from.rank; ++i) {
    t.shape[i] = from.shape[i];
    t.stride[i] = from.stride[i];
  }
  t.rank = from.rank;
  t.device_index = from.device_index;
  t.present = true;
  t.data = addresses.or_made_up(from.data, t);
  return t;
}

}  // namespace talea::capi
