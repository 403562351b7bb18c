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

  __device__ __forceinline__ Backward(const Args& args, const Cut& of, const UnitBuffers& buffers,
                                      const Wave& at_work, Shared& shared)
      : a(args),
        b(buffers),
        wave(at_work),
        sh(shared),
        place(shared.place),
        p(shared.part),
        up(args),
        cut(of) {
    group = warpgroup();
    thread = threadIdx.x & 127;
    needs_y = a.grad.mimo_out.data || (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }

  // All heads, of a part of N. units: heads are cut; handed: states are, or gradients of them.
  template <bool units, bool handed>
  __device__ __forceinline__ void run(int part) {
    const auto first = [&] { return place.first + (part << cut.slab_bits); };
    if (group == 1 || group == 2) {
      float4* const sums = group == 1 ? sh.sums_q : sh.sums_k;
#pragma unroll 1
      for (int i = 0; i < 16; ++i) sums[i * 128 + thread] = {0, 0, 0, 0};
    }
    put_homes<handed>();
    __syncthreads();
    begin_rows(first());
    begin(first());
    begin_state(first());
#pragma unroll 1
    for (int head = first(); head < place.last; head = behind(head)) {
      stage = stage_of(head);
      prepare<units>(head);
      weigh_pairs();
      if (group == 0)
        pairs_and_values<handed>(head);
      else if (group < 3)
        rows_of_group<handed>(head);
      else
        gates(head);
      const bool more = behind(head) < place.last;
      if (more && group < 3) {
        hopper::named_barrier_sync(own_group + group, 128);
        begin_rows(behind(head));
      }
      uint32_t rates[angle_tokens];
      begin_angles(head, rates);
      __syncthreads();
      if (more)
        begin(behind(head));
      else
        next = {};  // nothing of it is live behind the loop
      tokens<handed>(head, rates);
      if (more) begin_state(behind(head));
    }
    if (group == 1) store_rows(part, a.grad.q, b.dq, sh.sums_q);
    if (group == 2) store_rows(part, a.grad.k, b.dk, sh.sums_k);
  }

 private:
  // Heads are counted by their units. The one that follows, of the same part of N; and its place
  // among two.
  __device__ __forceinline__ int behind(int head) const {
    const int next = head + 1;
    return cut.part_bits > 0 && cut.slab_of(next) == 0 ? next + (1 << cut.slab_bits) : next;
  }
  __device__ __forceinline__ int stage_of(int head) const {
    return (cut.slab_bits > 0 ? head : head >> cut.part_bits) & 1;
  }
  __device__ __forceinline__ Unit unit(int head) const {
    Unit u = sh.unit;
    u.head = cut.head_of(head);
    return u;
  }
  __device__ __forceinline__ const ChunkSteps<C>& steps() const { return sh.steps[stage]; }
  // Where rows of a head begin.
  __device__ __forceinline__ int64_t home(int64_t first, const View& v, int head) const {
    return first + cut.head_of(head) * v.stride[2] + first_value(cut, head);
  }
  __device__ __forceinline__ int64_t angles_home(int64_t first, const View& v, int head) const {
    return first + cut.head_of(head) * v.stride[2] +
           cut.first_pair(cut.part_of(head)) * v.stride[3];
  }
  __device__ __forceinline__ int64_t d_out_home(int head) const {
    return sh.homes.d_out + cut.head_of(head) * a.d_out.stride[3] +
           first_value(cut, head) * a.d_out.stride[4];
  }
  __device__ __forceinline__ int64_t number(int head) const {
    return place.sequence * a.size.heads + head;
  }

  // backward_prepare.cuh
  template <bool handed>
  __device__ __forceinline__ void put_homes();
  // bits: slabs that share it.
  __device__ __forceinline__ OfHeads of_heads(const void* buffer, int64_t each, int64_t at,
                                              int64_t bytes, int bits = 0);
  __device__ __forceinline__ void begin_rows(int head);
  __device__ __forceinline__ void begin(int head);
  __device__ __forceinline__ void copy_turns(int head);
  __device__ __forceinline__ void begin_state(int head);
  template <bool units>
  __device__ __forceinline__ void prepare(int head);
  __device__ __forceinline__ void anchor();
  __device__ __forceinline__ void turn_rows();

  // backward_pairs.cuh
  template <bool handed>
  __device__ __forceinline__ void pairs_and_values(int head);
  __device__ __forceinline__ void weigh_pairs();
  template <bool handed>
  __device__ __forceinline__ void values_back(int head, const float (&dv)[32],
                                              const uint32_t (&v)[16]);
  template <int count>
  static __device__ __forceinline__ void scale_rows(float (&d)[count], const float* by);

  // backward_units.cuh
  __device__ __forceinline__ float d_d_of(int head, const float (&d_y)[8]) const;
  __device__ __forceinline__ void put_d_d(float sum) const;
  // What parts of N add up to, of y (0) or of the gradient of values (1); false: there are more.
  __device__ __forceinline__ bool sum_of_parts(int head, int which, float (&x)[32]) const;
  // Number i of what the units of a head add up to, or the slabs of a part of it, to its place.
  __device__ __forceinline__ void put_of_units(int head, int i, const View& to, int64_t at, float x,
                                               bool of_part = false) const;

  // backward_gates.cuh
  __device__ __forceinline__ void gates(int head);
  template <bool plain>  // g holds d_out
  __device__ __forceinline__ void gates_of(int head, const float (&y)[32], const uint32_t (&g)[16],
                                           const uint32_t (&z)[16]);

  // backward_rows.cuh
  template <bool handed>
  __device__ __forceinline__ void rows_of_group(int head);
  template <bool handed>
  __device__ __forceinline__ void rows_back(int head, float (&g)[64]);
  __device__ __forceinline__ void store_rows(int part, const View& to, float* by_part,
                                             const float4* sums);

  // backward_tokens.cuh
  static constexpr int angle_tokens =
      C * pairs > back_threads ? C* pairs / back_threads : 1;  // of a thread
  static_assert(back_threads % pairs == 0);
  static constexpr int others = back_threads - 32;  // threads that have no decays
  __device__ __forceinline__ void begin_angles(int head, uint32_t (&rates)[angle_tokens]);
  template <bool handed>
  __device__ __forceinline__ void tokens(int head, const uint32_t (&rates)[angle_tokens]);
  template <bool handed>
  __device__ __forceinline__ void angles_back(int head, const uint32_t (&rates)[angle_tokens]);
  __device__ __forceinline__ void steps_back(int head);
  __device__ __forceinline__ void decays_back(int head);
  __device__ __forceinline__ float d_d() const;
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
  const Cut& cut;
};

}  // namespace talea::mamba3::sm90
