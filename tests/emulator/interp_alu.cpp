// What: arithmetic, logic, comparisons, moves.
#include <cmath>

#include "interp.hpp"

namespace emu {
namespace {

template <class T, class F>
inline void bin(Warp& w, const Inst& in, F f) {
  T* d = dst<T>(w, in.d);
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b);
  EMU_EACH(w, i, d[i] = f(a[i], b[i]));
}
template <class T, class F>
inline void una(Warp& w, const Inst& in, F f) {
  T* d = dst<T>(w, in.d);
  const T* a = src<T>(w, in.a);
  EMU_EACH(w, i, d[i] = f(a[i]));
}
template <class T, class F>
inline void ter(Warp& w, const Inst& in, F f) {
  T* d = dst<T>(w, in.d);
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b), *c = src<T>(w, in.c);
  EMU_EACH(w, i, d[i] = f(a[i], b[i], c[i]));
}

inline float ftz(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
inline u32 bits(float x) { return std::bit_cast<u32>(x); }
inline u64 bits(double x) { return std::bit_cast<u64>(x); }

template <class T>
struct Uint;
template <>
struct Uint<float> {
  using type = u32;
};
template <>
struct Uint<double> {
  using type = u64;
};

#define BIN(NAME, EXPR)                                              \
  template <class T>                                                 \
  void NAME(Warp& w, const Inst& in) {                               \
    bin<T>(w, in, [](T a, T b) -> T { return static_cast<T>(EXPR); }); \
  }
#define UNA(NAME, EXPR)                                         \
  template <class T>                                            \
  void NAME(Warp& w, const Inst& in) {                          \
    una<T>(w, in, [](T a) -> T { return static_cast<T>(EXPR); }); \
  }
#define TER(NAME, EXPR)                                                   \
  template <class T>                                                      \
  void NAME(Warp& w, const Inst& in) {                                    \
    ter<T>(w, in, [](T a, T b, T c) -> T { return static_cast<T>(EXPR); }); \
  }
BIN(op_add, a + b)
BIN(op_sub, a - b)
BIN(op_mul, a* b)
BIN(op_and, a& b)
BIN(op_or, a | b)
BIN(op_xor, a ^ b)
BIN(op_min, a < b ? a : b)
BIN(op_max, a > b ? a : b)
BIN(op_fdiv, a / b)
BIN(op_idiv, b == 0 ? static_cast<T>(-1) : (std::is_signed_v<T> && b == static_cast<T>(-1)) ? static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(a)) : a / b)
BIN(op_irem, b == 0 ? static_cast<T>(-1) : (std::is_signed_v<T> && b == static_cast<T>(-1)) ? T(0) : a % b)
UNA(op_not, ~a)
UNA(op_neg, -a)
UNA(op_ineg, T(0) - a)
UNA(op_abs, a < 0 ? T(0) - a : a)
UNA(op_mov, a)
TER(op_mad, a* b + c)
TER(op_fma, std::fma(a, b, c))
TER(op_sad, c + (a > b ? a - b : b - a))

template <class T>
inline T fmin_(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  using U = typename Uint<T>::type;
  if (a == b) return std::bit_cast<T>(static_cast<U>(bits(a) | bits(b)));
  return a < b ? a : b;
}
template <class T>
inline T fmax_(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  using U = typename Uint<T>::type;
  if (a == b) return std::bit_cast<T>(static_cast<U>(bits(a) & bits(b)));
  return a > b ? a : b;
}
BIN(op_fmin, fmin_(a, b))
BIN(op_fmax, fmax_(a, b))
BIN(op_fminnan, (a != a || b != b) ? std::bit_cast<float>(0x7fffffffu) : fmin_(a, b))
BIN(op_fmaxnan, (a != a || b != b) ? std::bit_cast<float>(0x7fffffffu) : fmax_(a, b))
UNA(op_sqrt, std::sqrt(a))
UNA(op_rcp, T(1) / a)
UNA(op_rsqrt, T(1 / std::sqrt(static_cast<double>(a))))

// copysign d, a, b: magnitude of b, sign of a
template <class T>
void op_copysign(Warp& w, const Inst& in) {
  bin<T>(w, in, [](T a, T b) -> T { return std::copysign(b, a); });
}
template <class T>
void op_fabs(Warp& w, const Inst& in) {
  una<T>(w, in, [](T a) -> T { return std::fabs(a); });
}
// Any f32 operation with .ftz or .sat: flush, do, flush.
#define FTZ_BIN(NAME, EXPR)                                                        \
  void NAME(Warp& w, const Inst& in) {                                             \
    bin<float>(w, in, [](float a, float b) { a = ftz(a), b = ftz(b); return ftz(EXPR); }); \
  }
