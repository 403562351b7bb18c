// What: conversions.
#include <cmath>

#include "interp.hpp"

namespace emu {

float e4m3_to_float(u8 x) {
  const int e = (x >> 3) & 15, m = x & 7;
  if (e == 15 && m == 7) return std::bit_cast<float>(0x7fffffffu);
  const float v = e ? std::ldexp(1.f + static_cast<float>(m) / 8, e - 7) : std::ldexp(static_cast<float>(m) / 8, -6);
  return x & 0x80 ? -v : v;
}
float e5m2_to_float(u8 x) { return f16_to_float(static_cast<u16>(x << 8)); }

namespace {
// Nearest-even on a grid of `mant` bits with the least exponent `emin`; saturates at `most`.
u8 to_f8(float f, int mant, int bias, float most, u8 most_bits, u8 nan) {
  const u8 sign = std::signbit(f) ? 0x80 : 0;
  if (f != f) return nan;
  const double a = std::fabs(static_cast<double>(f));
  if (a == 0) return sign;
  int e = 0;
  std::frexp(a, &e);
  e -= 1;
  const int emin = 1 - bias;
  if (e < emin) e = emin;
  const double unit = std::ldexp(1.0, e - mant);
  const double r = std::nearbyint(a / unit) * unit;
  if (r > most) return sign | most_bits;
  if (r == 0) return sign;
  std::frexp(r, &e);
  e -= 1;
  if (e < emin) return sign | static_cast<u8>(std::lround(r / std::ldexp(1.0, emin - mant)));
  const int m = static_cast<int>(std::lround((r / std::ldexp(1.0, e) - 1) * (1 << mant)));
  return sign | static_cast<u8>(((e + bias) << mant) | m);
}
}  // namespace
u8 float_to_e4m3(float f) { return to_f8(f, 3, 7, 448.f, 0x7e, 0x7f); }
u8 float_to_e5m2(float f) { return to_f8(f, 2, 15, 57344.f, 0x7b, 0x7f); }

namespace {

inline float ftz(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }

template <class D, class S, class R, class Q>  // R: dest register, Q: source register
void int_int(Warp& w, const Inst& in) {
  R* d = dst<R>(w, in.d);
  const Q* a = src<Q>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<R>(static_cast<D>(static_cast<S>(a[i]))));
}

// Slow and general: through s64 / double.
using LoadInt = void (*)(const char*, s64*);
template <class Q, class S>
void load_int(const char* p, s64* x) {
  const Q* a = reinterpret_cast<const Q*>(p);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<s64>(static_cast<S>(a[i]));
}
using StoreInt = void (*)(char*, const s64*, u32);
template <class R, class D>
void store_int(char* p, const s64* x, u32 mask) {
  R* d = reinterpret_cast<R*>(p);
  for (int i = 0; i < 32; ++i)
    if ((mask >> i) & 1) d[i] = static_cast<R>(static_cast<D>(x[i]));
}
template <template <class, class> class F>
struct Nothing {};
#define TABLE(NAME, RESULT, FUNC)                                                                      \
  RESULT NAME(int reg, const std::string& t) {                                                         \
    if (reg == 2) return t == "s8" ? FUNC<u16, s8> : t == "u8" ? FUNC<u16, u8> : t == "s16" ? FUNC<u16, s16> : FUNC<u16, u16>; \
    if (reg == 4) return t == "s8" ? FUNC<u32, s8> : t == "u8" ? FUNC<u32, u8> : t == "s16" ? FUNC<u32, s16> : t == "u16" ? FUNC<u32, u16> : t == "s32" ? FUNC<u32, s32> : FUNC<u32, u32>; \
    return t == "s8" ? FUNC<u64, s8> : t == "u8" ? FUNC<u64, u8> : t == "s16" ? FUNC<u64, s16> : t == "u16" ? FUNC<u64, u16> : t == "s32" ? FUNC<u64, s32> : t == "u32" ? FUNC<u64, u32> : t == "s64" ? FUNC<u64, s64> : FUNC<u64, u64>; \
  }
TABLE(load_int_of, LoadInt, load_int)
TABLE(store_int_of, StoreInt, store_int)

enum Float { fHalf, fBf, fSingle, fDouble };
Float float_of(const std::string& t) {
  return t == "f16" ? fHalf : t == "bf16" ? fBf : t == "f32" ? fSingle : fDouble;
}
bool is_float(const std::string& t) { return t == "f16" || t == "bf16" || t == "f32" || t == "f64"; }

double load_float(Float f, const char* p, int i) {
  switch (f) {
    case fHalf: return f16_to_float(reinterpret_cast<const u16*>(p)[i]);
    case fBf: return bf16_to_float(reinterpret_cast<const u16*>(p)[i]);
    case fSingle: return reinterpret_cast<const float*>(p)[i];
    default: return reinterpret_cast<const double*>(p)[i];
  }
}
float narrow(double r, int mode) {  // 0 rn, 1 rz, 2 rm, 3 rp
  float q = static_cast<float>(r);
  if (mode == 0 || q != q || static_cast<double>(q) == r) return q;
  if (mode == 1) return std::fabs(static_cast<double>(q)) > std::fabs(r) ? std::nextafter(q, 0.f) : q;
  if (mode == 2) return q > r ? std::nextafter(q, -INFINITY) : q;
  return q < r ? std::nextafter(q, INFINITY) : q;
}
float odd(double r) {  // to f32, rounding to odd
  float q = static_cast<float>(r);
  if (static_cast<double>(q) == r || q != q) return q;
  if (std::fabs(static_cast<double>(q)) > std::fabs(r)) q = std::nextafter(q, 0.f);
  return std::bit_cast<float>(std::bit_cast<u32>(q) | 1);
}
float narrow_half(double r, bool bf, int mode) {
  const float q = odd(r);
  u16 h = bf ? float_to_bf16(q) : float_to_f16(q);
  const auto back = [&](u16 x) { return bf ? bf16_to_float(x) : f16_to_float(x); };
  if (mode && r == r) {
    const double v = back(h);
    const bool away = std::fabs(v) > std::fabs(r), up = v > r;
    if (mode == 1 && away) --h;
    if (mode == 2 && up) h = static_cast<u16>(h & 0x8000 ? h + 1 : h - 1);
    if (mode == 3 && v < r) h = static_cast<u16>(h & 0x8000 ? h - 1 : h + 1);
  }
  return back(h);
}
void store_float(Float f, char* p, int i, double v, int mode) {
  switch (f) {
    case fHalf: reinterpret_cast<u16*>(p)[i] = float_to_f16(narrow_half(v, false, mode)); break;
    case fBf: reinterpret_cast<u16*>(p)[i] = float_to_bf16(narrow_half(v, true, mode)); break;
    case fSingle: reinterpret_cast<float*>(p)[i] = narrow(v, mode); break;
    default: reinterpret_cast<double*>(p)[i] = v;
  }
}
double round_int(double v, int mode) {
  switch (mode) {
    case 0: return std::nearbyint(v);
    case 1: return std::trunc(v);
    case 2: return std::floor(v);
    default: return std::ceil(v);
  }
}
// x, y: float kinds of source and dest; z: rounding mode; n: bits 0 integer rounding, 1 ftz, 2 sat
void float_float(Warp& w, const Inst& in) {
  char* d = w.regs + in.d;
  const char* a = src<char>(w, in.a);
  EMU_EACH(w, i, {
    double v = load_float(static_cast<Float>(in.x), a, i);
    if ((in.n & 2) && in.x == fSingle) v = ftz(static_cast<float>(v));
    if (in.n & 1) v = round_int(v, in.z);
    if (in.n & 4) v = v > 0 ? (v < 1 ? v : 1) : 0;
    store_float(static_cast<Float>(in.y), d, i, v, in.n & 1 ? 0 : in.z);
    if ((in.n & 2) && in.y == fSingle) {
      float* q = reinterpret_cast<float*>(d) + i;
      *q = ftz(*q);
    }
  });
}
// list: unused; imm: function of the store; e: bits of dest, negative if signed
void float_int(Warp& w, const Inst& in) {
  char* d = w.regs + in.d;
  const char* a = src<char>(w, in.a);
  s64 r[32] = {};
  const int bits = in.e < 0 ? -in.e : in.e;
  EMU_EACH(w, i, {
    double v = load_float(static_cast<Float>(in.x), a, i);
    if ((in.n & 2) && in.x == fSingle) v = ftz(static_cast<float>(v));
    v = round_int(v, in.z);
    if (v != v) {
      r[i] = 0;
    } else if (in.e < 0) {
      const double most = std::ldexp(1.0, bits - 1);
      r[i] = v >= most ? static_cast<s64>((1ull << (bits - 1)) - 1) : v < -most ? static_cast<s64>(~0ull << (bits - 1)) : static_cast<s64>(v);
    } else {
      const double most = std::ldexp(1.0, bits);
      r[i] = static_cast<s64>(v >= most ? (bits == 64 ? ~0ull : (1ull << bits) - 1) : v <= 0 ? 0ull : static_cast<u64>(v));
    }
  });
  reinterpret_cast<StoreInt>(in.imm)(d, r, w.mask);
}
// imm: function of the load; y: dest; x: 1 if u64
void int_float(Warp& w, const Inst& in) {
  char* d = w.regs + in.d;
  s64 x[32];
  reinterpret_cast<LoadInt>(in.imm)(src<char>(w, in.a), x);
  const bool uns = in.x;
  EMU_EACH(w, i, {
    if (in.y == fDouble) {
      reinterpret_cast<double*>(d)[i] = uns ? static_cast<double>(static_cast<u64>(x[i])) : static_cast<double>(x[i]);
    } else if (in.y == fSingle) {
      if (in.z == 0) {
        reinterpret_cast<float*>(d)[i] = uns ? static_cast<float>(static_cast<u64>(x[i])) : static_cast<float>(x[i]);
      } else {  // exact in long double
        const long double v = uns ? static_cast<long double>(static_cast<u64>(x[i])) : static_cast<long double>(x[i]);
        float q = static_cast<float>(v);
        if (q != v) {
          const bool above = q > v;
          if (in.z == 1 && (above == (v > 0))) q = std::nextafter(q, 0.f);
          if (in.z == 2 && above) q = std::nextafter(q, -INFINITY);
          if (in.z == 3 && !above) q = std::nextafter(q, INFINITY);
        }
        reinterpret_cast<float*>(d)[i] = q;
      }
    } else {
      store_float(static_cast<Float>(in.y), d, i, static_cast<double>(x[i]), in.z);
    }
  });
}

inline u32 bf16_bits(u32 x) {
  const u32 r = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  return (x & 0x7fffffff) > 0x7f800000 ? 0x7fff : r;
}
void bf16x2_f32(Warp& w, const Inst& in) {  // a high, b low
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b);
  EMU_EACH(w, i, d[i] = bf16_bits(a[i]) << 16 | bf16_bits(b[i]));
}
void bf16_f32(Warp& w, const Inst& in) {
  u16* d = dst<u16>(w, in.d);
  const u32* a = src<u32>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<u16>(bf16_bits(a[i])));
}
void f32_bf16(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u16* a = src<u16>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<u32>(a[i]) << 16);
}
inline u32 f16_bits(float x) { return float_to_f16(x); }
void f16x2_f32(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const float *a = src<float>(w, in.a), *b = src<float>(w, in.b);
  EMU_EACH(w, i, d[i] = f16_bits(a[i]) << 16 | f16_bits(b[i]));
}
void f16_f32(Warp& w, const Inst& in) {
  u16* d = dst<u16>(w, in.d);
  const float* a = src<float>(w, in.a);
  EMU_EACH(w, i, d[i] = float_to_f16(a[i]));
}
void f32_f16(Warp& w, const Inst& in) {
  float* d = dst<float>(w, in.d);
  const u16* a = src<u16>(w, in.a);
  EMU_EACH(w, i, d[i] = f16_to_float(a[i]));
}
void tf32_f32(Warp& w, const Inst& in) {  // x: 1 ties away, else to even
  u32* d = dst<u32>(w, in.d);
  const u32* a = src<u32>(w, in.a);
  EMU_EACH(w, i, {
    const u32 x = a[i];
    const u32 add = in.x ? 0x1000u : 0xfffu + ((x >> 13) & 1);
    d[i] = (x & 0x7f800000) == 0x7f800000 ? x : (x + add) & 0xffffe000u;
  });
}
void f32_s32(Warp& w, const Inst& in) {
  float* d = dst<float>(w, in.d);
  const s32* a = src<s32>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<float>(a[i]));
}
void rni_f32(Warp& w, const Inst& in) {
  float* d = dst<float>(w, in.d);
  const float* a = src<float>(w, in.a);
  EMU_EACH(w, i, d[i] = __builtin_rintf(a[i]));
}
void sat_f32(Warp& w, const Inst& in) {
  float* d = dst<float>(w, in.d);
  const float* a = src<float>(w, in.a);
  EMU_EACH(w, i, d[i] = a[i] > 0 ? (a[i] < 1 ? a[i] : 1.f) : 0.f);
}
void f64_f32(Warp& w, const Inst& in) {
  double* d = dst<double>(w, in.d);
  const float* a = src<float>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<double>(a[i]));
}
void f32_f64(Warp& w, const Inst& in) {
  float* d = dst<float>(w, in.d);
  const double* a = src<double>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<float>(a[i]));
}
template <bool kE5>
void f16x2_f8x2(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u16* a = src<u16>(w, in.a);
  EMU_EACH(w, i, {
    const auto f = [](u8 x) { return float_to_f16(kE5 ? e5m2_to_float(x) : e4m3_to_float(x)); };
    d[i] = f(static_cast<u8>(a[i])) | static_cast<u32>(f(static_cast<u8>(a[i] >> 8))) << 16;
  });
}
template <bool kE5>
void f8x2_f32(Warp& w, const Inst& in) {
  u16* d = dst<u16>(w, in.d);
  const float *a = src<float>(w, in.a), *b = src<float>(w, in.b);
  EMU_EACH(w, i, {
    const auto f = [](float x) { return kE5 ? float_to_e5m2(x) : float_to_e4m3(x); };
    d[i] = static_cast<u16>(f(b[i]) | f(a[i]) << 8);
  });
}

}  // namespace

