// What: what lies beside the chunks of heads: sequences, padding, sums over heads, parameters.
// Why: one thread an element, in a fixed order; the same text runs on a host in a test.
// Never: sums with atomics; an order is a function of the problem alone.
#pragma once

#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/rows/numbers.hpp"

namespace talea::mamba3::cuda {

// What reads the entries of cu_seqlens or the slots of a step.
struct Sequences {
  View cu_seqlens, slots, status;
  int64_t* ends = nullptr;  // [n + 1]; a step: [B] rows, -1 for none
  int64_t* kept = nullptr;  // [n + 1] checkpoints before each
  PackRounds pack;
};

TALEA_SCAN void put_status(const View& v, int64_t bad, int64_t place, int64_t value,
                           int64_t bad_slots) {
  auto* status = static_cast<int64_t*>(v.data);
  if (!status) return;
  const int64_t each = v.stride[0];
  status[0] = bad, status[each] = place, status[2 * each] = value, status[3 * each] = bad_slots;
}

// One thread takes the sequences in turn: a round is full where what comes next of a sequence has
// no room, and a sequence is cut where a quarter of a round would stay empty otherwise. So a round
// that is not the last has as many chunks as `least_chunks` says, or all its stretches.
class RoundMaker {
 public:
  TALEA_SCAN explicit RoundMaker(const PackRounds& pack) : pack_(pack) {
    if (pack.rounds) pack.rounds[0] = {};
  }
  TALEA_SCAN void add(int64_t sequence, int64_t begin, int64_t tokens, uint32_t chunks) {
    if (!pack_.rounds) return;
    pack_.before[sequence] = chunk_;
    const auto all = static_cast<int32_t>(chunks);
    for (int32_t first = 0; first < all;) {
      const int32_t room = pack_.room - fill_, left = all - first;
      const bool fits = left <= room;
      if (fits && abreast_ < pack_.abreast) {
        put(sequence, begin, tokens, first, left);
        return;
      }
      const int32_t cut = fits || pack_.every == 1 ? room : room / pack_.every * pack_.every;
      if (abreast_ == pack_.abreast || cut == 0 || (fill_ > 0 && 4 * room <= pack_.room)) {
        const bool again = mutant(ScanMutant::m3_round_of_the_count_before);
        pack_.rounds[++round_] = last();
        if (again) pack_.rounds[round_].chunk -= fill_;
        fill_ = abreast_ = 0;
        continue;
      }
      put(sequence, begin, tokens, first, cut);
      first += cut, ++cuts_;
    }
  }
  // How many rounds there are; those behind them are empty.
  TALEA_SCAN int32_t end(int64_t sequences) {
    if (!pack_.rounds) return 0;
    pack_.before[sequences] = chunk_;
    return round_ + (fill_ > 0 ? 1 : 0);
  }
  TALEA_SCAN Round last() const { return {chunk_, stretch_, cuts_ - 1}; }