FTZ_BIN(add_ftz, a + b)
FTZ_BIN(sub_ftz, a - b)
FTZ_BIN(mul_ftz, a* b)
FTZ_BIN(div_ftz, a / b)
FTZ_BIN(min_ftz, fmin_(a, b))
FTZ_BIN(max_ftz, fmax_(a, b))
void fma_ftz(Warp& w, const Inst& in) {
  ter<float>(w, in, [](float a, float b, float c) { return ftz(std::fma(ftz(a), ftz(b), ftz(c))); });
}
void saturate(Warp& w, const Inst& in) {
  in.inner(w, in);
  float* d = dst<float>(w, in.d);
  EMU_EACH(w, i, d[i] = d[i] > 0 ? (d[i] < 1 ? d[i] : 1.f) : 0.f);
}

template <bool kFtz>
inline float exp2_(float x) {
  if (kFtz) x = ftz(x);
  const float clamped = x < -160.f ? -160.f : x > 160.f ? 160.f : x;
  const float n = __builtin_rintf(clamped);
  const float f = clamped - n;
  float y = 1.5403530393381609954e-4f / 10.f;  // degree 7
  y = 1.5252733804059840280e-5f;
  y = y * f + 1.5403530393381609954e-4f;
  y = y * f + 1.3333558146428443423e-3f;
  y = y * f + 9.6181291076284771619e-3f;
  y = y * f + 5.5504108664821579953e-2f;
  y = y * f + 2.4022650695910071233e-1f;
  y = y * f + 6.9314718055994530942e-1f;
  y = y * f + 1.f;
  const s32 k = static_cast<s32>(n), k1 = k >> 1, k2 = k - k1;
  y = y * std::bit_cast<float>((k1 + 127) << 23) * std::bit_cast<float>((k2 + 127) << 23);
  if (kFtz) y = y < 1.17549435e-38f ? 0.f : y;
  return x != x ? std::bit_cast<float>(0x7fffffffu) : y;
}
template <bool kFtz>
void op_ex2(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) { return exp2_<kFtz>(a); });
}
template <bool kFtz>
void op_rcp_approx(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) { return kFtz ? ftz(1.f / ftz(a)) : 1.f / a; });
}
template <bool kFtz>
void op_lg2(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) {
    if (kFtz) a = ftz(a);
    return static_cast<float>(std::log2(static_cast<double>(a)));
  });
}
template <bool kFtz>
void op_rsqrt_f(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) {
    if (kFtz) a = ftz(a);
    return static_cast<float>(1 / std::sqrt(static_cast<double>(a)));
  });
}
template <bool kFtz>
void op_sqrt_f(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) { return kFtz ? ftz(std::sqrt(ftz(a))) : std::sqrt(a); });
}
void op_sin(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) { return static_cast<float>(std::sin(static_cast<double>(a))); });
}
void op_cos(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) { return static_cast<float>(std::cos(static_cast<double>(a))); });
}
void op_tanh(Warp& w, const Inst& in) {
  una<float>(w, in, [](float a) { return static_cast<float>(std::tanh(static_cast<double>(a))); });
}
void rcp_ftz_f64(Warp& w, const Inst& in) {  // the upper 32 bits alone
  una<double>(w, in, [](double a) {
    return std::bit_cast<double>(bits(1 / a) & 0xffffffff00000000ull);
  });
}

// Rounding other than to nearest.
template <int kMode>
void fma_rounded(Warp& w, const Inst& in) {
  constexpr int mode = kMode | _MM_FROUND_NO_EXC;
  float* d = dst<float>(w, in.d);
  const float *a = src<float>(w, in.a), *b = src<float>(w, in.b), *c = src<float>(w, in.c);
  for (int i = 0; i < 2; ++i) {
    const __m512 x = _mm512_fmadd_round_ps(_mm512_loadu_ps(a + 16 * i), _mm512_loadu_ps(b + 16 * i),
                                           _mm512_loadu_ps(c + 16 * i), mode);
    _mm512_mask_storeu_ps(d + 16 * i, static_cast<__mmask16>(w.mask >> (16 * i)), x);
  }
}
#define ROUNDED(NAME, INTRINSIC)                                                               \
  template <int kMode>                                                                         \
  void NAME(Warp& w, const Inst& in) {                                                         \
    constexpr int mode = kMode | _MM_FROUND_NO_EXC;                                            \
    float* d = dst<float>(w, in.d);                                                            \
    const float *a = src<float>(w, in.a), *b = src<float>(w, in.b);                            \
    for (int i = 0; i < 2; ++i) {                                                              \
      const __m512 x =                                                                         \
          INTRINSIC(_mm512_loadu_ps(a + 16 * i), _mm512_loadu_ps(b + 16 * i), mode);           \
      _mm512_mask_storeu_ps(d + 16 * i, static_cast<__mmask16>(w.mask >> (16 * i)), x);        \
    }                                                                                          \
  }
