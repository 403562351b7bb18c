// What: branches, barriers, shuffles, votes, and what does nothing here.
#include <ctime>

#include "interp.hpp"

namespace emu {

void block_frag(Warp& w) {
  --w.pc;
  w.stop = Stop::frag_blocked;
}
bool whole_warp(Warp& w) {
  if (w.active == w.live) return true;
  block_frag(w);
  return false;
}
bool lanes_here(Warp& w, u32 members) {
  if ((members & w.live & ~w.active) == 0) return true;
  block_frag(w);
  return false;
}

void bar_check(Block& b, u32 id) {
  BarState& s = b.bars[id];
  if (s.arrived == 0) return;
  const u32 expected = s.expected ? s.expected : b.live_warps * 32;
  if (s.arrived < expected) return;
  if (s.arrived > expected) fail("bar " + std::to_string(id) + ": " + std::to_string(s.arrived) + " threads arrived, " + std::to_string(expected) + " expected");
  b.red_result[id] = s.count | (s.all ? 1u << 30 : 0) | (s.any ? 1u << 31 : 0);
  for (Warp* w : s.waiting) w->wait = 0, w->resume = true, ++w->m->progress;
  s = BarState{};
}
void cluster_check(Cluster& c) {
  if (c.live_warps == 0 || c.arrived == 0) return;
  u32 live_arrived = 0, live = 0;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps)
      if (w.live) ++live, live_arrived += w.cluster_arrived;
  if (live_arrived < live) return;
  ++c.phase;
  c.arrived = 0;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps) {
      w.cluster_arrived = false;
      if (w.live) ++w.m->progress;
      if (w.wait == 2) w.wait = 0, w.resume = true;
    }
}
void exit_lanes(Warp& w, u32 lanes) {
  w.live &= ~lanes;
  ++w.m->progress;
  for (Frag& f : w.others) f.blocked = 0;
  if (w.live) return;
  if (!w.wgmmas.empty() ) run_wgmmas(w, ~0ull);
  run_copies(w, w.copies.size());
  while (!w.stores.empty()) run_stores(w, 0);
  --w.block->live_warps;
  --w.block->cluster->live_warps;
  for (u32 k = 0; k < 16; ++k)
    if (w.block->bars[k].arrived && !w.block->bars[k].expected) bar_check(*w.block, k);
  cluster_check(*w.block->cluster);
}

namespace {

void bra(Warp& w, const Inst& in) {
  const u32 taken = w.mask, stays = w.active & ~taken;
  if (!stays) {
    w.pc = in.target;
    return;
  }
  w.others.push_back({w.pc, stays, 0});
  w.active = taken;
  w.pc = in.target;
  w.stop = Stop::diverged;
}
// brx.idx: a index, list targets
void brx(Warp& w, const Inst& in) {
  const u32* a = src<u32>(w, in.a);
  std::map<u32, u32> to;
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    if (a[i] >= in.list->size()) fail("brx.idx: index out of bounds");
    to[static_cast<u32>((*in.list)[a[i]])] |= 1u << i;
  }
  const u32 stays = w.active & ~w.mask;
  if (stays) w.others.push_back({w.pc, stays, 0});
  bool first = true;
  for (auto [pc, mask] : to) {
    if (first)
      w.pc = pc, w.active = mask, first = false;
    else
      w.others.push_back({pc, mask, 0});
  }
  if (!w.others.empty()) w.stop = Stop::diverged;
}
void do_exit(Warp& w, const Inst&) {
  const u32 gone = w.mask;
  w.active &= ~gone;
  exit_lanes(w, gone);
  w.stop = Stop::exited;
}
void trap(Warp&, const Inst&) { fail("trap"); }
void nothing(Warp&, const Inst&) {}
void yield(Warp& w, const Inst&) { w.stop = Stop::yield; }

