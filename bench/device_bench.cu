// What: lane sm90 against the three plain cuBLAS products, interleaved in one process, as JSON
// lines. Why: the chip is power-limited and its clock drifts; only a ratio of neighbours means
// something. Never: part of the library. Build: cmake --preset cuda, target talea_device_bench.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "talea/linear_cross_entropy.hpp"

namespace {

using bf16 = __nv_bfloat16;
using namespace talea;
constexpr int kSamples = 12, kWarmup = 2;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(4);
}

struct Case {
  const char* name;
  int64_t tokens, hidden, vocab, limit_mib;
  float spread = 1;  // standard deviation of the logits
  bool loss_only = false, bf16_dw = false, options = false, smoothing = false, errors = false;
  bool late = false;  // none: a forward call, then a second one with the upstream vector
  double ignored = 0;
};

__global__ void normal(bf16* to, int64_t n, float scale, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float u = (uint32_t(z) + 0.5f) * 2.3283064e-10f, v = uint32_t(z >> 32) * 2.3283064e-10f;
    to[i] = __float2bfloat16(scale * sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}

__global__ void widen(const bf16* from, float* to, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step)
    to[i] = __bfloat162float(from[i]);
}

__device__ double block_reduce(double x, bool max) {
  __shared__ double s[256];
  s[threadIdx.x] = x;
  __syncthreads();
  for (int k = 128; k > 0; k /= 2) {
    if (threadIdx.x < k) {
      const double other = s[threadIdx.x + k];
      s[threadIdx.x] = max ? fmax(s[threadIdx.x], other) : s[threadIdx.x] + other;
    }
    __syncthreads();
  }
  const double y = s[0];
  __syncthreads();
  return y;
}

// Truth of the mean loss: fp32 logits become dz, in fp64 per element, with 1 - p of the target
// exact.
__global__ void truth_rows(float* logits, int64_t vocab, const int64_t* targets, double inverse) {
  float* row = logits + blockIdx.x * vocab;
  const int64_t y = targets[blockIdx.x];
  double m = -INFINITY, others = 0;
  for (int64_t v = threadIdx.x; v < vocab; v += 256) m = fmax(m, double(row[v]));
  m = block_reduce(m, true);
  for (int64_t v = threadIdx.x; v < vocab; v += 256)
    if (v != y) others += exp(double(row[v]) - m);
  others = block_reduce(others, false);
  const double sum = others + exp(double(row[y]) - m);
  __syncthreads();
  for (int64_t v = threadIdx.x; v < vocab; v += 256)
    row[v] = float(inverse * (v == y ? -others / sum : exp(double(row[v]) - m) / sum));
}

__global__ void differences(const float* truth, const void* got, bool narrow, int64_t n,
                            double* sums) {
  double num = 0, den = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    const double y = narrow ? __bfloat162float(static_cast<const bf16*>(got)[i])
                            : static_cast<const float*>(got)[i];
    num += (truth[i] - y) * (truth[i] - y), den += double(truth[i]) * truth[i];
  }
  atomicAdd(sums, num), atomicAdd(sums + 1, den);
}

template <class T>
T* device(std::vector<void*>& owned, int64_t n) {
  void* p = nullptr;
  check(cudaMalloc(&p, std::max<int64_t>(n, 1) * sizeof(T)), "cudaMalloc");
  owned.push_back(p);
  return static_cast<T*>(p);
}

// One case in device memory: inputs, outputs, workspace, and room for the plain products.
struct Bench {
  Case c;
  cublasHandle_t blas;
  std::vector<void*> owned;
  bf16 *x, *w, *dx, *plain_logits, *plain_dw;
  void* dw;
  int64_t* targets;
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  Workspace workspace;

