// What: modules of PTX: text to kernels, registers to places, kernels to instructions.
#include "interp.hpp"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <mutex>
#include <optional>
#include <queue>
#include <set>

namespace emu {

void fail(const std::string& what) { throw Error(what); }

void pack(const TensorMap& map, void* to) {
  static_assert(sizeof(TensorMap) <= 128);
  memset(to, 0, 128);
  memcpy(to, &map, sizeof map);
}
TensorMap unpack(const void* from) {
  TensorMap t;
  memcpy(&t, from, sizeof t);
  return t;
}

// ---- memory
namespace {
std::mutex memory_mutex;
std::map<u64, u64>& memory_map() {
  static auto* m = new std::map<u64, u64>;
  return *m;
}
std::atomic<u64> memory_generation{0};
}  // namespace
void Memory::add(const void* begin, u64 bytes) {
  std::lock_guard lock(memory_mutex);
  memory_map()[reinterpret_cast<u64>(begin)] = bytes;
  ++memory_generation;
}
void Memory::remove(const void* begin) {
  std::lock_guard lock(memory_mutex);
  memory_map().erase(reinterpret_cast<u64>(begin));
  ++memory_generation;
}
bool Memory::holds(const void* begin, u64 bytes) {
  std::lock_guard lock(memory_mutex);
  const u64 a = reinterpret_cast<u64>(begin);
  auto it = memory_map().upper_bound(a);
  if (it == memory_map().begin()) return false;
  --it;
  return a - it->first <= it->second && it->second - (a - it->first) >= bytes;
}
void Machine::refresh_ranges() {
  std::lock_guard lock(memory_mutex);
  ranges.clear();
  for (auto [b, n] : memory_map()) ranges.push_back({b, b + n});
  ranges.push_back({reinterpret_cast<u64>(params), reinterpret_cast<u64>(params) + param_bytes});
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  last = {0, 0};
  ranges_generation = memory_generation;
}
bool Machine::find_slow(u64 address, u64 bytes) {
  for (int turn = 0; turn < 2; ++turn) {
    auto it = std::upper_bound(ranges.begin(), ranges.end(), address, [](u64 a, const Range& r) { return a < r.begin; });
    if (it != ranges.begin()) {
      --it;
      if (address + bytes <= it->end && address + bytes >= address) {
        last = *it;
        return true;
      }
    }
    if (ranges_generation == memory_generation) return false;
    refresh_ranges();
  }
  return false;
}

int type_bytes(const std::string& t) {
  static const std::map<std::string, int> table = {
      {"b8", 1}, {"u8", 1}, {"s8", 1}, {"b16", 2}, {"u16", 2}, {"s16", 2}, {"f16", 2}, {"bf16", 2}, {"b32", 4}, {"u32", 4}, {"s32", 4}, {"f32", 4}, {"f16x2", 4}, {"bf16x2", 4}, {"tf32", 4}, {"b64", 8}, {"u64", 8}, {"s64", 8}, {"f64", 8}, {"b128", 16}, {"pred", 0}, {"e4m3", 1}, {"e5m2", 1}, {"e4m3x2", 2}, {"e5m2x2", 2}};
  auto it = table.find(t);
  return it == table.end() ? 0 : it->second;
}

// ---- the decoder's helpers
s32 Decoder::constant(u64 bits, int bytes) {
  auto [it, fresh] = constants.try_emplace({bits, bytes}, 0);
  if (fresh) {
    const size_t at = (p.pool.size() + 63) / 64 * 64;
    p.pool.resize(at + 32 * static_cast<size_t>(bytes));
    for (int i = 0; i < 32; ++i) memcpy(p.pool.data() + at + static_cast<size_t>(i * bytes), &bits, static_cast<size_t>(bytes));
    it->second = ~static_cast<s32>(at);
  }
  return it->second;
}
s32 Decoder::in(const POp& o, int bytes) {
  switch (o.kind) {
    case POp::reg: {
      const VReg& r = regs[o.id];
      if (r.bytes == 0) fail("a predicate where a register is wanted");
      if (r.bytes < bytes) fail("a register of " + std::to_string(r.bytes) + " bytes where " + std::to_string(bytes) + " are wanted");
      if (r.bytes > bytes) fail("a register of " + std::to_string(r.bytes) + " bytes where " + std::to_string(bytes) + " are wanted");
      return r.at;
    }
    case POp::imm: {
      u64 v = static_cast<u64>(o.value);
      if (o.fp && o.fp_bytes == 8 && bytes == 4) v = std::bit_cast<u32>(static_cast<float>(std::bit_cast<double>(v)));
      return constant(bytes == 8 ? v : v & ((1ull << (8 * bytes)) - 1), bytes);
    }
    case POp::sym: {
      bool ok = false;
      const u64 v = symbol(o.name, ok);
      if (!ok) fail("unknown symbol " + o.name);
      return constant((v + static_cast<u64>(o.value)) & (bytes == 8 ? ~0ull : (1ull << (8 * bytes)) - 1), bytes);
    }
    case POp::special: {
      if (bytes != 4) fail("a special register of other than 4 bytes");
      const int kind = static_cast<int>(o.id), axis = static_cast<int>(o.value);
      for (auto& s : p.specials)
        if (s.kind == kind && s.axis == axis) return s.offset;
      const s32 at = static_cast<s32>(p.specials.size()) * 128;
      if (at >= 4096) fail("too many special registers");
      p.specials.push_back({kind, axis, at});
      return at;
    }
    default: fail("an operand of this kind");
  }
}
s32 Decoder::out(const POp& o, int bytes) {
  if (o.kind == POp::sink) {  // somewhere to throw it
    return 4096;
  }
  if (o.kind != POp::reg) fail("a destination that is no register");
  if (regs[o.id].bytes != bytes) fail("a destination of " + std::to_string(regs[o.id].bytes) + " bytes where " + std::to_string(bytes) + " are wanted");
  return regs[o.id].at;
}
s32 Decoder::pr(const POp& o) {
  if (o.kind == POp::sink) return 0;
  if (o.kind == POp::imm) return o.value ? 1 : 0;
  if (o.kind != POp::reg || regs[o.id].bytes) fail("an operand that is no predicate");
  return o.neg ? ~regs[o.id].at : regs[o.id].at;
}
const std::vector<s32>* Decoder::list(const POp& o, int bytes) {
  p.lists.emplace_back();
  std::vector<s32>& l = p.lists.back();
  if (o.kind == POp::vec) {
    for (auto& q : o.parts) l.push_back(q.kind == POp::sink ? -1 : in(q, bytes));
  } else {
    l.push_back(in(o, bytes));
  }
  return &l;
}

struct Symbol {
  enum { global, shared, dynamic_shared } kind;
  u64 bytes = 0, align = 1;
  std::shared_ptr<char> memory;
  char* data = nullptr;
};

struct Kernel {
  KernelInfo info;
  std::string_view body;
  u32 first_line = 0;
  std::map<std::string, u32> param_offset;
  u32 param_bytes = 0;
  std::shared_ptr<char> params;
  std::unique_ptr<Program> program;
  u32 dynamic_start = 0;  // address of dynamic shared memory
};

namespace {

struct Unknown {  // text of an instruction that is not known, found at run time
  static void run(Warp&, const Inst& in) { fail(*reinterpret_cast<const std::string*>(in.imm)); }
};

class Lexer {
 public:
  Lexer(std::string_view t, u32 line) : t_(t), line_(line) {}
  bool done() { return skip(), at_ >= t_.size(); }
  void skip() {
    while (at_ < t_.size()) {
      const char c = t_[at_];
      if (c == '\n') ++line_, ++at_;
      else if (c == ' ' || c == '\t' || c == '\r') ++at_;
      else if (c == '/' && at_ + 1 < t_.size() && t_[at_ + 1] == '/') to_line_end();
      else if (c == '/' && at_ + 1 < t_.size() && t_[at_ + 1] == '*') {
        while (at_ + 1 < t_.size() && !(t_[at_] == '*' && t_[at_ + 1] == '/')) line_ += t_[at_++] == '\n';
        at_ += 2;
      } else break;
    }
  }
  void to_line_end() {
    while (at_ < t_.size() && t_[at_] != '\n') ++at_;
  }
  char peek() { return skip(), at_ < t_.size() ? t_[at_] : '\0'; }
  std::string_view word() {  // an identifier or directive
    skip();
    const size_t b = at_;
    while (at_ < t_.size() && (isalnum(static_cast<unsigned char>(t_[at_])) || strchr("_$.%", t_[at_]))) ++at_;
    return t_.substr(b, at_ - b);
  }
  std::string_view to(char end) {  // text up to `end` outside strings and braces
    const size_t b = at_;
    int depth = 0;
    while (at_ < t_.size()) {
      const char c = t_[at_];
      if (c == '"') {
        ++at_;
        while (at_ < t_.size() && t_[at_] != '"') ++at_;
      } else if (c == '/' && at_ + 1 < t_.size() && t_[at_ + 1] == '/') {
        to_line_end();
        continue;
      } else if (c == end && depth == 0) {
        break;
      } else if (c == '{' || c == '(' || c == '[') {
        ++depth;
      } else if (c == '}' || c == ')' || c == ']') {
        --depth;
      } else if (c == '\n') {
        ++line_;
      }
      ++at_;
    }
    const auto r = t_.substr(b, at_ - b);
    if (at_ < t_.size()) ++at_;
    return r;
  }
  size_t at_ = 0;
  std::string_view t_;
  u32 line_;
};

std::string trim(std::string_view s) {
  while (!s.empty() && isspace(static_cast<unsigned char>(s.front()))) s.remove_prefix(1);
  while (!s.empty() && isspace(static_cast<unsigned char>(s.back()))) s.remove_suffix(1);
  return std::string(s);
}
std::vector<std::string> split(std::string_view s, char by) {
  std::vector<std::string> r;
  int depth = 0;
  size_t b = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    if (i == s.size() || (s[i] == by && depth == 0)) {
      r.push_back(trim(s.substr(b, i - b)));
      b = i + 1;
    } else if (strchr("{[(", s[i])) {
      ++depth;
    } else if (strchr("}])", s[i])) {
      --depth;
    }
  }
  if (r.size() == 1 && r[0].empty()) r.clear();
  return r;
}

struct Decl {  // .align 8 .b8 name[12] = ...
  std::string name, type, init;
  u64 align = 0, count = 1;
  bool array = false, open = false;
  u64 bytes() const { return count * static_cast<u64>(std::max(1, type_bytes(type))); }
};
Decl parse_decl(std::string_view text) {
  Decl d;
  const size_t eq = text.find('=');
  std::string head(text.substr(0, eq));
  if (eq != std::string_view::npos) d.init = trim(text.substr(eq + 1));
  const size_t br = head.find('[');
  std::string names = trim(head.substr(0, br));
  if (br != std::string::npos) {
    d.array = true;
    size_t at = br;
    while (at != std::string::npos) {
      const size_t e = head.find(']', at);
      const std::string inner = trim(head.substr(at + 1, e - at - 1));
      if (inner.empty()) d.open = true, d.count = 0;
      else d.count *= std::strtoull(inner.c_str(), nullptr, 0);
      at = head.find('[', e);
    }
  }
  std::vector<std::string> w;
  std::string cur;
  for (char c : names + " ") {
    if (isspace(static_cast<unsigned char>(c))) {
      if (!cur.empty()) w.push_back(cur);
      cur.clear();
    } else {
      cur += c;
    }
  }
  for (size_t i = 0; i < w.size(); ++i) {
    if (w[i] == ".align") d.align = std::strtoull(w[++i].c_str(), nullptr, 0);
    else if (w[i][0] == '.') {
      if (type_bytes(w[i].substr(1))) d.type = w[i].substr(1);
    } else d.name = w[i];
  }
  if (!d.align) d.align = static_cast<u64>(std::max(1, type_bytes(d.type)));
  return d;
}

struct Scope {
  std::unordered_map<std::string, u32> regs;
  std::vector<std::pair<std::string, std::pair<u32, u32>>> ranges;  // prefix: first, count
  std::unordered_map<std::string, u32> labels;                      // name to label number
};

const std::map<std::string, int>& special_names() {
  static const std::map<std::string, int> m = {
      {"tid", kTid}, {"ntid", kNtid}, {"ctaid", kCtaid}, {"nctaid", kNctaid}, {"cluster_ctaid", kClusterCtaid}, {"cluster_nctaid", kClusterNctaid}, {"clusterid", kClusterid}, {"nclusterid", kNclusterid}, {"cluster_ctarank", kClusterRank}, {"cluster_nctarank", kClusterSize}, {"laneid", kLane}, {"warpid", kWarpid}, {"nwarpid", kNwarpid}, {"smid", kSmid}, {"nsmid", kNsmid}, {"lanemask_lt", kMaskLt}, {"lanemask_le", kMaskLe}, {"lanemask_gt", kMaskGt}, {"lanemask_ge", kMaskGe}, {"lanemask_eq", kMaskEq}, {"dynamic_smem_size", kDynamicShared}, {"total_smem_size", kTotalShared}, {"gridid", kGridid}, {"clock", kClock}, {"clock64", kClock64}, {"globaltimer", kTimer}, {"globaltimer_lo", kTimerLo}, {"globaltimer_hi", kTimerHi}, {"is_explicit_cluster", kIsCluster}};
  return m;
}

class ModuleImpl;

class Builder {
 public:
  Builder(Kernel& k, std::map<std::string, Symbol>& symbols, const std::map<u32, std::string>& files)
      : k_(k), symbols_(symbols), files_(files) {}
  std::unique_ptr<Program> build();

