// What: the ways in which these kernels hand shared memory from warp to warp and wait, each alone: right,
// right in a form that the tools follow, and wrong.
// Why: racecheck and synccheck report kernels that are right; what they can follow shows here.
// Never: uses a kernel of the library.
//
// usage: compute-sanitizer --tool racecheck|synccheck talea_sanitizer_patterns PATTERN   (none:
// lists them)
#include <cstdio>
#include <cstring>

#include "device/sm90/ptx.cuh"

namespace {

namespace ptx = talea::sm90;
constexpr int kRounds = 16, kRows = 64, kReaders = 128;

// Who arrives at the two barriers of a slot: a warp's first lane behind __syncwarp(), or every
// lane. too_early: the readers say that they have read before they do.
enum class Arrival { one_lane, one_lane_ready, one_lane_free, all_lanes, too_early };

__device__ void arrive(uint64_t* barrier, bool all) {
  if (!all) __syncwarp();
  if (all || threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Two warps write 64 numbers a round, four warps read them: sums of dkv in sparse attention.
template <Arrival kArrival>
__global__ void slot_kernel(int* out) {
  __shared__ int rows[kRows];
  __shared__ uint64_t ready, free;
  constexpr bool all_ready = kArrival == Arrival::all_lanes || kArrival == Arrival::one_lane_free;
  constexpr bool all_free = kArrival == Arrival::all_lanes || kArrival == Arrival::one_lane_ready;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&ready, all_ready ? kRows : kRows / 32);
    ptx::barrier_init(&free, all_free ? kReaders : kReaders / 32);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kReaders) {
    for (int round = 0; round < kRounds; ++round) {
      ptx::barrier_wait(&free, (round & 1) ^ 1);
      rows[thread - kReaders] = round * kRows + thread - kReaders;
      arrive(&ready, all_ready);
    }
    return;
  }
  int sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    ptx::barrier_wait(&ready, round & 1);
    if (kArrival == Arrival::too_early) arrive(&free, false);
    sum += *const_cast<volatile int*>(&rows[thread % kRows]);
    if (kArrival != Arrival::too_early) arrive(&free, all_free);
  }
  out[thread] = sum;
}

// Two of four warpgroups write what all read behind a barrier of the whole block; before that the
// other two have arrived at a named barrier for which they do not wait: gradients of the scan.
enum class Other { arrives, waits, no_barrier };

template <Other kOther>
__global__ void named_kernel(int* out) {
  __shared__ int seen[256];
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  int sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (kOther == Other::arrives && (group == 0 || group == 3))
      ptx::named_barrier_arrive(1, 512);
    else
      ptx::named_barrier_sync(1, 512);
    if (group == 1 || group == 2) seen[thread - 128] = round * 256 + thread - 128;
    if (kOther != Other::no_barrier) __syncthreads();
    sum += *const_cast<volatile int*>(&seen[thread % 256]);
    __syncthreads();
  }
  out[thread] = sum;
}

// Two warpgroups wait for each other at one instruction, or each at one of its own, as roles do
// that meet. In a block of more threads a third takes no part.
enum class Meeting { one_place, two_places };

template <Meeting kMeeting>
__global__ void meeting_kernel(int* out) {
  __shared__ int seen[256];
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  if (group == 2) return;
  int sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    seen[thread] = round * 256 + thread;
    if (kMeeting == Meeting::one_place) {
      ptx::named_barrier_sync(1, 256);
    } else if (group == 0) {
      ptx::named_barrier_sync(1, 256);
      sum += 1;
      __threadfence_block();
    } else {
      ptx::named_barrier_sync(1, 256);
      sum -= 1;
      __threadfence();
    }
    sum += *const_cast<volatile int*>(&seen[255 - thread]);
    ptx::named_barrier_sync(2, 256);
  }
  if (kMeeting == Meeting::two_places) sum += group == 0 ? -kRounds : kRounds;
  out[255 - thread] = sum;
}

struct Pattern {
  const char* name;
  void (*kernel)(int*);
  int threads, rows;
};

const Pattern patterns[] = {
    {"slot_one_lane_arrives", slot_kernel<Arrival::one_lane>, kReaders + kRows, kRows},
    {"slot_one_lane_says_ready", slot_kernel<Arrival::one_lane_ready>, kReaders + kRows, kRows},
    {"slot_one_lane_says_free", slot_kernel<Arrival::one_lane_free>, kReaders + kRows, kRows},
    {"slot_all_lanes_arrive", slot_kernel<Arrival::all_lanes>, kReaders + kRows, kRows},
    {"slot_freed_too_early", slot_kernel<Arrival::too_early>, kReaders + kRows, kRows},
    {"named_others_arrive", named_kernel<Other::arrives>, 512, 256},
    {"named_others_wait", named_kernel<Other::waits>, 512, 256},
    {"named_no_barrier", named_kernel<Other::no_barrier>, 512, 256},
    {"meeting_at_one_place", meeting_kernel<Meeting::one_place>, 256, 256},
    {"meeting_at_two_places", meeting_kernel<Meeting::two_places>, 256, 256},
    {"meeting_at_one_place_of_three", meeting_kernel<Meeting::one_place>, 384, 256},
    {"meeting_at_two_places_of_three", meeting_kernel<Meeting::two_places>, 384, 256},
};

}  // namespace

int main(int argc, char** argv) {
  for (const Pattern& p : patterns) {
    if (argc < 2) std::puts(p.name);
    if (argc < 2 || std::strcmp(argv[1], p.name) != 0) continue;
    int* out = nullptr;
    int sums[512] = {};
    if (cudaMalloc(&out, sizeof(sums)) != cudaSuccess) {
      std::puts("unavailable: no CUDA device");
      return 3;
    }
    p.kernel<<<1, p.threads>>>(out);
    if (cudaMemcpy(sums, out, sizeof(sums), cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
    int wrong = 0;
    const int readers = p.threads == 512 ? 512 : p.threads == kReaders + kRows ? kReaders : 256;
    for (int i = 0; i < readers; ++i)
      wrong += sums[i] != kRounds * (kRounds - 1) / 2 * p.rows + kRounds * (i % p.rows);
    std::printf("%s: %d of %d sums are wrong\n", p.name, wrong, readers);
    return 0;  // of a wrong pattern any sum may come
  }
  return argc < 2 ? 0 : 2;
}
