// What: sums behind the chunks: d_q and d_k over parts of a group, angles over heads, parameters.
// Why: what is summed follows in fixed order, and what a chunk waits for comes from its neighbour.
// Never: sums with atomics.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/chunk.hpp"
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/tile.cuh"
#include "ops/mamba3/sm90/token.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = 256, pieces = 32;  // of four columns

// Blocks that have them, in this order; rows twice, of q and of k.
struct Shares {
  int64_t angles = 0, parameters = 0, rows = 0;
  int angle_lines = 0;  // of a token
};

// A warp a row of a group.
__device__ __forceinline__ void add_rows(const Args& a, const Wave& w, const UnitBuffers& b,
                                         bool of_keys, int64_t block, int64_t items) {
  const cuda::Sizes& s = a.size;
  const cuda::View& to = of_keys ? a.grad.k : a.grad.q;
  const float* const from = of_keys ? b.dk : b.dq;
  if (!to.data) return;
  const int piece = threadIdx.x % pieces;
  const int64_t item = (block * threads + threadIdx.x) / pieces;
  if (item >= items) return;
  const auto g = static_cast<int>(item % s.groups);
  const int64_t row = item / s.groups, place = row / s.rank;
  const auto r = static_cast<int>(row % s.rank);
  const cuda::SliceToken token = cuda::slice_token(a, w, place);
  if (token.token < 0) return;
  const auto* at = reinterpret_cast<const float4*>(from + item * b.parts * s.columns) + piece;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 4
  for (int part = 0; part < b.parts; ++part) {
    const float4 x = __ldcs(at + part * pieces);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64_t out = cuda::at(to, token.batch, token.token, r, g, 4 * piece);
  if (to.dtype == DType::bf16 && to.stride[4] == 1) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(sum.z, sum.w);
    auto* const own = static_cast<__nv_bfloat16*>(to.data) + out;
    if (reinterpret_cast<uintptr_t>(own) % 8 == 0) {
      *reinterpret_cast<uint2*>(own) = {*reinterpret_cast<const uint32_t*>(&low),
                                        *reinterpret_cast<const uint32_t*>(&high)};
      return;
    }
  }
  cuda::store(to, out, sum.x);
  cuda::store(to, out + to.stride[4], sum.y);
  cuda::store(to, out + 2 * to.stride[4], sum.z);
  cuda::store(to, out + 3 * to.stride[4], sum.w);
}

// A block a token, a warp an eighth of its lines: d_angles that heads share, over parts of heads.
__device__ __forceinline__ void add_angles(const Args& a, const Wave& w, const UnitBuffers& b,
                                           int lines, int64_t place) {
  constexpr int parts = threads / 32;
  __shared__ float sums[parts][64];
  const cuda::Sizes& s = a.size;
  const cuda::SliceToken token = cuda::slice_token(a, w, place);
  if (token.token < 0) return;
  const int part = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* const row = b.dangles + place * lines * s.pairs;
  for (int i = lane; i < s.pairs; i += 32) {
    float sum = 0;
#pragma unroll 8
    for (int line = part; line < lines; line += parts) sum += row[int64_t{line} * s.pairs + i];
    sums[part][i] = sum;
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= s.pairs) return;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < parts; ++j) sum += sums[j][i];
  cuda::store(a.grad.angles, cuda::at(a.grad.angles, token.batch, token.token, 0, i), sum);
}

// The same of the chunks of a round: what a sequence has is whole at its first chunk, and joins the
// total as in cuda::add_parameters.
__device__ __forceinline__ void add_round(const Args& a, const Wave& w, const UnitBuffers& b,
                                          double* totals, int64_t item, int64_t count) {
  const int64_t from = a.pack.rounds[w.segment].chunk;
  const auto chunks = static_cast<int>(a.pack.rounds[w.segment + 1].chunk - from);
  if (chunks <= 0) return;
  constexpr int ahead = 8;
  const float* const at = b.partial + item / count * w.slice_chunks * count + item % count;
  double sum = b.parameters[item], total = totals[item];
#pragma unroll 1
  for (int last = chunks - 1; last >= 0; last -= ahead) {
    float some[ahead];
    bool first[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      const int chunk = last - j > 0 ? last - j : 0;
      some[j] = at[chunk * count];
      first[j] = a.pack.chunks[from + chunk].chunk == 0;
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (last - j < 0) break;
      sum += static_cast<double>(some[j]);
      if (first[j]) total += sum, sum = 0;
    }
  }
  b.parameters[item] = sum;
  totals[item] = total;
}

