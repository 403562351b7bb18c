// What: the state-space scan of Mamba-3: forward, backward and the step of one token.
// Why: complex state by rotation, the trapezoidal rule and rank-R inputs, with every gradient, and
//      no tensor of [S, S], of rotated rows or of per-head gradients in memory.
// Never: casts an input in silence, clamps a decay, or falls back to another lane unseen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "talea/call.hpp"
#include "talea/communicator.hpp"
#include "talea/error.hpp"
#include "talea/tensor.hpp"

// B batch, S tokens, H heads, G groups of q and k (G divides H), N columns of q and k, P columns of
// v, R rank, A rotated pairs, n sequences. Formulas: docs/mamba3.md.
namespace talea::mamba3 {

enum class Pass : int32_t { forward = 0, backward = 1, step = 2 };
// interleaved: columns (2i, 2i + 1); halves: (i, i + N/2), N even; i < A. automatic: interleaved
// where q has no rank axis, halves where it has one. The result names the one used.
enum class RotaryPairs : int32_t { automatic = 0, interleaved = 1, halves = 2 };
// Entries of cu_seqlens and slots that cannot be. checked: Error naming entry and value before any
// work (on a device: after one synchronisation). clamp: cut to [entry before, S], counted in
// `status`. automatic: checked on the host, clamp on a device.
enum class SequenceCheck : int32_t { automatic = 0, checked = 1, clamp = 2 };
// sequential: a head's chunks in turn. parallel: summaries of all chunks, the state pass, outputs.
enum class Schedule : int32_t { automatic = 0, sequential = 1, parallel = 2 };

struct Options {
  RotaryPairs rotary_pairs = RotaryPairs::automatic;
  SequenceCheck sequence_check = SequenceCheck::automatic;
  Schedule schedule = Schedule::automatic;
  bool head_norm = false;
  double norm_eps = 1e-5;
  int64_t chunk = 0;  // tokens of a chunk; 0: the lane's
  int64_t workspace_limit_bytes = int64_t{256} << 20;
  int threads = 0;            // cpu lanes; 0: as many as OpenMP offers
  std::string lane = "auto";  // or a lane's name: a named lane that declines is an error
};

// What one token hands to the next.
struct States {
  Tensor angle;  // [n, H, A] fp32, radians; as a result in [0, 2 pi)
  Tensor ssm;    // [n, H, P, N] fp32: h
  Tensor k;      // [n, R, H, N], R = 1 also [n, H, N]: biased, rotated key of the token before
  Tensor v;      // [n, H, P]: its v, not projected
};

// Absent tensors are neutral: zeros, ones for mimo_* and norm_weight; no z: no gate.
struct Inputs {
  Tensor q;            // [B, S, R, G, N], R = 1 also [B, S, G, N]
  Tensor k;            // as q
  Tensor v;            // [B, S, H, P]
  Tensor z;            // as v
  Tensor adt;          // [B, H, S] fp32: log of a step's decay
  Tensor dt;           // [B, H, S] fp32: a step's length
  Tensor trap;         // [B, H, S]: logit of lambda
  Tensor angles;       // [B, S, H, A], or [B, S, 1, A] shared by the heads: a rate, before tanh
  Tensor q_bias;       // [H, R, N], R = 1 also [H, N]
  Tensor k_bias;       // as q_bias
  Tensor d;            // [H]: skip
  Tensor mimo_v;       // [H, R, P]
  Tensor mimo_z;       // [H, R, P]; needs z
  Tensor mimo_out;     // [H, R, P]
  Tensor norm_weight;  // [H, P]; needs head_norm
  Tensor cu_seqlens;   // [n + 1] int32: packed sequences, B = 1
  States initial_states;
  Tensor d_out;           // backward: gradient of out; absent: zeros
  Tensor saved;           // backward: from the forward call on the same problem, lane and chunk
  States d_final_states;  // backward: gradients of the final states
};

// Each as the tensor it belongs to; its dtype, or fp32. d_angles is [B, S, H, A], or [B, S, 1, A]
// summed over the heads, as its shape says.
struct Gradients {
  Tensor q, k, v, z, adt, dt, trap, angles;
  Tensor q_bias, k_bias, d, mimo_v, mimo_z, mimo_out, norm_weight;
  States initial_states;
  // Those of biases, d, mimo_* and norm_weight are added to their (fp32) buffers.
  bool accumulate_parameters = false;
};

// What is present is computed.
struct Outputs {
  Tensor out;    // [B, S, H, P]; with R > 1 and no mimo_out [B, S, R, H, P]
  Tensor saved;  // [saved_bytes] u8, opaque: checkpoints for backward
  Tensor
      status;  // [4] int64: bad entries of cu_seqlens, the first one's place, its value, bad slots
  States final_states;
  Gradients d;
};

struct StepArguments {
  Inputs in;      // one token: [B, ...] without the axis S; no cu_seqlens, initial_states, d_*
  Tensor slots;   // [B] int32: rows of `state`; -1: skip. Absent: entry i has row i
  Tensor out;     // [B, H, P]; with R > 1 and no mimo_out [B, R, H, P]
  Tensor status;  // as in Outputs
  States state;   // updated in place; n rows, n >= B without slots;
                  // ssm, k and v are needed, angle where A > 0
};

// With whom this call is shared.
// heads: each rank holds heads [head_begin, head_begin + H) of total_heads, and of total_groups
// groups either all or those from the one that its first head reads on. Where ranks share a group,
// d_q, d_k (and d_angles where shared) are summed over them; all else stays with its rank.
// sequence: each rank holds tokens [token_begin, token_begin + S) of every sequence, or of the pack
// with cu_seqlens of the whole pack. Initial and final states and their gradients are those of the
// whole sequences, alike on all ranks; parameter gradients are the rank's own share.
struct Ranks {
  Communicator* heads = nullptr;  // null: the world of one
  Communicator* sequence = nullptr;
  int64_t head_begin = 0;
  int64_t total_heads = 0, total_groups = 0;  // 0: this rank's own are all that it needs to know
  int64_t token_begin = 0;
  // Angles [B, S, 1, A] are those of all ranks' heads, and d_angles their sum. To be said only
  // where no rank holds more than one head: a shape says it of several.
  bool shared_angles = false;
  bool handshake = true;  // compare shapes, options and pieces before any work
};

// The problem as a value: what a lane decides on. Its views have no addresses.
struct Problem {
  Pass pass = Pass::forward;
  int64_t batch = 0, tokens = 0, heads = 0, groups = 0, rank = 1;
  int64_t state_dim = 0;   // N
  int64_t head_dim = 0;    // P
  int64_t pairs = 0;       // A
  int64_t sequences = 0;   // n: B, or that of cu_seqlens
  int64_t state_rows = 0;  // step: rows of the state caches
  bool packed = false;
  bool rank_axis = false;      // q is [B, S, R, G, N]
  bool shared_angles = false;  // angles are [B, S, 1, A]
  bool sum_angles = false;     // d_angles is [B, S, 1, A]: summed over the heads
  bool reduce = true;          // out has no axis R
  RotaryPairs rotary_pairs = RotaryPairs::interleaved;  // never automatic
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;
  DType dtype = DType::f32;      // of q
  int64_t alignment_bytes = 16;  // largest power of two (<= 256) dividing the addresses of q, k, v,
                                 // z, out, d_out and of the gradients of the first four
  Inputs in;                     // dtypes, shapes, strides; in a step with an axis S of 1
  Outputs out;
  Tensor slots;
  States state;  // step
  int heads_rank = 0, heads_world = 1, sequence_rank = 0, sequence_world = 1;
  int64_t head_begin = 0, token_begin = 0;
  int64_t total_heads = 0, total_groups = 0;
  int64_t heads_per_group = 1, head_offset = 0;  // of the first head within the first group
  bool handshake = true;
  Options options;

