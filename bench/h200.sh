#!/usr/bin/env bash
# What: the receipts of receipts/h200: one `talea bench` a row of the table; with a Python that has
#       PyTorch, the peers too.
# Why: every figure of the GPU lanes comes from one command on one machine.
# Never: keeps going after a run that failed.
# usage, in the project's root on a machine with a Hopper GPU, after `make cuda`:
#   bench/h200.sh [build/cuda/bin/talea] [receipts/h200]
set -euo pipefail
talea=${1:-build/cuda/bin/talea}
out=${2:-receipts/h200}
mkdir -p "$out"
run() {
  local name=$1
  shift
  echo "== $name"
  "$talea" bench --dtype "${dtype:-bf16}" --repeats 7 --progress none --receipt "$out/$name.json" "$@"
}
shape() { echo "--tokens $1 --hidden $2 --vocab $3"; }
# shellcheck disable=SC2046
{
  run training $(shape 8192 4096 128256) --lanes sm90,cuda --limits 1050MiB,530MiB,265MiB,135MiB
  run training_peaked $(shape 8192 4096 128256) --lanes sm90,cuda --limits 530MiB --spread 8
  run training_16384 $(shape 16384 4096 128256) --lanes sm90,cuda --limits 530MiB
  run training_4096 $(shape 4096 4096 128256) --lanes sm90,cuda --limits 530MiB
  run training_v256000 $(shape 8192 2304 256000) --lanes sm90,cuda --limits 1050MiB
  run training_v151936 $(shape 8192 3584 151936) --lanes sm90,cuda --limits 620MiB
  run ragged_8191 $(shape 8191 3584 151936) --lanes sm90,cuda --limits 620MiB
  run ragged_v50257 $(shape 8192 4096 50257) --lanes sm90,cuda --limits 530MiB
  run aligned_v50304 $(shape 8192 4096 50304) --lanes sm90,cuda --limits 530MiB
  run ragged_v201088 $(shape 8192 2880 201088) --lanes sm90,cuda --limits 620MiB
  run shard_v16032 $(shape 8192 4096 16032) --lanes sm90,cuda --limits 530MiB
  run dw_bf16 $(shape 8192 4096 128256) --lanes sm90 --limits 2100MiB,256MiB --dw weight
  run late_upstream $(shape 8192 4096 128256) --lanes sm90,cuda --limits 256MiB --reduction none \
    --inputs upstream --late-upstream
  run loss_only $(shape 8192 4096 128256) --lanes sm90 --limits 32MiB --outputs loss
  run all_options $(shape 8192 4096 128256) --lanes sm90,cuda --limits 530MiB \
    --inputs bias,token_weight --label-smoothing 0.1 --z-loss 1e-4 --softcap 30 \
    --outputs loss,dx,dw,entropy,topk:5
  run softcap $(shape 8192 4096 128256) --lanes cuda --limits 530MiB --softcap 30
  run top_k $(shape 8192 4096 128256) --lanes cuda --limits 530MiB --outputs loss,dx,dw,topk:5
  run loss_only_cuda $(shape 8192 4096 128256) --lanes cuda --limits 32MiB,530MiB --outputs loss
  run ignored_70 $(shape 8192 4096 128256) --lanes sm90,cuda --limits 530MiB \
    --ignored-fraction 0.7
  dtype=fp16 run training_fp16 $(shape 8192 4096 128256) --lanes sm90,cuda --limits 530MiB
  for n in 1 8 64 256; do
    run "loss_only_n$n" $(shape $n 4096 128256) --lanes sm90 --limits 32MiB --outputs loss
  done
}
if python3 -c 'import torch' 2>/dev/null; then
  TALEA_LIBRARY=$(dirname "$talea")/../lib/libtalea.so PYTHONPATH=python \
    python3 bench/peers.py --samples 5 --receipt "$out/peers.json"
  python3 tools/peer_page "$out/peers.json"
fi
python3 tools/h200_page
