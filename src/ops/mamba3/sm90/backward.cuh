// What: the gradients of a chunk: four warpgroups, each with products of its own.
// Why: dO V^T is formed once a chunk; decays and angles are anchored at the chunk's end.
// Never: divides by a decay, sums with atomics, or sums over heads.
#pragma once

#include "ops/mamba3/sm90/backward_shared.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks>
class Backward {
 public:
  using Shared = BackShared<R, blocks>;
  static constexpr int C = tokens_of<R>;

  __device__ __forceinline__ Backward(const Args& args, const UnitBuffers& buffers,
                                      const Wave& at_work, Shared& shared)
      : a(args),
        b(buffers),
        wave(at_work),
        sh(shared),
        u(shared.unit),
        slice(shared.slice),
        up(args) {
    group = warpgroup();
    thread = threadIdx.x & 127;
    skip = cuda::read_or(0, a.d, cuda::at(a.d, u.head));
    needs_y = a.grad.mimo_out.data || (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }

  __device__ __forceinline__ void run() {
    constexpr int size = columns * values;
    copy_state(slice.high - slice.begin);
    read_bias<R>(a.q_bias, u.head, a.size.halves, sh.q_bias, threadIdx.x, back_threads);
    read_bias<R>(a.k_bias, u.head, a.size.halves, sh.k_bias, threadIdx.x, back_threads);
    read_projection<R>(a.mimo_v, u.head, sh.mimo_v, threadIdx.x, back_threads);
    read_projection<R>(a.mimo_z, u.head, sh.mimo_z, threadIdx.x, back_threads);
    read_projection<R>(a.mimo_out, u.head, sh.mimo_out, threadIdx.x, back_threads);
    for (int i = threadIdx.x; i < 32 * Shared::lanes; i += back_threads)
      sh.rows_q[i] = sh.rows_k[i] = 0;
    for (int i = threadIdx.x; i < 16 * Shared::lanes; i += back_threads)
      sh.by_v[i] = sh.by_z[i] = sh.by_out[i] = 0;
    float* const home = b.upstream + slice.number * size;
    const int A = a.size.pairs;
    float* const ends = b.ends + slice.number * 2 * A;
    float first_anchor = 0;  // of pair threadIdx.x
    if (static_cast<int>(threadIdx.x) < A) first_anchor = ends[threadIdx.x];
    copies_done();
    __syncthreads();
    if (group == 3) {
      float e[64];
      take_state(home, e);
      hand_on(slice.high, e);
    }
    __syncthreads();
    begin(slice.high - 1);
#pragma unroll 1
    for (int64_t chunk = slice.high; chunk-- > slice.low;) {
      prepare(chunk);
      if (group == 0)
        pairs_and_gates();
      else if (group < 3)
        rows_of_group(chunk);
      else
        state_and_values(chunk);
      const Part at_work = p;
      __syncthreads();
      if (chunk > slice.low) begin(chunk - 1);
      tokens(chunk, at_work, first_anchor);
    }
    if (group == 3) {
      float e[64];
      take_own(e);
      put_state(home, e);
    }
    if (static_cast<int>(threadIdx.x) < A) ends[threadIdx.x] = first_anchor;
    add_parameters();
    if (slice.low == 0 && threadIdx.x == 0) store_token(b.pending[slice.number], 0, 0);
  }

 private:
  // backward_prepare.cuh
  __device__ __forceinline__ void copy_state(int64_t i);
  __device__ __forceinline__ void begin(int64_t chunk);
  __device__ __forceinline__ void prepare(int64_t chunk);
  template <bool halves>
  __device__ __forceinline__ void turn_rows();
  __device__ __forceinline__ void gate_rows();

  // backward_gates.cuh
  __device__ __forceinline__ void pairs_and_gates();
  __device__ __forceinline__ void weigh_pairs(uint32_t (&seen)[4][4]);
  __device__ __forceinline__ void gates(const uint32_t (&seen)[4][4]);
  template <bool pairs>
  __device__ __forceinline__ void gates_of(const float (&y)[32]);
  __device__ __forceinline__ void add_alike(float* sums, int slot, float x);

  // backward_rows.cuh
  __device__ __forceinline__ void rows_of_group(int64_t chunk);
  template <int count>
  static __device__ __forceinline__ void scale_rows(float (&d)[count], const float* by);
  template <bool halves>
  __device__ __forceinline__ void rows_back(int64_t chunk, float (&g)[64]);

  // backward_state.cuh
  template <bool halves, class F>
  static __device__ __forceinline__ void each_pair(F f);
  __device__ __forceinline__ void take_own(float (&e)[64]);
  __device__ __forceinline__ void hand_on(int64_t next, float (&e)[64]);
  template <bool halves>
  __device__ __forceinline__ void anchor_of(int which, float (&e)[64]);
  __device__ __forceinline__ void state_back(int64_t chunk);
  __device__ __forceinline__ void state_and_values(int64_t chunk);

  // backward_tokens.cuh
  __device__ __forceinline__ void store_token(const cuda::Pending& x, int64_t token, double db);
  __device__ __forceinline__ void tokens(int64_t chunk, const Part& at, float& first_anchor);

  // backward_decays.cuh
  __device__ __forceinline__ void decays_back(int64_t chunk, const Part& at);

  // backward_parameters.cuh
  __device__ __forceinline__ void add_parameters();

  enum Barrier { weighed = 1, upstream_read = 2 };
  const Args& a;
  const UnitBuffers& b;
  const Wave& wave;
  Shared& sh;
  const Unit& u;
  const Slice& slice;
  const Upstream up;
  Part p;
  RawToken raw;
  int group, thread;
  float skip, trace = 0;
  bool needs_y;
};

}  // namespace talea::mamba3::sm90
