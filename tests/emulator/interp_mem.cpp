// What: loads, stores, atomics, copies by cp.async and in bulk, mbarriers.
#include <cmath>

#include "interp.hpp"

namespace emu {

// ---- addresses ---------------------------------------------------------------------------------

static std::string hex(u64 x) {
  char t[32];
  snprintf(t, sizeof t, "0x%llx", static_cast<unsigned long long>(x));
  return t;
}

Block& shared_block(Block& b, u64 address) {
  const u64 rank = address >> 24;
  if (rank == 0) return b;
  if (rank - 1 >= b.cluster->blocks.size()) fail("out of bounds: shared::cluster address " + hex(address));
  Block& other = b.cluster->blocks[rank - 1];
  if (other.live_warps == 0) fail("out of bounds: shared memory of block " + std::to_string(rank - 1) + " of the cluster, which has exited");
  return other;
}
char* shared_at(Block& b, u64 address, u32 bytes) {
  Block& o = address >> 24 ? shared_block(b, address) : b;
  const u64 offset = address & 0xffffff;
  if (offset < kSharedStart || offset + bytes > o.shared_end)
    fail("out of bounds: shared address " + hex(address) + " of " + std::to_string(bytes) + " bytes, the block has [" + hex(kSharedStart) + ", " + hex(o.shared_end) + ")");
  return o.shared + offset;
}
char* resolve(Warp& w, int lane, u64 a, u32 bytes, int space) {
  if (a & (bytes - 1)) fail("misaligned address " + hex(a) + " of " + std::to_string(bytes) + " bytes, lane " + std::to_string(lane));
  if (space == 2) return shared_at(*w.block, a & 0xffffffff, bytes);
  if (space == 3 || (a >> 56) == 2) {
    const u64 o = a & ~kLocalBase, size = w.local.size() / 32;
    if (o + bytes > size) fail("out of bounds: local address " + hex(a));
    return w.local.data() + static_cast<u64>(lane) * size + o;
  }
  if ((a >> 56) == 1) {
    if (space == 1) fail("address out of bounds: shared address " + hex(a) + " in a global access");
    return shared_at(*w.block, a & 0xffffffff, bytes);
  }
  if (!w.m->find(a, bytes)) fail("address out of bounds: " + hex(a) + " of " + std::to_string(bytes) + " bytes, lane " + std::to_string(lane));
  return reinterpret_cast<char*>(a);
}

namespace {

inline void count_progress(Warp& w) { ++w.m->progress; }

// Addresses of all lanes in the mask; x: as operand's bytes 4 or 8; imm: added.
struct Addresses {
  char* p[32];
};
inline void addresses(Warp& w, s32 operand, int reg_bytes, s64 imm, u32 bytes, int space, Addresses& r) {
  u64 a[32];
  if (reg_bytes == 8) {
    const u64* s = src<u64>(w, operand);
    for (int i = 0; i < 32; ++i) a[i] = s[i] + static_cast<u64>(imm);
  } else {
    const u32* s = src<u32>(w, operand);
    for (int i = 0; i < 32; ++i) a[i] = static_cast<u64>(s[i]) + static_cast<u64>(imm);
  }
  if (space == 2)
    for (int i = 0; i < 32; ++i) a[i] &= 0xffffffff;
  const u32 m = w.mask;
  if (m == ~0u && space != 3) {
    u64 low = ~0ull, high = 0, any = 0;
    for (int i = 0; i < 32; ++i) {
      low = a[i] < low ? a[i] : low;
      high = a[i] > high ? a[i] : high;
      any |= a[i];
    }
    if (!(any & (bytes - 1))) {
      if (space == 2) {
        if (low >= kSharedStart && high + bytes <= w.block->shared_end) {
          for (int i = 0; i < 32; ++i) r.p[i] = w.block->shared + a[i];
          return;
        }
      } else if (!(high >> 56) && w.m->find(low, high + bytes - low)) {
        for (int i = 0; i < 32; ++i) r.p[i] = reinterpret_cast<char*>(a[i]);
        return;
      }
    }
  }
  for (u32 k = m; k; k &= k - 1) {
    const int i = __builtin_ctz(k);
    r.p[i] = resolve(w, i, a[i], bytes, space);
  }
}

// x: space; y: bytes of the address register; z: parts; n: bytes of a part in memory. list: parts.
template <class M, class R>
void ld(Warp& w, const Inst& in) {
  Addresses p;
  const int parts = in.z;
  addresses(w, in.a, in.y, in.imm, static_cast<u32>(sizeof(M)) * static_cast<u32>(parts), in.x, p);
  if (parts == 1) {
    R* d = dst<R>(w, in.d);
    EMU_EACH(w, i, d[i] = static_cast<R>(*reinterpret_cast<const M*>(p.p[i])));
  } else {
    R* d[8];
    for (int k = 0; k < parts; ++k) {
      const s32 o = (*in.list)[static_cast<size_t>(k)];
      d[k] = o < 0 ? nullptr : dst<R>(w, o);
    }
    for (int k = 0; k < parts; ++k) {
      R* q = d[k];
      if (!q) continue;
      EMU_EACH(w, i, q[i] = static_cast<R>(reinterpret_cast<const M*>(p.p[i])[k]));
    }
  }
  if (in.n) w.budget -= 64, ++w.m->spins;  // volatile, acquire: a spin, perhaps
}
template <class M, class R>
void st(Warp& w, const Inst& in) {
  Addresses p;
  const int parts = in.z;
  addresses(w, in.a, in.y, in.imm, static_cast<u32>(sizeof(M)) * static_cast<u32>(parts), in.x, p);
  for (int k = 0; k < parts; ++k) {
    const R* s = src<R>(w, parts == 1 ? in.b : (*in.list)[static_cast<size_t>(k)]);
    for (u32 r = w.mask; r; r &= r - 1) {
      const int i = __builtin_ctz(r);
      reinterpret_cast<M*>(p.p[i])[k] = static_cast<M>(s[i]);
    }
  }
  count_progress(w);
}
Fn ld_of(const std::string& t, int reg) {
  const int size = type_bytes(t);
  const bool sign = t[0] == 's';
  if (reg == 2) {
    if (size == 1) return sign ? ld<s8, u16> : ld<u8, u16>;
    return size == 2 ? ld<u16, u16> : nullptr;
  }
  if (reg == 4) {
    if (size == 1) return sign ? ld<s8, u32> : ld<u8, u32>;
    if (size == 2) return sign ? ld<s16, u32> : ld<u16, u32>;
    return size == 4 ? ld<u32, u32> : nullptr;
  }
  if (size == 1) return sign ? ld<s8, u64> : ld<u8, u64>;
  if (size == 2) return sign ? ld<s16, u64> : ld<u16, u64>;
  if (size == 4) return sign ? ld<s32, u64> : ld<u32, u64>;
  return ld<u64, u64>;
}
Fn st_of(int size, int reg) {
  if (reg == 2) return size == 1 ? st<u8, u16> : size == 2 ? st<u16, u16> : nullptr;
  if (reg == 4) return size == 1 ? st<u8, u32> : size == 2 ? st<u16, u32> : size == 4 ? st<u32, u32> : nullptr;
  return size == 1 ? st<u8, u64> : size == 2 ? st<u16, u64> : size == 4 ? st<u32, u64> : st<u64, u64>;
}

// ---- atomics: e: operation; n: 1 has a result
enum Atomic { aAdd, aMin, aMax, aAnd, aOr, aXor, aExch, aCas, aInc, aDec };
template <class T>
T apply(int op, T old, T b, T c) {
  switch (op) {
    case aAdd: return old + b;
    case aMin: return b < old ? b : old;
    case aMax: return b > old ? b : old;
    case aExch: return b;
    case aCas: return old == b ? c : old;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case aAnd: return old & b;
      case aOr: return old | b;
      case aXor: return old ^ b;
      case aInc: return old >= b ? T(0) : old + 1;
      case aDec: return old == 0 || old > b ? b : old - 1;
      default: break;
    }
  }
  return old;
}
template <class T>
void atom(Warp& w, const Inst& in) {
  Addresses p;
  const int parts = in.z;
  addresses(w, in.a, in.y, in.imm, static_cast<u32>(sizeof(T)) * static_cast<u32>(parts), in.x, p);
  const T* c = in.e == aCas ? src<T>(w, in.c) : nullptr;
  bool changed = false;
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    for (int k = 0; k < parts; ++k) {
      const T* b = src<T>(w, parts == 1 ? in.b : (*in.list)[static_cast<size_t>(parts + k)]);
      T* q = reinterpret_cast<T*>(p.p[i]) + k;
      const T old = *q;
      const T now = apply<T>(in.e, old, b[i], c ? c[i] : T());
      changed = changed || memcmp(&old, &now, sizeof old);
      *q = now;
      const s32 o = parts == 1 ? in.d : (*in.list)[static_cast<size_t>(k)];
      if (in.n && o >= 0) dst<T>(w, o)[i] = old;
    }
  }
  if (changed) count_progress(w);
  else w.budget -= 64, ++w.m->spins;
}
// f16x2, bf16x2, f16, bf16 add. f: 1 bf16; imm2 in target: halves
void atom_half(Warp& w, const Inst& in) {
  Addresses p;
  const u32 halves = in.target;
  addresses(w, in.a, in.y, in.imm, 2 * halves * in.z, in.x, p);
  for (u32 r = w.mask; r; r &= r - 1) {
    const u32 i = static_cast<u32>(__builtin_ctz(r));
    for (u32 k = 0; k < in.z; ++k) {
      const u16* b = src<u16>(w, in.z == 1 ? in.b : (*in.list)[in.z + k]);
      const s32 o = in.z == 1 ? in.d : (*in.list)[k];
      for (u32 h = 0; h < halves; ++h) {
        u16* q = reinterpret_cast<u16*>(p.p[i]) + k * halves + h;
        const u16 old = *q, x = b[i * halves + h];
        *q = in.f ? float_to_bf16(bf16_to_float(old) + bf16_to_float(x)) : float_to_f16(f16_to_float(old) + f16_to_float(x));
        if (in.n && o >= 0) dst<u16>(w, o)[i * halves + h] = old;
      }
    }
  }
  count_progress(w);
}

