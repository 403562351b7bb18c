// What: the gradients of a chunk, head by head: four warpgroups, each with products of its own.
// Why: dO V^T is formed once; rows of the heads of a group are summed where they are formed.
// Never: divides by a decay, sums with atomics, or waits for another chunk.
#pragma once

#include "ops/mamba3/sm90/backward_shared.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
class Backward {
 public:
  using Shared = BackShared<R, blocks>;
  static constexpr int C = tokens_of<R>, pairs = Shared::pairs, size = columns * values;

  __device__ __forceinline__ Backward(const Args& args, const UnitBuffers& buffers,
                                      const Wave& at_work, Shared& shared)
      : a(args),
        b(buffers),
        wave(at_work),
        sh(shared),
        place(shared.place),
        p(shared.part),
        up(args) {
    group = warpgroup();
    thread = threadIdx.x & 127;
    needs_y = a.grad.mimo_out.data || (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int part = 0; part < 1 << a.size.part_bits; ++part) {
      if (part > 0) __syncthreads();
      part_of_columns(part);
    }
  }

 private:
  // All heads, of a part of N.
  __device__ __forceinline__ void part_of_columns(int part) {
    const int first_head = place.first + (part << a.size.slab_bits);
    if (group == 1 || group == 2) {
      float4* const sums = group == 1 ? sh.sums_q : sh.sums_k;
#pragma unroll 1
      for (int i = 0; i < 16; ++i) sums[i * 128 + thread] = {0, 0, 0, 0};
    }
    put_homes();
    __syncthreads();
    begin_rows(first_head);
    begin(first_head);
    begin_state(first_head);
    int then = 0;
#pragma unroll 1
    for (int head = first_head; head < place.last; head = then) {
      stage = stage_of(head), then = behind(head);
      prepare(head);
      weigh_pairs();
      if (group == 0)
        pairs_and_values(head);
      else if (group < 3)
        rows_of_group(head);
      else
        gates(head);
      const bool more = then < place.last;
      if (more && group < 3) {
        hopper::named_barrier_sync(own_group + group, 128);
        begin_rows(then);
      }
      uint32_t rates[angle_tokens];
      begin_angles(head, rates);
      __syncthreads();
      if (more)
        begin(then);
      else
        next = {};  // nothing of it is live behind the loop
      tokens(head, rates);
      if (more) begin_state(then);
    }
    if (group == 1) store_rows(part, a.grad.q, b.dq, sh.sums_q);
    if (group == 2) store_rows(part, a.grad.k, b.dk, sh.sums_k);
  }

  __device__ __forceinline__ Unit unit(int head) const {
    Unit u = sh.unit;
    u.head = real(head);
    return u;
  }
  __device__ __forceinline__ const ChunkSteps<C>& steps() const { return sh.steps[stage]; }
  // Where rows of a head begin.
  __device__ __forceinline__ int64_t home(int64_t first, const View& v, int head) const {
    return first + real(head) * v.stride[2] + first_of(head);
  }
  __device__ __forceinline__ int64_t angles_home(int64_t first, const View& v, int head) const {
    return first + real(head) * v.stride[2];
  }
  __device__ __forceinline__ int64_t d_out_home(int head) const {
    return sh.homes.d_out + real(head) * a.d_out.stride[3] + first_of(head) * a.d_out.stride[4];
  }
  // Heads are counted by their units: the head itself, its part of N, the first of its P that the
  // slab has; the unit that follows, of the same part, and its place among two.
  __device__ __forceinline__ int real(int head) const {
    return head >> (a.size.part_bits + a.size.slab_bits);
  }
  __device__ __forceinline__ int part_of(int head) const {
    return head >> a.size.slab_bits & ((1 << a.size.part_bits) - 1);
  }
  __device__ __forceinline__ int behind(int head) const {
    const int next = head + 1, slabs = 1 << a.size.slab_bits;
    return a.size.part_bits > 0 && (next & (slabs - 1)) == 0 ? next + slabs : next;
  }
  __device__ __forceinline__ int stage_of(int head) const {
    return head >> (a.size.slab_bits > 0 ? 0 : a.size.part_bits) & 1;
  }
  __device__ __forceinline__ int first_of(int head) const {
    return (head & ((1 << a.size.slab_bits) - 1)) * values;
  }
  __device__ __forceinline__ int64_t number(int head) const {
    return place.sequence * a.size.heads + head;
  }

  // backward_prepare.cuh
  __device__ __forceinline__ void put_homes();
  // bits: heads of slabs that share it.
  __device__ __forceinline__ OfHeads of_heads(const void* buffer, int64_t each, int64_t at,
                                              int64_t bytes, int bits = 0);
  __device__ __forceinline__ void begin_rows(int head);
  __device__ __forceinline__ void begin(int head);
  __device__ __forceinline__ void copy_turns(int head);
  __device__ __forceinline__ void begin_state(int head);
  __device__ __forceinline__ void prepare(int head);
  __device__ __forceinline__ void anchor();
  __device__ __forceinline__ void turn_rows();

  // backward_pairs.cuh
  __device__ __forceinline__ void pairs_and_values(int head);
  __device__ __forceinline__ void weigh_pairs();
  __device__ __forceinline__ void values_back(int head, const float (&dv)[32],
                                              const uint32_t (&v)[16]);
  __device__ __forceinline__ void put_alike(float* sums, int slot, float (&x)[8 / R]);
  template <int count>
  static __device__ __forceinline__ void scale_rows(float (&d)[count], const float* by);

  // What the parts of N add up to, of y (0) or of dv (1); false: there are more.
  __device__ __forceinline__ bool sum_of_parts(int head, int which, float (&x)[32]) const;

  // backward_gates.cuh
  __device__ __forceinline__ void gates(int head);
  template <bool plain>  // g holds d_out
  __device__ __forceinline__ void gates_of(int head, const float (&y)[32], const uint32_t (&g)[16],
                                           const uint32_t (&z)[16]);

  // backward_rows.cuh
  __device__ __forceinline__ void rows_of_group(int head);
  __device__ __forceinline__ void rows_back(float (&g)[64]);
  __device__ __forceinline__ void store_rows(int part, const View& to, float* by_part,
                                             const float4* sums);

  // backward_tokens.cuh
  __device__ __forceinline__ SlabSums sums_of_units(int head, bool each_part = false) const {
    return slab_sums<C, pairs>(a, b, head, real(head) - real(place.first), each_part);
  }
  static constexpr int angle_tokens =
      C * pairs > back_threads ? C* pairs / back_threads : 1;  // of a thread
  static_assert(back_threads % pairs == 0);
  static constexpr int others = back_threads - 32;  // threads that have no decays
  __device__ __forceinline__ void begin_angles(int head, uint32_t (&rates)[angle_tokens]);
  __device__ __forceinline__ void tokens(int head, const uint32_t (&rates)[angle_tokens]);
  __device__ __forceinline__ void angles_back(int head, const uint32_t (&rates)[angle_tokens]);
  __device__ __forceinline__ void steps_back(int head);
  __device__ __forceinline__ void decays_back(int head);
  __device__ __forceinline__ void parameters_back(int head);

  enum Barrier { weighed = 1, used = 2, own_group = 3 };  // and one for each group
  const Args& a;
  const UnitBuffers& b;
  const Wave& wave;
  Shared& sh;
  const Place& place;
  const Part& p;
  Ahead<R, blocks> next;
  int group, thread, stage = 0;
  bool needs_y;
  const Upstream up;
};

}  // namespace talea::mamba3::sm90
