// What: a stand-in for the CUDA runtime: devices, memory, streams, events, graphs by capture, launches.
// Why: programs built for a GPU run on a CPU, their kernels interpreted (ptx.hpp). One worker thread a stream;
// kernels run one at a time. Environment: README.md.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ptx.hpp"
#include "stream_abi.hpp"

using Clock = std::chrono::steady_clock;

namespace {

int env(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

// ---------------------------------------------------------------- state
struct Completion {
  bool done = false;
  Clock::time_point at{};
};
using Done = std::shared_ptr<Completion>;
using Work = std::function<int()>;  // 0 or a cudaError_t

struct Node {
  std::string name;
  Work work;
  std::vector<int> deps;
};

}  // namespace

struct CUgraph_st {
  std::vector<Node> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<std::vector<Node>> nodes;
};

namespace {

struct Stream;
struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode{};
  cudaGraph_t graph = nullptr;
  Stream* origin = nullptr;
  std::thread::id thread;
  bool invalid = false;
  std::set<Stream*> streams;
};

struct Op {
  std::string name;
  Work work;
  std::vector<Done> waits;
  Done done;
  bool always = false;  // even after an error (event records)
};

struct Stream : emu::StreamAbi {
  int device = 0;
  bool blocking = true, legacy = false, closed = false, started = false;
  int priority = 0;
  unsigned flags = 0;
  std::deque<Op> queue;
  Done last;  // of the newest operation
  Capture* capture = nullptr;
  std::vector<int> tail;
};

struct Event {
  unsigned flags = 0;
  Done record;
  unsigned long long capture = 0;  // id of the capture that recorded it
  std::vector<int> nodes;
};

struct FatBinary {
  std::string ptx;
  std::unique_ptr<emu::Module> module;
  std::string problem;
  std::mutex mutex;
  bool tried = false;
};
struct Function {
  FatBinary* binary = nullptr;
  std::string name, pretty;
  int max_dynamic = -1;  // as set
  int nonportable = 0, carveout = -1, required_x = 0, required_y = 0, required_z = 0;
};
struct Variable {
  FatBinary* binary = nullptr;
  std::string name;
  size_t bytes = 0;
};
struct Block {
  size_t bytes = 0, mapped = 0;
  void* map = nullptr;
  int device = 0;
  enum Kind { device_memory, host, managed, registered } kind = device_memory;
};

struct State {
  std::mutex mutex;  // all below but what says otherwise
  std::condition_variable changed;
  std::set<Stream*> streams;
  std::vector<Stream*> legacy;
  std::set<Event*> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> execs;
  std::map<unsigned long long, Capture*> captures;
  unsigned long long next_capture = 1;
  std::map<uintptr_t, Block> blocks;
  size_t used = 0;
  uintptr_t arena = 0, arena_end = 0;
  std::atomic<int> sticky{0};
  std::mutex kernels;  // one kernel at a time
  std::mutex registry;
  std::unordered_map<const void*, Function*> functions;
  std::set<const void*> handles;
  std::unordered_map<const void*, Variable> variables;
  std::vector<FatBinary*> binaries;
  std::map<std::string, std::pair<double, long>> profile;
  int devices, sms;
  size_t memory;
  bool sync, trace, shuffle;
  std::mt19937_64 random;

