// What: everything a training run depends on, as plain values.
// Why: a run is repeated from its receipt; what is not in here may not change a bit of it.
// Never: reads a file or the environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "talea/communicator.hpp"

namespace talea::train {

struct ModelConfig {
  std::string form = "transformer";  // or "tiny": embedding, RMSNorm, linear, SwiGLU, linear
  std::string mixer = "attention";   // of the transformer's blocks
  int64_t vocab = 256;
  int64_t hidden = 64;
  int64_t ffn = 128;
  int64_t heads = 4;
  int64_t layers = 2;
  bool tied = false;  // the head is the embedding (transformer only)
  double rope_base = 10000;
  double norm_eps = 1e-5;
};

enum class OptimizerKind { adamw, sgd };
enum class Schedule { constant, linear, cosine };

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::adamw;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0;   // of SGD
  double clip_norm = 1;  // 0: no clipping
  Schedule schedule = Schedule::constant;
  int64_t warmup_steps = 0;
  int64_t schedule_steps = 0;  // where linear and cosine reach min_lr; 0: the run's length
  double min_lr = 0;
};

// How the micro-steps of a window share the loss.
enum class Accumulation {
  mean_of_means,  // every micro-step's mean, divided by the number of micro-steps in the window
  total_tokens,   // every micro-step's sum, divided by the valid tokens of the whole window
};

struct DataConfig {
  std::string stream = "text";
  std::vector<std::string> text_files;
  int64_t seq_len = 8;
  int64_t batch = 1;  // sequences of a micro-step
  int64_t epochs = 1;
  int64_t total_tokens = 0;  // drawn in one epoch; 0: the whole text
};

struct TrainConfig {
  ModelConfig model;
  OptimizerConfig optimizer;
  DataConfig data;
  Accumulation accumulation = Accumulation::mean_of_means;
  int64_t grad_accum = 8;
  int64_t max_steps = 0;  // 0: all epochs
  uint64_t seed = 42;
  double label_smoothing = 0;
  double z_loss = 0;
  std::string loss_lane = "auto";
  std::string reference_lane = "reference";
  int threads = 1;  // 0: as many as OpenMP offers; models of this size gain nothing from more
  // Of the candidate's loss: vocabulary shards, as threads, or over `world` (which is not owned and
  // no part of what the run is).
  int ranks = 1;
  bool sequence_parallel = false;
  Communicator* world = nullptr;
};

}  // namespace talea::train
