#!/bin/sh
# The exported symbols of libtalea.so are exactly those of the golden list.
# usage: check_symbols.sh libtalea.so symbols.golden
set -eu
found=$(nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort)
if [ "$found" != "$(cat "$2")" ]; then
  echo "exported symbols differ from $2:"
  printf '%s\n' "$found" | diff "$2" - || exit 1
fi
