// What: matrix instructions: mma.sync, ldmatrix, stmatrix, wgmma.
#include <algorithm>
#include <cmath>

#include "interp.hpp"

namespace emu {
namespace {

enum Kind { kF16, kBf16, kTf32, kE4m3, kE5m2 };
float element(const char* p, int kind) {
  switch (kind) {
    case kF16: { u16 x; memcpy(&x, p, 2); return f16_to_float(x); }
    case kBf16: { u16 x; memcpy(&x, p, 2); return bf16_to_float(x); }
    case kTf32: { u32 x; memcpy(&x, p, 4); x &= 0xffffe000u; return std::bit_cast<float>(x); }
    case kE4m3: return e4m3_to_float(static_cast<u8>(*p));
    default: return e5m2_to_float(static_cast<u8>(*p));
  }
}
int kind_of(const std::string& t) {
  return t == "f16" ? kF16 : t == "bf16" ? kBf16 : t == "tf32" ? kTf32 : t == "e4m3" ? kE4m3 : t == "e5m2" ? kE5m2 : -1;
}
int kind_bytes(int k) { return k == kTf32 ? 4 : k <= kBf16 ? 2 : 1; }

// c += a b over K, a [16][K], b [K][8], c [16][8]: the products of each 16 of K summed, then added.
template <int K>
inline void product_16x8(const float* a, const float* b, float* c) {
  for (int m = 0; m < 16; ++m) {
    float s[8] = {};
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < 8; ++n) s[n] += a[m * K + k] * b[k * 8 + n];
    for (int n = 0; n < 8; ++n) c[m * 8 + n] += s[n];
  }
}
// x: kind; n: K; list: d 4, a (1, 2, 4), b (1, 2), c 4; y: registers of a, z: of b
void mma_16x8(Warp& w, const Inst& in) {
  if (!whole_warp(w)) return;
  const int K = in.n, kind = in.x, bytes = kind_bytes(kind), per = 4 / bytes;
  float a[16 * 32], b[32 * 8], c[16 * 8];
  const s32* l = in.list->data();
  // fragments: the register r of a holds row lane / 4 + 8 (r % 2), k (r / 2) 4 per + (lane % 4) per + e
  for (int r = 0; r < in.y; ++r) {
    const char* s = src<char>(w, l[4 + r]);
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < per; ++e)
        a[(i / 4 + 8 * (r % 2)) * K + (r / 2) * 4 * per + (i % 4) * per + e] = element(s + i * 4 + e * bytes, kind);
  }
  for (int r = 0; r < in.z; ++r) {
    const char* s = src<char>(w, l[4 + in.y + r]);
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < per; ++e)
        b[(r * 4 * per + (i % 4) * per + e) * 8 + i / 4] = element(s + i * 4 + e * bytes, kind);
  }
  for (int r = 0; r < 4; ++r) {
    const float* s = src<float>(w, l[4 + in.y + in.z + r]);
    for (int i = 0; i < 32; ++i) c[(i / 4 + 8 * (r / 2)) * 8 + (i % 4) * 2 + r % 2] = s[i];
  }
  K == 4 ? product_16x8<4>(a, b, c) : K == 8 ? product_16x8<8>(a, b, c) : K == 16 ? product_16x8<16>(a, b, c) : product_16x8<32>(a, b, c);
  for (int r = 0; r < 4; ++r) {
    float* d = dst<float>(w, l[r]);
    for (int i = 0; i < 32; ++i) d[i] = c[(i / 4 + 8 * (r / 2)) * 8 + (i % 4) * 2 + r % 2];
  }
}