void add_to(Warp& w, const Inst& in) {  // cvta: d = a + imm
  u64* d = dst<u64>(w, in.d);
  const u64* a = src<u64>(w, in.a);
  EMU_EACH(w, i, d[i] = a[i] + static_cast<u64>(in.imm));
}
void add_to_32(Warp& w, const Inst& in) {
  u64* d = dst<u64>(w, in.d);
  const u32* a = src<u32>(w, in.a);
  EMU_EACH(w, i, d[i] = a[i] + static_cast<u64>(in.imm));
}
void mapa32(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b);
  EMU_EACH(w, i, d[i] = (a[i] & 0xffffff) | (b[i] + 1) << 24);
}
void mapa64(Warp& w, const Inst& in) {
  u64* d = dst<u64>(w, in.d);
  const u64* a = src<u64>(w, in.a);
  const u32* b = src<u32>(w, in.b);
  EMU_EACH(w, i, d[i] = (a[i] & ~0xff000000ull) | static_cast<u64>(b[i] + 1) << 24);
}
void getctarank(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  EMU_EACH(w, i, {
    const u64 a = in.y == 8 ? src<u64>(w, in.a)[i] : src<u32>(w, in.a)[i];
    const u32 r = static_cast<u32>(a >> 24) & 0xff;
    d[i] = r ? r - 1 : w.block->rank;
  });
}
void isspacep(Warp& w, const Inst& in) {
  const u64* a = src<u64>(w, in.a);
  u32 r = 0;
  for (int i = 0; i < 32; ++i) {
    const int s = (a[i] >> 56) == 1 ? 2 : (a[i] >> 56) == 2 ? 3 : 1;
    if (s == in.x) r |= 1u << i;
  }
  set_pred(w, in.d, r);
}
void nothing(Warp&, const Inst&) {}

