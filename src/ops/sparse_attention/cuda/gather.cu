// What: finds the rows that slots name, counts foreign indices, gathers and packs operands.
// Why: products read dense rows; the rule of validity is applied where an index is first read.
// Never: reads a row of kv that no valid slot names.
#include <algorithm>
#include <type_traits>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;
constexpr int64_t scale_columns = 128, packed_values = 512, packed_scales_at = 512;
constexpr int64_t packed_rope_at = 528;

int64_t blocks_of(int64_t items, int64_t each = threads) { return (items + each - 1) / each; }

__global__ void find_rows_kernel(Tables t, Chunk c, int64_t inner_rows, int64_t* rows,
                                 Counters* counters) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.n * c.padded) return;
  const int64_t k = i % c.padded, s = c.s + i / c.padded;
  int64_t row = -1;
  if (k < t.slots) {
    const QueryRule query = query_rule(t, c.b, s);
    if (k < query.slots) {
      const int64_t index = integer_at(t.indices, offset(t.indices, c.b, s, c.g, k));
      const KeyRow found = find_key(t.rule, query, k, index);
      if (found.kind == SlotKind::valid) row = found.outer * inner_rows + found.inner;
      if (found.kind == SlotKind::foreign && counters) count(t, counters, c.b, s, c.g, k);
    }
  }
  rows[i] = row;
}

template <typename T>
__device__ T rounded(float x);
template <>
__device__ float rounded<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}

// One element of a row of kv, dequantised in fp32.
__device__ float key_at(const Gather& g, int64_t outer, int64_t inner, int64_t group, int64_t c) {
  const int64_t first = offset(g.kv, outer, inner, group);
  if (g.storage == KvStorage::fp8_656) {
    const char* bytes = static_cast<const char*>(g.kv.data) + first;
    if (c < packed_values) {
      float scale;
      memcpy(&scale, bytes + packed_scales_at + 4 * (c / scale_columns), 4);
      if (mutant(Mutant::sa18_scale_exponent_only)) scale = exp2f(floorf(log2f(scale)));
      return scale * e4m3(static_cast<uint8_t>(bytes[c]));
    }
    __nv_bfloat16 value;
    memcpy(&value, bytes + packed_rope_at + 2 * (c - packed_values), 2);
    return __bfloat162float(value);
  }
  const float value = number_at(g.kv, first + c * g.kv.stride[3]);
  if (!g.scale.present) return value;
  const int64_t tile = g.scale_rank == 2 ? c / scale_columns : 0;
  return value * number_at(g.scale, offset(g.scale, outer, inner, tile));
}

// A warp a slot. Rows that already have the operand's dtype go over in words of 16 bytes.
template <typename T>
__global__ void gather_kernel(Gather g, Chunk c, const int64_t* rows, T* keys, bool words) {
  const int64_t slot = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (slot >= c.n * c.padded) return;
  const int64_t row = rows[slot];
  T* to = keys + slot * g.dim;
  if (row < 0) {
    for (int64_t i = lane; i < g.dim; i += 32) to[i] = rounded<T>(0.0f);
    return;
  }
  const int64_t outer = row / g.inner_rows, inner = row % g.inner_rows;
  if (words) {
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(g.kv.data) +
                                                      offset(g.kv, outer, inner, c.g));
    auto* word = reinterpret_cast<uint4*>(to);
    const int64_t count = g.dim * static_cast<int64_t>(sizeof(T)) / 16;
    for (int64_t i = lane; i < count; i += 32) word[i] = from[i];
    return;
  }
  for (int64_t i = lane; i < g.dim; i += 32) to[i] = rounded<T>(key_at(g, outer, inner, c.g, i));
}

template <typename T>
__global__ void pack_kernel(View from, View scale, Chunk c, int64_t columns, T* packed, T* rest) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.n * c.heads * columns) return;
  const int64_t column = i % columns, h = c.head + i / columns % c.heads;
  const int64_t s = c.s + i / columns / c.heads;
  float value = number_at(from, offset(from, c.b, s, h, column));
  if (scale.present) value *= number_at(scale, offset(scale, c.b, s, h));
  packed[i] = rounded<T>(value);
  if (rest) rest[i] = rounded<T>(value - static_cast<float>(packed[i]));
}

// Calls f with a null pointer of the operand's type.
template <typename F>
void of_type(DType dtype, F&& f) {
  if (dtype == DType::bf16)
    f(static_cast<__nv_bfloat16*>(nullptr));
  else if (dtype == DType::f16)
    f(static_cast<__half*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

// Words of 16 bytes can be read at every row of kv.
bool in_words(const Gather& g) {
  if (g.storage != KvStorage::plain || g.kv.dtype != g.to || g.kv.stride[3] != 1) return false;
  const int64_t each = 16 / size_of(g.to);
  for (int i = 0; i < 3; ++i)
    if (g.kv.stride[i] % each != 0) return false;
  return reinterpret_cast<uintptr_t>(g.kv.data) % 16 == 0 && g.dim % each == 0;
}

}  // namespace

void find_rows(const Tables& tables, const Chunk& chunk, int64_t inner_rows, int64_t* rows,
               Counters* counters, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(chunk.n * chunk.padded));
  if (blocks == 0) return;
  find_rows_kernel<<<blocks, threads, 0, stream>>>(tables, chunk, inner_rows, rows, counters);
  device::check_launch("sparse_attention: find_rows");
}

void gather_rows(const Gather& gather, const Chunk& chunk, const int64_t* rows, void* keys,
                 cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(chunk.n * chunk.padded, threads / 32));
  if (blocks == 0) return;
  of_type(gather.to, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    gather_kernel<T><<<blocks, threads, 0, stream>>>(gather, chunk, rows, static_cast<T*>(keys),
                                                     in_words(gather));
  });
  device::check_launch("sparse_attention: gather_rows");
}

void pack(const View& from, const View& scale, const Chunk& chunk, int64_t columns, DType to,
          const Packed& packed, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(chunk.n * chunk.heads * columns));
  if (blocks == 0) return;
  of_type(to, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    pack_kernel<T><<<blocks, threads, 0, stream>>>(
        from, scale, chunk, columns, static_cast<T*>(packed.values), static_cast<T*>(packed.rest));
  });
  device::check_launch("sparse_attention: pack");
}

}  // namespace talea::sparse_attention::cuda
