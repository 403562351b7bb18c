// What: a block of threads as the scan's text sees it: loops, sums, prefixes, products of operands.
// Why: the text of a chunk says what is computed; which thread and which instruction stands here.
// Never: sums in an order that depends on anything but sizes.
#pragma once

#include "device/common/reduce.cuh"
#include "ops/mamba3/rows/numbers.hpp"

namespace talea::mamba3::cuda {

struct DeviceWarp {
  int lane;
  __device__ bool leads() const { return lane == 0; }
  template <class F>
  __device__ __forceinline__ void each(int n, F f) {
    TALEA_ROLLED
    for (int i = lane; i < n; i += 32) f(i);
  }
  template <class F>
  __device__ __forceinline__ float sum(int n, F f) {
    float all = 0;
    TALEA_ROLLED
    for (int i = lane; i < n; i += 32) all += f(i);
    return device::warp_reduce(all, device::Sum{});
  }
};

// Fragments of operands and the instruction that multiplies them: 16 rows, 16 columns, `depth`.
template <class T, int products>
struct Tensor16;

__device__ __forceinline__ uint32_t tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// One product of tf32, or three: what rounding to tf32 leaves of each operand is multiplied, too,
// and each sum of eight joins the others in fp32, which tensor cores round towards zero.
template <int products>
struct Tensor16<float, products> {
  static constexpr int depth = 8;
  struct Part {
    uint32_t top[4], rest[4];
  };
  __device__ __forceinline__ static void split(float x, uint32_t& top, uint32_t& rest) {
    top = tf32(x);
    rest = products > 1 ? tf32(x - __uint_as_float(top)) : 0;
  }
  template <bool across>
  __device__ __forceinline__ static float element(const Operand<float, across>& x, int i, int k) {
    return across ? x.data[k * x.stride + i] : x.data[i * x.stride + k];
  }
  template <bool across>
  __device__ __forceinline__ static void load_left(const Operand<float, across>& x, int row, int k,
                                                   int lane, Part& p) {
    const int i = row + lane / 4, at = k + lane % 4;
    split(element(x, i, at), p.top[0], p.rest[0]);
    split(element(x, i + 8, at), p.top[1], p.rest[1]);
    split(element(x, i, at + 4), p.top[2], p.rest[2]);
    split(element(x, i + 8, at + 4), p.top[3], p.rest[3]);
  }
  template <bool across>
  __device__ __forceinline__ static void load_right(const Operand<float, across>& x, int column,
                                                    int k, int lane, Part& p) {
    const int j = column + lane / 4, at = k + lane % 4;
    split(element(x, j, at), p.top[0], p.rest[0]);
    split(element(x, j, at + 4), p.top[1], p.rest[1]);
    split(element(x, j + 8, at), p.top[2], p.rest[2]);
    split(element(x, j + 8, at + 4), p.top[3], p.rest[3]);
  }
  __device__ __forceinline__ static void multiply(const Part& a, const Part& b, float (&d)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t top[2] = {b.top[2 * half], b.top[2 * half + 1]};
      if constexpr (products == 1) {
        multiply_tf32(d[half], a.top, top);
      } else {
        const uint32_t rest[2] = {b.rest[2 * half], b.rest[2 * half + 1]};
        float some[4] = {0, 0, 0, 0};
        multiply_tf32(some, a.rest, top);
        multiply_tf32(some, a.top, rest);
        multiply_tf32(some, a.top, top);
#pragma unroll
        for (int i = 0; i < 4; ++i) d[half][i] += some[i];
      }
    }
  }
};

