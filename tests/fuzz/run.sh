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
if [ $# -gt 0 ]; then names=("$@"); else names=(); for s in tests/fuzz/*_fuzz.cpp; do names+=("$(basename "$s" .cpp)"); done; fi
for name in "${names[@]}"; do
  kind=${name%_fuzz}
  mkdir -p "$work/$kind" "$work/seeds/$kind" build/fuzz/crashes
  printf '%s: %s s\n' "$name" "$seconds"
  "$bin/$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=16384 \
    -dict=tests/fuzz/json.dict -artifact_prefix="build/fuzz/crashes/$kind-" -verbosity=0 \
    -print_final_stats=1 "$work/$kind" "$work/seeds/$kind" 2>&1 | grep -Ev '^(INFO|Dictionary)' || {
      echo "$name failed; repeat with: $bin/$name build/fuzz/crashes/$kind-*"; exit 1; }
done