bool Decoder::cvt(const PInst& s, Inst& i) {
  if (s.words[0] != "cvt" || s.words.size() < 3) return false;
  const std::string &D = s.words[s.words.size() - 2], &S = s.words.back();
  const bool sat = s.has("sat"), flush = s.has("ftz");
  int mode = 0;
  bool integral = false;
  for (auto& x : s.words) {
    if (x == "rz") mode = 1;
    if (x == "rm") mode = 2;
    if (x == "rp") mode = 3;
    if (x == "rni") mode = 0, integral = true;
    if (x == "rzi") mode = 1, integral = true;
    if (x == "rmi") mode = 2, integral = true;
    if (x == "rpi") mode = 3, integral = true;
  }
  if (S == "f32" && (D == "bf16x2" || D == "f16x2")) {
    if (sat || mode || s.has("relu") || s.ops.size() != 3) return false;
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], 4), i.b = in(s.ops[2], 4);
    i.fn = D == "bf16x2" ? bf16x2_f32 : f16x2_f32;
    return true;
  }
  if (S == "f32" && D == "tf32") {
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], 4);
    i.x = s.has("rna");
    i.fn = tf32_f32;
    return true;
  }
  if (D == "f16x2" && (S == "e4m3x2" || S == "e5m2x2")) {
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], 2);
    i.fn = S == "e4m3x2" ? f16x2_f8x2<false> : f16x2_f8x2<true>;
    return true;
  }
  if (S == "f32" && (D == "e4m3x2" || D == "e5m2x2")) {
    i.d = out(s.ops[0], 2), i.a = in(s.ops[1], 4), i.b = in(s.ops[2], 4);
    i.fn = D == "e4m3x2" ? f8x2_f32<false> : f8x2_f32<true>;
    return true;
  }
  const bool fd = is_float(D), fs = is_float(S);
  if (!fd && D[0] != 's' && D[0] != 'u' && D[0] != 'b') return false;
  if (!fs && S[0] != 's' && S[0] != 'u' && S[0] != 'b') return false;
  const int rd = bytes_of(s.ops[0]);
  int rs = bytes_of(s.ops[1]);
  if (!rs) rs = std::max(2, type_bytes(S));
  i.d = out(s.ops[0], rd), i.a = in(s.ops[1], rs);
  i.z = static_cast<u8>(mode);
  i.n = static_cast<u8>((integral ? 1 : 0) | (flush ? 2 : 0) | (sat ? 4 : 0));
  if (fd && fs) {
    if (S == "f32" && D == "bf16" && !i.n && !mode) return i.fn = bf16_f32, true;
    if (S == "bf16" && D == "f32" && !i.n) return i.fn = f32_bf16, true;
    if (S == "f32" && D == "f16" && !i.n && !mode) return i.fn = f16_f32, true;
    if (S == "f16" && D == "f32" && !i.n) return i.fn = f32_f16, true;
    if (S == "f32" && D == "f64" && !i.n) return i.fn = f64_f32, true;
    if (S == "f64" && D == "f32" && !i.n && !mode) return i.fn = f32_f64, true;
    if (S == "f32" && D == "f32" && i.n == 1 && mode == 0) return i.fn = rni_f32, true;
    if (S == "f32" && D == "f32" && i.n == 4) return i.fn = sat_f32, true;
    i.x = float_of(S), i.y = float_of(D);
    i.fn = float_float;
    return true;
  }
  if (fs) {
    i.x = float_of(S);
    i.e = type_bytes(D) * 8 * (D[0] == 's' ? -1 : 1);
    i.imm = reinterpret_cast<s64>(store_int_of(rd, D));
    i.fn = float_int;
    return true;
  }
  if (fd) {
    if (S == "s32" && D == "f32" && rs == 4 && !mode && !i.n) return i.fn = f32_s32, true;
    i.x = S == "u64" || S == "b64";
    i.y = float_of(D);
    i.imm = reinterpret_cast<s64>(load_int_of(rs, S));
    i.fn = int_float;
    return true;
  }
  if (sat) return false;
  // Integer to integer: what is stored depends on the source's extension and the dest's width.