// a: id, b: threads (n: given); x: 0 sync, 1 arrive, 2 red; y: popc, and, or; c: predicate; d: result
void bar(Warp& w, const Inst& in) {
  if (w.resume) {
    w.resume = false;
    if (in.x == 2) {
      const u32 id = src<u32>(w, in.a)[__builtin_ctz(w.active)];
      const u32 r = w.block->red_result[id];
      if (in.y == 0) {
        u32* d = dst<u32>(w, in.d);
        EMU_EACH(w, i, d[i] = r & 0xffffff);
      } else {
        set_pred(w, in.d, (in.y == 1 ? (r >> 30) & 1 : r >> 31) ? ~0u : 0);
      }
    }
    return;
  }
  if (!whole_warp(w)) return;
  const int first = __builtin_ctz(w.active);
  const u32 id = src<u32>(w, in.a)[first];
  if (id > 15) fail("bar: barrier " + std::to_string(id));
  const u32 threads = in.n ? src<u32>(w, in.b)[first] : 0;
  if (threads % 32) fail("bar: " + std::to_string(threads) + " threads");
  BarState& s = w.block->bars[id];
  if (s.arrived && s.expected != threads && !(s.expected == 0 && threads == w.block->threads) && !(threads == 0 && s.expected == w.block->threads))
    fail("bar " + std::to_string(id) + ": thread counts differ (" + std::to_string(s.expected) + ", " + std::to_string(threads) + ")");
  s.expected = threads;
  s.arrived += 32;
  ++w.m->progress;
  if (in.x == 2) {
    const u32 p = pred(w, in.c) & w.mask;
    s.count += static_cast<u32>(__builtin_popcount(p));
    s.all = s.all && p == w.mask;
    s.any = s.any || p;
  }
  if (in.x != 1) {
    s.waiting.push_back(&w);
    w.wait = 1;
    w.bar_id = id;
    --w.pc;
    w.stop = Stop::warp_waits;
  }
  bar_check(*w.block, id);
}
void cluster_arrive(Warp& w, const Inst&) {
  if (!whole_warp(w)) return;
  if (w.cluster_arrived) fail("barrier.cluster.arrive twice without a wait");
  Cluster& c = *w.block->cluster;
  w.cluster_arrived = true;
  w.cluster_ticket = c.phase;
  ++c.arrived;
  ++w.m->progress;
  cluster_check(c);
}
void cluster_wait(Warp& w, const Inst&) {
  if (w.resume) {
    w.resume = false;
    return;
  }
  if (!whole_warp(w)) return;
  if (w.block->cluster->phase > w.cluster_ticket) return;
  w.wait = 2;
  --w.pc;
  w.stop = Stop::warp_waits;
}
void bar_warp(Warp& w, const Inst& in) {
  const u32 members = src<u32>(w, in.a)[__builtin_ctz(w.mask)];
  lanes_here(w, members);
}
void whole(Warp& w, const Inst&) { whole_warp(w); }