ROUNDED(add_rounded, _mm512_add_round_ps)
ROUNDED(sub_rounded, _mm512_sub_round_ps)
ROUNDED(mul_rounded, _mm512_mul_round_ps)
ROUNDED(div_rounded, _mm512_div_round_ps)

template <class T>
void op_shl(Warp& w, const Inst& in) {
  T* d = dst<T>(w, in.d);
  const T* a = src<T>(w, in.a);
  const u32* b = src<u32>(w, in.b);
  EMU_EACH(w, i, d[i] = b[i] >= sizeof(T) * 8 ? T(0) : static_cast<T>(a[i] << b[i]));
}
template <class T>
void op_shr(Warp& w, const Inst& in) {
  T* d = dst<T>(w, in.d);
  const T* a = src<T>(w, in.a);
  const u32* b = src<u32>(w, in.b);
  constexpr u32 n = sizeof(T) * 8;
  if constexpr (std::is_signed_v<T>)
    EMU_EACH(w, i, d[i] = static_cast<T>(a[i] >> (b[i] >= n ? n - 1 : b[i])));
  else
    EMU_EACH(w, i, d[i] = b[i] >= n ? T(0) : static_cast<T>(a[i] >> b[i]));
}
template <class T, class D>
void op_mul_wide(Warp& w, const Inst& in) {
  D* d = dst<D>(w, in.d);
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b);
  EMU_EACH(w, i, d[i] = static_cast<D>(a[i]) * static_cast<D>(b[i]));
}
template <class T, class D>
void op_mad_wide(Warp& w, const Inst& in) {
  D* d = dst<D>(w, in.d);
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b);
  const D* c = src<D>(w, in.c);
  EMU_EACH(w, i, d[i] = static_cast<D>(a[i]) * static_cast<D>(b[i]) + c[i]);
}
template <class T>
inline T mul_hi(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    if constexpr (std::is_signed_v<T>)
      return static_cast<T>((static_cast<__int128>(a) * b) >> 64);
    else
      return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> 64);
  } else {
    if constexpr (std::is_signed_v<T>)
      return static_cast<T>((static_cast<s64>(a) * b) >> (8 * sizeof(T)));
    else
      return static_cast<T>((static_cast<u64>(a) * b) >> (8 * sizeof(T)));
  }
}
BIN(op_mul_hi, mul_hi(a, b))
TER(op_mad_hi, mul_hi(a, b) + c)
void op_mul24(Warp& w, const Inst& in) {
  bin<s32>(w, in, [](s32 a, s32 b) { return ((a << 8) >> 8) * ((b << 8) >> 8); });
}

// ---- comparisons
template <class T, class F>
inline u32 compare(Warp& w, const Inst& in, F f) {
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b);
  u8 r[32];
#pragma GCC ivdep
  for (int i = 0; i < 32; ++i) r[i] = f(a[i], b[i]) ? 0xff : 0;
  return static_cast<u32>(_mm256_movemask_epi8(_mm256_loadu_si256(reinterpret_cast<__m256i*>(r))));
}
template <class T, class F>
inline void setp(Warp& w, const Inst& in, F f) {
  u32 r = compare<T>(w, in, f), q = ~r;
  if (in.x) {
    const u32 c = pred(w, in.c);
    r = in.x == 1 ? r & c : in.x == 2 ? r | c : r ^ c;
    q = in.x == 1 ? q & c : in.x == 2 ? q | c : q ^ c;
  }
  set_pred(w, in.d, r);
  if (in.e) set_pred(w, in.e, q);
}
#define SETP(NAME, EXPR)                                      \
  template <class T>                                          \
  void NAME(Warp& w, const Inst& in) {                        \
    setp<T>(w, in, [](T a, T b) -> bool { return EXPR; });    \
  }