// What the chunks of a slice have for the parameters of a head, from the last on: one after
// another, so that no sum depends on how long a slice is.
__device__ __forceinline__ void add_parameters(const Args& a, const Wave& w, const UnitBuffers& b,
                                               double* totals, int64_t block) {
  const cuda::Sizes& s = a.size;
  const int count = cuda::parameter_count(s);
  const int64_t item = block * threads + threadIdx.x;
  if (item >= (w.last - w.first) * s.heads * count) return;
  const int64_t number = item / count, i = item % count;
  const int64_t norm = int64_t{s.rank} * (2 * s.columns + 3 * s.values);
  if (i >= norm && i < norm + s.values) return;
  if (a.pack.rounds) return add_round(a, w, b, totals, item, count);
  const cuda::Unit u =
      cuda::unit_of(a, w.first + number / s.heads, static_cast<int>(number % s.heads));
  int64_t chunks = cuda::chunks_of(s, u.tokens) - w.segment * s.segment;
  chunks = (chunks < s.segment ? chunks : s.segment) - w.slice;
  chunks = chunks < w.slice_chunks ? chunks : w.slice_chunks;
  const float* const from = b.partial + number * w.slice_chunks * count + i;
  double sum = b.parameters[item];
#pragma unroll 8
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk)
    sum += static_cast<double>(from[chunk * count]);
  b.parameters[item] = sum;
}

__global__ void __launch_bounds__(threads)
    sums_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                const __grid_constant__ UnitBuffers b, const __grid_constant__ Shares n,
                double* totals, int64_t items) {
  hopper::begin_after_earlier_kernels();
  int64_t block = blockIdx.x;
  if (block < n.angles) return add_angles(a, w, b, n.angle_lines, block);
  block -= n.angles;
  if (block < n.parameters) return add_parameters(a, w, b, totals, block);
  block -= n.parameters;
  add_rows(a, w, b, block >= n.rows, block % n.rows, items);
}

// The first token of each chunk, whose key the chunk before has weighed.
__global__ void __launch_bounds__(threads)
    edges_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                 const __grid_constant__ UnitBuffers b, int64_t items) {
  hopper::begin_after_earlier_kernels();
  const cuda::Sizes& s = a.size;
  const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x, each = w.segments * s.segment;
  if (item >= items) return;
  const int64_t number = item / each, chunk = item % each;
  const auto head = static_cast<int>(number % s.heads);
  cuda::Unit u;
  int64_t own = chunk;  // of its sequence
  if (a.pack.rounds) {
    if (chunk >= a.pack.before[s.sequences]) return;
    const cuda::PackedChunk x = a.pack.chunks[chunk];
    u = cuda::unit_of(a, x, head), own = x.chunk;
  } else {
    u = cuda::unit_of(a, w.first + number / s.heads, head);
    if (chunk >= cuda::chunks_of(s, u.tokens)) return;
  }
  store_token(a, u, b.edges[item].first, own * s.chunk, own > 0 ? b.edges[item - 1].last : 0.0);
}

int64_t blocks_of(int64_t items) { return (items + threads - 1) / threads; }

}  // namespace

void launch_edges(const Args& a, const Wave& w, const UnitBuffers& b, cudaStream_t stream) {
  const int64_t items = (w.last - w.first) * a.size.heads * w.segments * a.size.segment;
  if (items == 0 || (!a.grad.dt.data && !a.grad.trap.data)) return;
  launch("mamba3: first tokens of chunks", edges_kernel, blocks_of(items), threads, 0, stream, a, w,
         b, items);
}

void launch_sums(const Args& a, const Wave& w, const UnitBuffers& b, double* totals,
                 cudaStream_t stream) {
  const cuda::Sizes& s = a.size;
  const int64_t places = (w.last - w.first) * w.slice_chunks * s.chunk;
  const int64_t items = places * s.rank * s.groups;
  if (places == 0) return;
  Shares n;
  if (s.sum_angles && a.grad.angles.data && s.pairs > 0) n.angles = places;
  n.angle_lines = s.groups * b.parts;
  n.parameters =
      blocks_of((w.last - w.first) * s.heads *
                (s.rank * (2 * int64_t{s.columns} + 3 * int64_t{s.values}) + s.values + 1));
  if (b.dq || b.dk) n.rows = blocks_of(items * pieces);
  launch("mamba3: sums", sums_kernel, n.angles + n.parameters + 2 * n.rows, threads, 0, stream, a,
         w, b, n, totals, items);
}

}  // namespace talea::mamba3::sm90
