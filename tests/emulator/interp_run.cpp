// What: runs a launch: warps of the resident clusters in turns, the asynchronous, errors, deadlocks.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "interp.hpp"

namespace emu {

const Program& program_of(const Kernel& k);
const KernelInfo& info_of(const Kernel& k);
const char* params_of(const Kernel& k, u32* bytes);
u32 dynamic_start_of(const Kernel& k);

Warp::~Warp() {
  for (auto* t : tiles) delete t;
  for (auto* o : wgmmas) delete o;
  for (auto* c : copies) delete c;
}

void Machine::add_async(std::function<void()> run) {
  if (async_mode == 1) return run();
  const u64 due = async_mode == 2 ? ~0ull : tick + (rnd() & 3 ? rnd() % 16 : rnd() % 256);
  asyncs.push_back({due, std::move(run)});
  next_due = std::min(next_due, due);
}
void Machine::run_due() {
  if (next_due > tick) return;
  next_due = ~0ull;
  std::vector<std::function<void()>> now;
  size_t keep = 0;
  for (size_t k = 0; k < asyncs.size(); ++k) {
    if (asyncs[k].due <= tick) {
      now.push_back(std::move(asyncs[k].run));
    } else {
      next_due = std::min(next_due, asyncs[k].due);
      if (keep != k) asyncs[keep] = std::move(asyncs[k]);
      ++keep;
    }
  }
  asyncs.resize(keep);
  for (auto& f : now) f(), ++progress;
}

namespace {

u64 environment(const char* name, u64 otherwise) {
  const char* v = getenv(name);
  return v && *v ? strtoull(v, nullptr, 0) : otherwise;
}

// Takes up a fragment that can go on; false: none can.
bool pick(Warp& w) {
  auto& o = w.others;
  for (size_t i = 0; i < o.size(); ++i)
    for (size_t j = i + 1; j < o.size();)
      if (o[i].pc == o[j].pc) {
        o[i].mask |= o[j].mask;
        o[i].blocked = 0;
        o.erase(o.begin() + static_cast<std::ptrdiff_t>(j));
      } else {
        ++j;
      }
  size_t best = o.size();
  for (size_t i = 0; i < o.size(); ++i)
    if (!o[i].blocked && (best == o.size() || o[i].pc < o[best].pc)) best = i;
  if (best == o.size()) return false;
  w.pc = o[best].pc, w.active = o[best].mask;
  o.erase(o.begin() + static_cast<std::ptrdiff_t>(best));
  return true;
}

inline bool step(Warp& w) {
  const Inst& in = w.code[w.pc++];
  u32 m = w.active;
  if (in.pred >= 0) {
    m &= w.preds[in.pred] ^ in.neg;
    if (!m) return false;
  }
  w.mask = m;
  in.fn(w, in);
  return w.stop != Stop::none;
}

// Runs the warp for about `quantum` instructions or until it waits.
void run_warp(Warp& w, int quantum) {
  w.budget = quantum;
  w.trying = false;
  for (Frag& f : w.others)
    if (f.blocked == 2) f.blocked = 0;
  int hold = 0;
  if (!w.others.empty() && w.active == 0) {
    if (!pick(w)) return;
  }
  if (!w.others.empty() && (w.m->rnd() & 7) == 0 && !(w.m->fixed & 4)) {  // now and then another fragment than the first
    const size_t k = w.m->rnd() % w.others.size();
    if (!w.others[k].blocked && w.active) {
      std::swap(w.pc, w.others[k].pc);
      std::swap(w.active, w.others[k].mask);
      hold = 200;
    }
  }
  while (w.budget > 0) {
    w.stop = Stop::none;
    if (w.others.empty()) {
      while (w.budget > 0) {
        --w.budget;
        if (step(w)) break;
      }
    } else {
      while (w.budget > 0) {
        auto& o = w.others;
        size_t lower = o.size();
        for (size_t i = 0; i < o.size();) {
          if (o[i].pc == w.pc) {
            w.active |= o[i].mask;
            o.erase(o.begin() + static_cast<std::ptrdiff_t>(i));
            lower = o.size();
            i = 0;
            continue;
          }
          if (!o[i].blocked && o[i].pc < w.pc && (lower >= o.size() || o[i].pc < o[lower].pc)) lower = i;
          ++i;
        }
        if (o.empty()) break;
        if (lower < o.size() && --hold < 0) {
          std::swap(w.pc, o[lower].pc);
          std::swap(w.active, o[lower].mask);
          continue;
        }
        --w.budget;
        if (step(w)) break;
      }
    }
    switch (w.stop) {
      case Stop::none:
      case Stop::diverged: break;
      case Stop::frag_blocked:
      case Stop::frag_waits:
        if (w.others.empty() && w.stop == Stop::frag_blocked) {
          // no other lanes can come
          w.others.push_back({w.pc, w.active, 1});
          w.active = 0;
          return;
        }
        w.others.push_back({w.pc, w.active, static_cast<u8>(w.stop == Stop::frag_blocked ? 1 : 2)});
        w.active = 0;
        if (!pick(w)) return;
        break;
      case Stop::exited:
        if (w.live == 0) return;
        if (w.active == 0 && !pick(w)) return;
        break;
      case Stop::warp_waits:
      case Stop::yield: return;
    }
  }
}

struct Runner {
  Machine m;
  const Program& p;
  const KernelInfo& info;
  const std::map<u32, std::string>& files;
  Launch launch;
  std::vector<std::unique_ptr<Cluster>> ring;
  std::vector<char*> shared_pool;
  u64 next_cluster = 0, clusters = 0;
  Dim3 cluster_grid;
  u32 shared_end = 0, threads = 0;
  Warp* current = nullptr;

