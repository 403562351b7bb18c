// What: the interpreter's own structures: decoded instructions, warps, blocks, clusters, a launch.
#pragma once
#include <immintrin.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <unordered_map>

#include "ptx.hpp"

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

constexpr u64 kSharedBase = 1ull << 56, kLocalBase = 1ull << 57;
constexpr u32 kSharedStart = 1024;  // the system's first kilobyte, as on the device
constexpr u32 kSharedLimit = 228 * 1024;

struct Warp;
struct Block;
struct Cluster;
struct Machine;
struct Inst;
using Fn = void (*)(Warp&, const Inst&);

// Operand: >= 0 a byte offset into the warp's registers, < 0 ~offset into the kernel's constants.
// Predicate operands: an index >= 0, or ~index for its negation.
struct Inst {
  Fn fn = nullptr;
  s32 pred = -1;
  u32 neg = 0;
  s32 d = 0, a = 0, b = 0, c = 0, e = 0, f = 0;
  s64 imm = 0;
  u32 target = 0;
  u8 x = 0, y = 0, z = 0, n = 0;  // meaning by instruction
  const std::vector<s32>* list = nullptr;
  Fn inner = nullptr;
  u32 source = 0;  // index of the source statement
};

enum class Stop : u8 { none, diverged, frag_blocked, frag_waits, warp_waits, yield, exited };

struct Frag {
  u32 pc, mask;
  u8 blocked = 0;  // 1: until lanes join or leave; 2: until the next turn
};

struct AccTile {  // accumulators of wgmma that are not in registers now
  s32 first;      // offset of the first register, the tile's name
  const std::vector<s32>* list;
  int n;
  int pending = 0;  // multiplications to come
  u64 group = 0;    // the last group that adds to it
  std::vector<float> x;  // [16][n rounded up to 16]
};
struct WgmmaOp {
  AccTile* tile;
  const Inst* inst;
  u64 da, db;
  float a[16 * 32];  // [k][16] if from registers
  bool a_in_registers, adds;
  u64 group;
};
struct CopyBatch {
  u32 mask;
  u8 size;
  bool arrive;
  u64 group[32];
  u64 to[32];        // shared address, as is
  u64 from[32];
  u32 bytes[32];
};
struct BulkStore {
  int lane;
  u64 group, due;
  std::function<void()> run;
};

struct Warp {
  char* regs = nullptr;
  const char* pool = nullptr;
  u32* preds = nullptr;
  u32 pc = 0, active = 0, mask = 0, live = 0;
  Stop stop = Stop::none;
  u8 wait = 0;  // of the whole warp: 0 no, 1 barrier, 2 cluster barrier
  u32 bar_id = 0;
  bool resume = false;  // the barrier it waited for is complete
  bool woken = false;   // a failing try_wait shall return false now
  bool trying = false;  // stopped at a try_wait
  int index = 0;
  u64 cluster_ticket = 0;
  bool cluster_arrived = false;
  int budget = 0;
  std::vector<Frag> others;
  Block* block = nullptr;
  Machine* m = nullptr;
  const Inst* code = nullptr;
  std::vector<char> memory;   // registers
  std::vector<u32> pred_memory;
  std::vector<char> local;    // [lane][local bytes]
  // asynchronous
  std::vector<AccTile*> tiles;
  std::deque<WgmmaOp*> wgmmas;
  u64 wgmma_group = 0;
  std::deque<CopyBatch*> copies;
  u64 copy_group[32] = {};
  std::vector<BulkStore> stores;
  u64 store_group[32] = {};
  u64 executed = 0;
  ~Warp();
};

struct BarState {
  u32 arrived = 0, expected = 0;
  std::vector<Warp*> waiting;
  u32 count = 0;      // bar.red
  bool all = true, any = false;
};