// x: matrices; y: bytes of the address; z: trans; n: 1 store; list: registers
void matrix(Warp& w, const Inst& in) {
  if (!whole_warp(w)) return;
  for (int q = 0; q < in.x; ++q) {
    char* row[8];
    for (int r = 0; r < 8; ++r) {
      const int lane = q * 8 + r;
      const u64 a = (in.y == 4 ? src<u32>(w, in.a)[lane] : src<u64>(w, in.a)[lane]) + static_cast<u64>(in.imm);
      if (a & 15) fail("misaligned address in ldmatrix or stmatrix");
      row[r] = shared_at(*w.block, a & 0xffffffff, 16);
    }
    u32* d = in.n ? nullptr : dst<u32>(w, (*in.list)[static_cast<size_t>(q)]);
    const u32* s = in.n ? src<u32>(w, (*in.list)[static_cast<size_t>(q)]) : nullptr;
    for (int i = 0; i < 32; ++i) {
      if (!in.z) {
        if (s)
          memcpy(row[i / 4] + (i % 4) * 4, s + i, 4);
        else
          memcpy(d + i, row[i / 4] + (i % 4) * 4, 4);
      } else {  // element e of lane i: row (i % 4) 2 + e, column i / 4
        for (int e = 0; e < 2; ++e) {
          char* p = row[(i % 4) * 2 + e] + (i / 4) * 2;
          if (s)
            memcpy(p, reinterpret_cast<const char*>(s + i) + 2 * e, 2);
          else
            memcpy(reinterpret_cast<char*>(d + i) + 2 * e, p, 2);
        }
      }
    }
  }
  if (in.n) ++w.m->progress;
}
void movmatrix(Warp& w, const Inst& in) {
  if (!whole_warp(w)) return;
  u16 x[8][8];
  const u16* a = src<u16>(w, in.a);
  for (int i = 0; i < 32; ++i)
    for (int e = 0; e < 2; ++e) x[i / 4][(i % 4) * 2 + e] = a[2 * i + e];
  u16* d = dst<u16>(w, in.d);
  for (int i = 0; i < 32; ++i)
    for (int e = 0; e < 2; ++e) d[2 * i + e] = x[(i % 4) * 2 + e][i / 4];
}