#define FAST(DT, ST, R, Q)                                              \
  if (D == #DT && S == #ST && rd == sizeof(R) && rs == sizeof(Q)) {     \
    i.fn = int_int<DT, ST, R, Q>;                                       \
    return true;                                                        \
  }
  FAST(s64, s32, u64, u32) FAST(u64, u32, u64, u32) FAST(u32, u64, u32, u64) FAST(s32, s64, u32, u64)
  FAST(u32, u16, u32, u16) FAST(u16, u32, u16, u32) FAST(s64, u32, u64, u32) FAST(u64, s32, u64, u32)
  FAST(s32, s16, u32, u16) FAST(u32, s32, u32, u32) FAST(s32, u16, u32, u16) FAST(u16, u64, u16, u64)
  FAST(u64, u16, u64, u16) FAST(s64, s16, u64, u16) FAST(u32, u8, u32, u16) FAST(u16, u8, u16, u16)
  FAST(s16, s8, u16, u16) FAST(s32, s8, u32, u16) FAST(u32, u8, u32, u32) FAST(s32, s8, u32, u32)
  FAST(u32, u16, u32, u32) FAST(s32, s16, u32, u32) FAST(u64, u8, u64, u16) FAST(u64, u8, u64, u64)
  FAST(u16, s8, u16, u16) FAST(u16, s8, u16, u32) FAST(s16, s32, u16, u32) FAST(u8, u32, u16, u32) FAST(u64, u64, u64, u64)
  FAST(s64, s64, u64, u64) FAST(s64, s8, u64, u16) FAST(u16, u8, u16, u32) FAST(s16, s8, u16, u32)
  FAST(s64, s32, u64, u64) FAST(s64, s16, u64, u64) FAST(s64, s8, u64, u64) FAST(u64, u32, u64, u64) FAST(u64, u16, u64, u64)
  FAST(u32, u16, u32, u64) FAST(u32, u8, u32, u64) FAST(s32, s8, u32, u64) FAST(s32, s16, u32, u64) FAST(s64, s16, u64, u32) FAST(s64, u16, u64, u16)
  FAST(u16, s64, u16, u64) FAST(s16, s64, u16, u64) FAST(u16, s32, u16, u32) FAST(u64, s16, u64, u16) FAST(u8, u16, u16, u16) FAST(s8, s16, u16, u16) FAST(s8, s32, u16, u32)
  return false;
}

}  // namespace emu