 private:
  POp operand(std::string_view text);
  std::optional<u32> find_reg(const std::string& name);
  void statement(std::string_view text, u32 line);
  void allocate();
  u32 label(const std::string& name, bool define);

  Kernel& k_;
  std::map<std::string, Symbol>& symbols_;
  const std::map<u32, std::string>& files_;
  std::unique_ptr<Program> p_ = std::make_unique<Program>();
  std::vector<Scope> scopes_;
  std::vector<VReg> regs_;
  std::vector<PInst> insts_;
  std::vector<s64> label_at_;
  std::map<std::string, std::vector<std::string>> branch_targets_;
  std::map<std::string, u64> shared_, local_;
  u32 shared_bytes_ = kSharedStart, local_bytes_ = 0, preds_ = 2;
  u32 loc_file_ = 0, loc_line_ = 0;
};

std::optional<u32> Builder::find_reg(const std::string& name) {
  for (size_t s = scopes_.size(); s-- > 0;) {
    auto it = scopes_[s].regs.find(name);
    if (it != scopes_[s].regs.end()) return it->second;
    for (auto& [prefix, r] : scopes_[s].ranges) {
      if (name.size() > prefix.size() && name.compare(0, prefix.size(), prefix) == 0 && isdigit(static_cast<unsigned char>(name[prefix.size()]))) {
        char* end = nullptr;
        const u64 n = std::strtoull(name.c_str() + prefix.size(), &end, 10);
        if (*end == 0 && n < r.second) return r.first + static_cast<u32>(n);
      }
    }
  }
  return {};
}

POp Builder::operand(std::string_view text) {
  POp o;
  std::string t = trim(text);
  if (t.empty()) fail("an empty operand");
  if (t[0] == '{') {
    o.kind = POp::vec;
    for (auto& q : split(std::string_view(t).substr(1, t.size() - 2), ',')) o.parts.push_back(operand(q));
    return o;
  }
  if (t[0] == '[') {
    o.kind = POp::addr;
    auto parts = split(std::string_view(t).substr(1, t.size() - 2), ',');
    std::string base = parts[0];
    const size_t plus = base.find('+', 1);
    if (plus != std::string::npos) {
      o.value = static_cast<s64>(std::strtoll(base.c_str() + plus + 1, nullptr, 0));
      base = trim(base.substr(0, plus));
    }
    o.parts.push_back(operand(base));
    for (size_t i = 1; i < parts.size(); ++i) o.parts.push_back(operand(parts[i]));
    return o;
  }
  if (t == "_") {
    o.kind = POp::sink;
    return o;
  }
  const size_t bar = t.find('|');
  if (bar != std::string::npos) {
    o.kind = POp::vec;
    o.parts.push_back(operand(t.substr(0, bar)));
    o.parts.push_back(operand(t.substr(bar + 1)));
    return o;
  }
  if (t[0] == '!') {
    o = operand(t.substr(1));
    o.neg = true;
    return o;
  }
  if (isdigit(static_cast<unsigned char>(t[0])) || ((t[0] == '-' || t[0] == '+') && t.size() > 1)) {
    o.kind = POp::imm;
    bool minus = false;
    if (t[0] == '-' || t[0] == '+') minus = t[0] == '-', t = t.substr(1);
    if (t.size() > 2 && t[0] == '0' && (t[1] == 'f' || t[1] == 'F' || t[1] == 'd' || t[1] == 'D')) {
      o.fp = true;
      o.fp_bytes = tolower(t[1]) == 'f' ? 4 : 8;
      u64 v = std::strtoull(t.c_str() + 2, nullptr, 16);
      if (minus) v ^= o.fp_bytes == 4 ? 0x80000000ull : 1ull << 63;
      o.value = static_cast<s64>(v);
      return o;
    }
    if (t.find('.') != std::string::npos) {
      o.fp = true, o.fp_bytes = 8;
      const double v = std::strtod(t.c_str(), nullptr);
      o.value = static_cast<s64>(std::bit_cast<u64>(minus ? -v : v));
      return o;
    }
    if (t.back() == 'U' || t.back() == 'u') t.pop_back();
    u64 v = (t.size() > 2 && t[0] == '0' && (t[1] == 'b' || t[1] == 'B')) ? std::strtoull(t.c_str() + 2, nullptr, 2) : std::strtoull(t.c_str(), nullptr, 0);
    o.value = static_cast<s64>(minus ? 0 - v : v);
    return o;
  }
  if (auto r = find_reg(t)) {
    o.kind = POp::reg, o.id = *r;
    return o;
  }
  if (t[0] == '%') {
    std::string name = t.substr(1);
    int axis = 0;
    const size_t dot = name.find('.');
    if (dot != std::string::npos) axis = name[dot + 1] - 'x', name = name.substr(0, dot);
    auto it = special_names().find(name);
    if (it == special_names().end()) fail("unknown register " + t);
    o.kind = POp::special, o.id = static_cast<u32>(it->second), o.value = axis;
    return o;
  }
  if (t == "WARP_SZ") {
    o.kind = POp::imm, o.value = 32;
    return o;
  }
  o.kind = POp::sym;
  const size_t plus = t.find('+');
  if (plus != std::string::npos) {
    o.value = std::strtoll(t.c_str() + plus + 1, nullptr, 0);
    t = trim(t.substr(0, plus));
  }
  o.name = t;
  return o;
}

u32 Builder::label(const std::string& name, bool define) {
  if (!define)
    for (size_t s = scopes_.size(); s-- > 0;) {
      auto it = scopes_[s].labels.find(name);
      if (it != scopes_[s].labels.end()) return it->second;
    }
  auto [it, fresh] = scopes_.back().labels.try_emplace(name, static_cast<u32>(label_at_.size()));
  if (fresh) label_at_.push_back(-1);
  return it->second;
}

void Builder::statement(std::string_view text, u32 line) {
  PInst s;
  std::string_view t = text;
  const auto skip = [&] {
    while (!t.empty() && isspace(static_cast<unsigned char>(t.front()))) t.remove_prefix(1);
  };
  skip();
  std::string pred;
  if (!t.empty() && t[0] == '@') {
    t.remove_prefix(1);
    skip();
    if (t[0] == '!') s.neg = true, t.remove_prefix(1);
    skip();
    size_t e = 0;
    while (e < t.size() && !isspace(static_cast<unsigned char>(t[e]))) ++e;
    pred = std::string(t.substr(0, e));
    t.remove_prefix(e);
    skip();
  }
  size_t e = 0;
  while (e < t.size() && !isspace(static_cast<unsigned char>(t[e]))) ++e;
  s.op = std::string(t.substr(0, e));
  t.remove_prefix(e);
  s.source = static_cast<u32>(p_->sources.size());
  std::string shown = trim(text);
  if (shown.size() > 200) shown = shown.substr(0, 200) + " ...";
  p_->sources.push_back({line, loc_file_, loc_line_, shown});
  size_t b = 0;
  for (size_t i = 0; i <= s.op.size(); ++i)
    if (i == s.op.size() || s.op[i] == '.') {
      if (i > b) s.words.push_back(s.op.substr(b, i - b));
      b = i + 1;
    }
  if (!pred.empty()) {
    auto r = find_reg(pred);
    if (!r) fail("unknown predicate " + pred);
    s.pred = static_cast<s32>(*r);
  }
  const bool branch = s.words[0] == "bra";
  if (branch) {
    POp o;
    o.kind = POp::label;
    o.name = trim(t);
    s.ops.push_back(o);
  } else if (s.words[0] == "call") {
    // decoded as unknown
  } else {
    for (auto& q : split(t, ',')) s.ops.push_back(operand(q));
  }
  // inline scopes may define a label after its use: branches keep their scope's label number
  if (branch) s.ops[0].id = static_cast<u32>(~0u);
  insts_.push_back(std::move(s));
}

bool no_destination(const PInst& s) {
  static const std::set<std::string> none = {"st", "red", "bra", "brx", "barrier", "cp", "prefetch", "prefetchu", "fence", "membar", "ret", "exit", "trap", "brkpt", "nanosleep", "setmaxnreg", "stmatrix", "griddepcontrol", "discard", "applypriority", "call", "pragma"};
  if (s.ops.empty()) return true;
  const std::string& o = s.words[0];
  if (o == "bar" || o == "barrier") return !s.has("red");
  if (o == "wgmma") return !s.has("mma_async");
  if (o == "mbarrier") return s.ops[0].kind == POp::addr;
  return none.count(o) > 0;
}
void registers_of(const POp& o, std::vector<u32>& r) {
  if (o.kind == POp::reg) r.push_back(o.id);
  for (auto& q : o.parts) registers_of(q, r);
}

void Builder::allocate() {
  const size_t n = insts_.size(), nr = regs_.size();
  std::vector<std::vector<u32>> defs(n), uses(n);
  std::vector<bool> pinned(nr, false);
  for (size_t i = 0; i < n; ++i) {
    const PInst& s = insts_[i];
    const bool none = no_destination(s);
    for (size_t k = 0; k < s.ops.size(); ++k) {
      if (k == 0 && !none) {
        registers_of(s.ops[0], defs[i]);
        if (s.words[0] == "wgmma") {
          for (u32 r : defs[i]) pinned[r] = true;
          registers_of(s.ops[0], uses[i]);
        }
      } else {
        registers_of(s.ops[k], uses[i]);
      }
    }
  }
  // blocks
  std::vector<bool> leader(n + 1, false);
  leader[0] = true;
  for (s64 l : label_at_)
    if (l >= 0) leader[static_cast<size_t>(l)] = true;
  for (size_t i = 0; i < n; ++i) {
    const std::string& o = insts_[i].words[0];
    if (o == "bra" || o == "brx" || o == "ret" || o == "exit" || o == "trap") leader[i + 1] = true;
  }
  std::vector<size_t> begin;
  std::vector<size_t> block_of(n + 1, 0);
  for (size_t i = 0; i < n; ++i) {
    if (leader[i]) begin.push_back(i);
    block_of[i] = begin.size() - 1;
  }
  const size_t nb = begin.size();
  begin.push_back(n);
  std::vector<std::vector<size_t>> next(nb);
  for (size_t b = 0; b < nb; ++b) {
    const PInst& s = insts_[begin[b + 1] - 1];
    const std::string& o = s.words[0];
    bool falls = true;
    if (o == "bra") {
      const s64 to = label_at_[s.ops[0].id];
      if (to >= 0 && static_cast<size_t>(to) < n) next[b].push_back(block_of[static_cast<size_t>(to)]);
      falls = s.pred >= 0;
    } else if (o == "brx") {
      for (auto& name : branch_targets_[s.ops[1].name]) {
        auto it = scopes_[0].labels.find(name);
        if (it != scopes_[0].labels.end()) next[b].push_back(block_of[static_cast<size_t>(label_at_[it->second])]);
      }
      falls = s.pred >= 0;
    } else if (o == "ret" || o == "exit" || o == "trap") {
      falls = s.pred >= 0;
    }
    if (falls && b + 1 < nb) next[b].push_back(b + 1);
  }
  const size_t words = (nr + 63) / 64;
  std::vector<std::vector<u64>> gen(nb, std::vector<u64>(words)), kill = gen, live_in = gen, live_out = gen;
  const auto set = [](std::vector<u64>& v, u32 r) { v[r / 64] |= 1ull << (r % 64); };
  const auto clear = [](std::vector<u64>& v, u32 r) { v[r / 64] &= ~(1ull << (r % 64)); };
  for (size_t b = 0; b < nb; ++b)
    for (size_t i = begin[b + 1]; i-- > begin[b];) {
      if (insts_[i].pred < 0)
        for (u32 r : defs[i]) set(kill[b], r), clear(gen[b], r);
      for (u32 r : uses[i]) set(gen[b], r);
    }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t b = nb; b-- > 0;) {
      auto& o = live_out[b];
      for (size_t s : next[b])
        for (size_t k = 0; k < words; ++k) o[k] |= live_in[s][k];
      auto& in = live_in[b];
      for (size_t k = 0; k < words; ++k) {
        const u64 x = gen[b][k] | (o[k] & ~kill[b][k]);
        if (x != in[k]) in[k] = x, changed = true;
      }
    }
  }
  struct Interval {
    s64 start = INT64_MAX, end = -1;
  };
  std::vector<Interval> iv(nr);
  const auto touch = [&](u32 r, s64 at) {
    iv[r].start = std::min(iv[r].start, at);
    iv[r].end = std::max(iv[r].end, at);
  };
  for (size_t b = 0; b < nb; ++b) {
    for (size_t k = 0; k < words; ++k) {
      for (u64 x = live_in[b][k]; x; x &= x - 1) touch(static_cast<u32>(k * 64) + static_cast<u32>(__builtin_ctzll(x)), static_cast<s64>(begin[b]));
      for (u64 x = live_out[b][k]; x; x &= x - 1) touch(static_cast<u32>(k * 64) + static_cast<u32>(__builtin_ctzll(x)), static_cast<s64>(begin[b + 1]) - 1);
    }
  }
  for (size_t i = 0; i < n; ++i) {
    for (u32 r : defs[i]) touch(r, static_cast<s64>(i));
    for (u32 r : uses[i]) touch(r, static_cast<s64>(i));
  }
  s32 at = 4096 + 256;
  for (int bytes : {8, 4, 2}) {
    std::vector<u32> order;
    for (u32 r = 0; r < nr; ++r)
      if (regs_[r].bytes == bytes && iv[r].end >= 0) {
        if (pinned[r]) iv[r] = {-1, static_cast<s64>(n) + 1};
        order.push_back(r);
      }
    std::sort(order.begin(), order.end(), [&](u32 a, u32 b) { return iv[a].start < iv[b].start; });
    using Busy = std::pair<s64, s32>;
    std::priority_queue<Busy, std::vector<Busy>, std::greater<>> busy;
    std::vector<s32> free;
    s32 count = 0;
    for (u32 r : order) {
      while (!busy.empty() && busy.top().first < iv[r].start) free.push_back(busy.top().second), busy.pop();
      s32 slot = count;
      if (free.empty()) ++count;
      else slot = free.back(), free.pop_back();
      regs_[r].at = at + slot * 32 * bytes;
      busy.push({iv[r].end, slot});
    }
    at += count * 32 * bytes;
    at = (at + 127) / 128 * 128;
  }
  p_->reg_bytes = static_cast<u32>(at) + 128;
  for (VReg& r : regs_)
    if (r.bytes == 0) r.at = static_cast<s32>(preds_++);
  p_->preds = preds_;
}

