// What: talea_tensor as Tensor.
// Why: dtype, device, rank and reserved are checked once, at the door.
// Never: touches tensor memory.
#include "capi/tensor.hpp"

namespace talea::capi {

static_assert(TALEA_MAX_RANK == max_rank);

void* MadeUpAddresses::or_made_up(void* given) {
  if (!wanted_ || given) return given;
  void* made_up = reinterpret_cast<void*>(next_);
  next_ += uintptr_t{1} << 40;
  return made_up;
}

Tensor tensor(const char* name, const talea_tensor& from, MadeUpAddresses& addresses) {
  constexpr auto usage = ErrorKind::usage;
  Tensor t;
  if (!from.present) return t;
  t.dtype = checked_enum<DType>(fmt::format("{}: dtype", name).c_str(), from.dtype, TALEA_U8);
  t.device =
      checked_enum<DeviceKind>(fmt::format("{}: device", name).c_str(), from.device, TALEA_CUDA);
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
  t.data = addresses.or_made_up(from.data);
  return t;
}

}  // namespace talea::capi
