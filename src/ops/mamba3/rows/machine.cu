// What: the launches that device lanes share: sequences, padding, sums over heads and sequences.
// Why: what lies beside the chunks is a thread an element.
// Never: allocates or synchronises.
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/rows/machine.hpp"
#include "ops/mamba3/rows/sums.hpp"
#include "ops/mamba3/rows/team.cuh"

namespace talea::mamba3::cuda {
namespace {

constexpr int threads = 256;
constexpr int64_t most_blocks = 1 << 20;

unsigned blocks_of(int64_t items) {
  return static_cast<unsigned>(std::min((items + threads - 1) / threads, most_blocks));
}

// f(i) of every item, however many there are.
template <class F>
__device__ __forceinline__ void each_item(int64_t items, F f) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < items;
       i += int64_t{gridDim.x} * blockDim.x)
    f(i);
}

__global__ void __launch_bounds__(threads)
    sequences_kernel(const __grid_constant__ Sizes s, const __grid_constant__ Sequences from) {
  __shared__ double sums[32];
  DeviceTeam<float, 1> team{sums};
  read_sequences(team, s, from);
}

// A warp a stretch.
__global__ void __launch_bounds__(threads) stretches_kernel(const __grid_constant__ PackRounds p) {
  const int lane = threadIdx.x % 32;
  const int64_t i = (blockIdx.x * int64_t{threads} + threadIdx.x) / 32;
  if (i >= p.rounds[p.most_rounds].stretch) return;
  put_stretch(p, i, lane, 32);
  const int longer = device::warp_reduce(longer_before(p, i, lane, 32), device::Sum{});
  const Stretch own = p.stretches[i];
  if (lane == 0) p.by_length[p.rounds[own.round].stretch + longer] = own;
}

// A warp a token.
__global__ void clear_kernel(const __grid_constant__ Args a, int64_t tokens) {
  const int lane = threadIdx.x % 32;
  each_item(tokens * 32, [&](int64_t item) {
    const int64_t token = item / 32, batch = token / a.size.tokens, t = token % a.size.tokens;
    if (!is_padding(a, batch, t)) return;
    for (int64_t i = lane; i < clear_width(a.size); i += 32) clear_token(a, batch, t, i);
  });
}

__global__ void sum_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                           const __grid_constant__ UnitBuffers b, int64_t places) {
  const Sizes& s = a.size;
  const int64_t width = int64_t{s.rank} * s.groups * s.columns;
  each_item(places * width, [&](int64_t item) {
    const int64_t place = item / width;
    const auto i = static_cast<int>(item % width);
    const int c = i % s.columns, g = i / s.columns % s.groups, r = i / s.columns / s.groups;
    if (a.grad.q.data) sum_heads(a, w, a.grad.q, b.dq, place, r, g, c);
    if (a.grad.k.data) sum_heads(a, w, a.grad.k, b.dk, place, r, g, c);
  });
}

__global__ void angles_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                              const float* from, int64_t places) {
  each_item(places * a.size.pairs, [&](int64_t item) {
    sum_angles(a, w, from, item / a.size.pairs, static_cast<int>(item % a.size.pairs));
  });
}

__global__ void clear_totals_kernel(double* totals, int64_t count) {
  each_item(count, [&](int64_t i) { totals[i] = 0; });
}

template <bool stores>
__global__ void parameters_kernel(const __grid_constant__ Args a, const __grid_constant__ Wave w,
                                  const double* from, double* totals) {
  const int count = parameter_count(a.size);
  each_item(int64_t{a.size.heads} * count, [&](int64_t item) {
    const auto head = static_cast<int>(item / count), i = static_cast<int>(item % count);
    if constexpr (stores)
      store_parameter(a, totals, head, i);
    else
      cuda::add_parameters(a, w, from, totals, head, i);
  });
}

int64_t elements(const Sizes& s) {
  return int64_t{s.heads} *
         (s.rank * (2 * int64_t{s.columns} + 3 * int64_t{s.values}) + s.values + 1);
}

}  // namespace

void DeviceMachine::read_sequences(const Sizes& sizes, const Sequences& from) {
  sequences_kernel<<<1, threads, 0, at_.stream>>>(sizes, from);
  device::check_launch("mamba3: sequences");
  const PackRounds& pack = from.pack;
  if (!pack.rounds || pack.most_stretches == 0) return;
  stretches_kernel<<<blocks_of(pack.most_stretches * 32), threads, 0, at_.stream>>>(pack);
  device::check_launch("mamba3: rounds of a pack");
}

void DeviceMachine::clear_padding(const Args& a) {
  const int64_t tokens = a.size.batch * a.size.tokens;
  if (tokens == 0) return;
  clear_kernel<<<blocks_of(tokens * 32), threads, 0, at_.stream>>>(a, tokens);
  device::check_launch("mamba3: padding");
}

void DeviceMachine::sum_rows(const Args& a, const Wave& w) {
  const Sizes& s = a.size;
  const int64_t places = (w.last - w.first) * w.slice_chunks * s.chunk;
  const int64_t items = places * s.rank * s.groups * s.columns;
  if (items > 0 && (a.grad.q.data || a.grad.k.data)) {
    sum_kernel<<<blocks_of(items), threads, 0, at_.stream>>>(a, w, at_.buffers.units, places);
    device::check_launch("mamba3: sums of rows");
  }
  if (!s.sum_angles || places * s.pairs == 0) return;
  angles_kernel<<<blocks_of(places * s.pairs), threads, 0, at_.stream>>>(
      a, w, at_.buffers.units.dangles, places);
  device::check_launch("mamba3: sums of angles");
}

void DeviceMachine::clear_totals(const Args& a) {
  const int64_t count = elements(a.size);
  if (count == 0) return;
  clear_totals_kernel<<<blocks_of(count), threads, 0, at_.stream>>>(at_.buffers.totals, count);
  device::check_launch("mamba3: totals");
}

void DeviceMachine::add_parameters(const Args& a, const Wave& w) {
  if (elements(a.size) == 0) return;
  parameters_kernel<false><<<blocks_of(elements(a.size)), threads, 0, at_.stream>>>(
      a, w, at_.buffers.units.parameters, at_.buffers.totals);
  device::check_launch("mamba3: sums of parameters");
}

void DeviceMachine::store_parameters(const Args& a) {
  if (elements(a.size) == 0) return;
  parameters_kernel<true>
      <<<blocks_of(elements(a.size)), threads, 0, at_.stream>>>(a, {}, nullptr, at_.buffers.totals);
  device::check_launch("mamba3: parameters");
}

}  // namespace talea::mamba3::cuda
