// What: d_dt and d_trap of a token, from what its chunk and the key behind it have left.
// Why: the first token of a chunk waits for the chunk before, the others do not.
// Never: reads what a chunk still writes.
#pragma once

#include "ops/mamba3/rows/chunk.hpp"

namespace talea::mamba3::sm90 {

// put(view, place, number)
template <class Put>
__device__ __forceinline__ void put_token(const cuda::Args& a, const cuda::Unit& u,
                                          const cuda::Pending& x, int64_t token, double db,
                                          Put put) {
  const cuda::GradientViews& d = a.grad;
  if (d.dt.data)
    put(d.dt, cuda::at(d.dt, u.batch, u.head, u.begin + token),
        static_cast<float>(x.ddt + static_cast<double>(x.other) * db));
  if (d.trap.data)
    put(d.trap, cuda::at(d.trap, u.batch, u.head, u.begin + token),
        static_cast<float>(static_cast<double>(x.lambda) * static_cast<double>(x.other) *
                           static_cast<double>(x.dt) * (x.dgamma - db)));
}
__device__ __forceinline__ void store_token(const cuda::Args& a, const cuda::Unit& u,
                                            const cuda::Pending& x, int64_t token, double db) {
  put_token(a, u, x, token, db,
            [](const cuda::View& to, int64_t at, float own) { cuda::store(to, at, own); });
}

}  // namespace talea::mamba3::sm90
