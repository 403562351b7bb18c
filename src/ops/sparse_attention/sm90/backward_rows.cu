// What: Delta, d_sink, and the sum of contributions to the rows of dkv in a fixed order.
// Why: no two runs may differ: slots are sorted by row, stably, and each row has one adder.
// Never: uses floating atomics.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/backward_rows.hpp"

namespace talea::sparse_attention::sm90 {
namespace {

constexpr int row_threads = 256, quad = 4;

template <bool kF16>
__device__ float2 pair_of(uint32_t bits) {
  if constexpr (kF16)
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  else
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

__device__ const uint16_t* words_at(const View& v, int64_t element) {
  return static_cast<const uint16_t*>(v.data) + element;
}

// A warp a row: a lane's share of its sum.
template <bool kF16>
__device__ float share_of_words(const Delta& d, int64_t b, int64_t s, int64_t h, int lane) {
  const uint16_t* x = words_at(d.d_o, cuda::offset(d.d_o, b, s, h));
  const uint16_t* y = words_at(d.o, cuda::offset(d.o, b, s, h));
  const uint16_t* z =
      d.residual.present ? words_at(d.residual, cuda::offset(d.residual, b, s, h)) : nullptr;
  float sum = 0;
  for (int64_t c = lane * 8; c < d.columns; c += 32 * 8) {
    uint4 p = *reinterpret_cast<const uint4*>(x + c), q = *reinterpret_cast<const uint4*>(y + c);
    uint4 r = z ? *reinterpret_cast<const uint4*>(z + c) : make_uint4(0, 0, 0, 0);
    const uint32_t *pp = &p.x, *qq = &q.x, *rr = &r.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 u = pair_of<kF16>(pp[i]), v = pair_of<kF16>(qq[i]), w = pair_of<kF16>(rr[i]);
      sum += u.x * (v.x + w.x);
      sum += u.y * (v.y + w.y);
    }
  }
  return sum;
}

__device__ float share_of_elements(const Delta& d, int64_t b, int64_t s, int64_t h, int lane) {
  const int64_t x = cuda::offset(d.d_o, b, s, h), y = cuda::offset(d.o, b, s, h);
  const int64_t z = cuda::offset(d.residual, b, s, h);
  float sum = 0;
  for (int64_t c = lane; c < d.columns; c += 32) {
    float o = cuda::number_at(d.o, y + c);
    if (d.residual.present) o += cuda::number_at(d.residual, z + c);
    sum += cuda::number_at(d.d_o, x + c) * o;
  }
  return sum;
}

// What of a row's weight its sink takes; 0 without a valid slot.
__device__ float share_of_sink(const Delta& d, int64_t b, int64_t s, int64_t h) {
  const double sink = cuda::number_at(d.sink, cuda::offset(d.sink, h));
  const double lse = cuda::number_at(d.lse, cuda::offset(d.lse, b, s, h));
  if (lse == INFINITY || sink == -INFINITY) return 0;
  return isinf(sink) || lse == -INFINITY ? 1.0f : static_cast<float>(1 / (1 + exp(lse - sink)));
}

template <bool kF16>
__global__ void delta_kernel(Delta d, float* delta, float* sink_share) {
  const int64_t all = d.batch * d.queries * d.heads;
  const int lane = threadIdx.x % 32;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32; i < all;
       i += int64_t{gridDim.x} * blockDim.x / 32) {
    const int64_t h = i % d.heads, s = i / d.heads % d.queries, b = i / d.heads / d.queries;
    float sum = 0;
    if (d.d_o.present)
      sum = d.words ? share_of_words<kF16>(d, b, s, h, lane) : share_of_elements(d, b, s, h, lane);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane != 0) continue;
    delta[i] = sum;
    if (sink_share) sink_share[i] = share_of_sink(d, b, s, h);
  }
}

// A block a head.
__global__ void d_sink_kernel(Delta d, const float* delta, const float* sink_share, View d_sink) {
  __shared__ double sums[row_threads];
  const int64_t h = blockIdx.x, all = d.batch * d.queries;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < all; i += row_threads) {
    const double share = sink_share[i * d.heads + h];
    if (share != 0) sum -= share * delta[i * d.heads + h];
  }
  sums[threadIdx.x] = sum;
  for (int half = row_threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) cuda::put(d_sink, cuda::offset(d_sink, h), static_cast<float>(sums[0]));
}

// Which row of dkv a slot names; behind all rows where it is absent.
__global__ void number_kernel(Segments t, uint32_t* keys, uint32_t* slots) {
  const int64_t all = t.lists * t.tables.slots;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t list = t.first_list + i / t.tables.slots, slot = i % t.tables.slots;
    const int64_t g = list % t.tables.groups, s = list / t.tables.groups % t.tables.queries;
    const int64_t b = list / t.tables.groups / t.tables.queries;
    const QueryRule query = cuda::query_rule(t.tables, b, s);
    int64_t row = t.rows;
    if (slot < query.slots) {
      const KeyRow found = find_key(
          t.tables.rule, query, slot,
          cuda::integer_at(t.tables.indices, cuda::offset(t.tables.indices, b, s, g, slot)));
      if (found.kind == SlotKind::valid)
        row = (found.outer * t.inner_rows + found.inner) * t.tables.groups + g;
    }
    keys[i] = static_cast<uint32_t>(row);
    slots[i] = static_cast<uint32_t>(i);
  }
}

