// What: sparse attention's call of mpi_calls.hpp.
// Why: its cases bear the names of the loss's.
// Never: judges a value.
#include "dist/mpi_calls.hpp"
#include "ops/sparse_attention/rank_calls.hpp"

namespace talea::testing {

void call_attention(Communicator& c, Bad bad) {
  const Case whole = rank_case(3);  // with foreign indices, absent to a call that is not checked
  const Shares h = shares(whole.heads(), c.size(), false);
  const auto r = static_cast<size_t>(c.rank());
  const int64_t first = h.begin[r], n = h.count[r];
  Whole w(whole);
  Grid dkv(DType::f32, {2, 31, 1, whole.dim()});
  RankCall call;
  call.options = whole.options;
  call.options.lane = "cpu";
  if (bad == Bad::data) call.options.index_check = sa::IndexCheck::checked;
  if (bad == Bad::option) call.options.scale = 0.25;
  call.in = inputs_of(whole);
  for (Tensor* t : {&call.in.q, &call.in.d_o, &call.in.d_lse}) *t = slice(*t, 2, first, n);
  call.in.sink = slice(call.in.sink, 0, first, n);
  call.out.o = slice(w.o.tensor(), 2, first, n);
  call.out.lse = slice(w.lse.tensor(), 2, first, n);
  call.grad.dq = slice(w.dq.tensor(), 2, first, n);
  call.grad.d_sink = slice(w.d_sink.tensor(), 0, first, n);
  call.grad.dkv = dkv.tensor();
  call.ranks.heads = &c;
  call.ranks.head_begin = first;
  call.run();
}

}  // namespace talea::testing
