// What: one register-blocked product under three layouts.
// Why: a block of rows times a panel of columns keeps its sums in registers.
// Never: splits a sum between threads.
#include "train/product.hpp"

#include <algorithm>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TALEA_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TALEA_CLONES
#endif

namespace talea::train {
namespace {

constexpr int64_t block_rows = 4;
constexpr int64_t panel_columns = 32;
constexpr int64_t serial_work = int64_t{1} << 21;  // below this, starting threads costs more

// a[i, k] = a.data[i * a.row + k * a.column]
template <typename T>
struct Strided {
  const T* data;
  int64_t row, column;
};

// Full blocks have constant bounds, so that the sums stay in registers.
#define TALEA_BLOCK(ROWS)                                  \
  T sum[ROWS][panel_columns] = {};                         \
  for (int64_t p = 0; p < k; ++p)                          \
    for (int64_t i = 0; i < ROWS; ++i) {                   \
      const T value = a.data[i * a.row + p * a.column];    \
      for (int64_t j = 0; j < panel_columns; ++j)          \
        sum[i][j] += value * panel[p * panel_columns + j]; \
    }                                                      \
  for (int64_t i = 0; i < ROWS; ++i)                       \
    for (int64_t j = 0; j < columns; ++j)                  \
      c[i * n + j] = accumulate ? c[i * n + j] + sum[i][j] : sum[i][j];

template <typename T>
struct Block {
  const T* panel;
  int64_t k, n, columns;
  bool accumulate;
};

TALEA_CLONES void block_f32(float* c, Strided<float> a, const Block<float>& b, int64_t rows) {
  using T = float;
  const int64_t k = b.k, n = b.n, columns = b.columns;
  const bool accumulate = b.accumulate;
  const float* panel = b.panel;
  if (rows == block_rows) {
    TALEA_BLOCK(block_rows)
    return;
  }
  for (int64_t r = 0; r < rows; ++r, c += n, a.data += a.row) {
    TALEA_BLOCK(1)
  }
}

TALEA_CLONES void block_f64(double* c, Strided<double> a, const Block<double>& b, int64_t rows) {
  using T = double;
  const int64_t k = b.k, n = b.n, columns = b.columns;
  const bool accumulate = b.accumulate;
  const double* panel = b.panel;
  if (rows == block_rows) {
    TALEA_BLOCK(block_rows)
    return;
  }
  for (int64_t r = 0; r < rows; ++r, c += n, a.data += a.row) {
    TALEA_BLOCK(1)
  }
}

void block(float* c, Strided<float> a, const Block<float>& b, int64_t rows) {
  block_f32(c, a, b, rows);
}
void block(double* c, Strided<double> a, const Block<double>& b, int64_t rows) {
  block_f64(c, a, b, rows);
}

// b[p, j] = b.data[p * b.row + j * b.column], copied into panels of panel_columns, padded with 0.
template <typename T>
void pack(T* panel, Strided<T> b, int64_t k, int64_t columns) {
  for (int64_t p = 0; p < k; ++p)
    for (int64_t j = 0; j < panel_columns; ++j)
      panel[p * panel_columns + j] = j < columns ? b.data[p * b.row + j * b.column] : T(0);
}

template <typename T>
void product(T* c, Strided<T> a, Strided<T> b, Extents e, bool accumulate, int threads) {
  const int64_t panels = (e.n + panel_columns - 1) / panel_columns;
  const bool serial = threads == 1 || e.m * e.n * e.k < serial_work;
  auto panel_product = [&](int64_t q) {
    thread_local std::vector<T> panel;
    panel.resize(static_cast<size_t>(e.k * panel_columns));
    const int64_t first = q * panel_columns, columns = std::min(panel_columns, e.n - first);
    pack(panel.data(), {b.data + first * b.column, b.row, b.column}, e.k, columns);
    const Block<T> part{panel.data(), e.k, e.n, columns, accumulate};
    for (int64_t i = 0; i < e.m; i += block_rows)
      block(c + i * e.n + first, {a.data + i * a.row, a.row, a.column}, part,
            std::min(block_rows, e.m - i));
  };
  if (serial) {
    for (int64_t q = 0; q < panels; ++q) panel_product(q);
  } else if (threads > 1) {
#pragma omp parallel for num_threads(threads)
    for (int64_t q = 0; q < panels; ++q) panel_product(q);
  } else {
#pragma omp parallel for
    for (int64_t q = 0; q < panels; ++q) panel_product(q);
  }
}

}  // namespace

template <typename T>
void product_nt(T* c, const T* a, const T* b, Extents e, bool accumulate, int threads) {
  product<T>(c, {a, e.k, 1}, {b, 1, e.k}, e, accumulate, threads);
}
template <typename T>
void product_nn(T* c, const T* a, const T* b, Extents e, bool accumulate, int threads) {
  product<T>(c, {a, e.k, 1}, {b, e.n, 1}, e, accumulate, threads);
}
template <typename T>
void product_tn(T* c, const T* a, const T* b, Extents e, bool accumulate, int threads) {
  product<T>(c, {a, 1, e.m}, {b, e.n, 1}, e, accumulate, threads);
}

#define TALEA_INSTANTIATE(T)                                            \
  template void product_nt(T*, const T*, const T*, Extents, bool, int); \
  template void product_nn(T*, const T*, const T*, Extents, bool, int); \
  template void product_tn(T*, const T*, const T*, Extents, bool, int);
TALEA_INSTANTIATE(float)
TALEA_INSTANTIATE(double)

}  // namespace talea::train