// ---- wgmma -------------------------------------------------------------------------------------
struct Desc {
  u32 start, lead, stride;
  int swizzle;  // 0 none, 1 128, 2 64, 3 32
  explicit Desc(u64 d)
      : start(static_cast<u32>(d & 0x3fff) << 4), lead(static_cast<u32>((d >> 16) & 0x3fff) << 4), stride(static_cast<u32>((d >> 32) & 0x3fff) << 4), swizzle(static_cast<int>(d >> 62)) {
    if ((d >> 49) & 7) fail("unknown instruction: wgmma descriptor with a base offset");
  }
  u32 place(u32 a) const {
    a &= 0x3ffff;
    switch (swizzle) {
      case 1: return a ^ ((a >> 3) & 0x70);
      case 2: return a ^ ((a >> 3) & 0x30);
      case 3: return a ^ ((a >> 3) & 0x10);
      default: return a;
    }
  }
};
// Address of the 16 bytes at K-major (row mn, 16-byte chunk c of k)
inline u32 k_major(const Desc& d, u32 mn, u32 chunk) {
  if (d.swizzle == 0) return d.start + (mn / 8) * d.stride + (mn % 8) * 16 + chunk * d.lead;
  const u32 pitch = d.swizzle == 1 ? 128 : d.swizzle == 2 ? 64 : 32;
  return d.place(d.start + (mn / 8) * d.stride + (mn % 8) * pitch + chunk * 16);
}
// Address of the 8 elements of 16 bits at MN-major (k, group g of 8 along mn)
inline u32 mn_major(const Desc& d, u32 g, u32 k) {
  if (d.swizzle == 0) return d.start + g * d.stride + (k / 8) * d.lead + (k % 8) * 16;
  const u32 groups = d.swizzle == 1 ? 8 : d.swizzle == 2 ? 4 : 2;
  return d.place(d.start + (g / groups) * d.lead + (k / 8) * d.stride + (k % 8) * groups * 16 + (g % groups) * 16);
}
inline __m512 widen(__m256i x, int kind) {
  if (kind == kF16) return _mm512_cvtph_ps(x);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// out[k][ld]: rows [row0, row0 + count) along mn; count a multiple of 8
void unpack_operand(Block& b, const Desc& d, bool mn, int kind, u32 row0, u32 count, float* out, u32 ld) {
  const auto at = [&](u32 a) -> const char* {
    a &= 0x3ffff;
    if (a < kSharedStart || a + 16 > b.shared_end) fail("out of bounds: wgmma reads shared address " + std::to_string(a));
    return b.shared + a;
  };
  const int bytes = kind_bytes(kind), per = 16 / bytes;
  if (mn) {
    if (bytes != 2) fail("illegal instruction: an MN-major wgmma operand that is not of 16 bits");
    for (u32 k = 0; k < 16; ++k)
      for (u32 g = 0; g < count / 8; ++g) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(mn_major(d, row0 / 8 + g, k))));
        const __m256 y = kind == kF16 ? _mm256_cvtph_ps(x) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
        _mm256_storeu_ps(out + k * ld + g * 8, y);
      }
    return;
  }
  if (bytes == 2 && count % 16 == 0) {
    for (u32 r = 0; r < count; r += 16)
      for (u32 c = 0; c < 2; ++c) {
        alignas(64) u32 x[4][16];
        for (u32 q = 0; q < 16; ++q) {
          const char* p = at(k_major(d, row0 + r + q, c));
          u32 v[4];
          memcpy(v, p, 16);
          for (int e = 0; e < 4; ++e) x[e][q] = v[e];
        }
        for (u32 e = 0; e < 4; ++e) {
          const __m512i v = _mm512_load_si512(x[e]);
          __m512 lo, hi;
          if (kind == kBf16) {
            lo = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
            hi = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
          } else {
            lo = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
            hi = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
          }
          _mm512_storeu_ps(out + (c * 8 + 2 * e) * ld + r, lo);
          _mm512_storeu_ps(out + (c * 8 + 2 * e + 1) * ld + r, hi);
        }
      }
    return;
  }
  for (u32 r = 0; r < count; ++r)
    for (u32 c = 0; c < 2; ++c) {
      const char* p = at(k_major(d, row0 + r, c));
      for (int e = 0; e < per; ++e) out[(c * static_cast<u32>(per) + static_cast<u32>(e)) * ld + r] = element(p + e * bytes, kind);
    }
}

// Inst: list: accumulators; n: N / 8; x: kind; y: bits 0 tnspA, 1 tnspB, 2 A in registers, 3 negate A, 4 negate B
// a: descriptor of A; b: descriptor of B; c: scale-d predicate (f = 0), else imm
// imm: index of A's registers list: `target` = offset within the list of A's registers
// All four warps' parts of one multiplication.
void execute(Warp* group, WgmmaOp** ops) {
  const Inst& in = *ops[0]->inst;
  const u32 N = in.n * 8u, ld = (N + 15) / 16 * 16;
  const int kind = in.x, K = 32 / kind_bytes(kind);
  alignas(64) float bt[32 * 256];
  alignas(64) float at[32 * 16];
  Block& b = *group->block;
  if (N % 16) memset(bt, 0, sizeof(float) * static_cast<size_t>(K) * ld);
  unpack_operand(b, Desc(ops[0]->db), in.y & 2, kind, 0, N, bt, ld);
  const float sign = ((in.y >> 3) & 1) != ((in.y >> 4) & 1) ? -1.f : 1.f;
  for (u32 q = 0; q < 4; ++q) {
    WgmmaOp& op = *ops[q];
    if (op.inst != ops[0]->inst || op.db != ops[0]->db || (!op.a_in_registers && op.da != ops[0]->da) || op.adds != ops[0]->adds)
      fail("wgmma: the warps of a warpgroup differ in instruction or descriptors");
    if (!op.a_in_registers) unpack_operand(b, Desc(op.da), in.y & 1, kind, 16 * q, 16, at, 16);
    const float* a = op.a_in_registers ? op.a : at;
    float* x = op.tile->x.data();
    if (K == 16) {
      for (u32 n = 0; n < N; n += 16) {
        __m512 v[16];
        for (int k = 0; k < 16; ++k) v[k] = _mm512_load_ps(bt + static_cast<u32>(k) * ld + n);
        for (int m = 0; m < 16; ++m) {
          __m512 s0 = _mm512_setzero_ps(), s1 = s0;
#pragma GCC unroll 8
          for (int k = 0; k < 16; k += 2) {
            s0 = _mm512_fmadd_ps(_mm512_set1_ps(a[k * 16 + m]), v[k], s0);
            s1 = _mm512_fmadd_ps(_mm512_set1_ps(a[(k + 1) * 16 + m]), v[k + 1], s1);
          }
          float* r = x + static_cast<u32>(m) * ld + n;
          s0 = _mm512_mul_ps(_mm512_add_ps(s0, s1), _mm512_set1_ps(sign));
          _mm512_storeu_ps(r, op.adds ? _mm512_add_ps(_mm512_loadu_ps(r), s0) : s0);
        }
      }
    } else {
      for (int m = 0; m < 16; ++m)
        for (u32 n = 0; n < N; ++n) {
          float t = 0;
          for (int k = 0; k < K; ++k) t += a[k * 16 + m] * bt[static_cast<u32>(k) * ld + n];
          float& r = x[static_cast<u32>(m) * ld + n];
          r = op.adds ? r + sign * t : sign * t;
        }
    }
  }
}