  State() {
    devices = std::max(0, env("EMU_DEVICES", 1));
    sms = std::max(1, env("EMU_SMS", 8));
    memory = static_cast<size_t>(std::max(1, env("EMU_MEMORY_GB", 8))) << 30;
    sync = env("EMU_SYNC", 0), trace = env("EMU_TRACE", 0), shuffle = env("EMU_SHUFFLE", 1);
    random.seed(static_cast<uint64_t>(env("EMU_SEED", 1)));
    for (int d = 0; d < std::max(1, devices); ++d) {
      auto* s = make_stream();
      s->device = d, s->legacy = true;
      legacy.push_back(s);
    }
    char text[32];
    std::snprintf(text, sizeof text, "%p", static_cast<void*>(static_cast<emu::StreamAbi*>(legacy[0])));
    setenv("EMU_CUDART", text, 1);
  }
  Stream* make_stream();
};

State& state() {
  static State* s = new State;  // leaked: workers outlive static objects
  return *s;
}

thread_local int last_error = 0;
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t keep(cudaError_t e) {
  if (e != cudaSuccess) last_error = e;
  return e;
}
cudaError_t sticky() { return static_cast<cudaError_t>(state().sticky.load()); }
#define STICKY() \
  if (cudaError_t e_ = sticky(); e_ != cudaSuccess) return keep(e_)

void complain(const char* format, const std::string& text) {
  std::fprintf(stderr, format, text.c_str());
  std::fflush(stderr);
}

int code_of(const std::string& text) {
  auto has = [&](const char* word) { return text.find(word) != std::string::npos; };
  if (has("misaligned")) return cudaErrorMisalignedAddress;
  if (has("nknown instruction") || has("llegal instruction")) return cudaErrorIllegalInstruction;
  if (has("trap")) return cudaErrorLaunchFailure;
  if (has("out of bounds") || has("address")) return cudaErrorIllegalAddress;
  return cudaErrorLaunchFailure;
}

void fail_device(int code) {
  int none = 0;
  if (!env("EMU_NOT_STICKY", 0)) state().sticky.compare_exchange_strong(none, code);
}

// ---------------------------------------------------------------- streams
int run_work(const Op& op) {
  try {
    return op.work();
  } catch (const emu::Error& e) {
    complain("\nemu: %s\n", op.name + ": " + e.what());
    return code_of(e.what());
  } catch (const std::exception& e) {
    complain("\nemu: %s\n", op.name + ": " + e.what());
    return cudaErrorLaunchFailure;
  }
}

void work_on(Stream* s) {
  State& g = state();
  std::unique_lock lock(g.mutex);
  for (;;) {
    g.changed.wait(lock, [&] { return s->closed || !s->queue.empty(); });
    if (s->queue.empty()) return;  // closed and drained
    Op& op = s->queue.front();
    g.changed.wait(lock, [&] {
      return std::all_of(op.waits.begin(), op.waits.end(), [](const Done& d) { return d->done; });
    });
    int code = 0;
    lock.unlock();
    if (op.work && (g.sticky == 0 || op.always)) code = run_work(op);
    lock.lock();
    if (code) fail_device(code);
    op.done->at = Clock::now();
    op.done->done = true;
    {
      Op gone = std::move(op);
      s->queue.pop_front();
      lock.unlock();  // destructors of what the work held
    }
    lock.lock();
    g.changed.notify_all();
  }
}

cudaError_t find_stream(cudaStream_t handle, Stream** found) {  // under the mutex
  State& g = state();
  if (handle == nullptr || handle == cudaStreamLegacy) {
    *found = g.legacy[static_cast<size_t>(current_device)];
    return cudaSuccess;
  }
  if (handle == cudaStreamPerThread) {
    thread_local std::vector<Stream*> mine(g.legacy.size());
    Stream*& s = mine[static_cast<size_t>(current_device)];
    if (!s) {
      s = g.make_stream();
      s->device = current_device;
      g.streams.insert(s);
    }
    *found = s;
    return cudaSuccess;
  }
  auto* s = reinterpret_cast<Stream*>(handle);
  if (!g.streams.count(s)) return cudaErrorInvalidResourceHandle;
  *found = s;
  return cudaSuccess;
}

bool blocking_capture(int device) {  // the null stream may not be used then
  for (auto& [id, c] : state().captures)
    for (Stream* s : c->streams)
      if (s->blocking && s->device == device) return true;
  return false;
}

void invalidate_blocking() {
  for (auto& [id, c] : state().captures)
    for (Stream* s : c->streams)
      if (s->blocking) c->invalid = true;
}

// Queues or records. Under the mutex.
cudaError_t submit(Stream* s, std::string name, Work work, std::vector<Done> waits = {}, bool always = false,
                   Done* done = nullptr) {
  State& g = state();
  if (s->capture) {
    if (s->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    auto& nodes = s->capture->graph->nodes;
    nodes.push_back({std::move(name), std::move(work), s->tail});
    s->tail = {static_cast<int>(nodes.size()) - 1};
    return cudaSuccess;
  }
  if (s->legacy && blocking_capture(s->device)) {
    invalidate_blocking();
    return cudaErrorStreamCaptureImplicit;
  }
  auto wait_for = [&](const Done& d) {
    if (d && !d->done) waits.push_back(d);
  };
  if (s->legacy) {
    for (Stream* other : g.streams)
      if (other->blocking && other->device == s->device) wait_for(other->last);
  } else if (s->blocking) {
    wait_for(g.legacy[static_cast<size_t>(s->device)]->last);
  }
  Op op{std::move(name), std::move(work), std::move(waits), std::make_shared<Completion>(), always};
  s->last = op.done;
  if (done) *done = op.done;
  s->queue.push_back(std::move(op));
  if (!s->started) {
    s->started = true;
    std::thread(work_on, s).detach();
  }
  g.changed.notify_all();
  return cudaSuccess;
}

void wait(std::unique_lock<std::mutex>& lock, const Done& d) {
  if (d) state().changed.wait(lock, [&] { return d->done; });
}

int submit_from_outside(void* handle, const char* name, int (*work)(void*), void* data, void (*destroy)(void*)) {
  std::shared_ptr<void> held(data, destroy);
  State& g = state();
  std::unique_lock lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(static_cast<cudaStream_t>(handle), &s)) return e;
  cudaError_t e = submit(s, name, [work, held] { return work(held.get()); });
  if (g.sync && !s->capture && e == cudaSuccess) wait(lock, s->last);
  return e;
}

Stream* State::make_stream() {
  auto* s = new Stream;
  s->submit = submit_from_outside;
  s->holds = emu::Memory::holds;
  return s;
}

// Calls that a capture in global mode forbids.
cudaError_t unsafe_call(const char* what) {
  State& g = state();
  std::lock_guard lock(g.mutex);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto& [id, c] : g.captures) {
    if (c->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool mine = c->thread == std::this_thread::get_id();
    if (mine || (thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal)) {
      c->invalid = true;
      complain("emu: %s during a stream capture: not permitted\n", what);
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}
#define UNSAFE() \
  if (cudaError_t e_ = unsafe_call(__func__)) return keep(e_)

cudaError_t on_stream(cudaStream_t handle, std::string name, Work work, bool wait_for_it = false,
                      bool launch = false) {
  STICKY();
  State& g = state();
  std::unique_lock lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  if (launch && s->device != current_device) return keep(cudaErrorInvalidResourceHandle);
  const bool capturing = s->capture != nullptr;
  if (cudaError_t e = submit(s, std::move(name), std::move(work))) return keep(e);
  if ((wait_for_it || g.sync) && !capturing) {
    wait(lock, s->last);
    STICKY();
  }
  return cudaSuccess;
}

// ---------------------------------------------------------------- memory
constexpr size_t page = 4096;

cudaError_t allocate(void** out, size_t bytes, Block::Kind kind) {
  State& g = state();
  if (!out) return cudaErrorInvalidValue;
  if (bytes == 0) {
    *out = nullptr;
    return cudaSuccess;
  }
  std::lock_guard lock(g.mutex);
  if (kind == Block::device_memory && (bytes > g.memory || g.used + bytes > g.memory)) {
    *out = nullptr;
    return cudaErrorMemoryAllocation;
  }
  if (!g.arena) {  // addresses are not used twice: use after free shows
    const size_t arena_bytes = size_t{16} << 40;
    void* at = mmap(reinterpret_cast<void*>(0x200000000000), arena_bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return cudaErrorMemoryAllocation;
    g.arena = reinterpret_cast<uintptr_t>(at), g.arena_end = g.arena + arena_bytes;
  }
  // The end of the block lies at a guard page, its begin at 256 bytes.
  const size_t rounded = (bytes + 255) / 256 * 256, mapped = (rounded + page - 1) / page * page;
  if (g.arena + mapped + 2 * page > g.arena_end) return cudaErrorMemoryAllocation;
  void* map = reinterpret_cast<void*>(g.arena + page);
  g.arena += mapped + page;
  if (mprotect(map, mapped, PROT_READ | PROT_WRITE)) return cudaErrorMemoryAllocation;
  auto* begin = static_cast<char*>(map) + (mapped - rounded);
  const size_t edge = size_t{64} << 20;  // of the largest only the ends: whole pages cost real memory
  if (bytes <= 8 * edge) {
    std::memset(map, 0xff, mapped);
  } else {
    std::memset(map, 0xff, edge);
    std::memset(static_cast<char*>(map) + mapped - edge, 0xff, edge);
  }
  g.blocks[reinterpret_cast<uintptr_t>(begin)] = {bytes, mapped, map, current_device, kind};
  if (kind != Block::host) g.used += bytes;
  emu::Memory::add(begin, bytes);
  *out = begin;
  return cudaSuccess;
}

cudaError_t release(void* p, bool host) {
  if (!p) return cudaSuccess;
  State& g = state();
  std::lock_guard lock(g.mutex);
  auto it = g.blocks.find(reinterpret_cast<uintptr_t>(p));
  if (it == g.blocks.end() || (it->second.kind == Block::host) != host) return cudaErrorInvalidValue;
  emu::Memory::remove(p);
  const Block b = it->second;
  g.blocks.erase(it);
  if (!host) g.used -= b.bytes;
  mmap(b.map, b.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return cudaSuccess;
}

const Block* block_of(const void* p, uintptr_t* begin = nullptr) {  // under the mutex
  State& g = state();
  auto it = g.blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (it == g.blocks.begin()) return nullptr;
  --it;
  if (reinterpret_cast<uintptr_t>(p) >= it->first + it->second.bytes) return nullptr;
  if (begin) *begin = it->first;
  return &it->second;
}

bool known(const void* p) { return emu::Memory::holds(p, 1); }

bool pinned_or_device(const void* p) {
  std::lock_guard lock(state().mutex);
  return block_of(p) != nullptr;
}

cudaError_t refuse(const char* what, const void* p, size_t bytes) {
  std::fprintf(stderr, "emu: %s: [%p, +%zu) is not device memory\n", what, p, bytes);
  return cudaErrorInvalidValue;
}

struct Rows {
  void* to;
  const void* from;
  size_t to_pitch, from_pitch, width, height;
  size_t extent(size_t pitch) const { return height ? (height - 1) * pitch + width : 0; }
};

cudaError_t copy(Rows r, cudaMemcpyKind kind, cudaStream_t stream, bool synchronous) {
  STICKY();
  if (r.width == 0 || r.height == 0) return cudaSuccess;
  if (r.width > r.to_pitch || r.width > r.from_pitch) return keep(cudaErrorInvalidPitchValue);
  const bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost,
             from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
  const size_t to_bytes = r.extent(r.to_pitch), from_bytes = r.extent(r.from_pitch);
  if (!to_host && kind != cudaMemcpyDefault && !emu::Memory::holds(r.to, to_bytes))
    return keep(refuse("memcpy to", r.to, to_bytes));
  if (!from_host && kind != cudaMemcpyDefault && !emu::Memory::holds(r.from, from_bytes))
    return keep(refuse("memcpy from", r.from, from_bytes));
  if (kind == cudaMemcpyDefault) {
    for (auto [p, n] : {std::pair<const void*, size_t>{r.to, to_bytes}, {r.from, from_bytes}})
      if (known(p) && !emu::Memory::holds(p, n)) return keep(refuse("memcpy", p, n));
  }
  bool capturing = false;
  {
    std::lock_guard lock(state().mutex);
    Stream* s = nullptr;
    if (cudaError_t e = find_stream(stream, &s)) return keep(e);
    capturing = s->capture != nullptr;
  }
  const bool pageable_to = !known(r.to), pageable_from = !known(r.from);
  std::shared_ptr<std::vector<char>> staged;
  if (pageable_from && !capturing && !synchronous) {
    staged = std::make_shared<std::vector<char>>(r.width * r.height);
    for (size_t i = 0; i < r.height; ++i)
      std::memcpy(staged->data() + i * r.width, static_cast<const char*>(r.from) + i * r.from_pitch, r.width);
    r.from = staged->data(), r.from_pitch = r.width;
  }
  Work work = [r, staged, to_bytes, from_bytes, pageable_to, pageable_from] {
    if ((!pageable_to && !emu::Memory::holds(r.to, to_bytes)) ||
        (!pageable_from && !emu::Memory::holds(r.from, from_bytes))) {
      complain("emu: %s\n", "memcpy on memory that was freed before it ran");
      return static_cast<int>(cudaErrorIllegalAddress);
    }
    for (size_t i = 0; i < r.height; ++i)
      std::memmove(static_cast<char*>(r.to) + i * r.to_pitch, static_cast<const char*>(r.from) + i * r.from_pitch,
                   r.width);
    return 0;
  };
  return on_stream(stream, "memcpy", std::move(work), synchronous || (pageable_to && !capturing));
}

cudaError_t fill(void* p, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  STICKY();
  if (width == 0 || height == 0) return cudaSuccess;
  if (width > pitch) return keep(cudaErrorInvalidPitchValue);
  const size_t bytes = (height - 1) * pitch + width;
  if (!emu::Memory::holds(p, bytes)) return keep(refuse("memset", p, bytes));
  return on_stream(stream, "memset", [=] {
    if (!emu::Memory::holds(p, bytes)) {
      complain("emu: %s\n", "memset on memory that was freed before it ran");
      return static_cast<int>(cudaErrorIllegalAddress);
    }
    for (size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(p) + i * pitch, value, width);
    return 0;
  });
}

// ---------------------------------------------------------------- modules
emu::Module* load(FatBinary* b) {
  std::lock_guard lock(b->mutex);
  if (!b->tried) {
    b->tried = true;
    try {
      if (b->ptx.empty()) throw emu::Error("a fat binary without uncompressed PTX");
      b->module = emu::Module::load(b->ptx);
    } catch (const std::exception& e) {
      b->problem = e.what();
      complain("emu: load of a module: %s\n", b->problem);
    }
  }
  return b->module.get();
}

const emu::KernelInfo* info_of(Function* f) {
  emu::Module* m = load(f->binary);
  return m ? m->kernel(f->name) : nullptr;
}

Function* find_function(const void* f) {
  State& g = state();
  std::lock_guard lock(g.registry);
  if (auto it = g.functions.find(f); it != g.functions.end()) return it->second;
  return g.handles.count(f) ? static_cast<Function*>(const_cast<void*>(f)) : nullptr;
}

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string s = text && status == 0 ? text : name;
  std::free(text);
  return s;
}

std::string brief(const std::string& pretty) { return pretty.size() > 160 ? pretty.substr(0, 160) + "..." : pretty; }

constexpr int shared_optin = 232448, shared_sm = 233472;

int resident_blocks(const emu::KernelInfo& info, int threads, size_t dynamic) {
  if (threads <= 0 || threads > static_cast<int>(info.max_threads)) return 0;
  const size_t shared = info.static_shared + dynamic;
  if (shared > static_cast<size_t>(shared_optin)) return 0;
  const int by_shared = static_cast<int>(shared_sm / (shared + 1024));
  const int warps = (threads + 31) / 32;
  return std::max(0, std::min({by_shared, 64 / warps, 32}));
}

cudaError_t launch(Function* f, dim3 grid, dim3 block, dim3 cluster, void** args, size_t shared, cudaStream_t stream) {
  STICKY();
  if (!f) return keep(cudaErrorInvalidDeviceFunction);
  emu::Module* module = load(f->binary);
  const emu::KernelInfo* info = module ? module->kernel(f->name) : nullptr;
  if (!info) {
    complain("emu: no kernel %s\n", f->name);
    return keep(cudaErrorInvalidDeviceFunction);
  }
  auto refuse_launch = [&](cudaError_t e, const char* why) {
    std::fprintf(stderr, "emu: launch of %s refused: %s (grid %u %u %u, block %u %u %u, shared %zu + %u)\n",
                 brief(f->pretty).c_str(), why, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
                 info->static_shared);
    return keep(e);
  };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return refuse_launch(cudaErrorInvalidConfiguration, "grid");
  if (threads == 0 || threads > 1024 || block.z > 64) return refuse_launch(cudaErrorInvalidConfiguration, "block");
  if (threads > info->max_threads) return refuse_launch(cudaErrorInvalidValue, "block beyond the launch bounds");
  const size_t allowed = f->max_dynamic >= 0 ? std::max<size_t>(f->max_dynamic, 49152 - std::min(49152u, info->static_shared))
                                             : 49152 - std::min(49152u, info->static_shared);
  if (shared > allowed) return refuse_launch(cudaErrorInvalidValue, "dynamic shared memory beyond what is allowed");
  const emu::Dim3 rc = info->required_cluster;
  if (rc.x * rc.y * rc.z > 1) {
    if (cluster.x * cluster.y * cluster.z > 1 && (cluster.x != rc.x || cluster.y != rc.y || cluster.z != rc.z))
      return refuse_launch(cudaErrorInvalidClusterSize, "cluster unlike the kernel's");
    cluster = {rc.x, rc.y, rc.z};
  }
  const unsigned of_cluster = cluster.x * cluster.y * cluster.z;
  if (of_cluster == 0 || of_cluster > (f->nonportable ? 16u : 8u))
    return refuse_launch(cudaErrorInvalidClusterSize, "cluster size");
  if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z)
    return refuse_launch(cudaErrorInvalidClusterSize, "grid not a multiple of the cluster");
  size_t bytes = 0;
  for (const auto& p : info->params) bytes = std::max<size_t>(bytes, p.offset + p.size);
  auto params = std::make_shared<std::vector<uint64_t>>(bytes / 8 + 10);
  // 64 bytes of alignment for tensor maps
  auto* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(params->data()) + 63) / 64 * 64);
  for (size_t i = 0; i < info->params.size(); ++i)
    std::memcpy(at + info->params[i].offset, args[i], info->params[i].size);
  emu::Launch l;
  l.grid = {grid.x, grid.y, grid.z}, l.block = {block.x, block.y, block.z};
  l.cluster = {cluster.x, cluster.y, cluster.z};
  l.dynamic_shared = static_cast<uint32_t>(shared);
  return on_stream(
      stream, "kernel " + brief(f->pretty),
      [module, f, l, params, at] {
        State& g = state();
        std::lock_guard one(g.kernels);
        const auto begin = Clock::now();
        if (g.trace)
          std::fprintf(stderr, "emu: > %s grid %u %u %u block %u %u %u cluster %u %u %u shared %u\n",
                       brief(f->pretty).c_str(), l.grid.x, l.grid.y, l.grid.z, l.block.x, l.block.y, l.block.z,
                       l.cluster.x, l.cluster.y, l.cluster.z, l.dynamic_shared);
        module->launch(f->name, l, at);
        const double s = std::chrono::duration<double>(Clock::now() - begin).count();
        if (g.trace) std::fprintf(stderr, "emu: < %.3f s\n", s);
        auto& [time, count] = g.profile[f->pretty];
        time += s, ++count;
        return 0;
      },
      false, true);
}

void print_profile() {
  State& g = state();
  std::vector<std::pair<double, std::string>> rows;
  for (auto& [name, row] : g.profile) {
    char text[64];
    std::snprintf(text, sizeof text, "%9.3f s %7ld x ", row.first, row.second);
    rows.push_back({row.first, text + brief(name)});
  }
  std::sort(rows.rbegin(), rows.rend());
  std::fprintf(stderr, "emu: kernels:\n");
  for (auto& [t, text] : rows) std::fprintf(stderr, "%s\n", text.c_str());
}

struct Config {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Config> pushed;

// A fat binary's header and its entries: the PTX of the highest architecture.
std::string ptx_of(const void* data) {
  struct Header {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
  };
  struct Entry {
    uint16_t kind, unknown;
    uint32_t header_size;
    uint64_t size;
    uint32_t compressed_size, unknown2;
    uint16_t minor, major;
    uint32_t arch, name_offset, name_size;
    uint64_t flags, zero, decompressed_size;
  };
  const auto* h = static_cast<const Header*>(data);
  if (h->magic != 0xBA55ED50u) return "";
  const char* at = static_cast<const char*>(data) + h->header_size;
  const char* end = at + h->size;
  std::string best;
  uint32_t arch = 0;
  while (at < end) {
    const auto* e = reinterpret_cast<const Entry*>(at);
    const char* payload = at + e->header_size;
    if (e->kind == 1 && e->arch >= arch) {
      std::string text(payload, e->size);
      if (const size_t zero = text.find('\0'); zero != std::string::npos) text.resize(zero);
      if (text.find(".version") != std::string::npos) best = std::move(text), arch = e->arch;
    }
    at = payload + e->size;
  }
  return best;
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------- registration
void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const void* data;
    void* rest;
  };
  auto* b = new FatBinary;
  b->ptx = ptx_of(static_cast<const Wrapper*>(wrapper)->data);
  State& g = state();
  std::lock_guard lock(g.registry);
  if (g.binaries.empty() && env("EMU_PROFILE", 0)) std::atexit(print_profile);
  g.binaries.push_back(b);
  return reinterpret_cast<void**>(b);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  auto* f = new Function;
  f->binary = reinterpret_cast<FatBinary*>(handle);
  f->name = name, f->pretty = demangled(name);
  State& g = state();
  std::lock_guard lock(g.registry);
  g.functions[host] = f;
  g.handles.insert(f);
}
void __cudaRegisterVar(void** handle, char* host, char*, const char* name, int, size_t size, int, int) {
  State& g = state();
  std::lock_guard lock(g.registry);
  g.variables[host] = {reinterpret_cast<FatBinary*>(handle), name, size};
}
void __cudaRegisterManagedVar(void**, void**, char*, const char* name, int, size_t, int, int) {
  complain("emu: managed variable %s: not there\n", name);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  Function* f = find_function(host);
  if (!f) return keep(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(f);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                               cudaStream_t stream) {
  return launch(find_function(kernel), grid, block, {1, 1, 1}, args, shared, stream);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (pushed.empty()) return keep(cudaErrorMissingConfiguration);
  const Config c = pushed.back();
  pushed.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

// ---------------------------------------------------------------- launches
cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return launch(find_function(f), grid, block, {1, 1, 1}, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  dim3 cluster{1, 1, 1};
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const cudaLaunchAttribute& a = c->attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension)
      cluster = {a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z};
  }
  return launch(find_function(f), c->gridDim, c->blockDim, cluster, args, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared,
                                        cudaStream_t stream) {
  return launch(find_function(f), grid, block, {1, 1, 1}, args, shared, stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* data) {
  return on_stream(stream, "host function", [fn, data] {
    fn(data);
    return 0;
  });
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t fn, void* data, unsigned) {
  return on_stream(stream, "callback", [=] {
    fn(stream, cudaSuccess, data);
    return 0;
  });
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute which, int value) {
  STICKY();
  Function* f = find_function(host);
  const emu::KernelInfo* info = f ? info_of(f) : nullptr;
  if (!info) return keep(cudaErrorInvalidDeviceFunction);
  switch (which) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
      if (value < 0 || value + static_cast<int>(info->static_shared) > shared_optin)
        return keep(cudaErrorInvalidValue);
      f->max_dynamic = value;
      return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
      if (value < -1 || value > 100) return keep(cudaErrorInvalidValue);
      f->carveout = value;
      return cudaSuccess;
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
      f->nonportable = value;
      return cudaSuccess;
    default:
      return cudaSuccess;
  }
}
cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* host) {
  STICKY();
  Function* f = find_function(host);
  const emu::KernelInfo* info = f ? info_of(f) : nullptr;
  if (!info) return keep(cudaErrorInvalidDeviceFunction);
  *a = {};
  a->sharedSizeBytes = info->static_shared;
  a->maxThreadsPerBlock = static_cast<int>(info->max_threads);
  a->numRegs = std::min(255, 65536 / static_cast<int>(info->max_threads) / 8 * 8);
  a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = f->max_dynamic >= 0 ? f->max_dynamic : 49152 - static_cast<int>(info->static_shared);
  a->preferredShmemCarveout = f->carveout;
  a->requiredClusterWidth = a->requiredClusterHeight = a->requiredClusterDepth = 0;
  a->nonPortableClusterSizeAllowed = f->nonportable;
  return cudaSuccess;
}
cudaError_t cudaFuncGetName(const char** name, const void* host) {
  Function* f = find_function(host);
  if (!f) return keep(cudaErrorInvalidDeviceFunction);
  *name = f->name.c_str();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads,
                                                                   size_t dynamic, unsigned) {
  STICKY();
  Function* f = find_function(host);
  const emu::KernelInfo* info = f ? info_of(f) : nullptr;
  if (!info) return keep(cudaErrorInvalidDeviceFunction);
  *blocks = resident_blocks(*info, threads, dynamic);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads, size_t dynamic) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, dynamic, 0);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* host, const cudaLaunchConfig_t* c) {
  int blocks = 0;
  if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, host, static_cast<int>(c->blockDim.x * c->blockDim.y * c->blockDim.z), c->dynamicSmemBytes))
    return e;
  unsigned size = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
      size = c->attrs[i].val.clusterDim.x * c->attrs[i].val.clusterDim.y * c->attrs[i].val.clusterDim.z;
  *clusters = state().sms * blocks / static_cast<int>(std::max(1u, size));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, const void*, const cudaLaunchConfig_t*) {
  *size = 8;
  return cudaSuccess;
}

