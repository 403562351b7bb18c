// What: see chunk.hpp: a block of 128 threads a chunk of a head, its products by warps.
// Why: one text for every form, so that what a form changes is all that differs.
// Never: sums with atomics; only the count of products is one.
#include <cuda_bf16.h>
#include <mma.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "device/common/cuda_check.hpp"
#include "device/sm90/ptx.cuh"
#include "device/sm90/tensor_map.hpp"
#include "repro/support/chunk.hpp"
#include "talea/error.hpp"

namespace talea::repro {
namespace {

namespace wmma = nvcuda::wmma;
using Number = __nv_bfloat16;

constexpr int rows = ChunkProblem::rows, n = ChunkProblem::n, p = ChunkProblem::p;
constexpr int threads = 128, half = 64;  // a tile is halves of 64 columns, 128 bytes a row

struct Shared {
  alignas(128) Number q[n / half][rows][half];
  alignas(128) Number k[n / half][rows][half];
  alignas(128) Number v[rows][half];
  alignas(128) Number d_o[rows][half];
  float w[rows][rows];
  Number weighed[rows][rows];
  float decay[rows], step[rows], own[rows];  // L, s and gamma of a row's token
  uint64_t barrier;
};

struct Pointers {
  const Number *q, *k, *v, *d_o;
  const float *decay, *step, *own;  // [heads, tokens]
  float *dq, *dk, *same, *trace;
  unsigned long long* products;
  int tokens, rank, heads;
  bool edited;
};
struct Maps {
  CUtensorMap q, k, v, d_o;
};

// A box of 64 columns of a head: all rows (token, r) of a chunk, whatever lies between them.
__device__ void bulk_copy(const CUtensorMap* map, uint64_t* barrier, void* to, int column, int head,
                          int token) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(sm90::smem_address(to)),
      "l"(map), "r"(sm90::smem_address(barrier)), "r"(column), "r"(head), "r"(0), "r"(token)
      : "memory");
}

__device__ void load_in_bulk(Shared& s, const Maps& maps, const Pointers& a, int head, int token) {
  if (threadIdx.x == 0) {
    sm90::barrier_init(&s.barrier, 1);
    sm90::barrier_init_fence();
    sm90::barrier_expect(&s.barrier, sizeof s.q + sizeof s.k + sizeof s.v + sizeof s.d_o);
    for (int h = 0; h < n / half; ++h) {
      bulk_copy(&maps.q, &s.barrier, s.q[h], h * half, head, token);
      bulk_copy(&maps.k, &s.barrier, s.k[h], h * half, head, token);
    }
    bulk_copy(&maps.v, &s.barrier, s.v, 0, head, token);
    bulk_copy(&maps.d_o, &s.barrier, s.d_o, 0, head, token);
  }
  __syncthreads();
  sm90::barrier_wait(&s.barrier, 0);
}

__device__ void load_by_threads(Shared& s, const Pointers& a, int head, int token) {
  const auto copy = [&](Number(*to)[half], const Number* from, int columns, int first) {
    for (int i = threadIdx.x; i < rows * 8; i += threads) {
      const int64_t row = static_cast<int64_t>(token) * a.rank + i / 8;
      sm90::copy_16_bytes(sm90::smem_address(&to[i / 8][i % 8 * 8]),
                          from + (row * a.heads + head) * columns + first + i % 8 * 8, true);
    }
  };
  for (int h = 0; h < n / half; ++h) {
    copy(s.q[h], a.q, n, h * half);
    copy(s.k[h], a.k, n, h * half);
  }
  copy(s.v, a.v, p, 0);
  copy(s.d_o, a.d_o, p, 0);
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// dO V^T of the chunk, [rows, rows], sixteen rows a warp.
__device__ void form_product(Shared& s, const Pointers& a) {
  __syncthreads();
  const int warp = threadIdx.x / 32;
  for (int j = 0; j < rows; j += 16) {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.f);
    for (int e = 0; e < p; e += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, Number, wmma::row_major> x;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, Number, wmma::col_major> y;
      wmma::load_matrix_sync(x, &s.d_o[16 * warp][e], half);
      wmma::load_matrix_sync(y, &s.v[j][e], half);
      wmma::mma_sync(sum, x, y, sum);
    }
    wmma::store_matrix_sync(&s.w[16 * warp][j], sum, rows, wmma::mem_row_major);
  }
  if (threadIdx.x == 0) atomicAdd(a.products, 1ull);
  __syncthreads();
}

