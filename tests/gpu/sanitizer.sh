#!/usr/bin/env bash
# What: the four tools of compute-sanitizer over a reduced set of the GPU tests.
# Why: out-of-bounds access, races, reads of memory nobody wrote and bad barriers fail the build.
# Never: run over everything: a sanitised kernel is a hundred times slower.
set -uo pipefail
bin=${1:?usage: sanitizer.sh DIRECTORY-OF-THE-TEST-PROGRAMS}
status=0
for tool in memcheck racecheck initcheck synccheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 9 \
    "$bin/talea_tests" --gtest_brief=1 \
    --gtest_filter='*Edges.IgnoredRows*/cuda:*Edges.TopKOfEveryWidth/cuda:*Options.EachOutputAlone/cuda:*Options.SeveralPartsOfARow/cuda:*Edges.IgnoredRows*/sm90:*Edges.TopKOfEveryWidth/sm90:*Options.EachOutputAlone/sm90:*Sm90Slices.E*/sm90' ||
    { echo "$tool: failed" >&2; status=1; }
done
exit $status
