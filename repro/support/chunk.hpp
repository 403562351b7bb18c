// What: kernels that show two patterns of a chunk's backward on a device: dO V^T formed once or for
// each use, tiles loaded by bulk tensor copies or by threads.
// Why: what a pattern costs and what it changes is a figure of the chip, not of a host.
// Never: an operator's kernel; these are short, and leave out what the patterns do not touch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "repro/support/repro.hpp"

namespace talea::repro {

// One sequence: rows (token, r) of [tokens, rank, heads, columns], a chunk of 64 rows after
// another.
struct ChunkProblem {
  int64_t tokens, rank, heads;
  static constexpr int64_t rows = 64, n = 128, p = 64;
  int64_t chunks() const { return tokens * rank / rows; }
};

// Which copies load the tiles, how often a chunk forms dO V^T, and a planted edit: of three masks
// one, that of dk, has s where a key meets its own token.
struct ChunkForm {
  bool bulk = true;
  bool once = true;
  bool edited = false;
};

// What the pairs of rows of each chunk give: dq and dk [tokens, rank, heads, n], the same-token
// blocks [heads, tokens, rank rank], the trace of dO V^T [heads, chunks].
struct ChunkGradients {
  std::vector<float> dq, dk, same, trace;
  double products = 0;  // dO V^T a chunk of a head, counted by the blocks that formed it
  double ms = 0;        // of one launch, the fastest of several

  // How many of the four are not the same bits.
  int differ(const ChunkGradients& other) const {
    return (dq != other.dq) + (dk != other.dk) + (same != other.same) + (trace != other.trace);
  }
};

// Where a build has these kernels and the device in use runs them; else `why` says what is missing.
bool has_chunk_kernels(std::string& why);

class ChunkKernels {
 public:
  explicit ChunkKernels(const ChunkProblem& problem);  // bf16 rows drawn on the device

  ChunkGradients run(const ChunkForm& form);
  // Relative L2 beside fp64 of dq and of dk of a head's first chunk, the larger.
  double error(const ChunkGradients& made, int64_t head);

 private:
  struct Drawn;
  std::shared_ptr<const Drawn> drawn_;
};

// Whether the driver describes same-token blocks of rank 4, [tokens, rank, rank] in bf16, to bulk
// copies: as boxes of three axes, or of two, (token, rank rank).
bool describes_blocks(bool flat);

}  // namespace talea::repro