// The product under the mask: what a key of a token before, of the same and behind weighs.
__device__ void weigh(Shared& s, int rank, bool diagonal_has_step) {
  for (int at = threadIdx.x; at < rows * rows; at += threads) {
    const int i = at / rows, j = at % rows, query = i / rank, key = j / rank;
    const float same = diagonal_has_step ? s.step[j] : s.own[j];
    const float earlier = s.step[j] * __expf(s.decay[i] - s.decay[j]);
    const float weight = query > key ? earlier : query == key ? same : 0.f;
    s.weighed[i][j] = __float2bfloat16(s.w[i][j] * weight);
  }
  __syncthreads();
}

// Rows of the weighed product, or of its transpose, times a tile; stored a row every heads * n.
template <typename Order>
__device__ void multiply(const Shared& s, const Number (*by)[rows][half], float* to, int heads) {
  constexpr bool turned = std::is_same_v<Order, wmma::col_major>;
  const int warp = threadIdx.x / 32;
  for (int column = 0; column < n; column += 16) {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.f);
    for (int j = 0; j < rows; j += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, Number, Order> x;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, Number, wmma::row_major> y;
      wmma::load_matrix_sync(x, turned ? &s.weighed[j][16 * warp] : &s.weighed[16 * warp][j], rows);
      wmma::load_matrix_sync(y, &by[column / half][j][column % half], half);
      wmma::mma_sync(sum, x, y, sum);
    }
    wmma::store_matrix_sync(to + static_cast<int64_t>(16 * warp) * heads * n + column, sum,
                            heads * n, wmma::mem_row_major);
  }
}

template <bool bulk, bool once>
__global__ void __launch_bounds__(threads)
    chunk_kernel(const __grid_constant__ Maps maps, const Pointers a) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int head = blockIdx.y, chunk = blockIdx.x, token = chunk * (rows / a.rank);
  if constexpr (bulk)
    load_in_bulk(s, maps, a, head, token);
  else
    load_by_threads(s, a, head, token);
  if (threadIdx.x < rows) {
    const int64_t at = static_cast<int64_t>(head) * a.tokens + token + threadIdx.x / a.rank;
    s.decay[threadIdx.x] = a.decay[at];
    s.step[threadIdx.x] = a.step[at];
    s.own[threadIdx.x] = a.own[at];
  }
  const int64_t first = (static_cast<int64_t>(token) * a.rank * a.heads + head) * n;
  form_product(s, a);
  weigh(s, a.rank, false);
  multiply<wmma::row_major>(s, s.k, a.dq + first, a.heads);
  if constexpr (!once) form_product(s, a);
  __syncthreads();
  weigh(s, a.rank, a.edited);
  multiply<wmma::col_major>(s, s.q, a.dk + first, a.heads);
  if constexpr (!once) form_product(s, a);
  if (threadIdx.x < rows) {
    const int row = threadIdx.x, r = row % a.rank, own = row - r;
    float* to = a.same + ((static_cast<int64_t>(head) * a.tokens + token) * a.rank + row) * a.rank;
    for (int other = 0; other < a.rank; ++other) to[other] = s.w[row][own + other];
  }
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < rows; ++i) sum += s.w[i][i];
    a.trace[static_cast<int64_t>(head) * gridDim.x + chunk] = sum;
  }
}

// Axes fastest first: columns, heads, rank, tokens.
CUtensorMap map_of(const void* data, const ChunkProblem& c, int64_t columns) {
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t extent[] = {size(columns), size(c.heads), size(c.rank), size(c.tokens)};
  const cuuint64_t stride[] = {size(columns * 2), size(columns * 2 * c.heads),
                               size(columns * 2 * c.heads * c.rank)};
  const cuuint32_t box[] = {half, 1, static_cast<cuuint32_t>(c.rank),
                            static_cast<cuuint32_t>(rows / c.rank)};
  const cuuint32_t every[] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult status = sm90::tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), extent, stride, box,
      every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(ErrorKind::runtime,
                "chunk kernels: the driver refuses a map of [tokens, rank, "
                "heads, columns]");
  return map;
}

