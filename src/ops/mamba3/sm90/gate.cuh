// What: rows of d_out through the gate: dO of a row of the scan.
// Why: the chain of E and the gradients of a chunk read them alike.
// Never: rounds before the product.
#pragma once

#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {

// Neighbours of d_out, zeros where there is none.
struct Upstream {
  const View& v;
  bool pairs = false;   // two are one aligned load of bf16
  bool pieces = false;  // eight are
  __device__ __forceinline__ explicit Upstream(const Args& a) : v(a.d_out) {
    const bool plain = v.data && v.dtype == DType::bf16 && v.stride[4] == 1;
    int64_t low = 0;
    for (int i = 0; i < 4; ++i) low |= v.stride[i];
    const auto address = reinterpret_cast<uintptr_t>(v.data);
    pairs = plain && low % 2 == 0 && address % 4 == 0;
    pieces = plain && low % 8 == 0 && address % 16 == 0;
  }
  __device__ __forceinline__ float2 two(int64_t at) const {
    if (!v.data) return {0, 0};
    return {cuda::read(v, at), cuda::read(v, at + v.stride[4])};
  }
  __device__ __forceinline__ uint32_t both(int64_t at) const {
    return __ldg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(v.data) + at));
  }
};

// Eight columns of a row: item = row * 8 + piece. What is loaded stays as it lies in memory until
// it is gated, so that nothing waits for it.
template <int R>
struct GatedRow {
  uint4 up = {}, z = {};

  // The chunk's first rows lie at `home` and at `z_home`.
  __device__ __forceinline__ void load(const Args& a, const Upstream& from, int64_t home,
                                       int64_t z_home, const Part& p, int item) {
    up = z = {0, 0, 0, 0};
    if (token_of(item) >= p.n) return;
    if (from.pieces)
      up = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.d_out.data) +
                                                home + place_in(a, item)));
    if (a.z.data)
      z = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.z.data) +
                                               z_home + token_of(item) * a.z.stride[1] +
                                               column_of(item)));
  }
  // dO times `by`, rounded. home(): of the chunk's first row, where a row is not one load;
  // before(dO): as it is.
  template <class Home, class Before>
  __device__ __forceinline__ uint4 gated(const Args& a, const Upstream& from, const Part& p,
                                         int item, const float* mimo_z, const float* mimo_out,
                                         float by, Home home, Before before) const {
    if (token_of(item) >= p.n) return {0, 0, 0, 0};
    const uint32_t words[4] = {z.x, z.y, z.z, z.w}, ups[4] = {up.x, up.y, up.z, up.w};
    const bool has_gate = a.z.data != nullptr;
    float x[8], outs[8], zs[8];
    const int r = item / 8 % R, c = column_of(item);
    take_projection(mimo_out, r, c, outs), take_projection(mimo_z, r, c, zs);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i & 1 ? high_of(ups[i / 2]) : low_of(ups[i / 2]);
    if (!from.pieces && a.d_out.data) {
      const int64_t at = home() + place_in(a, item);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = cuda::read(a.d_out, at + i * a.d_out.stride[4]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] *= outs[i];
      if (has_gate) {
        const float w = (i & 1 ? high_of(words[i / 2]) : low_of(words[i / 2])) * zs[i];
        x[i] *= w * gate_sigmoid(w);
      }
    }
    before(x);
    return {two_rounded(by * x[0], by * x[1]), two_rounded(by * x[2], by * x[3]),
            two_rounded(by * x[4], by * x[5]), two_rounded(by * x[6], by * x[7])};
  }

 private:
  static __device__ __forceinline__ int token_of(int item) { return item / (8 * R); }
  static __device__ __forceinline__ int column_of(int item) { return item % 8 * 8; }
  static __device__ __forceinline__ int64_t place_in(const Args& a, int item) {
    return token_of(item) * a.d_out.stride[1] +
           (a.size.reduce ? 0 : item / 8 % R * a.d_out.stride[2]) +
           column_of(item) * a.d_out.stride[4];
  }
};

}  // namespace talea::mamba3::sm90
