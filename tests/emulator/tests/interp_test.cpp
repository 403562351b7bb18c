// Runs the kernels of kernels.ptx through Module and compares with plain loops.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "../interp.hpp"
using namespace emu;
static std::unique_ptr<Module> module_;
static int failures = 0;
template <class T>
struct Buffer {
  std::vector<T> v;
  explicit Buffer(size_t n, T x = T()) : v(n, x) { Memory::add(v.data(), n * sizeof(T)); }
  ~Buffer() { Memory::remove(v.data()); }
  T* p() { return v.data(); }
};
struct Params {
  std::vector<char> b;
  template <class T>
  Params& add(const T& x, size_t align = alignof(T)) {
    size_t at = (b.size() + align - 1) / align * align;
    b.resize(at + sizeof(T));
    memcpy(b.data() + at, &x, sizeof(T));
    return *this;
  }
};
struct alignas(128) Map { char x[128]; };
static Map make_map(void* p, int type, int bytes, u64 columns, u64 rows, u64 stride, int box_rows, int swizzle = 3) {
  TensorMap t{};
  t.magic = TensorMap{}.magic;
  t.type = static_cast<u8>(type), t.rank = 2, t.swizzle = static_cast<u8>(swizzle), t.element_bytes = static_cast<u8>(bytes);
  t.address = reinterpret_cast<u64>(p);
  t.size[0] = columns, t.size[1] = rows, t.stride[0] = stride * static_cast<u64>(bytes);
  t.box[0] = static_cast<u16>(128 / bytes), t.box[1] = static_cast<u16>(box_rows);
  Map m;
  pack(t, m.x);
  return m;
}
static void run(const char* name, Dim3 grid, Dim3 block, u32 shared, const Params& p, Dim3 cluster = {}) {
  Launch l;
  l.grid = grid, l.block = block, l.dynamic_shared = shared, l.cluster = cluster;
  module_->launch(name, l, p.b.data());
}
static void check(const char* what, double error, double limit) {
  const bool ok = error <= limit;
  printf("%-24s %s (%g, limit %g)\n", what, ok ? "ok" : "FAILED", error, limit);
  failures += !ok;
}
template <class F>
static void guarded(const char* what, F f) {
  try {
    f();
  } catch (const Error& e) {
    printf("%-24s FAILED: %s\n", what, e.what());
    ++failures;
  }
}
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  std::ifstream f(argc > 1 ? argv[1] : "tests/kernels.ptx");
  std::stringstream s;
  s << f.rdbuf();
  module_ = Module::load(s.str());
  std::mt19937 g(7);
  std::uniform_real_distribution<float> u(-1, 1);
  guarded("arithmetic", [&] {
    const int n = 300;
    Buffer<int> a(n), b(n), out(n * 8);
    for (int i = 0; i < n; ++i) a.v[i] = static_cast<int>(g()) >> (i % 20), b.v[i] = (static_cast<int>(g()) >> (i % 25)) | 1;
    run("arithmetic", {3}, {128}, 0, Params().add(a.p()).add(b.p()).add(out.p()).add(n));
    double bad = 0;
    for (int i = 0; i < n; ++i) {
      const int x = a.v[i], y = b.v[i];
      const int* o = &out.v[i * 8];
      bad += o[0] != x / y;
      bad += o[1] != x % y;
      bad += o[2] != static_cast<int>((static_cast<s64>(x) * y) >> 32);
      bad += o[3] != __builtin_popcount(x) + (y ? __builtin_clz(y) : 32) + __builtin_ffs(x);
      bad += o[4] != static_cast<int>((static_cast<s64>(x) * y) >> 7);
      const float e = std::exp(static_cast<float>(x) * 1e-3f) + std::log(std::fabs(static_cast<float>(y)) + 1.f), got = std::bit_cast<float>(o[5]);
      bad += !(e == got || std::fabs(e - got) <= 1e-5f * std::fabs(e));
      const float sn = static_cast<float>(std::sin(static_cast<double>(static_cast<float>(x) * 1e-2f))), gs = std::bit_cast<float>(o[6]);
      bad += !(std::fabs(sn - gs) <= 2e-6f);
      bad += o[7] != static_cast<int>(static_cast<u32>(x) >> (y & 31));
    }
    check("arithmetic", bad, 0);
  });
  guarded("diverge", [&] {
    Buffer<int> a(128), out(128);
    for (int i = 0; i < 128; ++i) a.v[i] = i * 7 + 1;
    run("diverge", {2}, {64}, 0, Params().add(a.p()).add(out.p()));
    double bad = 0;
    int n[128];
    for (int i = 0; i < 128; ++i) {
      int x = a.v[i];
      n[i] = 0;
      while (x != 1 && n[i] < 500) x = x & 1 ? 3 * x + 1 : x >> 1, ++n[i];
    }
    for (int i = 0; i < 128; ++i) {
      int sum = 0, votes = 0;
      for (int k = 0; k < 32; ++k) sum += n[i / 32 * 32 + k];
      const int t = i % 64;
      (void)votes;
      if (t % 3 == 0 && t < 32) {
        for (int k = 0; k < 32; k += 3) votes += n[i / 32 * 32 + k] > 20;
        sum += votes * 1000000;
      }
      if (t >= 32) continue;  // the mask of the ballot names lanes of the first warp
      bad += out.v[i] != sum;
    }
    check("diverge", bad, 0);
  });
  guarded("block_scan", [&] {
    Buffer<float> a(1024), out(1024);
    for (auto& x : a.v) x = static_cast<float>(static_cast<int>(g() % 16));
    run("block_scan", {4}, {256}, 0, Params().add(a.p()).add(out.p()));
    double bad = 0;
    for (int b = 0; b < 4; ++b) {
      float sum = 0;
      for (int i = 0; i < 256; ++i) sum += a.v[b * 256 + i], bad += out.v[b * 256 + i] != sum;
    }
    check("block_scan", bad, 0);
  });
  guarded("spin", [&] {
    Buffer<int> flags(100), out(1);
    run("spin", {100}, {32}, 0, Params().add(flags.p()).add(100).add(out.p()));
    check("spin", std::abs(out.v[0] - 4950), 0);
    Buffer<int> lock(1), sum(1);
    run("spin_lane", {3}, {32}, 0, Params().add(lock.p()).add(sum.p()));
    check("spin_lane", std::abs(sum.v[0] - 3 * 496), 0);
  });
  guarded("cp_async_sum", [&] {
    Buffer<float> a(4 * 128 * 4), out(128 * 4);
    for (auto& x : a.v) x = u(g);
    run("cp_async_sum", {1}, {128}, 4 * 128 * 16, Params().add(a.p()).add(out.p()));
    double bad = 0;
    for (int i = 0; i < 128; ++i)
      for (int c = 0; c < 4; ++c) {
        float r = 0;
        for (int k = 0; k < 4; ++k) r += k == 2 ? 0.f : a.v[(k * 128 + (i ^ 33)) * 4 + c];
        bad += r != out.v[i * 4 + c];
      }
    check("cp_async_sum", bad, 0);
  });
  const auto wgmma = [&](const char* name, int N, int ta, int tb, bool f16) {
    guarded(name, [&] {
      const auto narrow = [&](float x) { return f16 ? float_to_f16(x) : float_to_bf16(x); };
      const auto wide = [&](u16 x) { return f16 ? f16_to_float(x) : bf16_to_float(x); };
      // a: K-major [64][64]; MN-major [k][m]; b: K-major [N][64]; MN-major [k][n]
      Buffer<u16> a(64 * 64), b(static_cast<size_t>(64 * N));
      Buffer<float> out(static_cast<size_t>(64 * N), NAN);
      for (auto& x : a.v) x = narrow(u(g));
      for (auto& x : b.v) x = narrow(u(g));
      const int type = f16 ? 6 : 9;
      const Map ma = make_map(a.p(), type, 2, 64, 64, 64, 64);
      const Map mb = tb ? make_map(b.p(), type, 2, static_cast<u64>(N), 64, static_cast<u64>(N), 64) : make_map(b.p(), type, 2, 64, static_cast<u64>(N), 64, N);
      run(name, {1}, {128}, static_cast<u32>(8192 + N * 128), Params().add(ma).add(mb).add(out.p()));
      double worst = 0;
      for (int m = 0; m < 64; ++m)
        for (int n = 0; n < N; ++n) {
          double x = 0;
          for (int k = 0; k < 64; ++k) x += static_cast<double>(wide(a.v[ta ? k * 64 + m : m * 64 + k])) * wide(b.v[static_cast<size_t>(tb ? k * N + n : n * 64 + k)]);
          const double e = std::fabs(x - out.v[static_cast<size_t>(m * N + n)]);
          if (!(e <= worst)) worst = e;
        }
      check(name, worst, 1e-5);
    });
  };
  wgmma("wgmma_64_00", 64, 0, 0, false);
  wgmma("wgmma_128_00", 128, 0, 0, true);
  wgmma("wgmma_128_01", 128, 0, 1, false);
  wgmma("wgmma_256_11", 256, 1, 1, false);
  wgmma("wgmma_192_10", 192, 1, 0, true);
  guarded("wgmma_registers", [&] {
    Buffer<u16> a(64 * 64), b(64 * 64);
    Buffer<float> out(64 * 64, NAN);
    for (auto& x : a.v) x = float_to_bf16(u(g));
    for (auto& x : b.v) x = float_to_bf16(u(g));
    run("wgmma_registers", {1}, {128}, 8192, Params().add(a.p()).add(make_map(b.p(), 9, 2, 64, 64, 64, 64)).add(out.p()));
    double worst = 0;
    for (int m = 0; m < 64; ++m)
      for (int n = 0; n < 64; ++n) {
        double x = 1;
        for (int k = 0; k < 64; ++k) x += static_cast<double>(bf16_to_float(a.v[m * 64 + k])) * bf16_to_float(b.v[k * 64 + n]);
        const double e = std::fabs(x - out.v[m * 64 + n]);
        if (!(e <= worst)) worst = e;
      }
    check("wgmma_registers", worst, 1e-5);
  });
  guarded("mma_sync", [&] {
    Buffer<u16> a(256), b(128);
    Buffer<float> out(128, NAN);
    for (auto& x : a.v) x = float_to_bf16(u(g));
    for (auto& x : b.v) x = float_to_bf16(u(g));
    run("mma_sync", {1}, {32}, 0, Params().add(a.p()).add(b.p()).add(out.p()));
    double worst = 0;
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        double x = 0;
        for (int k = 0; k < 16; ++k) x += static_cast<double>(bf16_to_float(a.v[m * 16 + k])) * bf16_to_float(b.v[k * 8 + n]);
        const double e = std::fabs(x - out.v[m * 8 + n]);
        if (!(e <= worst)) worst = e;
      }
    check("mma_sync", worst, 2e-6);
    Buffer<float> fa(128), fb(64), fo(128, NAN);
    const auto t = [](float x) { return std::bit_cast<float>(std::bit_cast<u32>(x) & 0xffffe000u); };
    for (auto& x : fa.v) x = u(g);
    for (auto& x : fb.v) x = u(g);
    run("mma_tf32", {1}, {32}, 0, Params().add(fa.p()).add(fb.p()).add(fo.p()));
    worst = 0;
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        double x = 0;
        for (int k = 0; k < 8; ++k) x += static_cast<double>(t(fa.v[m * 8 + k])) * t(fb.v[k * 8 + n]);
        const double e = std::fabs(x - fo.v[m * 8 + n]);
        if (!(e <= worst)) worst = e;
      }
    check("mma_tf32", worst, 2e-6);
  });
  for (int reduce = 0; reduce < 2; ++reduce)
    guarded("pipeline", [&] {  // 10 tiles of 32 rows, of which 305 rows and 30 columns exist
      Buffer<float> a(305 * 32), out(305 * 32, 1.f);
      for (auto& x : a.v) x = u(g);
      run("pipeline", {1}, {160}, 4096 * 4, Params().add(make_map(a.p(), 7, 4, 30, 305, 32, 32)).add(make_map(out.p(), 7, 4, 30, 300, 32, 32)).add(10).add(reduce));
      double bad = 0;
      for (int r = 0; r < 305; ++r)
        for (int c = 0; c < 32; ++c) bad += out.v[r * 32 + c] != (r < 300 && c < 30 ? a.v[r * 32 + c] * 2 + (reduce ? 1.f : 0.f) : 1.f);
      check(reduce ? "pipeline, reduce" : "pipeline, store", bad, 0);
    });
  guarded("cluster", [&] {
    Buffer<float> a(8 * 64), out(16 * 33);
    for (auto& x : a.v) x = u(g);
    run("cluster", {16}, {32}, 0, Params().add(a.p()).add(out.p()), {2});
    double bad = 0;
    for (int b = 0; b < 16; ++b) {
      const int other = (b & 1) ^ 1;
      for (int i = 0; i < 32; ++i) bad += out.v[b * 33 + i] != a.v[b / 2 * 64 + i + 32 * other] * 3;
      bad += out.v[b * 33 + 32] != 100.f + static_cast<float>(other);
    }
    check("cluster", bad, 0);
  });
  guarded("conversions", [&] {
    Buffer<float> a(64);
    Buffer<u32> out(64 * 8);
    for (int i = 0; i < 64; ++i) a.v[i] = u(g) * std::exp2(static_cast<float>(i % 40 - 20));
    run("conversions", {1}, {64}, 0, Params().add(a.p()).add(out.p()));
    double bad = 0;
    for (int i = 0; i < 64; ++i) {
      const float x = a.v[i];
      const u32* o = &out.v[i * 8];
      bad += o[0] != (float_to_bf16(x) | static_cast<u32>(float_to_bf16(x * 3)) << 16);
      bad += o[1] != (float_to_f16(x) | static_cast<u32>(float_to_f16(x * 3)) << 16);
      bad += std::fabs(std::bit_cast<float>(o[2]) - x) > std::fabs(x) * 0x1p-11;
      bad += static_cast<int>(o[3]) != static_cast<int>(x);
      bad += o[4] != (x <= 0 ? 0u : static_cast<u32>(std::nearbyint(x)));
      bad += o[5] != static_cast<u32>(static_cast<s64>(x * 1e3f));
      if (std::fabs(x) < 80) bad += !(std::fabs(std::bit_cast<float>(o[6]) - x * std::exp2(x)) <= 3e-7f * std::fabs(x * std::exp2(x)));
      bad += o[7] != std::bit_cast<u32>(x);
    }
    check("conversions", bad, 0);
  });
  for (const char* name : {"out_of_bounds", "stuck"}) {
    Buffer<float> a(16);
    try {
      run(name, {1}, {32}, 0, Params().add(a.p()));
      check(name, 1, 0);
    } catch (const Error& e) {
      printf("%-24s ok: %s\n", name, e.what());
    }
  }
  if (argc > 2) {
    Buffer<float> a(256);
    const auto t0 = std::chrono::steady_clock::now();
    const int n = atoi(argv[2]);
    run("speed", {64}, {256}, 0, Params().add(a.p()).add(n));
    const double s1 = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
    printf("speed: %.1f million lane instructions a second (about)\n", 64. * 256 * n * 10 / s1 / 1e6);
  }
  printf(failures ? "%d FAILED\n" : "all ok\n", failures);
  return failures != 0;
}