using Kernel = void (*)(Maps, Pointers);

Kernel kernel_of(const ChunkForm& form) {
  if (form.bulk) return form.once ? chunk_kernel<true, true> : chunk_kernel<true, false>;
  return form.once ? chunk_kernel<false, true> : chunk_kernel<false, false>;
}

// What decays and steps are in a chunk of a head: the same on host and device.
struct Steps {
  std::vector<float> decay, step, own;  // [heads, tokens]
};

Steps draw_steps(const ChunkProblem& c) {
  Steps made;
  std::mt19937_64 engine(3);
  std::uniform_real_distribution<float> uniform(0.f, 1.f);
  const int64_t tokens = rows / c.rank;
  float sum = 0;
  for (int64_t i = 0; i < c.heads * c.tokens; ++i) {
    sum = (i % tokens == 0 ? 0.f : sum) - 0.1f * uniform(engine);
    const float own = 0.1f * uniform(engine),
                next = i % tokens == tokens - 1 ? 0.f : uniform(engine);
    made.decay.push_back(sum);
    made.own.push_back(own);
    made.step.push_back(own + 0.1f * next);
  }
  return made;
}

}  // namespace

bool has_chunk_kernels(std::string& why) {
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess)
    major = 0;
  if (!device_in_use())
    why = "no device is in use: --device cuda";
  else if (major != 9)
    why = "bulk tensor copies of sm_90a: the device in use is another";
  return why.empty();
}

struct ChunkKernels::Drawn {
  ChunkProblem problem;
  void *q, *k, *v, *d_o, *steps;
};

ChunkKernels::ChunkKernels(const ChunkProblem& problem) {
  DeviceSession& session = *device_in_use();
  session.free_all();
  const int64_t all = problem.tokens * problem.rank;
  uint64_t seed = 11;
  const auto drawn = [&](int64_t columns) {
    void* data = session.allocate(all * problem.heads * columns * 2);
    session.fill_normal(
        make_tensor(data, DType::bf16, {all, problem.heads, columns}, DeviceKind::cuda), seed++, 1);
    return data;
  };
  const Steps steps = draw_steps(problem);
  const auto bytes = static_cast<int64_t>(steps.decay.size() * sizeof(float));
  drawn_ = std::make_shared<const Drawn>(
      Drawn{problem, drawn(n), drawn(n), drawn(p), drawn(p), session.allocate(3 * bytes)});
  char* to = static_cast<char*>(drawn_->steps);
  session.upload(to, steps.decay.data(), bytes);
  session.upload(to + bytes, steps.step.data(), bytes);
  session.upload(to + 2 * bytes, steps.own.data(), bytes);
}

ChunkGradients ChunkKernels::run(const ChunkForm& form) {
  DeviceSession& session = *device_in_use();
  const ChunkProblem& c = drawn_->problem;
  ChunkGradients made;
  const int64_t all = c.tokens * c.rank * c.heads;
  made.dq.resize(static_cast<size_t>(all * n));
  made.dk.resize(made.dq.size());
  made.same.resize(static_cast<size_t>(all * c.rank));
  made.trace.resize(static_cast<size_t>(c.heads * c.chunks()));
  const auto place = [&](const std::vector<float>& v) {
    const auto bytes = static_cast<int64_t>(v.size() * sizeof(float));
    void* data = session.allocate(bytes);
    session.fill_bytes(data, 0xff, bytes);  // NaN, unless a block writes it
    return static_cast<float*>(data);
  };
  const auto* steps = static_cast<const float*>(drawn_->steps);
  const int64_t apart = c.heads * c.tokens;
  const auto rows_of = [](void* data) { return static_cast<const Number*>(data); };
  Pointers a{rows_of(drawn_->q),
             rows_of(drawn_->k),
             rows_of(drawn_->v),
             rows_of(drawn_->d_o),
             steps,
             steps + apart,
             steps + 2 * apart,
             place(made.dq),
             place(made.dk),
             place(made.same),
             place(made.trace),
             static_cast<unsigned long long*>(session.allocate(8)),
             static_cast<int>(c.tokens),
             static_cast<int>(c.rank),
             static_cast<int>(c.heads),
             form.edited};
  const Maps maps{map_of(drawn_->q, c, n), map_of(drawn_->k, c, n), map_of(drawn_->v, c, p),
                  map_of(drawn_->d_o, c, p)};
  const Kernel kernel = kernel_of(form);
  device::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
      "chunk_kernel");
  const dim3 grid(static_cast<unsigned>(c.chunks()), static_cast<unsigned>(c.heads));
  const auto stream = static_cast<cudaStream_t>(session.stream());
  const auto launch = [&] { kernel<<<grid, threads, sizeof(Shared), stream>>>(maps, a); };
  made.ms = INFINITY;
  for (int i = 0; i < 8; ++i) made.ms = std::min(made.ms, session.time_ms(launch));
  session.fill_bytes(a.products, 0, 8);
  launch();
  device::check_launch("chunk_kernel");
  session.synchronise();
  const auto back = [&](std::vector<float>& to, const float* from) {
    session.download(to.data(), from, static_cast<int64_t>(to.size() * sizeof(float)));
  };
  back(made.dq, a.dq), back(made.dk, a.dk), back(made.same, a.same), back(made.trace, a.trace);
  unsigned long long products = 0;
  session.download(&products, a.products, 8);
  made.products = static_cast<double>(products) / static_cast<double>(c.heads * c.chunks());
  return made;
}