// d, e: predicate or 0; a, b: lane, c: clamp, f: members; x: 0 up 1 down 2 bfly 3 idx
void shfl(Warp& w, const Inst& in) {
  const int first = __builtin_ctz(w.mask);
  if (!lanes_here(w, src<u32>(w, in.f)[first])) return;
  u32 a[32];
  memcpy(a, src<u32>(w, in.a), 128);
  const u32 *b = src<u32>(w, in.b), *c = src<u32>(w, in.c);
  u32* d = dst<u32>(w, in.d);
  u32 inside = 0, result[32];
  for (u32 r = w.mask; r; r &= r - 1) {
    const u32 i = static_cast<u32>(__builtin_ctz(r));
    const u32 bv = b[i] & 31, cv = c[i] & 31, seg = (c[i] >> 8) & 31;
    const u32 most = (i & seg) | (cv & ~seg), least = i & seg;
    s32 j;
    bool p;
    switch (in.x) {
      case 0: j = static_cast<s32>(i) - static_cast<s32>(bv), p = j >= static_cast<s32>(most); break;
      case 1: j = static_cast<s32>(i + bv), p = j <= static_cast<s32>(most); break;
      case 2: j = static_cast<s32>(i ^ bv), p = j <= static_cast<s32>(most); break;
      default: j = static_cast<s32>(least | (bv & ~seg)), p = j <= static_cast<s32>(most);
    }
    if (!p) j = static_cast<s32>(i);
    if (!((w.active >> j) & 1)) result[i] = 0xffffffffu;  // undefined: a lane that is not here
    else result[i] = a[j];
    if (p) inside |= 1u << i;
  }
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    d[i] = result[i];
  }
  if (in.e) set_pred(w, in.e, inside);
}
// x: 0 ballot 1 any 2 all 3 uni; a: predicate, b: members
void vote(Warp& w, const Inst& in) {
  const u32 members = src<u32>(w, in.b)[__builtin_ctz(w.mask)];
  if (!lanes_here(w, members)) return;
  const u32 here = members & w.active & w.mask, p = pred(w, in.a) & here;
  if (in.x == 0) {
    u32* d = dst<u32>(w, in.d);
    EMU_EACH(w, i, d[i] = p);
    return;
  }
  const bool r = in.x == 1 ? p != 0 : in.x == 2 ? p == here : p == here || p == 0;
  set_pred(w, in.d, r ? ~0u : 0);
}
void activemask(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u32 a = w.mask;
  EMU_EACH(w, i, d[i] = a);
}
void elect(Warp& w, const Inst& in) {  // d: lane or 0 (+1), e: predicate; a: members
  const u32 members = src<u32>(w, in.a)[__builtin_ctz(w.mask)];
  if (!lanes_here(w, members)) return;
  const u32 leader = static_cast<u32>(__builtin_ctz(members & w.mask));
  if (in.d) {
    u32* d = dst<u32>(w, in.d - 1);
    EMU_EACH(w, i, d[i] = leader);
  }
  set_pred(w, in.e, 1u << leader);
}
template <class T>
void match(Warp& w, const Inst& in) {  // x: 1 all; e: predicate or 0
  const u32 members = src<u32>(w, in.b)[__builtin_ctz(w.mask)];
  if (!lanes_here(w, members)) return;
  T a[32];
  memcpy(a, src<T>(w, in.a), sizeof a);
  u32* d = dst<u32>(w, in.d);
  bool all = true;
  u32 result[32];
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    u32 same = 0;
    for (u32 q = w.mask & members; q; q &= q - 1)
      if (a[__builtin_ctz(q)] == a[i]) same |= q & (0 - q);
    if (same != (w.mask & members)) all = false;
    result[i] = same;
  }
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    d[i] = in.x ? (all ? members : 0) : result[i];
  }
  if (in.x && in.e) set_pred(w, in.e, all ? ~0u : 0);
}
void redux(Warp& w, const Inst& in) {  // x: add min max and or xor; y: signed
  const u32 members = src<u32>(w, in.b)[__builtin_ctz(w.mask)];
  if (!lanes_here(w, members)) return;
  const u32* a = src<u32>(w, in.a);
  bool first = true;
  u32 x = 0;
  for (u32 r = w.mask & members; r; r &= r - 1) {
    const u32 v = a[__builtin_ctz(r)];
    if (first) { x = v, first = false; continue; }
    switch (in.x) {
      case 0: x += v; break;
      case 1: x = in.y ? static_cast<u32>(std::min(static_cast<s32>(x), static_cast<s32>(v))) : std::min(x, v); break;
      case 2: x = in.y ? static_cast<u32>(std::max(static_cast<s32>(x), static_cast<s32>(v))) : std::max(x, v); break;
      case 3: x &= v; break;
      case 4: x |= v; break;
      default: x ^= v;
    }
  }
  u32* d = dst<u32>(w, in.d);
  EMU_EACH(w, i, d[i] = x);
}
void special(Warp& w, const Inst& in) {  // x: kind; y: bytes of d
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const u64 ns = static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
  const u64 v = in.x == kClock || in.x == kClock64 ? w.m->executed : in.x == kTimerHi ? ns >> 32 : ns;
  if (in.y == 8) {
    u64* d = dst<u64>(w, in.d);
    EMU_EACH(w, i, d[i] = v);
  } else {
    u32* d = dst<u32>(w, in.d);
    EMU_EACH(w, i, d[i] = static_cast<u32>(v));
  }
}

}  // namespace

