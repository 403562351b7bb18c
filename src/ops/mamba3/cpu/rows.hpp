// What: what happens to rows of q, k and their gradients on vectors: rotation, masks, transposes.
// Why: products take panels (device/cpu/tile_product.hpp); these bring rows there and back.
// Never: an order that depends on threads.
#pragma once

#include <cstdint>

namespace talea::mamba3::cpu {

// Rows of a chunk are (token, r). A matrix "in panels" has element (i, j) at
// j / lanes * rows * lanes + i * lanes + j % lanes, with `rows` what is made room for.
struct Rotation {
  const float *cosine = nullptr, *sine = nullptr;  // [tokens, stride]: x' = x c + partner(x) s
  int64_t stride = 0, columns = 0;                 // columns: N
  bool halves = false;
};

// x + bias, turned, into panels. Rows behind the last one of the chunk: zeros up to a whole 16.
struct RotateJob {
  Rotation rotation{};
  int64_t tokens = 0, rank = 1, padded = 0, room = 0;  // padded: N up to 16; room: rows of panels
  const float* x = nullptr;                            // [tokens R, padded]
  const float* bias = nullptr;                         // [R, padded] or null
  float* to = nullptr;
  float* scratch = nullptr;  // 2 * (padded + 32)
};
void rotate_rows(const RotateJob& job);

// Gradients of turned rows: what they add to the token's turn and to the decay's gradient; then
// turned back, summed for the bias.
struct TurnBackJob {
  Rotation rotation{};
  int64_t tokens = 0, rank = 1, padded = 0, room = 0;
  const float* x = nullptr;      // the turned rows, in panels
  float* gradient = nullptr;     // [tokens R, padded]; on return turned back
  const float* extra = nullptr;  // [R, padded] added to the last token before it is turned back
  float sign = 1;                // of dot
  float* turn = nullptr;         // [tokens, padded] +=: u g_w in column u, w g_u in column w
  double* dot = nullptr;         // [tokens] += sign * <x, gradient>
  float* bias = nullptr;         // [R, padded] +=
  float* scratch = nullptr;      // 2 * (padded + 32)
};
void turn_back(const TurnBackJob& job);

// What a matrix of scores (rows of the chunk) becomes under weights of token pairs:
// to = from * weight where the column's token is not later than the row's, else 0.
struct MaskJob {
  int64_t tokens = 0, rank = 1, room = 0;
  const float* decay = nullptr;  // [tokens, decay_stride]: of decay_matrix()
  int64_t decay_stride = 0;
  const float* scale = nullptr;  // [tokens] of the column's token, or null: 1
  const float* same = nullptr;   // [tokens] within a token, or null: 0
  float diagonal = 0;            // added to the diagonal
  const float* from = nullptr;   // in panels
  float* to = nullptr;           // in panels
  float* scratch = nullptr;      // room
};
void mask(const MaskJob& job);

// Keys' gradients: ds of each token, and dk = s a + gamma (same-token block of W)^T q.
struct KeyJob {
  int64_t tokens = 0, rank = 1, padded = 0, room = 0;
  const float *q = nullptr, *k = nullptr, *w = nullptr;  // in panels
  const float *s = nullptr, *gamma = nullptr;            // [tokens]
  float* a = nullptr;                                    // [tokens R, padded]; on return dk
  float* ds = nullptr;                                   // [tokens]
};
void key_rows(const KeyJob& job);

// In panels both: to = transposed from. rows, columns: whole 16s; room: of the panels of `from`;
// those of `to` have `columns` rows.
void transpose(const float* from, int64_t rows, int64_t columns, int64_t room, float* to);

// Row i times factor[i]; in place in rows of `stride`, or from panels to panels.
void scale_rows(float* x, int64_t rows, int64_t stride, const float* factor);
void scale_panels(const float* from, int64_t rows, int64_t columns, int64_t room,
                  const float* factor, float* to);
// [rows, padded] with each row the same factors, into panels; rows behind are zeros up to 16.
// factor: [rank, padded] of row i % rank, or null; source row i / rank.
void spread_rows(const float* from, int64_t tokens, int64_t rank, int64_t padded, int64_t room,
                 const float* factor, float* to);
void panels_of(const float* from, int64_t rows, int64_t padded, int64_t room, float* to);
// to = factor before + own: how a state passes a chunk. `to` may be `before` or `own`.
void join(const float* before, float factor, const float* own, int64_t n, float* to);

// Of two states [N, P] in panels: sum of products, and for each column n of a pair the sum over P
// of h_u e_w (column u), h_w e_u (column w); 0 in columns of no pair. `turn` has N numbers.
struct AnchorJob {
  const float *h = nullptr, *e = nullptr;
  int64_t columns = 0, room = 0, values = 0, pairs = 0;  // N, N up to 16, P up to 16, A
  bool halves = false;
  float* turn = nullptr;
};
double anchor(const AnchorJob& job);

// to[i] = sum over j, ascending, of rows[j][i].
void sum_rows(const float* const* rows, int64_t count, int64_t n, float* to);
void add_to_fp64(const float* from, int64_t n, double* to);

}  // namespace talea::mamba3::cpu