// ---------------------------------------------------------------- errors
cudaError_t cudaGetLastError() {
  if (cudaError_t e = sticky()) return e;
  const int e = last_error;
  last_error = 0;
  return static_cast<cudaError_t>(e);
}
cudaError_t cudaPeekAtLastError() {
  if (cudaError_t e = sticky()) return e;
  return static_cast<cudaError_t>(last_error);
}
#define ERRORS(X)                                                                                         \
  X(cudaSuccess, "no error")                                                                              \
  X(cudaErrorInvalidValue, "invalid argument")                                                            \
  X(cudaErrorMemoryAllocation, "out of memory")                                                           \
  X(cudaErrorInitializationError, "initialization error")                                                 \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument")                                      \
  X(cudaErrorInvalidPitchValue, "invalid pitch argument")                                                 \
  X(cudaErrorInvalidSymbol, "invalid device symbol")                                                      \
  X(cudaErrorMissingConfiguration, "__global__ function call is not configured")                          \
  X(cudaErrorInvalidDeviceFunction, "invalid device function")                                            \
  X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                              \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                                     \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                            \
  X(cudaErrorNotReady, "device not ready")                                                                \
  X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                  \
  X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                             \
  X(cudaErrorMisalignedAddress, "misaligned address")                                                     \
  X(cudaErrorIllegalInstruction, "an illegal instruction was encountered")                                \
  X(cudaErrorLaunchFailure, "unspecified launch failure")                                                 \
  X(cudaErrorInvalidClusterSize, "invalid cluster size")                                                  \
  X(cudaErrorNotSupported, "operation not supported")                                                     \
  X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                \
  X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")         \
  X(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")       \
  X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")              \
  X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                 \
  X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")           \
  X(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream") \
  X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")    \
  X(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread") \
  X(cudaErrorUnknown, "unknown error")
