// What: what the kernels of lane cuda are given: sizes, views of every tensor, places of buffers.
// Why: plain values, passed to a kernel as they are; the same code reads them on a host in a test.
// Never: owns memory.
#pragma once

#include <cstdint>

#include "talea/tensor.hpp"

namespace talea::mamba3::cuda {

// Strides count elements; an absent tensor has no address.
struct View {
  void* data = nullptr;
  int64_t stride[5] = {0, 0, 0, 0, 0};
  DType dtype = DType::f32;
};

struct StateViews {
  View angle, ssm, k, v;
};

struct GradientViews {
  View q, k, v, z, adt, dt, trap, angles;
  View q_bias, k_bias, d, mimo_v, mimo_z, mimo_out, norm_weight;
  StateViews initial;
};

struct Sizes {
  int64_t batch = 0, tokens = 0, sequences = 0, state_rows = 0;
  int heads = 0, groups = 0, heads_per_group = 1, head_offset = 0;
  int rank = 1, columns = 0, values = 0, pairs = 0;  // R, N, P, A
  bool halves = false, head_norm = false, reduce = true, packed = false, step = false;
  bool backward = false, sum_angles = false, accumulate = false;
  bool even_rows = false;  // two neighbours of q and k are one load
  float eps = 0;
  unsigned reciprocal = 65537;  // of R: (i * reciprocal) >> 16 is i / R of a row of a chunk
  int chunk = 1;                // C tokens
  int64_t segment = 1;          // J chunks between two kept states, or those of a round
  int64_t kept_every = 1;       // J chunks between two states of `saved`
};

// Packed sequences as lane sm90 takes them: the chunks of all, numbered one sequence after another,
// go in rounds. What a round has of a sequence is a stretch.
struct Stretch {
  int32_t sequence = 0, first = 0, count = 0;  // chunks of the sequence
  int32_t number = 0;                          // of its first chunk in the pack
  int32_t begin = 0, tokens = 0;               // of the sequence
  int32_t round = 0, unused = 0;
};
struct PackedChunk {
  int32_t sequence = 0, chunk = 0;  // of the sequence
  int32_t begin = 0, tokens = 0;    // of the sequence
};
struct Round {
  int32_t chunk = 0, stretch = 0;  // its first
  int32_t state = -1;              // place of the state that its first stretch goes on from
};
// Written on the device ahead of all else; the host knows bounds alone.
struct PackRounds {
  Round* rounds = nullptr;        // [most_rounds + 1]
  Stretch* stretches = nullptr;   // [most_stretches] in order
  Stretch* by_length = nullptr;   // the same, the longest of each round first
  PackedChunk* chunks = nullptr;  // [most_chunks]
  int32_t* before = nullptr;      // [n + 1] chunks before each sequence
  int64_t most_rounds = 0, most_stretches = 0, most_chunks = 0, most_states = 0;
  int32_t room = 0;     // chunks of a round
  int32_t abreast = 0;  // stretches of a round, at most
  int32_t every = 1;    // a sequence is cut at a multiple of as many chunks
  int32_t group = 0;    // rounds whose states are kept at a time, beside those before each group
};

// What the kernels of a call share. Tensors have their full number of axes (lane.hpp).
struct Args {
  Sizes size;
  View q, k, v, z, adt, dt, trap, angles, q_bias, k_bias, d, mimo_v, mimo_z, mimo_out, norm_weight;
  View d_out, out;
  StateViews initial, last;  // last: final states of forward, their gradients in backward
  GradientViews grad;
  float* saved = nullptr;         // checkpoints: written by forward, read by backward
  const int64_t* ends = nullptr;  // [n + 1] tokens of packed sequences; a step: the row of each
  const int64_t* kept = nullptr;  // [n + 1] packed: checkpoints of the sequences before
  PackRounds pack;                // where packed sequences go in rounds; `segment` is their room
  const uint64_t* turns_before = nullptr;  // [n, H, A], of the pieces that other ranks hold
};

// Where an array of a chunk lies: bytes from the block's shared memory, or, where negative, from
// the scratch of the block in the workspace.
struct Place {
  int64_t at = 0;
};

// The arrays of a chunk. M, Np, Pp: its rows, N and P, each up to 16. Operands have the type that
// is multiplied; `wide` are fp32. Rows are filled up so that a warp meets every bank.
struct ChunkPlaces {
  Place tokens, turns, angle, tainted;  // [12, C + 1]; [A] now, [C, A] of tokens, [A] flags
  Place parameters, decays, held;       // wide: of the head, [C, C], [P + N] of the held-over token
  Place q, k, v, scaled, seen, state;   // [M, Np] [M, Np] [M, Pp] [M, Pp] [M, M] [Pp, Np]
  Place y, wide_state;                  // wide [M, Pp], [Pp, Np]
  Place sums;                           // reductions
  Place d_y, weights;                   // backward: [M, Pp] dO, [M, M]
  Place scores, products, gradient;     // wide [M, M], [M, M]; [M, Np] in the place of both
  Place given, turn, row_sums;          // wide [C, A], [C, A], [10, M]
  Place partial;                        // wide, sums over parts of the tokens
  Place upstream, wide_upstream;        // [Pp, Np] E
  int64_t shared_bytes = 0, scratch_bytes = 0;
  int rows = 0, padded_columns = 0, padded_values = 0;  // M, Np, Pp
  int pad = 0;                                          // elements behind a row of operands
};

// What backward keeps of a head of a sequence from launch to launch.
struct Pending {
  double ddt = 0, dgamma = 0;
  float lambda = 0, other = 0, dt = 0;
  int waits = 0;
};

// The same where chunks are taken side by side: what a chunk's first token waits for, and what its
// last token has for the chunk behind.
struct Edge {
  double ddt = 0, dgamma = 0;
  float lambda = 0, other = 0, dt = 0;
  float last = 0;

