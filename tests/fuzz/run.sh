#!/usr/bin/env bash
# What: builds every fuzzer and runs each for a while: tests/fuzz/run.sh [SECONDS] [NAME...]
# Why: CI and people run the same command; a crash leaves its input and the line that repeats it.
# Never: keeps a corpus in the repository; the seeds are made by the project's own writers.
set -euo pipefail
seconds=${1:-60}
shift || true
cd "$(dirname "$0")/../.."
cmake --preset fuzz >/dev/null
cmake --build build/fuzz --target fuzzers
export LSAN_OPTIONS=suppressions=$PWD/tests/sanitizers/lsan.supp  # threads of lanes cpu
bin=build/fuzz/bin
work=build/fuzz/corpus
"$bin/fuzz_seeds" "$work/seeds"
names=("$@")
if [ $# -eq 0 ]; then
  for source in tests/fuzz/*_fuzz.cpp; do names+=("$(basename "$source" .cpp)"); done
fi

fuzz_one() {
  local name=$1 kind=${1%_fuzz} log=build/fuzz/$1.log
  mkdir -p "$work/$kind" "$work/seeds/$kind" build/fuzz/crashes
  if ! "$bin/$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=16384 \
    -dict=tests/fuzz/json.dict -artifact_prefix="build/fuzz/crashes/$kind-" -verbosity=0 \
    -print_final_stats=1 "$work/$kind" "$work/seeds/$kind" >"$log" 2>&1; then
    tail -n 60 "$log"
    echo "$name failed; repeat with: $bin/$name build/fuzz/crashes/$kind-..."
    return 1
  fi
  echo "$name: $seconds s, $(sed -nE 's/^stat::(number_of_executed_units|new_units_added|peak_rss_mb): */\1 /p' \
    "$log" | paste -sd, | sed 's/,/, /g')"
}

# FUZZ_JOBS at a time: each fuzzer keeps one core busy.
failed=0 jobs=${FUZZ_JOBS:-2}
for ((i = 0; i < ${#names[@]}; i += jobs)); do
  pids=()
  for name in "${names[@]:i:jobs}"; do
    fuzz_one "$name" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
done
exit $failed