const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
#define TEXT(code, text) \
  case code:             \
    return text;
    ERRORS(TEXT)
    default:
      return "unrecognized error code";
  }
}
const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
#define NAME(code, text) \
  case code:             \
    return #code;
    ERRORS(NAME)
    default:
      return "unrecognized error code";
  }
}

// ---------------------------------------------------------------- devices
cudaError_t cudaGetDeviceCount(int* count) {
  *count = state().devices;
  return state().devices ? cudaSuccess : keep(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  if (!state().devices) return keep(cudaErrorNoDevice);
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (!state().devices) return keep(cudaErrorNoDevice);
  if (device < 0 || device >= state().devices) return keep(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) {
  *can = a != b;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (device < 0 || device >= state().devices) return keep(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<size_t>(size), "0000:%02X:00.0", 0xe0 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned bus = 0;
  *device = std::sscanf(text, "%*x:%x", &bus) == 1 ? static_cast<int>(bus) - 0xe0 : -1;
  return *device >= 0 && *device < state().devices ? cudaSuccess : keep(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (device < 0 || device >= state().devices) return keep(cudaErrorInvalidDevice);
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_optin;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = shared_sm;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 32;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = state().sms;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 3201000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 6144;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 62914560;
      break;
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostNativeAtomicSupported:
      *value = 1;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = 3;
      break;
    case cudaDevAttrTextureAlignment:
      *value = 512;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= state().devices) return keep(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  const char* name = std::getenv("EMU_NAME");
  std::snprintf(p->name, sizeof p->name, "%s", name ? name : "Emulated H200");
  auto get = [&](cudaDeviceAttr which) {
    int v = 0;
    cudaDeviceGetAttribute(&v, which, device);
    return v;
  };
  p->totalGlobalMem = state().memory;
  p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32, p->memPitch = 0x7fffffff;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536, p->major = 9, p->minor = 0, p->textureAlignment = 512;
  p->multiProcessorCount = state().sms;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
  p->pciBusID = 0xe0 + device;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = get(cudaDevAttrGlobalMemoryBusWidth);
  p->l2CacheSize = get(cudaDevAttrL2CacheSize);
  p->persistingL2CacheMaxSize = p->l2CacheSize / 2;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = shared_sm, p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = shared_optin, p->reservedSharedMemPerBlock = 1024;
  p->cooperativeLaunch = p->clusterLaunch = 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = 1;
  p->uuid.bytes[0] = 'e', p->uuid.bytes[15] = static_cast<char>(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  STICKY();
  UNSAFE();
  State& g = state();
  std::unique_lock lock(g.mutex);
  std::vector<Done> all{g.legacy[static_cast<size_t>(current_device)]->last};
  for (Stream* s : g.streams)
    if (s->device == current_device) all.push_back(s->last);
  for (const Done& d : all) wait(lock, d);
  STICKY();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// ---------------------------------------------------------------- memory
cudaError_t cudaMalloc(void** p, size_t bytes) {
  STICKY();
  UNSAFE();
  return keep(allocate(p, bytes, Block::device_memory));
}
cudaError_t cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(p, *pitch * height);
}
cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) {
  STICKY();
  UNSAFE();
  return keep(allocate(p, bytes, Block::managed));
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  STICKY();
  UNSAFE();
  return keep(allocate(p, bytes, Block::host));
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) {
  STICKY();
  return keep(allocate(p, bytes, Block::device_memory));
}
cudaError_t cudaFree(void* p) {
  if (!p) return sticky();
  if (!sticky()) {
    UNSAFE();
    cudaDeviceSynchronize();
  }
  const cudaError_t e = release(p, false);
  STICKY();
  return keep(e);
}
cudaError_t cudaFreeHost(void* p) {
  if (!sticky()) {
    UNSAFE();
    cudaDeviceSynchronize();
  }
  return keep(release(p, true));
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  return on_stream(stream, "free", [p] { return static_cast<int>(release(p, false)); });
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  std::lock_guard lock(state().mutex);
  state().blocks[reinterpret_cast<uintptr_t>(p)] = {bytes, 0, nullptr, current_device, Block::registered};
  emu::Memory::add(p, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard lock(state().mutex);
  if (!state().blocks.erase(reinterpret_cast<uintptr_t>(p))) return keep(cudaErrorInvalidValue);
  emu::Memory::remove(p);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return pinned_or_device(host) ? cudaSuccess : keep(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  STICKY();
  std::lock_guard lock(state().mutex);
  *total = state().memory;
  *free = state().memory - std::min(state().memory, state().used);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard lock(state().mutex);
  *a = {};
  const Block* b = block_of(p);
  if (!b) {
    a->type = known(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    a->device = known(p) ? 0 : -2;
    if (known(p)) a->devicePointer = const_cast<void*>(p);
    else a->hostPointer = const_cast<void*>(p);
    return cudaSuccess;
  }
  a->device = b->device;
  a->devicePointer = const_cast<void*>(p);
  a->type = b->kind == Block::device_memory ? cudaMemoryTypeDevice
            : b->kind == Block::managed     ? cudaMemoryTypeManaged
                                            : cudaMemoryTypeHost;
  if (b->kind != Block::device_memory) a->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({to, from, n, n, n, 1}, kind, stream, false);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  STICKY();
  UNSAFE();
  return copy({to, from, n, n, n, 1}, kind, nullptr, true);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy({to, from, to_pitch, from_pitch, width, height}, kind, stream, false);
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  STICKY();
  UNSAFE();
  return copy({to, from, to_pitch, from_pitch, width, height}, kind, nullptr, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
  return copy({to, from, n, n, n, 1}, cudaMemcpyDeviceToDevice, stream, false);
}
cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t n) {
  return copy({to, from, n, n, n, 1}, cudaMemcpyDeviceToDevice, nullptr, true);
}
cudaError_t cudaMemset(void* p, int value, size_t n) {
  STICKY();
  UNSAFE();
  return fill(p, n, value, n, 1, nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
  return fill(p, n, value, n, 1, stream);
}
cudaError_t cudaMemset2D(void* p, size_t pitch, int value, size_t width, size_t height) {
  STICKY();
  UNSAFE();
  return fill(p, pitch, value, width, height, nullptr);
}
cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  return fill(p, pitch, value, width, height, stream);
}
static cudaError_t symbol(const void* host, void** address, size_t* bytes) {
  Variable v;
  {
    std::lock_guard lock(state().registry);
    auto it = state().variables.find(host);
    if (it == state().variables.end()) return cudaErrorInvalidSymbol;
    v = it->second;
  }
  emu::Module* m = load(v.binary);
  uint64_t size = 0;
  *address = m ? m->symbol(v.name, &size) : nullptr;
  if (bytes) *bytes = v.bytes;
  return *address ? cudaSuccess : cudaErrorInvalidSymbol;
}
cudaError_t cudaGetSymbolAddress(void** p, const void* host) { return keep(symbol(host, p, nullptr)); }
cudaError_t cudaGetSymbolSize(size_t* n, const void* host) {
  void* p = nullptr;
  return keep(symbol(host, &p, n));
}
cudaError_t cudaMemcpyToSymbolAsync(const void* host, const void* from, size_t n, size_t offset, cudaMemcpyKind kind,
                                    cudaStream_t stream) {
  void* p = nullptr;
  size_t bytes = 0;
  if (cudaError_t e = symbol(host, &p, &bytes)) return keep(e);
  if (offset + n > bytes) return keep(cudaErrorInvalidValue);
  return copy({static_cast<char*>(p) + offset, from, n, n, n, 1}, kind, stream, false);
}
cudaError_t cudaMemcpyToSymbol(const void* host, const void* from, size_t n, size_t offset, cudaMemcpyKind kind) {
  UNSAFE();
  if (cudaError_t e = cudaMemcpyToSymbolAsync(host, from, n, offset, kind, nullptr)) return e;
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpyFromSymbolAsync(void* to, const void* host, size_t n, size_t offset, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
  void* p = nullptr;
  size_t bytes = 0;
  if (cudaError_t e = symbol(host, &p, &bytes)) return keep(e);
  if (offset + n > bytes) return keep(cudaErrorInvalidValue);
  return copy({to, static_cast<char*>(p) + offset, n, n, n, 1}, kind, stream, false);
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* host, size_t n, size_t offset, cudaMemcpyKind kind) {
  UNSAFE();
  if (cudaError_t e = cudaMemcpyFromSymbolAsync(to, host, n, offset, kind, nullptr)) return e;
  return cudaStreamSynchronize(nullptr);
}

// ---------------------------------------------------------------- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  STICKY();
  State& g = state();
  std::lock_guard lock(g.mutex);
  Stream* s = g.make_stream();
  s->device = current_device, s->flags = flags, s->priority = std::clamp(priority, -5, 0);
  s->blocking = !(flags & cudaStreamNonBlocking);
  g.streams.insert(s);
  *out = reinterpret_cast<cudaStream_t>(s);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  State& g = state();
  std::lock_guard lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  if (s->legacy) return keep(cudaErrorInvalidResourceHandle);
  if (s->capture) {
    s->capture->invalid = true;
    s->capture->streams.erase(s);
  }
  g.streams.erase(s);
  s->closed = true;  // the worker ends once drained; the object is leaked
  g.changed.notify_all();
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  std::lock_guard lock(state().mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  *flags = s->flags;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  std::lock_guard lock(state().mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  *priority = s->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  std::lock_guard lock(state().mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  *device = s->device;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(handle);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  STICKY();
  State& g = state();
  {
    std::unique_lock lock(g.mutex);
    Stream* s = nullptr;
    if (cudaError_t e = find_stream(handle, &s)) return keep(e);
    if (s->capture) {
      s->capture->invalid = true;
      return keep(cudaErrorStreamCaptureUnsupported);
    }
    if (s->legacy && blocking_capture(s->device)) {
      invalidate_blocking();
      return keep(cudaErrorStreamCaptureImplicit);
    }
    std::vector<Done> all{s->last};
    if (s->legacy)
      for (Stream* other : g.streams)
        if (other->blocking && other->device == s->device) all.push_back(other->last);
    for (const Done& d : all) wait(lock, d);
  }
  STICKY();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  STICKY();
  {
    std::lock_guard lock(state().mutex);
    Stream* s = nullptr;
    if (cudaError_t e = find_stream(handle, &s)) return keep(e);
    if (s->capture) {
      s->capture->invalid = true;
      return keep(cudaErrorStreamCaptureUnsupported);
    }
  }
  UNSAFE();
  std::lock_guard lock(state().mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  bool done = !s->last || s->last->done;
  if (s->legacy)
    for (Stream* other : state().streams)
      if (other->blocking && other->device == s->device) done = done && (!other->last || other->last->done);
  if (!done) return keep(cudaErrorNotReady);
  STICKY();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  STICKY();
  State& g = state();
  std::unique_lock lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  auto* event = reinterpret_cast<Event*>(event_handle);
  if (!g.events.count(event)) return keep(cudaErrorInvalidResourceHandle);
  if (event->capture) {
    auto it = g.captures.find(event->capture);
    if (it == g.captures.end()) return keep(cudaErrorCapturedEvent);
    Capture* c = it->second;
    if (c->invalid) return keep(cudaErrorStreamCaptureInvalidated);
    if (s->capture && s->capture != c) return keep(cudaErrorStreamCaptureMerge);
    if (!s->capture) {
      if (s->legacy) return keep(cudaErrorStreamCaptureImplicit);
      s->capture = c;
      c->streams.insert(s);
      s->tail.clear();
    }
    for (int n : event->nodes)
      if (std::find(s->tail.begin(), s->tail.end(), n) == s->tail.end()) s->tail.push_back(n);
    return cudaSuccess;
  }
  if (s->capture) {
    if (!event->record) return cudaSuccess;
    s->capture->invalid = true;
    return keep(cudaErrorStreamCaptureIsolation);
  }
  if (!event->record || event->record->done) return cudaSuccess;
  return keep(submit(s, "wait", nullptr, {event->record}, true));
}

// ---------------------------------------------------------------- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  STICKY();
  State& g = state();
  std::lock_guard lock(g.mutex);
  auto* e = new Event;
  e->flags = flags;
  g.events.insert(e);
  *out = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  State& g = state();
  std::lock_guard lock(g.mutex);
  auto* e = reinterpret_cast<Event*>(handle);
  if (!g.events.erase(e)) return keep(cudaErrorInvalidResourceHandle);
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  STICKY();
  State& g = state();
  std::unique_lock lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(stream, &s)) return keep(e);
  auto* event = reinterpret_cast<Event*>(handle);
  if (!g.events.count(event)) return keep(cudaErrorInvalidResourceHandle);
  if (s->capture) {
    if (s->capture->invalid) return keep(cudaErrorStreamCaptureInvalidated);
    event->capture = s->capture->id, event->nodes = s->tail, event->record = nullptr;
    return cudaSuccess;
  }
  Done done;
  if (cudaError_t e = submit(s, "event", nullptr, {}, true, &done)) return keep(e);
  event->capture = 0, event->nodes.clear(), event->record = done;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  STICKY();
  {
    std::lock_guard lock(state().mutex);
    auto* e = reinterpret_cast<Event*>(handle);
    if (!state().events.count(e)) return keep(cudaErrorInvalidResourceHandle);
    if (e->capture) {
      if (auto it = state().captures.find(e->capture); it != state().captures.end()) it->second->invalid = true;
      return keep(cudaErrorCapturedEvent);
    }
  }
  UNSAFE();
  std::lock_guard lock(state().mutex);
  auto* e = reinterpret_cast<Event*>(handle);
  return !e->record || e->record->done ? cudaSuccess : keep(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  STICKY();
  State& g = state();
  {
    std::unique_lock lock(g.mutex);
    auto* e = reinterpret_cast<Event*>(handle);
    if (!g.events.count(e)) return keep(cudaErrorInvalidResourceHandle);
    if (e->capture) {
      if (auto it = g.captures.find(e->capture); it != g.captures.end()) it->second->invalid = true;
      return keep(cudaErrorCapturedEvent);
    }
    const Done d = e->record;
    wait(lock, d);
  }
  STICKY();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  STICKY();
  std::lock_guard lock(state().mutex);
  auto *b = reinterpret_cast<Event*>(begin), *e = reinterpret_cast<Event*>(end);
  if (!state().events.count(b) || !state().events.count(e)) return keep(cudaErrorInvalidResourceHandle);
  if (!b->record || !e->record || ((b->flags | e->flags) & cudaEventDisableTiming))
    return keep(cudaErrorInvalidResourceHandle);
  if (!b->record->done || !e->record->done) return keep(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(e->record->at - b->record->at).count();
  return cudaSuccess;
}

// ---------------------------------------------------------------- capture and graphs
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  STICKY();
  State& g = state();
  std::lock_guard lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  if (s->legacy) return keep(cudaErrorStreamCaptureUnsupported);
  if (s->capture) return keep(cudaErrorIllegalState);
  auto* c = new Capture;
  c->id = g.next_capture++, c->mode = mode, c->origin = s, c->thread = std::this_thread::get_id();
  c->graph = new CUgraph_st;
  c->streams.insert(s);
  g.captures[c->id] = c;
  s->capture = c;
  s->tail.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  State& g = state();
  std::lock_guard lock(g.mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  if (graph) *graph = nullptr;
  if (!s->capture) return keep(cudaErrorIllegalState);
  Capture* c = s->capture;
  cudaError_t result = cudaSuccess;
  if (c->origin != s) {
    c->invalid = true;
    return keep(cudaErrorStreamCaptureUnmatched);
  }
  if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
    return keep(cudaErrorStreamCaptureWrongThread);
  if (c->invalid) {
    result = cudaErrorStreamCaptureInvalidated;
  } else {
    std::vector<char> joined(c->graph->nodes.size());
    std::vector<int> todo = s->tail;
    while (!todo.empty()) {
      const int n = todo.back();
      todo.pop_back();
      if (joined[static_cast<size_t>(n)]++) continue;
      for (int d : c->graph->nodes[static_cast<size_t>(n)].deps) todo.push_back(d);
    }
    for (size_t i = 0; i < joined.size(); ++i)
      if (!joined[i]) {
        complain("emu: end of capture: unjoined: %s\n", c->graph->nodes[i].name);
        result = cudaErrorStreamCaptureUnjoined;
        break;
      }
  }
  for (Stream* each : c->streams) each->capture = nullptr, each->tail.clear();
  g.captures.erase(c->id);
  if (result == cudaSuccess && graph) {
    *graph = c->graph;
    g.graphs.insert(c->graph);
  } else {
    delete c->graph;
  }
  delete c;
  return keep(result);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  STICKY();
  std::lock_guard lock(state().mutex);
  Stream* s = nullptr;
  if (cudaError_t e = find_stream(handle, &s)) return keep(e);
  if (s->legacy && blocking_capture(s->device)) return keep(cudaErrorStreamCaptureImplicit);
  *status = !s->capture          ? cudaStreamCaptureStatusNone
            : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* count) {
  if (cudaError_t e = cudaStreamIsCapturing(handle, status)) return e;
  std::lock_guard lock(state().mutex);
  Stream* s = nullptr;
  find_stream(handle, &s);
  if (id) *id = s->capture ? s->capture->id : 0;
  if (graph) *graph = s->capture ? s->capture->graph : nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  *graph = new CUgraph_st;
  std::lock_guard lock(state().mutex);
  state().graphs.insert(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return keep(cudaErrorNotSupported);
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  STICKY();
  std::lock_guard lock(state().mutex);
  if (!state().graphs.count(graph)) return keep(cudaErrorInvalidValue);
  *exec = new CUgraphExec_st{std::make_shared<std::vector<Node>>(graph->nodes)};
  state().execs.insert(*exec);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  STICKY();
  State& g = state();
  std::vector<int> order;
  std::shared_ptr<std::vector<Node>> nodes;
  {
    std::lock_guard lock(g.mutex);
    if (!g.execs.count(exec)) return keep(cudaErrorInvalidValue);
    nodes = exec->nodes;
    // Any order that the dependencies allow: a missing one shows.
    std::vector<int> ready, open(nodes->size());
    std::vector<std::vector<int>> after(nodes->size());
    for (size_t i = 0; i < nodes->size(); ++i) {
      open[i] = static_cast<int>((*nodes)[i].deps.size());
      for (int d : (*nodes)[i].deps) after[static_cast<size_t>(d)].push_back(static_cast<int>(i));
      if (!open[i]) ready.push_back(static_cast<int>(i));
    }
    while (!ready.empty()) {
      const size_t pick = g.shuffle ? g.random() % ready.size() : 0;
      const int n = ready[pick];
      ready.erase(ready.begin() + static_cast<long>(pick));
      order.push_back(n);
      for (int m : after[static_cast<size_t>(n)])
        if (--open[static_cast<size_t>(m)] == 0) ready.push_back(m);
    }
  }
  return on_stream(stream, "graph", [nodes, order] {
    for (int n : order) {
      const Node& node = (*nodes)[static_cast<size_t>(n)];
      if (!node.work) continue;
      Op op{node.name, node.work, {}, nullptr, false};
      if (int e = run_work(op)) return e;
    }
    return 0;
  });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  std::lock_guard lock(state().mutex);
  if (!state().execs.erase(exec)) return keep(cudaErrorInvalidValue);
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  std::lock_guard lock(state().mutex);
  if (!state().graphs.erase(graph)) return keep(cudaErrorInvalidValue);
  delete graph;
  return cudaSuccess;
}

// ---------------------------------------------------------------- the driver
CUresult emu_cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static CUresult emu_cuGetErrorString(CUresult e, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(e));
  return CUDA_SUCCESS;
}
static CUresult emu_cuGetErrorName(CUresult e, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(e));
  return CUDA_SUCCESS;
}
static CUresult emu_cuDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return CUDA_SUCCESS;
}
static CUresult emu_cuInit(unsigned) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::pair<const char*, void*> known_entries[] = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&emu_cuTensorMapEncodeTiled)},
      {"cuGetErrorString", reinterpret_cast<void*>(&emu_cuGetErrorString)},
      {"cuGetErrorName", reinterpret_cast<void*>(&emu_cuGetErrorName)},
      {"cuDriverGetVersion", reinterpret_cast<void*>(&emu_cuDriverGetVersion)},
      {"cuInit", reinterpret_cast<void*>(&emu_cuInit)}};
  *entry = nullptr;
  for (auto& [known_name, function] : known_entries)
    if (std::strcmp(name, known_name) == 0) *entry = function;
  if (found) *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*entry) complain("emu: no driver function %s\n", name);
  return *entry || found ? cudaSuccess : keep(cudaErrorInvalidValue);
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** entry, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, entry, 12000, flags, found);
}
#endif

cudaError_t cudaCtxResetPersistingL2Cache() { return cudaSuccess; }
cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
