// What: what anchors decays and turns at a chunk's end: <Hout, E>, and torque(Hout, E) of each pair.
// Why: of the product of both by columns no more is wanted than what lies by its diagonal: small
//      products of a warp have it at a fifth of the instructions.
// Never: rounds what it sums.
#pragma once

#include "ops/mamba3/sm90/gradients.cuh"

namespace talea::mamba3::sm90 {

// Loads that stay where they are written: ahead of what waits. What is read once leaves the little
// cache beside the shared memory to what is spilled.
__device__ __forceinline__ uint4 load_now(const void* at) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}
__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
__device__ __forceinline__ uint2 load_two_now(const void* at) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(at));
  return x;
}

// From `h` of the chunk on, behind which Hout lies.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::AnchorRows::load(const char* h,
                                                                                      int half) {
  const int thread = formed_anew(static_cast<int>(threadIdx.x & 127));
  const int lane = thread & 31, g = lane / 4;
  const auto* const from = reinterpret_cast<const __nv_bfloat16*>(h) + size +
                           row_of(thread / 32, lane & 3, 0) * columns + 8 * g +
                           half * (halves ? 4 : 64);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const auto* const at = from + ((s & 1) + 8 * (s >> 1)) * columns;
    if constexpr (halves) {
      const uint2 x = load_two_now(at), w = load_two_now(at + 64);
      words[s][0] = x.x, words[s][1] = x.y, words[s][2] = w.x, words[s][3] = w.y;
    } else {
      const uint4 x = load_now(at);
      words[s][0] = x.x, words[s][1] = x.y, words[s][2] = x.z, words[s][3] = x.w;
    }
  }
}

// d [16, 8] = a b, of 16: words as one instruction of a warp has them.
__device__ __forceinline__ void multiply_16_by_8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// <Hout, E>, and torque(Hout, E) of each pair, of half the columns: what two rows of eight pairs
// have with themselves, by products of 16 of P that a warp has. Of its four of P a thread takes
// four columns of either panel, or eight of one, of Hout and of E alike.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::anchor(
    int head, const AnchorRows& behind, int half, float& work) {
  const int thread = own_thread();
  const int lane = thread & 31, warp = thread / 32, g = lane / 4, c = lane & 3;
  const char* const tile = sh.operands[stage(head)].e;
  uint32_t e[4][4];
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int p = AnchorRows::row_of(warp, c, s);
    if constexpr (halves) {
      const uint2 x = *reinterpret_cast<const uint2*>(tile + place_of(p, 8 * g + 4 * half));
      const uint2 w = *reinterpret_cast<const uint2*>(tile + place_of(p, 64 + 8 * g + 4 * half));
      e[s][0] = x.x, e[s][1] = x.y, e[s][2] = w.x, e[s][3] = w.y;
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(tile + place_of(p, 64 * half + 8 * g));
      e[s][0] = x.x, e[s][1] = x.y, e[s][2] = x.z, e[s][3] = x.w;
    }
  }
  const bool own = c == g / 2, odd = g & 1;
  float torque[4], sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // The pair's first and second column, two of P a word.
    const auto pick = [&](const uint32_t(&x)[4][4], int s, bool second) {
      if constexpr (halves) {
        const int word = i / 2 + (second ? 2 : 0);
        return __byte_perm(x[s][word], x[s + 1][word], i & 1 ? 0x7632 : 0x5410);
      } else {
        return __byte_perm(x[s][i], x[s + 1][i], second ? 0x7632 : 0x5410);
      }
    };
    const uint32_t a_words[4] = {pick(behind.words, 0, false), pick(behind.words, 0, true),
                                 pick(behind.words, 2, false), pick(behind.words, 2, true)};
    float by_first[4], by_second[4];
    multiply_16_by_8(by_first, a_words, pick(e, 0, false), pick(e, 2, false));
    multiply_16_by_8(by_second, a_words, pick(e, 0, true), pick(e, 2, true));
    sum += (odd ? by_first[1] : by_first[0]) + (odd ? by_second[3] : by_second[2]);
    torque[i] = (odd ? by_second[1] : by_second[0]) - (odd ? by_first[3] : by_first[2]);
  }
  if (own) work += sum;
  const int pair = halves ? 8 * g + 4 * half : 32 * half + 4 * g;
  if (own && pair < pairs) {
    auto& to = *reinterpret_cast<float4*>(sh.torque[third(head)][warp] + pair);
    if constexpr (slabs > 1) {
      add(head, to.x, torque[0]), add(head, to.y, torque[1]);
      add(head, to.z, torque[2]), add(head, to.w, torque[3]);
    } else {
      to = {torque[0], torque[1], torque[2], torque[3]};
    }
  }
}

}  // namespace talea::mamba3::sm90
