// Kernels for the interpreter's own tests; compiled to PTX only.
#include "device/sm90/cluster.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/sm90/wgmma_narrow.cuh"
using namespace talea::sm90;
extern "C" {
__global__ void arithmetic(const int* a, const int* b, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i * 8 + 0] = a[i] / b[i];
  out[i * 8 + 1] = a[i] % b[i];
  out[i * 8 + 2] = __mulhi(a[i], b[i]);
  out[i * 8 + 3] = __popc(a[i]) + __clz(b[i]) + __ffs(a[i]);
  out[i * 8 + 4] = (int)(((long long)a[i] * b[i]) >> 7);
  out[i * 8 + 5] = __float_as_int(expf((float)a[i] * 1e-3f) + logf(fabsf((float)b[i]) + 1.f));
  out[i * 8 + 6] = __float_as_int(sinf((float)a[i] * 1e-2f));
  out[i * 8 + 7] = (unsigned)a[i] >> (b[i] & 31);
}
__global__ void diverge(const int* a, int* out) {  // collatz lengths, loops of different lengths, then a shuffle
  int x = a[blockIdx.x * blockDim.x + threadIdx.x], n = 0;
  while (x != 1 && n < 500) {
    if (x & 1) x = 3 * x + 1; else x >>= 1;
    ++n;
  }
  int s = n;
  for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
  if (threadIdx.x % 3 == 0) {
    unsigned m = __ballot_sync(0x49249249u, n > 20);
    s += __popc(m) * 1000000;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = s;
}
__global__ void block_scan(const float* a, float* out) {
  __shared__ float x[256];
  int t = threadIdx.x;
  x[t] = a[blockIdx.x * 256 + t];
  __syncthreads();
  for (int d = 1; d < 256; d <<= 1) {
    float y = t >= d ? x[t - d] : 0.f;
    __syncthreads();
    x[t] += y;
    __syncthreads();
  }
  out[blockIdx.x * 256 + t] = x[t];
}
// Each block waits for the one after it: none but a machine that runs all of them gets through.
__global__ void spin(volatile int* flags, int blocks, int* out) {
  int b = blockIdx.x;
  if (threadIdx.x == 0) {
    if (b + 1 < blocks) while (flags[b + 1] == 0) {}
    __threadfence();
    flags[b] = 1;
    atomicAdd(out, b);
  }
}
__global__ void spin_lane(int* lock, int* out) {  // lanes of one warp take a lock in turns
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      *out += threadIdx.x;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
__global__ void cp_async_sum(const float4* a, float4* out) {
  extern __shared__ float4 s4[];
  for (int k = 0; k < 4; ++k) {
    copy_16_bytes(smem_address(&s4[k * blockDim.x + threadIdx.x]), &a[k * blockDim.x + threadIdx.x], k != 2);
    asm volatile("cp.async.commit_group;");
  }
  float4 r = make_float4(0, 0, 0, 0);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  for (int k = 0; k < 4; ++k) {
    float4 v = s4[k * blockDim.x + (threadIdx.x ^ 33)];
    r.x += v.x; r.y += v.y; r.z += v.z; r.w += v.w;
  }
  out[threadIdx.x] = r;
}
// D [64, 64 N] of A, B loaded by TMA into the swizzled layout; one warpgroup
#define WGMMA_TEST(NAME, N, TA, TB, F16)                                                                          \
  __global__ __launch_bounds__(128) void NAME(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* out) { \
    extern __shared__ __align__(1024) char memory[];                                                              \
    char *a = memory, *b = memory + 8192;                                                                         \
    __shared__ uint64_t full;                                                                                     \
    if (threadIdx.x == 0) {                                                                                       \
      barrier_init(&full, 1);                                                                                     \
      barrier_init_fence();                                                                                       \
      barrier_expect(&full, 8192 + N * 128);                                                                      \
      load_tile(&map_a, &full, a, 0, 0);                                                                          \
      if (TB == 0) load_tile(&map_b, &full, b, 0, 0);                                                             \
      else for (int i = 0; i < N / 64; ++i) load_tile(&map_b, &full, b + 8192 * i, 64 * i, 0);                    \
    }                                                                                                             \
    __syncthreads();                                                                                              \
    barrier_wait(&full, 0);                                                                                       \
    float d[N / 2];                                                                                               \
    for (int i = 0; i < N / 2; ++i) d[i] = 0;                                                                     \
    const uint64_t da = operand_descriptor(a), db = operand_descriptor(b);                                        \
    hold_registers(d);                                                                                            \
    warpgroup_arrive();                                                                                           \
    for (int k = 0; k < 4; ++k) multiply_tile<N, TA, TB, F16>(d, da + (TA ? 128 * k : 2 * k), db + (TB ? 128 * k : 2 * k)); \
    warpgroup_commit();                                                                                           \
    warpgroup_wait<0>();                                                                                          \
    hold_registers(d);                                                                                            \
    const int w = threadIdx.x / 32, l = threadIdx.x % 32;                                                         \
    for (int i = 0; i < N / 2; ++i) out[(16 * w + l / 4 + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (l % 4) + i % 2] = d[i]; \
  }
WGMMA_TEST(wgmma_64_00, 64, 0, 0, false)
WGMMA_TEST(wgmma_128_00, 128, 0, 0, true)
WGMMA_TEST(wgmma_128_01, 128, 0, 1, false)
WGMMA_TEST(wgmma_256_11, 256, 1, 1, false)
WGMMA_TEST(wgmma_192_10, 192, 1, 0, true)
// A from registers
__global__ __launch_bounds__(128) void wgmma_registers(const __nv_bfloat16* a, const __grid_constant__ CUtensorMap map_b, float* out) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barrier_init_fence();
    barrier_expect(&full, 64 * 128);
    load_tile(&map_b, &full, memory, 0, 0);
  }
  __syncthreads();
  barrier_wait(&full, 0);
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = 1;
  uint32_t x[4][4];
  for (int k = 0; k < 4; ++k)
    for (int r = 0; r < 4; ++r) x[k][r] = *(const uint32_t*)(a + (16 * w + l / 4 + 8 * (r % 2)) * 64 + 16 * k + 8 * (r / 2) + 2 * (l % 4));
  hold_registers(d);
  warpgroup_arrive();
  for (int k = 0; k < 4; ++k) multiply_registers<64, 1, false>(d, x[k], operand_descriptor(memory) + 128 * k);
  warpgroup_commit();
  warpgroup_wait<0>();
  hold_registers(d);
  for (int i = 0; i < 32; ++i) out[(16 * w + l / 4 + 8 * (i / 2 % 2)) * 64 + 8 * (i / 4) + 2 * (l % 4) + i % 2] = d[i];
}
// D 16x8 += A 16x16 B 16x8 by mma.sync through ldmatrix; A row-major, B row-major [k][n] through .trans
__global__ void mma_sync(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out) {
  __shared__ __align__(16) __nv_bfloat16 sa[16 * 16], sb[16 * 8];
  for (int i = threadIdx.x; i < 256; i += 32) sa[i] = a[i];
  for (int i = threadIdx.x; i < 128; i += 32) sb[i] = b[i];
  __syncwarp();
  const int l = threadIdx.x;
  uint32_t x[4], y[4];
  load_matrix_x4(x, &sa[(l % 16) * 16 + (l / 16) * 8]);
  load_matrix_x4_transposed(y, &sb[(l % 16) * 8]);
  float d[4] = {0, 0, 0, 0};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int r = 0; r < 4; ++r) out[(l / 4 + 8 * (r / 2)) * 8 + 2 * (l % 4) + r % 2] = d[r];
}
__global__ void mma_tf32(const float* a, const float* b, float* out) {  // A 16x8, B [k][n] 8x8
  const int l = threadIdx.x;
  uint32_t x[4], y[2];
  for (int r = 0; r < 4; ++r) x[r] = __float_as_uint(a[(l / 4 + 8 * (r % 2)) * 8 + l % 4 + 4 * (r / 2)]);
  for (int r = 0; r < 2; ++r) y[r] = __float_as_uint(b[(l % 4 + 4 * r) * 8 + l / 4]);
  float d[4] = {0, 0, 0, 0};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int r = 0; r < 4; ++r) out[(l / 4 + 8 * (r / 2)) * 8 + 2 * (l % 4) + r % 2] = d[r];
}
// A pipeline of bulk loads through 3 stages: one warp loads, four warps double, one thread stores or reduces.
__global__ void pipeline(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out, int tiles, int reduce) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t full[3], empty[3];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) barrier_init(&full[s], 1), barrier_init(&empty[s], 128);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int t = 0; t < tiles; ++t) {
        const int s = t % 3, phase = t / 3 & 1;
        barrier_wait(&empty[s], phase ^ 1);
        barrier_expect(&full[s], 4096);
        load_tile(&in, &full[s], memory + 4096 * s, 0, 32 * t);
      }
    return;
  }
  for (int t = 0; t < tiles; ++t) {
    const int s = t % 3, phase = t / 3 & 1;
    barrier_wait(&full[s], phase);
    if (threadIdx.x == 0) store_wait_read<0>();
    named_barrier_sync(1, 128);
    float4* from = (float4*)(memory + 4096 * s);
    float4* to = (float4*)(memory + 4096 * 3);
    for (int i = threadIdx.x; i < 256; i += 128) {
      float4 v = from[i];
      v.x *= 2; v.y *= 2; v.z *= 2; v.w *= 2;
      to[i] = v;
    }
    fence_async_shared();
    barrier_arrive(&empty[s]);
    named_barrier_sync(1, 128);
    if (threadIdx.x == 0) {
      if (reduce) reduce_add_tile(&out, memory + 4096 * 3, 0, 32 * t); else store_tile(&out, memory + 4096 * 3, 0, 32 * t);
      store_commit();
    }
  }
  if (threadIdx.x == 0) store_wait_all();
}
// Two blocks: each loads half and multicasts; then each sends a word and bytes to the other.
__global__ __cluster_dims__(2) void cluster(const float* a, float* out) {
  __shared__ __align__(128) float x[64], y[64];
  __shared__ uint64_t full, sent;
  __shared__ uint32_t word[4];
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barrier_init(&sent, 1);
    barrier_init_fence();
    barrier_expect(&full, 256);
    barrier_expect(&sent, 128 + 4);
  }
  cluster_sync();
  if (threadIdx.x == 0) load_bytes_multicast(a + blockIdx.x / 2 * 64 + 32 * rank, &full, x + 32 * rank, 128, 3);
  barrier_wait(&full, 0);
  y[threadIdx.x + 32] = x[threadIdx.x + 32 * rank] * 3;
  __syncwarp();
  fence_async_shared();
  if (threadIdx.x == 0) {
    const uint32_t bar = address_at(smem_address(&sent), rank ^ 1);
    send_bytes(address_at(smem_address(y), rank ^ 1), smem_address(y + 32), 128, bar);
    store_word_async(address_at(smem_address(word), rank ^ 1), 100 + rank, bar);
  }
  barrier_wait(&sent, 0);
  out[blockIdx.x * 33 + threadIdx.x] = y[threadIdx.x];
  if (threadIdx.x == 0) out[blockIdx.x * 33 + 32] = word[0];
  cluster_sync();
}
__global__ void out_of_bounds(float* a) { a[threadIdx.x + 1000] = 1; }
__global__ void stuck(float* a) {
  __shared__ uint64_t full;
  if (threadIdx.x == 0) barrier_init(&full, 2);
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive(&full);
  barrier_wait(&full, 0);
  a[0] = 1;
}
__global__ void speed(float* a, int n) {
  float x = a[threadIdx.x], y = x * 0.5f, z = x + 1, u = 0.25f;
  for (int i = 0; i < n; ++i) {
    x = x * y + z; y = y * u + x; z = z * x + u; u = u * z + y;
    x = x * 0.5f; y = y * 0.25f; z = z * 0.125f; u = u * 0.125f;
  }
  a[threadIdx.x] = x + y + z + u;
}
__global__ void conversions(const float* a, unsigned* out) {
  const int i = threadIdx.x;
  const float x = a[i];
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, x * 3);
  out[8 * i] = *(const unsigned*)&p;
  const __half2 h = __floats2half2_rn(x, x * 3);
  out[8 * i + 1] = *(const unsigned*)&h;
  unsigned t;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(t) : "f"(x));
  out[8 * i + 2] = t;
  out[8 * i + 3] = __float2int_rz(x);
  out[8 * i + 4] = __float2uint_rn(x);
  out[8 * i + 5] = (unsigned)(long long)(x * 1e3f);
  out[8 * i + 6] = __float_as_uint((float)(double)x * exp2_fast(x));
  out[8 * i + 7] = __float_as_uint(fminf(x, __int_as_float(0x7fc00000)));
}
}
