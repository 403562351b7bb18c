// What: a stand-in libcublasLt.so: fp32-accumulated products by plain loops, queued on a stand-in stream.
// Why: the lanes that multiply through cuBLASLt run without a GPU.
#include <cublasLt.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "stream_abi.hpp"

namespace {

struct Desc {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t ta = CUBLAS_OP_N, tb = CUBLAS_OP_N, pointer_mode = CUBLASLT_POINTER_MODE_HOST, sms = 0;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};
struct Layout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t leading;
  int32_t batches = 1;
  int64_t batch_stride = 0;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};
};
// As it lies in the eight words of cublasLtMatmulAlgo_t.
struct Algo {
  uint32_t magic = 0xa190, id = 66, tile = CUBLASLT_MATMUL_TILE_128x128, stages = 36;
  int32_t splits = 1;
  uint32_t scheme = 0, swizzle = 0, custom = 0;
  uint16_t inner = 0, cluster = CUBLASLT_CLUSTER_SHAPE_1x1x1;
};
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t));

int size_of(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : t == CUDA_R_16F || t == CUDA_R_16BF ? 2 : 0; }

float load(const char* p, cudaDataType_t t) {
  if (t == CUDA_R_32F) {
    float f;
    std::memcpy(&f, p, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p, 2);
  if (t == CUDA_R_16BF) {
    const uint32_t bits = uint32_t{h} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  _Float16 x;
  std::memcpy(&x, &h, 2);
  return static_cast<float>(x);
}

void store(char* p, cudaDataType_t t, float f) {
  if (t == CUDA_R_32F) {
    std::memcpy(p, &f, 4);
    return;
  }
  uint16_t h;
  if (t == CUDA_R_16BF) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    h = f != f ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  } else {
    const auto x = static_cast<_Float16>(f);
    std::memcpy(&h, &x, 2);
  }
  std::memcpy(p, &h, 2);
}

constexpr int64_t MB = 64, NB = 4;
typedef float Vec __attribute__((vector_size(64)));

struct Work {
  Desc desc;
  Layout a, b, c, d;
  int64_t m, n, k;
  const void *A, *B, *C;
  void* D;
  float alpha, beta;
  const float *alpha_at, *beta_at;
  bool (*holds)(const void*, uint64_t);

  static uint64_t span(const Layout& l) {
    const int64_t one = l.rows && l.columns ? static_cast<int64_t>(l.columns - 1) * l.leading + static_cast<int64_t>(l.rows) : 0;
    return static_cast<uint64_t>(one + std::max<int64_t>(0, (l.batches - 1) * l.batch_stride)) * static_cast<uint64_t>(size_of(l.type));
  }

  int run() {
    if (m == 0 || n == 0) return 0;
    if (desc.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) {
      if (!holds(alpha_at, 4) || !holds(beta_at, 4)) return bad("a scalar");
      alpha = *alpha_at, beta = *beta_at;
    }
    if (k && (!holds(A, span(a)) || !holds(B, span(b)))) return bad("an operand");
    if (!holds(D, span(d)) || (beta != 0 && !holds(C, span(c)))) return bad("the result");
    for (int64_t i = 0; i < d.batches; ++i) one(i);
    return 0;
  }
  static int bad(const char* what) {
    std::fprintf(stderr, "emu: cublasLtMatmul: %s lies outside device memory\n", what);
    return 700;
  }
  static const char* at(const void* p, const Layout& l, int64_t batch) {
    return static_cast<const char*>(p) + batch * l.batch_stride * size_of(l.type);
  }
  // column-major element
  static float get(const char* p, const Layout& l, int64_t row, int64_t column) {
    return load(p + (row + column * l.leading) * size_of(l.type), l.type);
  }
  void one(int64_t batch) {
    const char *pa = at(A, a, batch), *pb = at(B, b, batch), *pc = at(C, c, batch);
    char* pd = const_cast<char*>(at(D, d, batch));
    const bool ta = desc.ta != CUBLAS_OP_N, tb = desc.tb != CUBLAS_OP_N;
    std::vector<float> left(static_cast<size_t>(MB * k + 16)), right(static_cast<size_t>(k * ((n + NB - 1) / NB * NB) + 16));
    // right: blocks of NB columns, [k][NB]
    for (int64_t j0 = 0; j0 < n; j0 += NB)
      for (int64_t j = j0; j < std::min(n, j0 + NB); ++j)
        for (int64_t p = 0; p < k; ++p)
          right[static_cast<size_t>(j0 * k + p * NB + j - j0)] = tb ? get(pb, b, j, p) : get(pb, b, p, j);
    for (int64_t i0 = 0; i0 < m; i0 += MB) {
      const int64_t rows = std::min(MB, m - i0);
      if (ta) {
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t p = 0; p < k; ++p) left[static_cast<size_t>(p * MB + i)] = get(pa, a, p, i0 + i);
      } else {
        for (int64_t p = 0; p < k; ++p)
          for (int64_t i = 0; i < rows; ++i) left[static_cast<size_t>(p * MB + i)] = get(pa, a, i0 + i, p);
      }
      for (int64_t j0 = 0; j0 < n; j0 += NB) {
        Vec sum[NB][MB / 16];
        for (auto& column : sum)
          for (auto& v : column) v = Vec{};
        const float* r = right.data() + j0 * k;
        for (int64_t p = 0; p < k; ++p) {
          Vec l[MB / 16];
          std::memcpy(l, left.data() + p * MB, sizeof l);
          for (int64_t j = 0; j < NB; ++j)
            for (int64_t v = 0; v < MB / 16; ++v) sum[j][v] += l[v] * r[p * NB + j];
        }
        for (int64_t j = 0; j < std::min(NB, n - j0); ++j)
          for (int64_t i = 0; i < rows; ++i) {
            float x = alpha * reinterpret_cast<const float*>(sum[j])[i];
            if (beta != 0) x += beta * get(pc, c, i0 + i, j0 + j);
            store(pd + ((i0 + i) + (j0 + j) * d.leading) * size_of(d.type), d.type, x);
          }
      }
    }
  }
};