bool Decoder::sync(const PInst& s, Inst& i) {
  const std::string& o = s.words[0];
  const std::string& t = s.words.back();
  if (o == "bra") return i.fn = bra, true;  // target set by the caller
  if (o == "brx") return i.fn = brx, i.a = in(s.ops[0], 4), true;
  if (o == "ret" || o == "exit") return i.fn = do_exit, true;
  if (o == "trap" || o == "brkpt") return i.fn = trap, true;
  if (o == "nanosleep") return i.fn = yield, true;
  if (o == "fence" || o == "membar" || o == "griddepcontrol" || o == "pragma") return i.fn = nothing, true;
  if (o == "setmaxnreg") return i.fn = whole, true;
  if (o == "barrier" && s.words[1] == "cluster") {
    i.fn = s.has("arrive") ? cluster_arrive : cluster_wait;
    return true;
  }
  if ((o == "bar" || o == "barrier") && s.has("warp")) {
    i.a = in(s.ops[0], 4);
    i.fn = bar_warp;
    return true;
  }
  if (o == "bar" || o == "barrier") {
    if (s.has("red")) {
      i.x = 2;
      i.y = s.has("popc") ? 0 : s.has("and") ? 1 : 2;
      i.d = i.y == 0 ? out(s.ops[0], 4) : pr(s.ops[0]);
      i.a = in(s.ops[1], 4);
      if (s.ops.size() > 3) i.n = 1, i.b = in(s.ops[2], 4);
      i.c = pr(s.ops.back());
    } else {
      i.x = s.has("arrive");
      i.a = in(s.ops[0], 4);
      if (s.ops.size() > 1) i.n = 1, i.b = in(s.ops[1], 4);
    }
    i.fn = bar;
    return true;
  }
  if (o == "shfl") {
    i.x = s.has("up") ? 0 : s.has("down") ? 1 : s.has("bfly") ? 2 : 3;
    const POp& d = s.ops[0];
    if (d.kind == POp::vec) {
      i.d = out(d.parts[0], 4);
      if (d.parts[1].kind != POp::sink) i.e = pr(d.parts[1]);
    } else {
      i.d = out(d, 4);
    }
    i.a = in(s.ops[1], 4), i.b = in(s.ops[2], 4), i.c = in(s.ops[3], 4);
    if (s.ops.size() < 5) return false;
    i.f = in(s.ops[4], 4);
    i.fn = shfl;
    return true;
  }
  if (o == "vote") {
    i.x = s.has("ballot") ? 0 : s.has("any") ? 1 : s.has("all") ? 2 : 3;
    i.d = i.x == 0 ? out(s.ops[0], 4) : pr(s.ops[0]);
    i.a = pr(s.ops[1]);
    if (s.ops.size() < 3) return false;
    i.b = in(s.ops[2], 4);
    i.fn = vote;
    return true;
  }
  if (o == "activemask") return i.d = out(s.ops[0], 4), i.fn = activemask, true;
  if (o == "elect") {
    const POp& d = s.ops[0];
    if (d.kind != POp::vec) return false;
    if (d.parts[0].kind == POp::reg) i.d = out(d.parts[0], 4) + 1;
    i.e = pr(d.parts[1]);
    i.a = in(s.ops[1], 4);
    i.fn = elect;
    return true;
  }
  if (o == "match") {
    i.x = s.has("all");
    const POp& d = s.ops[0];
    i.d = out(d.kind == POp::vec ? d.parts[0] : d, 4);
    if (d.kind == POp::vec) i.e = pr(d.parts[1]);
    const int size = type_bytes(t);
    i.a = in(s.ops[1], size), i.b = in(s.ops[2], 4);
    i.fn = size == 4 ? match<u32> : match<u64>;
    return true;
  }
  if (o == "redux") {
    if (t == "f32") return false;
    i.x = s.has("add") ? 0 : s.has("min") ? 1 : s.has("max") ? 2 : s.has("and") ? 3 : s.has("or") ? 4 : 5;
    i.y = t == "s32";
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], 4), i.b = in(s.ops[2], 4);
    i.fn = redux;
    return true;
  }
  if (o == "mov" && s.ops.size() == 2 && s.ops[1].kind == POp::special &&
      s.ops[1].id >= kGridid && s.ops[1].id != kIsCluster) {
    i.x = static_cast<u8>(s.ops[1].id);
    i.y = static_cast<u8>(bytes_of(s.ops[0]));
    i.d = out(s.ops[0], i.y);
    i.fn = special;
    return true;
  }
  return false;
}

}  // namespace emu