void tile_to_registers(Warp& w, AccTile& t) {
  const u32 ld = (static_cast<u32>(t.n) + 15) / 16 * 16;
  for (int r = 0; r < t.n / 2; ++r) {
    float* d = dst<float>(w, (*t.list)[static_cast<size_t>(r)]);
    const float* s = t.x.data() + 8 * (r / 4) + r % 2 + 8 * ((r / 2) % 2) * static_cast<int>(ld);
    for (int i = 0; i < 32; ++i) d[i] = s[static_cast<u32>(i / 4) * ld + static_cast<u32>(2 * (i % 4))];
  }
}
void registers_to_tile(Warp& w, AccTile& t) {
  const u32 ld = (static_cast<u32>(t.n) + 15) / 16 * 16;
  for (int r = 0; r < t.n / 2; ++r) {
    const float* d = src<float>(w, (*t.list)[static_cast<size_t>(r)]);
    float* s = t.x.data() + 8 * (r / 4) + r % 2 + 8 * ((r / 2) % 2) * static_cast<int>(ld);
    for (int i = 0; i < 32; ++i) s[static_cast<u32>(i / 4) * ld + static_cast<u32>(2 * (i % 4))] = d[i];
  }
}
void wgmma(Warp& w, const Inst& in) {
  if (!whole_warp(w)) return;
  if (w.live != ~0u) fail("wgmma in a warp of which lanes have exited");
  if (static_cast<size_t>(w.index | 3) >= w.block->warps.size()) fail("wgmma outside a whole warpgroup");
  const s32 first = (*in.list)[0];
  const int n = in.n * 8;
  AccTile* tile = nullptr;
  for (AccTile* t : w.tiles)
    if (t->first == first) tile = t;
  const bool adds = in.f ? in.c != 0 : (pred(w, in.c) & 1) != 0;
  if (tile && tile->n != n) fail("wgmma: an accumulator in flight with another shape");
  if (!tile) {
    tile = new AccTile;
    tile->first = first, tile->list = in.list, tile->n = n;
    tile->x.resize(static_cast<size_t>(16 * ((n + 15) / 16 * 16)));
    if (adds) registers_to_tile(w, *tile);
    for (int r = 0; r < n / 2; ++r) memset(w.regs + (*in.list)[static_cast<size_t>(r)], 0xff, 128);
    w.tiles.push_back(tile);
  }
  auto* op = new WgmmaOp;
  op->tile = tile, op->inst = &in;
  op->adds = adds;
  op->da = src<u64>(w, in.a)[0], op->db = src<u64>(w, in.b)[0];
  op->a_in_registers = in.y & 4;
  if (op->a_in_registers) {
    const int bytes = kind_bytes(in.x), per = 4 / bytes;
    for (int r = 0; r < 4; ++r) {
      const char* s = src<char>(w, (*in.list)[static_cast<size_t>(n / 2 + r)]);
      for (int i = 0; i < 32; ++i)
        for (int e = 0; e < per; ++e)
          op->a[((r / 2) * 4 * per + (i % 4) * per + e) * 16 + i / 4 + 8 * (r % 2)] = element(s + i * 4 + e * bytes, in.x);
    }
  }
  op->group = w.wgmma_group;
  tile->group = w.wgmma_group;
  ++tile->pending;
  w.wgmmas.push_back(op);
  ++w.m->progress;
  const int mode = w.m->async_mode;
  if (mode == 1)
    while (run_one_wgmma(w)) {
    }
  else if (mode == 0 && (w.m->rnd() & 7) == 0)
    for (u32 k = w.m->rnd() % 4; k && run_one_wgmma(w); --k) {
    }
}
void wgmma_commit(Warp& w, const Inst&) {
  if (!whole_warp(w)) return;
  ++w.wgmma_group;
}
void wgmma_wait(Warp& w, const Inst& in) {
  if (!whole_warp(w)) return;
  const u64 n = static_cast<u64>(in.imm);
  if (w.wgmma_group < n) return;
  if (run_wgmmas(w, w.wgmma_group - n)) return;
  --w.pc;  // the other warps of the warpgroup have not come yet
  w.trying = true;
  w.stop = Stop::warp_waits;
}
void wgmma_fence(Warp& w, const Inst&) { whole_warp(w); }

}  // namespace

