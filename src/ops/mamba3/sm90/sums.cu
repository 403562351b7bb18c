// What: sums behind the chunks: d_q and d_k over parts of a group, angles over heads, parameters.
// Why: what is summed follows in fixed order, and what a chunk waits for comes from its neighbour.
// Never: sums with atomics.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/chunk.hpp"
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/sm90/launch.cuh"
#include "ops/mamba3/sm90/rows.cuh"
#include "ops/mamba3/sm90/token.cuh"

namespace talea::mamba3::sm90 {
namespace {

constexpr int threads = 256, pieces = 32;  // of four columns

// Blocks that have them, in this order; rows twice, of q and of k.
struct Shares {
  int64_t angles = 0, parameters = 0, rows = 0;
  int64_t places = 0;     // tokens
  int angle_lines = 0;    // of a token
  bool by_block = false;  // they are many: a block a token, not a warp
  bool beside = false;    // they are summed beside the kernel before in the stream
};

// A warp a row of a group.
__device__ __forceinline__ void add_rows(const Args& a, const Cut& cut, const Wave& w,
                                         const UnitBuffers& b, bool of_keys, int64_t block,
                                         int64_t items) {
  const cuda::Sizes& s = a.size;
  const cuda::View& to = of_keys ? a.grad.k : a.grad.q;
  const float* const from = of_keys ? b.dk : b.dq;
  if (!to.data) return;
  const int piece = threadIdx.x % pieces;
  const int64_t item = (block * threads + threadIdx.x) / pieces;
  if (item >= items) return;
  const int64_t line = item >> cut.part_bits;  // of all parts of N
  const auto g = static_cast<int>(line % s.groups);
  const int64_t row = line / s.groups, place = row / s.rank;
  const auto r = static_cast<int>(row % s.rank);
  const cuda::SliceToken token = cuda::slice_token(a, w, place);
  if (token.token < 0) return;
  const auto* at = reinterpret_cast<const float4*>(from + item * b.parts * s.columns) + piece;
  float4 sum = {0, 0, 0, 0};
  const bool next = mutant(ScanMutant::m3_part_of_the_next_group) && g + 1 < s.groups;
#pragma unroll 4
  for (int part = 0; part < b.parts + (next ? 1 : 0); ++part) {
    const float4 x = __ldcs(at + part * pieces);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int column =
      cut.own_column(cut.part_of(static_cast<int>(item) << cut.slab_bits), 4 * piece);
  if (!cut.has(column)) return;
  const int64_t out = cuda::at(to, token.batch, token.token, r, g, column);
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

// d_angles over heads that share them, a block a token; over the few parts of heads a warp a token.
__device__ __forceinline__ void add_angles(const Args& a, const Wave& w, const UnitBuffers& b,
                                           const Shares& n, int64_t block) {
  constexpr int warps = threads / 32;
  __shared__ float sums[warps][64];
  const cuda::Sizes& s = a.size;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t place = n.by_block ? block : block * warps + warp;
  if (place >= n.places) return;
  const cuda::SliceToken token = cuda::slice_token(a, w, place);
  if (token.token < 0) return;
  const int apart = n.by_block ? warps : 1;
  const float* const row = b.dangles + place * n.angle_lines * s.pairs;
  const int lines = mutant(Mutant::m3_shared_angles_not_summed) ? 1 : n.angle_lines;
  for (int i = lane; i < s.pairs; i += 32) {
    float sum = 0;
#pragma unroll 8
    for (int line = n.by_block ? warp : 0; line < lines; line += apart)
      sum += row[int64_t{line} * s.pairs + i];
    sums[warp][i] = sum;
  }
  if (n.by_block) __syncthreads();
  for (int i = lane; i < s.pairs && (warp == 0 || !n.by_block); i += 32) {
    float sum = sums[warp][i];
    for (int other = 1; other < apart; ++other) sum += sums[other][i];
    cuda::store(a.grad.angles, cuda::at(a.grad.angles, token.batch, token.token, 0, i), sum);
  }
}

// The same over units, or parts of heads that are slabs, a warp a token: of the pairs of a part of
// N those that have them.
__device__ __forceinline__ void add_angles_of_units(const Args& a, const Cut& cut, const Wave& w,
                                                    const UnitBuffers& b, const Shares& n,
                                                    int64_t block) {
  const cuda::Sizes& s = a.size;
  const int64_t place = block * (threads / 32) + threadIdx.x / 32;
  if (place >= n.places) return;
  const cuda::SliceToken token = cuda::slice_token(a, w, place);
  if (token.token < 0) return;
  const float* const row = b.dangles + place * n.angle_lines * s.pairs;
  for (int part = 0; part < 1 << cut.part_bits; ++part)
    for (int i = threadIdx.x % 32; i < cut.pairs_of(s, part); i += 32) {
      float sum = 0;
      for (int unit = 0; unit < n.angle_lines; ++unit)
        if (cut.part_of(unit) == part) sum += row[int64_t{unit} * s.pairs + i];
      const int64_t at =
          cuda::at(a.grad.angles, token.batch, token.token, 0, cut.first_pair(part) + i);
      cuda::store(a.grad.angles, at, sum);
    }
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

template <class... Units>
__global__ void __launch_bounds__(threads)
    sums_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                const __grid_constant__ UnitBuffers b, const __grid_constant__ Shares n,
                double* totals, int64_t items, const __grid_constant__ Units... units) {
  const BesideEarlierKernel beside(n.beside, false);
  const Cut cut = cuda::cut_of(units...);
  int64_t block = blockIdx.x;
  if (block < n.angles) {
    if (cut.whole) return add_angles(a, w, b, n, block);
    return add_angles_of_units(a, cut, w, b, n, block);
  }
  block -= n.angles;
  if (block < n.parameters) return add_parameters(a, w, b, totals, block);
  block -= n.parameters;
  add_rows(a, cut, w, b, block >= n.rows, block % n.rows, items);
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
  const bool reset = !mutant(ScanMutant::m3_edge_of_the_sequence_before);
  const bool behind = own > 0 || (!reset && a.pack.rounds && chunk > 0);
  const float last = behind ? b.edges[item - 1].last : 0.0f;
  store_token(a, u, b.edges[item].first(), own * s.chunk, static_cast<double>(last));
}

// The same of a head whose units have each their own: an item a chunk of a unit, of which the first
// has those of all.
__global__ void __launch_bounds__(threads)
    unit_edges_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                      const __grid_constant__ UnitBuffers b, int64_t items,
                      const __grid_constant__ Cut cut) {
  hopper::begin_after_earlier_kernels();
  const cuda::Sizes& s = a.size;
  const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x, each = w.segments * s.segment;
  if (item >= items) return;
  const int64_t number = item / each, chunk = item % each;
  const auto unit = static_cast<int>(number % s.heads);
  if ((unit & ((1 << cut.bits()) - 1)) != 0) return;
  cuda::Unit u;
  int64_t own = chunk;  // of its sequence
  if (a.pack.rounds) {
    if (chunk >= a.pack.before[s.sequences]) return;
    const cuda::PackedChunk x = a.pack.chunks[chunk];
    u = cuda::unit_of(a, x, cut.head_of(unit)), own = x.chunk;
  } else {
    u = cuda::unit_of(a, w.first + number / s.heads, cut.head_of(unit));
    if (chunk >= cuda::chunks_of(s, u.tokens)) return;
  }
  cuda::Pending sum = b.edges[item].first();
  double last = own > 0 ? static_cast<double>(b.edges[item - 1].last) : 0.0;
  for (int other = 1; other < 1 << cut.bits(); ++other) {
    const cuda::Edge* const more = b.edges + item + other * each;
    sum.ddt += more->ddt, sum.dgamma += more->dgamma;
    if (own > 0) last += static_cast<double>(more[-1].last);
  }
  store_token(a, u, sum, own * s.chunk, last);
}

// A thread an element of the parameters of a head, of the totals of its units: biases by part, over
// the slabs; projections by slab, of the last part, which has y and dv whole; d of one part.
__global__ void __launch_bounds__(threads)
    store_parameters_kernel(const __grid_constant__ Args a, const __grid_constant__ Cut cut,
                            const double* totals, int64_t items) {
  const cuda::Sizes& s = a.size;
  const cuda::GradientViews& d = a.grad;
  const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x;
  if (item >= items) return;
  const int slabs = 1 << cut.slab_bits, parts = 1 << cut.part_bits, heads = cut.heads_of(s);
  const int N = cut.columns, P = s.values * slabs, rn = s.rank * N, rp = s.rank * P;
  const auto head = static_cast<int>(item % heads);
  auto i = static_cast<int>(item / heads);
  const int count = cuda::parameter_count(s);
  const auto total = [&](int part, int slab, int at) {
    return totals[((int64_t{head} * parts + part) * slabs + slab) * count + at];
  };
  const auto all = [&](int part, int at) {
    double sum = total(part, 0, at);
    for (int slab = 1; slab < slabs; ++slab) sum += total(part, slab, at);
    return sum;
  };
  if (i < 2 * rn) {
    const cuda::View& v = i < rn ? d.q_bias : d.k_bias;
    const int r = i / N, n = i % N;
    // Column of a unit: neighbours lie whole in a part, halves in a panel each.
    const int panel = s.halves ? n / cut.panel_apart : n % columns / cut.panel_apart;
    const int in_panel = n % cut.panel_apart;
    const int part = s.halves ? in_panel / Cut::panel : n / columns;
    const int c = panel * Cut::panel + in_panel % Cut::panel;
    return cuda::add_or_store(a, v, cuda::at(v, head, r % s.rank, n), all(part, r * columns + c));
  }
  i -= 2 * rn;
  if (i < 3 * rp) {
    const cuda::View& v = i < rp ? d.mimo_v : i < 2 * rp ? d.mimo_z : d.mimo_out;
    const int r = i / P, p = i % P;
    const int at = 2 * s.rank * columns + r * values + p % values;
    return cuda::add_or_store(a, v, cuda::at(v, head, r % s.rank, p),
                              total(parts - 1, p / values, at));
  }
  cuda::add_or_store(a, d.d, cuda::at(d.d, head), all(0, count - 1));
}

int64_t blocks_of(int64_t items) { return (items + threads - 1) / threads; }

}  // namespace

void launch_edges(const Args& a, const Cut& cut, const Wave& w, const UnitBuffers& b,
                  cudaStream_t stream) {
  const int64_t items = (w.last - w.first) * a.size.heads * w.segments * a.size.segment;
  if (items == 0 || (!a.grad.dt.data && !a.grad.trap.data)) return;
  if (cut.whole)
    return launch("mamba3: first tokens of chunks", edges_kernel, blocks_of(items), threads, 0,
                  stream, a, w, b, items);
  if (!gradients_ahead(cut, a.size.rank, a.size.pairs))
    return launch("mamba3: first tokens of chunks", unit_edges_kernel, blocks_of(items), threads, 0,
                  stream, a, w, b, items, cut);
  Args heads = a;  // what their units add up to
  heads.size.heads = cut.heads_of(a.size);
  const int64_t of_heads = items >> cut.bits();
  launch("mamba3: first tokens of chunks", edges_kernel, blocks_of(of_heads), threads, 0, stream,
         heads, w, b, of_heads);
}

void launch_store_parameters(const Args& a, const Cut& cut, const double* totals,
                             cudaStream_t stream) {
  const cuda::Sizes& s = a.size;
  const int64_t P = int64_t{s.values} << cut.slab_bits;
  const int64_t items = cut.heads_of(s) * (s.rank * (2 * int64_t{cut.columns} + 3 * P) + 1);
  if (items == 0) return;
  store_parameters_kernel<<<static_cast<unsigned>(blocks_of(items)), threads, 0, stream>>>(
      a, cut, totals, items);
  device::check_launch("mamba3: parameters");
}

void launch_sums(const Args& a, const Cut& cut, const Wave& w, const UnitBuffers& b, double* totals,
                 bool beside, cudaStream_t stream) {
  const cuda::Sizes& s = a.size;
  const int64_t places = (w.last - w.first) * w.slice_chunks * s.chunk;
  const int64_t items = (places * s.rank * s.groups) << cut.part_bits;
  if (places == 0) return;
  Shares n;
  n.places = places, n.beside = beside;
  // The gradients have summed over the heads of a part.
  const bool by_part = gradients_ahead(cut, s.rank, s.pairs);
  n.by_block = cut.whole && !by_part;
  if (s.sum_angles && a.grad.angles.data && s.pairs > 0)
    n.angles = n.by_block ? places : blocks_of(places * 32);
  n.angle_lines = by_part ? s.groups * b.parts : s.heads;
  n.parameters =
      blocks_of((w.last - w.first) * s.heads *
                (s.rank * (2 * int64_t{s.columns} + 3 * int64_t{s.values}) + s.values + 1));
  if (b.parts > 1 && (a.grad.q.data || a.grad.k.data)) n.rows = blocks_of(items * pieces);
  const int64_t blocks = n.angles + n.parameters + 2 * n.rows;
  if (cut.whole)
    launch("mamba3: sums",
           KernelOf<Args, Wave, UnitBuffers, Shares, double*, int64_t>(sums_kernel<>), blocks,
           threads, 0, stream, a, w, b, n, totals, items);
  else
    launch("mamba3: sums",
           KernelOf<Args, Wave, UnitBuffers, Shares, double*, int64_t, Cut>(sums_kernel<Cut>),
           blocks, threads, 0, stream, a, w, b, n, totals, items, cut);
}

}  // namespace talea::mamba3::sm90