SETP(setp_eq, a == b)
SETP(setp_ne, a < b || a > b)
SETP(setp_lt, a < b)
SETP(setp_le, a <= b)
SETP(setp_gt, a > b)
SETP(setp_ge, a >= b)
SETP(setp_equ, !(a < b || a > b))
SETP(setp_neu, !(a == b))
SETP(setp_ltu, !(a >= b))
SETP(setp_leu, !(a > b))
SETP(setp_gtu, !(a <= b))
SETP(setp_geu, !(a < b))
SETP(setp_num, a == a && b == b)
SETP(setp_nan, a != a || b != b)
template <class T>
Fn setp_fn(const std::string& c) {
  if (c == "eq") return setp_eq<T>;
  if (c == "ne") return setp_ne<T>;
  if (c == "lt" || c == "lo") return setp_lt<T>;
  if (c == "le" || c == "ls") return setp_le<T>;
  if (c == "gt" || c == "hi") return setp_gt<T>;
  if (c == "ge" || c == "hs") return setp_ge<T>;
  if constexpr (std::is_floating_point_v<T>) {
    if (c == "equ") return setp_equ<T>;
    if (c == "neu") return setp_neu<T>;
    if (c == "ltu") return setp_ltu<T>;
    if (c == "leu") return setp_leu<T>;
    if (c == "gtu") return setp_gtu<T>;
    if (c == "geu") return setp_geu<T>;
    if (c == "num") return setp_num<T>;
    if (c == "nan") return setp_nan<T>;
  }
  return nullptr;
}
template <class T>
void op_selp(Warp& w, const Inst& in) {
  T* d = dst<T>(w, in.d);
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b);
  const u32 p = pred(w, in.c);
  EMU_EACH(w, i, d[i] = (p >> i) & 1 ? a[i] : b[i]);
}
void op_slct(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b);
  const s32* c = src<s32>(w, in.c);
  EMU_EACH(w, i, d[i] = c[i] >= 0 ? a[i] : b[i]);
}
void pred_and(Warp& w, const Inst& in) { set_pred(w, in.d, pred(w, in.a) & pred(w, in.b)); }
void pred_or(Warp& w, const Inst& in) { set_pred(w, in.d, pred(w, in.a) | pred(w, in.b)); }
void pred_xor(Warp& w, const Inst& in) { set_pred(w, in.d, pred(w, in.a) ^ pred(w, in.b)); }
void pred_not(Warp& w, const Inst& in) { set_pred(w, in.d, ~pred(w, in.a)); }
void pred_mov(Warp& w, const Inst& in) { set_pred(w, in.d, pred(w, in.a)); }

// ---- bits
template <class T>
void op_popc(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const T* a = src<T>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<u32>(std::popcount(a[i])));
}
template <class T>
void op_clz(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const T* a = src<T>(w, in.a);
  EMU_EACH(w, i, d[i] = static_cast<u32>(std::countl_zero(a[i])));
}
template <class T>
void op_bfind(Warp& w, const Inst& in) {  // x: shiftamt
  using U = std::make_unsigned_t<T>;
  u32* d = dst<u32>(w, in.d);
  const T* a = src<T>(w, in.a);
  for (int i = 0; i < 32; ++i) {
    if (!((w.mask >> i) & 1)) continue;
    const U x = static_cast<U>(a[i] < 0 ? ~a[i] : a[i]);
    const int zeros = std::countl_zero(x);
    d[i] = x == 0 ? ~0u : in.x ? static_cast<u32>(zeros) : static_cast<u32>(sizeof(T) * 8 - 1 - static_cast<unsigned>(zeros));
  }
}
template <class T>
void op_brev(Warp& w, const Inst& in) {
  una<T>(w, in, [](T a) {
    T r = 0;
    for (unsigned k = 0; k < sizeof(T) * 8; ++k) r |= static_cast<T>(((a >> k) & 1) << (sizeof(T) * 8 - 1 - k));
    return r;
  });
}
template <class T>
void op_bfe(Warp& w, const Inst& in) {
  T* d = dst<T>(w, in.d);
  const T* a = src<T>(w, in.a);
  const u32 *b = src<u32>(w, in.b), *c = src<u32>(w, in.c);
  constexpr u32 msb = sizeof(T) * 8 - 1;
  for (int i = 0; i < 32; ++i) {
    if (!((w.mask >> i) & 1)) continue;
    const u32 pos = b[i] & 0xff, len = c[i] & 0xff;
    T r = 0;
    const bool sign = std::is_signed_v<T> && len && ((a[i] >> std::min(pos + len - 1, msb)) & 1);
    for (u32 k = 0; k <= msb; ++k) {
      const bool bit = (k < len && pos + k <= msb) ? (a[i] >> (pos + k)) & 1 : sign;
      if (bit) r = static_cast<T>(r | (static_cast<T>(1) << k));
    }
    d[i] = r;
  }
}
template <class T>
void op_bfi(Warp& w, const Inst& in) {  // bfi f, a, b, c(pos), e(len): a into b
  T* d = dst<T>(w, in.d);
  const T *a = src<T>(w, in.a), *b = src<T>(w, in.b);
  const u32 *c = src<u32>(w, in.c), *e = src<u32>(w, in.e);
  EMU_EACH(w, i, {
    const u32 pos = c[i] & 0xff, len = e[i] & 0xff;
    constexpr u32 n = sizeof(T) * 8;
    const T m0 = len >= n ? ~T(0) : static_cast<T>((T(1) << len) - 1);
    const T m1 = pos >= n ? T(0) : static_cast<T>(m0 << pos);
    d[i] = static_cast<T>((b[i] & ~m1) | ((pos >= n ? T(0) : static_cast<T>(a[i] << pos)) & m1));
  });
}
void op_bmsk(Warp& w, const Inst& in) {  // x: 1 clamp, else wrap
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b);
  EMU_EACH(w, i, {
    const u32 pos = in.x ? a[i] : a[i] & 31, len = in.x ? b[i] : b[i] & 31;
    const u64 m = len >= 32 ? 0xffffffffull : (1ull << len) - 1;
    d[i] = pos >= 32 ? 0u : static_cast<u32>(m << pos);
  });
}
void op_prmt(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b), *c = src<u32>(w, in.c);
  EMU_EACH(w, i, {
    const u64 x = a[i] | static_cast<u64>(b[i]) << 32;
    u32 r = 0;
    for (int k = 0; k < 4; ++k) {
      const u32 s = (c[i] >> (4 * k)) & 15;
      u32 v = static_cast<u32>(x >> (8 * (s & 7))) & 0xff;
      if (s & 8) v = v & 0x80 ? 0xff : 0;
      r |= v << (8 * k);
    }
    d[i] = r;
  });
}
void op_lop3(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b), *c = src<u32>(w, in.c);
  const u32 t = static_cast<u32>(in.imm);
  EMU_EACH(w, i, {
    u32 r = 0;
    if (t & 1) r |= ~a[i] & ~b[i] & ~c[i];
    if (t & 2) r |= ~a[i] & ~b[i] & c[i];
    if (t & 4) r |= ~a[i] & b[i] & ~c[i];
    if (t & 8) r |= ~a[i] & b[i] & c[i];
    if (t & 16) r |= a[i] & ~b[i] & ~c[i];
    if (t & 32) r |= a[i] & ~b[i] & c[i];
    if (t & 64) r |= a[i] & b[i] & ~c[i];
    if (t & 128) r |= a[i] & b[i] & c[i];
    d[i] = r;
  });
}
void op_shf(Warp& w, const Inst& in) {  // x: 1 right; y: 1 clamp
  u32* d = dst<u32>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b), *c = src<u32>(w, in.c);
  EMU_EACH(w, i, {
    const u64 v = a[i] | static_cast<u64>(b[i]) << 32;
    const u32 n = in.y ? std::min(c[i], 32u) : c[i] & 31;
    d[i] = in.x ? static_cast<u32>(v >> n) : static_cast<u32>((v << n) >> 32);
  });
}