std::unique_ptr<Program> Builder::build() {
  Lexer x(k_.body, k_.first_line);
  scopes_.emplace_back();
  std::vector<std::pair<u32, Scope>> closed;  // scopes that ended, for their branches
  std::vector<std::pair<size_t, std::vector<size_t>>> open_branches(1);
  const auto resolve_branches = [&] {  // of the innermost scope: labels it defines
    for (size_t i : open_branches.back().second) {
      POp& o = insts_[i].ops[0];
      auto it = scopes_.back().labels.find(o.name);
      if (it != scopes_.back().labels.end()) o.id = it->second;
      else if (open_branches.size() > 1) open_branches[open_branches.size() - 2].second.push_back(i);
      else fail("unknown label " + o.name);
    }
  };
  while (!x.done()) {
    const char c = x.peek();
    if (c == '{') {
      ++x.at_;
      scopes_.emplace_back();
      open_branches.emplace_back();
      continue;
    }
    if (c == '}') {
      ++x.at_;
      resolve_branches();
      open_branches.pop_back();
      scopes_.pop_back();
      continue;
    }
    if (c == ';') {
      ++x.at_;
      continue;
    }
    const size_t begin = x.at_;
    const u32 line = x.line_;
    if (c == '.') {
      const std::string d(x.word());
      if (d == ".loc") {
        const size_t b = x.at_;
        x.to_line_end();
        unsigned f = 0, l = 0;
        sscanf(std::string(k_.body.substr(b, x.at_ - b)).c_str(), "%u %u", &f, &l);
        loc_file_ = f, loc_line_ = l;
        continue;
      }
      const std::string_view text = x.to(';');
      if (d == ".reg") {
        std::string rest = trim(text);
        size_t e = 0;
        while (e < rest.size() && !isspace(static_cast<unsigned char>(rest[e]))) ++e;
        const std::string type = rest.substr(1, e - 1);
        const u8 bytes = type == "pred" ? 0 : static_cast<u8>(std::max(2, type_bytes(type)));
        if (bytes > 8) fail("registers of 128 bits");
        for (auto& name : split(std::string_view(rest).substr(e), ',')) {
          const size_t lt = name.find('<');
          if (lt == std::string::npos) {
            scopes_.back().regs[name] = static_cast<u32>(regs_.size());
            regs_.push_back({bytes});
          } else {
            const u32 count = static_cast<u32>(std::strtoul(name.c_str() + lt + 1, nullptr, 10));
            scopes_.back().ranges.push_back({name.substr(0, lt), {static_cast<u32>(regs_.size()), count}});
            regs_.resize(regs_.size() + count, VReg{bytes});
          }
        }
      } else if (d == ".shared") {
        const Decl v = parse_decl(text);
        shared_bytes_ = static_cast<u32>((shared_bytes_ + v.align - 1) / v.align * v.align);
        shared_[v.name] = shared_bytes_;
        shared_bytes_ += static_cast<u32>(v.bytes());
      } else if (d == ".local") {
        const Decl v = parse_decl(text);
        local_bytes_ = static_cast<u32>((local_bytes_ + v.align - 1) / v.align * v.align);
        local_[v.name] = local_bytes_;
        local_bytes_ += static_cast<u32>(v.bytes());
      }
      continue;
    }
    // a label?
    {
      const std::string name(x.word());
      if (!name.empty() && x.peek() == ':' && x.t_[x.at_ + 1] != ':') {
        ++x.at_;
        if (x.peek() == '.') {
          const size_t keep = x.at_;
          if (x.word() == ".branchtargets") {
            branch_targets_[name] = split(x.to(';'), ',');
            continue;
          }
          x.at_ = keep;
        }
        label_at_[label(name, true)] = static_cast<s64>(insts_.size());
        continue;
      }
      x.at_ = begin, x.line_ = line;
    }
    const std::string_view text = x.to(';');
    try {
      statement(text, line);
    } catch (const Error& e) {
      fail(std::string("PTX line ") + std::to_string(line) + ": " + e.what() + " in: " + trim(text).substr(0, 200));
    }
    if (insts_.back().words[0] == "bra") open_branches.back().second.push_back(insts_.size() - 1);
  }
  resolve_branches();
  // a sentinel: falling off the end returns
  {
    PInst s;
    s.op = "ret", s.words = {"ret"}, s.source = static_cast<u32>(p_->sources.size());
    p_->sources.push_back({x.line_, 0, 0, "(end)"});
    insts_.push_back(s);
  }
  for (s64& l : label_at_)
    if (l < 0) l = static_cast<s64>(insts_.size()) - 1;
  // module-scope shared variables
  std::vector<std::pair<std::string, Symbol*>> open;
  const std::string body(k_.body);
  for (auto& [name, s] : symbols_) {
    if (s.kind == Symbol::global) continue;
    if (body.find(name) == std::string::npos) continue;
    if (s.kind == Symbol::dynamic_shared) {
      open.push_back({name, &s});
    } else {
      shared_bytes_ = static_cast<u32>((shared_bytes_ + s.align - 1) / s.align * s.align);
      shared_[name] = shared_bytes_;
      shared_bytes_ += static_cast<u32>(s.bytes);
    }
  }
  u64 align = 16;
  for (auto& [name, s] : open) align = std::max(align, s->align);
  shared_bytes_ = static_cast<u32>((shared_bytes_ + align - 1) / align * align);
  for (auto& [name, s] : open) shared_[name] = shared_bytes_;
  k_.dynamic_start = shared_bytes_;
  p_->shared_bytes = shared_bytes_;
  p_->local_bytes = (local_bytes_ + 15) / 16 * 16;
  allocate();

  k_.params.reset(static_cast<char*>(aligned_alloc(256, (k_.param_bytes + 511) / 256 * 256)), free);
  char* params = k_.params.get();
  const std::function<u64(const std::string&, bool&)> symbol = [&](const std::string& name, bool& ok) -> u64 {
    ok = true;
    if (auto it = k_.param_offset.find(name); it != k_.param_offset.end()) return reinterpret_cast<u64>(params) + it->second;
    if (auto it = shared_.find(name); it != shared_.end()) return it->second;
    if (auto it = local_.find(name); it != local_.end()) return it->second;
    if (auto it = symbols_.find(name); it != symbols_.end() && it->second.data) return reinterpret_cast<u64>(it->second.data);
    ok = false;
    return 0;
  };
  Decoder d{*p_, regs_, symbol, {}};
  p_->code.resize(insts_.size());
  for (size_t n = 0; n < insts_.size(); ++n) {
    const PInst& s = insts_[n];
    Inst& i = p_->code[n];
    std::string why;
    bool ok = false;
    try {
      ok = d.sync(s, i) || (i = Inst{}, d.alu(s, i)) || (i = Inst{}, d.cvt(s, i)) || (i = Inst{}, d.mem(s, i)) || (i = Inst{}, d.mma(s, i));
    } catch (const Error& e) {
      why = std::string(" (") + e.what() + ")";
    }
    i.source = s.source;
    if (!ok) {
      i = Inst{};
      i.source = s.source;
      i.fn = Unknown::run;
      i.imm = reinterpret_cast<s64>(new std::string("unknown instruction" + why + ": " + p_->sources[s.source].text));
    }
    if (s.pred >= 0) i.pred = regs_[static_cast<u32>(s.pred)].at, i.neg = s.neg ? ~0u : 0;
    if (ok && s.words[0] == "bra") i.target = static_cast<u32>(label_at_[s.ops[0].id]);
    if (ok && s.words[0] == "brx") {
      p_->lists.emplace_back();
      for (auto& name : branch_targets_[s.ops[1].name]) p_->lists.back().push_back(static_cast<s32>(label_at_[scopes_[0].labels.at(name)]));
      i.list = &p_->lists.back();
    }
  }
  for (auto& s : p_->sources) (void)s;
  return std::move(p_);
}

}  // namespace