  // The group of this rank's q and k that its head h reads.
  int64_t group_of(int64_t head) const { return (head_offset + head) / heads_per_group; }

  bool backward() const { return pass == Pass::backward; }
};

struct ProductFact {
  std::string name;      // "Q K^T"
  double per_chunk = 1;  // how often it is formed for a chunk and head
  double flops = 0;      // over the call, as run
};

struct ExchangeFact {
  std::string name;        // "turns of the pieces"
  std::string collective;  // "all_gather"
  int64_t bytes = 0;       // that this rank sends
};

// What ran, how, and at what cost: the library's half of a receipt.
struct Result {
  std::string lane;
  std::string lane_kind;  // "native kernel", "reference", "unfused comparison"
  std::vector<LaneDecline> declined;
  Pass pass = Pass::forward;
  RotaryPairs rotary_pairs = RotaryPairs::interleaved;
  Schedule schedule = Schedule::sequential;
  int64_t chunk_tokens = 0, chunk_rows = 0;  // 0: the lane has no chunks
  int threads = 1;
  std::string memory_order;  // of q, slowest axis first: "b s r g n"
  std::string state_home;    // "registers", "shared memory", "workspace"
  std::string state_dtype;
  std::string accumulator_angle, accumulator_decay, accumulator_state, accumulator_state_gradient;
  std::string accumulator_rows;  // dq, dk, dv
  std::string accumulator_parameters;
  std::string accumulator_groups;  // in what d_q and d_k are summed over the heads of a group
  std::vector<ProductFact> products;
  std::string shared_product;   // backward: what dO V^T, formed once, serves
  int64_t per_head_bytes = 0;   // of whole per-head row tensors [B, S, R, H, N] that existed
  int64_t quadratic_bytes = 0;  // of whole [S, S] tensors that existed
  bool states_from_saved = false;
  int64_t segment_chunks = 0;  // J of the checkpoints
  int64_t saved_bytes = 0;
  int64_t workspace_bytes = 0;  // declared by the formula and given by the caller
  double flops = 0;             // of the products that were run
  std::vector<ExchangeFact> exchanges;
  // -1: the count lives in device memory and was not read (no synchronisation).
  int64_t padding_tokens = -1, bad_entries = -1, bad_slots = -1;
  std::vector<std::string> notes;
};

// Derives the problem from the arguments and makes all checks that need no data. Throws.
Problem describe(Pass pass, const Inputs& inputs, const Outputs& outputs, const Options& options,
                 const Ranks& ranks = {});
Problem describe(const StepArguments& arguments, const Options& options);

// Bytes that the lane which would run needs, and of its `saved` tensor; exact. Throw as the call
// would.
int64_t workspace_bytes(const Problem& problem);
int64_t saved_bytes(const Problem& problem);

// Which lane would take the problem and why the others decline; touches no data.
LaneChoice explain(const Problem& problem);

// With device tensors all work is queued on `stream`, without allocation or synchronisation.
Result forward(const Inputs& inputs, const Outputs& outputs, const Options& options,
               Workspace workspace, const Ranks& ranks = {}, Stream stream = nullptr);
Result backward(const Inputs& inputs, const Outputs& outputs, const Options& options,
                Workspace workspace, const Ranks& ranks = {}, Stream stream = nullptr);
Result step(const StepArguments& arguments, const Options& options, Workspace workspace,
            Stream stream = nullptr);

// Throws Error(invalid_data) where a host copy of `status` counts a bad entry or slot.
void require_clean(const int64_t status[4]);

// Useful multiply-adds times 2 of a problem's products over chunks of `chunk` tokens: the limit
// that times are compared with.
double useful_flops(const Problem& problem, int64_t chunk);

// Names of the lanes, best first.
std::vector<std::string> lanes();

}  // namespace talea::mamba3
