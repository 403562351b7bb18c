// What: malloc and its family, counted and passed on to the C library.
// Why: oneDNN, OpenMP and the lanes all allocate through these names.
// Never: changes what an allocation returns.
#include "memory.hpp"

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TALEA_COUNTS_MALLOC 1
#else
#define TALEA_COUNTS_MALLOC 0
#endif

namespace {

std::atomic<int64_t> in_use{0}, peak{0};

#if TALEA_COUNTS_MALLOC
void* counted(void* p) {
  if (!p) return p;
  const auto bytes = static_cast<int64_t>(malloc_usable_size(p));
  const int64_t now = in_use.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
  return p;
}

void uncount(void* p) {
  if (p) in_use.fetch_sub(static_cast<int64_t>(malloc_usable_size(p)), std::memory_order_relaxed);
}
#endif

}  // namespace

#if TALEA_COUNTS_MALLOC
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

void* malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void* calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void* memalign(size_t alignment, size_t bytes) {
  return counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** p, size_t alignment, size_t bytes) {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
  *p = memalign(alignment, bytes);
  return *p ? 0 : ENOMEM;
}
void* realloc(void* p, size_t bytes) {
  const auto before = static_cast<int64_t>(p ? malloc_usable_size(p) : 0);
  void* moved = __libc_realloc(p, bytes);
  if (moved || bytes == 0) in_use.fetch_sub(before, std::memory_order_relaxed);
  return counted(moved);
}
void free(void* p) {
  uncount(p);
  __libc_free(p);
}
}
#endif

namespace talea::cli {

bool memory_is_measured() { return TALEA_COUNTS_MALLOC; }

MemoryWatch::MemoryWatch() : before_(in_use.load()) { peak.store(before_); }

int64_t MemoryWatch::peak_extra_bytes() const {
  return memory_is_measured() ? peak.load() - before_ : -1;
}

}  // namespace talea::cli