// ---- packs: list of parts, low first; x: bytes of a part; n: parts
void op_pack(Warp& w, const Inst& in) {
  char* d = w.regs + in.d;
  const int bytes = in.x, whole = in.x * in.n;
  for (int k = 0; k < in.n; ++k) {
    const char* s = src<char>(w, (*in.list)[static_cast<size_t>(k)]);
    EMU_EACH(w, i, memcpy(d + i * whole + k * bytes, s + i * bytes, static_cast<size_t>(bytes)));
  }
}
void op_unpack(Warp& w, const Inst& in) {
  const char* a = src<char>(w, in.a);
  const int bytes = in.x, whole = in.x * in.n;
  for (int k = 0; k < in.n; ++k) {
    if ((*in.list)[static_cast<size_t>(k)] < 0) continue;
    char* d = w.regs + (*in.list)[static_cast<size_t>(k)];
    EMU_EACH(w, i, memcpy(d + i * bytes, a + i * whole + k * bytes, static_cast<size_t>(bytes)));
  }
}
void pack_2x16(Warp& w, const Inst& in) {
  u32* d = dst<u32>(w, in.d);
  const u16 *a = src<u16>(w, in.a), *b = src<u16>(w, in.b);
  EMU_EACH(w, i, d[i] = a[i] | static_cast<u32>(b[i]) << 16);
}
void pack_2x32(Warp& w, const Inst& in) {
  u64* d = dst<u64>(w, in.d);
  const u32 *a = src<u32>(w, in.a), *b = src<u32>(w, in.b);
  EMU_EACH(w, i, d[i] = a[i] | static_cast<u64>(b[i]) << 32);
}

// ---- halves
template <bool kBf, class F>
inline void half2(Warp& w, const Inst& in, F f, int halves) {
  const u16 *a = src<u16>(w, in.a), *b = src<u16>(w, in.b), *c = src<u16>(w, in.c);
  u16* d = dst<u16>(w, in.d);
  for (int i = 0; i < 32 * halves; ++i) {
    if (!((w.mask >> (i / halves)) & 1)) continue;
    const auto in_ = [](u16 x) { return kBf ? bf16_to_float(x) : f16_to_float(x); };
    const double r = f(in_(a[i]), in_(b[i]), in_(c[i]));
    float q = static_cast<float>(r);
    if (q != r && q == q) {  // round to odd, so that the second rounding is right
      u32 x = bits(q);
      if (std::fabs(static_cast<double>(q)) > std::fabs(r)) --x;
      q = std::bit_cast<float>(x | 1);
    }
    d[i] = kBf ? float_to_bf16(q) : float_to_f16(q);
  }
}
#define HALF(NAME, EXPR)                                                                      \
  template <bool kBf, int kHalves>                                                            \
  void NAME(Warp& w, const Inst& in) {                                                        \
    half2<kBf>(w, in, [](float a, float b, float c) -> double { (void)a, (void)b, (void)c; return EXPR; }, kHalves); \
  }