  constexpr Pending first() const { return {ddt, dgamma, lambda, other, dt}; }
  constexpr void put_first(const Pending& x) {
    ddt = x.ddt, dgamma = x.dgamma, lambda = x.lambda, other = x.other, dt = x.dt;
  }
};
static_assert(sizeof(Edge) == 32);

// Of chunks side by side: tokens of a piece, whose turns are summed ahead; pairs that are turned,
// of A; bytes of what the tokens of a chunk step by.
constexpr int64_t turn_tokens(int64_t chunk) { return chunk < 16 ? chunk : 16; }
constexpr int64_t turned_pairs(int64_t A) { return A <= 32 ? 32 : 64; }
constexpr int64_t chunk_step_bytes(int64_t tokens) { return 44 * tokens + 16; }

// Biases, projections and the skip of a head in fp32.
constexpr int64_t head_parameter_count(int64_t rank, int64_t columns, int64_t values) {
  return rank * (2 * columns + 3 * values) + 4;
}

// Whether two whole heads have room in the shared memory of a block of the gradients, which then
// forms operands ahead and sums over the heads of a part (lane sm90).
constexpr bool has_two_heads(int64_t rank, int64_t pairs) { return rank <= 8 && pairs <= 32; }

struct UnitBuffers {
  float* states = nullptr;    // [units, segments, Pp, Np] before each segment; dense: by segment
  uint64_t* turns = nullptr;  // [units, segments, A]; of forward, behind all chunks: [units, A]
  int* taints = nullptr;      // the same
  void* inner = nullptr;      // [units, J + 1, Pp, Np] of the segment at work, operands
  uint64_t* inner_turns = nullptr;
  int* inner_taints = nullptr;
  float* upstream = nullptr;  // [units, Pp, Np] E
  // [units, 2, A]: first anchor, turn of what lies behind. Chunks side by side: [n, H, A] of that.
  float* ends = nullptr;
  Pending* pending = nullptr;          // [units]
  double* parameters = nullptr;        // [units, parameter_count]
  float *dq = nullptr, *dk = nullptr;  // [sequences of a wave, tokens of a slice, R, H, N]
  float* dangles = nullptr;            // [the same, H, A]
  // Where the chunks of a slice are taken side by side; dq, dk are then [the same, R, G, parts, N].
  void* inner_upstream = nullptr;     // [units, slice, Pp, Np] E behind each chunk, operands
  uint64_t* piece_turns = nullptr;    // [units, pieces, A] before each; no_turn: not finite
  uint64_t* segment_turns = nullptr;  // [units, segments, A]: piece_turns are of one segment
  float* token_turns = nullptr;       // [units, J, C, 32 or 64, 2] cosine and sine of each token
  char* token_steps = nullptr;        // [units, J] of chunk_step_bytes
  // The same, where those of the chunks behind are formed beside the chunks at work.
  float* token_turns_beside = nullptr;
  char* token_steps_beside = nullptr;
  float* rates = nullptr;            // [B, S, A] tanh of angles that heads share
  float* head_parameters = nullptr;  // [H] of head_parameter_count, as blocks read them
  Edge* edges = nullptr;             // [units, segments J]
  float* partial = nullptr;          // [units, slice, parameter_count]
  int parts = 0;                     // of the heads of a group; 0: chunks are taken in turn
  int64_t slice = 0;                 // chunks side by side
  // Forward, where stretches of a sequence go side by side.
  float* stretches = nullptr;  // [units, abreast, Pp, Np]: what each adds to a state
  int stretch = 0;             // chunks of each
  int abreast = 0;
  // The same, where states are handed.
  float* first_states = nullptr;  // of a pack: [abreast, H, Pp, Np] before a sequence of a round
  int32_t* ordinals = nullptr;    // of a pack: [most_chunks] of a chunk's stretch in its round
  float* last_keys = nullptr;     // [n, H, R, N]: gradient of the last key, turned back
};

// Sequences [first, last) at work, and which of their chunks.
struct Wave {
  int64_t first = 0, last = 0;
  int64_t segments = 1;  // that a unit has room for
  int64_t segment = 0;   // number of the one at work; of a pack: the round
  int64_t slice = 0;     // first chunk of the slice within the segment
  int64_t slice_chunks = 1;
};

}  // namespace talea::mamba3::cuda