void run_launch(Kernel& k, const Launch& launch, const std::map<u32, std::string>& files);

namespace {

class ModuleImpl : public Module {
 public:
  explicit ModuleImpl(const std::string& text) : text_(text) { parse(); }
  ~ModuleImpl() override {
    for (auto& [name, s] : symbols_)
      if (s.data) Memory::remove(s.data);
  }
  const KernelInfo* kernel(const std::string& name) const override {
    auto it = kernels_.find(name);
    return it == kernels_.end() ? nullptr : &it->second.info;
  }
  void* symbol(const std::string& name, u64* bytes) override {
    auto it = symbols_.find(name);
    if (it == symbols_.end() || !it->second.data) return nullptr;
    if (bytes) *bytes = it->second.bytes;
    return it->second.data;
  }
  void launch(const std::string& name, const Launch& launch, const void* params) override {
    auto it = kernels_.find(name);
    if (it == kernels_.end()) fail("no kernel " + name);
    Kernel& k = it->second;
    built(k);
    memcpy(k.params.get(), params, k.param_bytes);
    run_launch(k, launch, files_);
  }

  std::map<std::string, Kernel>& kernels() { return kernels_; }
  const Program& built(Kernel& k) {
    if (!k.program) {
      Builder b(k, symbols_, files_);
      k.program = b.build();
    }
    return *k.program;
  }

