#!/usr/bin/env bash
# What: what tools/fresh says where it cannot do its work.
# Why: no root user and no mmdebstrap are exit 3 with words, which CI tells from a failure.
# Never: makes a root; `make fresh` and CI do.
# usage: fresh_test.sh SOURCE_DIR
set -euo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# expect CODE WORDS COMMAND...
expect() {
  local code=0 want=$1 words=$2
  shift 2
  "$@" >"$work/said" 2>&1 </dev/null || code=$?
  if [ $code != "$want" ] || ! grep -q -- "$words" "$work/said"; then
    echo "expected exit $want and '$words' from: $*; got exit $code and:" && cat "$work/said" && exit 1
  fi
}

expect 2 '--frob' "$source/tools/fresh" --frob
expect 2 '--root needs a value' "$source/tools/fresh" --root
expect 2 '--limit 0' "$source/tools/fresh" --limit 0
expect 2 'holds one suite' "$source/tools/fresh" --root "$work/root" bookworm trixie
expect 0 'usage: tools/fresh' "$source/tools/fresh" --help
mkdir "$work/bin"
for tool in bash env id dirname sed grep; do ln -s "$(command -v $tool)" "$work/bin/"; done
printf '#!/bin/sh\nif [ "$1" = -u ]; then echo %s; else echo somebody; fi\n' 1000 >"$work/id"
chmod +x "$work/id"
rm "$work/bin/id" && cp "$work/id" "$work/bin/id"
expect 3 'needs the root user; this is somebody' env PATH="$work/bin" bash "$source/tools/fresh"
sed -i 's/echo 1000/echo 0/' "$work/bin/id"
expect 3 'mmdebstrap is missing' env PATH="$work/bin" bash "$source/tools/fresh"