double ChunkKernels::error(const ChunkGradients& made, int64_t head) {
  const ChunkProblem& c = drawn_->problem;
  const auto row_of = [&](const void* data, int64_t columns) {
    std::vector<uint16_t> all(static_cast<size_t>(rows * c.heads * columns));
    device_in_use()->download(all.data(), data, static_cast<int64_t>(all.size() * 2));
    std::vector<double> wide;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t e = 0; e < columns; ++e)
        wide.push_back(std::bit_cast<float>(
            uint32_t{all[static_cast<size_t>((i * c.heads + head) * columns + e)]} << 16));
    return wide;
  };
  const auto q = row_of(drawn_->q, n), k = row_of(drawn_->k, n), v = row_of(drawn_->v, p),
             d_o = row_of(drawn_->d_o, p);
  const Steps steps = draw_steps(c);
  std::vector<double> dq(rows * n, 0), dk = dq, our_dq, our_dk;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < rows; ++j) {
      const auto query = static_cast<size_t>(head * c.tokens + i / c.rank);
      const auto key = static_cast<size_t>(head * c.tokens + j / c.rank);
      if (query < key) continue;
      double w = 0;
      for (int64_t e = 0; e < p; ++e)
        w += d_o[static_cast<size_t>(i * p + e)] * v[static_cast<size_t>(j * p + e)];
      const double apart = static_cast<double>(steps.decay[query]) - steps.decay[key];
      w *= query == key ? steps.own[key] : steps.step[key] * std::exp(apart);
      for (int64_t e = 0; e < n; ++e) {
        dq[static_cast<size_t>(i * n + e)] += w * k[static_cast<size_t>(j * n + e)];
        dk[static_cast<size_t>(j * n + e)] += w * q[static_cast<size_t>(i * n + e)];
      }
    }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t e = 0; e < n; ++e) {
      const auto at = static_cast<size_t>((i * c.heads + head) * n + e);
      our_dq.push_back(made.dq[at]);
      our_dk.push_back(made.dk[at]);
    }
  const double one = relative_l2(our_dq, dq), other = relative_l2(our_dk, dk);
  return one < other || std::isnan(other) ? other : one;
}

bool describes_blocks(bool flat) {
  constexpr cuuint64_t tokens = 1024, rank = 4;
  DeviceSession& session = *device_in_use();
  void* data = session.allocate(tokens * rank * rank * 2);
  const cuuint64_t extent[] = {flat ? rank * rank : rank, flat ? tokens : rank, tokens};
  const cuuint64_t stride[] = {(flat ? rank * rank : rank) * 2, rank * rank * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(extent[0]), flat ? 16u : 4u, 16};
  const cuuint32_t every[] = {1, 1, 1};
  CUtensorMap map{};
  return sm90::tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, flat ? 2 : 3, data,
                                    extent, stride, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace talea::repro
