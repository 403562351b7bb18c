// What: the warpgroup of the backward pass that adds up dkv of a tile, or stores P and dS of it.
// Why: what leaves the chip for dkv does so while the other warpgroup forms the next P and dS.
// Never: forms a weight.
#pragma once

#include "ops/sparse_attention/sm90/backward_consume.cuh"

namespace talea::sparse_attention::sm90 {

template <int kFirst, int kSecond, bool kF16, bool kAdds>
struct BackwardSums : BackwardConsumer<kFirst, kSecond, kF16, kAdds, 1> {
  using Base = BackwardConsumer<kFirst, kSecond, kF16, kAdds, 1>;
  using Base::beside;
  using Base::p;
  using Base::thread;
  using Base::tiles;
  using Base::tiles_done;

  __device__ void begin_work(const Work&) {}
  __device__ void measure(const Work&, int count) {
    for (int tile = 0; tile < count; ++tile, ++tiles_done) {
      ptx::named_barrier_sync(keys_measured, consumer_threads);
      this->release_all_keys();
      arrive_warp(&beside.weights_free);  // a phase a tile, as everywhere
    }
  }

  __device__ void one_tile(int64_t number, int tile) {
#pragma unroll
    for (int third = 0; third < thirds; ++third) this->wait_keys(part_number<kAdds>(1, third));
    ptx::named_barrier_sync(weights_written, consumer_threads);
    if constexpr (kAdds)
      add_tile();
    else
      store_tile(number, tile);
  }

  // dq is formed while the first chunk of dkv leaves.
  __device__ void add_tile() {
    constexpr int lent = lent_chunks(kAdds, kFirst + kSecond);
    const int last = chunks_of_columns(p.f.dim) - 1;
    Lines lines = this->lines_of(lent);
    float x[32];
    this->begin_dkv(x, lent);
    this->begin_dq(nullptr);
    ptx::warpgroup_wait<thirds>();
    ptx::hold_registers(x);
    this->add_dkv(lines, x, lent);
    this->template end_dq<0>();
    if (last == lent) arrive_warp(&beside.weights_free);
#pragma unroll 1
    for (int c = lent + 1; c <= last; ++c) {
      this->begin_dkv(x, c);
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(x);
      if (c == last) arrive_warp(&beside.weights_free);
      this->add_dkv(lines, x, c);
    }
  }

  __device__ void store_tile(int64_t number, int tile) {
    const bool stores = thread == 0 && p.wants_dkv;
    if (stores) {
      ptx::store_bytes(p.weights + weights_at(p, number, tile), tiles.weights(), weights_bytes);
      ptx::store_commit();
    }
    this->begin_dq(nullptr);
    this->template end_dq<0>();
    if (stores) ptx::store_wait_read<0>();
    arrive_warp(&beside.weights_free);
  }
};

}  // namespace talea::sparse_attention::sm90
