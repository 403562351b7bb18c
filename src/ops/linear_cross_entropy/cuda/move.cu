// What: rows and matrices between the caller's layout and the workspace, and their conversions.
// Why: the products read dense, aligned operands whatever the caller's strides and dtypes are.
// Never: rounds twice; every value goes from fp32 to its output dtype once.
#include "core/kernel_mutant.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {
namespace {

constexpr int threads = 256;

unsigned blocks_for(int64_t elements) {
  const int64_t blocks = (elements + threads - 1) / threads;
  return static_cast<unsigned>(blocks < 65536 ? (blocks > 0 ? blocks : 1) : 65536);
}

__device__ int64_t first_element() { return blockIdx.x * int64_t{blockDim.x} + threadIdx.x; }
__device__ int64_t all_threads() { return int64_t{gridDim.x} * blockDim.x; }

__device__ void put(__nv_bfloat16* to, int64_t i, float x) { to[i] = __float2bfloat16(x); }
__device__ void put(__half* to, int64_t i, float x) { to[i] = __float2half(x); }
__device__ void put(float* to, int64_t i, float x) { to[i] = x; }
__device__ void put(double* to, int64_t i, float x) { to[i] = x; }
__device__ float get(const __nv_bfloat16* from, int64_t i) { return __bfloat162float(from[i]); }
__device__ float get(const __half* from, int64_t i) { return __half2float(from[i]); }
__device__ float get(const float* from, int64_t i) { return from[i]; }

// One block a row.
template <typename From, typename To>
__global__ void gather_kernel(ChunkRows c, const From* from, int64_t stride0, int64_t stride1,
                              int64_t hidden, To* to, int64_t stride) {
  const int64_t r = blockIdx.x;
  const bool real = c.order ? is_row(c, r) : true;
  const int64_t row = mutant(KernelMutant::gather_row_before) && r > 0 ? r - 1 : r;
  const int64_t t = real && c.order ? c.order[c.begin + row] : c.begin + row;
  for (int64_t i = threadIdx.x; i < stride; i += blockDim.x) {
    const bool inside = real && i < hidden;
    put(to, r * stride + i, inside ? get(from, t * stride0 + i * stride1) : 0.0f);
  }
}

template <typename From>
void gather_from(const ChunkRows& c, const View& from, int64_t hidden, DType compute, void* to,
                 int64_t stride, cudaStream_t stream) {
  const auto* source = static_cast<const From*>(from.data);
  const auto rows = static_cast<unsigned>(c.rows);
  auto launch = [&](auto* target) {
    gather_kernel<<<rows, threads, 0, stream>>>(c, source, from.stride0, from.stride1, hidden,
                                                target, stride);
  };
  if (compute == DType::bf16)
    launch(static_cast<__nv_bfloat16*>(to));
  else if (compute == DType::f16)
    launch(static_cast<__half*>(to));
  else
    launch(static_cast<float*>(to));
}

__global__ void scale_kernel(ChunkRows c, const RowFactors* factors, int64_t hidden, __half* x,
                             int64_t stride) {
  const int64_t r = blockIdx.x;
  if (!is_row(c, r)) return;
  const float factor = factors[r].x;
  if (factor == 1.0f) return;
  for (int64_t i = threadIdx.x; i < hidden; i += blockDim.x)
    x[r * stride + i] = __float2half(__half2float(x[r * stride + i]) * factor);
}

template <typename To>
__global__ void scatter_kernel(ChunkRows c, const RowFactors* factors, const float* from,
                               int64_t stride, int64_t hidden, To* to, int64_t stride0,
                               int64_t stride1) {
  const int64_t r = blockIdx.x;
  if (!is_row(c, r)) return;
  const int64_t t = c.order[c.begin + r];
  const float factor = factors[r].dx;
  for (int64_t i = threadIdx.x; i < hidden; i += blockDim.x)
    put(to, t * stride0 + i * stride1, from[r * stride + i] * factor);
}

__device__ double get(const double* from, int64_t i) { return from[i]; }

// One block a row; rows from `local` on are padding.
template <typename To>
__global__ void store_kernel(const float* from, int64_t stride, int64_t local, int64_t columns,
                             bool accumulate, To* to, int64_t stride0, int64_t stride1) {
  const int64_t v = blockIdx.x;
  if (accumulate && v >= local) return;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    const int64_t at = v * stride0 + i * stride1;
    const float value = v < local ? from[v * stride + i] : 0.0f;
    if constexpr (sizeof(To) >= sizeof(float)) {
      to[at] = accumulate ? static_cast<To>(get(to, at) + value) : static_cast<To>(value);
    } else {
      put(to, at, value);
    }
  }
}

