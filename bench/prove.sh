#!/usr/bin/env bash
# What: the proofs of docs/prove.md: three architectures with random weights, on this machine's CPU.
# Why: the receipts of receipts/prove can be made again with one command.
# Never: downloads a model.
# usage: bench/prove.sh [PYTHON] [NAME...]     PYTHON has the wheel, PyTorch and transformers
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-build/python-venv/bin/python}
[ $# = 0 ] || shift
[ $# -gt 0 ] || set -- llama gemma2_softcap qwen2_tied_padded
mkdir -p receipts/prove
for name in "$@"; do
  "$python" -m talea.prove "bench/prove/$name.json" --text LICENSE --tokens 1024 --seconds 3 --device cpu \
    --receipt "receipts/prove/$name.json" --report "receipts/prove/$name.html"
done