// starts[row]: the first entry of a row at or behind it.
__global__ void starts_kernel(const uint32_t* keys, int64_t all, int64_t rows, uint32_t* starts) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i <= all;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t first = i == 0 ? 0 : int64_t{keys[i - 1]} + 1;
    const int64_t last = i == all ? rows : min(int64_t{keys[i]}, rows);
    for (int64_t row = first; row <= last; ++row) starts[row] = static_cast<uint32_t>(i);
  }
}

// A block a row, a thread four columns: entries in their order, of each first its tiles of heads.
__global__ void segments_kernel(Segments t, const uint32_t* starts, const uint32_t* slots,
                                const float* contributions) {
  constexpr int ahead = 8;
  const int64_t tile = t.tables.slots * t.dim;  // from one tile of heads to the next
  for (int64_t row = blockIdx.x; row < t.rows; row += gridDim.x) {
    const uint32_t begin = starts[row], end = starts[row + 1];
    if (begin == end) continue;
    const int64_t g = row % t.tables.groups, r = row / t.tables.groups;
    float* to = static_cast<float*>(t.sums.data) +
                cuda::offset(t.sums, r / t.inner_rows, r % t.inner_rows, g);
    for (int64_t c = threadIdx.x * quad; c < t.dim; c += int64_t{blockDim.x} * quad) {
      float4 sum = *reinterpret_cast<const float4*>(to + c);
      const auto add = [&](const float4& x) {
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      };
      for (uint32_t i = begin; i < end; i += ahead) {
        float4 part[ahead];
#pragma unroll
        for (int k = 0; k < ahead; ++k) {
          part[k] = make_float4(0, 0, 0, 0);
          if (i + k >= end) continue;
          const int64_t slot = slots[i + k];
          const float* from =
              contributions +
              (slot / t.tables.slots * t.tiles * t.tables.slots + slot % t.tables.slots) * t.dim +
              c;
          part[k] = __ldcs(reinterpret_cast<const float4*>(from));
          for (int64_t n = 1; n < t.tiles; ++n) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(from + n * tile));
            part[k].x += x.x, part[k].y += x.y, part[k].z += x.z, part[k].w += x.w;
          }
        }
#pragma unroll
        for (int k = 0; k < ahead; ++k)
          if (i + k < end) add(part[k]);
      }
      *reinterpret_cast<float4*>(to + c) = sum;
    }
  }
}

unsigned blocks_of(int64_t items, int64_t each) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + each - 1) / each, 1, 65536));
}

int sorted_bits(int64_t rows) { return std::bit_width(static_cast<uint64_t>(rows)); }

}  // namespace

void form_delta(const Delta& d, bool f16, float* delta, float* sink_share, cudaStream_t stream) {
  const int64_t rows = d.batch * d.queries * d.heads;
  if (rows == 0) return;
  (f16 ? delta_kernel<true>
       : delta_kernel<false>)<<<blocks_of(rows, row_threads / 32), row_threads, 0, stream>>>(
      d, delta, sink_share);
  device::check_launch("sparse_attention: delta");
}

void form_d_sink(const Delta& d, const float* delta, const float* sink_share, const View& d_sink,
                 cudaStream_t stream) {
  if (d.heads == 0) return;
  d_sink_kernel<<<static_cast<unsigned>(d.heads), row_threads, 0, stream>>>(d, delta, sink_share,
                                                                            d_sink);
  device::check_launch("sparse_attention: d_sink");
}

int64_t sort_bytes(int64_t slots, int64_t rows) {
  size_t bytes = 0;
  const uint32_t* from = nullptr;
  device::check(
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, from, const_cast<uint32_t*>(from), from,
                                      const_cast<uint32_t*>(from), slots, 0, sorted_bits(rows)),
      "sparse_attention: size of the sort");
  return static_cast<int64_t>(bytes);
}

void sort_slots(const Segments& s, const Sorted& sorted, cudaStream_t stream) {
  const int64_t all = s.lists * s.tables.slots;
  number_kernel<<<blocks_of(all, row_threads), row_threads, 0, stream>>>(s, sorted.keys,
                                                                         sorted.slots);
  device::check_launch("sparse_attention: number the slots");
  auto bytes = static_cast<size_t>(sorted.scratch_bytes);
  device::check(cub::DeviceRadixSort::SortPairs(
                    sorted.scratch, bytes, sorted.keys, sorted.sorted_keys, sorted.slots,
                    sorted.sorted_slots, all, 0, sorted_bits(s.rows), stream),
                "sparse_attention: sort");
  starts_kernel<<<blocks_of(all + 1, row_threads), row_threads, 0, stream>>>(
      sorted.sorted_keys, all, s.rows, sorted.starts);
  device::check_launch("sparse_attention: where rows start");
}

void add_segments(const Segments& s, const Sorted& sorted, const float* contributions,
                  cudaStream_t stream) {
  const auto columns = static_cast<unsigned>(s.dim / quad + 31) / 32 * 32;
  segments_kernel<<<blocks_of(s.rows, 1), std::min(columns, 256u), 0, stream>>>(
      s, sorted.starts, sorted.sorted_slots, contributions);
  device::check_launch("sparse_attention: add segments");
}

}  // namespace talea::sparse_attention::sm90