 private:
  TALEA_SCAN void put(int64_t sequence, int64_t begin, int64_t tokens, int32_t first,
                      int32_t count) {
    pack_.stretches[stretch_++] = {
        static_cast<int32_t>(sequence), first,  count, chunk_, static_cast<int32_t>(begin),
        static_cast<int32_t>(tokens),   round_, 0};
    chunk_ += count, fill_ += count, ++abreast_;
  }
  const PackRounds& pack_;
  int32_t round_ = 0, stretch_ = 0, chunk_ = 0, cuts_ = 0, fill_ = 0, abreast_ = 0;
};
// Chunks of a round that is not the last, where it has not all its stretches.
TALEA_SCAN int64_t least_chunks(int64_t room, int64_t every) {
  const int64_t cut = room - every + 1, full = room - room / 4;
  return cut < full ? cut : full;
}

// Lane `lane` of `lanes` that share stretch i: its chunks, and its place by length in its round.
TALEA_SCAN void put_stretch(const PackRounds& p, int64_t i, int lane, int lanes) {
  const Stretch x = p.stretches[i];
  for (int32_t j = lane; j < x.count; j += lanes)
    p.chunks[x.number + j] = {x.sequence, x.first + j, x.begin, x.tokens};
}
TALEA_SCAN int32_t longer_before(const PackRounds& p, int64_t i, int lane, int lanes) {
  const Stretch x = p.stretches[i];
  const int32_t first = p.rounds[x.round].stretch, end = p.rounds[x.round + 1].stretch;
  int32_t longer = 0;
  for (int32_t j = first + lane; j < end; j += lanes) {
    const int32_t other = p.stretches[j].count;
    longer += other > x.count || (other == x.count && j < i) ? 1 : 0;
  }
  return longer;
}

// Cut to [entry before, S]; what was cut is counted.
template <class Team>
TALEA_SCAN void read_entries(Team& team, const Sizes& s, const Sequences& q) {
  const auto* from = static_cast<const int32_t*>(q.cu_seqlens.data);
  team.each(s.sequences + 1, [&](int64_t i) { q.ends[i] = from[i * q.cu_seqlens.stride[0]]; });
  team.sync();
  const auto C = static_cast<uint32_t>(s.chunk), J = static_cast<uint32_t>(s.kept_every);
  team.each(1, [&](int64_t) {
    int64_t before = 0, bad = 0, place = -1, value = 0, kept = 0;
    RoundMaker pack(q.pack);
    for (int64_t first = 0; first <= s.sequences; first += 16) {
      int64_t some[16];
      for (int j = 0; j < 16; ++j) some[j] = first + j <= s.sequences ? q.ends[first + j] : 0;
      for (int j = 0; j < 16 && first + j <= s.sequences; ++j) {
        int64_t end = some[j] < before ? before : some[j];
        end = end > s.tokens ? s.tokens : end;
        if (end != some[j] && bad++ == 0) place = first + j, value = some[j];
        if (first + j > 0) {
          const uint32_t chunks = (static_cast<uint32_t>(end - before) + C - 1) / C;
          kept += (chunks + J - 1) / J;
          pack.add(first + j - 1, before, end - before, chunks);
        }
        q.ends[first + j] = end;
        if (q.kept) q.kept[first + j] = kept;
        before = end;
      }
    }
    put_status(q.status, bad, place, value, 0);
    const int32_t rounds = pack.end(s.sequences);
    for (int64_t i = rounds; q.pack.rounds && i <= q.pack.most_rounds; ++i)
      q.pack.rounds[i] = pack.last();
  });
  team.sync();
}

// A row beyond the cache, or one that an earlier entry names, is no row and counted.
template <class Team>
TALEA_SCAN void read_slots(Team& team, const Sizes& s, const Sequences& q) {
  const auto* from = static_cast<const int32_t*>(q.slots.data);
  const int64_t stride = q.slots.stride[0];
  double own = 0;
  team.each(s.batch, [&](int64_t i) {
    const int64_t row = from ? from[i * stride] : i;
    bool wrong = row < -1 || row >= s.state_rows;
    for (int64_t j = 0; from && row >= 0 && j < i; ++j) wrong = wrong || from[j * stride] == row;
    q.ends[i] = wrong ? -1 : row;
    own += wrong ? 1 : 0;
  });
  const double bad = team.sum(own);
  team.each(1, [&](int64_t) { put_status(q.status, 0, -1, 0, static_cast<int64_t>(bad)); });
  team.sync();
}

TALEA_SCAN void clear_tokens(const View& v, int64_t batch, int64_t token, const int64_t* shape,
                             int64_t at) {
  if (!v.data) return;
  int64_t count = shape[0] * shape[1] * shape[2], place = batch * v.stride[0] + token * v.stride[1];
  if (at >= count) return;
  for (int axis = 2; axis >= 0; --axis) {
    place += at % shape[axis] * v.stride[2 + axis];
    at /= shape[axis];
  }
  store(v, place, 0.0f);
}

template <class Team>
TALEA_SCAN void read_sequences(Team& team, const Sizes& s, const Sequences& q) {
  if (s.step) return read_slots(team, s, q);
  if (s.packed) return read_entries(team, s, q);
  team.each(1, [&](int64_t) { put_status(q.status, 0, -1, 0, 0); });
}

// Elements of a token that belongs to no sequence become 0; item: of `clear_items`.
TALEA_SCAN int64_t clear_width(const Sizes& s) {
  int64_t width = int64_t{s.rank} * s.groups * s.columns;
  const int64_t values = int64_t{s.rank} * s.heads * s.values, pairs = int64_t{s.heads} * s.pairs;
  width = width > values ? width : values;
  width = width > pairs ? width : pairs;
  return width > s.heads ? width : s.heads;
}
TALEA_SCAN bool is_padding(const Args& a, int64_t batch, int64_t token) {
  if (a.size.step) return a.ends[batch] < 0;
  return token < a.ends[0] || token >= a.ends[a.size.sequences];
}
TALEA_SCAN void clear_token(const Args& a, int64_t batch, int64_t token, int64_t at) {
  const Sizes& s = a.size;
  const GradientViews& d = a.grad;
  const int64_t rows[3] = {s.rank, s.groups, s.columns};
  const int64_t out[3] = {s.reduce ? 1 : s.rank, s.heads, s.values};
  const int64_t values[3] = {s.heads, s.values, 1},
                pairs[3] = {s.sum_angles ? 1 : s.heads, s.pairs, 1};
  clear_tokens(a.out, batch, token, out, at);
  clear_tokens(d.q, batch, token, rows, at);
  clear_tokens(d.k, batch, token, rows, at);
  clear_tokens(d.v, batch, token, values, at);
  clear_tokens(d.z, batch, token, values, at);
  clear_tokens(d.angles, batch, token, pairs, at);
  if (at >= s.heads) return;
  if (d.adt.data) store(d.adt, cuda::at(d.adt, batch, at, token), 0.0f);
  if (d.dt.data) store(d.dt, cuda::at(d.dt, batch, at, token), 0.0f);
  if (d.trap.data) store(d.trap, cuda::at(d.trap, batch, at, token), 0.0f);
}

// A token of the slice: its number within its sequence, or -1. place: as Backward::row_of.
struct SliceToken {
  int64_t batch = 0, token = -1;
};
TALEA_SCAN SliceToken slice_token(const Args& a, const Wave& w, int64_t place) {
  const Sizes& s = a.size;
  const int64_t in_slice = place % (w.slice_chunks * s.chunk);
  if (a.pack.rounds) {
    const Round* const now = a.pack.rounds + w.segment;
    const int64_t number = now[0].chunk + in_slice / s.chunk;
    if (number >= now[1].chunk) return {};
    const PackedChunk x = a.pack.chunks[number];
    const int64_t token = int64_t{x.chunk} * s.chunk + in_slice % s.chunk;
    if (token >= x.tokens) return {};
    return {0, x.begin + token};
  }
  const int64_t sequence = w.first + place / (w.slice_chunks * s.chunk);
  if (w.slice + in_slice / s.chunk >= s.segment) return {};  // of the next segment
  const int64_t token = (w.segment * s.segment + w.slice) * s.chunk + in_slice;
  const int64_t begin = s.packed ? a.ends[sequence] : 0;
  const int64_t tokens = s.packed ? a.ends[sequence + 1] - begin : s.tokens;
  if (token >= tokens) return {};
  return {s.packed ? 0 : sequence, begin + token};
}

// Column c of row r of group g: the sum over its heads, biases taken before.
TALEA_SCAN void sum_heads(const Args& a, const Wave& w, const View& to, const float* from,
                          int64_t place, int r, int g, int c) {
  const Sizes& s = a.size;
  const SliceToken token = slice_token(a, w, place);
  if (token.token < 0) return;
  int first = g * s.heads_per_group - s.head_offset, last = first + s.heads_per_group;
  first = first < 0 ? 0 : first;
  last = last < s.heads ? last : s.heads;
  const float* row = from + (place * s.rank + r) * s.heads * s.columns + c;
  float sum = 0;
  for (int h = first; h < last; ++h) sum += row[int64_t{h} * s.columns];
  store(to, cuda::at(to, token.batch, token.token, r, g, c), sum);
}

TALEA_SCAN void sum_angles(const Args& a, const Wave& w, const float* from, int64_t place, int i) {
  const Sizes& s = a.size;
  const SliceToken token = slice_token(a, w, place);
  if (token.token < 0) return;
  const float* row = from + place * s.heads * s.pairs + i;
  float sum = 0;
  const int heads = mutant(Mutant::m3_shared_angles_not_summed) ? 1 : s.heads;
  for (int h = 0; h < heads; ++h) sum += row[int64_t{h} * s.pairs];
  store(a.grad.angles, cuda::at(a.grad.angles, token.batch, token.token, 0, i), sum);
}

// Element i of the parameters of a head, over the sequences of the wave, from the last on.
TALEA_SCAN void add_parameters(const Args& a, const Wave& w, const double* from, double* totals,
                               int head, int i) {
  const int count = parameter_count(a.size);
  double sum = totals[int64_t{head} * count + i];
  for (int64_t n = w.last - w.first; n-- > 0;) sum += from[(n * a.size.heads + head) * count + i];
  totals[int64_t{head} * count + i] = sum;
}

TALEA_SCAN void add_or_store(const Args& a, const View& v, int64_t place, double x) {
  if (!v.data) return;
  if (a.size.accumulate) x += static_cast<double>(load(v, place));
  store(v, place, static_cast<float>(x));
}
TALEA_SCAN void store_parameter(const Args& a, const double* totals, int h, int i) {
  const Sizes& s = a.size;
  const GradientViews& d = a.grad;
  const double x = totals[int64_t{h} * parameter_count(s) + i];
  const int rn = s.rank * s.columns, rp = s.rank * s.values;
  if (i < 2 * rn) {
    const View& v = i < rn ? d.q_bias : d.k_bias;
    return add_or_store(a, v, cuda::at(v, h, i % rn / s.columns, i % s.columns), x);
  }
  i -= 2 * rn;
  if (i < 3 * rp) {
    const View& v = i < rp ? d.mimo_v : i < 2 * rp ? d.mimo_z : d.mimo_out;
    return add_or_store(a, v, cuda::at(v, h, i % rp / s.values, i % s.values), x);
  }
  i -= 3 * rp;
  if (i < s.values) return add_or_store(a, d.norm_weight, cuda::at(d.norm_weight, h, i), x);
  add_or_store(a, d.d, cuda::at(d.d, h), x);
}

}  // namespace talea::mamba3::cuda