template <>
struct Tensor16<Bf16, 1> {
  static constexpr int depth = 16;
  struct Part {
    uint32_t bits[4];
  };
  template <bool transposed>
  __device__ __forceinline__ static void load(const Bf16* from, Part& p) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(from));
    if constexpr (transposed)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(p.bits[0]), "=r"(p.bits[1]), "=r"(p.bits[2]), "=r"(p.bits[3])
                   : "r"(address)
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(p.bits[0]), "=r"(p.bits[1]), "=r"(p.bits[2]), "=r"(p.bits[3])
                   : "r"(address)
                   : "memory");
  }
  template <bool across>
  __device__ __forceinline__ static void load_left(const Operand<Bf16, across>& x, int row, int k,
                                                   int lane, Part& p) {
    if constexpr (across) {
      const int at = k + lane % 8 + lane / 16 * 8, i = row + lane / 8 % 2 * 8;
      load<true>(x.data + at * x.stride + i, p);
    } else {
      const int i = row + lane % 16, at = k + lane / 16 * 8;
      load<false>(x.data + i * x.stride + at, p);
    }
  }
  template <bool across>
  __device__ __forceinline__ static void load_right(const Operand<Bf16, across>& x, int column,
                                                    int k, int lane, Part& p) {
    if constexpr (across) {
      const int at = k + lane % 8 + lane / 8 % 2 * 8, j = column + lane / 16 * 8;
      load<true>(x.data + at * x.stride + j, p);
    } else {
      const int j = column + lane % 8 + lane / 16 * 8, at = k + lane / 8 % 2 * 8;
      load<false>(x.data + j * x.stride + at, p);
    }
  }
  __device__ __forceinline__ static void multiply(const Part& a, const Part& b, float (&d)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[half][0]), "+f"(d[half][1]), "+f"(d[half][2]), "+f"(d[half][3])
          : "r"(a.bits[0]), "r"(a.bits[1]), "r"(a.bits[2]), "r"(a.bits[3]), "r"(b.bits[2 * half]),
            "r"(b.bits[2 * half + 1]));
  }
};

template <class T, int products>
struct DeviceTeam {
  using Unit16 = Tensor16<T, products>;
  static constexpr int pairs = 2;  // of 8 columns each: a warp's tile is 16 x 32

  double* shared_sums;  // [32]

  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ int warps() const { return blockDim.x / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ void sync() { __syncthreads(); }

  template <class N, class F>
  __device__ __forceinline__ void each(N n, F f) {
    TALEA_ROLLED
    for (N i = static_cast<N>(threadIdx.x); i < n; i += static_cast<N>(blockDim.x)) f(i);
  }
  template <class F>
  __device__ __forceinline__ void each_warp(int n, F f) {
    DeviceWarp own{lane()};
    TALEA_ROLLED
    for (int i = warp(); i < n; i += warps()) f(i, own);
  }

  // f(row, column): a warp a row.
  template <class F>
  __device__ __forceinline__ void grid(int rows, int columns, F f) {
    TALEA_ROLLED
    for (int i = warp(); i < rows; i += warps()) TALEA_ROLLED
    for (int j = lane(); j < columns; j += 32) f(i, j);
  }
  // use(row, column, load(row, column)): the loads of some rows are under way at a time.
  template <int together = 2, class Load, class Use>
  __device__ __forceinline__ void grid(int rows, int columns, Load load, Use use) {
    using Loaded = decltype(load(0, 0));
    TALEA_ROLLED
    for (int j = lane(); j < columns; j += 32) TALEA_ROLLED
    for (int i = warp(); i < rows; i += together * warps()) {
      Loaded some[together];
#pragma unroll
      for (int x = 0; x < together; ++x) some[x] = load(min(i + x * warps(), rows - 1), j);
#pragma unroll
      for (int x = 0; x < together; ++x)
        if (i + x * warps() < rows) use(i + x * warps(), j, some[x]);
    }
  }

  // Tiles of a matrix that each warp holds in registers.
  template <int count>
  struct Kept {
    float tiles[count > 0 ? count : 1][pairs][2][4];
  };
  template <int count, class F>
  __device__ __forceinline__ void each_kept(Kept<count>& kept, int rows, int columns, F f) {
    const int down = rows / 16, across = (columns + 31) / 32;
#pragma unroll
    for (int x = 0; x < count; ++x) {
      const int tile = warp() + x * warps();
      if (tile < down * across)
        each_element(tile % down * 16, tile / down * 32, columns, kept.tiles[x], f);
    }
  }
  template <int count, class A, class B>
  __device__ __forceinline__ void add_kept(Kept<count>& kept, int rows, Span columns, Span depth,
                                           A a, B b) {
    const int down = rows / 16, across = (columns.depth + 31) / 32;
#pragma unroll
    for (int x = 0; x < count; ++x) {
      const int tile = warp() + x * warps();
      if (tile < down * across)
        multiply(a, b, tile % down * 16, tile / down * 32, columns.depth, depth, kept.tiles[x]);
    }
  }

  // put(i, get(0) + .. + get(i)); one warp.
  template <class Get, class Put>
  __device__ __forceinline__ void prefix(int n, Get get, Put put) {
    if (warp() != 0) return;
    const int each = (n + 31) / 32, first = lane() * each;
    double own = 0;
    TALEA_ROLLED
    for (int i = first; i < first + each && i < n; ++i) own += get(i);
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(device::whole_warp, own, step);
      if (lane() >= step) own += before;
    }
    double sum = __shfl_up_sync(device::whole_warp, own, 1);
    if (lane() == 0) sum = 0;
    TALEA_ROLLED
    for (int i = first; i < first + each && i < n; ++i) put(i, sum += get(i));
  }

