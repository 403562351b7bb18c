// What: the sequences of a call: entries of cu_seqlens, slots of a step; views with all axes.
// Why: every host lane walks the same tokens, and a bad entry is named before any work.
// Never: trusts an entry: what a lane walks lies within [0, S].
#include <algorithm>

#include "core/fail.hpp"
#include "core/half.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/mutants.hpp"

namespace talea::mamba3 {
namespace {

Tensor with_axis(Tensor t, int axis, int full_rank) {
  if (!t || t.rank == full_rank) return t;
  for (int i = t.rank; i > axis; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
  t.shape[axis] = 1;
  t.stride[axis] = 0;
  ++t.rank;
  return t;
}

void spread(States& s) { s.k = with_axis(s.k, 1, 4); }

void report(const Call& c, int64_t bad, int64_t place, int64_t value, int64_t bad_slots) {
  c.result.bad_entries = bad;
  c.result.bad_slots = bad_slots;
  if (!c.out.status) return;
  const int64_t status[4] = {bad, place, value, bad_slots};
  for (int64_t i = 0; i < 4; ++i)
    static_cast<int64_t*>(c.out.status.data)[i * c.out.status.stride[0]] = status[i];
}

void read_slots(const Call& c, int64_t* rows) {
  const Problem& p = c.problem;
  const bool counted = p.options.sequence_check == SequenceCheck::clamp;
  int64_t bad = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    rows[b] = c.slots ? index_at(c.slots, b) : b;
    if (rows[b] >= -1 && rows[b] < p.state_rows) continue;
    require(counted, ErrorKind::invalid_data, "slots: entry {} = {}: the cache has {} rows", b,
            rows[b], p.state_rows);
    rows[b] = -1;
    ++bad;
  }
  for (int64_t b = 0; c.slots && b < p.batch; ++b)
    for (int64_t other = b + 1; rows[b] >= 0 && other < p.batch; ++other)
      require(rows[b] != rows[other], ErrorKind::invalid_data,
              "slots: entries {} and {} both name row {}", b, other, rows[b]);
  report(c, 0, -1, 0, bad);
  c.result.padding_tokens = 0;
}

}  // namespace

FullAxes full_axes(const Problem& p, const Inputs& in, const Outputs& out) {
  FullAxes f{in, out};
  for (Tensor* t : {&f.in.q, &f.in.k, &f.out.d.q, &f.out.d.k}) *t = with_axis(*t, 2, 5);
  for (Tensor* t : {&f.in.q_bias, &f.in.k_bias, &f.out.d.q_bias, &f.out.d.k_bias})
    *t = with_axis(*t, 1, 3);
  if (p.reduce)
    for (Tensor* t : {&f.in.d_out, &f.out.out}) *t = with_axis(*t, 2, 5);
  if (f.in.angles && f.in.angles.shape[2] == 1) f.in.angles.stride[2] = 0;
  if (f.out.d.angles && f.out.d.angles.shape[2] == 1) f.out.d.angles.stride[2] = 0;
  for (States* s :
       {&f.in.initial_states, &f.in.d_final_states, &f.out.final_states, &f.out.d.initial_states})
    spread(*s);
  return f;
}

void read_sequences(const Call& c, int64_t* ends) {
  const Problem& p = c.problem;
  if (p.pass == Pass::step) return read_slots(c, ends);
  if (!p.packed) {
    c.result.padding_tokens = 0;
    return report(c, 0, -1, 0, 0);
  }
  const bool counted = p.options.sequence_check == SequenceCheck::clamp;
  int64_t bad = 0, place = -1, bad_value = 0, before = 0;
  for (int64_t i = 0; i <= p.sequences; ++i) {
    const int64_t value = index_at(c.in.cu_seqlens, i);
    ends[i] = std::clamp(value, before, p.tokens);
    if (ends[i] != value) {
      require(counted, ErrorKind::invalid_data, "cu_seqlens: entry {} = {}: must lie in [{}, {}]",
              i, value, before, p.tokens);
      if (bad++ == 0) place = i, bad_value = value;
    }
    before = ends[i];
  }
  c.result.padding_tokens = p.tokens - (ends[p.sequences] - ends[0]);
  report(c, bad, place, bad_value, 0);
}

Sequence sequence_of(const Problem& p, const int64_t* ends, int64_t n) {
  if (p.pass == Pass::step)
    return {n, 0, 1, ends[n] < 0 || !mutant(ScanMutant::m3_state_of_another_slot) ? ends[n] : n};
  if (p.packed) return {0, ends[n], ends[n + 1], n};
  return {n, 0, p.tokens, n};
}

}  // namespace talea::mamba3
