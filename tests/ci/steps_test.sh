#!/usr/bin/env bash
# What: the steps of CI from outside: what passes, what fails, what hangs.
# Why: a runner that lost an exit code would be green for ever, and one that waits is killed unnamed.
# Never: runs a real step.
# usage: steps_test.sh SOURCE_DIR
set -euo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# expect CODE WORDS SCRIPT: the script after `. steps.sh` ends with CODE and says WORDS.
expect() {
  local code=0
  mkdir -p "$work/logs" && rm -f "$work/logs"/*
  (cd "$source" && logs=$work/logs bash -euo pipefail -c ". .ci/steps.sh; $3") >"$work/said" 2>&1 || code=$?
  if [ $code != "$1" ] || ! grep -qE "$2" "$work/said"; then
    echo "expected exit $1 and '$2' from: $3; got exit $code and:" && cat "$work/said" && exit 1
  fi
}

expect 0 '^one +[0-9]+ +[0-9]+ +60$' 'step one 60 true; step two 60 echo 3'
expect 0 '^in all' 'step one 60 true'
expect 0 '^5 passed in 2 s' 'step tests 60 echo "5 passed in 2 s"; step last 60 true'
expect 7 'ci: failed in: two' 'step one 60 true; step two 60 bash -c "exit 7"; step three 60 true'
expect 7 '^two +failed' 'step two 60 bash -c "exit 7"'
expect 1 'ci: hangs: two: no end within 1 s' 'step two 1 sleep 30'
# One that ignores the signal is ended too, with what it started.
expect 1 'ci: hangs: deaf' 'grace=1; step deaf 1 bash -c "trap : TERM; sleep 20; sleep 20"'
expect 1 'ci: failed in: from outside' 'current="from outside"; false'
