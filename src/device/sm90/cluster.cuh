// What: stores into the shared memory of other blocks of a cluster, counted by their barriers.
// Why: two blocks that need the same tile form half of it each, or load half.
// Never: waits.
#pragma once

#include "device/sm90/ptx.cuh"

namespace talea::sm90 {

// The address in block `rank` of the cluster that is `address` in this one's shared memory.
__device__ __forceinline__ uint32_t address_at(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// `to` and `barrier` are addresses of address_at, in one block; `from` lies in this one.
__device__ __forceinline__ void send_bytes(uint32_t to, uint32_t from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_word_async(uint32_t to, uint32_t x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(x), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_words_async(uint32_t to, const uint4& x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
      : "memory");
}

// `bytes` bytes in a row, both sides aligned to 16, land at the same shared address in every block
// named by `mask`, and count for the barrier there.
__device__ __forceinline__ void load_bytes_multicast(const void* from, uint64_t* barrier, void* to,
                                                     uint32_t bytes, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier)), "h"(mask)
      : "memory");
}

}  // namespace talea::sm90
