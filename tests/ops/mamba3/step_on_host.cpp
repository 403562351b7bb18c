// What: see step_on_host.hpp.
// Why: threads of an operating system would take minutes where stacks of one take seconds.
// Never: lets threads go in one order alone, which would hide a barrier that is left out.
#ifdef TALEA_WITH_CUDA
#include "ops/mamba3/step_on_host.hpp"

#include <ucontext.h>
#include <vector_types.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

namespace talea::testing {
namespace {

// Who has come to a barrier, and how often all have.
struct Barrier {
  int size = 0, here = 0;
  int64_t times = 0;
};

class Block {
 public:
  explicit Block(int threads) : all_{threads, 0, 0}, threads_(static_cast<size_t>(threads)) {
    for (Thread& t : threads_) t.stack.resize(size_t{96} << 10);
    warps_.assign(threads_.size() / 32, {32, 0, 0});
    lanes_.assign(threads_.size(), 0);
    for (size_t i = 0; i < threads_.size(); ++i) order_.push_back(i);
  }

  // Every thread runs `text`; each goes on until it waits, in an order that changes.
  void run(const std::function<void()>& text) {
    text_ = &text;
    current = this;
    for (Thread& t : threads_) {
      t.done = false;
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data();
      t.context.uc_stack.ss_size = t.stack.size();
      t.context.uc_link = &scheduler_;
      makecontext(&t.context, &Block::enter, 0);
    }
    for (size_t left = threads_.size(); left > 0;) {
      std::shuffle(order_.begin(), order_.end(), random_);
      for (const size_t i : order_) {
        if (threads_[i].done) continue;
        at_ = i;
        swapcontext(&scheduler_, &threads_[i].context);
        if (threads_[i].done) --left;
      }
    }
  }

  void sync() { wait(all_); }
  float other(float x, int distance) {
    const size_t mine = at_;
    lanes_[mine] = x;
    wait(warps_[mine / 32]);
    const float found = lanes_[mine ^ static_cast<size_t>(distance)];
    wait(warps_[mine / 32]);
    return found;
  }
  int thread() const { return static_cast<int>(at_); }
  static inline Block* current = nullptr;

 private:
  struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
  };
  static void enter() {
    Block& b = *current;
    const size_t mine = b.at_;
    (*b.text_)();
    b.threads_[mine].done = true;
  }
  void wait(Barrier& b) {
    const int64_t times = b.times;
    if (++b.here == b.size) {
      b.here = 0, ++b.times;
      return;
    }
    const size_t mine = at_;
    while (b.times == times) swapcontext(&threads_[mine].context, &scheduler_);
  }

  Barrier all_;
  std::vector<Thread> threads_;
  std::vector<Barrier> warps_;
  std::vector<float> lanes_;
  std::vector<size_t> order_;
  std::mt19937 random_{1};
  ucontext_t scheduler_{};
  const std::function<void()>* text_ = nullptr;
  size_t at_ = 0;
};

struct ThreadIndex {
  struct Of {
    explicit operator int() const { return Block::current->thread(); }
  };
  Of x;
};

}  // namespace
}  // namespace talea::testing

// What the text takes of CUDA's language.
static const talea::testing::ThreadIndex threadIdx;
static void __syncthreads() { talea::testing::Block::current->sync(); }
static float __shfl_xor_sync(unsigned, float x, int distance) {
  return talea::testing::Block::current->other(x, distance);
}
static void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}
static void __pipeline_commit() {}
static void __pipeline_wait_prior(size_t) {}
namespace talea::device {
struct Sum {};
static float warp_reduce(float x, Sum) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}
}  // namespace talea::device

#include "ops/mamba3/rows/step_entries.cuh"

namespace talea::mamba3::cuda {

void step_on_host(const Args& a) {
  testing::Block block(one_step::threads);
  one_step::with_step(a, [&](auto step) {
    using Step = typename decltype(step)::type;
    for (int head = 0; head < a.size.heads; ++head) {
      std::vector<float4> shared(Step::shared_floats / 4 + 1, float4{NAN, NAN, NAN, NAN});
      block.run([&] {
        Step one(a, &shared[0].x, head);
        one.run(0, 1);
      });
    }
  });
}

}  // namespace talea::mamba3::cuda
#endif
