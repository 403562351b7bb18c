#!/bin/sh
# The exported symbols of libtalea.so are exactly those of the golden list, and header, SONAME and
# symbol version carry one number.
# usage: check_symbols.sh libtalea.so symbols.golden talea.h
set -eu
found=$(nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort)
if [ "$found" != "$(cat "$2")" ]; then
  echo "exported symbols differ from $2:"
  printf '%s\n' "$found" | diff "$2" - || exit 1
fi
abi=$(awk '$1 == "#define" && $2 == "TALEA_ABI_VERSION" { print $3 }' "$3")
soname=$(objdump -p "$1" | awk '$1 == "SONAME" { print $2 }')
version=$(nm -D --defined-only "$1" | awk '$2 == "A" { sub(/@.*/, "", $3); print $3 }')
if [ "$soname $version" != "libtalea.so.$abi TALEA_$abi" ]; then
  echo "TALEA_ABI_VERSION $abi, but SONAME $soname and symbol version $version"
  exit 1
fi
