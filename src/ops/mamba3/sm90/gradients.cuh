// What: the gradients of a chunk, head by head: two warpgroups form operands, one multiplies for the
//       queries, one for the keys.
// Why: scores and dO V^T are weighed where they are multiplied, so no warpgroup waits for another
//      within a head; sums over the heads stay in registers.
// Never: divides by a decay, sums with atomics, or waits for another chunk.
#pragma once

#include "ops/mamba3/sm90/gradients_shared.cuh"

namespace talea::mamba3::sm90 {

// A head is `slabs` units of its values, which follow each other: what they share is formed once,
// what is of the head alone they add up.
template <int R, int blocks, bool halves, int slabs>
class Gradients {
 public:
  using Shared = GradientShared<R, blocks>;
  static constexpr int C = tokens_of<R>, pairs = Shared::pairs, size = columns * values;

  __device__ __forceinline__ Gradients(const Args& args, const UnitBuffers& buffers,
                                       const Wave& at_work, Shared& shared)
      : a(args),
        b(buffers),
        wave(at_work),
        sh(shared),
        place(shared.place),
        n(shared.part.n),
        up(args),
        thread(threadIdx.x & 127) {}

  // Each by a warpgroup of its own. handed: states are, or gradients of them.
  template <bool handed>
  __device__ __forceinline__ void form(bool of_rows);
  template <bool handed>
  __device__ __forceinline__ void multiply(bool of_keys);

  // A warp a tensor.
  template <bool handed>
  static __device__ __forceinline__ void put_homes(const Args& a, const UnitBuffers& b,
                                                   const Wave& wave, Shared& sh);

 private:
  // full and y_known: two, of heads in turn.
  enum Barrier {
    full = 1,
    done = 3,
    heard = 4,
    queries = 5,
    keys = 6,
    rows_own = 7,
    values_own = 8,
    y_known = 9,
    y_read = 11
  };
  static constexpr int angle_tokens = C * pairs / 128;  // of a thread

  // Heads are counted by their units, the first of a head from an even number on.
  static constexpr int slab_bits = slabs / 2;
  static_assert(1 << slab_bits == slabs && slabs <= 2);
  static __device__ __forceinline__ int slab_of(int head) { return head & (slabs - 1); }
  static __device__ __forceinline__ int head_of(int head) { return head >> slab_bits; }
  static __device__ __forceinline__ bool is_first(int head) { return slab_of(head) == 0; }
  static __device__ __forceinline__ bool is_last(int head) { return slab_of(head) == slabs - 1; }
  // What turns are counted from: any even number does for slabs, where R leaves no registers.
  __device__ __forceinline__ int counted(int head) const {
    return slabs > 1 && R > 1 ? head : head - place.first;
  }
  // Of units in turn, and of heads: what their units share.
  __device__ __forceinline__ int stage(int head) const { return counted(head) & 1; }
  __device__ __forceinline__ int shared_stage(int head) const {
    return counted(head) >> slab_bits & 1;
  }
  // Of what one forming warpgroup has of the next head while the other reads that of the one
  // before.
  __device__ __forceinline__ int third(int head) const { return (counted(head) >> slab_bits) % 3; }
  // To what the units before have left, which is this thread's own.
  template <class T>
  static __device__ __forceinline__ void add(int head, T& to, const T& x) {
    if (!is_first(head) && !mutant(ScanMutant::m3_last_slab_alone))
      to += x;
    else
      to = x;
  }
  __device__ __forceinline__ const StepsNear<C>& steps(int head) const {
    return sh.near[shared_stage(head)];
  }
  __device__ __forceinline__ typename Shared::Biases& biases(int head) const {
    if constexpr (R == 1)
      return sh.of_head[shared_stage(head)];
    else
      return sh.only_biases;
  }
  __device__ __forceinline__ StepsLate<C>& late(int head) const { return sh.late[third(head)]; }
  // Where rows of a head begin, and angles.
  static __device__ __forceinline__ int64_t home(int64_t first, const View& v, int head) {
    return angles_home(first, v, head) + slab_of(head) * values;
  }
  static __device__ __forceinline__ int64_t angles_home(int64_t first, const View& v, int head) {
    return first + head_of(head) * v.stride[2];
  }
  __device__ __forceinline__ int64_t d_out_home(int head) const {
    const int64_t first = sh.homes.d_out + head_of(head) * a.d_out.stride[3];
    return slabs > 1 ? first + slab_of(head) * values * a.d_out.stride[4] : first;
  }
  // Of its head.
  __device__ __forceinline__ int64_t number(int head) const {
    return place.sequence * head_of(a.size.heads) + head_of(head);
  }

  // `thread`, of which nothing formed is kept from head to head: itself neither, where a token has
  // more rows, of whose numbers more are wanted.
  __device__ __forceinline__ int own_thread() const {
    if constexpr (R == 1) return formed_anew(thread);
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x & 127;
  }