struct Block {
  Cluster* cluster = nullptr;
  u32 rank = 0;
  Dim3 index;
  char* shared = nullptr;
  u32 shared_end = 0;  // address of the first byte behind
  std::vector<Warp> warps;
  u32 live_warps = 0;
  u32 threads = 0;
  BarState bars[16];
  u32 red_result[16] = {};
};

struct Cluster {
  std::vector<Block> blocks;
  u32 live_warps = 0;
  u32 arrived = 0;
  u64 phase = 0;
  u64 index = 0;
};

struct AsyncOp {
  u64 due;
  std::function<void()> run;
};

struct Range {
  u64 begin, end;
};

struct Source {
  u32 line;
  u32 file, loc;
  std::string text;
};

struct Kernel;
struct Program {  // a decoded kernel
  std::vector<Inst> code;
  std::vector<Source> sources;
  std::vector<char> pool;
  std::deque<std::vector<s32>> lists;
  u32 reg_bytes = 0, preds = 0, local_bytes = 0, shared_bytes = 0;
  struct Special {
    int kind, axis;
    s32 offset;
  };
  std::vector<Special> specials;
};

// Operand asynchrony: 0 random, 1 early, 2 late.
struct Machine {
  const Program* program = nullptr;
  const Kernel* kernel = nullptr;
  Launch launch;
  const char* params = nullptr;
  u32 param_bytes = 0;
  u64 tick = 0, progress = 0, executed = 0, spins = 0;
  int async_mode = 0;
  int fixed = 0;  // EMU_FIXED: what is not random: 1 quantum, 2 first warp, 4 fragments, 8 rounds
  std::vector<AsyncOp> asyncs;
  u64 next_due = ~0ull;
  std::vector<Range> ranges;
  u64 ranges_generation = ~0ull;
  Range last{0, 0};
  u64 rng = 88172645463325252ull;
  u64 max_dynamic_end = 0;
  std::vector<char*> free_shared;
  u32 rnd() {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return static_cast<u32>(rng >> 16);
  }
  void refresh_ranges();
  bool find(u64 address, u64 bytes) {
    if (address >= last.begin && address + bytes <= last.end) return true;
    return find_slow(address, bytes);
  }
  bool find_slow(u64 address, u64 bytes);
  void add_async(std::function<void()> run);
  void run_due();
};

template <class T>
inline T* dst(Warp& w, s32 o) {
  return reinterpret_cast<T*>(w.regs + o);
}
template <class T>
inline const T* src(const Warp& w, s32 o) {
  return reinterpret_cast<const T*>(o >= 0 ? w.regs + o : w.pool + ~o);
}
inline u32 pred(const Warp& w, s32 p) { return p >= 0 ? w.preds[p] : ~w.preds[~p]; }
inline void set_pred(Warp& w, s32 p, u32 x) {
  if (p >= 2) w.preds[p] = (w.preds[p] & ~w.mask) | (x & w.mask);
}

#define EMU_EACH(w, i, ...)                          \
  do {                                               \
    const u32 m_ = (w).mask;                         \
    if (m_ == ~0u) {                                 \
      _Pragma("GCC ivdep") for (int i = 0; i < 32; ++i) { __VA_ARGS__; } \
    } else {                                         \
      for (u32 r_ = m_; r_; r_ &= r_ - 1) {          \
        const int i = __builtin_ctz(r_);             \
        __VA_ARGS__;                                 \
      }                                              \
    }                                                \
  } while (0)

std::string check(Module& module);  // builds all kernels; lists what is not known
[[noreturn]] void fail(const std::string& what);

// Memory. `space`: 0 generic, 1 global/const/param (host), 2 shared, 3 local
char* resolve(Warp& w, int lane, u64 address, u32 bytes, int space);
char* shared_at(Block& b, u64 address, u32 bytes);  // own or of the cluster
Block& shared_block(Block& b, u64 address);

// mbarriers
void mbar_init(char* p, u32 count);
void mbar_arrive(Machine& m, char* p, u32 count, s64 expect);
void mbar_expect(Machine& m, char* p, s64 bytes);
void mbar_complete(Machine& m, char* p, s64 bytes);