  Bench(const Case& wanted, cublasHandle_t handle) : c(wanted), blas(handle) {
    const int64_t n = c.tokens, d = c.hidden, v = c.vocab;
    x = device<bf16>(owned, n * d), w = device<bf16>(owned, v * d), dx = device<bf16>(owned, n * d);
    plain_logits = device<bf16>(owned, n * v), plain_dw = device<bf16>(owned, v * d);
    dw = device<char>(owned, v * d * (c.bf16_dw ? 2 : 4));
    normal<<<1024, 256>>>(x, n * d, 1.f, 1);
    normal<<<1024, 256>>>(w, v * d, c.spread / std::sqrt(float(d)), 2);
    fill_targets();
    const auto cuda = DeviceKind::cuda;
    in.hidden = make_tensor(x, DType::bf16, {n, d}, cuda);
    in.weight = make_tensor(w, DType::bf16, {v, d}, cuda);
    in.targets = make_tensor(targets, DType::i64, {n}, cuda);
    out.loss = make_tensor(device<float>(owned, 1), DType::f32, {}, cuda);
    if (!c.loss_only) {
      out.dx = make_tensor(dx, DType::bf16, {n, d}, cuda);
      out.dw = make_tensor(dw, c.bf16_dw ? DType::bf16 : DType::f32, {v, d}, cuda);
    }
    if (c.options) add_options();
    if (c.late) {
      options.reduction = Reduction::none;
      auto* g = device<float>(owned, c.tokens);
      std::vector<float> ones(c.tokens, 0.5f);
      check(cudaMemcpy(g, ones.data(), c.tokens * 4, cudaMemcpyHostToDevice), "upstream");
      in.upstream = make_tensor(g, DType::f32, {c.tokens}, cuda);
      out.loss = make_tensor(device<float>(owned, c.tokens), DType::f32, {c.tokens}, cuda);
    }
    if (c.smoothing) options.label_smoothing = 0.1;
    options.workspace_limit_bytes = c.limit_mib << 20;
    options.lane = "sm90";
    workspace.bytes = workspace_bytes(describe(in, out, options));
    workspace.data = device<char>(owned, workspace.bytes);
  }
  ~Bench() {
    for (void* p : owned) cudaFree(p);
  }

  void fill_targets() {
    std::vector<int64_t> y(c.tokens);
    uint64_t s = 88172645463325252ull;
    for (auto& t : y) {
      s ^= s << 13, s ^= s >> 7, s ^= s << 17;
      t = double(s >> 11) * 0x1p-53 < c.ignored ? -100 : int64_t((s >> 3) % uint64_t(c.vocab));
    }
    targets = device<int64_t>(owned, c.tokens);
    check(cudaMemcpy(targets, y.data(), c.tokens * 8, cudaMemcpyHostToDevice), "targets");
  }

  // Bias and its gradient, token weights, smoothing, z-loss, softcap, entropy and top-5 at once.
  void add_options() {
    auto* bias = device<float>(owned, c.vocab);
    auto* weights = device<float>(owned, c.tokens);
    std::vector<float> ones(std::max(c.vocab, c.tokens), 0.5f);
    check(cudaMemcpy(bias, ones.data(), c.vocab * 4, cudaMemcpyHostToDevice), "bias");
    check(cudaMemcpy(weights, ones.data(), c.tokens * 4, cudaMemcpyHostToDevice), "weights");
    in.bias = make_tensor(bias, DType::f32, {c.vocab}, DeviceKind::cuda);
    in.token_weight = make_tensor(weights, DType::f32, {c.tokens}, DeviceKind::cuda);
    out.entropy =
        make_tensor(device<float>(owned, c.tokens), DType::f32, {c.tokens}, DeviceKind::cuda);
    out.db = make_tensor(device<float>(owned, c.vocab), DType::f32, {c.vocab}, DeviceKind::cuda);
    const auto five = {c.tokens, int64_t{5}};
    out.topk_values =
        make_tensor(device<float>(owned, 5 * c.tokens), DType::f32, five, DeviceKind::cuda);
    out.topk_ids =
        make_tensor(device<int64_t>(owned, 5 * c.tokens), DType::i64, five, DeviceKind::cuda);
    options.z_loss = 1e-4, options.softcap = 30, options.label_smoothing = 0.1;
  }

