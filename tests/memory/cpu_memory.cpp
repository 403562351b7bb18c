// What: the memory of a call of a host lane, seen by a hook under malloc and by the kernel's high
// water.
// Why: workspace_bytes() is a promise: nothing beyond workspace, outputs and 1 MiB, pools included.
// Never: measures time. Usage: cpu_memory [planted]; planted allocates 2 MiB during the call.
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "talea/linear_cross_entropy.hpp"

// glibc's own entry points, under the names that this program takes over for the whole process:
// also for the OpenMP runtime, its threads and every shared library.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace {

std::atomic<int64_t> live{0}, peak{0};

void* counted(void* p) {
  if (!p) return p;
  const auto bytes = static_cast<int64_t>(malloc_usable_size(p));
  const int64_t now = live.fetch_add(bytes) + bytes;
  for (int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
  }
  return p;
}

void uncounted(void* p) {
  if (p) live -= static_cast<int64_t>(malloc_usable_size(p));
}

}  // namespace

extern "C" {
void* malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void* calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void* realloc(void* p, size_t bytes) {
  uncounted(p);
  return counted(__libc_realloc(p, bytes));
}
void* memalign(size_t alignment, size_t bytes) {
  return counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** to, size_t alignment, size_t bytes) {
  *to = memalign(alignment, bytes);
  return *to ? 0 : ENOMEM;
}
void free(void* p) {
  uncounted(p);
  __libc_free(p);
}
}

namespace {

using namespace talea;

constexpr int64_t allowed = int64_t{1} << 20;

struct Shape {
  int64_t tokens, hidden, vocab;
  DType dtype;
  int threads;
  const char* lane = "cpu";
  bool soft = false;  // dense soft targets
};

// A field of /proc/self/status in bytes.
int64_t status(const char* field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.rfind(field, 0) == 0) return std::atoll(line.c_str() + std::strlen(field) + 1) * 1024;
  return -1;
}

void fill(std::vector<std::byte>& a, DType dtype, uint64_t seed) {
  const int64_t size = size_of(dtype), count = static_cast<int64_t>(a.size()) / size;
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const float x = static_cast<float>(static_cast<int64_t>(seed >> 40) - (1 << 23)) * 0x1p-26f;
    const uint16_t half = dtype == DType::bf16 ? float_to_bf16(x) : float_to_f16(x);
    std::memcpy(a.data() + i * size, size == 4 ? static_cast<const void*>(&x) : &half,
                static_cast<size_t>(size));
  }
}

// Everything the caller owns is touched before; what the call adds is beyond it.
bool holds(const Shape& s, bool planted) {
  const int64_t size = size_of(s.dtype);
  std::vector<std::byte> x(static_cast<size_t>(s.tokens * s.hidden * size)),
      w(static_cast<size_t>(s.vocab * s.hidden * size)), dx(x.size()), dw(w.size());
  std::vector<int64_t> y(static_cast<size_t>(s.tokens));
  std::vector<float> q(static_cast<size_t>(s.soft ? s.tokens * s.vocab : 0),
                       1 / static_cast<float>(s.vocab));
  fill(x, s.dtype, 1);
  fill(w, s.dtype, 2);
  for (int64_t t = 0; t < s.tokens; ++t) y[static_cast<size_t>(t)] = t * 7919 % s.vocab;
  float loss = 0;
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(x.data(), s.dtype, {s.tokens, s.hidden});
  in.weight = make_tensor(w.data(), s.dtype, {s.vocab, s.hidden});
  if (s.soft)
    in.soft_target_probs = make_tensor(q.data(), DType::f32, {s.tokens, s.vocab});
  else
    in.targets = make_tensor(y.data(), DType::i64, {s.tokens});
  LinearCrossEntropyOutputs out;
  out.loss = make_tensor(&loss, DType::f32, {});
  out.dx = make_tensor(dx.data(), s.dtype, {s.tokens, s.hidden});
  out.dw = make_tensor(dw.data(), s.dtype, {s.vocab, s.hidden});
  LinearCrossEntropyOptions options;
  options.lane = s.lane;
  options.threads = s.threads;
  // Lane reference keeps dense targets in fp64, whole: its least is above the others' limit.
  const bool whole = std::strcmp(s.lane, "reference") == 0;
  options.workspace_limit_bytes = int64_t{whole ? 256 : 64} << 20;
  const int64_t bytes = workspace_bytes(describe(in, out, options));
  std::vector<std::byte> room(static_cast<size_t>(bytes), std::byte{0xff});
  { std::ofstream("/proc/self/clear_refs") << "5"; }  // the high water starts at what is resident
  const int64_t resident = status("VmHWM:"), before = live;
  // A high water that was not reset has room for anything below what came before.
  const bool measured = resident > 0 && resident - status("VmRSS:") <= allowed;
  peak = before;
  linear_cross_entropy(in, out, options, {room.data(), bytes});
  if (planted) std::free(std::memset(std::malloc(2 * allowed), 1, 2 * allowed));
  const int64_t by_malloc = peak - before, by_kernel = status("VmHWM:") - resident;
  const bool fits = measured && by_malloc <= allowed && by_kernel <= allowed && loss > 0;
  std::printf(
      "%-9s %5s N %4ld D %4ld V %6ld, %d threads: workspace %6.1f MiB, beyond it and the outputs "
      "malloc %5.1f KiB, resident %6.1f KiB%s\n",
      s.lane, name_of(s.dtype), static_cast<long>(s.tokens), static_cast<long>(s.hidden),
      static_cast<long>(s.vocab), s.threads, static_cast<double>(bytes) * 0x1p-20,
      static_cast<double>(by_malloc) / 1024, static_cast<double>(by_kernel) / 1024,
      fits       ? ""
      : measured ? "  TOO MUCH"
                 : "  the high water could not be reset");
  return fits;
}

}  // namespace

int main(int argc, char** argv) {
  const bool planted = argc > 1 && std::strcmp(argv[1], "planted") == 0;
  if (planted) return holds({8, 16, 1000, DType::f32, 2}, true) ? 0 : 1;
  bool all = true;
  // The vocabularies and widths of the bench; a quarter and an eighth of its tokens.
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int threads : {1, 2, 5})
      all = holds({256, 768, 32000, dtype, threads}, false) && all;
  all = holds({256, 1024, 50257, DType::f32, 2}, false) && all;
  all = holds({1024, 256, 32000, DType::bf16, 2}, false) && all;  // a window of the vocabulary
  for (const char* lane : {"cpu", "unfused", "reference"})  // a row of q alone is 2.4 MiB in fp64
    all = holds({8, 4, 300000, DType::f32, 2, lane, true}, false) && all;
  return all ? 0 : 1;
}