void block_frag(Warp& w);              // this instruction waits for other lanes
bool whole_warp(Warp& w);              // else block_frag was called
bool lanes_here(Warp& w, u32 members); // likewise

bool run_wgmmas(Warp& w, u64 up_to_group);
bool run_one_wgmma(Warp& w);
void run_copies(Warp& w, size_t count);
void run_stores(Warp& w, size_t index);
void bar_check(Block& b, u32 id);
void cluster_check(Cluster& c);
void exit_lanes(Warp& w, u32 lanes);

// The decoder's view of a statement.
struct POp {
  enum Kind : u8 { none, reg, imm, vec, addr, sym, sink, label, special } kind = none;
  bool neg = false;   // !p
  bool fp = false;    // imm is a floating literal
  u32 id = 0;         // vreg; special's kind
  s64 value = 0;      // imm; offset of addr; symbol's value
  u8 fp_bytes = 0;
  std::string name;   // sym, label
  std::vector<POp> parts;  // vec; addr: base [, coordinates]
};
struct PInst {
  std::string op;
  std::vector<std::string> words;
  s32 pred = -1;
  bool neg = false;
  std::vector<POp> ops;
  u32 source;
  bool has(const char* w) const {
    for (auto& x : words)
      if (x == w) return true;
    return false;
  }
};
struct VReg {
  u8 bytes;  // 0: predicate
  s32 at = -1;
};

struct Decoder {
  Program& p;
  std::vector<VReg>& regs;
  const std::function<u64(const std::string&, bool&)>& symbol;
  std::map<std::pair<u64, int>, s32> constants;
  s32 constant(u64 bits, int bytes);
  s32 in(const POp& o, int bytes);     // source of that many bytes
  s32 out(const POp& o, int bytes);
  int bytes_of(const POp& o) const { return o.kind == POp::reg ? regs[o.id].bytes : 0; }
  s32 pr(const POp& o);                // predicate
  const std::vector<s32>* list(const POp& o, int bytes);
  bool alu(const PInst& s, Inst& i);   // interp_alu.cpp
  bool cvt(const PInst& s, Inst& i);   // interp_cvt.cpp
  bool mem(const PInst& s, Inst& i);   // interp_mem.cpp
  bool sync(const PInst& s, Inst& i);  // interp_sync.cpp
  bool mma(const PInst& s, Inst& i);   // interp_mma.cpp
};

enum SpecialKind {
  kTid, kNtid, kCtaid, kNctaid, kClusterCtaid, kClusterNctaid, kClusterid, kNclusterid,
  kClusterRank, kClusterSize, kLane, kWarpid, kNwarpid, kSmid, kNsmid, kMaskLt, kMaskLe, kMaskGt,
  kMaskGe, kMaskEq, kDynamicShared, kTotalShared, kGridid, kClock, kClock64, kTimer, kTimerLo,
  kTimerHi, kIsCluster
};

int type_bytes(const std::string& t);
struct F16 { u16 x; };

inline float bf16_to_float(u16 x) {
  u32 y = static_cast<u32>(x) << 16;
  float f;
  memcpy(&f, &y, 4);
  return f;
}
inline u16 float_to_bf16(float f) {
  u32 x;
  memcpy(&x, &f, 4);
  const u32 r = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  return (x & 0x7fffffff) > 0x7f800000 ? 0x7fff : static_cast<u16>(r);
}
inline float f16_to_float(u16 x) {
  _Float16 h;
  memcpy(&h, &x, 2);
  return static_cast<float>(h);
}
inline u16 float_to_f16(float f) {
  _Float16 h = static_cast<_Float16>(f);
  u16 x;
  memcpy(&x, &h, 2);
  return f != f ? 0x7fff : x;
}
float e4m3_to_float(u8 x);
float e5m2_to_float(u8 x);
u8 float_to_e4m3(float f);
u8 float_to_e5m2(float f);

}  // namespace emu