  LinearCrossEntropyResult call() {
    if (c.late) {
      LinearCrossEntropyOutputs forward = out;
      forward.dx = forward.dw = Tensor();
      LinearCrossEntropyInputs first = in;
      first.upstream = Tensor();
      linear_cross_entropy(first, forward, options, workspace);
    }
    return linear_cross_entropy(in, out, options, workspace);
  }

  void plain() {
    const float one = 1, zero = 0;
    const int n = int(c.tokens), d = int(c.hidden), v = int(c.vocab);
    const auto type = CUDA_R_16BF;
    auto gemm = [&](cublasOperation_t ta, cublasOperation_t tb, int m, int columns, int k,
                    const bf16* a, int lda, const bf16* b, int ldb, bf16* to, int ldc) {
      cublasGemmEx(blas, ta, tb, m, columns, k, &one, a, type, lda, b, type, ldb, &zero, to, type,
                   ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    };
    gemm(CUBLAS_OP_T, CUBLAS_OP_N, v, n, d, w, d, x, d, plain_logits, v);
    if (c.loss_only) return;
    gemm(CUBLAS_OP_N, CUBLAS_OP_N, d, n, v, w, d, plain_logits, v, dx, d);
    gemm(CUBLAS_OP_N, CUBLAS_OP_T, d, v, n, x, d, plain_logits, v, plain_dw, d);
  }

  double relative(const float* truth, const void* got, bool narrow, int64_t n) {
    double* sums = device<double>(owned, 2);
    cudaMemset(sums, 0, 16);
    differences<<<512, 256>>>(truth, got, narrow, n, sums);
    double s[2];
    check(cudaMemcpy(s, sums, 16, cudaMemcpyDeviceToHost), "errors");
    return std::sqrt(s[0] / s[1]);
  }

  // Relative L2 of dX and dW against fp32 products of the exact dz.
  void errors(double& ex, double& ew) {
    call();
    const int n = int(c.tokens), d = int(c.hidden), v = int(c.vocab);
    const int64_t nd = c.tokens * c.hidden, vd = c.vocab * c.hidden;
    float *z = device<float>(owned, c.tokens * c.vocab), *xf = device<float>(owned, nd);
    float *wf = device<float>(owned, vd), *tx = device<float>(owned, nd),
          *tw = device<float>(owned, vd);
    widen<<<1024, 256>>>(x, xf, nd);
    widen<<<1024, 256>>>(w, wf, vd);
    const float one = 1, zero = 0;
    cublasSgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, v, n, d, &one, wf, d, xf, d, &zero, z, v);
    truth_rows<<<n, 256>>>(z, v, targets, 1.0 / n);
    cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, d, n, v, &one, wf, d, z, v, &zero, tx, d);
    cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, d, v, n, &one, xf, d, z, v, &zero, tw, d);
    ex = relative(tx, dx, true, nd);
    ew = relative(tw, dw, c.bf16_dw, vd);
  }
};

double quantile(std::vector<float> v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(q * double(v.size() - 1) + 0.5)];
}

