// What: pairs of rows weighed where a token has more than one.
// Why: neighbouring columns are of one token: a decay is formed once for both, and tokens are so few
//      that each has its own.
// Never: multiplies what a query does not see.
#pragma once

#include "ops/mamba3/sm90/gradients.cuh"

namespace talea::mamba3::sm90 {

// As Gradients::weigh: `near` of all pairs of one token, `trace` of a row's own.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::weigh_ranks(
    int head, bool of_keys, const float (&scores)[32], const float (&products)[32],
    uint32_t (&seen)[4][4], uint32_t (&weights)[4][4], float (&near)[2], float (&behind)[2],
    float& trace) {
  static_assert(R > 1);
  const auto& of = steps(head);
  const int row = own_row(), column = own_column(), warp = thread / 32, lane = thread & 31;
  const int t[2] = {row / R, (row + 8) / R};
  const float4 own[2] = {of.pair[t[0]], of.pair[t[1]]};
  const float sign = of_keys ? -log2_of_e : log2_of_e;  // a query's decay less a key's
  const bool has_own = lane / 8 == lane % 4, own_is_odd = lane & 4;
  near[0] = near[1] = behind[0] = behind[1] = trace = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t x[2] = {0, 0}, w[2] = {0, 0};
    if (of_keys ? j / 2 >= warp : j / 2 <= warp) {  // nothing of later keys
      const int other = (column + 8 * j) / R;
      const float4 far = of.pair[other];
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int at = 4 * j + 2 * second;
        const float2 from = {own[second].x - far.x, own[second].y - far.y};
        const bool apart = of_keys ? other > t[second] : other < t[second];
        const bool later = column + 8 * j > row + 8 * second;
        const bool masked = later && mutant(ScanMutant::m3_rows_of_a_token_masked);
        const bool alike = other == t[second] && !masked;
        // Of later keys it may be infinite: chosen, not multiplied.
        const float whole = hopper::exp2_fast((from.x + from.y) * sign);
        const float decay = apart ? whole : 0.0f;
        const float by = alike ? far.w : decay * (of_keys ? own[second].z : far.z);
        const float both = fmaf(products[at + 1], scores[at + 1], products[at] * scores[at]);
        behind[second] = fmaf(decay, both, behind[second]);
        near[second] += alike ? both : 0.0f;
        x[second] = two_rounded(by * scores[at], by * scores[at + 1]);
        w[second] = two_rounded(by * products[at], by * products[at + 1]);
      }
      if (j / 2 == warp && has_own) {
        const int at = 4 * j + 2 * (j & 1);
        trace += own_is_odd ? products[at + 1] : products[at];
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      seen[j / 2][(j & 1) * 2 + second] = x[second];
      weights[j / 2][(j & 1) * 2 + second] = w[second];
    }
  }
}

}  // namespace talea::mamba3::sm90