// A multiplication is one of the whole warpgroup: it begins when all four warps have come to it.
bool run_one_wgmma(Warp& w) {
  if (w.wgmmas.empty()) return false;
  Warp* group = &w.block->warps[static_cast<size_t>(w.index & ~3)];
  WgmmaOp* ops[4];
  for (int q = 0; q < 4; ++q) {
    if (group[q].wgmmas.empty()) return false;
    ops[q] = group[q].wgmmas.front();
  }
  execute(group, ops);
  for (int q = 0; q < 4; ++q) {
    group[q].wgmmas.pop_front();
    --ops[q]->tile->pending;
    delete ops[q];
  }
  ++w.m->progress;
  return true;
}
// All of groups below `group`; then the tiles that only such groups add to return to registers.
// false: other warps have not come yet.
bool run_wgmmas(Warp& w, u64 group) {
  while (!w.wgmmas.empty() && w.wgmmas.front()->group < group)
    if (!run_one_wgmma(w)) return false;
  for (size_t k = 0; k < w.tiles.size();) {
    AccTile* t = w.tiles[k];
    if (t->group < group) {
      tile_to_registers(w, *t);
      delete t;
      w.tiles.erase(w.tiles.begin() + static_cast<std::ptrdiff_t>(k));
    } else {
      ++k;
    }
  }
  return true;
}

