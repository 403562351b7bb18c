// What: matrix products through cuBLASLt, with the library found when the first product is asked.
// Why: one binary starts without CUDA, and a process that already holds a cuBLASLt shares it.
// Never: allocates device memory, synchronises, splits the inner dimension, or times algorithms.
#include "device/common/cublaslt.hpp"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <vector>

#include "core/fail.hpp"

namespace talea::device {
namespace {

// The functions in use; X(member, symbol).
#define TALEA_CUBLASLT_FUNCTIONS(X)                       \
  X(create, cublasLtCreate)                               \
  X(version, cublasLtGetVersion)                          \
  X(desc_create, cublasLtMatmulDescCreate)                \
  X(desc_set, cublasLtMatmulDescSetAttribute)             \
  X(desc_destroy, cublasLtMatmulDescDestroy)              \
  X(layout_create, cublasLtMatrixLayoutCreate)            \
  X(layout_destroy, cublasLtMatrixLayoutDestroy)          \
  X(layout_set, cublasLtMatrixLayoutSetAttribute)         \
  X(preference_create, cublasLtMatmulPreferenceCreate)    \
  X(preference_set, cublasLtMatmulPreferenceSetAttribute) \
  X(preference_destroy, cublasLtMatmulPreferenceDestroy)  \
  X(heuristic, cublasLtMatmulAlgoGetHeuristic)            \
  X(algo_check, cublasLtMatmulAlgoCheck)                  \
  X(algo_get, cublasLtMatmulAlgoConfigGetAttribute)       \
  X(algo_set, cublasLtMatmulAlgoConfigSetAttribute)       \
  X(matmul, cublasLtMatmul)

struct Library {
#define TALEA_MEMBER(member, symbol) decltype(&symbol) member = nullptr;
  TALEA_CUBLASLT_FUNCTIONS(TALEA_MEMBER)
#undef TALEA_MEMBER
  std::string problem;
};

constexpr const char* sonames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

void* open_library() {
  for (const char* name : sonames)  // one that the process holds already
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return handle;
  for (const char* name : sonames)
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  return nullptr;
}

Library load() {
  Library l;
  void* handle = open_library();
  if (!handle) {
    l.problem = "neither libcublasLt.so.13 nor libcublasLt.so.12 can be loaded";
    return l;
  }
#define TALEA_RESOLVE(member, symbol)                                      \
  l.member = reinterpret_cast<decltype(l.member)>(dlsym(handle, #symbol)); \
  if (!l.member) l.problem = "libcublasLt has no function " #symbol;
  TALEA_CUBLASLT_FUNCTIONS(TALEA_RESOLVE)
#undef TALEA_RESOLVE
  return l;
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void check(cublasStatus_t status, const char* what) {
  require(status == CUBLAS_STATUS_SUCCESS, ErrorKind::runtime, "{}: cuBLASLt status {}", what,
          static_cast<int>(status));
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

// The descriptors of one product; the sizes may be replaced by the canonical ones.
class Described {
 public:
  Described(const Product& p, bool canonical) {
    const Library& l = library();
    const int64_t n = canonical && p.canonical_n ? p.canonical_n : p.n;
    const int64_t k = canonical && p.canonical_k ? p.canonical_k : p.k;
    check(l.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "MatmulDescCreate");
    const cublasOperation_t ta = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t tb = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, ta);
    set(CUBLASLT_MATMUL_DESC_TRANSB, tb);
    if (p.device_scalars) {
      const cublasLtPointerMode_t mode = CUBLASLT_POINTER_MODE_DEVICE;
      set(CUBLASLT_MATMUL_DESC_POINTER_MODE, mode);
    }
    if (p.multiprocessors > 0) {
      const int32_t count = p.multiprocessors;
      set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, count);
    }
    layout(&a, p.in, p.transpose_a ? k : p.m, p.transpose_a ? p.m : k, p.lda);
    layout(&b, p.in, p.transpose_b ? n : k, p.transpose_b ? k : n, p.ldb);
    layout(&c, p.out, p.m, n, p.ldc);
    const int64_t batches = canonical && p.canonical_batches ? p.canonical_batches : p.batches;
    if (p.batches == 1 && p.canonical_batches == 0) return;
    batch(a, batches, p.stride_a);
    batch(b, batches, p.stride_b);
    batch(c, batches, p.stride_c);
  }
  ~Described() {
    const Library& l = library();
    for (cublasLtMatrixLayout_t each : {a, b, c})
      if (each) l.layout_destroy(each);
    if (desc) l.desc_destroy(desc);
  }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;

  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t which, const T& value) {
    check(library().desc_set(desc, which, &value, sizeof(value)), "MatmulDescSetAttribute");
  }
  static void layout(cublasLtMatrixLayout_t* out, DType dtype, int64_t rows, int64_t columns,
                     int64_t leading) {
    check(library().layout_create(out, type_of(dtype), static_cast<uint64_t>(rows),
                                  static_cast<uint64_t>(columns), leading),
          "MatrixLayoutCreate");
  }
  static void batch(cublasLtMatrixLayout_t of, int64_t batches, int64_t stride) {
    const auto count = static_cast<int32_t>(batches);
    const auto set = [&](cublasLtMatrixLayoutAttribute_t which, const auto& value) {
      check(library().layout_set(of, which, &value, sizeof(value)), "MatrixLayoutSetAttribute");
    };
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }
};

using Proposals = std::vector<cublasLtMatmulHeuristicResult_t>;

bool whole_inner_dimension(const cublasLtMatmulAlgo_t& algo) {
  int32_t splits = 1;
  uint32_t scheme = 0;
  size_t written = 0;
  const Library& l = library();
  l.algo_get(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof(splits), &written);
  l.algo_get(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme), &written);
  return splits >= 0 && splits <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

template <typename T>
T setting(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t which) {
  T value = 0;
  size_t written = 0;
  library().algo_get(&algo, which, &value, sizeof(value), &written);
  return value;
}

bool preferred_tile(const cublasLtMatmulAlgo_t& algo, Product::Tiles tiles) {
  const auto tile = setting<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
  if (tiles == Product::Tiles::narrow) return tile == CUBLASLT_MATMUL_TILE_128x160;
  if (tiles == Product::Tiles::square) return tile == CUBLASLT_MATMUL_TILE_128x128;
  if (tiles == Product::Tiles::large) return tile == CUBLASLT_MATMUL_TILE_256x128;
  switch (tile) {
    case CUBLASLT_MATMUL_TILE_128x128:
    case CUBLASLT_MATMUL_TILE_136x128:
    case CUBLASLT_MATMUL_TILE_144x128:
    case CUBLASLT_MATMUL_TILE_152x128:
    case CUBLASLT_MATMUL_TILE_160x128:
    case CUBLASLT_MATMUL_TILE_128x136:
    case CUBLASLT_MATMUL_TILE_128x144:
    case CUBLASLT_MATMUL_TILE_128x152:
    case CUBLASLT_MATMUL_TILE_128x160:
      return true;
    default:
      return false;
  }
}

bool of_waves(Product::Tiles tiles) {
  return tiles != Product::Tiles::library && tiles != Product::Tiles::middle;
}

bool small_cluster(const cublasLtMatmulAlgo_t& algo) {
  switch (setting<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)) {
    case CUBLASLT_CLUSTER_SHAPE_1x1x1:
    case CUBLASLT_CLUSTER_SHAPE_2x1x1:
    case CUBLASLT_CLUSTER_SHAPE_1x2x1:
      return true;
    default:
      return false;
  }
}

uint32_t wanted_tile(Product::Tiles tiles) {
  switch (tiles) {
    case Product::Tiles::large:
      return CUBLASLT_MATMUL_TILE_256x128;
    case Product::Tiles::narrow:
      return CUBLASLT_MATMUL_TILE_128x160;
    default:
      return CUBLASLT_MATMUL_TILE_128x128;
  }
}

// The proposals turned into the preferred tile in clusters of two, where the library runs that too.
Proposals paired(cublasLtHandle_t handle, const Product& p, const Described& d,
                 const Proposals& found) {
  Proposals pairs;
  const uint32_t tile = wanted_tile(p.tiles), plain_order = 1;
  const auto pair = static_cast<uint16_t>(CUBLASLT_CLUSTER_SHAPE_2x1x1);
  const auto set = [](cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t which,
                      const auto& value) {
    return library().algo_set(&algo, which, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  };
  for (cublasLtMatmulHeuristicResult_t each : found) {
    const bool same_tile = preferred_tile(each.algo, p.tiles);
    if (!set(each.algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, pair)) continue;
    if (!same_tile && (!set(each.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, tile) ||
                       !set(each.algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, plain_order)))
      continue;
    cublasLtMatmulHeuristicResult_t fits = each;
    if (library().algo_check(handle, d.desc, d.a, d.b, d.c, d.c, &each.algo, &fits) ==
            CUBLAS_STATUS_SUCCESS &&
        fits.workspaceSize <= static_cast<size_t>(p.workspace_bytes))
      pairs.push_back(each);
    if (!pairs.empty()) break;
  }
  return pairs;
}

// Best first: the preferred tile, and of those that have to fill waves the small clusters.
void order(cublasLtHandle_t handle, const Product& p, const Described& d, Proposals& found) {
  if (p.tiles == Product::Tiles::library) return;
  const auto rank = [&](const cublasLtMatmulHeuristicResult_t& r) {
    if (!preferred_tile(r.algo, p.tiles)) return 2;
    const auto tile = setting<uint32_t>(r.algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
    // Of the middle tiles the library may place 128 x 128 anywhere; it is rarely the slower one.
    if (p.tiles == Product::Tiles::middle && tile != CUBLASLT_MATMUL_TILE_128x128) return 1;
    return small_cluster(r.algo) ? 0 : 1;
  };
  const auto sort = [&] {
    std::stable_sort(found.begin(), found.end(),
                     [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  };
  sort();
  if (!of_waves(p.tiles) || rank(found.front()) == 0) return;
  const Proposals pairs = paired(handle, p, d, found);
  found.insert(found.begin(), pairs.begin(), pairs.end());
  sort();
}

Proposals propose(cublasLtHandle_t handle, const Product& p, const Described& d) {
  const Library& l = library();
  cublasLtMatmulPreference_t preference = nullptr;
  check(l.preference_create(&preference), "MatmulPreferenceCreate");
  auto set = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    check(l.preference_set(preference, which, &value, sizeof(value)),
          "MatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(p.workspace_bytes));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.alignment_a));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.alignment_b));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.alignment_c));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.alignment_c));
  Proposals found(32);
  int count = 0;
  const cublasStatus_t status = l.heuristic(handle, d.desc, d.a, d.b, d.c, d.c, preference,
                                            static_cast<int>(found.size()), found.data(), &count);
  l.preference_destroy(preference);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "MatmulAlgoGetHeuristic");
  found.resize(static_cast<size_t>(count));
  std::erase_if(found, [](const cublasLtMatmulHeuristicResult_t& r) {
    return r.state != CUBLAS_STATUS_SUCCESS || !whole_inner_dimension(r.algo);
  });
  require(!found.empty(), ErrorKind::unavailable,
          "cuBLASLt offers no {} product {} x {} x {} with leading dimensions {}, {}, {} and "
          "addresses aligned to {}, {}, {} bytes",
          name_of(p.in), p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.alignment_a, p.alignment_b,
          p.alignment_c);
  order(handle, p, d, found);
  return found;
}

// What is kept for the life of the process: a handle a device, the proposals a kind of product.
class Kept {
 public:
  cublasLtHandle_t handle(int device) {
    const std::lock_guard lock(mutex_);
    cublasLtHandle_t& h = handles_[device];
    if (!h) {
      const RelaxedCapture relaxed;
      check(library().create(&h), "cublasLtCreate");
    }
    return h;
  }

  const Proposals& proposals(int device, cublasLtHandle_t h, Product p) {
    if (p.canonical_n) p.n = p.canonical_n;
    if (p.canonical_k) p.k = p.canonical_k;
    if (p.canonical_batches) p.batches = p.canonical_batches;
    const std::lock_guard lock(mutex_);
    const auto key = std::make_pair(device, p);
    auto known = proposals_.find(key);
    if (known == proposals_.end()) {
      const RelaxedCapture relaxed;
      known = proposals_.emplace(key, propose(h, p, Described(p, true))).first;
    }
    return known->second;
  }

 private:
  std::mutex mutex_;
  std::map<int, cublasLtHandle_t> handles_;
  std::map<std::pair<int, Product>, Proposals> proposals_;
};

// Leaked on purpose: the driver may be gone when static objects are destroyed.
Kept& kept() {
  static Kept* all = new Kept;
  return *all;
}

int current_device() {
  int device = 0;
  device::check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

cublasStatus_t matmul(cublasLtHandle_t handle, const Product& p, const Described& d,
                      const cublasLtMatmulAlgo_t& algo, const ProductBuffers& x,
                      cudaStream_t stream) {
  return library().matmul(handle, d.desc, x.alpha, x.a, d.a, x.b, d.b, x.beta, x.c, d.c, x.c, d.c,
                          &algo, x.workspace, static_cast<size_t>(p.workspace_bytes), stream);
}

}  // namespace

const std::string& cublaslt_problem() { return library().problem; }

std::string cublaslt_version() {
  if (!library().problem.empty()) return "";
  const size_t v = library().version();
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

int alignment_of(const void* address, int64_t leading, DType dtype) {
  const auto bits = static_cast<uint64_t>(leading * size_of(dtype)) |
                    static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address)) | uint64_t{16};
  return 1 << std::countr_zero(bits);
}

void run_product(const Product& p, const ProductBuffers& buffers, cudaStream_t stream) {
  require(library().problem.empty(), ErrorKind::unavailable, "{}", library().problem);
  const int device = current_device();
  const cublasLtHandle_t handle = kept().handle(device);
  const Described d(p, false);
  for (const auto& proposal : kept().proposals(device, handle, p)) {
    cublasLtMatmulHeuristicResult_t fits;
    if (library().algo_check(handle, d.desc, d.a, d.b, d.c, d.c, &proposal.algo, &fits) !=
            CUBLAS_STATUS_SUCCESS ||
        fits.workspaceSize > static_cast<size_t>(p.workspace_bytes))
      continue;
    const cublasStatus_t status = matmul(handle, p, d, proposal.algo, buffers, stream);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) continue;
    return check(status, "cublasLtMatmul");
  }
  fail(ErrorKind::unavailable, "no cuBLASLt algorithm of {} x {} x {} fits {} x {} x {}", p.m,
       p.canonical_n, p.canonical_k, p.m, p.n, p.k);
}

int proposed_algorithms(const Product& p) {
  const int device = current_device();
  return static_cast<int>(kept().proposals(device, kept().handle(device), p).size());
}

std::string proposed_name(const Product& p, int which) {
  const int device = current_device();
  const cublasLtMatmulAlgo_t& algo =
      kept().proposals(device, kept().handle(device), p).at(static_cast<size_t>(which)).algo;
  auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) {
    uint32_t value = 0;
    size_t written = 0;
    library().algo_get(&algo, attribute, &value,
                       attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID ||
                               attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID
                           ? sizeof(uint16_t)
                           : sizeof(value),
                       &written);
    return value;
  };
  return fmt::format(
      "algo {} tile {} stages {} cluster {} swizzle {} custom {}", get(CUBLASLT_ALGO_CONFIG_ID),
      get(CUBLASLT_ALGO_CONFIG_TILE_ID), get(CUBLASLT_ALGO_CONFIG_STAGES_ID),
      get(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID), get(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
      get(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION));
}

void run_proposed(const Product& p, int which, const ProductBuffers& buffers, cudaStream_t stream) {
  const int device = current_device();
  const cublasLtHandle_t handle = kept().handle(device);
  const Described d(p, false);
  check(
      matmul(handle, p, d, kept().proposals(device, handle, p).at(static_cast<size_t>(which)).algo,
             buffers, stream),
      "cublasLtMatmul");
}

}  // namespace talea::device