void report(const Case& c, cublasHandle_t blas) {
  Bench b(c, blas);
  double ex = -1, ew = -1;
  if (c.errors) b.errors(ex, ew);
  b.out.accumulate_dw = !c.loss_only && !c.bf16_dw;  // straight into the fp32 main gradient
  cudaEvent_t e[4];
  for (auto& event : e) cudaEventCreate(&event);
  std::vector<float> ours, plain, ratio;
  LinearCrossEntropyResult result;
  for (int i = 0; i < kSamples + kWarmup; ++i) {
    cudaEventRecord(e[0]);
    b.plain();
    cudaEventRecord(e[1]);
    result = b.call();
    cudaEventRecord(e[2]);
    b.plain();
    cudaEventRecord(e[3]);
    check(cudaDeviceSynchronize(), c.name);
    float before, own, after;
    cudaEventElapsedTime(&before, e[0], e[1]);
    cudaEventElapsedTime(&own, e[1], e[2]);
    cudaEventElapsedTime(&after, e[2], e[3]);
    if (i < kWarmup) continue;
    ours.push_back(own), plain.push_back((before + after) / 2), ratio.push_back(own / plain.back());
  }
  std::printf(
      "{\"case\": \"%s\", \"tokens\": %ld, \"hidden\": %ld, \"vocab\": %ld, \"limit_mib\": %ld, "
      "\"workspace_mib\": %.1f, \"chunk_rows\": %ld, \"chunks\": %ld, \"plain_ms\": %.3f, "
      "\"ours_ms\": %.3f, \"ratio\": %.3f, \"ratio_p20\": %.3f, \"ratio_p80\": %.3f, \"samples\": "
      "%d",
      c.name, c.tokens, c.hidden, c.vocab, c.limit_mib, double(b.workspace.bytes) / 1048576,
      result.chunk_rows, result.chunks, quantile(plain, .5), quantile(ours, .5),
      quantile(ratio, .5), quantile(ratio, .2), quantile(ratio, .8), kSamples);
  if (c.errors) std::printf(", \"dx_rel_l2\": %.3e, \"dw_rel_l2\": %.3e", ex, ew);
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace

// Arguments: the places of the cases to run; none: all.
int main(int count, char** places) {
  cublasHandle_t blas;
  cublasCreate(&blas);
  const std::vector<Case> cases = {
      {.name = "training",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 530,
       .errors = true},
      {.name = "training, peaked logits",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 530,
       .spread = 8,
       .errors = true},
      {.name = "training", .tokens = 8192, .hidden = 4096, .vocab = 128256, .limit_mib = 1050},
      {.name = "training",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 265,
       .errors = true},
      {.name = "training",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 135,
       .errors = true},
      {.name = "training", .tokens = 16384, .hidden = 4096, .vocab = 128256, .limit_mib = 530},
      {.name = "training", .tokens = 4096, .hidden = 4096, .vocab = 128256, .limit_mib = 530},
      {.name = "training", .tokens = 8192, .hidden = 2304, .vocab = 256000, .limit_mib = 1050},
      {.name = "training", .tokens = 8192, .hidden = 3584, .vocab = 151936, .limit_mib = 620},
      {.name = "training, ragged",
       .tokens = 8191,
       .hidden = 3584,
       .vocab = 151936,
       .limit_mib = 620},
      {.name = "training, ragged",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 50257,
       .limit_mib = 530},
      {.name = "training, aligned neighbour",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 50304,
       .limit_mib = 530},
      {.name = "training, 70 % ignored",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 530,
       .ignored = 0.7},
      {.name = "training, all options",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 560,
       .options = true},
      {.name = "training, label smoothing",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 530,
       .smoothing = true},
      {.name = "training, dW in bf16",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 2100,
       .bf16_dw = true,
       .errors = true},
      {.name = "none, upstream known in backward only",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 256,
       .late = true},
      {.name = "loss only",
       .tokens = 8192,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 32,
       .loss_only = true},
      {.name = "loss only",
       .tokens = 64,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 32,
       .loss_only = true},
      {.name = "loss only",
       .tokens = 1,
       .hidden = 4096,
       .vocab = 128256,
       .limit_mib = 32,
       .loss_only = true}};
  for (int i = 1; i < count; ++i) report(cases.at(std::strtoul(places[i], nullptr, 10)), blas);
  if (count == 1)
    for (const Case& c : cases) report(c, blas);
  cublasDestroy(blas);
  return 0;
}