  Runner(Kernel& k, const Launch& l, const std::map<u32, std::string>& f)
      : p(program_of(k)), info(info_of(k)), files(f), launch(l) {
    m.program = &p, m.kernel = &k, m.launch = l;
    m.params = params_of(k, &m.param_bytes);
    shared_end = dynamic_start_of(k) + l.dynamic_shared;
    m.refresh_ranges();
  }
  ~Runner() {
    ring.clear();
    for (char* s : shared_pool) free(s);
  }
  void start_cluster();
  void fill(Warp& w);
  bool turn(Cluster& c);
  void run();
  std::string where(const Warp& w, u32 pc, u32 mask) const;
  std::string deadlock() const;
};

std::string Runner::where(const Warp& w, u32 pc, u32 mask) const {
  std::string r;
  const Inst& in = p.code[std::min<size_t>(pc, p.code.size() - 1)];
  const Source& s = p.sources[in.source];
  const int lane = mask ? __builtin_ctz(mask) : 0;
  const u32 t = static_cast<u32>(w.index) * 32 + static_cast<u32>(lane);
  const Dim3& b = launch.block;
  char text[512];
  auto file = files.find(s.file);
  snprintf(text, sizeof text, "PTX line %u `%s`", s.line, s.text.substr(0, 120).c_str());
  r += text;
  if (file != files.end()) r += " (" + file->second + ":" + std::to_string(s.loc) + ")";
  snprintf(text, sizeof text, ", block (%u, %u, %u), thread (%u, %u, %u), warp %d, lanes %08x", w.block->index.x, w.block->index.y, w.block->index.z, t % b.x, t / b.x % b.y, t / b.x / b.y, w.index, mask);
  r += text;
  return r;
}
std::string Runner::deadlock() const {
  std::string r = "deadlock in " + info.name + ": nobody can go on";
  int lines = 0;
  for (auto& c : ring)
    for (auto& b : c->blocks)
      for (auto& w : b.warps) {
        if (!w.live || ++lines > 48) continue;
        r += "\n  ";
        r += w.wait == 1 ? "[bar " + std::to_string(w.bar_id) + ": " + std::to_string(b.bars[w.bar_id].arrived) + " of " + std::to_string(b.bars[w.bar_id].expected) + " threads] " : w.wait == 2 ? "[cluster] " : w.trying ? "[mbarrier] " : "";
        if (w.active) r += where(w, w.pc, w.active);
        for (auto& f : w.others) r += " | lanes apart: " + where(w, f.pc, f.mask);
      }
  return r;
}

void Runner::fill(Warp& w) {
  const Dim3 b = launch.block;
  for (auto& s : p.specials) {
    u32* d = reinterpret_cast<u32*>(w.regs + s.offset);
    for (u32 i = 0; i < 32; ++i) {
      const u32 t = static_cast<u32>(w.index) * 32 + i;
      const auto axis = [&](const Dim3& v) { return s.axis == 0 ? v.x : s.axis == 1 ? v.y : s.axis == 2 ? v.z : 0u; };
      const Dim3 tid{t % b.x, t / b.x % b.y, t / b.x / b.y};
      const Dim3& ci = w.block->index;
      const Dim3& cl = launch.cluster;
      u32 v = 0;
      switch (s.kind) {
        case kTid: v = axis(tid); break;
        case kNtid: v = axis(b); break;
        case kCtaid: v = axis(ci); break;
        case kNctaid: v = axis(launch.grid); break;
        case kClusterCtaid: v = axis({ci.x % cl.x, ci.y % cl.y, ci.z % cl.z}); break;
        case kClusterNctaid: v = axis(cl); break;
        case kClusterid: v = axis({ci.x / cl.x, ci.y / cl.y, ci.z / cl.z}); break;
        case kNclusterid: v = axis(cluster_grid); break;
        case kClusterRank: v = w.block->rank; break;
        case kClusterSize: v = cl.x * cl.y * cl.z; break;
        case kLane: v = i; break;
        case kWarpid: v = static_cast<u32>(w.index); break;
        case kNwarpid: v = static_cast<u32>(w.block->warps.size()); break;
        case kSmid: v = static_cast<u32>(w.block->cluster->index % environment("EMU_SMS", 8)); break;
        case kNsmid: v = static_cast<u32>(environment("EMU_SMS", 8)); break;
        case kMaskLt: v = (1u << i) - 1; break;
        case kMaskLe: v = static_cast<u32>((2ull << i) - 1); break;
        case kMaskGt: v = ~static_cast<u32>((2ull << i) - 1); break;
        case kMaskGe: v = ~((1u << i) - 1); break;
        case kMaskEq: v = 1u << i; break;
        case kDynamicShared: v = launch.dynamic_shared; break;
        case kTotalShared: v = shared_end - kSharedStart; break;
        case kIsCluster: v = cl.x * cl.y * cl.z > 1; break;
        default: break;
      }
      d[i] = v;
    }
  }
}

void Runner::start_cluster() {
  auto c = std::make_unique<Cluster>();
  c->index = next_cluster++;
  const Dim3 cl = launch.cluster;
  const u32 size = cl.x * cl.y * cl.z, warps = (threads + 31) / 32;
  c->blocks.resize(size);
  const u64 q = c->index;
  const u32 cx = static_cast<u32>(q % cluster_grid.x), cy = static_cast<u32>(q / cluster_grid.x % cluster_grid.y), cz = static_cast<u32>(q / cluster_grid.x / cluster_grid.y);
  for (u32 r = 0; r < size; ++r) {
    Block& b = c->blocks[r];
    b.cluster = c.get();
    b.rank = r;
    b.index = {cx * cl.x + r % cl.x, cy * cl.y + r / cl.x % cl.y, cz * cl.z + r / cl.x / cl.y};
    if (shared_pool.empty()) shared_pool.push_back(static_cast<char*>(aligned_alloc(1024, 256 * 1024)));
    b.shared = shared_pool.back();
    shared_pool.pop_back();
    memset(b.shared, 0xff, shared_end);
    b.shared_end = shared_end;
    b.threads = threads;
    b.live_warps = warps;
    b.warps.resize(warps);
    for (u32 k = 0; k < warps; ++k) {
      Warp& w = b.warps[k];
      w.index = static_cast<int>(k);
      w.block = &b;
      w.m = &m;
      w.code = p.code.data();
      w.pool = p.pool.data();
      w.memory.assign(p.reg_bytes + 64, static_cast<char>(0xff));
      w.regs = reinterpret_cast<char*>((reinterpret_cast<u64>(w.memory.data()) + 63) / 64 * 64);
      w.pred_memory.assign(p.preds, ~0u);
      w.preds = w.pred_memory.data();
      w.preds[0] = 0, w.preds[1] = ~0u;
      const u32 lanes = std::min(32u, threads - k * 32);
      w.live = w.active = lanes == 32 ? ~0u : (1u << lanes) - 1;
      if (p.local_bytes) w.local.assign(32ull * p.local_bytes, static_cast<char>(0xff));
      fill(w);
    }
    c->live_warps += warps;
  }
  ring.push_back(std::move(c));
}

bool Runner::turn(Cluster& c) {
  bool ran = false;
  const int rounds = m.fixed & 8 ? 3 : 1 + static_cast<int>(m.rnd() % 6);
  const size_t nb = c.blocks.size(), nw = c.blocks[0].warps.size(), n = nb * nw;
  for (int r = 0; r < rounds && c.live_warps; ++r) {
    ++m.tick;
    m.run_due();
    const size_t first = m.fixed & 2 ? 0 : m.rnd() % n;
    bool any = false;
    for (size_t k = 0; k < n; ++k) {
      const size_t q = (first + k) % n;
      Warp& w = c.blocks[q % nb].warps[q / nb];
      if (!w.live || w.wait) continue;
      current = &w;
      if (m.async_mode == 0) {
        if (!w.wgmmas.empty() && (m.rnd() & 1))
          for (u32 z = m.rnd() % 4; z && run_one_wgmma(w); --z) {
          }
        if (!w.copies.empty() && (m.rnd() & 1)) run_copies(w, m.rnd() % (w.copies.size() + 1));
        for (size_t z = 0; z < w.stores.size();)
          if (w.stores[z].due <= m.tick) run_stores(w, z);
          else ++z;
      }
      const int quantum = m.fixed & 1 ? 600 : 20 + static_cast<int>(m.rnd() % 600);
      run_warp(w, quantum);
      const u64 used = static_cast<u64>(quantum - w.budget);
      m.executed += used;
      any = any || !(w.trying || w.wait) || used > 2;
      current = nullptr;
    }
    ran = ran || any;
    if (!any) break;
  }
  return ran;
}

void Runner::run() {
  const Dim3 g = launch.grid, cl = launch.cluster;
  cluster_grid = {g.x / std::max(1u, cl.x), g.y / std::max(1u, cl.y), g.z / std::max(1u, cl.z)};
  clusters = static_cast<u64>(cluster_grid.x) * cluster_grid.y * cluster_grid.z;
  threads = launch.block.x * launch.block.y * launch.block.z;
  if (shared_end > kSharedLimit + kSharedStart) fail("launch: more shared memory than there is");
  const char* mode = getenv("EMU_ASYNC");
  m.fixed = static_cast<int>(environment("EMU_FIXED", 0));
  m.async_mode = mode && !strcmp(mode, "early") ? 1 : mode && !strcmp(mode, "late") ? 2 : 0;
  static u64 launches = 0;
  ++launches;
  m.rng ^= (environment("EMU_SEED", 1) * 0x9e3779b97f4a7c15ull) ^ (launches * 0xbf58476d1ce4e5b9ull);
  if (!m.rng) m.rng = 1;
  for (int k = 0; k < 8; ++k) m.rnd();
  const u32 size = cl.x * cl.y * cl.z;
  const u64 at_first = std::max<u64>(1, environment("EMU_RING", 4) / size), most = std::max<u64>(1, environment("EMU_RESIDENT", 1056) / size);
  u64 last_progress = 0, executed_then = 0, spins_then = 0;
  u32 wakes = 0;
  u64 target = at_first;
  while (next_cluster < clusters || !ring.empty()) {
    while (next_cluster < clusters && ring.size() < target) start_cluster();
    bool ran = false;
    const u64 before = m.progress;
    for (size_t k = 0; k < ring.size(); ++k) {
      ran = turn(*ring[k]) || ran;
      if (ring[k]->live_warps == 0) {
        if (!m.asyncs.empty()) {
          auto all = std::move(m.asyncs);
          m.asyncs.clear();
          m.next_due = ~0ull;
          for (auto& a : all) a.run(), ++m.progress;
        }
        for (Block& b : ring[k]->blocks) shared_pool.push_back(b.shared);
        ring.erase(ring.begin() + static_cast<std::ptrdiff_t>(k));
        --k;
        if (target > at_first) --target;
        ++m.progress;
      }
    }
    if (m.progress != before) {
      last_progress = m.progress, executed_then = m.executed, spins_then = m.spins, wakes = 0;
      continue;
    }
    // Nothing came of this pass.
    if (!m.asyncs.empty()) {
      size_t k = m.async_mode == 2 ? m.rnd() % m.asyncs.size() : 0;
      if (m.async_mode != 2)
        for (size_t q = 1; q < m.asyncs.size(); ++q)
          if (m.asyncs[q].due < m.asyncs[k].due) k = q;
      auto f = std::move(m.asyncs[k].run);
      m.asyncs.erase(m.asyncs.begin() + static_cast<std::ptrdiff_t>(k));
      f();
      ++m.progress;
      continue;
    }
    bool forced = false;
    for (auto& c : ring)
      for (auto& b : c->blocks)
        for (auto& w : b.warps) {
          if (!w.copies.empty()) current = &w, run_copies(w, w.copies.size()), forced = true;
          while (!w.stores.empty()) current = &w, run_stores(w, 0), forced = true, ++m.progress;
        }
    current = nullptr;
    if (forced) continue;
    if (next_cluster < clusters && ring.size() < most) {
      ++target;
      continue;
    }
    const u64 spun = m.spins - spins_then;
    if (spun > 400000 || m.executed - executed_then > 4000000000ull) fail(deadlock());
    if (!ran) {
      if (++wakes > 300) fail(deadlock());
      for (auto& c : ring)
        for (auto& b : c->blocks)
          for (auto& w : b.warps)
            if (w.trying || w.active == 0) w.woken = true;
    }
  }
  (void)last_progress;
  while (!m.asyncs.empty()) {
    auto all = std::move(m.asyncs);
    m.asyncs.clear();
    for (auto& a : all) a.run();
  }
  if (getenv("EMU_STATS")) fprintf(stderr, "emu: %s: %llu warp instructions\n", info.name.c_str(), static_cast<unsigned long long>(m.executed));
}

}  // namespace

void run_launch(Kernel& k, const Launch& launch, const std::map<u32, std::string>& files) {
  Runner r(k, launch, files);
  try {
    r.run();
  } catch (const Error& e) {
    const std::string what = e.what();
    if (what.rfind("deadlock", 0) == 0) throw;
    std::string text = "kernel " + r.info.name + ": " + what;
    if (r.current) {
      const Warp& w = *r.current;
      text += "; at " + r.where(w, w.pc ? w.pc - 1 : 0, w.mask ? w.mask : w.active);
    }
    throw Error(text);
  }
}

}  // namespace emu
