// What: the gradients of a chunk, head by head: a warpgroup multiplies for the queries, one for the
//       keys; both form what they multiply.
// Why: two blocks a multiprocessor, which wait for nothing of each other, hide each other's waits;
//      dO V^T is weighed where it is multiplied.
// Never: divides by a decay, sums with atomics whose order is not a thread's own, or waits for
//        another chunk.
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
        up(args),
        of_keys(warpgroup() == 1),
        thread(threadIdx.x & 127) {}

  __device__ __forceinline__ void run() {
    put_homes();
    __syncthreads();
    begin_state(place.first);
    begin(place.first);
    const bool shared_angles = a.angles.stride[2] == 0;
    if (shared_angles) read_rates(place.first);
#pragma unroll
    for (float& x : angles_) x = 0;
#pragma unroll 1
    for (int head = place.first; head < place.last; ++head) {
      copies_done();
      __syncthreads();
      if (head > place.first && threadIdx.x < C) steps_back(head - 1);
      form(head);
      hopper::fence_async_shared();
      __syncthreads();
      multiply(head);
      __syncthreads();
      if (head + 1 < place.last) begin(head + 1);
      if (!shared_angles) read_rates(head);
      tokens(head);
    }
    __syncthreads();
    if (threadIdx.x < C) steps_back(place.last - 1);
    store_angles();
  }

 private:
  __device__ __forceinline__ const ChunkSteps<C>& steps(int head) const {
    return sh.steps[head & 1];
  }
  // Where rows of a head begin.
  static __device__ __forceinline__ int64_t home(int64_t first, const View& v, int head) {
    return first + head * v.stride[2];
  }
  __device__ __forceinline__ int64_t d_out_home(int head) const {
    return sh.homes.d_out + head * a.d_out.stride[3];
  }
  __device__ __forceinline__ int64_t number(int head) const {
    return place.sequence * a.size.heads + head;
  }

  // backward_form.cuh
  __device__ __forceinline__ void put_homes();
  __device__ __forceinline__ void begin(int head);
  __device__ __forceinline__ void begin_state(int head);
  __device__ __forceinline__ void form(int head);
  __device__ __forceinline__ void turn_rows();
  __device__ __forceinline__ void load_values(int head);
  __device__ __forceinline__ void form_values(int head);
  __device__ __forceinline__ void form_tables(int head);
  // A thread's rows of q or k, of which the first of two is even, and its pieces of them.
  __device__ __forceinline__ int first_row() const {
    const int i = thread >> 3;
    return (i >> 1) * 8 + ((thread >> 2) & 1) * 4 + (i & 1) * 2;
  }
  static __device__ __forceinline__ int piece_column(int piece) {
    return halves ? 8 * piece : 16 * piece;
  }
  static constexpr int second_piece = halves ? 64 : 8;  // columns behind the first

  // backward_pairs.cuh
  __device__ __forceinline__ void multiply(int head);
  __device__ __forceinline__ void weigh(int head, const float (&scores)[32],
                                        const float (&products)[32], uint32_t (&seen)[4][4],
                                        uint32_t (&weights)[4][4], float (&behind)[2]);
  __device__ __forceinline__ void put_alike(float* sums, int slot, float (&x)[8 / R]);
  template <int count>
  static __device__ __forceinline__ void scale_rows(float (&d)[count], const float* by);

  // Rows of a head of v or z in an output, from `column` on; the first at `first` for head 0.
  __device__ __forceinline__ OutRows out_rows(const View& to, int64_t first, int head,
                                              int column) const {
    OutRows x;
    x.rounds = to.dtype == DType::bf16;
    char* const at =
        static_cast<char*>(to.data) + (home(first, to, head) + column) * (x.rounds ? 2 : 4);
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int t = (own_row() + 8 * second) / R;
      x.live[second] = t < p.n;
      x.at[second] = at + t * to.stride[1] * (x.rounds ? 2 : 4);
    }
    return x;
  }
  // Where a thread reads rows of v, z or d_out, of the first token where it has none.
  __device__ __forceinline__ const __nv_bfloat16* in_row(const View& from, int64_t at,
                                                         int second) const {
    const int t = (own_row() + 8 * second) / R;
    return static_cast<const __nv_bfloat16*>(from.data) + at + (t < p.n ? t : 0) * from.stride[1];
  }

  // backward_values.cuh
  __device__ __forceinline__ void values_back(int head, const float (&dv)[32]);
  // backward_gates.cuh
  template <bool plain>  // neighbours of d_out are one load
  __device__ __forceinline__ void gates_of(int head, const float (&y)[32]);
  // backward_rows.cuh
  __device__ __forceinline__ void rows_back(int head, float (&g)[64]);
  // backward_tokens.cuh
  static constexpr int angle_tokens = C * pairs / back_threads;  // of a thread
  static_assert(angle_tokens >= 1 && back_threads % pairs == 0);
  __device__ __forceinline__ void read_rates(int head);
  __device__ __forceinline__ void tokens(int head);
  __device__ __forceinline__ void angles_back(int head);
  __device__ __forceinline__ void store_angles();
  __device__ __forceinline__ void steps_back(int head);
  __device__ __forceinline__ void decays_back(int head);
  __device__ __forceinline__ void parameters_back(int head);

  enum Barrier { own = 1, queries_through = 3, keys_through = 4 };  // own: and one for the keys
  __device__ __forceinline__ void sync_own() {
    hopper::named_barrier_sync(own + (of_keys ? 1 : 0), 128);
  }
  const Args& a;
  const UnitBuffers& b;
  const Wave& wave;
  Shared& sh;
  const Place& place;
  const Part& p;
  const Upstream up;
  const bool of_keys;
  const int thread;
  // A piece of some tokens of v, z and d_out, of keys.
  static constexpr int own_tokens = C / 16;
  uint4 v_[own_tokens], z_[own_tokens], up_[own_tokens];
  float rates_[angle_tokens], angles_[angle_tokens];  // tanh of angles; d_angles over the heads
};

}  // namespace talea::mamba3::sm90