HALF(half_add, double(a) + b)
HALF(half_sub, double(a) - b)
HALF(half_mul, double(a) * b)
HALF(half_fma, double(a) * b + c)
HALF(half_min, fmin_(a, b))
HALF(half_max, fmax_(a, b))
HALF(half_neg, -a)
HALF(half_abs, std::fabs(a))
HALF(half_ex2, std::exp2(double(a)))
HALF(half_tanh, std::tanh(double(a)))

template <template <class> class>
struct Nothing {};
}  // namespace

#define BY_SIZE(F, N) (N == 2 ? F<u16> : N == 4 ? F<u32> : N == 8 ? F<u64> : nullptr)
#define BY_INT(F) (t == "s16" ? F<s16> : t == "u16" || t == "b16" ? F<u16> : t == "s32" ? F<s32> : t == "u32" || t == "b32" ? F<u32> : t == "s64" ? F<s64> : t == "u64" || t == "b64" ? F<u64> : nullptr)

bool Decoder::alu(const PInst& s, Inst& i) {
  const std::string& o = s.words[0];
  const std::string& t = s.words.back();
  const size_t n = s.ops.size();
  const bool f32 = t == "f32", f64 = t == "f64", flush = s.has("ftz"), sat = s.has("sat");
  const bool half = t == "bf16x2" || t == "f16x2" || t == "bf16" || t == "f16";
  const int size = type_bytes(t);
  int mode = -1;
  if (s.has("rz")) mode = _MM_FROUND_TO_ZERO;
  if (s.has("rm")) mode = _MM_FROUND_TO_NEG_INF;
  if (s.has("rp")) mode = _MM_FROUND_TO_POS_INF;
#define MODE(F) (mode == _MM_FROUND_TO_ZERO ? F<_MM_FROUND_TO_ZERO> : mode == _MM_FROUND_TO_NEG_INF ? F<_MM_FROUND_TO_NEG_INF> : F<_MM_FROUND_TO_POS_INF>)
  const auto operands = [&](int bytes) {
    i.d = out(s.ops[0], bytes);
    i.a = in(s.ops[1], bytes);
    if (n > 2) i.b = in(s.ops[2], bytes);
    if (n > 3) i.c = in(s.ops[3], bytes);
  };
  const auto take = [&](Fn f) {
    if (!f) return false;
    i.fn = f;
    if (sat && f32) i.inner = f, i.fn = saturate;
    return true;
  };
  if (half && (o == "add" || o == "sub" || o == "mul" || o == "fma" || o == "min" || o == "max" || o == "neg" || o == "abs" || o == "ex2" || o == "tanh")) {
    if (sat || s.has("NaN") || s.has("relu")) return false;
    operands(size);
    if (n < 3) i.b = i.a;
    if (n < 4) i.c = i.a;
    const bool bf = t[0] == 'b', two = size == 4;
#define H(F) take(bf ? (two ? F<true, 2> : F<true, 1>) : (two ? F<false, 2> : F<false, 1>))
    if (o == "add") return H(half_add);
    if (o == "sub") return H(half_sub);
    if (o == "mul") return H(half_mul);
    if (o == "fma") return H(half_fma);
    if (o == "min") return H(half_min);
    if (o == "max") return H(half_max);
    if (o == "neg") return H(half_neg);
    if (o == "abs") return H(half_abs);
    if (o == "ex2") return H(half_ex2);
    return H(half_tanh);
  }
  if (o == "mov") {
    if (s.ops[0].kind == POp::vec || s.ops[1].kind == POp::vec) {
      const bool packs = s.ops[1].kind == POp::vec;
      const POp& v = packs ? s.ops[1] : s.ops[0];
      const int parts = static_cast<int>(v.parts.size()), bytes = size / parts;
      i.x = static_cast<u8>(bytes), i.n = static_cast<u8>(parts);
      if (packs) {
        i.d = out(s.ops[0], size);
        if (parts == 2 && bytes >= 2) {
          i.a = in(v.parts[0], bytes), i.b = in(v.parts[1], bytes);
          return take(bytes == 2 ? pack_2x16 : pack_2x32);
        }
        i.list = list(v, bytes);
        return take(op_pack);
      }
      i.a = in(s.ops[1], size);
      i.list = list(v, bytes);
      return take(op_unpack);
    }
    if (t == "pred") {
      i.d = pr(s.ops[0]), i.a = pr(s.ops[1]);
      return take(pred_mov);
    }
    if (s.ops[1].kind == POp::special && bytes_of(s.ops[0]) != 4) return false;
    const int r = bytes_of(s.ops[0]);
    i.d = out(s.ops[0], r), i.a = in(s.ops[1], r);
    return take(BY_SIZE(op_mov, r));
  }
  if (o == "setp") {
    const std::string& c = s.words[1];
    Fn f = f32 ? setp_fn<float>(c) : f64 ? setp_fn<double>(c) : nullptr;
    if (!f && size >= 2 && !f32 && !f64 && !half) {
      f = t == "s16" ? setp_fn<s16>(c) : t == "s32" ? setp_fn<s32>(c) : t == "s64" ? setp_fn<s64>(c)
          : size == 2 ? setp_fn<u16>(c) : size == 4 ? setp_fn<u32>(c) : setp_fn<u64>(c);
    }
    if (!f || flush) return false;
    i.x = s.has("and") ? 1 : s.has("or") ? 2 : s.has("xor") ? 3 : 0;
    if (s.ops[0].kind == POp::vec) {
      i.d = pr(s.ops[0].parts[0]), i.e = pr(s.ops[0].parts[1]);
    } else {
      i.d = pr(s.ops[0]);
    }
    i.a = in(s.ops[1], size), i.b = in(s.ops[2], size);
    if (i.x) i.c = pr(s.ops[3]);
    return take(f);
  }
  if (o == "selp") {
    i.d = out(s.ops[0], size), i.a = in(s.ops[1], size), i.b = in(s.ops[2], size), i.c = pr(s.ops[3]);
    return take(BY_SIZE(op_selp, size));
  }
  if (o == "slct" && size == 4 && s.words[2] == "s32") {
    operands(4);
    return take(op_slct);
  }
  if (t == "pred") {
    if (o != "and" && o != "or" && o != "xor" && o != "not") return false;
    i.d = pr(s.ops[0]), i.a = pr(s.ops[1]);
    if (n > 2) i.b = pr(s.ops[2]);
    return take(o == "and" ? pred_and : o == "or" ? pred_or : o == "xor" ? pred_xor : pred_not);
  }
  if (o == "add" || o == "sub" || o == "mul" || o == "fma" || o == "div" || o == "mad") {
    if (f32) {
      operands(4);
      const bool approx = s.has("approx") || s.has("full");
      if (mode >= 0) {
        if (flush) return false;
        return take(o == "add" ? MODE(add_rounded) : o == "sub" ? MODE(sub_rounded) : o == "mul" ? MODE(mul_rounded) : o == "div" ? MODE(div_rounded) : MODE(fma_rounded));
      }
      (void)approx;
      if (flush) return take(o == "add" ? add_ftz : o == "sub" ? sub_ftz : o == "mul" ? mul_ftz : o == "div" ? div_ftz : fma_ftz);
      return take(o == "add" ? op_add<float> : o == "sub" ? op_sub<float> : o == "mul" ? op_mul<float> : o == "div" ? op_fdiv<float> : op_fma<float>);
    }
    if (f64) {
      if (mode >= 0) return false;
      operands(8);
      return take(o == "add" ? op_add<double> : o == "sub" ? op_sub<double> : o == "mul" ? op_mul<double> : o == "div" ? op_fdiv<double> : op_fma<double>);
    }
    if (half || sat || s.has("cc")) return false;
    if (s.has("wide")) {
      i.d = out(s.ops[0], 2 * size), i.a = in(s.ops[1], size), i.b = in(s.ops[2], size);
      if (n > 3) i.c = in(s.ops[3], 2 * size);
      const bool mad = o == "mad";
      if (t == "s16") return take(mad ? op_mad_wide<s16, s32> : op_mul_wide<s16, s32>);
      if (t == "u16") return take(mad ? op_mad_wide<u16, u32> : op_mul_wide<u16, u32>);
      if (t == "s32") return take(mad ? op_mad_wide<s32, s64> : op_mul_wide<s32, s64>);
      if (t == "u32") return take(mad ? op_mad_wide<u32, u64> : op_mul_wide<u32, u64>);
      return false;
    }
    operands(size);
    if (s.has("hi")) return take(o == "mul" ? BY_INT(op_mul_hi) : BY_INT(op_mad_hi));
    if (o == "add") return take(BY_SIZE(op_add, size));
    if (o == "sub") return take(BY_SIZE(op_sub, size));
    if (o == "mul") return take(BY_SIZE(op_mul, size));
    if (o == "mad") return take(BY_SIZE(op_mad, size));
    if (o == "div") return take(BY_INT(op_idiv));
    return false;
  }
  if (o == "rem") return operands(size), take(BY_INT(op_irem));
  if (o == "mul24") return operands(4), take(op_mul24);
  if (o == "sad") return operands(size), take(BY_INT(op_sad));
  if (o == "and") return operands(size), take(BY_SIZE(op_and, size));
  if (o == "or") return operands(size), take(BY_SIZE(op_or, size));
  if (o == "xor") return operands(size), take(BY_SIZE(op_xor, size));
  if (o == "not") return operands(size), take(BY_SIZE(op_not, size));
  if (o == "shl" || o == "shr") {
    i.d = out(s.ops[0], size), i.a = in(s.ops[1], size), i.b = in(s.ops[2], 4);
    return take(o == "shl" ? BY_SIZE(op_shl, size) : BY_INT(op_shr));
  }
  if (o == "min" || o == "max") {
    if (n != 3) return false;
    operands(size);
    const bool mn = o == "min";
    if (s.has("xorsign") || s.has("relu")) return false;
    if (f32) {
      if (s.has("NaN")) return take(mn ? op_fminnan<float> : op_fmaxnan<float>);
      if (flush) return take(mn ? min_ftz : max_ftz);
      return take(mn ? op_fmin<float> : op_fmax<float>);
    }
    if (f64) return take(mn ? op_fmin<double> : op_fmax<double>);
    return take(mn ? BY_INT(op_min) : BY_INT(op_max));
  }
  if (o == "neg" || o == "abs") {
    operands(size);
    const bool neg = o == "neg";
    if (f32) return take(neg ? op_neg<float> : op_fabs<float>);
    if (f64) return take(neg ? op_neg<double> : op_fabs<double>);
    return take(neg ? BY_INT(op_ineg) : BY_INT(op_abs));
  }
  if (o == "copysign") return operands(size), take(f32 ? op_copysign<float> : op_copysign<double>);
  if (f32 && (o == "ex2" || o == "rcp" || o == "lg2" || o == "rsqrt" || o == "sqrt" || o == "sin" || o == "cos" || o == "tanh")) {
    operands(4);
    if (o == "ex2") return take(flush ? op_ex2<true> : op_ex2<false>);
    if (o == "rcp") return take(flush ? op_rcp_approx<true> : op_rcp_approx<false>);
    if (o == "lg2") return take(flush ? op_lg2<true> : op_lg2<false>);
    if (o == "rsqrt") return take(flush ? op_rsqrt_f<true> : op_rsqrt_f<false>);
    if (o == "sqrt") return take(flush ? op_sqrt_f<true> : op_sqrt_f<false>);
    if (o == "sin") return take(op_sin);
    if (o == "cos") return take(op_cos);
    return take(op_tanh);
  }
  if (f64 && (o == "rcp" || o == "sqrt" || o == "rsqrt")) {
    operands(8);
    if (o == "rcp") return take(flush ? rcp_ftz_f64 : op_rcp<double>);
    if (o == "sqrt") return take(op_sqrt<double>);
    return take(op_rsqrt<double>);
  }
  if (o == "popc" || o == "clz" || o == "bfind") {
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], size);
    i.x = s.has("shiftamt");
    if (o == "popc") return take(size == 4 ? op_popc<u32> : op_popc<u64>);
    if (o == "clz") return take(size == 4 ? op_clz<u32> : op_clz<u64>);
    return take(t == "s32" ? op_bfind<s32> : t == "u32" ? op_bfind<u32> : t == "s64" ? op_bfind<s64> : op_bfind<u64>);
  }
  if (o == "brev") return operands(size), take(size == 4 ? op_brev<u32> : op_brev<u64>);
  if (o == "bfe") {
    i.d = out(s.ops[0], size), i.a = in(s.ops[1], size), i.b = in(s.ops[2], 4), i.c = in(s.ops[3], 4);
    return take(t == "s32" ? op_bfe<s32> : t == "u32" ? op_bfe<u32> : t == "s64" ? op_bfe<s64> : op_bfe<u64>);
  }
  if (o == "bfi") {
    i.d = out(s.ops[0], size), i.a = in(s.ops[1], size), i.b = in(s.ops[2], size);
    i.c = in(s.ops[3], 4), i.e = in(s.ops[4], 4);
    return take(size == 4 ? op_bfi<u32> : op_bfi<u64>);
  }
  if (o == "bmsk") return operands(4), i.x = s.has("clamp"), take(op_bmsk);
  if (o == "prmt" && s.words.size() == 2) return operands(4), take(op_prmt);
  if (o == "lop3") {
    i.d = out(s.ops[0], 4), i.a = in(s.ops[1], 4), i.b = in(s.ops[2], 4), i.c = in(s.ops[3], 4);
    i.imm = s.ops[4].value;
    return take(op_lop3);
  }
  if (o == "shf") {
    operands(4);
    i.x = s.has("r"), i.y = s.has("clamp");
    return take(op_shf);
  }
  return false;
}

}  // namespace emu