template <typename T>
cublasStatus_t put(T& to, const void* from, size_t size) {
  if (size < sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t fits(const Desc& d, const Layout& a, const Layout& b, const Layout& c, const Layout& out, int64_t& m,
                    int64_t& n, int64_t& k) {
  const bool ta = d.ta != CUBLAS_OP_N, tb = d.tb != CUBLAS_OP_N;
  m = static_cast<int64_t>(out.rows), n = static_cast<int64_t>(out.columns);
  k = static_cast<int64_t>(ta ? a.rows : a.columns);
  if (static_cast<int64_t>(ta ? a.columns : a.rows) != m || static_cast<int64_t>(tb ? b.columns : b.rows) != k ||
      static_cast<int64_t>(tb ? b.rows : b.columns) != n || c.rows != out.rows || c.columns != out.columns)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (a.batches != b.batches || a.batches != out.batches || c.batches != out.batches)
    return CUBLAS_STATUS_INVALID_VALUE;
  for (const Layout* l : {&a, &b, &c, &out})
    if (l->leading < static_cast<int64_t>(l->rows)) return CUBLAS_STATUS_INVALID_VALUE;
  if (d.compute != CUBLAS_COMPUTE_32F || d.scale != CUDA_R_32F || d.epilogue != CUBLASLT_EPILOGUE_DEFAULT)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!size_of(a.type) || a.type != b.type || c.type != out.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (out.type != CUDA_R_32F && out.type != a.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

#define AS(T, x) (*reinterpret_cast<T*>(x))
#define CAS(T, x) (*reinterpret_cast<const T*>(x))

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
API size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
API size_t cublasLtGetCudartVersion() { return 13000; }
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute, cudaDataType_t scale) {
  *d = reinterpret_cast<cublasLtMatmulDesc_t>(new Desc{compute, scale});
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  delete reinterpret_cast<Desc*>(d);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which,
                                                  const void* value, size_t size) {
  Desc& d = AS(Desc, desc);
  switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return put(d.ta, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return put(d.tb, value, size);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return put(d.pointer_mode, value, size);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
      return put(d.sms, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return put(d.epilogue, value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows,
                                              uint64_t columns, int64_t leading) {
  *l = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, leading});
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  delete reinterpret_cast<Layout*>(l);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                    cublasLtMatrixLayoutAttribute_t which, const void* value,
                                                    size_t size) {
  Layout& l = AS(Layout, layout);
  switch (which) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return put(l.batches, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return put(l.batch_stride, value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
  *p = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  delete reinterpret_cast<Preference*>(p);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                        cublasLtMatmulPreferenceAttributes_t which, const void* value,
                                                        size_t size) {
  Preference& p = AS(Preference, pref);
  switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return put(p.workspace, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return put(p.alignment[0], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return put(p.alignment[1], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return put(p.alignment[2], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return put(p.alignment[3], value, size);
    default:
      return CUBLAS_STATUS_SUCCESS;
  }
}
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                                  cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                  cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int wanted,
                                                  cublasLtMatmulHeuristicResult_t results[], int* count) {
  int64_t m, n, k;
  *count = 0;
  if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
  const cublasStatus_t s = fits(AS(Desc, desc), AS(Layout, a), AS(Layout, b), AS(Layout, c), AS(Layout, d), m, n, k);
  if (s != CUBLAS_STATUS_SUCCESS) return s;
  results[0] = {};
  const Algo algo;
  std::memcpy(&results[0].algo, &algo, sizeof algo);
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].wavesCount = 1;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                           const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result) {
  int64_t m, n, k;
  *result = {};
  result->algo = *algo;
  result->state = fits(AS(Desc, desc), AS(Layout, a), AS(Layout, b), AS(Layout, c), AS(Layout, d), m, n, k);
  return result->state;
}

namespace {
template <class F>
cublasStatus_t on_setting(Algo& algo, cublasLtMatmulAlgoConfigAttributes_t which, F&& f) {
  switch (which) {
    case CUBLASLT_ALGO_CONFIG_ID:
      return f(algo.id);
    case CUBLASLT_ALGO_CONFIG_TILE_ID:
      return f(algo.tile);
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM:
      return f(algo.splits);
    case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME:
      return f(algo.scheme);
    case CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING:
      return f(algo.swizzle);
    case CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION:
      return f(algo.custom);
    case CUBLASLT_ALGO_CONFIG_STAGES_ID:
      return f(algo.stages);
    case CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID:
      return f(algo.inner);
    case CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID:
      return f(algo.cluster);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}
}  // namespace

API cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                        cublasLtMatmulAlgoConfigAttributes_t which, void* out,
                                                        size_t size, size_t* written) {
  Algo a;
  std::memcpy(static_cast<void*>(&a), algo, sizeof a);
  return on_setting(a, which, [&](auto& field) {
    if (size < sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(out, &field, sizeof field);
    if (written) *written = sizeof field;
    return CUBLAS_STATUS_SUCCESS;
  });
}
API cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algo,
                                                        cublasLtMatmulAlgoConfigAttributes_t which, const void* in,
                                                        size_t size) {
  Algo a;
  std::memcpy(static_cast<void*>(&a), algo, sizeof a);
  const cublasStatus_t s = on_setting(a, which, [&](auto& field) { return put(field, in, size); });
  std::memcpy(algo, &a, sizeof a);
  return s;
}
API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* A,
                                  cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                                  const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                                  const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  auto w = std::make_unique<Work>();
  w->desc = AS(Desc, desc), w->a = AS(Layout, a), w->b = AS(Layout, b), w->c = AS(Layout, c), w->d = AS(Layout, d);
  if (const cublasStatus_t s = fits(w->desc, w->a, w->b, w->c, w->d, w->m, w->n, w->k); s != CUBLAS_STATUS_SUCCESS)
    return s;
  for (auto [p, l] : {std::pair<const void*, const Layout*>{A, &w->a}, {B, &w->b}, {D, &w->d}})
    if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(size_of(l->type))) return CUBLAS_STATUS_INVALID_VALUE;
  w->A = A, w->B = B, w->C = C, w->D = D;
  w->alpha_at = static_cast<const float*>(alpha), w->beta_at = static_cast<const float*>(beta);
  if (w->desc.pointer_mode == CUBLASLT_POINTER_MODE_HOST)
    w->alpha = *w->alpha_at, w->beta = *w->beta_at;
  else if (w->desc.pointer_mode != CUBLASLT_POINTER_MODE_DEVICE)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  // A real stream's handle is its table; the null streams' comes from the environment.
  void* handle = stream;
  if (reinterpret_cast<uintptr_t>(stream) < 16) {
    const char* text = std::getenv("EMU_CUDART");
    handle = text ? reinterpret_cast<void*>(std::strtoull(text, nullptr, 16)) : nullptr;
  }
  auto* table = static_cast<emu::StreamAbi*>(handle);
  if (!table || table->magic != emu::StreamAbi::kMagic) return CUBLAS_STATUS_NOT_INITIALIZED;
  w->holds = table->holds;
  const int e = table->submit(stream, "cublasLtMatmul", [](void* data) { return static_cast<Work*>(data)->run(); },
                              w.release(), [](void* data) { delete static_cast<Work*>(data); });
  return e == 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