  // gradients_form.cuh
  template <bool handed, bool forms_rows, bool forms_others>
  __device__ __forceinline__ void form_heads(bool of_rows);
  __device__ __forceinline__ void begin_rows(int head);
  __device__ __forceinline__ void finish_rows(int head);
  __device__ __forceinline__ void begin_values(int head);
  __device__ __forceinline__ void finish_values(int head);
  template <bool projected>
  __device__ __forceinline__ uint4 gated(int head, float (&x)[8], const uint4& z, int r,
                                         int c) const;
  __device__ __forceinline__ void gate_apart(int head);
  // Whether rows of z or of d_out are projected, as one row a token seldom is.
  __device__ __forceinline__ bool projects() const { return a.mimo_z.data || a.mimo_out.data; }
  __device__ __forceinline__ bool needs_y() const {
    return a.grad.mimo_out.data || (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  }
  // Whether d_z alone lies behind y, and its rows are formed where rows of d_out are gated.
  __device__ __forceinline__ bool gates_apart() const {
    return R == 1 && up.pieces && a.z.data && a.grad.z.data && !a.grad.mimo_z.data &&
           !a.grad.mimo_out.data;
  }
  // Eight columns of a row of z.
  __device__ __forceinline__ uint4 z_of(int head, int t, int c) const {
    if (!a.z.data || t >= n) return {0, 0, 0, 0};
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.z.data) +
                                                home(sh.homes.z, a.z, head) + t * a.z.stride[1] +
                                                c));
  }
  // What a thread has of four rows of Hout, of half the columns.
  struct AnchorRows {
    uint32_t words[4][4];
    // Rows of a quad's lanes that meet no bank twice.
    static __device__ __forceinline__ int row_of(int warp, int c, int s) {
      return 16 * warp + 2 * c + (s & 1) + 8 * (s >> 1);
    }
    __device__ __forceinline__ void load(const char* h, int half);
  };
  __device__ __forceinline__ void anchor(int head, const AnchorRows& behind, int half, float& work);
  // gradients_tokens.cuh
  __device__ __forceinline__ void read_rates(int head);
  template <bool handed, bool whole>
  __device__ __forceinline__ void angles_back(int head);
  __device__ __forceinline__ void steps_back(int head);
  __device__ __forceinline__ void decays_back(int head);

  // gradients_rows.cuh
  // Which pairs of a thread's accumulator, by bit, are of a query and an earlier key, or of one
  // token: the same of every head.
  struct Seen {
    uint32_t apart = 0, alike = 0;
    __device__ __forceinline__ explicit Seen(bool of_keys) {
#pragma unroll 1
      for (int at = 0; at < 32; ++at) {
        const int own = own_row() + (at & 2) * 4, other = own_column() + at / 4 * 8 + (at & 1);
        apart |= static_cast<uint32_t>(of_keys ? other > own : other < own) << at;
        alike |= static_cast<uint32_t>(other == own) << at;
      }
    }
  };
  __device__ __forceinline__ void weigh(int head, bool of_keys, const Seen& sees,
                                        const float (&scores)[32], const float (&products)[32],
                                        uint32_t (&seen)[4][4], uint32_t (&weights)[4][4],
                                        float (&near)[2], float (&behind)[2], float& trace);
  // gradients_ranks.cuh
  __device__ __forceinline__ void weigh_ranks(int head, bool of_keys, const float (&scores)[32],
                                              const float (&products)[32], uint32_t (&seen)[4][4],
                                              uint32_t (&weights)[4][4], float (&near)[2],
                                              float (&behind)[2], float& trace);
  template <bool handed>
  __device__ __forceinline__ void rows_back(int head, bool of_keys, float (&g)[64],
                                            float (&sums)[64]);
  template <bool of_keys>
  __device__ __forceinline__ void store_rows(const float (&sums)[64]);
  // gradients_values.cuh
  template <bool handed>
  __device__ __forceinline__ void values_back(int head, float (&dv)[32]);
  // gradients_gates.cuh
  static constexpr int of_y = 128 * (1 + Shared::gating);  // threads that hand y on or gate it
  template <int count, class Known, class Y>
  __device__ __forceinline__ void gates_of(int head, int from, float* sums, int own_barrier,
                                           Known known, Y y);
  template <int count, bool plain, bool projects, class Y>
  __device__ __forceinline__ void gates(int head, int from, float* sums, int own_barrier, Y y,
                                        const uint32_t (&g)[2 * count],
                                        const uint32_t (&z)[2 * count]);
  __device__ __forceinline__ void hand_on(int head, const float (&y)[32]);
  __device__ __forceinline__ void gate_half(int head, bool of_rows);
  __device__ __forceinline__ void gates_back(int head);
  template <bool projected>
  __device__ __forceinline__ void gate_back(int head, const char* y_at, const char* v_at,
                                            float skip, const uint4& z, const uint4& up_here,
                                            bool live, int64_t to);
  // `count` of them over the warps, each to where its row and column lie.
  __device__ __forceinline__ void store_alike(const float* sums, int count, int width,
                                              float* to) const {
    for (int i = thread; i < count; i += 128) {
      const int slot = i / (4 * R);
      to[i / 4 % R * width + slot / 2 * 8 + (slot & 1) + i % 4 * 2] = sum_alike<R>(sums, i);
    }
  }
  template <int count>
  static __device__ __forceinline__ void scale_rows(float (&d)[count], const float* by) {
    const float first = by[own_row() / R], second = by[(own_row() + 8) / R];
#pragma unroll
    for (int j = 0; j < count; ++j) d[j] *= j / 2 % 2 ? second : first;
  }

  const Args& a;
  const UnitBuffers& b;
  const Wave& wave;
  Shared& sh;
  const Place& place;
  const int n;  // tokens
  const Upstream up;
  const int thread;
  float rates_[angle_tokens];  // rate_of the thread's angles
};

}  // namespace talea::mamba3::sm90