__global__ void db_kernel(const double* from, int64_t local, int64_t stored, bool accumulate,
                          View to) {
  for (int64_t v = first_element(); v < stored; v += all_threads()) {
    if (accumulate) {
      if (v < local) to.store(v, to.load(v) + from[v]);
    } else {
      to.store(v, v < local ? from[v] : 0.0);
    }
  }
}

// `launch` with a pointer of the view's dtype.
template <typename Launch>
void with_type(const View& to, Launch launch) {
  switch (to.dtype) {
    case DType::bf16:
      return launch(static_cast<__nv_bfloat16*>(to.data));
    case DType::f16:
      return launch(static_cast<__half*>(to.data));
    case DType::f64:
      return launch(static_cast<double*>(to.data));
    default:
      return launch(static_cast<float*>(to.data));
  }
}

}  // namespace

void gather_rows(const ChunkRows& c, const View& from, int64_t hidden, DType compute, void* to,
                 int64_t stride, cudaStream_t stream) {
  if (c.rows == 0) return;
  if (from.dtype == DType::bf16)
    gather_from<__nv_bfloat16>(c, from, hidden, compute, to, stride, stream);
  else if (from.dtype == DType::f16)
    gather_from<__half>(c, from, hidden, compute, to, stride, stream);
  else
    gather_from<float>(c, from, hidden, compute, to, stride, stream);
  device::check_launch("gather_rows");
}

void scale_rows(const ChunkRows& c, const RowFactors* factors, int64_t hidden, void* x,
                int64_t stride, cudaStream_t stream) {
  scale_kernel<<<static_cast<unsigned>(c.rows), threads, 0, stream>>>(
      c, factors, hidden, static_cast<__half*>(x), stride);
  device::check_launch("scale_rows");
}

void scatter_dx(const ChunkRows& c, const RowFactors* factors, const float* from, int64_t stride,
                int64_t hidden, const View& to, cudaStream_t stream) {
  with_type(to, [&](auto* pointer) {
    scatter_kernel<<<static_cast<unsigned>(c.rows), threads, 0, stream>>>(
        c, factors, from, stride, hidden, pointer, to.stride0, to.stride1);
  });
  device::check_launch("scatter_dx");
}

void copy_matrix(const float* from, int64_t stride, int64_t rows, int64_t columns, const View& to,
                 cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  with_type(to, [&](auto* pointer) {
    store_kernel<<<static_cast<unsigned>(rows), threads, 0, stream>>>(
        from, stride, rows, columns, false, pointer, to.stride0, to.stride1);
  });
  device::check_launch("copy_matrix");
}

void store_dw(const float* from, int64_t local, int64_t stored, int64_t hidden, bool accumulate,
              const View& to, cudaStream_t stream) {
  if (stored == 0 || hidden == 0) return;
  with_type(to, [&](auto* pointer) {
    store_kernel<<<static_cast<unsigned>(stored), threads, 0, stream>>>(
        from, hidden, local, hidden, accumulate, pointer, to.stride0, to.stride1);
  });
  device::check_launch("store_dw");
}

void store_db(const double* from, int64_t local, int64_t stored, bool accumulate, const View& to,
              cudaStream_t stream) {
  if (stored == 0) return;
  db_kernel<<<blocks_for(stored), threads, 0, stream>>>(from, local, stored, accumulate, to);
  device::check_launch("store_db");
}

}  // namespace talea::lce::cuda
