// What: products of e4m3 of lane sm90's index scores, activated and weighed in registers.
// Why: tensor cores multiply e4m3 twice as fast as 16 bits, but keep 13 binary places of a sum.
// Never: adds products of more than 32 columns in a tensor core.
//
// Thirty-two columns are a product of their own, and the four of them are added in fp32: two while
// the others are on their way.
#pragma once

#include "device/sm90/wgmma_e4m3.cuh"
#include "ops/sparse_attention/sm90/index_scores.cuh"

namespace talea::sparse_attention::sm90::index {

// Products of thirty-two columns each: of a tile of keys, which lies in registers as the left
// factor, with a slice of the rows of q. `half`: the first or the last two of them.
struct Products {
  static constexpr int slice = 64, slices = index_rows / slice;
  float d[4][slice / 2];
  uint32_t keys[4][4];

  __device__ void load_keys(const Tiles& tiles, int stage) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const char* from = tiles.keys(stage, 0) + row * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::load_matrix_x4(keys[i], from + ((2 * i + lane / 16) ^ (row % 8)) * 16);
  }
  __device__ void begin(uint64_t q, int part, int half) {
    ptx::warpgroup_arrive();
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i)
      ptx::wgmma_first_n64_e4m3(d[i], keys[i], q + (part * slice * 128 >> 4) + 2 * i);
    ptx::warpgroup_commit();
  }
  // Those are there; kOthers: what was begun after them goes on.
  template <bool kOthers>
  __device__ void wait(int half) {
    ptx::warpgroup_wait<kOthers ? 1 : 0>();
    ptx::hold_registers(d[2 * half]);
    ptx::hold_registers(d[2 * half + 1]);
  }
};

// Of a key and of that 8 behind, read ahead of their products. 1 where more heads come.
struct KeyScales {
  const float* at = nullptr;
  int64_t stride = 0;
  __device__ KeyScales(const IndexScores& f, int64_t key) {
    const View& v = f.tables.k_scale;
    if (!f.last || !v.present) return;
    at = static_cast<const float*>(v.data) + cuda::offset(v, f.b, key);
    stride = v.stride[1];
  }
  __device__ void read(int64_t left, float (&scale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[r] = at && 8 * r < left ? at[8 * r * stride] : 1.0f;
  }
  __device__ void advance(int keys) {
    if (at) at += keys * stride;
  }
};

// Columns that are no heads are zero, and so are their products: e4m3 has no infinity, and a key
// that is NaN makes the products of those that are heads NaN, too.
template <int kHeads>
__device__ void consume_e4m3(const IndexScores& f, const Tiles& tiles, int group, int64_t s,
                             int64_t begin, int64_t end) {
  constexpr int queries = index_rows / kHeads, slice = Products::slice;
  IndexBeside& beside = tiles.beside();
  const int lane = threadIdx.x % 32;
  Writer writer(f, s + group * queries, begin);
  KeyScales scales(f, begin + writer.row);
  const auto* weights = reinterpret_cast<const float4*>(beside.weights[group]) + lane % 4;
  const uint64_t q = ptx::operand_descriptor(tiles.q(group, 0));
  const float floor = f.floor;
  int stage = 0;
  uint32_t phase = 0;
  for (int64_t key = begin; key < end; key += index_keys) {
    float scale[2];
    scales.read(end - key - writer.row, scale);
    Products products;
    ptx::barrier_wait(&beside.full[stage], phase);
    products.load_keys(tiles, stage);
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&beside.empty[stage]);
    products.begin(q, 0, 0);
    products.begin(q, 0, 1);
    float sum[queries][2] = {};
#pragma unroll
    for (int part = 0; part < Products::slices; ++part) {
      const bool last = part + 1 == Products::slices;
      float z[slice / 2];
      products.wait<true>(0);
#pragma unroll
      for (int i = 0; i < slice / 2; ++i) z[i] = products.d[0][i] + products.d[1][i];
      if (!last) products.begin(q, part + 1, 0);
      last ? products.wait<false>(1) : products.wait<true>(1);
#pragma unroll
      for (int i = 0; i < slice / 2; ++i) z[i] += products.d[2][i] + products.d[3][i];
      if (!last) products.begin(q, part + 1, 1);
#pragma unroll
      for (int n = 0; n < slice / 8; n += 2) {
        const float4 w = weights[part * slice / 4 + n * 2];
        const float of[4] = {w.x, w.y, w.z, w.w};
        const int query = (part * slice + n * 8) / kHeads;
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            sum[query][r] =
                fmaf(of[x], activated(z[4 * (n + x / 2) + 2 * r + x % 2], floor), sum[query][r]);
      }
    }
    writer.put(sum, end - key, scale);
    writer.advance(index_keys);
    scales.advance(index_keys);
    if (++stage == index_stages) stage = 0, phase ^= 1;
  }
}

}  // namespace talea::sparse_attention::sm90::index
