#!/usr/bin/env bash
# What: the receipts of receipts/h200: one `talea bench` a row of the table; with a Python that has
#       PyTorch, the peers too.
# Why: every figure of the GPU lanes comes from one command on one machine.
# Never: spreads one row over GPUs: its lanes and its plain products take turns on one; hides a run
#        that failed.
# usage, in the project's root on a machine with a Hopper GPU, after `make cuda`:
#   bench/h200.sh [--gpus 0,1,2,3] [--keep FOLDER] [--no-peers] [build/cuda/bin/talea] [receipts/h200]
# --keep: a copy of each receipt goes there once it is written: a run that is cut loses one row, not all.
set -euo pipefail
gpus=0 peers=yes keep=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --gpus) gpus=$2; shift 2 ;;
    --keep) keep=$2; shift 2 ;;
    --no-peers) peers=no; shift ;;
    *) echo "$1: not an option" >&2; exit 2 ;;
  esac
done
export talea=${1:-build/cuda/bin/talea} out=${2:-receipts/h200} gpus keep
mkdir -p "$out" ${keep:+"$keep"}

# One GPU a process slot; of a row that failed the receipt of an earlier run goes, too.
row() {
  local name=$1 log
  shift
  log=$(mktemp)
  if CUDA_VISIBLE_DEVICES=$(cut -d, -f$((GPU_SLOT + 1)) <<<"$gpus") "$talea" bench --repeats 9 \
    --progress none --receipt "$out/$name.json" "$@" >"$log" 2>&1; then
    printf '== %s\n%s\n' "$name" "$(<"$log")"
    rm "$log"
    if [ -n "$keep" ]; then cp "$out/$name.json" "$keep"; fi
  else
    printf '== %s: failed\n%s\n' "$name" "$(<"$log")" >&2
    rm -f "$log" "$out/$name.json"
    return 1
  fi
}
export -f row

at() { echo "--dtype ${4:-bf16} --tokens $1 --hidden $2 --vocab $3"; }
base=$(at 8192 4096 128256)
options="--inputs bias,token_weight --label-smoothing 0.1 --z-loss 1e-4 --softcap 30"
options+=" --outputs loss,dx,dw,entropy,topk:5"
both="--lanes sm90,cuda"
rows() {
  cat <<ROWS
training $base $both --limits 1050MiB,530MiB,265MiB,135MiB
all_options $base $both --limits 530MiB $options --also-plain
training_16384 $(at 16384 4096 128256) $both --limits 530MiB
late_upstream $base $both --limits 256MiB --reduction none --inputs upstream --late-upstream
dw_bf16 $base --lanes sm90 --limits 2100MiB,256MiB --dw weight
ignored_70 $base $both --limits 530MiB --ignored-fraction 0.7 --also-plain
loss_only $base --lanes sm90 --limits 32MiB --outputs loss
training_peaked $base $both --limits 530MiB --spread 8
training_4096 $(at 4096 4096 128256) $both --limits 530MiB
training_v256000 $(at 8192 2304 256000) $both --limits 1050MiB
training_v151936 $(at 8192 3584 151936) $both --limits 620MiB
aligned_v152064 $(at 8192 3584 152064) --lanes sm90 --limits 620MiB
ragged_8191 $(at 8191 3584 151936) $both --limits 620MiB
ragged_v50257 $(at 8192 4096 50257) $both --limits 530MiB
aligned_v50304 $(at 8192 4096 50304) $both --limits 530MiB
ragged_v201088 $(at 8192 2880 201088) $both --limits 620MiB
aligned_v201216 $(at 8192 2880 201216) --lanes sm90 --limits 620MiB
shard_v16032 $(at 8192 4096 16032) $both --limits 530MiB
aligned_v16128 $(at 8192 4096 16128) --lanes sm90 --limits 530MiB
softcap $base --lanes cuda --limits 530MiB --softcap 30
top_k $base --lanes cuda --limits 530MiB --outputs loss,dx,dw,topk:5
loss_only_cuda $base --lanes cuda --limits 32MiB,530MiB --outputs loss
training_fp16 $(at 8192 4096 128256 fp16) $both --limits 530MiB
ROWS
  for n in 1 8 64 256; do
    echo "loss_only_n$n $(at $n 4096 128256) --lanes sm90 --limits 32MiB --outputs loss"
  done
}
rows | xargs -P "$(tr , '\n' <<<"$gpus" | wc -l)" --process-slot-var=GPU_SLOT -L 1 \
  bash -c 'row "$@"' row
if [ $peers = yes ] && python3 -c 'import torch' 2>/dev/null; then
  TALEA_LIBRARY=$(dirname "$talea")/../lib/libtalea.so PYTHONPATH=python \
    python3 bench/peers.py --samples 5 --receipt "$out/peers.json"
  if [ -n "$keep" ]; then cp "$out/peers.json" "$keep"; fi
  python3 tools/peer_page
fi
tools/check_figures --write docs/h200.md docs/peers.md
