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
bin=build/fuzz/bin
work=build/fuzz/corpus
"$bin/fuzz_seeds" "$work/seeds"
names=("$@")
if [ $# -eq 0 ]; then
  for source in tests/fuzz/*_fuzz.cpp; do names+=("$(basename "$source" .cpp)"); done
fi
for name in "${names[@]}"; do
  kind=${name%_fuzz}
  mkdir -p "$work/$kind" "$work/seeds/$kind" build/fuzz/crashes
  printf '%s: %s s\n' "$name" "$seconds"
  log=build/fuzz/$name.log
  if ! "$bin/$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=16384 \
    -dict=tests/fuzz/json.dict -artifact_prefix="build/fuzz/crashes/$kind-" -verbosity=0 \
    -print_final_stats=1 "$work/$kind" "$work/seeds/$kind" >"$log" 2>&1; then
    tail -n 60 "$log"
    echo "$name failed; repeat with: $bin/$name build/fuzz/crashes/$kind-..."
    exit 1
  fi
  grep -E '^stat::(number_of_executed_units|new_units_added|peak_rss_mb)' "$log"
done
