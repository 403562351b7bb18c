// What: writes valid files for the fuzzers to start from.
// Why: made by the writers themselves, so that they never lag behind a format.
// Never: runs in a test; usage: fuzz_seeds DIRECTORY.
#include <filesystem>
#include <fstream>

#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "report/sample.hpp"

using namespace talea;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::filesystem::path root = argv[1];
  for (const char* name : {"npy", "safetensors", "receipt", "options"})
    std::filesystem::create_directories(root / name);
  const io::HostTensor matrix = io::allocate_tensor(DType::f32, {2, 3});
  const io::HostTensor ids = io::allocate_tensor(DType::i64, {5});
  const io::HostTensor half = io::allocate_tensor(DType::bf16, {4});
  io::write_npy(root / "npy/matrix", matrix.view);
  io::write_npy(root / "npy/ids", ids.view);
  io::write_safetensors(root / "safetensors/one", {{"t", half.view}});
  io::write_safetensors(root / "safetensors/three",
                        {{"a", matrix.view}, {"b.c", ids.view}, {"d", half.view}}, {{"k", "v"}});
  for (const report::NamedReceipt& named : testing::sample_receipts()) {
    if (named.file == "train.json") continue;  // long curves teach the fuzzer little
    // Compact text leaves more of the fuzzer's bytes for structure.
    std::ofstream(root / "receipt" / named.file)
        << nlohmann::json::parse(named.receipt.text()).dump();
  }
  std::ofstream(root / "options/all")
      << "--reduction\nmean\n--denominator\n4096.5\n--denominator-scope\nglobal\n--on-empty\nzero\n"
         "--target-check\nchecked\n--ignore-index\n-1\n--label-smoothing\n0.1\n--z-loss\n1e-4\n"
         "--softcap\n30\n--logit-scale\n0.5\n--vocab\n5\n--lane\ncpu\n--threads\n2";
  std::ofstream(root / "options/outputs")
      << "--outputs\nloss,lse,target_logprob,entropy,argmax,topk:5,dx,dw,db\n--hidden\n"
         "w.safetensors:lm_head\n--dtype\nbf16\n--workspace-limit\n256MiB";
  return 0;
}