// ---- mbarriers: bits 0-19 expected arrivals, 20-39 pending, 40-62 transactions (signed), 63 phase
struct Mbar {
  u32 expected, pending;
  s32 tx;
  bool phase;
};
Mbar get(const char* p) {
  u64 x;
  memcpy(&x, p, 8);
  return {static_cast<u32>(x & 0xfffff), static_cast<u32>((x >> 20) & 0xfffff),
          static_cast<s32>(static_cast<s64>(x << 1) >> 41), (x >> 63) != 0};
}
void put(char* p, const Mbar& b) {
  const u64 x = b.expected | static_cast<u64>(b.pending) << 20 |
                (static_cast<u64>(static_cast<u32>(b.tx)) & 0x7fffff) << 40 |
                static_cast<u64>(b.phase) << 63;
  memcpy(p, &x, 8);
}
void settle(Machine& m, Mbar& b) {
  ++m.progress;
  if (b.pending == 0 && b.tx == 0) {
    b.phase = !b.phase;
    b.pending = b.expected;
  }
}

}  // namespace

void mbar_init(char* p, u32 count) {
  if (count == 0 || count > 0xfffff) fail("mbarrier.init: count " + std::to_string(count));
  put(p, {count, count, 0, false});
}
void mbar_arrive(Machine& m, char* p, u32 count, s64 expect) {
  Mbar b = get(p);
  b.tx += static_cast<s32>(expect);
  if (b.tx > (1 << 20) - 1 || b.tx < -((1 << 20) - 1)) fail("mbarrier: transaction count out of its range");
  if (count > b.pending) fail("mbarrier: more arrivals than the phase expects (pending " + std::to_string(b.pending) + ", arriving " + std::to_string(count) + ")");
  b.pending -= count;
  settle(m, b);
  put(p, b);
}
void mbar_expect(Machine& m, char* p, s64 bytes) {
  Mbar b = get(p);
  b.tx += static_cast<s32>(bytes);
  ++m.progress;
  put(p, b);
}
void mbar_complete(Machine& m, char* p, s64 bytes) {
  Mbar b = get(p);
  b.tx -= static_cast<s32>(bytes);
  settle(m, b);
  put(p, b);
}

namespace {

// d result (u64) or -1; a address; b count or expect; x space; y address bytes; z kind; imm offset
enum { mInit, mArrive, mArriveExpect, mExpect, mComplete, mInval, mArriveDrop };
void mbarrier(Warp& w, const Inst& in) {
  Addresses p;
  addresses(w, in.a, in.y, in.imm, 8, in.x, p);
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    u64 state;
    memcpy(&state, p.p[i], 8);
    const u32 b = in.f ? src<u32>(w, in.b)[i] : 1;
    switch (in.z) {
      case mInit: mbar_init(p.p[i], b); break;
      case mArrive: mbar_arrive(*w.m, p.p[i], b, 0); break;
      case mArriveExpect: mbar_arrive(*w.m, p.p[i], 1, b); break;
      case mExpect: mbar_expect(*w.m, p.p[i], b); break;
      case mComplete: mbar_complete(*w.m, p.p[i], b); break;
      case mArriveDrop: {
        Mbar s = get(p.p[i]);
        s.expected -= b;
        put(p.p[i], s);
        mbar_arrive(*w.m, p.p[i], b, 0);
        break;
      }
      default: memset(p.p[i], 0xff, 8);
    }
    if (in.d > 0) dst<u64>(w, in.d - 1)[i] = state;
  }
  count_progress(w);
}
// d pred; a address; b parity (u32) or state (u64); z: 1 parity; n: 1 try
void mbarrier_wait(Warp& w, const Inst& in) {
  Addresses p;
  addresses(w, in.a, in.y, in.imm, 8, in.x, p);
  u32 done = 0;
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const bool parity = in.z ? (src<u32>(w, in.b)[i] & 1) : (src<u64>(w, in.b)[i] >> 63);
    if (get(p.p[i]).phase != parity) done |= 1u << i;
  }
  if (in.n && done != w.mask && !w.woken && w.mask == w.active) {
    --w.pc;
    w.stop = w.others.empty() ? Stop::warp_waits : Stop::frag_waits;
    w.trying = true;
    return;
  }
  if (w.woken && done != w.mask) w.stop = Stop::yield;
  if (!in.n && done != w.mask) w.stop = Stop::yield;
  w.woken = false;
  set_pred(w, in.d, done);
}

// ---- cp.async: a to, b from, c source bytes (f: given), n: size
void cp_async(Warp& w, const Inst& in) {
  auto holder = std::make_unique<CopyBatch>();
  CopyBatch* c = holder.get();
  c->mask = w.mask;
  c->size = in.n;
  c->arrive = false;
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    c->group[i] = w.copy_group[i];
    c->to[i] = static_cast<u64>(static_cast<s64>(in.y == 4 ? src<u32>(w, in.a)[i] : src<u64>(w, in.a)[i] & 0xffffffff) + in.imm);
    c->from[i] = src<u64>(w, in.b)[i] + static_cast<u64>(static_cast<s64>(in.target << 1) >> 1);
    c->bytes[i] = in.f == 1 ? src<u32>(w, in.c)[i] : in.f == 2 ? ((pred(w, in.c) >> i) & 1 ? 0 : in.n) : in.n;
    if (c->bytes[i] > in.n) fail("cp.async: source bytes above the copy's");
    if ((c->to[i] | (c->bytes[i] ? c->from[i] : 0)) & (in.n - 1u)) fail("misaligned address in cp.async");
    (void)shared_at(*w.block, c->to[i], in.n);
    if (c->bytes[i] && !w.m->find(c->from[i], c->bytes[i])) fail("address out of bounds: cp.async from " + hex(c->from[i]));
  }
  w.copies.push_back(holder.release());
  const int mode = w.m->async_mode;
  if (mode == 1 || (mode == 0 && (w.m->rnd() & 3) == 0)) run_copies(w, w.copies.size());
}
void cp_async_commit(Warp& w, const Inst&) {
  for (u32 r = w.mask; r; r &= r - 1) ++w.copy_group[__builtin_ctz(r)];
}
void cp_async_wait(Warp& w, const Inst& in) {  // imm: groups that may stay; f: 1 all, even uncommitted
  if (w.copies.empty()) return;
  size_t upto = 0;
  for (size_t k = 0; k < w.copies.size(); ++k) {
    const CopyBatch& c = *w.copies[k];
    if (c.arrive) continue;
    for (u32 r = c.mask & w.mask; r; r &= r - 1) {
      const int i = __builtin_ctz(r);
      if (in.f || c.group[i] + static_cast<u64>(in.imm) < w.copy_group[i]) {
        upto = k + 1;
        break;
      }
    }
  }
  run_copies(w, upto);
}
void cp_async_arrive(Warp& w, const Inst& in) {  // n: 1 noinc
  auto* c = new CopyBatch;
  c->mask = w.mask;
  c->arrive = true;
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    c->to[i] = static_cast<u64>(static_cast<s64>(in.y == 4 ? src<u32>(w, in.a)[i] : src<u64>(w, in.a)[i] & 0xffffffff) + in.imm);
    char* p = shared_at(*w.block, c->to[i], 8);
    if (!in.n) {
      Mbar b = get(p);
      ++b.pending;
      put(p, b);
    }
  }
  w.copies.push_back(c);
  if (w.m->async_mode == 1) run_copies(w, w.copies.size());
}

}  // namespace

