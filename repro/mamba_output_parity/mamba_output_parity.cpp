// What: a model class whose output layer is swapped for a fused one with the wrong contract.
// Why: the forward loss is equal, so the swap looks done; the gradient's scale is not.
// Never: runs ranks as processes; 8 ranks are 8 slices of one batch here.
#include "repro/support/peak.hpp"
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

constexpr int64_t ranks = 8;

Data slice(const Data& d, int64_t rank) {
  Data part = d;
  part.tokens = d.tokens / ranks;
  part.x.assign(d.x.begin() + rank * part.tokens * d.hidden,
                d.x.begin() + (rank + 1) * part.tokens * d.hidden);
  part.y.assign(d.y.begin() + rank * part.tokens, d.y.begin() + (rank + 1) * part.tokens);
  return part;
}

// Each rank divides by its own tokens; the gradient of the shared weight is summed over ranks.
Answer local_mean(const Data& d, double given, const std::string& lane) {
  Answer a;
  a.dw.assign(d.w.size(), 0);
  for (int64_t k = 0; k < ranks; ++k) {
    Data part = slice(d, k);
    if (given > 0) {
      part.options.denominator = Denominator::given;
      part.options.denominator_value = given;
    }
    const Answer one = run(part, lane);
    a.loss += given > 0 ? one.loss : one.loss / ranks;
    for (size_t i = 0; i < a.dw.size(); ++i) a.dw[i] += one.dw[i];
  }
  return a;
}

void denominators(Report& r) {
  const Data d = make_data(ranks * 1024, 8, 64, 211);
  const Answer truth = run(d, "reference");
  const Answer bad = local_mean(d, 0, "reference");
  double dot = 0, size = 0;
  for (size_t i = 0; i < bad.dw.size(); ++i) {
    dot += bad.dw[i] * truth.dw[i];
    size += truth.dw[i] * truth.dw[i];
  }
  r.figure("loss, 8 ranks x 1024 tokens with local means, minus the loss over 8192",
           bad.loss - truth.loss);
  r.figure("factor between the two gradients", dot / size);
  r.broken("dW with local means over 8 ranks", relative_l2(bad.dw, truth.dw), 6.5);
  const Answer good = r.fixed([&] { return local_mean(d, 8192, "auto"); }, [&] { return bad; });
  r.ours("dW with the global denominator 8192", relative_l2(good.dw, truth.dw), 1e-5);
}

// Running sum of exponentials in the dtype of execution: drifts with V.
double bf16_sum_error(int64_t vocab) {
  const Data d = make_data(1, 8, vocab, 212, 1.0);
  const auto z = logits_of(d);
  const PlainRow row = softmax_row(z.data(), vocab);
  float sum = 0;
  for (int64_t v = 0; v < vocab; ++v)
    sum = round_to_bf16(sum + static_cast<float>(std::exp(z[v] - row.max)));
  return std::abs(row.max + std::log(sum) - row.lse);
}

void accumulators(Report& r) {
  for (int64_t vocab : {256, 4096})
    r.figure("error of the loss in nats, bf16 sum over V = " + std::to_string(vocab),
             bf16_sum_error(vocab));
  r.broken("error of the loss in nats, bf16 sum over V = 65536", bf16_sum_error(65536), 0.5);
}

// Each shard gathers logit[y - v0] without asking whether y is its own, and the parts are added.
void partition(Report& r) {
  const Data d = make_data(32, 8, 64, 213);
  const Answer truth = run(d, "reference");
  const auto z = logits_of(d);
  const int64_t shard = d.vocab / ranks;
  double loss = 0;
  for (int64_t t = 0; t < d.tokens; ++t) {
    double gathered = 0;
    for (int64_t k = 0; k < ranks; ++k)
      gathered +=
          z[t * d.stored + k * shard + std::clamp<int64_t>(d.y[t] - k * shard, 0, shard - 1)];
    loss += (softmax_row(&z[t * d.stored], d.vocab).lse - gathered) / static_cast<double>(d.tokens);
  }
  r.broken("loss with out-of-partition targets not masked", relative(loss, truth.loss), 0.05);
  const Answer good = run(d, "auto");
  r.ours("loss", r.fix_disabled() ? relative(loss, truth.loss) : relative(good.loss, truth.loss),
         1e-6);
}

// Smoothing and z-loss in the reported loss but outside the fused gradient.
void penalties(Report& r) {
  Data d = make_data(32, 8, 64, 214, 3.0);
  d.options.label_smoothing = 0.1;
  d.options.z_loss = 1e-2;
  const Answer truth = run(d, "reference");
  Data bare = d;
  bare.options.label_smoothing = bare.options.z_loss = 0;
  const Answer bad = run(bare, "reference");
  r.broken("dX with smoothing and z-loss outside the gradient", relative_l2(bad.dx, truth.dx),
           0.02);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return bad; });
  r.ours("dX with smoothing and z-loss inside", relative_l2(good.dx, truth.dx), 1e-5);
}

// A parity probe that gathers to [S, B, V], under a hard limit where the fused call fits.
void probe(Report& r) {
  const double tokens = 4.0 * 4096, vocab = 151936;
  r.figure("bytes of [S,B,V] bf16 logits at B 4, S 4096, V 151936", 2 * tokens * vocab);
  r.figure("the same with their gradient", 4 * tokens * vocab);
  r.figure("bytes of 4096 columns of the same rows", 2 * tokens * 4096);
  Data d = make_data(2048, 16, 16384, 215, 2.0);
  d.options.threads = 1;
  d.options.workspace_limit_bytes = int64_t{4} << 20;
  const double limit = 48.0 * (1 << 20);  // a full tensor of this problem is 128 MiB
  const Peak gathered = measure_peak([&] { logits_of(d); }, limit);
  const Peak fused = measure_peak([&] { run(d, "auto"); }, limit);
  r.broken("probe that gathers [S,B,V] under 48 MiB (1 = out of memory)",
           gathered.finished ? 0.0 : 1.0, 0.5);
  r.ours("fused call under the same limit (0 = finished)",
         (r.fix_disabled() ? gathered.finished : fused.finished) ? 0.0 : 1.0, 0.0);
  const Peak free_run = measure_peak([&] { logits_of(d); });
  r.memory("measured peak against the gathered probe", fused.finished ? fused.bytes : -1,
           free_run.finished ? free_run.bytes : 0, 0.35);
}

void run_all(Report& r) {
  denominators(r);
  accumulators(r);
  partition(r);
  penalties(r);
  probe(r);
}

}  // namespace

extern const Reproducer mamba_output_parity{
    "mamba_output_parity", "B20 B8", "a swapped output layer: equal loss, gradients off", run_all};

}  // namespace talea::repro
