// What: the warpgroup of the backward pass that adds up dkv of a tile, or stores P and dS of it.
// Why: what leaves the chip for dkv does so while the other warpgroup forms the next P and dS.
// Never: forms a weight.
#pragma once

#include "device/sm90/wgmma_half.cuh"
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
  static constexpr int lent = lent_chunks(kAdds, kFirst + kSecond);

  __device__ void begin_work(const Work&) {}
  __device__ void measure(const Work&, int count) {
    for (int tile = 0; tile < count; ++tile, ++tiles_done) {
      ptx::named_barrier_sync(keys_measured, consumer_threads);
      this->release_all_keys();
      this->arrive_warp(&beside.weights_free);  // a phase a tile, as everywhere
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

  // Begins dkv of half a chunk of columns.
  template <int kHalf>
  __device__ void begin_half(float (&x)[16]) const {
    constexpr int c = kHalf / 2;
    constexpr uint64_t at = c * Base::chunk + kHalf % 2 * 4;
    const uint64_t ds = ptx::operand_descriptor(tiles.slopes());
    const uint64_t weights = ptx::operand_descriptor(tiles.weights());
    const uint64_t q = ptx::operand_descriptor(tiles.queries()) + at;
    ptx::warpgroup_arrive();
    ptx::multiply_half<false, kF16>(x, ds, q);
#pragma unroll
    for (int j = 1; j < 4; ++j)
      ptx::multiply_half<true, kF16>(x, ds + j * Base::step, q + j * Base::step);
    if constexpr (c < BackwardTiles<kFirst, kSecond>::values) {
      const uint64_t d_o = ptx::operand_descriptor(tiles.upstream()) + at;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ptx::multiply_half<true, kF16>(x, weights + j * Base::step, d_o + j * Base::step);
    }
    ptx::warpgroup_commit();
  }
  // Half kHalf is on its way in x; `next` is free. Products of one half run while another leaves.
  template <int kHalf>
  __device__ void give_halves(const Lines& lines, float (&x)[16], float (&next)[16]) {
    constexpr int first = 2 * lent, last = 2 * (kFirst + kSecond) - 1;
    if constexpr (kHalf < last) begin_half<kHalf + 1>(next);
    if constexpr (kHalf == first) this->begin_dq(nullptr);
    ptx::warpgroup_wait<(kHalf == first ? thirds : 0) + (kHalf < last ? 1 : 0)>();
    ptx::hold_registers(x);
    if constexpr (kHalf == last) this->arrive_warp(&beside.weights_free);
    give_line<false, kF16, true>(lines, x, (kHalf - first) * 32, p.grown, chunk_columns);
    if constexpr (kHalf == first) this->template end_dq<0>();
    if constexpr (kHalf < last) give_halves<kHalf + 1>(lines, next, x);
  }

  // Whether all slots are valid and all columns the problem's: of a tile as most are.
  __device__ bool is_whole() const {
    return *const_cast<volatile uint64_t*>(&beside.valid[tiles_done % 2]) == ~uint64_t{0} &&
           p.f.dim == (kFirst + kSecond) * chunk_columns;
  }

  // dq is formed while the first columns of dkv leave.
  __device__ void add_tile() {
    Lines lines = this->lines_of(lent);
    if constexpr (kFirst + kSecond > 5) {
      if (is_whole()) {
        float x[16], y[16];
        begin_half<2 * lent>(x);
        return give_halves<2 * lent>(lines, x, y);
      }
    }
    const int last = chunks_of_columns(p.f.dim) - 1;
    float x[32];
    this->begin_dkv(x, lent);
    this->begin_dq(nullptr);
    ptx::warpgroup_wait<thirds>();
    ptx::hold_registers(x);
    this->add_dkv(lines, x, lent);
    this->template end_dq<0>();
    if (last == lent) this->arrive_warp(&beside.weights_free);
#pragma unroll 1
    for (int c = lent + 1; c <= last; ++c) {
      this->begin_dkv(x, c);
      ptx::warpgroup_wait<0>();
      ptx::hold_registers(x);
      if (c == last) this->arrive_warp(&beside.weights_free);
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
    this->arrive_warp(&beside.weights_free);
  }
};

}  // namespace talea::sparse_attention::sm90