void run_copies(Warp& w, size_t count) {
  for (; count && !w.copies.empty(); --count) {
    CopyBatch* c = w.copies.front();
    w.copies.pop_front();
    ++w.m->progress;
    for (u32 r = c->mask; r; r &= r - 1) {
      const int i = __builtin_ctz(r);
      if (c->arrive) {
        mbar_arrive(*w.m, shared_at(*w.block, c->to[i], 8), 1, 0);
        continue;
      }
      char* to = shared_at(*w.block, c->to[i], c->size);
      if (c->bytes[i] == 16) {
        memcpy(to, reinterpret_cast<const void*>(c->from[i]), 16);
      } else {
        memset(to, 0, c->size);
        if (c->bytes[i]) memcpy(to, reinterpret_cast<const void*>(c->from[i]), c->bytes[i]);
      }
    }
    delete c;
  }
}
void run_stores(Warp& w, size_t k) {
  auto run = std::move(w.stores[k].run);
  w.stores.erase(w.stores.begin() + static_cast<std::ptrdiff_t>(k));
  run();
}

namespace {

// ---- bulk copies
inline u32 swizzled(u32 address, int swizzle) {  // of CUtensorMapSwizzle: 0 none, 1 32, 2 64, 3 128
  switch (swizzle) {
    case 1: return address ^ ((address >> 3) & 0x10);
    case 2: return address ^ ((address >> 3) & 0x30);
    case 3: return address ^ ((address >> 3) & 0x70);
    default: return address;
  }
}
enum { rNone, rAdd, rMin, rMax, rAnd, rOr, rXor };
void reduce_element(char* to, const char* from, int type, int op) {
  switch (type) {
    case 7: case 11: case 12: {  // f32
      float a, b;
      memcpy(&a, to, 4), memcpy(&b, from, 4);
      a = op == rAdd ? a + b : op == rMin ? std::fmin(a, b) : std::fmax(a, b);
      memcpy(to, &a, 4);
      break;
    }
    case 9: case 6: {  // bf16, f16
      u16 a, b;
      memcpy(&a, to, 2), memcpy(&b, from, 2);
      const float x = type == 9 ? bf16_to_float(a) : f16_to_float(a), y = type == 9 ? bf16_to_float(b) : f16_to_float(b);
      const float z = op == rAdd ? x + y : op == rMin ? std::fmin(x, y) : std::fmax(x, y);
      a = type == 9 ? float_to_bf16(z) : float_to_f16(z);
      memcpy(to, &a, 2);
      break;
    }
    case 2: case 3: {
      s32 a, b;
      memcpy(&a, to, 4), memcpy(&b, from, 4);
      a = op == rAdd ? static_cast<s32>(static_cast<u32>(a) + static_cast<u32>(b)) : op == rAnd ? a & b : op == rOr ? a | b : op == rXor ? a ^ b
          : type == 2 ? static_cast<s32>(op == rMin ? std::min(static_cast<u32>(a), static_cast<u32>(b)) : std::max(static_cast<u32>(a), static_cast<u32>(b)))
          : op == rMin ? std::min(a, b) : std::max(a, b);
      memcpy(to, &a, 4);
      break;
    }
    default: fail("unknown instruction: bulk reduction of tensor type " + std::to_string(type));
  }
}

struct Box {
  TensorMap t;
  s64 at[5];
};
// For each row of the box along axis 0: f(offset within the box in bytes, global address, elements inside, first inside)
template <class F>
void rows_of(const Box& b, F f) {
  const TensorMap& t = b.t;
  u64 rows = 1;
  for (int k = 1; k < t.rank; ++k) rows *= t.box[k];
  const u64 row_bytes = static_cast<u64>(t.box[0]) * t.element_bytes;
  const s64 first = std::max<s64>(0, -b.at[0]), last = std::min<s64>(t.box[0], static_cast<s64>(t.size[0]) - b.at[0]);
  for (u64 r = 0; r < rows; ++r) {
    u64 q = r, address = t.address;
    bool inside = last > first;
    for (int k = 1; k < t.rank; ++k) {
      const s64 x = b.at[k] + static_cast<s64>(q % t.box[k]);
      q /= t.box[k];
      if (x < 0 || x >= static_cast<s64>(t.size[k])) inside = false;
      address += static_cast<u64>(x) * t.stride[k - 1];
    }
    f(r * row_bytes, address + static_cast<u64>(b.at[0] * t.element_bytes), inside ? first : 0, inside ? last : 0);
  }
}
u64 box_bytes(const TensorMap& t) {
  u64 n = t.element_bytes;
  for (int k = 0; k < t.rank; ++k) n *= t.box[k];
  return n;
}
void load_box(Machine& m, Block& block, u32 to, const Box& b) {
  const TensorMap& t = b.t;
  const u64 row_bytes = static_cast<u64>(t.box[0]) * t.element_bytes;
  rows_of(b, [&](u64 at, u64 address, s64 first, s64 last) {
    char row[1024 + 16];
    if (row_bytes > 1024) fail("unknown instruction: a box of more than 1024 bytes a row");
    if (last <= first || first > 0 || static_cast<u64>(last) < t.box[0]) memset(row, 0, row_bytes);
    if (last > first) {
      const u64 from = address + static_cast<u64>(first) * t.element_bytes, n = static_cast<u64>(last - first) * t.element_bytes;
      if (!m.find(from, n)) fail("address out of bounds: TMA load of " + std::to_string(n) + " bytes at " + hex(from));
      memcpy(row + static_cast<u64>(first) * t.element_bytes, reinterpret_cast<const void*>(from), n);
    }
    const u32 base = to + static_cast<u32>(at);
    if (t.swizzle == 0) {
      memcpy(block.shared + base, row, row_bytes);
    } else {
      for (u32 k = 0; k < row_bytes; k += 16)
        memcpy(block.shared + swizzled(base + k, t.swizzle), row + k, std::min<u64>(16, row_bytes - k));
    }
  });
}
void store_box(Machine& m, Block& block, u32 from, const Box& b, int op) {
  const TensorMap& t = b.t;
  const u64 row_bytes = static_cast<u64>(t.box[0]) * t.element_bytes;
  rows_of(b, [&](u64 at, u64 address, s64 first, s64 last) {
    if (last <= first) return;
    char row[1024 + 16];
    if (row_bytes > 1024) fail("unknown instruction: a box of more than 1024 bytes a row");
    const u32 base = from + static_cast<u32>(at);
    for (u32 k = 0; k < row_bytes; k += 16)
      memcpy(row + k, block.shared + swizzled(base + k, t.swizzle), std::min<u64>(16, row_bytes - k));
    const u64 to = address + static_cast<u64>(first) * t.element_bytes, n = static_cast<u64>(last - first) * t.element_bytes;
    if (!m.find(to, n)) fail("address out of bounds: TMA store of " + std::to_string(n) + " bytes at " + hex(to));
    char* p = reinterpret_cast<char*>(to);
    const char* s = row + static_cast<u64>(first) * t.element_bytes;
    if (op == rNone) {
      memcpy(p, s, n);
    } else {
      for (u64 k = 0; k < n; k += t.element_bytes) reduce_element(p + k, s + k, t.type, op);
    }
  });
}
Box box_of(Warp& w, const Inst& in, s32 map_operand, int lane, size_t coordinates_at) {
  Box b;
  const u64 map = src<u64>(w, map_operand)[lane];
  if (!w.m->find(map, 128)) fail("address out of bounds: tensor map at " + hex(map));
  if (map & 63) fail("misaligned address of a tensor map");
  b.t = unpack(reinterpret_cast<const void*>(map));
  if (b.t.magic != TensorMap{}.magic) fail("illegal instruction: no tensor map at " + hex(map));
  if (b.t.rank != in.z) fail("illegal instruction: tensor map of rank " + std::to_string(b.t.rank));
  if (b.t.interleave) fail("unknown instruction: interleaved tensor map");
  for (int k = 0; k < in.z; ++k) b.at[k] = src<s32>(w, (*in.list)[coordinates_at + static_cast<size_t>(k)])[lane];
  return b;
}
u32 shared_operand(Warp& w, s32 o, int bytes, int lane) {
  return bytes == 4 ? src<u32>(w, o)[lane] : static_cast<u32>(src<u64>(w, o)[lane]);
}
void need(Block& b, u32 offset, u64 bytes) {
  if (offset < kSharedStart || offset + bytes > b.shared_end) fail("out of bounds: bulk copy of " + std::to_string(bytes) + " bytes at shared address " + hex(offset));
}

// TMA load. a: to; b: map; c: barrier; d: mask (f: given); list: coordinates; z: rank;
// x: bytes of a's register, y: of c's; imm: offset of a, target: offset of c
void tma_load(Warp& w, const Inst& in) {
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const Box box = box_of(w, in, in.b, i, 0);
    const u32 to = shared_operand(w, in.a, in.x, i) + static_cast<u32>(in.imm), bar = shared_operand(w, in.c, in.y, i) + in.target;
    const u64 bytes = box_bytes(box.t);
    if ((to & 0xffffff) % 128) fail("misaligned address " + hex(to) + " of a TMA load");
    const u32 ranks = in.f ? src<u16>(w, in.d)[i] : 0;
    Machine* m = w.m;
    Block* own = w.block;
    std::vector<std::pair<Block*, Block*>> targets;
    if (in.f) {
      for (u32 q = 0; q < own->cluster->blocks.size(); ++q)
        if ((ranks >> q) & 1) targets.push_back({&own->cluster->blocks[q], &own->cluster->blocks[q]});
    } else {
      targets.push_back({&shared_block(*own, to), &shared_block(*own, bar)});
    }
    const u32 to_off = to & 0xffffff, bar_off = bar & 0xffffff;
    for (auto [block, bar_block] : targets) {
      need(*block, to_off, bytes), need(*bar_block, bar_off, 8);
      m->add_async([m, block = block, bar_block = bar_block, to_off, bar_off, box, bytes] {
        if (!block->live_warps) fail("TMA load into the shared memory of a block that has exited");
        load_box(*m, *block, to_off, box);
        mbar_complete(*m, bar_block->shared + bar_off, static_cast<s64>(bytes));
      });
    }
  }
  count_progress(w);
}
void add_store(Warp& w, int lane, std::function<void()> run) {
  const int mode = w.m->async_mode;
  if (mode == 1) return run();
  w.stores.push_back({lane, w.store_group[lane], mode == 2 ? ~0ull : w.m->tick + w.m->rnd() % 64, std::move(run)});
}
// a: from (x bytes, imm), b: map, list: coordinates, z: rank, n: reduction
void tma_store(Warp& w, const Inst& in) {
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const Box box = box_of(w, in, in.b, i, 0);
    const u32 from = shared_operand(w, in.a, in.x, i) + static_cast<u32>(in.imm);
    if (from % 128) fail("misaligned address " + hex(from) + " of a TMA store");
    need(*w.block, from, box_bytes(box.t));
    Machine* m = w.m;
    Block* own = w.block;
    const int op = in.n;
    add_store(w, i, [m, own, from, box, op] { store_box(*m, *own, from, box, op); });
  }
  count_progress(w);
}
void check_bulk(u64 a, u64 b, u32 bytes) {
  if ((a | b) & 15) fail("misaligned address in a bulk copy");
  if (bytes & 15) fail("misaligned size of a bulk copy");
}
// a: to, b: from (u64), c: bytes, e: barrier, d: mask (f)
void bulk_load(Warp& w, const Inst& in) {
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const u32 to = shared_operand(w, in.a, in.x, i) + static_cast<u32>(in.imm), bar = shared_operand(w, in.e, in.y, i) + in.target;
    const u64 from = src<u64>(w, in.b)[i];
    const u32 bytes = src<u32>(w, in.c)[i];
    check_bulk(to, from, bytes);
    if (bytes && !w.m->find(from, bytes)) fail("address out of bounds: bulk copy from " + hex(from));
    Machine* m = w.m;
    Block* own = w.block;
    std::vector<std::pair<Block*, Block*>> targets;
    if (in.f) {
      const u32 ranks = src<u16>(w, in.d)[i];
      for (u32 q = 0; q < own->cluster->blocks.size(); ++q)
        if ((ranks >> q) & 1) targets.push_back({&own->cluster->blocks[q], &own->cluster->blocks[q]});
    } else {
      targets.push_back({&shared_block(*own, to), &shared_block(*own, bar)});
    }
    const u32 to_off = to & 0xffffff, bar_off = bar & 0xffffff;
    for (auto [block, bar_block] : targets) {
      need(*block, to_off, bytes), need(*bar_block, bar_off, 8);
      m->add_async([m, block = block, bar_block = bar_block, to_off, bar_off, from, bytes] {
        if (!block->live_warps) fail("bulk copy into the shared memory of a block that has exited");
        memcpy(block->shared + to_off, reinterpret_cast<const void*>(from), bytes);
        mbar_complete(*m, bar_block->shared + bar_off, bytes);
      });
    }
  }
  count_progress(w);
}
// shared::cta to shared::cluster. a: to, b: from (shared), c: bytes, e: barrier
void bulk_send(Warp& w, const Inst& in) {
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const u32 to = shared_operand(w, in.a, in.x, i) + static_cast<u32>(in.imm), bar = shared_operand(w, in.e, in.y, i) + in.target;
    const u32 from = shared_operand(w, in.b, in.n, i), bytes = src<u32>(w, in.c)[i];
    check_bulk(to, from, bytes);
    Machine* m = w.m;
    Block *own = w.block, *block = &shared_block(*own, to), *bar_block = &shared_block(*own, bar);
    const u32 to_off = to & 0xffffff, bar_off = bar & 0xffffff;
    need(*block, to_off, bytes), need(*bar_block, bar_off, 8), need(*own, from, bytes);
    m->add_async([=] {
      if (!block->live_warps || !own->live_warps) fail("bulk copy from or into the shared memory of a block that has exited");
      memmove(block->shared + to_off, own->shared + from, bytes);
      mbar_complete(*m, bar_block->shared + bar_off, bytes);
    });
  }
  count_progress(w);
}
// a: to (global u64), b: from (shared), c: bytes; n: reduction, d: tensor type of its elements
void bulk_store(Warp& w, const Inst& in) {
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const u64 to = src<u64>(w, in.a)[i] + static_cast<u64>(in.imm);
    const u32 from = shared_operand(w, in.b, in.y, i), bytes = src<u32>(w, in.c)[i];
    check_bulk(to, from, bytes);
    need(*w.block, from, bytes);
    if (bytes && !w.m->find(to, bytes)) fail("address out of bounds: bulk copy to " + hex(to));
    Block* own = w.block;
    const int op = in.n, type = in.e;
    const u32 size = type == 9 || type == 6 ? 2 : 4;
    add_store(w, i, [=] {
      char* p = reinterpret_cast<char*>(to);
      if (op == rNone)
        memcpy(p, own->shared + from, bytes);
      else
        for (u32 k = 0; k < bytes; k += size) reduce_element(p + k, own->shared + from + k, type, op);
    });
  }
  count_progress(w);
}
void bulk_commit(Warp& w, const Inst&) {
  for (u32 r = w.mask; r; r &= r - 1) ++w.store_group[__builtin_ctz(r)];
}
void bulk_wait(Warp& w, const Inst& in) {
  for (size_t k = 0; k < w.stores.size();) {
    const BulkStore& s = w.stores[k];
    if (((w.mask >> s.lane) & 1) && s.group + static_cast<u64>(in.imm) < w.store_group[s.lane])
      run_stores(w, k);
    else
      ++k;
  }
}
// st.async: a: to, b: value (n bytes), c: barrier, x, y address bytes
void st_async(Warp& w, const Inst& in) {
  for (u32 r = w.mask; r; r &= r - 1) {
    const int i = __builtin_ctz(r);
    const u32 to = shared_operand(w, in.a, in.x, i) + static_cast<u32>(in.imm), bar = shared_operand(w, in.c, in.y, i) + in.target;
    const u32 total = in.n * in.z;
    char value[16];
    for (u32 k = 0; k < in.z; ++k) memcpy(value + k * in.n, src<char>(w, (*in.list)[k]) + i * in.n, in.n);
    if (to & (total - 1)) fail("misaligned address in st.async");
    Machine* m = w.m;
    Block *block = &shared_block(*w.block, to), *bar_block = &shared_block(*w.block, bar);
    const u32 to_off = to & 0xffffff, bar_off = bar & 0xffffff;
    need(*block, to_off, total), need(*bar_block, bar_off, 8);
    struct V { char v[16]; } v;
    memcpy(v.v, value, 16);
    m->add_async([=] {
      if (!block->live_warps) fail("st.async into the shared memory of a block that has exited");
      memcpy(block->shared + to_off, v.v, total);
      mbar_complete(*m, bar_block->shared + bar_off, total);
    });
  }
  count_progress(w);
}