 private:
  void parse();
  void variable(std::string_view text, const std::string& space, bool external);
  std::string text_;
  std::map<std::string, Kernel> kernels_;
  std::map<std::string, Symbol> symbols_;
  std::map<u32, std::string> files_;
  std::vector<std::pair<std::string, std::string>> inits_;
};

void ModuleImpl::variable(std::string_view text, const std::string& space, bool external) {
  const Decl d = parse_decl(text);
  Symbol s;
  s.align = d.align, s.bytes = d.bytes();
  if (space == ".shared") {
    s.kind = d.open || external ? Symbol::dynamic_shared : Symbol::shared;
    symbols_[d.name] = s;
    return;
  }
  s.kind = Symbol::global;
  const u64 bytes = std::max<u64>(s.bytes, 1), align = std::max<u64>(d.align, 256);
  char* raw = static_cast<char*>(aligned_alloc(align, (bytes + align - 1) / align * align));
  memset(raw, 0, bytes);
  s.memory.reset(raw, free);
  s.data = raw;
  symbols_[d.name] = s;
  Memory::add(raw, bytes);
  if (!d.init.empty()) {
    std::string list = d.init;
    if (list[0] == '{') list = list.substr(1, list.size() - 2);
    std::replace(list.begin(), list.end(), '{', ' ');
    std::replace(list.begin(), list.end(), '}', ' ');
    const int size = std::max(1, type_bytes(d.type));
    u64 at = 0;
    for (auto& q : split(list, ',')) {
      u64 v = 0;
      if (q.size() > 2 && q[0] == '0' && (q[1] == 'f' || q[1] == 'd' || q[1] == 'F' || q[1] == 'D')) v = std::strtoull(q.c_str() + 2, nullptr, 16);
      else if (isdigit(static_cast<unsigned char>(q[0])) || q[0] == '-') v = q[0] == '-' ? static_cast<u64>(std::strtoll(q.c_str(), nullptr, 0)) : std::strtoull(q.c_str(), nullptr, 0);
      else {
        std::string name = q;
        if (name.rfind("generic(", 0) == 0) name = name.substr(8, name.size() - 9);
        auto it = symbols_.find(name);
        if (it != symbols_.end()) v = reinterpret_cast<u64>(it->second.data);
      }
      if (at + static_cast<u64>(size) <= bytes) memcpy(raw + at, &v, static_cast<size_t>(size));
      at += static_cast<u64>(size);
    }
  }
}

void ModuleImpl::parse() {
  Lexer x(text_, 1);
  bool external = false;
  while (!x.done()) {
    const size_t begin = x.at_;
    const std::string w(x.word());
    if (w.empty()) {
      ++x.at_;
      continue;
    }
    if (w == ".version" || w == ".target" || w == ".address_size") {
      x.to_line_end();
    } else if (w == ".file") {
      const size_t b = x.at_;
      x.to_line_end();
      unsigned n = 0;
      const std::string rest = text_.substr(b, x.at_ - b);
      sscanf(rest.c_str(), "%u", &n);
      const size_t q = rest.find('"');
      if (q != std::string::npos) files_[n] = rest.substr(q + 1, rest.find('"', q + 1) - q - 1);
    } else if (w == ".section") {
      x.word();
      if (x.peek() == '{') {
        ++x.at_;
        x.to('}');
      }
    } else if (w == ".extern" || w == ".visible" || w == ".weak" || w == ".common") {
      external = w == ".extern";
      continue;
    } else if (w == ".global" || w == ".const" || w == ".shared") {
      variable(x.to(';'), w, external);
    } else if (w == ".func") {
      // skipped: a declaration or a body
      const size_t semi = text_.find(';', x.at_), brace = text_.find('{', x.at_);
      if (semi < brace) {
        x.to(';');
      } else {
        while (x.at_ < brace) x.line_ += text_[x.at_++] == '\n';
        ++x.at_;
        x.to('}');
      }
    } else if (w == ".entry") {
      const std::string name(x.word());
      Kernel& k = kernels_[name];
      k.info.name = name;
      if (x.peek() == '(') {
        ++x.at_;
        for (auto& q : split(x.to(')'), ',')) {
          if (q.empty()) continue;
          std::string head = q;
          const size_t pos = head.find(".param");
          if (pos != std::string::npos) head = head.substr(pos + 6);
          // ".ptr .align" tells of what it points to
          const size_t ptr = head.find(".ptr");
          if (ptr != std::string::npos) {
            const size_t name_at = head.find_last_of(" \t") + 1;
            head = head.substr(0, ptr) + " " + head.substr(name_at);
          }
          const Decl d = parse_decl(head);
          const u32 at = static_cast<u32>((k.param_bytes + d.align - 1) / d.align * d.align);
          k.param_offset[d.name] = at;
          k.info.params.push_back({at, static_cast<u32>(d.bytes())});
          k.param_bytes = at + static_cast<u32>(d.bytes());
        }
      }
      while (x.peek() != '{') {
        const std::string d(x.word());
        const auto numbers = [&] {
          const size_t b = x.at_;
          x.to_line_end();
          unsigned a[3] = {1, 1, 1};
          sscanf(text_.substr(b, x.at_ - b).c_str(), "%u , %u , %u", a, a + 1, a + 2);
          return Dim3{a[0], a[1], a[2]};
        };
        if (d == ".maxntid" || d == ".reqntid") {
          const Dim3 n = numbers();
          k.info.max_threads = n.x * n.y * n.z;
        } else if (d == ".reqnctapercluster") {
          k.info.required_cluster = numbers();
        } else if (d.empty()) {
          ++x.at_;
        }
      }
      ++x.at_;
      const size_t b = x.at_;
      k.first_line = x.line_;
      k.body = x.to('}');
      k.body = std::string_view(text_).substr(b, x.at_ - b - 1);
      // static shared memory
      u64 bytes = 0;
      for (size_t at = k.body.find(".shared .align"); at != std::string_view::npos; at = k.body.find(".shared .align", at + 1)) {
        if (at && !isspace(static_cast<unsigned char>(k.body[at - 1]))) continue;
        const size_t semi = k.body.find(';', at);
        const Decl d = parse_decl(k.body.substr(at + 7, semi - at - 7));
        bytes = (bytes + d.align - 1) / d.align * d.align + d.bytes();
      }
      k.info.static_shared = static_cast<u32>(bytes);
    }
    external = false;
    if (x.at_ == begin) ++x.at_;
  }
  for (auto& [name, k] : kernels_)
    for (auto& [sname, s] : symbols_)
      if (s.kind == Symbol::shared && k.body.find(sname) != std::string_view::npos)
        k.info.static_shared = static_cast<u32>((k.info.static_shared + s.align - 1) / s.align * s.align + s.bytes);
}

}  // namespace

std::unique_ptr<Module> Module::load(const std::string& ptx) { return std::make_unique<ModuleImpl>(ptx); }

std::string check(Module& module) {
  std::string r;
  auto& m = static_cast<ModuleImpl&>(module);
  for (auto& [name, k] : m.kernels()) {
    try {
      const Program& p = m.built(k);
      for (const Inst& i : p.code)
        if (i.fn == Unknown::run) r += *reinterpret_cast<const std::string*>(i.imm) + "\n";
      r += "# " + name + ": " + std::to_string(p.code.size()) + " instructions, " + std::to_string(p.reg_bytes) + " bytes of registers, " + std::to_string(p.pool.size()) + " of constants\n";
    } catch (const Error& e) {
      r += name + ": " + e.what() + "\n";
    }
  }
  return r;
}

const Program& program_of(const Kernel& k) { return *k.program; }
const KernelInfo& info_of(const Kernel& k) { return k.info; }
const char* params_of(const Kernel& k, u32* bytes) { return *bytes = k.param_bytes, k.params.get(); }
u32 dynamic_start_of(const Kernel& k) { return k.dynamic_start; }

}  // namespace emu
