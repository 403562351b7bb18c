#!/usr/bin/env bash
# What: the proofs of docs/prove.md: three architectures with random weights, on this machine.
# Why: the receipts of receipts/prove can be made again with one command.
# Never: downloads a model.
# usage: bench/prove.sh [--cuda] [PYTHON] [NAME...]     PYTHON has the wheel, PyTorch and transformers
#        --cuda: on the GPU, 4096 tokens in bf16: NAME_cuda.json (else on the CPU, 1024 in fp32)
set -euo pipefail
cd "$(dirname "$0")/.."
how=(--device cpu --tokens 1024 --seconds 3) suffix=''
if [ "${1:-}" = --cuda ]; then
  how=(--device cuda --dtype bf16 --tokens 4096 --seconds 1) suffix=_cuda
  shift
fi
python=${1:-build/python-venv/bin/python}
[ $# = 0 ] || shift
[ $# -gt 0 ] || set -- llama gemma2_softcap qwen2_tied_padded
mkdir -p receipts/prove
for name in "$@"; do
  "$python" -m talea.prove "bench/prove/$name.json" --text LICENSE "${how[@]}" \
    --receipt "receipts/prove/$name$suffix.json" --report "receipts/prove/$name$suffix.html"
done
