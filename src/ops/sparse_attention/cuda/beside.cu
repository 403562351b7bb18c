// What: the kernels of the index mask and of packed rows.
// Why: frameworks need both where their tensors are, under a capture as well.
// Never: writes an element that no valid slot names.
#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

__global__ void mask_kernel(Tables t, View mask, int64_t all) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= all) return;
  const int64_t k = i % t.slots, row = i / t.slots, b = row / t.queries, s = row % t.queries;
  const QueryRule query = query_rule(t, b, s);
  if (k >= query.slots) return;
  const KeyRow key =
      find_key(t.rule, query, k, integer_at(t.indices, offset(t.indices, b, s, 0, k)));
  if (key.kind == SlotKind::valid)
    static_cast<float*>(mask.data)[offset(mask, b, s, key.inner)] = 0.0f;
}

// A warp a tile of 128 columns (the fifth: the 64 that stay bf16).
__global__ void pack_rows_kernel(View kv, uint8_t* rows, PackedRows r, int64_t all) {
  const int64_t item = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (item >= all * 5) return;
  int64_t row = item / 5, from = 0, to = 0;
  const int64_t tile = item % 5;
  for (int d = 3; d >= 0; --d) {
    from += row % r.shape[d] * r.from[d];
    to += row % r.shape[d] * r.to[d];
    row /= r.shape[d];
  }
  uint8_t* out = rows + to;
  const auto element = [&](int64_t c) { return number_at(kv, from + c * r.column); };
  if (tile == 4) {
    for (int c = lane; c < 64; c += 32) {
      const __nv_bfloat16 value = __float2bfloat16_rn(element(512 + c));
      memcpy(out + 528 + 2 * c, &value, 2);
    }
    return;
  }
  float amax = 0, odd = 0;
  for (int c = lane; c < 128; c += 32) {
    const float x = fabsf(element(tile * 128 + c));
    amax = fmaxf(amax, x);
    if (!isfinite(x)) odd = 1;
  }
  for (int step = 16; step > 0; step /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    odd = fmaxf(odd, __shfl_xor_sync(0xffffffffu, odd, step));
  }
  const unsigned bits = __float_as_uint(fmaxf(amax / 448.0f, 1e-4f));
  const float scale = odd > 0 ? 1.0f : __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
  if (lane == 0) memcpy(out + 512 + 4 * tile, &scale, 4);
  for (int c = lane; c < 128; c += 32) {
    const float value = element(tile * 128 + c) / scale;
    // What rounds beyond 448 is NaN, as on the host; the conversion would saturate.
    const __nv_fp8_e4m3 rounded(value);
    out[tile * 128 + c] =
        fabsf(value) <= 464.0f ? rounded.__x : static_cast<uint8_t>(signbit(value) ? 0xff : 0x7f);
  }
}

}  // namespace

void mask_keys(const Tables& tables, const View& mask, int64_t batch, cudaStream_t stream) {
  const int64_t all = batch * tables.queries * tables.slots;
  if (all == 0) return;
  const auto blocks = static_cast<unsigned>((all + threads - 1) / threads);
  mask_kernel<<<blocks, threads, 0, stream>>>(tables, mask, all);
  device::check_launch("index_mask");
}

void pack_rows(const View& kv, uint8_t* to, const PackedRows& rows, cudaStream_t stream) {
  const int64_t all = rows.shape[0] * rows.shape[1] * rows.shape[2] * rows.shape[3];
  if (all == 0) return;
  const int64_t each = threads / 32;
  const auto blocks = static_cast<unsigned>((all * 5 + each - 1) / each);
  pack_rows_kernel<<<blocks, threads, 0, stream>>>(kv, to, rows, all);
  device::check_launch("pack_rows");
}

}  // namespace talea::sparse_attention::cuda