int reduction_of(const PInst& s) {
  return s.has("add") ? rAdd : s.has("min") ? rMin : s.has("max") ? rMax : s.has("and") ? rAnd : s.has("or") ? rOr : s.has("xor") ? rXor : rNone;
}

}  // namespace

bool Decoder::mem(const PInst& s, Inst& i) {
  const std::string& o = s.words[0];
  const std::string& t = s.words.back();
  const size_t n = s.ops.size();
  // [base + offset]
  const auto address = [&](const POp& a, s32& operand, u8& bytes) -> s64 {
    const POp& base = a.parts[0];
    if (base.kind == POp::reg) {
      bytes = static_cast<u8>(bytes_of(base));
      operand = in(base, bytes);
      return a.value;
    }
    bytes = 8;
    POp whole = base;
    s64 v = base.value;
    if (base.kind == POp::sym) {
      bool ok = false;
      v = static_cast<s64>(symbol(base.name, ok));
      if (!ok) fail("unknown symbol " + base.name);
    }
    operand = constant(static_cast<u64>(v + a.value), 8);
    return 0;
  };
  const auto space_of = [&] {
    for (auto& x : s.words) {
      if (x == "global" || x == "const" || x.rfind("param", 0) == 0) return 1;
      if (x.rfind("shared", 0) == 0) return 2;
      if (x == "local") return 3;
    }
    return 0;
  };
  if (o == "ld" || o == "st" || o == "ldu") {
    if (s.has("async")) {
      i.n = static_cast<u8>(type_bytes(t));
      u8 b = 0;
      i.imm = address(s.ops[0], i.a, b), i.x = b;
      i.target = static_cast<u32>(address(s.ops[2], i.c, b)), i.y = b;
      const POp& v = s.ops[1];
      i.list = list(v, i.n);
      i.z = static_cast<u8>(i.list->size());
      i.fn = st_async;
      return true;
    }
    const bool load = o != "st";
    i.x = static_cast<u8>(space_of());
    i.n = s.has("volatile") || s.has("acquire") || s.has("relaxed");
    const POp &a = s.ops[load ? 1 : 0], &v = s.ops[load ? 0 : 1];
    i.imm = address(a, i.a, i.y);
    const bool vec = v.kind == POp::vec;
    i.z = static_cast<u8>(vec ? v.parts.size() : 1);
    int reg = 0;
    if (vec) {
      for (auto& q : v.parts) reg = std::max(reg, bytes_of(q));
    } else {
      reg = bytes_of(v);
    }
    if (!reg) reg = std::max(2, type_bytes(t));
    if (t == "b128") return false;
    if (vec) {
      i.list = list(v, reg);
      if (i.z == 1) (load ? i.d : i.b) = (*i.list)[0];
    } else {
      (load ? i.d : i.b) = load ? out(v, reg) : in(v, reg);
    }
    i.fn = load ? ld_of(t, reg) : st_of(type_bytes(t), reg);
    return i.fn != nullptr;
  }
  if (o == "atom" || o == "red") {
    if (s.has("async")) return false;
    const bool result = o == "atom";
    i.x = static_cast<u8>(space_of());
    size_t k = 0;
    const POp* d = result ? &s.ops[k++] : nullptr;
    const POp &a = s.ops[k], &b = s.ops[k + 1];
    i.imm = address(a, i.a, i.y);
    const int size = type_bytes(t);
    i.n = result;
    i.z = static_cast<u8>(b.kind == POp::vec ? b.parts.size() : 1);
    if (b.kind == POp::vec) {
      p.lists.emplace_back();
      std::vector<s32>& l = p.lists.back();
      for (size_t q = 0; q < i.z; ++q) l.push_back(d ? out(d->parts[q], size) : -1);
      for (auto& q : b.parts) l.push_back(in(q, size));
      i.list = &l;
    } else {
      i.d = d ? out(*d, size) : -1;
      i.b = in(b, size);
    }
    int op = -1;
    const char* names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    for (int q = 0; q < 10; ++q)
      if (s.has(names[q])) op = q;
    if (op < 0) return false;
    i.e = op;
    if (op == aCas) i.c = in(s.ops[k + 2], size);
    if (t == "f16x2" || t == "bf16x2" || t == "f16" || t == "bf16") {
      if (op != aAdd) return false;
      i.f = t[0] == 'b';
      i.target = static_cast<u32>(size / 2);
      i.fn = atom_half;
      return true;
    }
    i.fn = t == "f32" ? atom<float> : t == "f64" ? atom<double> : t == "s32" ? atom<s32> : t == "s64" ? atom<s64>
           : size == 4 ? atom<u32> : size == 8 ? atom<u64> : size == 2 ? atom<u16> : nullptr;
    return i.fn != nullptr;
  }
  if (o == "cvta") {
    const bool to = s.has("to");
    const int space = space_of();
    i.d = out(s.ops[0], bytes_of(s.ops[0]));
    if (bytes_of(s.ops[0]) != 8) return false;
    const u64 base = space == 2 ? kSharedBase : space == 3 ? kLocalBase : 0;
    i.imm = static_cast<s64>(to ? 0 - base : base);
    if (s.ops[1].kind == POp::reg && bytes_of(s.ops[1]) == 4) {
      i.a = in(s.ops[1], 4), i.fn = add_to_32;
    } else {
      i.a = in(s.ops[1], 8), i.fn = add_to;
    }
    return true;
  }
  if (o == "mapa") {
    const int size = bytes_of(s.ops[0]);
    i.d = out(s.ops[0], size), i.a = in(s.ops[1], size), i.b = in(s.ops[2], 4);
    i.fn = size == 4 ? mapa32 : mapa64;
    return true;
  }
  if (o == "getctarank") {
    i.y = static_cast<u8>(bytes_of(s.ops[1]));
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], i.y);
    i.fn = getctarank;
    return true;
  }
  if (o == "isspacep") {
    i.d = pr(s.ops[0]), i.a = in(s.ops[1], 8), i.x = static_cast<u8>(space_of());
    i.fn = isspacep;
    return true;
  }
  if (o == "prefetch" || o == "prefetchu" || o == "applypriority" || o == "discard" || o == "createpolicy") {
    i.fn = nothing;
    return o[0] != 'c';
  }
  if (o == "mbarrier") {
    i.x = static_cast<u8>(2);
    if (space_of() == 0) i.x = 0;
    const std::string& what = s.words[1];
    if (what == "test_wait" || what == "try_wait") {
      i.d = pr(s.ops[0]);
      i.imm = address(s.ops[1], i.a, i.y);
      i.z = s.has("parity");
      i.n = what == "try_wait";
      i.b = in(s.ops[2], i.z ? 4 : 8);
      i.fn = mbarrier_wait;
      return true;
    }
    size_t k = 0;
    i.d = 0;
    if ((what == "arrive" || what == "arrive_drop") && s.ops[0].kind != POp::addr) {
      if (s.ops[0].kind == POp::reg) i.d = out(s.ops[0], 8) + 1;
      k = 1;
    }
    i.imm = address(s.ops[k], i.a, i.y);
    if (n > k + 1) i.b = in(s.ops[k + 1], 4), i.f = 1;
    i.z = what == "init" ? mInit : what == "arrive" ? (s.has("expect_tx") ? mArriveExpect : mArrive) : what == "arrive_drop" ? mArriveDrop : what == "expect_tx" ? mExpect : what == "complete_tx" ? mComplete : mInval;
    if (what == "arrive_drop" && s.has("expect_tx")) return false;
    i.fn = mbarrier;
    return true;
  }
  if (o == "cp" && s.words[1] == "reduce" && s.has("bulk") && !s.has("tensor")) {
    if (!s.has("bulk_group")) return false;
    u8 b = 0;
    i.imm = address(s.ops[0], i.a, b);
    s64 off = address(s.ops[1], i.b, b);
    if (off) return false;
    i.y = b;
    i.c = in(s.ops[2], 4);
    i.n = static_cast<u8>(reduction_of(s));
    i.e = t == "f32" ? 7 : t == "bf16" ? 9 : t == "f16" ? 6 : t == "u32" ? 2 : t == "s32" ? 3 : -1;
    if (i.e < 0) return false;
    i.fn = bulk_store;
    return true;
  }
  if (o == "cp" && s.has("tensor") && s.has("async")) {
    int rank = 0;
    for (auto& x : s.words)
      if (x.size() == 2 && x[1] == 'd' && isdigit(x[0])) rank = x[0] - '0';
    i.z = static_cast<u8>(rank);
    if (s.has("im2col") || !rank || s.has("prefetch")) return false;
    const bool load = s.has("mbarrier::complete_tx::bytes");
    const POp& map = s.ops[load ? 1 : 0];
    u8 b = 0;
    POp base = map;
    if (map.value) return false;
    address(map, i.b, b);
    if (b != 8) return false;
    if (map.parts.size() < 2) return false;
    i.list = list(map.parts[1], 4);
    if (load) {
      i.imm = address(s.ops[0], i.a, b), i.x = b;
      i.target = static_cast<u32>(address(s.ops[2], i.c, b)), i.y = b;
      i.f = s.has("multicast::cluster");
      if (i.f) i.d = in(s.ops[3], 2);
      i.fn = tma_load;
      return true;
    }
    i.imm = address(s.ops[1], i.a, b), i.x = b;
    i.n = static_cast<u8>(s.words[1] == "reduce" ? reduction_of(s) : rNone);
    i.fn = tma_store;
    return true;
  }
  if (o == "cp" && s.has("bulk")) {
    if (s.has("commit_group")) return i.fn = bulk_commit, true;
    if (s.has("wait_group")) return i.imm = s.ops[0].value, i.fn = bulk_wait, true;
    if (s.has("prefetch")) return i.fn = nothing, true;
    u8 b = 0;
    if (s.has("bulk_group")) {
      i.imm = address(s.ops[0], i.a, b);
      if (address(s.ops[1], i.b, b)) return false;
      i.y = b;
      i.c = in(s.ops[2], 4);
      i.fn = bulk_store;
      return true;
    }
    i.imm = address(s.ops[0], i.a, b), i.x = b;
    if (address(s.ops[1], i.b, b)) return false;
    i.n = b;
    i.c = in(s.ops[2], 4);
    u8 y = 0;
    i.target = static_cast<u32>(address(s.ops[3], i.e, y)), i.y = y;
    if (s.words[3] == "shared::cluster" && s.words[4] == "shared::cta") return i.fn = bulk_send, true;
    i.f = s.has("multicast::cluster");
    if (i.f) i.d = in(s.ops[4], 2);
    i.fn = bulk_load;
    return true;
  }
  if (o == "cp" && s.has("async")) {
    if (s.has("commit_group")) return i.fn = cp_async_commit, true;
    if (s.has("wait_group")) return i.imm = s.ops[0].value, i.fn = cp_async_wait, true;
    if (s.has("wait_all")) return i.f = 1, i.fn = cp_async_wait, true;
    if (s.has("mbarrier")) {
      i.n = s.has("noinc");
      i.imm = address(s.ops[0], i.a, i.y);
      i.fn = cp_async_arrive;
      return true;
    }
    i.imm = address(s.ops[0], i.a, i.y);
    u8 b = 0;
    const s64 off = address(s.ops[1], i.b, b);
    if (b != 8) return false;
    i.target = static_cast<u32>(off) & 0x7fffffff;
    if (off < 0 || off > 0x3fffffff) return false;
    i.n = static_cast<u8>(s.ops[2].value);
    i.f = 0;
    if (n > 3) {
      if (s.ops[3].kind == POp::reg && bytes_of(s.ops[3]) == 0)
        i.f = 2, i.c = pr(s.ops[3]);
      else
        i.f = 1, i.c = in(s.ops[3], 4);
    }
    i.fn = cp_async;
    return true;
  }
  return false;
}

}  // namespace emu