  // Of all threads; every thread gets it.
  __device__ __forceinline__ double sum(double own) {
    return device::block_reduce(own, device::Sum{}, shared_sums);
  }

  template <class A, class B>
  __device__ __forceinline__ void multiply(const A& a, const B& b, int row, int column, int limit,
                                           Span depth, float (&sums)[pairs][2][4]) {
    const int end = depth.end(row);
#pragma unroll 2
    for (int k = depth.begin(row); k < end; k += Unit16::depth) {
      typename Unit16::Part left, right;
      Unit16::load_left(a, row, k, lane(), left);
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        if (column + 16 * i >= limit) break;
        Unit16::load_right(b, column + 16 * i, k, lane(), right);
        Unit16::multiply(left, right, sums[i]);
      }
    }
  }

  // f(row, column, sum) of each element of the warp's tile.
  template <class F>
  __device__ __forceinline__ void each_element(int row, int column, int limit,
                                               float (&sums)[pairs][2][4], F f) {
    const int i = row + lane() / 4, j = column + lane() % 4 * 2;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      if (column + 16 * pair >= limit) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&x)[4] = sums[pair][half];
        const int at = j + 16 * pair + 8 * half;
        f(i, at, x[0]), f(i, at + 1, x[1]), f(i + 8, at, x[2]), f(i + 8, at + 1, x[3]);
      }
    }
  }

  // f(row, column, limit) of each tile of this warp.
  template <class F>
  __device__ __forceinline__ void each_tile(int rows, Span columns, F f) {
    const int down = rows / 16, across = (columns.depth + 31) / 32;
    TALEA_ROLLED
    for (int tile = warp(); tile < down * across; tile += warps()) {
      const int row = tile % down * 16, column = tile / down * 32, limit = columns.end(row);
      if (column < limit) f(row, column, limit);
    }
  }

  // done(i, j, init(i, j) + (a b)_ij)
  template <class A, class B, class Init, class Done>
  __device__ __forceinline__ void product(int rows, Span columns, Span depth, A a, B b, Init init,
                                          Done done) {
    each_tile(rows, columns, [&](int row, int column, int limit) {
      float sums[pairs][2][4];
      each_element(row, column, limit, sums, [&](int i, int j, float& x) { x = init(i, j); });
      multiply(a, b, row, column, limit, depth, sums);
      each_element(row, column, limit, sums, [&](int i, int j, float& x) { done(i, j, x); });
    });
  }

  // done(i, j, middle(i, j, (a b)_ij) + (c d)_ij)
  template <class A, class B, class Middle, class C, class D, class Done>
  __device__ __forceinline__ void product(int rows, Span columns, Span depth, A a, B b,
                                          Middle middle, Span depth2, C c, D d, Done done) {
    each_tile(rows, columns, [&](int row, int column, int limit) {
      float sums[pairs][2][4];
      each_element(row, column, limit, sums, [&](int, int, float& x) { x = 0; });
      multiply(a, b, row, column, limit, depth, sums);
      each_element(row, column, limit, sums, [&](int i, int j, float& x) { x = middle(i, j, x); });
      multiply(c, d, row, column, limit, depth2, sums);
      each_element(row, column, limit, sums, [&](int i, int j, float& x) { done(i, j, x); });
    });
  }
};

}  // namespace talea::mamba3::cuda