bool Decoder::mma(const PInst& s, Inst& i) {
  const std::string& o = s.words[0];
  const auto address = [&](const POp& a) -> bool {
    const POp& base = a.parts[0];
    if (base.kind == POp::reg) {
      i.y = static_cast<u8>(bytes_of(base));
      i.a = in(base, i.y);
      i.imm = a.value;
      return true;
    }
    bool ok = false;
    i.y = 8;
    i.a = constant(symbol(base.name, ok) + static_cast<u64>(a.value), 8);
    return ok;
  };
  if (o == "ldmatrix" || o == "stmatrix") {
    if (!s.has("m8n8") || s.words.back() != "b16") return false;
    i.x = s.has("x1") ? 1 : s.has("x2") ? 2 : 4;
    i.z = s.has("trans");
    i.n = o == "stmatrix";
    const POp& v = s.ops[i.n ? 1 : 0];
    i.list = list(v, 4);
    i.fn = matrix;
    return address(s.ops[i.n ? 0 : 1]);
  }
  if (o == "movmatrix") {
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], 4);
    i.fn = movmatrix;
    return true;
  }
  if (o == "mma") {
    int k = 0;
    bool shape = false;
    for (auto& x : s.words)
      if (x.rfind("m16n8k", 0) == 0) k = atoi(x.c_str() + 6), shape = true;
    const size_t z = s.words.size();
    if (!shape || z < 4 || s.words[z - 4] != "f32" || s.words[z - 1] != "f32" || s.has("sp")) return false;
    const int ka = kind_of(s.words[z - 3]), kb = kind_of(s.words[z - 2]);
    if (ka < 0 || ka != kb || !s.has("row") || !s.has("col")) return false;
    i.x = static_cast<u8>(ka), i.n = static_cast<u8>(k);
    i.y = static_cast<u8>(s.ops[1].kind == POp::vec ? s.ops[1].parts.size() : 1);
    i.z = static_cast<u8>(s.ops[2].kind == POp::vec ? s.ops[2].parts.size() : 1);
    p.lists.emplace_back();
    std::vector<s32>& l = p.lists.back();
    for (size_t q = 0; q < 4; ++q) {
      if (q == 0) {
        for (auto& r : s.ops[0].parts) l.push_back(out(r, 4));
      } else if (s.ops[q].kind == POp::vec) {
        for (auto& r : s.ops[q].parts) l.push_back(in(r, 4));
      } else {
        l.push_back(in(s.ops[q], 4));
      }
    }
    if (static_cast<int>(l.size()) != 8 + i.y + i.z) return false;
    i.list = &l;
    i.fn = mma_16x8;
    return true;
  }
  if (o == "wgmma") {
    if (s.has("fence")) return i.fn = wgmma_fence, true;
    if (s.has("commit_group")) return i.fn = wgmma_commit, true;
    if (s.has("wait_group")) return i.imm = s.ops[0].value, i.fn = wgmma_wait, true;
    if (!s.has("mma_async") || s.has("sp")) return false;
    int n = 0;
    for (auto& x : s.words)
      if (x.rfind("m64n", 0) == 0) n = atoi(x.c_str() + 4);
    const size_t z = s.words.size();
    if (s.words[z - 3] != "f32") return false;
    const int ka = kind_of(s.words[z - 2]);
    if (ka < 0 || kind_of(s.words[z - 1]) != ka || n % 8 || n > 256) return false;
    if (static_cast<int>(s.ops[0].parts.size()) != n / 2) return false;
    i.n = static_cast<u8>(n / 8);
    i.x = static_cast<u8>(ka);
    p.lists.emplace_back();
    std::vector<s32>& l = p.lists.back();
    for (auto& r : s.ops[0].parts) l.push_back(out(r, 4));
    i.y = 0;
    if (s.ops[1].kind == POp::vec) {
      for (auto& r : s.ops[1].parts) l.push_back(in(r, 4));
      i.y |= 4;
    } else {
      i.a = in(s.ops[1], 8);
    }
    i.list = &l;
    i.b = in(s.ops[2], 8);
    if (s.ops[3].kind == POp::imm)
      i.f = 1, i.c = s.ops[3].value != 0;
    else
      i.c = pr(s.ops[3]);
    if (s.ops.size() > 4 && s.ops[4].value == -1) i.y |= 8;
    if (s.ops.size() > 5 && s.ops[5].value == -1) i.y |= 16;
    if (i.y & 4) {
      if (s.ops.size() > 6 && s.ops[6].value) i.y |= 2;
    } else {
      if (s.ops.size() > 6 && s.ops[6].value) i.y |= 1;
      if (s.ops.size() > 7 && s.ops[7].value) i.y |= 2;
    }
    i.fn = wgmma;
    return true;
  }
  return false;
}

}  // namespace emu
