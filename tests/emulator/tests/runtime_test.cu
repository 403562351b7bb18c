// What: the stand-in runtime by itself: no kernel's result is looked at unless EMU_KERNELS=1.
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define CHECK(x) do { if (!(x)) { std::printf("FAILED line %d: %s\n", __LINE__, #x); std::exit(1); } } while (0)
#define OK(x) do { cudaError_t e_ = (x); if (e_) { std::printf("FAILED line %d: %s: %s\n", __LINE__, #x, cudaGetErrorName(e_)); std::exit(1); } } while (0)

__device__ int counter = 5;
__global__ void add(int* p, int n, int by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] += by + counter;
}

int main() {
  const bool kernels = std::getenv("EMU_KERNELS");
  int count = 0;
  OK(cudaGetDeviceCount(&count));
  cudaStream_t a, b;
  OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  int* p;
  const int n = 1000;
  OK(cudaMalloc(&p, n * 4));
  std::vector<int> h(n, 7), r(n);
  OK(cudaMemcpyAsync(p, h.data(), n * 4, cudaMemcpyHostToDevice, a));
  OK(cudaMemcpyAsync(r.data(), p, n * 4, cudaMemcpyDeviceToHost, a));
  CHECK(r == h);
  add<<<4, 256, 0, a>>>(p, n, 3);
  OK(cudaGetLastError());
  OK(cudaMemcpyAsync(r.data(), p, n * 4, cudaMemcpyDeviceToHost, a));
  if (kernels) CHECK(r[0] == 15 && r[n - 1] == 15);
  const int nine = 9;
  OK(cudaMemcpyToSymbol(counter, &nine, 4));
  int back = 0;
  OK(cudaMemcpyFromSymbol(&back, counter, 4));
  CHECK(back == 9);
  add<<<4, 2048, 0, a>>>(p, n, 3);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
  OK(cudaGetLastError());
  add<<<4, 256, 60000, a>>>(p, n, 3);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  OK(cudaFuncSetAttribute(add, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448));
  CHECK(cudaFuncSetAttribute(add, cudaFuncAttributeMaxDynamicSharedMemorySize, 232449) == cudaErrorInvalidValue);
  cudaGetLastError();
  CHECK(cudaMemset(p, 0, n * 4 + 1) == cudaErrorInvalidValue);
  cudaGetLastError();
  // a held stream
  std::atomic<bool> gate{false};
  OK(cudaLaunchHostFunc(a, [](void* g) { while (!*static_cast<std::atomic<bool>*>(g)) std::this_thread::yield(); }, &gate));
  OK(cudaMemsetAsync(p, 1, n * 4, a));
  CHECK(cudaStreamQuery(a) == cudaErrorNotReady);
  cudaGetLastError();
  OK(cudaStreamQuery(b));
  cudaEvent_t e;
  OK(cudaEventCreate(&e));
  OK(cudaEventRecord(e, a));
  OK(cudaStreamWaitEvent(b, e, 0));
  OK(cudaMemsetAsync(p, 2, 4, b));
  CHECK(cudaStreamQuery(b) == cudaErrorNotReady);
  gate = true;
  OK(cudaStreamSynchronize(b));
  OK(cudaMemcpy(r.data(), p, n * 4, cudaMemcpyDeviceToHost));
  CHECK(r[0] == 0x02020202 && r[1] == 0x01010101);
  // capture with fork and join
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  OK(cudaMemsetAsync(p, 3, 8, a));
  OK(cudaEventRecord(e, a));
  OK(cudaStreamWaitEvent(b, e, 0));
  OK(cudaMemsetAsync(p, 4, 4, b));
  OK(cudaEventRecord(e, b));
  OK(cudaStreamWaitEvent(a, e, 0));
  OK(cudaStreamEndCapture(a, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaMemcpy(r.data(), p, 8, cudaMemcpyDeviceToHost));
  CHECK(r[0] == 0x02020202 && r[1] == 0x01010101);
  OK(cudaGraphLaunch(exec, a));
  OK(cudaStreamSynchronize(a));
  OK(cudaMemcpy(r.data(), p, 8, cudaMemcpyDeviceToHost));
  CHECK(r[0] == 0x04040404 && r[1] == 0x03030303);
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphDestroy(graph));
  // unjoined, and a forbidden call
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  OK(cudaEventRecord(e, a));
  OK(cudaStreamWaitEvent(b, e, 0));
  OK(cudaMemsetAsync(p, 4, 4, b));
  CHECK(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureUnjoined);
  OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
  void* q;
  CHECK(cudaMalloc(&q, 4) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureInvalidated);
  cudaGetLastError();
  // a product: column-major c[m,n] = a^T[m,k] b[k,n], bf16
  void* lib = dlopen("libcublasLt.so.13", RTLD_NOW);
  CHECK(lib);
#define F(name) auto f_##name = reinterpret_cast<decltype(&name)>(dlsym(lib, #name)); CHECK(f_##name)
  F(cublasLtCreate); F(cublasLtMatmulDescCreate); F(cublasLtMatmulDescSetAttribute); F(cublasLtMatrixLayoutCreate);
  F(cublasLtMatmul); F(cublasLtMatmulAlgoGetHeuristic); F(cublasLtMatmulPreferenceCreate);
  cublasLtHandle_t lt;
  f_cublasLtCreate(&lt);
  const int M = 70, N = 37, K = 45;
  for (int mode = 0; mode < 4; ++mode) {
    const bool ta = mode & 1, tb = mode & 2;
    std::vector<uint16_t> ha(M * K), hb(N * K);
    std::vector<float> fa(M * K), fb(N * K), hc(M * N, 0.5f), want(M * N);
    auto draw = [](std::vector<uint16_t>& x, std::vector<float>& f) {
      for (size_t i = 0; i < x.size(); ++i) {
        f[i] = float(std::rand() % 64 - 32) / 16;
        uint32_t bits;
        memcpy(&bits, &f[i], 4);
        x[i] = uint16_t(bits >> 16);
      }
    };
    draw(ha, fa), draw(hb, fb);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) {
        float s = 0;
        for (int k = 0; k < K; ++k) s += (ta ? fa[k + i * K] : fa[i + k * M]) * (tb ? fb[j + k * N] : fb[k + j * K]);
        want[i + j * M] = 2 * s + 3 * 0.5f;
      }
    void *da, *db, *dc;
    OK(cudaMalloc(&da, M * K * 2)); OK(cudaMalloc(&db, N * K * 2)); OK(cudaMalloc(&dc, M * N * 4));
    OK(cudaMemcpy(da, ha.data(), M * K * 2, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(db, hb.data(), N * K * 2, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(dc, hc.data(), M * N * 4, cudaMemcpyHostToDevice));
    cublasLtMatmulDesc_t d;
    f_cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    int32_t op = ta ? CUBLAS_OP_T : CUBLAS_OP_N;
    f_cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA, &op, 4);
    op = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    f_cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSB, &op, 4);
    cublasLtMatrixLayout_t la, lb, lc;
    f_cublasLtMatrixLayoutCreate(&la, CUDA_R_16BF, ta ? K : M, ta ? M : K, ta ? K : M);
    f_cublasLtMatrixLayoutCreate(&lb, CUDA_R_16BF, tb ? N : K, tb ? K : N, tb ? N : K);
    f_cublasLtMatrixLayoutCreate(&lc, CUDA_R_32F, M, N, M);
    cublasLtMatmulPreference_t pref;
    f_cublasLtMatmulPreferenceCreate(&pref);
    cublasLtMatmulHeuristicResult_t res[4];
    int got = 0;
    CHECK(f_cublasLtMatmulAlgoGetHeuristic(lt, d, la, lb, lc, lc, pref, 4, res, &got) == 0 && got == 1);
    float alpha = 2, beta = 3;
    CHECK(f_cublasLtMatmul(lt, d, &alpha, da, la, db, lb, &beta, dc, lc, dc, lc, &res[0].algo, nullptr, 0, mode & 1 ? a : nullptr) == 0);
    OK(cudaDeviceSynchronize());
    OK(cudaMemcpy(hc.data(), dc, M * N * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < M * N; ++i) CHECK(std::fabs(hc[i] - want[i]) < 1e-3);
    cudaFree(da); cudaFree(db); cudaFree(dc);
  }
  std::puts("ok");
}
